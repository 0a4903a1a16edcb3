"""The doors over transports that are no plain sockets: TLS with a real client, and one in memory."""

from __future__ import annotations

import asyncio
import gc
import ssl
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import trustme
from confluent_kafka import Consumer, Producer

from millstream.broker.broker import Broker
from millstream.broker.session import Sessions
from millstream.config import Address, Config
from millstream.core.clock import SystemClock
from millstream.core.metrics import Metrics
from millstream.doors.engine.connection import Connection
from millstream.doors.engine.door import EngineDoor
from millstream.doors.flowmq.door import FlowmqDoor
from millstream.doors.flume.door import FlumeDoor
from millstream.doors.kafka.door import KafkaDoor
from millstream.doors.kafka.protocol import KafkaProtocol
from millstream.doors.transport import TransportFactory
from millstream.stores.url import open_store
from millstream.wire import flowmq
from tests import confluent
from tests.compat import raw
from tests.compat.client_flowmq import FlowmqClient, FlowmqError
from tests.compat.client_flume import Flume
from tests.transports import MemoryTransport, TlsTransport

T = TypeVar("T", FlowmqClient, Flume)


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    config, clock = Config(store=f"file:{tmp_path}"), SystemClock()
    broker = Broker(config, *open_store(config.store, clock, lambda seconds: None), clock, Metrics())
    await broker.start()
    yield broker
    await broker.close()


@pytest.fixture
def authority(tmp_path: Path) -> trustme.CA:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    return authority


@pytest.fixture
def tls(authority: trustme.CA) -> TransportFactory:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    return partial(TlsTransport, context)


def secured(client: T, tmp_path: Path) -> T:
    """The client, with its socket inside TLS."""
    context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    client.socket = context.wrap_socket(client.socket, server_hostname="127.0.0.1")
    return client


SIZES = pytest.mark.parametrize("size", [100, 300_000], ids=["small", "large"])


@SIZES
async def test_a_kafka_client_produces_and_consumes_over_tls(
    broker: Broker, tls: TransportFactory, tmp_path: Path, size: int
) -> None:
    door = KafkaDoor(Sessions(broker), tls)
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
        found.append(confluent.value(message))
    consumer.close()
    return found


@SIZES
async def test_flowmq_clients_publish_and_get_messages_over_tls(
    broker: Broker, tls: TransportFactory, tmp_path: Path, size: int
) -> None:
    door = FlowmqDoor(Sessions(broker), tls)
    address = door.start(Address("127.0.0.1", 0))
    values = [b"%d" % number * size for number in range(10)]

    def published_and_delivered() -> list[bytes]:
        with FlowmqClient(str(address)) as worker, FlowmqClient(str(address)) as publisher:
            secured(worker, tmp_path).subscribe("secret", "workers")
            secured(publisher, tmp_path)
            for value in values:
                publisher.publish("secret", value)
            found = [worker.next() for _ in values]
            for message in found:
                worker.ack(message)
            return [message.payload for message in found]

    assert await asyncio.to_thread(published_and_delivered) == values
    await door.close()


async def test_a_flowmq_client_reads_the_final_error_over_tls(
    broker: Broker, tls: TransportFactory, tmp_path: Path
) -> None:
    door = FlowmqDoor(Sessions(broker), tls)
    address = door.start(Address("127.0.0.1", 0))

    def refused() -> None:
        with FlowmqClient(str(address)) as client:
            secured(client, tmp_path).socket.sendall(flowmq.HEAD.pack(flowmq.Command.PING, 1 << 20) + bytes(100_000))
            with pytest.raises(FlowmqError, match="a payload of 1048576 bytes for PING"):
                client.answer()

    await asyncio.to_thread(refused)
    await door.close()


@SIZES
async def test_a_flume_client_produces_and_fetches_over_tls(
    broker: Broker, tls: TransportFactory, tmp_path: Path, size: int
) -> None:
    door = FlumeDoor(Sessions(broker), tls)
    address = door.start(Address("127.0.0.1", 0))
    values = [b"%d" % number * size for number in range(10)]

    def produced_and_fetched() -> list[bytes]:
        with Flume(str(address)) as client:
            secured(client, tmp_path)
            for value in values:
                assert client.produce("secret", value, partition=0).error == 0
            return [record for at in range(len(values)) for _, record in client.fetch("secret", 0, at, 1).records]

    assert await asyncio.to_thread(produced_and_fetched) == values
    await door.close()


@pytest.fixture
async def door(broker: Broker) -> AsyncIterator[KafkaDoor]:
    await broker.topics.create("orders", 1, {})
    door = KafkaDoor(Sessions(broker))
    yield door
    await door.close()
    assert door.frames.free == door.frames.limit, "all memory was given back"


