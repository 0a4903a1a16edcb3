"""Reads batches from a log for readers that decode them, and verifies each checksum before it decodes a record.

The log verifies data once, when it reads it from disk (`log/checked.py`). This module verifies each batch again, just
before decoding: a bit that flips while the broker runs must not change a record.
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
    """The next read."""


async def read_batches(log: PartitionLog, offset: int, bytes_max: int) -> Batches:
    """Returns whole, sound batches, from the batch that holds an offset or the next one.

    Stops before a damaged batch; raises `UnreadableOffset` if the first batch is damaged, and the errors of
    `log.read`.
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
        raise CorruptBatch(f"the batch at offset {offset} was unreadable once and is valid now; try again")
    return Batches(sound, behind)


async def decode(header: BatchHeader, batch: memoryview, aside: Aside) -> list[Record]:
    """Decodes a batch that `read_batches` verified; a control batch has no records. Raises `UnreadableOffset`."""
    if header.is_control:
        return []
    try:
        return await aside.run(codec.decode, batch, check_crc=False)
    except CorruptBatch as error:
        raise undecodable(header, error) from error


def undecodable(header: BatchHeader, error: CorruptBatch) -> UnreadableOffset:
    """The error for a batch whose checksum matches but whose records cannot be decoded."""
    first, next_offset = header.base_offset, header.next_offset
    detail = (
        f"the batch of offsets {first} to {next_offset - 1} cannot be decoded ({error.detail}); "
        f"the next offset to read is {next_offset}"
    )
    return UnreadableOffset(first, next_offset, detail)
