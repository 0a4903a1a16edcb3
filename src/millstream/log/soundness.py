"""Checks whether stored bytes are still the written batches, and finds where reading resumes after damage.

A batch is sound if its header is plausible, its checksum matches, and its offsets follow those of the batch before. The
checksum does not cover the base offset (the broker patches it), so the order of offsets is checked as well.

Damage ends where the next sound batch is known to begin:

1. right after a batch whose length is still correct: another sound batch, or the end, follows there;
2. else at the next batch in the index;
3. else, or if the index has no entry nearby, at the next sound batch with the right offsets that is followed by another
   one or by the end. A record may hold bytes that look like a batch, so one alone proves nothing;
4. else at the end of the segment.

An examination reads every byte and may take seconds, so it runs in a thread. An `Extent` holds its input.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import NamedTuple

from millstream.core.disk import OpenFile
from millstream.log.damage import Cause
from millstream.log.index import ENTRY_BYTES, Entry, entry_at
from millstream.log.inspection import next_batch
from millstream.records.batch import HEADER_BYTES, BatchHeader, is_sound, read_header

NEARBY_BYTES = 1 << 20
"""An index entry within this distance after damage saves a search of the bytes in between."""


class Finding(NamedTuple):
    """One damaged range of a segment, for the log's registry."""

    first: int
    end: int
    """The offset where reading resumes."""
    cause: Cause
    position: int
    resumed: int
    """The position where reading resumes."""


class Step(NamedTuple):
    """One examined batch, or one damaged range."""

    position: int
    """After it."""
    next_offset: int
    finding: Finding | None = None
    is_sure: bool = True
    """False for a batch after a gap: the next batch proves its base offset."""


class Examined(NamedTuple):
    """The result of an examination."""

    start: int
    """The position where it began."""
    end: int
    """The position where it stopped."""
    next_offset: int
    findings: list[Finding]


class Extent:
    """The part of a segment that an examination reads: the bytes below `limit`, with offsets below `behind`."""

    __slots__ = ("_count", "_entries", "base_offset", "behind", "file", "limit")

    def __init__(self, file: OpenFile, base_offset: int, entries: bytes, limit: int, behind: int) -> None:
        """Takes a copy of the index: the index may change while a thread reads."""
        self.file = file
        self.base_offset = base_offset
        self.limit = limit
        self.behind = behind
        self._entries = entries
        self._count = len(entries) // ENTRY_BYTES

    def _entry(self, at: int) -> Entry:
        return entry_at(self._entries, at)

    def _number_before(self, field: int, value: int) -> int:
        return bisect_right(range(self._count), value, key=lambda at: self._entry(at)[field])

    def entry_before(self, offset: int | None = None, position: int = 0) -> tuple[int, int]:
        """Offset and position of the last indexed batch at or before an offset or position that is really there."""
        field, value = (1, position) if offset is None else (0, offset - self.base_offset)
        for at in range(self._number_before(field, value) - 1, -1, -1):
            relative, found, _ = self._entry(at)
            if self._has_batch(relative, found):
                return self.base_offset + relative, found
        return self.base_offset, 0

    def _has_batch(self, relative: int, position: int) -> bool:
        data = os.pread(self.file.fd, HEADER_BYTES, position)
        if len(data) < HEADER_BYTES:
            return False
        header = read_header(data)
        return header.magic == 2 and header.base_offset == self.base_offset + relative

    def examine(self, expected: int, position: int, is_enough: Callable[[Step], bool]) -> Examined:
        """Checks every batch from the one at `position` on, which has the expected offset or a later one."""
        start, findings = position, []
        for step in self._steps(expected, position):
            position, expected = step.position, step.next_offset
            if step.finding is not None:
                findings.append(step.finding)
            if is_enough(step):
                break
        return Examined(start, position, expected, findings)

    def _steps(self, expected: int, position: int) -> Iterator[Step]:
        gap: tuple[int, int] | None = None
        while position < self.limit:
            header = self._sound_at(position, expected)
            if header is not None:
                gap = (position, expected) if header.base_offset > expected else None
                position, expected = position + header.size, header.next_offset
                yield Step(position, expected, is_sure=gap is None)
                continue
            if gap is not None and (header := self._sound_at(position, gap[1] + 1)) is not None:
                # The base offset of the batch before is damaged: it leaves a gap, and overlaps this batch.
                finding = Finding(gap[1], header.base_offset, Cause.HEADER, gap[0], position)
            else:
                finding = self._damaged(position, expected)
            gap, position, expected = None, finding.resumed, finding.end
            yield Step(position, expected, finding)

    def _damaged(self, position: int, expected: int) -> Finding:
        cause, resumed = self._resume(position, expected)
        header = self._sound_at(resumed, expected + 1) if resumed < self.limit else None
        end = header.base_offset if header is not None else self.behind
        return Finding(expected, max(end, expected + 1), cause, position, resumed)

    def _resume(self, position: int, expected: int) -> tuple[Cause, int]:
        """The cause of damage at a position, and the position of the next sound batch; `limit` if there is none."""
        data = os.pread(self.file.fd, HEADER_BYTES, position)
        if len(data) < HEADER_BYTES:
            return Cause.TRUNCATED, self.limit
        header = read_header(data)
        cause = Cause.CHECKSUM if header.magic == 2 else Cause.HEADER
        following = position + header.size
        if position + HEADER_BYTES <= following <= self.limit and (
            following == self.limit or self._sound_at(following, expected + 1) is not None
        ):
            return cause, following
        indexed = self._indexed_behind(position, expected)
        if indexed is not None and indexed - position <= NEARBY_BYTES:
            return Cause.HEADER, indexed
        end = self.limit if indexed is None else indexed
        found = self._search(position + 1, end, expected)
        return Cause.HEADER, end if found is None else found

    def _indexed_behind(self, position: int, expected: int) -> int | None:
        """The next sound batch in the index."""
        for at in range(self._number_before(1, position), self._count):
            found = self._entry(at)[1]
            if found < self.limit and self._sound_at(found, expected + 1) is not None:
                return found
        return None

    def _search(self, position: int, end: int, expected: int) -> int | None:
        """The next sound batch that is followed by another one, or by the end."""
        while (found := next_batch(self.file.fd, position, end, expected + 1, self.behind)) is not None:
            position, header = found
            following = position + header.size
            if following == end or self._sound_at(following, header.next_offset) is not None:
                return position
            position += 1
        return None

    def _sound_at(self, position: int, first: int) -> BatchHeader | None:
        """The header of the batch at a position, if it is sound."""
        fd = self.file.fd
        data = os.pread(fd, HEADER_BYTES, position)
        if len(data) < HEADER_BYTES:
            return None
        header = read_header(data)
        if header.magic != 2 or not HEADER_BYTES <= header.size <= self.limit - position:
            return None
        if header.base_offset < first or header.next_offset > self.behind:
            return None
        return header if is_sound(memoryview(os.pread(fd, header.size, position)), header) else None
