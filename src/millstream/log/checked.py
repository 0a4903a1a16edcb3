"""Tracks the bytes of a segment file that need no checksum before they are served.

Bytes that this process appended passed their checksums on arrival. Older bytes are checked at their first read, and
again after the segment was idle: the page cache may have dropped them by then. A reader at the end of a log pays
nothing; a reader of old data pays one checksum per byte.
"""

from __future__ import annotations

CHECK_BYTES_MAX = 1 << 20
"""Per read, because checks block the event loop. A megabyte of small batches takes some 30 ms."""
SPANS_MAX = 64


class Work:
    """The bytes that all logs of this process checked on the event loop. A reader of many logs compares the count
    before and after a read, and yields to the loop when it grew too much.
    """

    bytes = 0


class Checked:
    __slots__ = ("_spans", "stored")

    def __init__(self, stored: int) -> None:
        self.stored = stored
        """Bytes below this position need a check; 0 in a segment that this process created."""
        self._spans: list[tuple[int, int]] = []

    def covers(self, start: int, end: int) -> bool:
        return start >= self.stored or any(first <= start and end <= last for first, last in self._spans)

    def add(self, start: int, end: int) -> None:
        """Marks the bytes between two positions as sound."""
        Work.bytes += end - start
        touching = [span for span in self._spans if span[0] <= end and start <= span[1]]
        rest = [span for span in self._spans if span not in touching]
        joined = min([start, *(first for first, _ in touching)]), max([end, *(last for _, last in touching)])
        self._spans = [*rest[1 - SPANS_MAX :], joined]

    def reset(self, size: int) -> None:
        self.stored = size
        self._spans = []
