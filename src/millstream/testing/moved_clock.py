"""The machine's clock, which a test can move forward: real clients need running time, tests need jumps."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable


class MovedTimer:
    __slots__ = ("callback", "due", "handle")

    def __init__(self, due: float, callback: Callable[[], object]) -> None:
        self.due = due
        self.callback: Callable[[], object] | None = callback
        self.handle: asyncio.TimerHandle | None = None

    def cancel(self) -> None:
        self.callback = None
        if self.handle is not None:
            self.handle.cancel()

    def fire(self) -> None:
        callback, self.callback = self.callback, None
        if callback is not None:
            callback()


class MovedClock:
    """Implements `millstream.core.clock.Clock`. Runs by itself; `advance` runs every timer that falls due, in order."""

    def __init__(self, ahead: float = 0.0) -> None:
        self.ahead = ahead
        """Seconds ahead of the machine's."""
        self._timers: list[tuple[float, int, MovedTimer]] = []
        self._order = itertools.count()

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000 + round(self.ahead * 1000)

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead

    def call_later(self, seconds: float, callback: Callable[[], object]) -> MovedTimer:
        timer = MovedTimer(self.monotonic() + max(seconds, 0.0), callback)
        timer.handle = asyncio.get_running_loop().call_later(seconds, timer.fire)
        while self._timers and self._timers[0][2].callback is None:
            heapq.heappop(self._timers)
        heapq.heappush(self._timers, (timer.due, next(self._order), timer))
        return timer

    def advance(self, seconds: float) -> None:
        """Call on the loop's thread."""
        target = self.ahead + seconds
        while self._timers and self._timers[0][0] <= time.monotonic() + target:
            due, _, timer = heapq.heappop(self._timers)
            self.ahead = max(self.ahead, min(due - time.monotonic(), target))
            if timer.handle is not None:
                timer.handle.cancel()
            timer.fire()
        self.ahead = target
        loop = asyncio.get_running_loop()
        for due, _, timer in self._timers:  # the remaining ones are due sooner, too
            if timer.callback is not None and timer.handle is not None:
                timer.handle.cancel()
                timer.handle = loop.call_later(max(due - self.monotonic(), 0.0), timer.fire)
