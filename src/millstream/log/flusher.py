"""Group commit: appends that wait for the disk share its syncs.

A log with unsynced bytes requests a sync. At the end of the event loop's turn, a small pool of threads syncs every log
that requested one, one sync per log at a time. Appends that arrive during a sync share the next one. So at least as
many requests share a sync as arrived during the sync before it. The next sync starts before the waiting requests of the
last are answered: with many small requests, answering takes longer than a sync, and the disk would be idle.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

THREADS = 4


class Syncable(Protocol):
    def begin_sync(self) -> Callable[[], None] | None:
        """The function to run in a thread; None if there is nothing to sync."""

    def end_sync(self, error: OSError | None, go_on: Callable[[], None]) -> None:
        """Runs on the loop with the sync's outcome; `go_on` starts the next sync if appends wait."""


class Flusher:
    def __init__(
        self, loop: asyncio.AbstractEventLoop, observe: Callable[[float], None] = lambda seconds: None
    ) -> None:
        self._loop = loop
        self._observe = observe
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="sync")
        self._waiting: dict[Syncable, None] = {}
        self._running: set[Syncable] = set()
        self._kicked = False

    def request(self, log: Syncable) -> None:
        self._waiting[log] = None
        if not self._kicked and log not in self._running:
            self._kicked = True
            self._loop.call_soon(self._kick)

    def _kick(self) -> None:
        self._kicked = False
        for log in [log for log in self._waiting if log not in self._running]:
            del self._waiting[log]
            work = log.begin_sync()
            if work is not None:
                self._running.add(log)
                self._threads.submit(self._sync, log, work)

    def _sync(self, log: Syncable, work: Callable[[], None]) -> None:
        began = time.perf_counter()
        failure: OSError | None = None
        try:
            work()
        except OSError as error:
            failure = error
        self._loop.call_soon_threadsafe(self._finish, log, failure, time.perf_counter() - began)

    def _finish(self, log: Syncable, failure: OSError | None, seconds: float) -> None:
        self._running.discard(log)
        self._observe(seconds)
        log.end_sync(failure, self._kick)
        if log in self._waiting:
            self._kick()

    def close(self) -> None:
        self._threads.shutdown()