def connect(door: EngineDoor[Connection], room: int = 1 << 30) -> MemoryTransport:
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


# -- pushed output -----------------------------------------------------------------------------------------------------


@pytest.fixture
async def queues(broker: Broker) -> AsyncIterator[FlowmqDoor]:
    await broker.topics.create("orders", 1, {})
    door = FlowmqDoor(Sessions(broker))
    yield door
    await door.close()
    assert door.frames.free == door.frames.limit, "all memory was given back"
    assert door.unread.room == door.unread.limit // 2, "no answer counts as unread"


def flowmq_frames(data: bytearray) -> list[tuple[int, bytes]]:
    found, at = [], 0
    while len(data) - at >= flowmq.HEAD_BYTES:
        command, size = flowmq.HEAD.unpack_from(data, at)
        at += flowmq.HEAD_BYTES + size
        if at > len(data):
            break
        found.append((command, bytes(data[at - size : at])))
    return found


def payloads(client: MemoryTransport) -> list[bytes]:
    """Of the messages that have arrived."""
    messages = [payload for command, payload in flowmq_frames(client.taken) if command == flowmq.Command.MESSAGE]
    return [payload.partition(b"\0")[2] for payload in messages]


SUBSCRIBE = flowmq.frame(flowmq.Command.SUBSCRIBE, b"orders\0workers")


def publish(value: bytes) -> bytes:
    return flowmq.frame(flowmq.Command.PUBLISH, b"orders\0" + value)


@pytest.mark.parametrize("piece", [1, 7, 1000, 1 << 20])
async def test_any_split_of_the_bytes_gives_the_same_responses_and_messages(queues: FlowmqDoor, piece: int) -> None:
    client = connect(queues)
    values = [b"v" * size for size in (1, 5000, 200_000 if piece > 7 else 1)]
    data = SUBSCRIBE + b"".join(map(publish, values)) + flowmq.frame(flowmq.Command.PING, b"last")
    for at in range(0, len(data), piece):
        client.put(data[at : at + piece])
        await asyncio.sleep(0)
    await until(lambda: len(flowmq_frames(client.taken)) == 5 + len(values))
    frames = flowmq_frames(client.taken)
    answers = [command for command, _ in frames if command != flowmq.Command.MESSAGE]
    assert answers == [flowmq.Command.SUCCESS] * 4 + [flowmq.Command.PONG]
    assert payloads(client) == values


async def test_a_subscriber_that_does_not_read_gets_no_messages_until_it_reads(queues: FlowmqDoor) -> None:
    stuck, other, publisher = connect(queues, room=100), connect(queues), connect(queues)
    stuck.put(SUBSCRIBE)
    await until(lambda: bool(stuck.taken))
    publisher.put(publish(b"first" * 1000))
    await until(lambda: not stuck.is_read)
    other.put(SUBSCRIBE)
    await until(lambda: bool(other.taken))
    publisher.put(b"".join(publish(b"%d" % number) for number in range(4)))
    await until(lambda: len(payloads(other)) == 4)
    assert payloads(stuck) == []
    stuck.give_room(1 << 20)
    await until(lambda: payloads(stuck) == [b"first" * 1000])
    publisher.put(publish(b"5") + publish(b"6"))
    await until(lambda: len(payloads(stuck)) == 2 and len(payloads(other)) == 5)


async def test_the_subscriber_that_has_read_nothing_for_longest_is_closed_at_the_limit(queues: FlowmqDoor) -> None:
    queues.unread.limit = 150_000
    first, second, publisher = connect(queues, room=1000), connect(queues, room=1000), connect(queues)
    for client in (first, second):
        client.put(flowmq.frame(flowmq.Command.SUBSCRIBE, b"orders"))
        await until(lambda client=client: bool(client.taken))  # type: ignore[misc]
    publisher.put(publish(b"v" * 100_000))
    await until(lambda: first.is_closed)
    assert not second.is_closed
    second.give_room(1 << 20)
    await until(lambda: payloads(second) == [b"v" * 100_000])


async def test_a_publish_to_a_new_topic_is_stored_although_its_client_hangs_up(queues: FlowmqDoor) -> None:
    client = connect(queues)
    client.put(publish(b"known") + flowmq.frame(flowmq.Command.PUBLISH, b"new\0unknown") + publish(b"behind"))
    client.put_end()
    await until(lambda: client.is_closed)
    reader = connect(queues)
    reader.put(flowmq.frame(flowmq.Command.SUBSCRIBE, b"new\0workers"))
    await until(lambda: payloads(reader) == [b"unknown"])
    reader.put(SUBSCRIBE)
    await until(lambda: payloads(reader) == [b"unknown", b"known", b"behind"])
