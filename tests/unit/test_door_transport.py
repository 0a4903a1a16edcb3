"""The doors over transports that are no plain sockets: TLS with a real client, and one in memory."""

from __future__ import annotations

import asyncio
import gc
import ssl
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trustme
from confluent_kafka import Consumer, Producer

from millstream.broker.broker import Broker
from millstream.broker.session import Sessions
from millstream.config import Address, Config
from millstream.core.clock import SystemClock
from millstream.core.metrics import Metrics
from millstream.doors.engine.connection import Connection
from millstream.doors.kafka.door import KafkaDoor
from millstream.doors.kafka.protocol import KafkaProtocol
from millstream.stores.url import open_store
from tests.compat import raw
from tests.transports import MemoryTransport, TlsTransport


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    config, clock = Config(store=f"file:{tmp_path}"), SystemClock()
    broker = Broker(config, *open_store(config.store, clock, lambda seconds: None), clock, Metrics())
    await broker.start()
    yield broker
    await broker.close()


@pytest.mark.parametrize("size", [100, 300_000], ids=["small", "large"])
async def test_a_kafka_client_produces_and_consumes_over_tls(broker: Broker, tmp_path: Path, size: int) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    door = KafkaDoor(Sessions(broker), partial(TlsTransport, context))
    address = door.start(Address("127.0.0.1", 0))
    values = [b"%d" % number * size for number in range(10)]
    client = {
        "bootstrap.servers": str(address),
        "security.protocol": "SSL",
        "ssl.ca.location": str(tmp_path / "ca.pem"),
    }
    assert await asyncio.to_thread(produced_and_consumed, client, values) == values
    await door.close()


def produced_and_consumed(client: dict[str, Any], values: list[bytes]) -> list[bytes]:
    producer = Producer(client)
    for value in values:
        producer.produce("secret", value, partition=0)
    assert producer.flush(20) == 0
    consumer = Consumer({**client, "group.id": "readers", "auto.offset.reset": "earliest"})
    consumer.subscribe(["secret"])
    found: list[bytes] = []
    while len(found) < len(values):
        message = consumer.poll(20)
        assert message is not None and message.error() is None
        found.append(message.value())
    consumer.close()
    return found


@pytest.fixture
async def door(broker: Broker) -> AsyncIterator[KafkaDoor]:
    await broker.topics.create("orders", 1, {})
    door = KafkaDoor(Sessions(broker))
    yield door
    await door.close()
    assert door.frames.free == door.frames.limit, "all memory was given back"


def connect(door: KafkaDoor, room: int = 1 << 30) -> MemoryTransport:
    transport = MemoryTransport(room)
    door._let_in(transport, "192.0.2.1")
    return transport


async def answered(client: MemoryTransport, count: int) -> list[bytes]:
    """Whole answers, when so many have arrived."""
    await until(lambda: len(split(client.taken)) >= count)
    return split(client.taken)


async def until(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not happened():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def split(data: bytearray) -> list[bytes]:
    found, at = [], 0
    while at + 4 <= len(data):
        end = at + 4 + int.from_bytes(data[at : at + 4], "big")
        if end > len(data):
            break
        found.append(bytes(data[at + 4 : end]))
        at = end
    return found


@pytest.mark.parametrize("piece", [1, 7, 1000, 1 << 20])
async def test_any_split_of_the_bytes_gives_the_same_answers(door: KafkaDoor, piece: int) -> None:
    client = connect(door)
    requests = [raw.produce("orders", raw.batch(b"v" * size)) for size in (1, 5000, 200_000 if piece > 7 else 1)]
    data = b"".join(requests)
    for at in range(0, len(data), piece):
        client.put(data[at : at + piece])
        await asyncio.sleep(0)
    await answered(client, 3)
    client.put(raw.fetch("orders", 0))
    assert b"v" * 5000 in (await answered(client, 4))[3]
    client.put_end()
    await until(lambda: client.is_closed)


async def test_a_client_that_takes_no_answers_is_not_read(door: KafkaDoor) -> None:
    writer = connect(door)
    writer.put(raw.produce("orders", raw.batch(b"v" * 100_000)))
    await answered(writer, 1)
    client = connect(door, room=1000)
    client.put(raw.fetch("orders", 0))
    await until(lambda: not client.is_read)
    client.put(raw.fetch("orders", 0))
    assert client.unread and len(client.taken) == 1000
    client.give_room(1 << 20)
    assert all(b"v" * 100_000 in each for each in await answered(client, 2))


async def test_a_long_poll_ends_when_its_client_hangs_up_behind_unread_bytes(door: KafkaDoor) -> None:
    client = connect(door)
    client.put(raw.fetch("orders", 0, wait_ms=60_000))
    await until(lambda: not client.unread)
    client.put(raw.fetch("orders", 0))
    await until(lambda: not client.is_read)
    assert client.unread and not client.taken, "the second waits for the first"
    client.put_end()
    await answered(client, 2)


async def test_a_closed_connection_is_freed_at_once_with_its_unsent_answers(door: KafkaDoor) -> None:
    client = connect(door, room=10)
    client.put(raw.produce("orders", raw.batch(b"v")) * 3)
    await until(lambda: len(client.taken) == 10)
    gc.collect()
    gc.disable()
    try:
        door._connections.make_room()
        assert client.is_closed
        assert not any(isinstance(each, Connection | KafkaProtocol) for each in gc.get_objects())
    finally:
        gc.enable()
