"""The readable half of a log: from an offset or a time to a range of a segment file.

Readers see what lies below `durable` and not below `start`. A read answers with a range of whole batches and copies
nothing. Where a reader left off is remembered, so that reading on needs no search.
"""

from __future__ import annotations

from bisect import bisect_right

from millstream.errors import Code, RequestError
from millstream.log.answers import TimedOffset
from millstream.log.index import NO_TIME
from millstream.log.segment import Segment
from millstream.log.slice import Slice
from millstream.promise import Promise
from millstream.records import codec
from millstream.records.batch import BatchHeader

CURSORS_MAX = 64


class ReadableLog:
    __slots__ = ("_cursors", "_durable_mark", "durable", "end", "name", "segments", "start")

    def __init__(self, name: str) -> None:
        self.name = name
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
        place = self._find(offset)
        if place is None:  # compaction took all that was left
            return Promise.of(Slice(0, self.durable))
        segment, position = place
        limit = self._limit(segment)
        if limit - position <= bytes_max:
            end, next_offset = limit, self._offset_behind(segment)
        else:
            end, next_offset = segment.cut_at_batch(position, bytes_max, limit)
        self._remember(next_offset, segment, end)
        return Promise.of(Slice(end - position, next_offset, file=segment.file, position=position))

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
        for segment in self.segments:
            limit = self._limit(segment)
            if limit == 0 or segment.max_timestamp < timestamp:
                continue
            for position, header in segment.walk_from_time(timestamp, limit):
                if header.max_timestamp < timestamp or header.last_offset < self.start:
                    continue
                for record in codec.decode(self._batch(segment, position, header)):
                    if record.timestamp >= timestamp and record.offset >= self.start:
                        return Promise.of(TimedOffset(record.offset, record.timestamp))
        return Promise.of(None)

    def find_max_time(self) -> Promise[TimedOffset | None]:
        newest = max((self._newest_time(segment) for segment in self.segments), default=NO_TIME)
        return self.find_time(newest) if newest >= 0 else Promise.of(None)

    def _newest_time(self, segment: Segment) -> int:
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
        records = codec.decode(self._batch(segment, position, header))
        left = [record.timestamp for record in records if record.offset >= self.start]
        return max(*left, segment.newest_time(header.next_offset, limit))

    def _batch(self, segment: Segment, position: int, header: BatchHeader) -> bytes:
        return Slice(header.size, 0, file=segment.file, position=position).to_bytes()
