"""Records that a leader of another system sends with their offsets (Comet's Replicate).

Rules
-----
1. Records keep their offsets. They enter the log through the gate (`Partition.follow`), as one batch. Offsets may be
   missing, before the batch and inside it.
2. Records below the end of the log must be those that the log holds: key, value and timestamp. So a repeated request
   changes nothing, and a request that overlaps the end adds only its new records. A different record at an existing
   offset is refused with `Diverged`, and none of its request's records is stored. Records below the start of the log,
   which retention has deleted, count as stored.
3. A missing topic, or a missing partition of a topic, is created.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from millstream.broker.outlet import Outlet
from millstream.broker.partition import Partition
from millstream.core.errors import Code, Diverged, RequestError
from millstream.log.damage import UnreadableOffset
from millstream.records import codec
from millstream.records.batch import patch_offset, read_header
from millstream.records.record import Record
from millstream.stores.base import PartitionLog

if TYPE_CHECKING:
    from millstream.broker.broker import Broker

READ_BYTES = 1 << 20


async def replicate(
    broker: Broker, name: str, index: int, records: Sequence[Record], overrides: Mapping[str, str]
) -> None:
    """Returns when the records are durable."""
    if not broker.can_follow:
        detail = (
            f"the store cannot take records with offsets ({broker.storage()[0]}): replicate to a broker whose store is "
            "file:DIR, or produce the records"
        )
        raise RequestError(Code.INVALID_REQUEST, detail)
    if index < 0:
        raise RequestError(Code.INVALID_PARTITIONS, f"invalid partition {index}")
    _check(records)
    partition = await _ensure(broker, name, index, overrides)
    log, left = partition.log, records
    while left and left[0].offset < log.end:
        known = [each for each in left if each.offset < log.end]
        await _compare(broker.outlet, log, known)
        left = left[len(known) :]
    if not left:
        await log.flush()
        return
    epoch = max(log.epochs.latest, 0)
    batch = memoryview(codec.encode(left, base_offset=left[0].offset))
    patch_offset(batch, left[0].offset, read_header(batch).length, epoch)
    header = read_header(batch)
    appended = partition.follow(batch, header)
    broker.metrics.batches_in += 1
    broker.metrics.records_in += header.count
    await appended


def _check(records: Sequence[Record]) -> None:
    offsets = [each.offset for each in records]
    if not offsets:
        return
    if offsets[0] < 0 or any(first >= second for first, second in pairwise(offsets)):
        raise RequestError(Code.INVALID_REQUEST, "the offsets of replicated records must rise, from 0 or above")
    if offsets[-1] - offsets[0] > codec.OFFSET_DELTA_MAX:
        raise RequestError(Code.INVALID_REQUEST, "the offsets of one request span more than a batch can")
    if any(each.timestamp < 0 for each in records):
        raise RequestError(Code.INVALID_TIMESTAMP, "a replicated record has a timestamp before 1970")


async def _ensure(broker: Broker, name: str, index: int, overrides: Mapping[str, str]) -> Partition:
    topic = await broker.topics.ensure(name, index + 1, overrides)
    if index >= topic.partition_count:
        async with broker.changing:
            if index >= topic.partition_count:
                await broker.topics.grow(name, index + 1)
    return topic.partitions[index]


async def _compare(outlet: Outlet, log: PartitionLog, records: Sequence[Record]) -> None:
    """Raises `Diverged` unless the log holds these records."""
    wanted = {each.offset: each for each in records if each.offset >= log.start}
    await log.flush()  # the outlet reads below the high watermark
    position = min(wanted, default=log.end)
    while wanted and position <= records[-1].offset:
        try:
            taken = await outlet.take(log, position, READ_BYTES)
        except UnreadableOffset as error:
            raise Diverged(f"stored records cannot be compared: {error.detail}") from error
        for stored in taken.records:
            record = wanted.get(stored.offset)
            if record is not None and _content(record) == _content(stored):
                del wanted[stored.offset]
        if taken.next_offset <= position:
            break
        position = taken.next_offset
    if wanted:
        offset = min(wanted)
        raise Diverged(f"offset {offset} holds another record than the leader's, or none; nothing was stored")


def _content(record: Record) -> tuple[bytes, bytes, int]:
    return record.key or b"", record.value or b"", record.timestamp
