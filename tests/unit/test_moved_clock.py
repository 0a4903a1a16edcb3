"""The machine's time, moved forward."""

from __future__ import annotations

import asyncio

from millstream.testing.moved_clock import MovedClock


async def test_a_timer_that_is_not_due_yet_when_time_is_moved_rings_so_much_sooner() -> None:
    clock = MovedClock()
    rung = asyncio.Event()
    clock.call_later(3600, rung.set)
    clock.advance(3599.9)
    async with asyncio.timeout(20):
        await rung.wait()
