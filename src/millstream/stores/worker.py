"""Threads that do blocking work for the loop, and promises of its outcome.

`run_in_executor` takes longer than a small commit, with two futures and a lock on each. This has none: work goes in
by a queue, its outcome comes back by one call on the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from millstream.core.promise import Promise

T = TypeVar("T")
_Job = tuple[Callable[[], Any], Promise[Any] | None, asyncio.AbstractEventLoop | None]


class Worker:
    """Threads that start with the first job and take jobs in order of arrival."""

    def __init__(self, name: str, threads: int) -> None:
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._serve, name=f"{name}-{number}", daemon=True) for number in range(threads)
        ]
        self._started = False
        self._closed = False

    def do(self, work: Callable[[], T]) -> Promise[T]:
        if self._closed:
            raise RuntimeError("the worker is closed")
        if not self._started:
            self._started = True
            for thread in self._threads:
                thread.start()
        promise: Promise[T] = Promise()
        self._queue.put((work, promise, asyncio.get_running_loop()))
        return promise

    def wait(self, work: Callable[[], T]) -> T:
        """Does work for a blocking caller, not on the loop's thread; not after `close`."""
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)

        self._queue.put((run, None, None))
        return done.result()

    def _serve(self) -> None:
        while (job := self._queue.get()) is not None:
            work, promise, loop = job
            failed = False
            try:
                outcome = work()
            except BaseException as error:
                outcome, failed = error, True
            if promise is not None and loop is not None:
                with contextlib.suppress(RuntimeError):  # the loop is closed, and no task waits
                    loop.call_soon_threadsafe(promise.fail if failed else promise.settle, outcome)
            del job, work, promise, loop, outcome  # an idle thread keeps no objects alive

    def close(self) -> None:
        """Blocks until all queued work is done."""
        self._closed = True
        if self._started:
            for _ in self._threads:
                self._queue.put(None)
            for thread in self._threads:
                thread.join()
