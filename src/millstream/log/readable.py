"""The readable half of a log: from an offset or a time to a range of a segment file.

Readers see what lies below `durable` and not below `start`. A read answers with a range of whole batches and copies
nothing. Where a reader left off is remembered, so that reading on needs no search.

Bytes that this process did not append are checked before they are served the first time (`checked.py`). A damaged batch
goes into the registry (`damage.py`): reads end before it, and a read that begins there fails.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Awaitable, Callable
from typing import TypeVar

from millstream.errors import Code, RequestError
from millstream.log.answers import TimedOffset
from millstream.log.checked import CHECK_BYTES_MAX
from millstream.log.damage import Cause, Damage, DamagedOffset, DamagedRange
from millstream.log.index import NO_TIME
from millstream.log.segment import BrokenSegment, Segment
from millstream.log.slice import OpenFile, Slice
from millstream.log.soundness import Finding, Step, examine, sound_bytes
from millstream.logs import Damped
from millstream.promise import Promise, begin
from millstream.records import codec
from millstream.records.aside import Aside
from millstream.records.batch import BatchHeader, CorruptBatch

refusals = Damped(__name__)

CURSORS_MAX = 64
T = TypeVar("T")


class ReadableLog:
    __slots__ = ("_cursors", "_durable_mark", "damage", "durable", "end", "name", "segments", "start")

    def __init__(self, name: str) -> None:
        self.name = name
        self.damage = Damage(name)
        self.segments: list[Segment] = []
        self.start = 0
        self.durable = 0
        self.end = 0
        self._durable_mark: tuple[int, int] = (0, 0)
        """Base offset of the segment and the position in it up to which readers may read."""
        self._cursors: dict[int, tuple[Segment, int]] | None = None

    def read(self, offset: int, bytes_max: int) -> Promise[Slice]:
        if offset < self.start or offset > self.end:
            return Promise.failed(
                RequestError(
                    Code.OFFSET_OUT_OF_RANGE, f"{self.name} holds offsets {self.start} to {self.end}, not {offset}"
                )
            )
        if offset >= self.durable:
            return Promise.of(Slice(0, offset))
        try:
            return Promise.of(self._slice(offset, bytes_max))
        except (CorruptBatch, OSError) as error:
            return self._read_again(offset, bytes_max, error)

    def _slice(self, offset: int, bytes_max: int) -> Slice:
        damage = self.damage
        if damage.ranges:
            damage.check(offset)
        place = self._find(offset)
        if place is None:  # compaction took all that was left
            return Slice(0, self.durable)
        segment, position = place
        limit, stored = self._limit(segment), segment.checked.stored
        damaged = damage.behind(offset) if damage.ranges else None
        if damaged is not None and damaged.first < self._offset_behind(segment):
            limit = min([limit, *(at for at in segment.bad if at >= position)])
        else:
            damaged = None
        if position < stored:
            bytes_max = min(bytes_max, CHECK_BYTES_MAX)
        if limit - position <= bytes_max:
            end, next_offset = limit, self._offset_behind(segment) if damaged is None else damaged.first
        else:
            end, next_offset = segment.cut_at_batch(position, bytes_max, limit)
        if position < stored and not segment.checked.covers(position, end):
            self._check(segment, position, end, next_offset)
        self._remember(next_offset, segment, end)
        return Slice(end - position, next_offset, file=segment.file, position=position)

    # -- damage ------------------------------------------------------------------------------------------------------

    def _check(self, segment: Segment, position: int, end: int, behind: int) -> None:
        """Raises `BrokenSegment` unless sound batches fill the bytes between two positions."""
        data = os.pread(segment.file.fd, end - position, position)
        sound = position + sound_bytes(data, segment.base_offset, behind)
        segment.checked.add(position, sound)
        if sound != end:
            raise BrokenSegment(segment.path, sound)

    def inspect(self, offset: int) -> Promise[DamagedRange | None]:
        segment = self.segments[max(self._segment_index(offset), 0)]
        try:
            self._examine(
                segment, *segment.entry_before(offset), lambda step: step.is_sure and step.next_offset > offset
            )
        except OSError as error:
            return Promise.failed(self._unreadable(offset, error))
        return Promise.of(self.damage.at(offset))

    def _examine(self, segment: Segment, expected: int, position: int, is_enough: Callable[[Step], bool]) -> None:
        """Looks at a segment from a batch on, and registers what is damaged."""
        limit, behind = self._limit(segment), self._offset_behind(segment)
        for step in examine(segment, position, limit, expected, behind):
            if step.finding is not None:
                self.note_damage(segment, step.finding)
            if is_enough(step):
                return

    def note_damage(self, segment: Segment, finding: Finding) -> None:
        """Registers what a reader or a scrub found in a segment."""
        segment.bad[finding.position] = finding.resumed
        where = f"{segment.path} at position {finding.position}"
        self.damage.add(finding.first, finding.end, finding.cause, where)
        self.forget_cursors()

    def _read_again(self, offset: int, bytes_max: int, error: CorruptBatch | OSError) -> Promise[Slice]:
        """After a read met damage: registers it, and answers with the sound batches before it, or the refusal."""
        try:
            while isinstance(error, BrokenSegment):
                self.note_broken(error)
                try:
                    return Promise.of(self._slice(offset, bytes_max))
                except BrokenSegment as another:
                    if another.position == error.position:
                        return Promise.failed(another)
                    error = another
        except (CorruptBatch, OSError) as another:
            error = another
        if isinstance(error, FileNotFoundError):  # it was removed while the broker runs
            segment = self.segments[max(self._segment_index(offset), 0)]
            behind = self._offset_behind(segment)
            error = DamagedOffset(self.name, self.damage.add(segment.base_offset, behind, Cause.MISSING, segment.path))
        return Promise.failed(error if isinstance(error, CorruptBatch) else self._unreadable(offset, error))

    def note_broken(self, error: BrokenSegment) -> None:
        """Registers damage that a walk met."""
        segment = next(each for each in self.segments if each.path == error.path)
        before = segment.entry_before(position=error.position - 1)  # the batch before may be to blame
        self._examine(segment, *before, lambda step: step.is_sure and step.position > error.position)

    def _unreadable(self, offset: int, error: OSError) -> RequestError:
        refusals.error("%s cannot be read at offset %d: %s", self.name, offset, error)
        return RequestError(Code.KAFKA_STORAGE_ERROR, f"{self.name} cannot be read at offset {offset}: {error}")

    # -- finding -----------------------------------------------------------------------------------------------------

    def _limit(self, segment: Segment) -> int:
        base, position = self._durable_mark
        return segment.size if segment.base_offset < base else position if segment.base_offset == base else 0

    def _offset_behind(self, segment: Segment) -> int:
        """The offset that comes after everything readable in a segment."""
        if segment.base_offset == self._durable_mark[0]:
            return self.durable
        at = self._segment_index(segment.base_offset)
        return self.segments[at + 1].base_offset if at + 1 < len(self.segments) else self.end

    def _segment_index(self, offset: int) -> int:
        return bisect_right(self.segments, offset, key=lambda segment: segment.base_offset) - 1

    def _find(self, offset: int) -> tuple[Segment, int] | None:
        """The segment and position of the first readable batch that reaches `offset`."""
        if self._cursors is not None:
            place = self._cursors.get(offset)
            if place is not None and place[1] < self._limit(place[0]):
                return place
        at = max(self._segment_index(offset), 0)
        while at < len(self.segments):
            segment = self.segments[at]
            found = segment.locate(offset, self._limit(segment))
            if found is not None:
                return segment, found[0]
            at += 1
        return None

    def _remember(self, offset: int, segment: Segment, position: int) -> None:
        if self._cursors is None:
            self._cursors = {}
        elif len(self._cursors) >= CURSORS_MAX and offset not in self._cursors:
            del self._cursors[next(iter(self._cursors))]
        self._cursors[offset] = (segment, position)

    def forget_cursors(self) -> None:
        """Whenever segments are replaced or removed."""
        self._cursors = None

    def find_time(self, timestamp: int) -> Promise[TimedOffset | None]:
        return begin(self._guarded(self._find_time(timestamp)))

    async def _find_time(self, timestamp: int) -> TimedOffset | None:
        aside = Aside()
        for segment in list(self.segments):
            limit = self._limit(segment)
            if limit == 0 or segment.max_timestamp < timestamp:
                continue
            file = segment.file  # kept open: other work may remove or replace the segment meanwhile
            for position, header in segment.walk_from_time(timestamp, limit):
                if header.max_timestamp < timestamp or header.last_offset < self.start:
                    continue
                batch = self._batch(segment, file, position, header)
                found = await aside.run(codec.find_time, batch, timestamp, self.start, check_crc=False)
                if found is not None:
                    return TimedOffset(*found)
        return None

    def find_max_time(self) -> Promise[TimedOffset | None]:
        return begin(self._guarded(self._find_max_time()))

    async def _find_max_time(self) -> TimedOffset | None:
        newest = NO_TIME
        for segment in list(self.segments):
            newest = max(newest, await self._newest_time(segment))
        return await self._find_time(newest) if newest >= 0 else None

    async def _newest_time(self, segment: Segment) -> int:
        """The largest timestamp of what can be read of a segment, neither trimmed nor unsynced."""
        limit = self._limit(segment)
        if limit == segment.size and segment.base_offset >= self.start:
            return segment.max_timestamp
        if limit == 0:
            return NO_TIME
        first = segment.locate(self.start, limit) if segment.base_offset < self.start else None
        if first is None or first[1].base_offset >= self.start:
            return segment.newest_time(self.start, limit)
        position, header = first  # of which only a part is left
        batch = self._batch(segment, segment.file, position, header)
        behind = segment.newest_time(header.next_offset, limit)
        return max(behind, await Aside().run(codec.newest_time, batch, self.start, check_crc=False))

    def _batch(self, segment: Segment, file: OpenFile, position: int, header: BatchHeader) -> bytes:
        """The bytes of a batch; raises where they are damaged."""
        data = os.pread(file.fd, header.size, position)
        if sound_bytes(data, segment.base_offset, self._offset_behind(segment)) != header.size:
            raise BrokenSegment(segment.path, position)
        return data

    async def _guarded(self, look: Awaitable[T]) -> T:
        """Damage that a look-up meets costs its partition and nothing else."""
        try:
            return await look
        except BrokenSegment as error:
            self.note_broken(error)
            raise
        except OSError as error:
            raise RequestError(Code.KAFKA_STORAGE_ERROR, f"{self.name} cannot be read: {error}") from error
