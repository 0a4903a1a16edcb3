"""Packs through the Luxun door, against the Kafka door of the same broker with the same bytes.

`luxun-produce`: items of 100 KB, four connections with one call in flight each, as generated clients work. The Kafka
side sends the same items, one record a batch, from as many connections with as many in flight. `flush=os` on both.
Every item is counted afterwards.

`luxun-consume`: by index, up to 1 MB a call, against fetches of 1 MB a request of the very same log: a partition of
100 KB items that came through the Luxun door. The clients (load.c, drain.c) throw away what they get.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench import client, frames, servers
from bench.measure import Measure, Scale, Side

TOPIC = "luxun"
ITEM_BYTES = 100_000
FETCH_BYTES = 1 << 20
CONNECTIONS = 4
SAMPLE_SECONDS = 4.0
STORED_BYTES = 500_000_000
PASSES = 3
NO_ERROR_CODE = -1


def _call(name: str, fields: bytes) -> bytes:
    """A framed call with one struct as its argument; sequence id 0."""
    text = name.encode()
    head = b"\x80\x01\x00\x01" + struct.pack(">i", len(text)) + text + bytes(4)
    body = head + b"\x0c\x00\x01" + fields + b"\0\0"
    return struct.pack(">i", len(body)) + body


def _string(number: int, value: bytes) -> bytes:
    return b"\x0b" + struct.pack(">hi", number, len(value)) + value


def _produce(item: bytes, topic: str) -> bytes:
    return _call("produce", _string(1, item) + _string(2, topic.encode()))


def _consume(topic: str) -> bytes:
    """By index; drain.c finds the index from the end of the frame."""
    index = b"\x0a\x00\x03" + bytes(8) + b"\x08\x00\x04" + struct.pack(">i", FETCH_BYTES)
    return _call("consume", _string(1, topic.encode()) + index)


ID_AT = 4 + 4 + 4 + len("produce")


def _load(port: int, frame: Path, seconds: float, error_at: int, id_at: int) -> float:
    """MB/s of items."""
    items, counted_s, _ = servers.run_client("load", port, frame, CONNECTIONS, 1, seconds, error_at, id_at)
    return items * ITEM_BYTES / 1e6 / counted_s


@contextmanager
def _produce_sides(scale: Scale) -> Iterator[tuple[Side | None, Side]]:
    seconds = scale.seconds(SAMPLE_SECONDS)
    with ExitStack() as stack:
        directory = stack.enter_context(servers.scratch())
        item = os.urandom(ITEM_BYTES)
        kafka, luxun = directory / "kafka", directory / "luxun"
        kafka.write_bytes(frames.produce(TOPIC, [item]))
        luxun.write_bytes(_produce(item, TOPIC))

        def sample(door: str) -> float:
            os.sync()
            with servers.millstream("os", "luxun") as broker:
                client.create_topic(broker.bootstrap, TOPIC)
                if door == "kafka":
                    return _load(broker.port, kafka, seconds, frames.produce_error_at(TOPIC), 8)
                rate = _load(broker.door("luxun"), luxun, seconds, NO_ERROR_CODE, ID_AT)
                _check_stored(broker, rate * seconds * 1e6 * 0.8)
                return rate

        yield (lambda: sample("kafka")), (lambda: sample("luxun"))


def _check_stored(broker: servers.Server, bytes_min: float) -> None:
    """load.c cannot read Thrift's results: refused items would be missing here."""
    stored = sum(path.stat().st_size for path in (broker.directory / "data").rglob("*.log"))
    if stored < bytes_min:
        raise RuntimeError(f"{stored} bytes are stored, at least {bytes_min:.0f} were acknowledged")


@contextmanager
def _consume_sides(scale: Scale) -> Iterator[tuple[Side | None, Side]]:
    size = scale.of(STORED_BYTES)
    with ExitStack() as stack:
        directory = stack.enter_context(servers.scratch())
        broker = stack.enter_context(servers.millstream("os", "luxun"))
        client.create_topic(broker.bootstrap, TOPIC)
        item = directory / "item"
        item.write_bytes(_produce(os.urandom(ITEM_BYTES), TOPIC))
        stored = 0.0
        while stored < size * 1.1:
            items, _, _ = servers.run_client(
                "load", broker.door("luxun"), item, CONNECTIONS, 1, 1.0, NO_ERROR_CODE, ID_AT
            )
            stored += items * ITEM_BYTES
        fetch, consume = directory / "fetch", directory / "consume"
        fetch.write_bytes(frames.fetch_one_partition(TOPIC, FETCH_BYTES))
        consume.write_bytes(_consume(TOPIC))

        def drain(kind: str, port: int, request: Path) -> float:
            got = seconds = 0.0
            for _ in range(PASSES):
                numbers = servers.run_client("drain", kind, port, size, request)
                got, seconds = got + numbers[0], seconds + numbers[1]
            return got / 1e6 / seconds

        yield (
            lambda: drain("kafka", broker.port, fetch),
            lambda: drain("luxun", broker.door("luxun"), consume),
        )


MEASURES = [
    Measure(
        key="luxun-produce",
        title="Luxun produce, items of 100 KB, four connections, flush=os",
        reference="the Kafka door, the same bytes",
        unit="MB/s",
        must=0.5,
        aim=0.8,
        lower_is_better=False,
        sides=_produce_sides,
    ),
    Measure(
        key="luxun-consume",
        title="Luxun consume by index, 1 MB a call",
        reference="the Kafka door, fetches of 1 MB",
        unit="MB/s",
        must=0.4,
        aim=0.7,
        lower_is_better=False,
        sides=_consume_sides,
    ),
]
