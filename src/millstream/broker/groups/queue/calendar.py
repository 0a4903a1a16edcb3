"""The times at which a lease or a wait ends in the blocks of a queue."""

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
        """A heap of (time, block number)."""

    def watch(self, number: int, block: Block) -> None:
        """Calls back when the block is due, or earlier. Each block needs one entry."""
        if block.due >= block.alarm:
            return
        block.alarm = block.due
        heapq.heappush(self._due, (block.due, number))
        if self._due[0][0] == block.due:
            self._alarm.push(max(block.due - self._clock.now_ms(), 0))

    def take_due(self, now: int) -> list[int]:
        """Removes and returns the blocks that are due."""
        numbers = set()
        while self._due and self._due[0][0] <= now:
            numbers.add(heapq.heappop(self._due)[1])
        if self._due:
            self._alarm.push(max(self._due[0][0] - now, 0))
        return sorted(numbers)

    def is_early(self, now: int) -> bool:
        """Called when the alarm fires. A next block far from due means that the clock was set back."""
        return bool(self._due) and self._due[0][0] - now > SLACK_MS

    def clear(self) -> None:
        self._due.clear()
        self._alarm.stop()
