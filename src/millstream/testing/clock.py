"""A clock that moves only when a test advances it."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class VirtualTimer:
    __slots__ = ("callback", "due")

    def __init__(self, due: float, callback: Callable[[], object]) -> None:
        self.due = due
        self.callback: Callable[[], object] | None = callback

    def cancel(self) -> None:
        self.callback = None


class VirtualClock:
    """Implements `millstream.core.clock.Clock`. `advance` runs every timer that falls due, in time order."""

    def __init__(self, start_ms: int = 1_700_000_000_000) -> None:
        self._start_ms = start_ms
        self._seconds = 0.0
        self._timers: list[tuple[float, int, VirtualTimer]] = []
        self._order = itertools.count()

    def now_ms(self) -> int:
        return self._start_ms + round(self._seconds * 1000)

    def monotonic(self) -> float:
        return self._seconds

    def call_later(self, seconds: float, callback: Callable[[], object]) -> VirtualTimer:
        timer = VirtualTimer(self._seconds + max(seconds, 0.0), callback)
        heapq.heappush(self._timers, (timer.due, next(self._order), timer))
        return timer

    def advance(self, seconds: float) -> None:
        target = self._seconds + seconds
        while self._timers and self._timers[0][0] <= target:
            due, _, timer = heapq.heappop(self._timers)
            self._seconds = max(self._seconds, due)
            callback, timer.callback = timer.callback, None
            if callback is not None:
                callback()
        self._seconds = target
