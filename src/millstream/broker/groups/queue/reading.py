"""A queue's view of the log: batches, and the records of the batch that it decoded last.

Every batch is checked before it is leased or decoded (`broker/batches.py`). A damaged or undecodable batch raises
`UnreadableOffset`, which names the offset where the queue continues.

Batches from `batches` do not block the event loop: small ones decompress to `PIECE_BYTES_MAX` together. A large one was
decoded aside (`records/aside.py`), and its records are dropped after this turn of the event loop.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left

from millstream.broker.batches import decode, read_batches, undecodable
from millstream.core.errors import Code, RequestError
from millstream.records import codec
from millstream.records.aside import Aside
from millstream.records.batch import BatchHeader, CorruptBatch
from millstream.records.record import Record
from millstream.stores.base import PartitionLog

DELIVER_AT = "millstream-deliver-at"
"""The header that delays a record until a time: milliseconds since 1970, in decimal."""
READ_BYTES_MAX = 128 * 1024
"""Limit of one read. Every queue keeps its last read in memory."""
PIECE_BYTES_MAX = 512 * 1024
"""Decompressed size of a read that the event loop decodes."""
_MARK = DELIVER_AT.encode()
_DIGITS_MAX = 16


class Reading:
    __slots__ = ("_aside", "_dated", "_kept", "_log", "_marked", "_records")

    def __init__(self, log: PartitionLog) -> None:
        self._log = log
        self._aside = Aside()
        self._marked: set[int] = set()
        """Base offsets of kept batches that may hold delayed records."""
        self._kept: list[tuple[BatchHeader, memoryview]] = []
        """The last read, from the last batch used: records are often taken one by one."""
        self._records: tuple[int, dict[int, Record]] = (-1, {})
        self._dated: int | None = None
        """The result of `date`, until `timestamp_at` takes it."""

    async def batches(self, offset: int, bytes_max: int) -> list[tuple[BatchHeader, memoryview]]:
        """Whole batches of the log, from the one that holds an offset, or the next one.

        Empty if they were trimmed during the read: the next one sees the log's new start. Any other failure is raised:
        records that cannot be read now still exist.
        """
        kept = self._kept
        if not (kept and kept[0][0].base_offset <= offset <= kept[-1][0].last_offset):
            try:
                kept, _ = await read_batches(self._log, offset, min(bytes_max, READ_BYTES_MAX))
            except RequestError as error:
                if error.code != Code.OFFSET_OUT_OF_RANGE:
                    raise
                return []
            self._kept = kept = await self._prepared(kept)
        elif kept[0][0].last_offset < offset:
            start = bisect_left(kept, offset, key=lambda each: each[0].last_offset)
            self._kept = kept = kept[start:]
        return kept

    async def _prepared(self, sound: list[tuple[BatchHeader, memoryview]]) -> list[tuple[BatchHeader, memoryview]]:
        kept: list[tuple[BatchHeader, memoryview]] = []
        marked: set[int] = set()
        room = PIECE_BYTES_MAX
        for header, batch in sound:
            try:
                has_mark, size = await self._aside.run(codec.contains, batch, _MARK)
            except CorruptBatch:
                has_mark, size = False, PIECE_BYTES_MAX + 1
            room -= size
            if room < 0 and kept:
                break
            if has_mark:
                marked.add(header.base_offset)
            kept.append((header, batch))
            if room < 0 and not header.is_control:
                await self._decode_aside(header, batch)
        self._marked = marked
        return kept

    async def _decode_aside(self, header: BatchHeader, batch: memoryview) -> None:
        records = {record.offset: record for record in await decode(header, batch, self._aside)}
        self._records = (header.base_offset, records)
        asyncio.get_running_loop().call_soon(self._forget, header.base_offset)

    def _forget(self, base_offset: int) -> None:
        if self._records[0] == base_offset:
            self._records = (-1, {})
            self._kept = []  # the next read prepares it again

    def records(self, header: BatchHeader, batch: memoryview) -> dict[int, Record]:
        """Records by offset. Raises `UnreadableOffset` if the batch cannot be decoded."""
        base, records = self._records
        if base != header.base_offset:
            records = _by_offset(header, batch)
            self._records = (header.base_offset, records)
        return records

    def has_delays(self, header: BatchHeader) -> bool:
        """Whether a batch from `batches` may hold delayed records."""
        return header.base_offset in self._marked

    async def date(self, offset: int) -> None:
        """Reads the timestamp for `timestamp_at`, which cannot wait for a database."""
        self._dated = None
        slice_ = await self._log.read(offset, 1)
        self._dated = next((header.base_timestamp for header, _ in codec.split(slice_.to_bytes())), None)

    def timestamp_at(self, offset: int | None) -> int | None:
        """The timestamp that `date` found, or of the batch that holds an offset; None if it is not known yet, or if the
        batch is gone.
        """
        dated, self._dated = self._dated, None
        if offset is None:
            return None
        if dated is not None:
            return dated
        try:
            read = self._log.read(offset, 1)
            if not read.done:
                return None
            return next((header.base_timestamp for header, _ in codec.split(read.value().to_bytes())), None)
        except RequestError:
            return None


def _by_offset(header: BatchHeader, batch: memoryview) -> dict[int, Record]:
    """For small batches; large ones were decoded aside."""
    try:
        return {record.offset: record for record in codec.decode(batch, check_crc=False)}
    except CorruptBatch as error:
        raise undecodable(header, error) from error


def first_due(record: Record, delay_ms: int) -> int:
    """The earliest time of a record's first delivery. An invalid header delays nothing."""
    due = record.timestamp + delay_ms if delay_ms else 0
    for name, value in record.headers:
        if name == DELIVER_AT and value and len(value) <= _DIGITS_MAX and value.isdigit():
            due = max(due, int(value))
    return due
