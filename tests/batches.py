"""Batches for tests: made in a line, appended in another, and read back as records."""

from __future__ import annotations

from collections.abc import Sequence

from millstream.core.promise import Promise
from millstream.log.answers import Appended
from millstream.records import codec
from millstream.records.batch import NO_PRODUCER, read_header
from millstream.records.record import Record
from millstream.stores.base import PartitionLog
from millstream.wire.kafka.pure_runs import Part

NOW = 1_700_000_000_000


def batch(
    *values: bytes | None,
    keys: Sequence[bytes | None] = (),
    at: int = NOW,
    producer: int = NO_PRODUCER,
    epoch: int = 0,
    sequence: int = 0,
) -> bytearray:
    """One batch with these values, all of the same time."""
    names = keys or [None] * len(values)
    records = [Record(0, at, key, value) for key, value in zip(names, values, strict=True)]
    if producer == NO_PRODUCER:
        return codec.encode(records)
    return codec.encode(records, producer_id=producer, producer_epoch=epoch, base_sequence=sequence)


def append(log: PartitionLog, data: bytearray) -> Promise[Appended]:
    return log.append(memoryview(data), read_header(data))


def append_run(log: PartitionLog, *batches: bytearray) -> Promise[Appended]:
    """Several batches at once, as the Kafka door does with small requests."""
    run = Part(1 << 20, 1 << 20)
    for data in batches:
        assert run.add(memoryview(data)) is not None
    return log.append_run(run)


async def fill(log: PartitionLog, count: int, size: int = 100, at: int = NOW) -> list[bytes]:
    """So many batches of one record, a millisecond apart; answers with the values."""
    values = [b"%d:" % number + bytes(size) for number in range(count)]
    promises = [append(log, batch(value, at=at + number)) for number, value in enumerate(values)]
    for promise in promises:
        await promise
    return values


def read_all(log: PartitionLog, offset: int | None = None, bytes_max: int = 1 << 20) -> list[Record]:
    """Every record from an offset on, read piece by piece."""
    records: list[Record] = []
    at = log.start if offset is None else offset
    while at < log.high_watermark:
        piece = log.read(at, bytes_max).value()
        if not piece.size:
            break
        records += [record for record in codec.iterate(piece.to_bytes()) if record.offset >= at]
        assert piece.next_offset > at
        at = piece.next_offset
    return records


async def read_back(log: PartitionLog, offset: int | None = None, bytes_max: int = 1 << 20) -> list[Record]:
    """`read_all` from a log whose reads may take their time."""
    records: list[Record] = []
    at = log.start if offset is None else offset
    while at < log.high_watermark:
        piece = await log.read(at, bytes_max)
        if not piece.size:
            break
        records += [record for record in codec.iterate(piece.to_bytes()) if record.offset >= at]
        assert piece.next_offset > at
        at = piece.next_offset
    return records
