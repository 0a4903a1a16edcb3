"""Memory for a frame that arrives in pieces, from a budget that all connections of the door share.

The memory is reserved before more of the frame is read. A frame up to `WAITING_BYTES_MAX` waits until there is memory
for all of it, so it can always complete. A larger frame reserves memory as it arrives and does not wait: several such
frames, each with part of its memory, would deadlock. Without memory it loses its connection.
"""

from __future__ import annotations

from collections.abc import Callable

from millstream.doors.memory import Budget
from millstream.wire.flowmq import FrameReader

FREE_BYTES = 4096
"""Every connection may hold this part of a frame without a reservation."""
WAITING_BYTES_MAX = (1 << 20) + (64 << 10)
"""A frame up to this size waits for memory."""


class FrameMemory:
    __slots__ = ("_budget", "_is_closed", "_on_granted", "leave_line", "reserved")

    def __init__(self, budget: Budget, on_granted: Callable[[], None]) -> None:
        self._budget = budget
        self._on_granted = on_granted
        self._is_closed = False
        self.reserved = 0
        self.leave_line: Callable[[], None] | None = None
        """Set while it waits: no reads until `on_granted` is called."""

    def follow(self, reader: FrameReader) -> None:
        """Call after each read. Without memory for the frame, the reader gives it up."""
        held = len(reader.held)
        if held <= FREE_BYTES:
            self._give_back()
            return
        size = held + reader.missing
        more = (size if size <= WAITING_BYTES_MAX else min(size, 2 * held)) - self.reserved
        if more <= 0 or self.leave_line is not None:
            return
        if self._budget.take(more):
            self.reserved += more
            return
        self._give_back()  # an earlier frame's memory: a waiting connection must hold none
        if self._is_closed:  # by a callback of the connection that got it
            return
        if size > WAITING_BYTES_MAX:
            reader.give_up(f"no memory for a frame of {size} bytes: other connections use it")
        elif self._budget.take(size):
            self.reserved = size
        else:
            self.leave_line = self._budget.wait(size, lambda: self._granted(size))

    def _granted(self, size: int) -> None:
        self.leave_line = None
        self.reserved = size
        self._on_granted()

    def _give_back(self) -> None:
        if self.reserved:
            given, self.reserved = self.reserved, 0
            self._budget.give(given)

    def close(self) -> None:
        self._is_closed = True
        if self.leave_line is not None:
            leave, self.leave_line = self.leave_line, None
            leave()
        self._give_back()
