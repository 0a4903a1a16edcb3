"""When which block of a queue should be looked at: a lease of it ends, or a wait is over."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from millstream.broker.groups.deadline import Deadline
from millstream.broker.groups.queue.block import Block
from millstream.core.clock import Clock

SLACK_MS = 1_000


class Calendar:
    __slots__ = ("_alarm", "_clock", "_due")

    def __init__(self, clock: Clock, callback: Callable[[], None]) -> None:
        self._clock = clock
        self._alarm = Deadline(clock, callback)
        self._due: list[tuple[int, int]] = []
        """A heap of times and blocks."""

    def watch(self, number: int, block: Block) -> None:
        """Calls back when the block is due, or earlier; one time per block is enough."""
        if block.due >= block.alarm:
            return
        block.alarm = block.due
        heapq.heappush(self._due, (block.due, number))
        if self._due[0][0] == block.due:
            self._alarm.push(max(block.due - self._clock.now_ms(), 0))

    def take_due(self, now: int) -> list[int]:
        """Blocks whose time has come, and is no longer noted."""
        numbers = set()
        while self._due and self._due[0][0] <= now:
            numbers.add(heapq.heappop(self._due)[1])
        if self._due:
            self._alarm.push(max(self._due[0][0] - now, 0))
        return sorted(numbers)

    def is_early(self, now: int) -> bool:
        """Whether the next block is not due for long, when the alarm for it has just rung: the clock was set back."""
        return bool(self._due) and self._due[0][0] - now > SLACK_MS

    def clear(self) -> None:
        self._due.clear()
        self._alarm.stop()
