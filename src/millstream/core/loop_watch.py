"""Measures event-loop stalls with a periodic timer (a beat) that records how late it fires.

A request that computes for long on the event loop delays every other client. Two metrics show it:

    event_loop_stall_seconds     wall-clock time by which a beat was late: the delay for clients, whatever the cause
    event_loop_busy_seconds_max  the most CPU time of the loop's thread between two beats, less the interval:
                                 other processes on a busy machine delay beats, but do not raise this one

Both are short by up to one interval: work that begins right after a beat causes no lateness until the next beat is
due. A beat wakes an idle process, which costs some 0.15 ms of CPU, so servers beat less often (`loop_watch_ms`) than
tests.
"""

from __future__ import annotations

import asyncio
import logging
import time

from millstream.core.metrics import Metrics

logger = logging.getLogger(__name__)

BEAT_SECONDS = 0.02
"""For tests, which detect stalls of 100 ms."""
BUSY_SECONDS_MAX = 0.1
"""The bound for one request; more is logged."""
LOG_SECONDS = 60.0
"""Between two such log lines."""


class LoopWatch:
    def __init__(self, metrics: Metrics, beat_seconds: float = BEAT_SECONDS) -> None:
        self._metrics = metrics
        self._beat_seconds = beat_seconds
        self._handle: asyncio.TimerHandle | None = None
        self._due = self._cpu = 0.0
        self._logged = -LOG_SECONDS

    def start(self) -> None:
        """Watches the running event loop."""
        self._plan(asyncio.get_running_loop())

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _plan(self, loop: asyncio.AbstractEventLoop) -> None:
        self._due = time.monotonic() + self._beat_seconds
        self._cpu = time.thread_time()
        self._handle = loop.call_later(self._beat_seconds, self._beat, loop)

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        now = time.monotonic()
        self._metrics.stall_seconds.observe(max(now - self._due, 0.0))
        busy = time.thread_time() - self._cpu - self._beat_seconds
        if busy > self._metrics.loop_busy_seconds_max:
            self._metrics.loop_busy_seconds_max = busy
        if busy > BUSY_SECONDS_MAX and now - self._logged >= LOG_SECONDS:
            self._logged = now
            logger.warning("event loop blocked for %.0f ms; other clients waited", busy * 1000)
        self._plan(loop)
