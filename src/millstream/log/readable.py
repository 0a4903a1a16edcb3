"""The readable half of a log: from an offset or a time to a range of a segment file.

Readers see the offsets from `start` to below `high_watermark`. A read returns a range of whole batches and copies
nothing. A cursor keeps the position where a read ended, so that the next read needs no search.

Bytes that this process did not append are checked before they are first served (`checked.py`). A damaged batch goes
into the registry (`damage.py`): reads end before it, and a read that begins there fails. To find the extent of damage
may take seconds: a thread examines the segment (`soundness.py`), and the read waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from bisect import bisect_right
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

from millstream.core.disk import OpenFile
from millstream.core.errors import Code, RequestError
from millstream.core.logs import Damped
from millstream.core.promise import Promise, begin
from millstream.log.answers import TimedOffset
from millstream.log.checked import CHECK_BYTES_MAX
from millstream.log.damage import Cause, Damage, DamagedOffset, DamagedRange
from millstream.log.index import NO_TIME
from millstream.log.segment import BrokenSegment, Segment, Unindexed
from millstream.log.slice import Slice
from millstream.log.soundness import Examined, Extent, Finding
from millstream.records import codec
from millstream.records.aside import Aside
from millstream.records.batch import HEADER_BYTES, LOG_APPEND_TIME, BatchHeader, read_header

logger = logging.getLogger(__name__)
refusals = Damped(__name__)

CURSORS_MAX = 64
SLICE_BYTES = 128 << 10
"""That a time lookup checks before it yields to the event loop: at most some 4 ms."""
A = TypeVar("A")
T = TypeVar("T")


class ReadableLog:
    __slots__ = (
        "_cursors",
        "_held_bytes",
        "_read_mark",
        "_turn",
        "damage",
        "end",
        "high_watermark",
        "name",
        "segments",
        "start",
    )

    closed: bool

    def __init__(self, name: str) -> None:
        self.name = name
        self.damage = Damage(name)
        self.segments: list[Segment] = []
        self.start = 0
        self.high_watermark = 0
        self.end = 0
        self._read_mark: tuple[int, int] = (0, 0)
        """The high watermark as base offset of a segment and position in it."""
        self._cursors: dict[int, tuple[Segment, int]] | None = None
        self._held_bytes = 0
        """Checked by time lookups since one yielded to the event loop."""
        self._turn: asyncio.Lock | None = None
        """Serializes reads that wait for an examination."""

    @property
    def stable(self) -> int:
        """The high watermark: no transaction is open."""
        return self.high_watermark

    def read(self, offset: int, bytes_max: int, below: int | None = None) -> Promise[Slice]:
        if offset < self.start or offset > self.end:
            return Promise.failed(
                RequestError(
                    Code.OFFSET_OUT_OF_RANGE, f"{self.name} holds offsets {self.start} to {self.end}, not {offset}"
                )
            )
        if offset >= self.high_watermark or (below is not None and offset >= below):
            return Promise.of(Slice(0, offset))
        try:
            return Promise.of(self._slice(offset, bytes_max, below))
        except DamagedOffset as error:
            return Promise.failed(error)
        except OSError as error:
            return Promise.failed(self._unreadable(offset, error))
        except (BrokenSegment, Unindexed):
            return begin(self._read_again(offset, bytes_max, below))

    def _slice(self, offset: int, bytes_max: int, below: int | None) -> Slice:
        damage, damaged = self.damage, None
        if damage.ranges:
            damage.check(offset)
            damaged = damage.behind(offset)
        place = self._find(offset)
        if place is None or place[2] > offset:
            self._check_before(offset, place)
        if place is None or (damaged is not None and place[2] >= damaged.first):
            if damaged is not None:  # no batch is left before it
                raise DamagedOffset(self.name, damaged)
            return Slice(0, self.high_watermark)  # compaction removed the rest
        segment, position, first = place
        limit, behind, stored = self._limit(segment), -1, segment.checked.stored
        if damaged is not None and damaged.first < self._offset_behind(segment):
            limit, behind = self._end_before(damaged, segment, position, limit)
        if below is not None and (found := segment.locate(below, limit)) is not None:
            limit, behind = found[0], found[1].base_offset
            if limit <= position:
                return Slice(0, offset)
        if position < stored:
            bytes_max = min(bytes_max, CHECK_BYTES_MAX)
        if limit - position <= bytes_max:
            end, next_offset = limit, behind if behind >= 0 else self._offset_behind(segment)
        else:
            end, next_offset = segment.cut_at_batch(position, bytes_max, limit)
        if position < stored and not segment.checked.covers(position, end):
            self._check(segment, position, end, first, next_offset)
        self._remember(next_offset, segment, end)
        return Slice(end - position, next_offset, file=segment.file, position=position)

    def _end_before(self, damaged: DamagedRange, segment: Segment, position: int, limit: int) -> tuple[int, int]:
        """Where a read from `position` ends before a damaged range, and the offset where reading resumes.

        A range may have no bytes in the segment: a hole follows the last batch, or compaction replaced the batch.
        """
        found = segment.locate(damaged.first, limit)
        places = [at for at in segment.bad if position <= at < (limit if found is None else found[0])]
        if places:
            end, next_offset = min(places), damaged.first
        elif found is None:
            end, next_offset = limit, damaged.first
        else:
            at, header = found
            is_across = header.base_offset < damaged.first
            end, next_offset = (at + header.size, header.next_offset) if is_across else (at, damaged.first)
        if end <= position:
            raise DamagedOffset(self.name, damaged)
        return end, next_offset

    # -- damage ------------------------------------------------------------------------------------------------------

    def _check(self, segment: Segment, position: int, end: int, first: int, behind: int) -> None:
        """Raises `BrokenSegment` unless sound batches fill the bytes between two positions, with offsets from `first`
        to below `behind`.
        """
        data = os.pread(segment.file.fd, end - position, position)
        sound = position + codec.sound_bytes(data, first, behind)
        segment.checked.add(position, sound)
        if sound != end:
            raise BrokenSegment(segment.path, sound)

    def _check_before(self, offset: int, place: tuple[Segment, int, int] | None) -> None:
        """Checks the batch before an offset that no batch has by its header: compaction may have removed the record, or
        the header lies.
        """
        if not self.segments:
            return
        segment = self.segments[max(self._segment_index(offset), 0)]
        self._check_passed(
            segment, offset, place[1] if place is not None and place[0] is segment else self._limit(segment)
        )

    def _check_passed(self, segment: Segment, offset: int, position: int) -> None:
        """Checks the last batch that a search for an offset passed over on its way to a position."""
        if segment.checked.stored and (passed := segment.passed(offset, position)) is not None:
            at, header = passed
            end = at + header.size
            if not segment.checked.covers(at, end):
                self._check(segment, at, end, header.base_offset, self._offset_behind(segment))

    async def _verify(self, segment: Segment, position: int, end: int, first: int) -> None:
        """Checks the stored batches between two positions in slices, with offsets from `first`, before a time lookup
        trusts their headers. Damage is no obstacle where a batch's header and its records tell the same time.
        """
        end = min(end, segment.checked.stored)
        while position < end and not segment.checked.covers(position, end):
            stop, behind = end, self._offset_behind(segment)
            if end - position > SLICE_BYTES:
                stop, behind = segment.cut_at_batch(position, SLICE_BYTES, end)
            if not segment.checked.covers(position, stop):
                try:
                    self._check(segment, position, stop, first, behind)
                except BrokenSegment as error:
                    told = await self._told_twice(segment, error.position, stop)
                    if told is None:
                        raise
                    stop, behind = error.position + told.size, told.next_offset
                self._held_bytes += stop - position
                if self._held_bytes >= SLICE_BYTES:
                    self._held_bytes = 0
                    await asyncio.sleep(0)
            position, first = stop, behind

    async def _told_twice(self, segment: Segment, position: int, end: int) -> BatchHeader | None:
        """The header of a damaged batch, if its largest timestamp and its last offset agree with its records."""
        fd = segment.file.fd
        data = os.pread(fd, HEADER_BYTES, position)
        if len(data) < HEADER_BYTES:
            return None
        header = read_header(data)
        is_plausible = header.magic == 2 and HEADER_BYTES <= header.size <= end - position
        if not is_plausible or header.attributes & LOG_APPEND_TIME or header.count > header.last_offset_delta + 1:
            return None
        try:
            batch = os.pread(fd, header.size, position)
            newest = await Aside().run(codec.newest_time, batch, header.base_offset, check_crc=False)
        except RequestError:
            return None
        return header if newest == header.max_timestamp else None

    async def _read_again(self, offset: int, bytes_max: int, below: int | None) -> Slice:
        """Repeats a read that met damage, or no index, after a thread has examined the segment.

        Returns the sound batches before the damage, or fails. Concurrent reads wait their turn.
        """
        await asyncio.sleep(0)  # the first read may have checked a megabyte
        if self._turn is None:
            self._turn = asyncio.Lock()
        met = set()
        async with self._turn:
            try:
                while self.start <= offset < self.high_watermark:
                    try:
                        return self._slice(offset, bytes_max, below)
                    except BrokenSegment as error:
                        if (error.path, error.position) in met:
                            raise
                        met.add((error.path, error.position))
                        await self._note_broken(error)
                    except Unindexed as error:
                        await self._survey(error.segment)
            except OSError as error:
                raise self._unreadable(offset, error) from error
        return await self.read(offset, bytes_max, below)  # trimmed in the meantime: needs no segment

    def inspect(self, offset: int) -> Promise[DamagedRange | None]:
        return begin(self._inspect(offset))

    async def _inspect(self, offset: int) -> DamagedRange | None:
        known = self.damage.at(offset)
        if not self.segments:
            return known
        segment = self.segments[max(self._segment_index(offset), 0)]
        first, end = offset, offset + 1
        if known is not None:
            first, end = max(known.first, segment.base_offset), min(known.end, self._offset_behind(segment))

        def look(extent: Extent) -> Examined:
            before = extent.entry_before(offset=first)
            return extent.examine(*before, lambda step: step.is_sure and step.next_offset >= end)

        try:
            examined = await self._examine(segment, look)
        except OSError as error:
            refusal = self._unreadable(offset, error)
            if isinstance(refusal, DamagedOffset):
                return refusal.range
            raise refusal from error
        if known is not None and examined is not None:
            self._heal(segment, known, first, end, examined)
        return self.damage.at(offset)

    def _heal(self, segment: Segment, known: DamagedRange, first: int, end: int, examined: Examined) -> None:
        """Replaces known damage between two offsets by the findings, if those are less."""
        damaged = sum(max(min(each.end, end) - max(each.first, first), 0) for each in examined.findings)
        # If bytes are missing, a sound rest proves nothing.
        is_seen = known.cause in (Cause.CHECKSUM, Cause.HEADER) or examined.next_offset >= end
        if damaged < end - first and is_seen:
            self.damage.heal(first, end)
            self.forget_cursors()
            for finding in examined.findings:
                self._note_damage(segment, finding)

    def note_broken(self, error: BrokenSegment) -> Promise[None]:
        """Examines and registers damage that a walk met."""
        return begin(self._note_broken(error))

    async def _note_broken(self, error: BrokenSegment) -> None:
        segment = next((each for each in self.segments if each.path == error.path), None)
        if segment is None:  # removed in the meantime
            return

        def look(extent: Extent) -> Examined:
            before = extent.entry_before(position=error.position - 1)  # the batch before may be the damaged one
            return extent.examine(*before, lambda step: step.is_sure and step.position > error.position)

        examined = await self._examine(segment, look)
        if examined is not None and not examined.findings:  # then the index is wrong
            await self._survey(segment)

    async def _examine(self, segment: Segment, look: Callable[[Extent], Examined]) -> Examined | None:
        """Examines a segment in a thread and registers the findings; None if the segment is gone by then."""
        if not segment.is_ready:
            await self._survey(segment)
        extent = segment.extent(self._limit(segment), self._offset_behind(segment))
        examined = await _in_thread(look, extent)
        if segment not in self.segments or segment.size < extent.limit:
            return None
        known = {at for at in segment.bad if examined.start <= at < examined.end}
        for at in known:
            del segment.bad[at]
        for finding in examined.findings:
            self._note_damage(segment, finding)
        fresh = [each.resumed for each in examined.findings if each.position not in known]
        if any(segment.is_sparse_behind(position) for position in fresh):
            await self._survey(segment)
        return examined

    def _note_damage(self, segment: Segment, finding: Finding) -> None:
        where = f"{segment.path} at position {finding.position}"
        if finding.first >= self._offset_behind(segment):
            logger.warning("%s: ignored the bytes after the last batch: %s", self.name, where)
            segment.cut(finding.position)
        elif self.start < finding.end:
            self.damage.add(max(finding.first, self.start), finding.end, finding.cause, where)
        if self.start >= finding.end or self.damage.at(finding.end - 1) is not None:
            # Else the registry is full: each read finds this damage again.
            segment.bad[finding.position] = finding.resumed
        self.forget_cursors()

    async def _survey(self, segment: Segment) -> None:
        """Rebuilds the index of a segment in a thread."""
        found = await _in_thread(segment.survey, segment.size)
        if segment in self.segments and found.size <= segment.size:
            segment.take_survey(found)

    def _unreadable(self, offset: int, error: OSError) -> RequestError:
        """The error for a reader, from one of the file system."""
        if self.closed:
            return RequestError(Code.UNKNOWN_TOPIC_OR_PARTITION, f"{self.name} was deleted")
        if isinstance(error, FileNotFoundError):  # removed while the broker runs
            for segment in self.segments:
                if error.filename in (segment.path, segment.index.path):
                    first, behind = max(segment.base_offset, self.start), self._offset_behind(segment)
                    return DamagedOffset(self.name, self.damage.add(first, behind, Cause.MISSING, segment.path))
        refusals.error("%s cannot be read at offset %d: %s", self.name, offset, error)
        return RequestError(Code.KAFKA_STORAGE_ERROR, f"{self.name} cannot be read at offset {offset}: {error}")

    # -- finding -----------------------------------------------------------------------------------------------------

    def _limit(self, segment: Segment) -> int:
        base, position = self._read_mark
        return segment.size if segment.base_offset < base else position if segment.base_offset == base else 0

    def _offset_behind(self, segment: Segment) -> int:
        """The offset after the last readable one of a segment."""
        if segment.base_offset == self._read_mark[0]:
            return self.high_watermark
        at = self._segment_index(segment.base_offset)
        return self.segments[at + 1].base_offset if at + 1 < len(self.segments) else self.end

    def _segment_index(self, offset: int) -> int:
        return bisect_right(self.segments, offset, key=lambda segment: segment.base_offset) - 1

    def _find(self, offset: int) -> tuple[Segment, int, int] | None:
        """The segment, position and lowest base offset of the first readable batch that reaches `offset`."""
        if self._cursors is not None:
            place = self._cursors.get(offset)
            if place is not None and place[1] < self._limit(place[0]):
                return place[0], place[1], offset  # the batch before ends there
        at = max(self._segment_index(offset), 0)
        while at < len(self.segments):
            segment = self.segments[at]
            if not segment.is_ready:
                raise Unindexed(segment)
            found = segment.locate(offset, self._limit(segment))
            if found is not None:
                return segment, found[0], found[1].base_offset
            at += 1
        return None

    def _remember(self, offset: int, segment: Segment, position: int) -> None:
        if self._cursors is None:
            self._cursors = {}
        elif len(self._cursors) >= CURSORS_MAX and offset not in self._cursors:
            del self._cursors[next(iter(self._cursors))]
        self._cursors[offset] = (segment, position)

    def forget_cursors(self) -> None:
        """Call this after segments are replaced or removed."""
        self._cursors = None

    def find_time(self, timestamp: int) -> Promise[TimedOffset | None]:
        return begin(self._guarded(self._find_time(timestamp)))

    async def _find_time(self, timestamp: int) -> TimedOffset | None:
        aside = Aside()
        for segment in list(self.segments):
            if not segment.is_ready:
                await self._survey(segment)
            limit = self._limit(segment)
            if limit == 0 or await self._max_timestamp(segment) < timestamp:
                continue
            file = segment.file  # keep it open: retention or compaction may remove the segment
            skipped: tuple[int, int] | None = None
            for position, header in segment.walk_from_time(timestamp, limit):
                if header.base_offset <= self.start:  # all before is trimmed
                    skipped = None
                if header.max_timestamp < timestamp or header.last_offset < self.start:
                    skipped = skipped or (position, header.base_offset)
                    continue
                if skipped is not None:  # by headers, which may be damaged
                    await self._verify(segment, skipped[0], position, skipped[1])
                    skipped = None
                if position == 0 and self.damage.ranges:
                    self.damage.check(segment.base_offset - 1)  # a lost record may be the right one
                batch = self._batch(segment, file, position, header)
                found = await aside.run(codec.find_time, batch, timestamp, self.start, check_crc=False)
                if found is not None:
                    return TimedOffset(*found)
            if skipped is not None:
                await self._verify(segment, skipped[0], limit, skipped[1])
        return None

    async def _max_timestamp(self, segment: Segment) -> int:
        """The largest timestamp of a segment. The index vouches for the batches before its last entry, a checksum for
        the batches after it. If those are damaged, the newest record may be as new as the file.
        """
        newest = segment.max_timestamp
        if segment.is_time_proven:
            return newest
        try:
            await self._verify(segment, *segment.tail())
        except BrokenSegment:  # a lookup that needs these batches examines them
            segment.distrust_time()
        segment.is_time_proven = True
        return segment.max_timestamp

    def find_max_time(self) -> Promise[TimedOffset | None]:
        return begin(self._guarded(self._find_max_time()))

    async def _find_max_time(self) -> TimedOffset | None:
        newest = NO_TIME
        for segment in list(self.segments):
            newest = max(newest, await self._newest_time(segment))
        return await self._find_time(newest) if newest >= 0 else None

    async def _newest_time(self, segment: Segment) -> int:
        """The largest timestamp among the readable records of a segment."""
        if not segment.is_ready:
            await self._survey(segment)
        limit = self._limit(segment)
        if limit == 0:
            return NO_TIME
        if segment.base_offset >= self.start:
            newest = await self._max_timestamp(segment)
            return newest if limit == segment.size else segment.newest_time(self.start, limit)
        first = segment.locate(self.start, limit)  # partly trimmed
        if first is None or first[1].base_offset > self.start:
            self._check_passed(segment, self.start, limit if first is None else first[0])
        if first is None:
            return NO_TIME
        position, header = first
        await self._verify(segment, position, limit, header.base_offset)
        if header.base_offset >= self.start:
            return segment.newest_time(self.start, limit)
        batch = self._batch(segment, segment.file, position, header)
        behind = segment.newest_time(header.next_offset, limit)
        return max(behind, await Aside().run(codec.newest_time, batch, self.start, check_crc=False))

    def _batch(self, segment: Segment, file: OpenFile, position: int, header: BatchHeader) -> bytes:
        """The bytes of a batch; raises `BrokenSegment` if they are damaged."""
        data = os.pread(file.fd, header.size, position)
        if codec.sound_bytes(data, header.base_offset, self._offset_behind(segment)) != header.size:
            raise BrokenSegment(segment.path, position)
        return data

    async def _guarded(self, look: Awaitable[T]) -> T:
        """Registers damage that a lookup meets; only that partition fails."""
        try:
            return await look
        except BrokenSegment as error:
            await self._note_broken(error)
            raise
        except OSError as error:
            raise self._unreadable(self.start, error) from error


async def _in_thread(work: Callable[[A], T], argument: A) -> T:
    return await asyncio.get_running_loop().run_in_executor(_thread(), work, argument)


@cache
def _thread() -> ThreadPoolExecutor:
    """One thread for all logs: damaged logs wait their turn, and other cores stay free."""
    return ThreadPoolExecutor(1, "millstream-examine")
