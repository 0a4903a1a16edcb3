"""Time that moves when it is told to."""

from __future__ import annotations

from millstream.testing.clock import VirtualClock


def test_stands_still_until_advanced() -> None:
    clock = VirtualClock(start_ms=1000)
    assert (clock.now_ms(), clock.monotonic()) == (1000, 0)
    clock.advance(2.5)
    assert (clock.now_ms(), clock.monotonic()) == (3500, 2.5)


def test_runs_timers_in_order_of_time() -> None:
    clock = VirtualClock()
    seen: list[str] = []
    clock.call_later(3, lambda: seen.append("three"))
    clock.call_later(1, lambda: seen.append("one"))
    clock.call_later(1, lambda: seen.append("one again"))
    clock.advance(2)
    assert seen == ["one", "one again"]
    clock.advance(1)
    assert seen == ["one", "one again", "three"]


def test_a_timer_sees_the_time_it_was_due() -> None:
    clock = VirtualClock(start_ms=0)
    seen: list[int] = []
    clock.call_later(1.5, lambda: seen.append(clock.now_ms()))
    clock.advance(10)
    assert seen == [1500]


def test_runs_timers_that_timers_start() -> None:
    clock = VirtualClock(start_ms=0)
    seen: list[int] = []

    def tick() -> None:
        seen.append(clock.now_ms())
        clock.call_later(1, tick)

    clock.call_later(1, tick)
    clock.advance(3.5)
    assert seen == [1000, 2000, 3000]


def test_a_cancelled_timer_does_not_run() -> None:
    clock = VirtualClock()
    seen: list[str] = []
    timer = clock.call_later(1, lambda: seen.append("never"))
    timer.cancel()
    timer.cancel()
    clock.advance(2)
    assert seen == []


def test_a_timer_of_the_past_is_due_at_once() -> None:
    clock = VirtualClock()
    seen: list[str] = []
    clock.call_later(-5, lambda: seen.append("now"))
    clock.advance(0)
    assert seen == ["now"]
