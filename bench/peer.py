"""Records per second into NATS JetStream, the peer: 100 B, file storage, each server with its defaults.

Ours syncs before it acknowledges, JetStream (by default) every two minutes; we accept that. What a client can do
differs more than what the servers can, so there are three rows:

    peer            librdkafka against nats-py's asynchronous publish: what a Python program gets from each
    peer-bare-nats  librdkafka against a bare C publisher, the most that JetStream gives anyone on one connection: here
                    librdkafka's own work per record is our limit
    peer-bare       a bare C client on both sides, which leaves the servers: prepared batches of 1 MB for us, prepared
                    messages for JetStream, because it takes them one by one

Every sample has a fresh server and an empty stream, and every stored record is counted afterwards.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bench import client, frames, servers
from bench.measure import Measure, Scale, Side, Sides, Unavailable

TOPIC = "peer"
RECORD_BYTES = 100
RECORDS = 2_000_000
RECORDS_NATS_PY = 100_000
RECORDS_NATS_BARE = 600_000
UNACKNOWLEDGED_MAX = 16_000
"""Messages in flight to JetStream: of 1, 4, 16 and 64 thousand the fastest for it on two cores."""
BATCH_RECORDS = 9_000  # about 1 MB
BARE_SECONDS = 3.0
IN_FLIGHT = 5


def _librdkafka(records: int) -> float:
    with servers.millstream(flush=None) as server:
        client.create_topic(server.bootstrap, TOPIC)
        with client.Feeder(server.bootstrap, TOPIC, RECORD_BYTES) as feeder:
            feeder.feed(records // 50)
            seconds = feeder.feed(records)
            feeder.check_arrived()
    return records / seconds


def _bare(seconds: float) -> float:
    with servers.scratch() as directory, servers.millstream(flush=None) as server:
        client.create_topic(server.bootstrap, TOPIC)
        frame = directory / "frame"
        frame.write_bytes(frames.produce(TOPIC, [os.urandom(RECORD_BYTES) for _ in range(BATCH_RECORDS)]))
        error_at = frames.produce_error_at(TOPIC)
        requests, counted_s, _ = servers.run_client("load", server.port, frame, 1, IN_FLIGHT, seconds, error_at)
    return requests * BATCH_RECORDS / counted_s


def _jetstream(records: int, publish: Callable[[int, int], float]) -> float:
    with servers.nats() as server:
        asyncio.run(create_stream(server.port))
        seconds = publish(server.port, records)
        stored = asyncio.run(_stored(server.port))
        if stored != records:
            raise RuntimeError(f"{records} messages were acknowledged, JetStream has {stored}")
    return records / seconds


def _publish_bare(port: int, records: int) -> float:
    return servers.run_client("jetstream", port, TOPIC, records, RECORD_BYTES, UNACKNOWLEDGED_MAX)[1]


def _publish_nats_py(port: int, records: int) -> float:
    async def publish() -> float:
        connection = await connect(port)
        stream = connection.jetstream(publish_async_max_pending=UNACKNOWLEDGED_MAX)
        payload = os.urandom(RECORD_BYTES)
        start = time.perf_counter()
        for _ in range(records):
            await stream.publish_async(TOPIC, payload)
        await stream.publish_async_completed()
        seconds = time.perf_counter() - start
        await connection.close()
        return seconds

    return asyncio.run(publish())


async def connect(port: int):  # type: ignore[no-untyped-def]  # nats-py is there only with the extra `bench`
    try:
        import nats
    except ImportError:
        raise Unavailable("nats-py is not installed: pip install -e '.[bench]'") from None
    return await nats.connect(f"nats://127.0.0.1:{port}")


async def create_stream(port: int) -> None:
    connection = await connect(port)
    await connection.jetstream().add_stream(name=TOPIC, subjects=[TOPIC], storage="file")
    await connection.close()


async def _stored(port: int) -> int:
    connection = await connect(port)
    info = await connection.jetstream().stream_info(TOPIC)
    await connection.close()
    return int(info.state.messages)


def _sides(reference: Callable[[Scale], float], ours: Callable[[Scale], float]) -> Sides:
    @contextmanager
    def sides(scale: Scale) -> Iterator[tuple[Side | None, Side]]:
        yield (lambda: reference(scale)), (lambda: ours(scale))

    return sides


def _measure(key: str, title: str, reference: str, must: float | None, aim: float | None, sides: Sides) -> Measure:
    return Measure(key, title, reference, "records/s", must, aim, lower_is_better=False, sides=sides)


def _with_nats_py(scale: Scale) -> float:
    return _jetstream(scale.of(RECORDS_NATS_PY), _publish_nats_py)


def _with_bare_publisher(scale: Scale) -> float:
    return _jetstream(scale.of(RECORDS_NATS_BARE), _publish_bare)


def _with_librdkafka(scale: Scale) -> float:
    return _librdkafka(scale.of(RECORDS))


def _with_bare_producer(scale: Scale) -> float:
    return _bare(scale.seconds(BARE_SECONDS))


MEASURES = [
    _measure(
        "peer",
        "produced records per second, 100 B, batched, file storage",
        "NATS JetStream, nats-py",
        must=5,
        aim=8,
        sides=_sides(_with_nats_py, _with_librdkafka),
    ),
    _measure(
        "peer-bare-nats",
        "the same, bare C publisher for NATS only",
        "NATS JetStream, C publisher",
        must=None,
        aim=None,
        sides=_sides(_with_bare_publisher, _with_librdkafka),
    ),
    _measure(
        "peer-bare",
        "the same, bare C clients on both sides",
        "NATS JetStream, C publisher",
        must=None,
        aim=None,
        sides=_sides(_with_bare_publisher, _with_bare_producer),
    ),
]
