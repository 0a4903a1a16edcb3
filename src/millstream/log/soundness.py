"""Whether stored bytes are still the batches that were written, and where reading goes on behind those that are not.

A batch is sound if its header makes sense, its checksum matches, and its offsets follow those of the batch before. The
checksum does not cover the base offset (the broker patches it), so the order of offsets is checked as well.

Damage ends where the next sound batch is known to begin: right behind a batch whose length is still true, else at the
next batch that the index knows, else at the end of the segment. Nothing is searched for byte by byte: a record may hold
bytes that look like a batch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from crc32c import crc32c

from millstream.log.damage import Cause
from millstream.records.batch import CRC_START, HEADER_BYTES, PREFIX_BYTES, BatchHeader, Buffer, is_sound, read_header

if TYPE_CHECKING:
    from millstream.log.segment import Segment


class Finding(NamedTuple):
    """One damaged place in a segment: what a log adds to its registry."""

    first: int
    end: int
    """The offset where reading goes on."""
    cause: Cause
    position: int
    resumed: int
    """The position where reading goes on."""


class Step(NamedTuple):
    """One batch that was examined, or one damaged place."""

    position: int
    """Behind it."""
    next_offset: int
    finding: Finding | None = None
    is_sure: bool = True
    """False for a batch behind a gap: the next one tells whether its base offset is true."""


def sound_batches(data: Buffer, first: int, behind: int) -> Iterator[tuple[BatchHeader, memoryview]]:
    """The batches at the front that are sound, whose offsets rise and reach from `first` to below `behind`."""
    view, position = memoryview(data), 0
    size = len(view)
    while size - position >= HEADER_BYTES:
        header = read_header(view, position)
        end = position + header.length + PREFIX_BYTES
        next_offset = header.base_offset + header.last_offset_delta + 1
        if (
            header.magic != 2
            or not position + HEADER_BYTES <= end <= size
            or not first <= header.base_offset < next_offset <= behind
            or crc32c(view[position + CRC_START : end]) != header.crc
        ):
            return
        yield header, view[position:end]
        position, first = end, next_offset


def sound_bytes(data: Buffer, first: int, behind: int) -> int:
    """How many bytes those batches take."""
    return sum(len(batch) for _, batch in sound_batches(data, first, behind))


def examine(segment: Segment, position: int, limit: int, expected: int, behind: int) -> Iterator[Step]:
    """Every batch of a segment from the position of one on and below `limit`, with what is damaged.

    `expected` is the lowest offset that the first one may have, `behind` the offset after all that the segment holds.
    Reads every byte: a long way is a thread's work, and the caller ends it where it has seen enough.
    """
    gap: tuple[int, int] | None = None
    while position < limit:
        header = _sound_at(segment, position, limit, expected, behind)
        if header is not None:
            gap = (position, expected) if header.base_offset > expected else None
            position, expected = position + header.size, header.next_offset
            yield Step(position, expected, is_sure=gap is None)
            continue
        if gap is not None and (header := _sound_at(segment, position, limit, gap[1] + 1, behind)) is not None:
            # The base offset of the batch before is damaged: it leaves a gap, and overlaps with this batch.
            finding = Finding(gap[1], header.base_offset, Cause.HEADER, gap[0], position)
        else:
            finding = _damaged(segment, position, limit, expected, behind)
        gap, position, expected = None, finding.resumed, finding.end
        yield Step(position, expected, finding)


def _damaged(segment: Segment, position: int, limit: int, expected: int, behind: int) -> Finding:
    cause, resumed = _resume(segment, position, limit, expected, behind)
    header = _sound_at(segment, resumed, limit, expected + 1, behind) if resumed < limit else None
    end = header.base_offset if header is not None else behind
    return Finding(expected, max(end, expected + 1), cause, position, resumed)


def _resume(segment: Segment, position: int, limit: int, expected: int, behind: int) -> tuple[Cause, int]:
    """What is wrong with the batch at a position, and the position of the next sound one; `limit` if there is none."""
    data = os.pread(segment.file.fd, HEADER_BYTES, position)
    if len(data) < HEADER_BYTES and position < limit:
        return Cause.TRUNCATED, limit
    header = read_header(data)
    next_position = position + header.size
    if (
        header.magic == 2
        and position + HEADER_BYTES <= next_position <= limit
        and (next_position == limit or _sound_at(segment, next_position, limit, expected + 1, behind) is not None)
    ):
        return Cause.CHECKSUM, next_position
    for _, next_position, _ in segment.index.behind(position):
        if next_position < limit and _sound_at(segment, next_position, limit, expected + 1, behind) is not None:
            return Cause.HEADER, next_position
    return Cause.HEADER, limit


def _sound_at(segment: Segment, position: int, limit: int, first: int, behind: int) -> BatchHeader | None:
    """The header of the batch at a position, if it is sound."""
    fd = segment.file.fd
    data = os.pread(fd, HEADER_BYTES, position)
    if len(data) < HEADER_BYTES:
        return None
    header = read_header(data)
    if header.magic != 2 or not HEADER_BYTES <= header.size <= limit - position:
        return None
    if header.base_offset < first or header.next_offset > behind:
        return None
    return header if is_sound(memoryview(os.pread(fd, header.size, position)), header) else None
