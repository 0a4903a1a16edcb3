"""Comet's Produce, 100 records of 100 B a call, against the Kafka door of the same broker with the same batches.

`comet` has one connection with one call in flight, as Comet's own producer has, into a broker with its defaults: every
answer is durable. Two rows show what the protocol costs where the sync does not hide it: `comet-8` has eight such
connections, which share a sync, and `comet-os` has one and `flush=os`, which syncs nothing.

The Comet side is driven by unary.c, the Kafka side by load.c with one batch of the same values in each request. The
records are counted afterwards.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from confluent_kafka import Consumer, TopicPartition

from bench import client, frames, servers
from bench.measure import Measure, Scale, Side

TOPIC = "comet"
RECORDS = 100
VALUE_BYTES = 100
CONNECTIONS = 8
SAMPLE_SECONDS = 4.0
PRODUCE = "/comet.v1.BrokerService/Produce"


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def _field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(content)) + content


def _request(values: list[bytes]) -> bytes:
    """ProduceRequest to partition 0, which proto3 does not send; written out here: the ruler must not be made from what
    it measures.
    """
    return _field(1, TOPIC.encode()) + b"".join(_field(2, _field(3, value)) for value in values)


def _check_stored(broker: servers.Server, records_min: float) -> None:
    """The load generator cannot read every result: refused records would be missing here."""
    consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": "bench", **client.QUIET})
    low, high = consumer.get_watermark_offsets(TopicPartition(TOPIC, 0), timeout=30)
    consumer.close()
    if high - low < records_min:
        raise RuntimeError(f"{high - low} records are stored, at least {records_min:.0f} were acknowledged")


@contextmanager
def _sides(scale: Scale, flush: str | None, connections: int) -> Iterator[tuple[Side | None, Side]]:
    seconds = scale.seconds(SAMPLE_SECONDS)
    with ExitStack() as stack:
        directory = stack.enter_context(servers.scratch())
        values = [os.urandom(VALUE_BYTES) for _ in range(RECORDS)]
        kafka, comet = directory / "kafka", directory / "comet"
        kafka.write_bytes(frames.produce(TOPIC, values))
        comet.write_bytes(_request(values))

        def sample(door: str) -> float:
            os.sync()  # what an earlier sample left dirty must not be written during this one
            with servers.millstream(flush, "comet") as broker:
                client.create_topic(broker.bootstrap, TOPIC)
                if door == "kafka":
                    error_at = frames.produce_error_at(TOPIC)
                    arguments = (broker.port, kafka, connections, 1, seconds, error_at)
                    calls, counted_s, _ = servers.run_client("load", *arguments)
                else:
                    port = broker.door("comet")
                    calls, counted_s = servers.run_client("unary", port, PRODUCE, comet, connections, seconds)
                _check_stored(broker, calls * RECORDS)
                return calls * RECORDS / counted_s

        yield (lambda: sample("kafka")), (lambda: sample("comet"))


MEASURES = [
    Measure(
        key="comet",
        title="Comet Produce, 100 records of 100 B a call, one connection, synced before it is answered",
        reference="the Kafka door, the same batches",
        unit="records/s",
        must=0.25,
        aim=0.5,
        lower_is_better=False,
        sides=partial(_sides, flush=None, connections=1),
    ),
    Measure(
        key="comet-8",
        title=f"the same, {CONNECTIONS} connections",
        reference="the Kafka door, the same batches",
        unit="records/s",
        must=None,
        aim=None,
        lower_is_better=False,
        sides=partial(_sides, flush=None, connections=CONNECTIONS),
    ),
    Measure(
        key="comet-os",
        title="the same, one connection, flush=os",
        reference="the Kafka door, the same batches",
        unit="records/s",
        must=None,
        aim=None,
        lower_is_better=False,
        sides=partial(_sides, flush="os", connections=1),
    ),
]
