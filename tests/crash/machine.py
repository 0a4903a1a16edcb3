"""What the simulated crashes need of a machine: syncs that run when the test says so, threads that are none."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from millstream.log.flusher import Flusher, Syncable


class HandFlusher(Flusher):
    """A sync begins and ends when the test says so: anything can happen in between.

    While it `is_willing`, every request is carried out at once.
    """

    def __init__(self) -> None:
        self.is_willing = False
        self.waiting: dict[Syncable, None] = {}
        self.begun: dict[Syncable, Callable[[], None]] = {}

    def request(self, log: Syncable) -> None:
        self.waiting[log] = None
        if self.is_willing:
            self.run(log)

    def begin(self, log: Syncable) -> None:
        if log in self.begun or log not in self.waiting:
            return
        del self.waiting[log]
        work = log.begin_sync()
        if work is not None:
            self.begun[log] = work

    def end(self, log: Syncable) -> None:
        work = self.begun.pop(log, None)
        if work is None:
            return
        failure: OSError | None = None
        try:
            work()
        except OSError as error:
            failure = error
        log.end_sync(failure, lambda: None)

    def run(self, log: Syncable) -> None:
        self.end(log)
        while log in self.waiting:
            self.begin(log)
            self.end(log)

    def run_all(self) -> None:
        for log in [*self.begun, *self.waiting]:
            self.run(log)

    def close(self) -> None:
        return None


class InlineExecutor(ThreadPoolExecutor):
    """An event loop's default executor that does the work on the spot: one history, one order of events."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future
