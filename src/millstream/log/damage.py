"""The damage of one log: ranges of offsets that are known to be unreadable, each with a cause.

Rules
-----
1. A reader, recovery or a scrub adds a range where it finds damage. The range is logged once, when it is added.
   A scrub checks known ranges again, and removes those that are sound again.
2. A read that begins inside a range fails with CORRUPT_MESSAGE and names the next readable offset. A read that begins
   before a range ends before it. No known damaged batch is ever served, not even by `sendfile`.
3. Ranges never overlap. Damage that touches a known range of the same cause extends it.
4. A log remembers at most `RANGES_MAX` ranges. Further damage is logged and counted, and readers that decode still
   refuse it.
5. A log whose directory is missing has one range without offsets (`lose_all`): its record count is unknown. All its
   reads and appends fail with KAFKA_STORAGE_ERROR (`lost.py`).
6. The registry belongs to the event loop's thread. A scrub in another thread hands its findings over.

An empty registry costs a read one test of an empty list.
"""

from __future__ import annotations

import enum
import logging
from bisect import bisect_right
from operator import attrgetter
from typing import NamedTuple

from millstream.core.errors import LogLost
from millstream.records.batch import CorruptBatch

logger = logging.getLogger(__name__)

RANGES_MAX = 1000
_FIRST = attrgetter("first")


class Cause(enum.StrEnum):
    CHECKSUM = "checksum mismatch"
    HEADER = "unreadable batch header"
    MISSING = "missing segment"
    TRUNCATED = "truncated segment"
    DIRECTORY = "missing directory"


class DamagedRange(NamedTuple):
    first: int
    end: int
    """The offset after the range: the next readable one, or the end of the log."""
    cause: Cause
    where: str
    """The file and position, or the table row; for operators."""

    def __str__(self) -> str:
        if self.cause is Cause.DIRECTORY:
            return f"all records are lost ({self.cause}: {self.where}); restore it and restart, or delete the topic"
        return f"offsets {self.first} to {self.end - 1} are damaged ({self.cause}: {self.where})"


class UnreadableOffset(CorruptBatch):
    """The batch at an offset is damaged or cannot be decoded; reading resumes at `next_offset`."""

    def __init__(self, first: int, next_offset: int, detail: str) -> None:
        super().__init__(detail)
        self.first = first
        self.next_offset = next_offset


class DamagedOffset(UnreadableOffset):
    """A read of an offset that is known to be damaged."""

    def __init__(self, log: str, damaged: DamagedRange) -> None:
        detail = (
            f"{log}: offsets {damaged.first} to {damaged.end - 1} are damaged ({damaged.cause}); "
            f"the next offset to read is {damaged.end}"
        )
        super().__init__(damaged.first, damaged.end, detail)
        self.range = damaged


class Damage:
    __slots__ = ("_log", "found", "lost", "ranges")

    def __init__(self, log: str) -> None:
        self._log = log
        self.ranges: list[DamagedRange] = []
        """Sorted by offset. Empty for a sound log: the hot path tests nothing else."""
        self.found = 0
        """Damage found since the log was opened, including ranges that retention removed."""
        self.lost: LogLost | None = None
        """The error for every read and append, if the whole log is missing."""

    def add(self, first: int, end: int, cause: Cause, where: str) -> DamagedRange:
        """Adds damage and logs it unless it is known; returns the range that holds it."""
        known = self.at(first)
        if known is not None and end <= known.end:
            return known
        damaged = self._joined(DamagedRange(first, max(end, first + 1), cause, where))
        self.found += 1
        logger.error("%s: %s; readers continue at offset %d", self._log, damaged, damaged.end)
        return damaged

    def lose_all(self, directory: str) -> None:
        self.lost = LogLost(self._log, directory)
        self.ranges = [DamagedRange(0, 0, Cause.DIRECTORY, directory)]
        self.found += 1
        logger.error("%s: %s", self._log, self.ranges[0])

    def check_lost(self) -> None:
        """Raises `LogLost` if the whole log is missing."""
        if self.lost is not None:
            raise self.lost

    def _joined(self, new: DamagedRange) -> DamagedRange:
        """Adds a range, merged with ranges that it overlaps, or touches with the same cause."""
        touched = [
            each
            for each in self.ranges
            if (each.first < new.end and new.first < each.end)
            or (each.cause is new.cause and (each.end == new.first or each.first == new.end))
        ]
        if not touched and len(self.ranges) >= RANGES_MAX:
            return new
        first, end = min(each.first for each in (*touched, new)), max(each.end for each in (*touched, new))
        joined = new._replace(first=first, end=end)
        self.ranges = sorted([*(each for each in self.ranges if each not in touched), joined], key=_FIRST)
        return joined

    def at(self, offset: int) -> DamagedRange | None:
        """The range that holds an offset."""
        at = bisect_right(self.ranges, offset, key=_FIRST) - 1
        return self.ranges[at] if at >= 0 and offset < self.ranges[at].end else None

    def behind(self, offset: int) -> DamagedRange | None:
        """The first range that begins after an offset: a read from there ends before it."""
        at = bisect_right(self.ranges, offset, key=_FIRST)
        return self.ranges[at] if at < len(self.ranges) else None

    def check(self, offset: int) -> None:
        """Raises `DamagedOffset` if the offset is known to be damaged."""
        damaged = self.at(offset)
        if damaged is not None:
            raise DamagedOffset(self._log, damaged)

    def forget(self, start: int, end: int) -> None:
        """Forgets ranges that the log no longer covers: below its start, or from its end on."""
        if self.ranges:
            self.ranges = [each for each in self.ranges if start < each.end and each.first < end]

    def heal(self, first: int, end: int) -> None:
        """Removes offsets that a new check found sound: the file was restored, or compacted."""
        healed = [each for each in self.ranges if each.first < end and first < each.end]
        for each in healed:
            self.ranges.remove(each)
            logger.info(
                "%s: offsets %d to %d are readable again", self._log, max(each.first, first), min(each.end, end) - 1
            )
            if each.first < first:
                self.ranges.append(each._replace(end=first))
            if end < each.end:
                self.ranges.append(each._replace(first=end))
        self.ranges.sort(key=_FIRST)
