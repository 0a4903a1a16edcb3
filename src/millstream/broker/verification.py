"""Verifies stored batches: reads them from the store and compares their CRC-32C.

A verification walks partitions from their start to their current end, in pieces of about a megabyte. A thread checks
each piece. Damage goes into the log's `Damage` registry, which readers, `/healthz`, `topic describe` and the metrics
use. Known damage is verified again: a restored file becomes readable. Reads go through the log like those of any
consumer, so the code that refuses holes and broken headers to a client also finds them here.

`millstream log verify` runs once; `scrub.py` runs forever, slowly.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import NamedTuple

from millstream.broker.topics import Topic
from millstream.core.errors import Code, RequestError
from millstream.core.metrics import Metrics
from millstream.log.damage import DamagedOffset, DamagedRange
from millstream.log.slice import Slice
from millstream.records.batch import sound_batches
from millstream.stores.base import PartitionLog

PIECE_BYTES = 1 << 20
"""Bytes per read: some 10 ms on a slow disk, and a millisecond of checksums in a thread."""


class Piece(NamedTuple):
    next_offset: int
    size: int


async def verify_piece(log: PartitionLog, offset: int) -> Piece:
    """Verifies the batches from an offset on, and updates `log.damage`: adds damage, removes repaired ranges."""
    try:
        try:
            slice_ = await log.read(max(offset, log.start), PIECE_BYTES)
        except DamagedOffset as error:
            damaged = await log.inspect(max(offset, error.range.first))
            if damaged is not None:
                return Piece(damaged.end, 0)
            slice_ = await log.read(max(offset, log.start), PIECE_BYTES)
    except RequestError as error:
        if error.code != Code.OFFSET_OUT_OF_RANGE:
            raise
        return Piece(max(offset, log.start), 0)  # trimmed
    sound, next_offset = await asyncio.to_thread(_walk, slice_, offset)
    if sound < slice_.size:
        damaged = await log.inspect(next_offset)
        if damaged is not None:
            return Piece(damaged.end, sound)
    return Piece(max(slice_.next_offset, offset), slice_.size)


def _walk(slice_: Slice, offset: int) -> tuple[int, int]:
    """The number of sound bytes at the front of a slice, and the offset after them."""
    sound = 0
    for header, batch in sound_batches(slice_.to_bytes(), 0, slice_.next_offset, offset):
        sound, offset = sound + len(batch), header.next_offset
    return sound, offset


class Verification:
    """One run over some topics, up to their ends at its start."""

    def __init__(self, topics: Iterable[Topic], metrics: Metrics) -> None:
        self._metrics = metrics
        self._parts = [(topic, part, part.log.high_watermark) for topic in topics for part in topic.partitions]
        self.bytes_total = sum(part.log.size_bytes() for _, part, _ in self._parts)
        self.bytes_done = 0
        self.partitions_total = len(self._parts)
        self.partitions_done = 0
        self.unread: list[str] = []
        """One sentence per partition that could not be read to its end."""
        self.is_over = False

    async def run(self) -> None:
        try:
            for topic, part, end in self._parts:
                try:
                    await self._verify(part.log, end)
                except (RequestError, OSError) as error:
                    if not isinstance(error, RequestError) or error.code != Code.UNKNOWN_TOPIC_OR_PARTITION:
                        self.unread.append(f"{topic.name}-{part.index} cannot be read: {error}")
                self.partitions_done += 1
        finally:
            self.is_over = True

    async def _verify(self, log: PartitionLog, end: int) -> None:
        offset = log.start
        while offset < end:
            piece = await verify_piece(log, offset)
            self.bytes_done += piece.size
            self._metrics.verified_bytes += piece.size
            if piece.next_offset <= offset:  # trimmed to its end
                return
            offset = piece.next_offset

    def damage(self) -> list[tuple[str, int, DamagedRange]]:
        """All known damage in these partitions, found before the run or by it."""
        return [
            (topic.name, part.index, damaged) for topic, part, _ in self._parts for damaged in part.log.damage.ranges
        ]
