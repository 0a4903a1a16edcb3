"""A wake-up for one task, with a timeout by the current clock."""

from __future__ import annotations

import asyncio

from millstream.core.clock import Clock


class Signal:
    """`set` may come at any time and is never lost; `wait` returns at once if it came since the last `wait`."""

    __slots__ = ("_clock", "_future", "_is_set")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._is_set = False
        self._future: asyncio.Future[None] | None = None

    def set(self) -> None:
        self._is_set = True
        if self._future is not None and not self._future.done():
            self._future.set_result(None)

    async def wait(self, seconds: float | None = None) -> bool:
        """Whether it came in time. None waits without a limit."""
        if not self._is_set and (seconds is None or seconds > 0):
            future = self._future = asyncio.get_running_loop().create_future()
            timer = self._clock.call_later(seconds, lambda: _finish(future)) if seconds is not None else None
            try:
                await future
            finally:
                if self._future is future:  # else a cancelled waiter would clear the next one's future
                    self._future = None
                if timer is not None:
                    timer.cancel()
        came, self._is_set = self._is_set, False
        return came


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
