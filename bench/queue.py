"""Records leased and acknowledged one by one, against NATS JetStream, the peer, and with many of them in flight.

queue           every record of a topic is leased, acknowledged by itself and gone: librdkafka's ShareConsumer with
                explicit acknowledgements against nats-py's pull consumer with `ack`, both from Python, both 500 at a
                time, both on file storage. Ours is on disk before the client hears of it; JetStream's acknowledgements
                are neither answered nor synced. What Kafka's protocol gains: neighbours that were acknowledged alike
                travel together.
queue-in-flight the same while other consumers hold 100,000 records, against the same while they hold 1,000.
queue-memory    what the broker's memory grows by for a record that is leased: other consumers take 300,000 and keep
                them.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from confluent_kafka import AcknowledgeType, Producer, ShareConsumer
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from bench import client, peer, servers
from bench.measure import Measure, Scale, Side

TOPIC, GROUP = "jobs", "workers"
RECORDS = 100_000
HELD, HELD_LITTLE = 100_000, 1_000
HELD_FOR_MEMORY = 300_000
RECORD_BYTES = 100
AT_A_TIME = 500
SECONDS_MAX = 120.0
SETTINGS = {
    "share.auto.offset.reset": "earliest",
    "share.record.lock.duration.ms": "3600000",
    "share.partition.max.record.locks": "1000000",
}


@contextmanager
def _broker(records: int) -> Iterator[servers.Server]:
    """With a topic of so many records, and a group that begins with the first of them."""
    with servers.millstream(flush=None) as server:
        client.create_topic(server.bootstrap, TOPIC)
        settings = {"bootstrap.servers": server.bootstrap, "linger.ms": 5, "batch.num.messages": AT_A_TIME}
        producer = Producer({**settings, **client.QUIET})
        value = os.urandom(RECORD_BYTES)
        for _ in range(records):
            while len(producer) > 90_000:
                producer.poll(0.01)
            producer.produce(TOPIC, value, partition=0)
        if left := producer.flush(SECONDS_MAX):
            raise RuntimeError(f"{left} records were not acknowledged")
        admin = AdminClient({"bootstrap.servers": server.bootstrap, **client.QUIET})
        entries = [
            ConfigEntry(name, text, incremental_operation=AlterConfigOpType.SET) for name, text in SETTINGS.items()
        ]
        resource = ConfigResource(ResourceType.GROUP, GROUP, incremental_configs=entries)
        for future in admin.incremental_alter_configs([resource]).values():
            future.result(SECONDS_MAX)
        yield server


def _consumer(bootstrap: str, at_a_time: int) -> ShareConsumer:
    settings = {"bootstrap.servers": bootstrap, "group.id": GROUP, "share.acknowledgement.mode": "explicit"}
    consumer = ShareConsumer({**settings, "max.poll.records": at_a_time, **client.QUIET})
    consumer.subscribe([TOPIC])
    return consumer


def _poll(consumer: ShareConsumer) -> list[object]:
    deadline = time.monotonic() + SECONDS_MAX
    while time.monotonic() < deadline:
        if messages := list(consumer.poll(1.0)):
            return messages
    raise RuntimeError(f"no records for {SECONDS_MAX} s")


@contextmanager
def _held(bootstrap: str, count: int) -> Iterator[int]:
    """Consumers that lease at least so many records and keep them; answers with how many."""
    holders: list[ShareConsumer] = []
    held = 0
    try:
        while held < count:
            holders.append(_consumer(bootstrap, min(count - held, 20_000)))
            held += len(_poll(holders[-1]))
        yield held
    finally:
        for holder in holders:
            holder.close()


def _work(bootstrap: str, records: int) -> float:
    """Records per second that one consumer leases and acknowledges."""
    consumer = _consumer(bootstrap, AT_A_TIME)
    for message in _poll(consumer):  # joining takes a heartbeat or two, which is not what is measured
        consumer.acknowledge(message, AcknowledgeType.ACCEPT)
    done = 0
    start = time.perf_counter()
    while done < records:
        for message in _poll(consumer):
            consumer.acknowledge(message, AcknowledgeType.ACCEPT)
            done += 1
    failed = [error for error in consumer.commit_sync(SECONDS_MAX).values() if error is not None]
    seconds = time.perf_counter() - start
    consumer.close()
    if failed:
        raise RuntimeError(f"an acknowledgement was refused: {failed[0]}")
    return done / seconds


def _share_consumer(records: int) -> float:
    with _broker(records + 2 * AT_A_TIME) as server:
        return _work(server.bootstrap, records)


def _beside(held: int, records: int) -> float:
    with _broker(held + records + 20_000) as server, _held(server.bootstrap, held):
        return _work(server.bootstrap, records)


def _bytes_per_lease(count: int) -> float:
    with _broker(count) as server, _held(server.bootstrap, AT_A_TIME) as first:
        before = server.rss_mb()
        with _held(server.bootstrap, count - first - 20_000) as held:
            return (server.rss_mb() - before) * 1e6 / held


def _jetstream(records: int) -> float:
    async def run(port: int) -> float:
        connection = await peer.connect(port)
        stream = connection.jetstream(publish_async_max_pending=peer.UNACKNOWLEDGED_MAX)
        value = os.urandom(RECORD_BYTES)
        for _ in range(records):
            await stream.publish_async(peer.TOPIC, value)
        await stream.publish_async_completed()
        puller = await stream.pull_subscribe(peer.TOPIC, durable=GROUP)
        done = 0
        start = time.perf_counter()
        while done < records:
            for message in await puller.fetch(min(AT_A_TIME, records - done), timeout=SECONDS_MAX):
                await message.ack()
                done += 1
        await connection.flush()
        while (await puller.consumer_info()).num_ack_pending:
            pass  # each look is a round trip
        seconds = time.perf_counter() - start
        await connection.close()
        return seconds

    with servers.nats() as server:
        asyncio.run(peer.create_stream(server.port))
        return records / asyncio.run(run(server.port))


def _sides(reference: Callable[[int], float] | None, ours: Callable[[int], float], size: int) -> Callable[..., object]:
    @contextmanager
    def sides(scale: Scale) -> Iterator[tuple[Side | None, Side]]:
        count = scale.of(size)
        yield (None if reference is None else lambda: reference(count)), (lambda: ours(count))

    return sides


def _measure(key: str, title: str, reference: str, unit: str, must: float, aim: float, sides: object) -> Measure:
    return Measure(key, title, reference, unit, must, aim, lower_is_better=unit == "B", sides=sides)  # type: ignore[arg-type]


MEASURES = [
    _measure(
        "queue",
        "records leased and acknowledged one by one, durable",
        "NATS JetStream, nats-py",
        "records/s",
        1,
        2,
        _sides(_jetstream, _share_consumer, RECORDS),
    ),
    _measure(
        "queue-in-flight",
        "the same with 100,000 records in flight",
        "with 1,000 in flight",
        "records/s",
        0.7,
        0.9,
        _sides(lambda records: _beside(HELD_LITTLE, records), lambda records: _beside(HELD, records), RECORDS),
    ),
    _measure(
        "queue-memory",
        "memory per leased record",
        "",
        "B",
        200,
        100,
        _sides(None, _bytes_per_lease, HELD_FOR_MEMORY),
    ),
]
