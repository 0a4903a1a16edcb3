"""What all Spark rows share: one session, one broker, and the same records as a topic and as Parquet files.

The session is local, on all cores, as `millstream.spark.session` starts it: Spark's defaults but for UTC and silence.
Both sides of a row run in it, so both have the same JVM, as warm as the other's. A session takes ten seconds to start
and the records as long to produce: both are made for the first row that asks, and kept for the others.

The records have 100 random bytes and no key. Every one is different, because Parquet would store repeated values once
and read a dictionary where a topic has to give the bytes. The topic has four partitions, filled by librdkafka in
batches of 1 MB. The Parquet files are what Spark itself makes of that topic, all columns, with its defaults (Snappy,
row groups of 128 MB). Timestamps are stored as INT64 and not as INT96: it is read faster, and that is the reference's
good.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from confluent_kafka import Consumer, Producer, TopicPartition

from bench import client, servers
from bench.measure import Scale, Unavailable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TOPIC = "records"
PARTITIONS = 4
RECORDS = 10_000_000
RECORD_BYTES = 100
CALL_RECORDS = 50_000
QUEUED_RECORDS_MAX = 500_000


@dataclass(frozen=True)
class Ground:
    """Where a row runs."""

    spark: SparkSession
    bootstrap: str
    parquet: str
    records: int
    directory: Path

    def source(self, **options: Any) -> dict[str, str]:
        """Options of our source for the whole topic."""
        given = {"bootstrap.servers": self.bootstrap, "subscribe": TOPIC, **options}
        return {name: str(value) for name, value in given.items()}

    def count(self, topic: str) -> int:
        """Records that the broker has of a topic, by its offsets."""
        consumer = Consumer({"bootstrap.servers": self.bootstrap, "group.id": "bench", **client.QUIET})
        places = [TopicPartition(topic, partition) for partition in range(PARTITIONS)]
        ends = [consumer.get_watermark_offsets(place, timeout=30) for place in places]
        consumer.close()
        return sum(high - low for low, high in ends)

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """For a checkpoint or for what a sample writes; gone when the sample is over."""
        path = Path(tempfile.mkdtemp(dir=self.directory))
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


_stack = ExitStack()


def ground(scale: Scale) -> Ground:
    return _prepare(scale.of(RECORDS))


def close() -> None:
    """Stops what the Spark rows have started, if there were any."""
    _stack.close()
    _prepare.cache_clear()


@cache
def _prepare(records: int) -> Ground:
    try:
        from millstream.spark import session
    except ImportError as error:
        raise Unavailable(f"{error}: pip install -e '.[spark]'") from None
    directory = _stack.enter_context(servers.scratch())
    broker = _stack.enter_context(servers.millstream(flush=None))
    client.create_topic(broker.bootstrap, TOPIC, PARTITIONS)
    _produce(broker.bootstrap, records)
    settings = {"spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS"}
    settings["spark.sql.warehouse.dir"] = str(directory / "warehouse")
    spark = session.start("bench", conf=settings)
    _stack.callback(spark.stop)
    made = Ground(spark, broker.bootstrap, str(directory / "parquet"), records, directory)
    spark.read.format("millstream").options(**made.source()).load().write.parquet(made.parquet)
    _check(made)
    return made


def _produce(bootstrap: str, records: int) -> None:
    producer = Producer({"bootstrap.servers": bootstrap, **client.SETTINGS, **client.QUIET})
    for call in range(records // CALL_RECORDS):
        values = os.urandom(CALL_RECORDS * RECORD_BYTES)
        messages = [{"value": values[at : at + RECORD_BYTES]} for at in range(0, len(values), RECORD_BYTES)]
        while len(producer) > QUEUED_RECORDS_MAX:
            producer.poll(0.005)
        if producer.produce_batch(TOPIC, messages, partition=call % PARTITIONS) != CALL_RECORDS:
            raise RuntimeError("librdkafka refused records although its queue has room")
    if left := producer.flush(client.SECONDS_MAX):
        raise RuntimeError(f"{left} records were not acknowledged in {client.SECONDS_MAX} s")


def _check(made: Ground) -> None:
    """Both sides must have the same rows, all of them, before anything is measured."""
    ours = made.spark.read.format("millstream").options(**made.source()).load()
    if _summary(ours) != _summary(made.spark.read.parquet(made.parquet)):
        raise RuntimeError("the topic and the Parquet files do not hold the same rows")


def _summary(rows: DataFrame) -> tuple[Any, ...]:
    found = rows.selectExpr("count(*)", "sum(offset)", "sum(partition)", "sum(crc32(value))", "max(timestamp)").first()
    assert found is not None
    return tuple(found)
