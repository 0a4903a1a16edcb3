"""The clock, as a parameter.

No code in `broker/` reads the system clock. It gets a `Clock`, so that tests can move time by hand
(`millstream.testing.clock.VirtualClock`) and test a 30-second redelivery in milliseconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol


class Timer(Protocol):
    def cancel(self) -> None: ...


class Clock(Protocol):
    def now_ms(self) -> int:
        """Wall-clock time in milliseconds since 1970: for timestamps that users see."""

    def monotonic(self) -> float:
        """Seconds that never go back: for measuring durations."""

    def call_later(self, seconds: float, callback: Callable[[], object]) -> Timer:
        """Calls back once, on the event loop, unless the timer is cancelled first."""


class SystemClock:
    """The machine's clock, with timers on the running event loop."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        return time.monotonic()

    def call_later(self, seconds: float, callback: Callable[[], object]) -> Timer:
        return asyncio.get_running_loop().call_later(seconds, callback)


async def sleep(clock: Clock, seconds: float) -> None:
    """Sleeps by a clock that tests can move."""
    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    timer = clock.call_later(seconds, lambda: None if over.done() else over.set_result(None))
    try:
        await over
    finally:
        timer.cancel()


async def wait(clock: Clock, tasks: Iterable[asyncio.Future[Any]], seconds: float) -> None:
    """Waits until the tasks are done, at most for a time by a clock that tests can move."""
    done = asyncio.ensure_future(asyncio.wait(list(tasks)))
    timer = clock.call_later(seconds, done.cancel)
    try:
        await asyncio.wait([done])
    finally:
        timer.cancel()
        done.cancel()
