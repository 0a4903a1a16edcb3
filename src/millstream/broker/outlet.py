"""Single records on their way out of a partition, taken out of their batches: the other end of `inlet.py`.

Doors whose protocols know records and not batches read here. A reader that takes one record at a time out of a large
batch would have it decoded again for each of them, so batches that were not used up are kept for a while, a few a log
and `KEPT_BYTES_MAX` over all: bounded by what they take in memory, the least recently used go first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from operator import attrgetter
from typing import NamedTuple

from millstream.records import codec
from millstream.records.batch import BatchHeader
from millstream.records.record import Record
from millstream.stores.base import PartitionLog

KEPT_BYTES_MAX = 32 << 20
KEPT_BATCHES_MAX = 1000
BATCH_BYTES_MAX = 64 << 20
"""What one batch may decompress to: far above what a client can use, far below what a small one could claim."""
RECORD_BYTES = 200
"""About what a decoded record takes in memory beside its key and value."""
RECORDS_MAX = 10_000
"""Of one reader at a time, however many would fit: a size alone does not bound records that are empty."""

_OFFSET = attrgetter("offset")


class Taken(NamedTuple):
    records: list[Record]
    next_offset: int
    """Where to read on: behind the last record, or behind offsets that hold none any more."""


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
        """Records from `offset` on, whole ones, below `bytes_max` with `head_bytes` each; at least one if there is one,
        and at most `count_max` or `RECORDS_MAX`.

        Raises OFFSET_OUT_OF_RANGE, and `CorruptBatch` where a batch cannot be decoded.
        """
        taking = _Taking(offset, bytes_max, head_bytes, RECORDS_MAX if count_max is None else count_max)
        kept = self._find(log, offset) if offset >= log.start else None
        if kept is not None and taking.add(kept):
            return taking.done()
        while not taking.full:
            part = await log.read(taking.next_offset, max(taking.left, 1))
            if not part.size:
                break
            for header, view in codec.split(part.to_bytes()):
                if header.last_offset >= taking.next_offset and taking.add(self._open(header, view)):
                    if taking.last is not None and taking.next_offset < taking.last.end:
                        self._keep(log, taking.last)
                    break
            else:
                taking.next_offset = max(taking.next_offset, part.next_offset)
        return taking.done()

    def _open(self, header: BatchHeader, view: memoryview) -> _Batch:
        records = [] if header.is_control else codec.decode(view, BATCH_BYTES_MAX, check_crc=False)
        return _Batch(header.base_offset, header.last_offset + 1, records, 0)

    def _find(self, log: PartitionLog, offset: int) -> _Batch | None:
        for batch in self._latest.get(log, ()):
            if batch.start <= offset < batch.end:
                self._kept.move_to_end((log, batch.start))
                return batch
        return None

    def _keep(self, log: PartitionLog, batch: _Batch) -> None:
        size = sum(len(record.value or b"") + len(record.key or b"") + RECORD_BYTES for record in batch.records)
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


class _Taking:
    """What one reader gets, as it grows."""

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
    def left(self) -> int:
        return self._bytes_max - self._size

    def add(self, batch: _Batch) -> bool:
        """Takes what fits; whether that is enough."""
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
