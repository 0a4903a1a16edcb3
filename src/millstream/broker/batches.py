"""Batches out of a log for readers that decode them: every checksum is checked before the first record is looked at.

The log checks what it reads from disk once (`log/checked.py`). Here each batch is checked again, just before it is
decoded: a bit that changes while the broker runs must not turn into a record with another value.
"""

from __future__ import annotations

from typing import NamedTuple

from millstream.log.damage import UnreadableOffset
from millstream.records import codec
from millstream.records.aside import Aside
from millstream.records.batch import BatchHeader, CorruptBatch, sound_batches
from millstream.records.record import Record
from millstream.stores.base import PartitionLog


class Batches(NamedTuple):
    sound: list[tuple[BatchHeader, memoryview]]
    next_offset: int
    """Where to read on."""


async def read_batches(log: PartitionLog, offset: int, bytes_max: int) -> Batches:
    """Whole batches from the one that holds an offset, or the next there is, each of them sound.

    Ends before a damaged batch, and raises `UnreadableOffset` where the first one is damaged. Raises what a read of the
    log raises.
    """
    part = await log.read(offset, bytes_max)
    if not part.size:
        return Batches([], part.next_offset)
    sound = list(sound_batches(part.to_bytes(), 0, part.next_offset, offset))
    if sum(len(batch) for _, batch in sound) == part.size:
        return Batches(sound, part.next_offset)
    behind = sound[-1][0].next_offset if sound else offset
    await log.inspect(behind)
    if not sound:
        log.damage.check(offset)
        raise CorruptBatch(f"the batch at offset {offset} was damaged when it was read, and is not now; try again")
    return Batches(sound, behind)


async def decode(header: BatchHeader, batch: memoryview, aside: Aside) -> list[Record]:
    """The records of a batch that `read_batches` has checked; none of a control batch. Raises `UnreadableOffset`."""
    if header.is_control:
        return []
    try:
        return await aside.run(codec.decode, batch, check_crc=False)
    except CorruptBatch as error:
        raise undecodable(header, error) from error


def undecodable(header: BatchHeader, error: CorruptBatch) -> UnreadableOffset:
    """What a reader is told of a batch whose checksum matches and whose records make no sense."""
    first, next_offset = header.base_offset, header.next_offset
    detail = (
        f"the batch of offsets {first} to {next_offset - 1} cannot be decoded ({error.detail}); "
        f"the next offset to read is {next_offset}"
    )
    return UnreadableOffset(first, next_offset, detail)
