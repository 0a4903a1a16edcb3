"""Whether stored batches are still the ones that were written: read from the store, held against their CRC-32C.

A verification walks partitions from their start to where they end now, in pieces of about a megabyte. Reading and
checking a piece takes its time and runs in a thread; what is found goes into the log's `Damage`, from which readers,
`/healthz`, `topic describe` and the metrics learn of it. Places that are known to be damaged are looked at again: a
restored file is readable from then on. Reading goes through the log like that of any consumer, so
holes and broken headers are found by the same code that would refuse them to a client.

`millstream log verify` runs one to its end; `scrub.py` runs one for ever, slowly.
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
"""Read at a time: a slow disk needs some 10 ms for it, a thread a millisecond for its checksums."""


class Piece(NamedTuple):
    next_offset: int
    size: int


async def verify_piece(log: PartitionLog, offset: int) -> Piece:
    """Checks the batches from an offset on; what is damaged is in `log.damage` afterwards, and nothing else is."""
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
        return Piece(max(offset, log.start), 0)  # trimmed meanwhile
    sound, next_offset = await asyncio.to_thread(_walk, slice_, offset)
    if sound < slice_.size:
        damaged = await log.inspect(next_offset)
        if damaged is not None:
            return Piece(damaged.end, sound)
    return Piece(max(slice_.next_offset, offset), slice_.size)


def _walk(slice_: Slice, offset: int) -> tuple[int, int]:
    """How many bytes at the front of a slice are sound, and the offset behind them."""
    sound = 0
    for header, batch in sound_batches(slice_.to_bytes(), 0, slice_.next_offset, offset):
        sound, offset = sound + len(batch), header.next_offset
    return sound, offset


class Verification:
    """One run over some topics, as far as they reach when it begins."""

    def __init__(self, topics: Iterable[Topic], metrics: Metrics) -> None:
        self._metrics = metrics
        self._parts = [(topic, part, part.log.high_watermark) for topic in topics for part in topic.partitions]
        self.bytes_total = sum(part.log.size_bytes() for _, part, _ in self._parts)
        self.bytes_done = 0
        self.partitions_total = len(self._parts)
        self.partitions_done = 0
        self.unread: list[str] = []
        """A sentence for each partition that could not be read to its end."""
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
            if piece.next_offset <= offset:  # trimmed to its end meanwhile
                return
            offset = piece.next_offset

    def damage(self) -> list[tuple[str, int, DamagedRange]]:
        """What is known to be damaged in these partitions, before the run or by it."""
        return [
            (topic.name, part.index, damaged) for topic, part, _ in self._parts for damaged in part.log.damage.ranges
        ]
