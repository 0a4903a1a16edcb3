"""A queue's view of the log: batches, and the records in the one that it looked at last."""

from __future__ import annotations

import logging
from bisect import bisect_left

from millstream.errors import Code, RequestError
from millstream.records import codec
from millstream.records.batch import BatchHeader, CorruptBatch
from millstream.records.record import Record
from millstream.stores.base import PartitionLog

DELIVER_AT = "millstream-deliver-at"
"""The header of a record that is not to be delivered before a time: milliseconds since 1970, in decimal."""
READ_BYTES_MAX = 128 * 1024
"""Of one look at the log. It is kept until the next one, and there may be many queues."""
_MARK = DELIVER_AT.encode()
_DIGITS_MAX = 16

logger = logging.getLogger(__name__)


class Reading:
    __slots__ = ("_dated", "_kept", "_log", "_records")

    def __init__(self, log: PartitionLog) -> None:
        self._log = log
        self._kept: list[tuple[BatchHeader, memoryview]] = []
        """What was read last, from where it was used last: records are often taken one by one."""
        self._records: tuple[int, dict[int, Record]] = (-1, {})
        self._dated: int | None = None
        """What `date` found, until it is asked for."""

    async def batches(self, offset: int, bytes_max: int) -> list[tuple[BatchHeader, memoryview]]:
        """A piece of the log, whole batches: from the one that holds an offset, or the next there is.

        Empty if it was trimmed meanwhile: the next look sees where the log begins now. Any other failure is raised.
        What cannot be read now is still there.
        """
        kept = self._kept
        if not (kept and kept[0][0].base_offset <= offset <= kept[-1][0].last_offset):
            try:
                slice_ = await self._log.read(offset, min(bytes_max, READ_BYTES_MAX))
            except RequestError as error:
                if error.code != Code.OFFSET_OUT_OF_RANGE:
                    raise
                return []
            self._kept = kept = list(codec.split(slice_.to_bytes()))
        elif kept[0][0].last_offset < offset:
            start = bisect_left(kept, offset, key=lambda each: each[0].last_offset)
            self._kept = kept = kept[start:]
        return kept

    def records(self, header: BatchHeader, batch: memoryview) -> dict[int, Record]:
        base, records = self._records
        if base != header.base_offset:
            try:
                records = {record.offset: record for record in codec.decode(batch, check_crc=False)}
            except CorruptBatch as error:
                logger.error("the batch at offset %d cannot be decoded and is passed over: %s", base, error)
                records = {}
            self._records = (header.base_offset, records)
        return records

    def has_delays(self, batch: memoryview) -> bool:
        try:
            return codec.contains(batch, _MARK)
        except CorruptBatch:
            return False

    async def date(self, offset: int) -> None:
        """Finds what `timestamp_at` will say next: a log in a database cannot say so at once."""
        self._dated = None
        slice_ = await self._log.read(offset, 1)
        self._dated = next((header.base_timestamp for header, _ in codec.split(slice_.to_bytes())), None)

    def timestamp_at(self, offset: int | None) -> int | None:
        """Of the batch that holds an offset, or of what was dated a moment ago; None where nobody knows yet, or where
        there is nothing any more.
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


def first_due(record: Record, delay_ms: int) -> int:
    """When a record may be delivered for the first time; a header that makes no sense delays nothing."""
    due = record.timestamp + delay_ms if delay_ms else 0
    for name, value in record.headers:
        if name == DELIVER_AT and value and len(value) <= _DIGITS_MAX and value.isdigit():
            due = max(due, int(value))
    return due
