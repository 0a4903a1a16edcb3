"""A deadline that is pushed back often.

Heartbeats come far more often than sessions end. Cancelling and arming a timer for each would fill the event loop's
heap with dead timers. So `push` only moves a number; the armed timer compares it when it fires, and re-arms itself for
the rest.
"""

from __future__ import annotations

from collections.abc import Callable

from millstream.core.clock import Clock, Timer

_SLACK_SECONDS = 0.001
"""Timers may fire a rounding error early; re-arming for less than this would spin."""


class Deadline:
    __slots__ = ("_callback", "_clock", "_due", "_timer", "_timer_due")

    def __init__(self, clock: Clock, callback: Callable[[], object]) -> None:
        self._clock = clock
        self._callback = callback
        self._due: float | None = None
        self._timer: Timer | None = None
        self._timer_due = 0.0

    @property
    def armed(self) -> bool:
        return self._due is not None

    def push(self, delay_ms: int) -> None:
        self._due = self._clock.monotonic() + delay_ms / 1000
        if self._timer is None:
            self._arm(self._due)
        elif self._due < self._timer_due:
            self._timer.cancel()
            self._arm(self._due)

    def stop(self) -> None:
        self._due = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, due: float) -> None:
        self._timer_due = due
        self._timer = self._clock.call_later(due - self._clock.monotonic(), self._fired)

    def _fired(self) -> None:
        self._timer = None
        if self._due is None:
            return
        if self._due - self._clock.monotonic() > _SLACK_SECONDS:
            self._arm(self._due)
            return
        self._due = None
        self._callback()
