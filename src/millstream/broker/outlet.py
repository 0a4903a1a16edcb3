"""Reads single records out of the batches of a partition: the counterpart of `inlet.py`.

Doors whose protocols have records but no batches use it. A reader that takes one record at a time from a large batch
would decode the batch for each record. So an LRU cache keeps decoded batches that were not fully read. Its bound is
their size in memory, `KEPT_BYTES_MAX` over all logs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from operator import attrgetter
from typing import NamedTuple

from millstream.broker.batches import decode, read_batches
from millstream.log.damage import UnreadableOffset
from millstream.records.aside import Aside
from millstream.records.pure import HEADER_COST
from millstream.records.record import Record
from millstream.stores.base import PartitionLog

KEPT_BYTES_MAX = 32 << 20
KEPT_BATCHES_MAX = 1000
WHOLE_BYTES_MAX = 8 << 20
"""Of a larger batch the cache keeps only the records that the reader needs next."""
RECORD_BYTES = 200
"""Approximate memory of a decoded record beside its key and value."""
RECORDS_MAX = 10_000
"""Per read, however many would fit: a size in bytes does not bound empty records."""

_OFFSET = attrgetter("offset")


class Taken(NamedTuple):
    records: list[Record]
    next_offset: int
    """The next read: after the last record, or after offsets that hold no records."""


class _Batch(NamedTuple):
    start: int
    end: int
    records: list[Record]
    size: int


class Outlet:
    """One per broker."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[PartitionLog, int], _Batch] = OrderedDict()
        self._latest: dict[PartitionLog, list[_Batch]] = {}
        self._size = 0

    async def take(
        self, log: PartitionLog, offset: int, bytes_max: int, *, head_bytes: int = 0, count_max: int | None = None
    ) -> Taken:
        """Whole records from `offset` on, up to `bytes_max` with `head_bytes` for each; at least one if there is one,
        and at most `count_max` or `RECORDS_MAX`.

        Stops before a batch that is damaged or cannot be decoded; raises `UnreadableOffset` if it is the first one.
        Raises OFFSET_OUT_OF_RANGE.
        """
        taking = _Taking(offset, bytes_max, head_bytes, RECORDS_MAX if count_max is None else count_max)
        kept = self._find(log, offset) if offset >= log.start else None
        if kept is not None and taking.add(kept):
            return taking.done()
        aside = Aside()
        try:
            while not taking.full and await self._take_more(log, taking, aside):
                pass
        except UnreadableOffset:
            if not taking.has_some:
                raise
        return taking.done()

    async def _take_more(self, log: PartitionLog, taking: _Taking, aside: Aside) -> bool:
        """Reads the log once; returns whether it had data."""
        sound, next_offset = await read_batches(log, taking.next_offset, max(taking.left, 1))
        for header, view in sound:
            if header.last_offset < taking.next_offset:
                continue
            batch = _Batch(header.base_offset, header.next_offset, await decode(header, view, aside), 0)
            if taking.add(batch):
                if taking.last is not None and taking.next_offset < taking.last.end:
                    self._keep(log, taking.last, taking.next_offset)
                return True
        taking.next_offset = max(taking.next_offset, next_offset) if sound else taking.next_offset
        return bool(sound)

    def _find(self, log: PartitionLog, offset: int) -> _Batch | None:
        for batch in self._latest.get(log, ()):
            if batch.start <= offset < batch.end:
                self._kept.move_to_end((log, batch.start))
                return batch
        return None

    def _keep(self, log: PartitionLog, batch: _Batch, offset: int) -> None:
        size = sum(map(_size, batch.records))
        if size > WHOLE_BYTES_MAX:
            batch, size = _piece(batch, offset)
        if size > KEPT_BYTES_MAX or (log, batch.start) in self._kept:
            return
        batch = batch._replace(size=size)
        self._kept[log, batch.start] = batch
        self._latest.setdefault(log, []).append(batch)
        self._size += size
        while self._size > KEPT_BYTES_MAX or len(self._kept) > KEPT_BATCHES_MAX:
            (of, _), dropped = self._kept.popitem(last=False)
            self._size -= dropped.size
            self._latest[of].remove(dropped)
            if not self._latest[of]:
                del self._latest[of]


def _size(record: Record) -> int:
    headers = sum(len(name) + len(value or b"") + HEADER_COST for name, value in record.headers)
    return len(record.value or b"") + len(record.key or b"") + RECORD_BYTES + headers


def _piece(batch: _Batch, offset: int) -> tuple[_Batch, int]:
    """The records that a reader needs next of a batch too large to keep, and their size."""
    first = stop = bisect_left(batch.records, offset, key=_OFFSET)
    size = 0
    while stop < len(batch.records) and (size == 0 or size + _size(batch.records[stop]) <= WHOLE_BYTES_MAX):
        size += _size(batch.records[stop])
        stop += 1
    end = batch.records[stop].offset if stop < len(batch.records) else batch.end
    return _Batch(offset, end, batch.records[first:stop], size), size


class _Taking:
    """The growing result of one read."""

    __slots__ = ("_bytes_max", "_count_max", "_head_bytes", "_records", "_size", "full", "last", "next_offset")

    def __init__(self, offset: int, bytes_max: int, head_bytes: int, count_max: int) -> None:
        self.next_offset = offset
        self.full = False
        self.last: _Batch | None = None
        self._bytes_max = bytes_max
        self._head_bytes = head_bytes
        self._count_max = count_max
        self._records: list[Record] = []
        self._size = 0

    @property
    def has_some(self) -> bool:
        return bool(self._records)

    @property
    def left(self) -> int:
        return self._bytes_max - self._size

    def add(self, batch: _Batch) -> bool:
        """Takes what fits; returns `full`."""
        self.last = batch
        records = self._records
        first = bisect_left(batch.records, self.next_offset, key=_OFFSET)
        for at in range(first, len(batch.records)):
            record = batch.records[at]
            size = len(record.value or b"") + self._head_bytes
            if records and (self._size + size > self._bytes_max or len(records) == self._count_max):
                self.full = True
                return True
            records.append(record)
            self._size += size
            self.next_offset = record.offset + 1
        self.next_offset = batch.end
        self.full = bool(records) and (self._size >= self._bytes_max or len(records) == self._count_max)
        return self.full

    def done(self) -> Taken:
        return Taken(self._records, self.next_offset)


def fit(taken: Taken, left: int, head_bytes: int, *, needs_one: bool) -> tuple[list[Record], int, int]:
    """For answers with keys, whose size `take` does not count: the first records that fit into `left` bytes, the next
    offset, and the bytes left; 0 if a record did not fit. With `needs_one` the first record always fits.
    """
    for count, record in enumerate(taken.records):
        size = len(record.value or b"") + len(record.key or b"") + head_bytes
        if size > left and not (needs_one and count == 0):
            return taken.records[:count], record.offset, 0
        left -= size
    return taken.records, taken.next_offset, left
