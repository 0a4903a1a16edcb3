"""Single records on their way out of a partition."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from millstream.broker.broker import Broker
from millstream.broker.outlet import KEPT_BYTES_MAX, RECORDS_MAX, Outlet
from millstream.config import Config
from millstream.core.errors import Code, RequestError
from millstream.core.metrics import Metrics
from millstream.records import codec
from millstream.records.compression import Codec
from millstream.records.record import Record
from millstream.stores.base import PartitionLog
from millstream.stores.keys import MemoryMeta
from millstream.stores.memory import MemoryLogStore
from millstream.testing.clock import VirtualClock


@pytest.fixture
async def broker() -> AsyncIterator[Broker]:
    clock = VirtualClock()
    broker = Broker(Config(), MemoryLogStore(clock), MemoryMeta(), clock, Metrics())
    await broker.start()
    yield broker
    await broker.close()


async def filled(broker: Broker, batches: int, of: int, codec_: Codec = Codec.NONE, name: str = "t") -> PartitionLog:
    """A log whose values are their offsets, ten digits each."""
    topic = await broker.topics.create(name, 1, {})
    for number in range(batches):
        rows = [(0, 0, None, b"%010d" % (number * of + at)) for at in range(of)]
        await topic.partitions[0].append(memoryview(codec.encode(rows, codec=codec_)), broker.clock)[1]
    return topic.partitions[0].log


def values(taken: object) -> list[int]:
    return [int(record.value) for record in taken.records]  # type: ignore[attr-defined]


@pytest.mark.parametrize("compression", [Codec.NONE, Codec.ZSTD])
async def test_every_way_to_cut_a_log_gives_every_record_once(broker: Broker, compression: Codec) -> None:
    log = await filled(broker, 20, 10, compression)
    for bytes_max in (0, 1, 10, 55, 100, 1234, 1 << 20):
        found, offset = [], 0
        while (taken := await broker.outlet.take(log, offset, bytes_max)).records:
            found += values(taken)
            assert sum(len(record.value or b"") for record in taken.records) <= max(bytes_max, 10)
            offset = taken.next_offset
        assert found == list(range(200)) and offset == 200


async def test_a_count_bounds_what_is_taken(broker: Broker) -> None:
    log = await filled(broker, 3, 10)
    assert values(await broker.outlet.take(log, 5, 1 << 20, count_max=7)) == list(range(5, 12))
    assert values(await broker.outlet.take(log, 5, 0, count_max=1)) == [5]


async def test_records_that_are_empty_have_a_bound_too(broker: Broker) -> None:
    topic = await broker.topics.create("empty", 1, {})
    for _ in range(3):
        batch = memoryview(codec.encode([(0, 0, None, b"")] * 4000))
        await topic.partitions[0].append(batch, broker.clock)[1]
    log = topic.partitions[0].log
    taken = await broker.outlet.take(log, 0, 1)
    assert len(taken.records) == RECORDS_MAX == taken.next_offset == 10_000
    assert len((await broker.outlet.take(log, taken.next_offset, 1)).records) == 2000


async def test_heads_of_records_count(broker: Broker) -> None:
    log = await filled(broker, 3, 10)
    assert values(await broker.outlet.take(log, 0, 44, head_bytes=12)) == [0, 1]
    assert values(await broker.outlet.take(log, 0, 43, head_bytes=12)) == [0]


async def test_outside_of_the_log_is_an_error_and_its_end_is_none(broker: Broker) -> None:
    log = await filled(broker, 1, 10)
    assert (await broker.outlet.take(log, 10, 100)).records == []
    for offset in (11, -1):
        with pytest.raises(RequestError) as raised:
            await broker.outlet.take(log, offset, 100)
        assert raised.value.code == Code.OFFSET_OUT_OF_RANGE


async def test_a_batch_that_is_kept_is_not_read_behind_the_start_of_the_log(broker: Broker) -> None:
    log = await filled(broker, 2, 10)
    assert values(await broker.outlet.take(log, 2, 0, count_max=1)) == [2]
    await log.trim(15)
    with pytest.raises(RequestError):
        await broker.outlet.take(log, 3, 0, count_max=1)
    assert values(await broker.outlet.take(log, 15, 1000)) == [15, 16, 17, 18, 19]


async def test_one_by_one_a_batch_is_decoded_once(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    log = await filled(broker, 2, 100)
    decoded = []
    decode = codec.decode

    def counted(*args: Any, **more: Any) -> list[Record]:
        records = decode(*args, **more)
        decoded.append(len(records))
        return records

    monkeypatch.setattr(codec, "decode", counted)
    for offset in range(200):
        assert values(await broker.outlet.take(log, offset, 0, count_max=1)) == [offset]
    assert len(decoded) == 2
    largest = await filled(broker, 1, 50_000, name="largest")  # about what max.message.bytes takes of such records
    for offset in range(30_000, 30_010):
        assert values(await broker.outlet.take(largest, offset, 0, count_max=1)) == [offset]
    assert len(decoded) == 3


async def test_what_is_kept_has_a_bound(broker: Broker) -> None:
    outlet = Outlet()
    for number in range(60):
        topic = await broker.topics.create(f"large-{number}", 1, {})
        rows = [(0, 0, None, bytes(900_000 // 2))] * 2
        await topic.partitions[0].append(memoryview(codec.encode(rows)), broker.clock)[1]
        await outlet.take(topic.partitions[0].log, 0, 0, count_max=1)
        assert outlet._size == sum(batch.size for batch in outlet._kept.values()) <= KEPT_BYTES_MAX
    assert 10 < len(outlet._kept) < 60
    assert sum(map(len, outlet._latest.values())) == len(outlet._kept)
