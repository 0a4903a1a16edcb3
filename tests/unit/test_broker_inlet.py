"""Single records on their way into a partition."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from millstream.broker.broker import Broker
from millstream.broker.inlet import Inlet
from millstream.config import Config
from millstream.core.errors import Code, RequestError
from millstream.core.metrics import Metrics
from millstream.records import codec
from millstream.records.record import Headers
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


async def inlet(broker: Broker, **settings: str) -> Inlet:
    topic = await broker.topics.create("jobs", 1, {name.replace("_", "."): value for name, value in settings.items()})
    return broker.inlet(topic.partitions[0])


def stored(broker: Broker) -> bytes:
    topic = broker.topics.get("jobs")
    assert topic is not None
    return topic.partitions[0].log.read(0, 1 << 30).value().to_bytes()


async def test_what_comes_in_one_turn_is_one_batch_and_every_record_learns_its_offset(broker: Broker) -> None:
    into = await inlet(broker)
    offsets = await asyncio.gather(*(_put(into, b"%d" % number) for number in range(100)))
    assert offsets == list(range(100))
    assert [record.value for record in codec.decode(stored(broker))] == [b"%d" % number for number in range(100)]


async def test_records_that_do_not_fit_one_batch_become_several_in_order(broker: Broker) -> None:
    into = await inlet(broker, max_message_bytes="1000")
    offsets = await asyncio.gather(*(_put(into, bytes([number]) * 300) for number in range(10)))
    assert offsets == list(range(10))
    assert [record.value for record in codec.iterate(stored(broker))] == [bytes([n]) * 300 for n in range(10)]


async def test_a_record_that_is_too_large_is_refused_and_costs_the_others_nothing(broker: Broker) -> None:
    into = await inlet(broker, max_message_bytes="1000")
    before, refused, after = into.put(b"a"), into.put(b"x" * 1000), into.put(b"b", b"k", (("name", b"v"),), 5)
    assert isinstance(refused.error, RequestError) and refused.error.code == Code.MESSAGE_TOO_LARGE
    assert [await before, await after] == [0, 1]
    record = codec.decode(stored(broker))[1]
    assert (record.key, record.value, record.headers, record.timestamp) == (b"k", b"b", (("name", b"v"),), 5)


@pytest.mark.parametrize("key", [None, b"", b"k" * 70], ids=["no key", "an empty key", "a key"])
@pytest.mark.parametrize("headers", [(), (("née", b"v"), ("none", None))], ids=["no headers", "headers"])
@pytest.mark.parametrize("size", [0, 50, 63, 64, 8191, 8192, 20_000])
async def test_the_limit_is_that_of_the_batch_that_is_stored(
    broker: Broker, key: bytes | None, headers: Headers, size: int
) -> None:
    """The same that a Kafka producer's batch of this record is held to."""
    stored_bytes = len(codec.encode_own([(0, 0, key, bytes(size), headers)])[0])
    into = await inlet(broker, max_message_bytes=str(stored_bytes - 1))
    refused = into.put(bytes(size), key, headers)
    assert isinstance(refused.error, RequestError) and refused.error.code == Code.MESSAGE_TOO_LARGE
    assert f"has {stored_bytes} bytes, the topic's max.message.bytes is {stored_bytes - 1}" in refused.error.detail
    await broker.delete_topic("jobs")
    into = await inlet(broker, max_message_bytes=str(stored_bytes))
    assert [await promise for promise in [into.put(bytes(size), key, headers) for _ in range(3)]] == [0, 1, 2]
    assert [len(batch) for _, batch in codec.split(stored(broker))] == [stored_bytes] * 3


async def test_a_compacted_topic_refuses_a_record_without_a_key_alone(broker: Broker) -> None:
    into = await inlet(broker, cleanup_policy="compact")
    refused, taken = into.put(b"a"), into.put(b"b", b"key")
    assert isinstance(refused.error, RequestError) and refused.error.code == Code.INVALID_RECORD
    assert await taken == 0


async def _put(into: Inlet, value: bytes) -> int:
    return await into.put(value)


async def test_large_records_leave_at_once_behind_what_waits_and_their_views_are_done_with(broker: Broker) -> None:
    into = await inlet(broker)
    frame = bytearray(b"L" * 50_000)
    promises = [into.put(b"a"), into.put(b"b"), into.put(memoryview(frame)[:40_000], b"key"), into.put(b"c")]
    frame[:] = bytes(len(frame))
    assert [await promise for promise in promises] == [0, 1, 2, 3]
    records = list(codec.iterate(stored(broker)))
    assert [record.value for record in records] == [b"a", b"b", b"L" * 40_000, b"c"]
    assert records[2].key == b"key" and records[2].timestamp == broker.clock.now_ms()


async def test_small_views_are_copied_before_the_turn_ends(broker: Broker) -> None:
    into = await inlet(broker)
    frame = bytearray(b"small")
    promise = into.put(memoryview(frame))
    frame[:] = b"other"
    await promise
    assert codec.decode(stored(broker))[0].value == b"small"


async def put_all(into: Inlet, *values: bytes, key: bytes | None = None) -> list[tuple[int, int]]:
    """Base offset and size of each batch."""
    rows = [(0, 5, key, value, ()) for value in values]
    parts = into.split(rows, sum(len(value) + len(key or b"") for value in values))
    return [((await promise).base_offset, count) for count, promise in into.put_parts(parts)]


async def test_the_records_of_a_request_are_one_batch_behind_those_that_wait(broker: Broker) -> None:
    into = await inlet(broker)
    waiting = into.put(b"waiting")
    assert await put_all(into, *[b"%d" % number for number in range(100)]) == [(1, 100)]
    assert await waiting == 0
    assert [len(codec.decode(batch)) for _, batch in codec.split(stored(broker))] == [1, 100]


@pytest.mark.parametrize("key", [None, b"k" * 70])
async def test_a_request_larger_than_a_batch_becomes_several(broker: Broker, key: bytes | None) -> None:
    into = await inlet(broker, max_message_bytes="1000")
    placed = await put_all(into, *[bytes([number]) * 200 for number in range(10)], key=key)
    assert len(placed) > 2 and sum(count for _, count in placed) == 10
    assert [offset for offset, _ in placed] == [sum(count for _, count in placed[:at]) for at in range(len(placed))]
    assert all(len(batch) <= 1000 for _, batch in codec.split(stored(broker)))
    assert [record.value for record in codec.iterate(stored(broker))] == [bytes([n]) * 200 for n in range(10)]


async def test_a_request_with_an_invalid_record_appends_nothing(broker: Broker) -> None:
    into = await inlet(broker, max_message_bytes="1000", cleanup_policy="compact")
    for values, key in (([b"a", b"x" * 1000], b"k"), ([b"a"], None)):
        with pytest.raises(RequestError):
            await put_all(into, *values, key=key)
    assert stored(broker) == b""
