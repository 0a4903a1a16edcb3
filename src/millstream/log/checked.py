"""Which bytes of a segment file need no checksum before they are served.

The bytes that this process appended passed their checksums on arrival. The bytes that were on disk before are checked
when a reader first comes to them, and again after the segment was idle: by then they may come from the disk again.
So a reader at the end of a log pays nothing, and a reader of old data one checksum for each byte.
"""

from __future__ import annotations

CHECK_BYTES_MAX = 1 << 20
"""Of one read: the event loop waits for it. A megabyte of small batches takes some 30 ms."""
SPANS_MAX = 64


class Work:
    """What all logs of this process have checked on the event loop. A reader of many logs compares it before and after
    a read, and lets the loop run when it has had enough.
    """

    bytes = 0


class Checked:
    __slots__ = ("_spans", "stored")

    def __init__(self, stored: int) -> None:
        self.stored = stored
        """Below this position bytes have to be checked; 0 in a segment that this process began."""
        self._spans: list[tuple[int, int]] = []

    def covers(self, start: int, end: int) -> bool:
        return start >= self.stored or any(first <= start and end <= last for first, last in self._spans)

    def add(self, start: int, end: int) -> None:
        """The bytes between two positions are sound."""
        Work.bytes += end - start
        touching = [span for span in self._spans if span[0] <= end and start <= span[1]]
        rest = [span for span in self._spans if span not in touching]
        joined = min([start, *(first for first, _ in touching)]), max([end, *(last for _, last in touching)])
        self._spans = [*rest[1 - SPANS_MAX :], joined]

    def reset(self, size: int) -> None:
        self.stored = size
        self._spans = []
