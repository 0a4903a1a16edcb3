"""Streams in Spark: how fast one reads what has piled up, and what a trigger with next to nothing to read costs.

spark-stream    AvailableNow to `noop`, from the start of the query to its end, planning, checkpoint and stopping
                included, against Spark's own file stream over the Parquet files. Both take everything as one batch.
spark-trigger   the time of a trigger that has four rows, against Spark's rate source: four rows a second there, four
                records a second into two partitions here, so both have two tasks. Triggers follow each other without
                a pause, as fast as the source says that there is something. The median of `triggerExecution`, which
                covers planning, offsets and commits to the checkpoint, of some triggers that had rows; the first
                ones of a query do not count.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING

from confluent_kafka import Producer

from bench import client, spark_session
from bench.measure import Measure, Scale, Side
from bench.spark_session import Ground

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

SECONDS_MAX = 300
TICKS = "ticks"
TICK_PARTITIONS = 2
TICK_RECORDS = 4
TICK_SECONDS = 1.0
TRIGGERS = 6
TRIGGERS_QUICK = 3
TRIGGERS_SKIPPED = 1


# -- all that there is -----------------------------------------------------------------------------------------------


def _drain(ground: Ground, rows: DataFrame) -> float:
    with ground.folder() as checkpoint:
        writer = rows.writeStream.format("noop").option("checkpointLocation", str(checkpoint))
        start = time.perf_counter()
        query = writer.trigger(availableNow=True).start()
        if not query.awaitTermination(SECONDS_MAX):
            query.stop()
            raise RuntimeError(f"the stream has not ended in {SECONDS_MAX} s")
        seconds = time.perf_counter() - start
    read = sum(progress.numInputRows for progress in query.recentProgress)
    if read != ground.records:
        raise RuntimeError(f"{ground.records} rows were to be read, not {read}")
    return ground.records / seconds


@contextmanager
def _drain_sides(scale: Scale) -> Iterator[tuple[Side | None, Side]]:
    ground = spark_session.ground(scale)
    schema = ground.spark.read.parquet(ground.parquet).schema

    def parquet() -> float:
        return _drain(ground, ground.spark.readStream.schema(schema).parquet(ground.parquet))

    def ours() -> float:
        options = ground.source(startingOffsets="earliest")
        return _drain(ground, ground.spark.readStream.format("millstream").options(**options).load())

    parquet()
    ours()
    yield parquet, ours


# -- next to nothing -------------------------------------------------------------------------------------------------


@contextmanager
def _ticking(bootstrap: str) -> Iterator[None]:
    """A few records every now and then, for as long as the block runs."""
    producer = Producer({"bootstrap.servers": bootstrap, **client.QUIET, "linger.ms": 0})
    over = threading.Event()

    def tick() -> None:
        while not over.wait(TICK_SECONDS):
            for number in range(TICK_RECORDS):
                producer.produce(TICKS, b"tick", partition=number % TICK_PARTITIONS)
            producer.flush(client.SECONDS_MAX)

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _trigger_ms(ground: Ground, rows: DataFrame, triggers: int) -> float:
    with ground.folder() as checkpoint:
        writer = rows.writeStream.format("noop").option("checkpointLocation", str(checkpoint))
        query = writer.trigger(processingTime="0 seconds").start()
        try:
            times = _times(query, triggers + TRIGGERS_SKIPPED)
        finally:
            query.stop()
    return median(times[TRIGGERS_SKIPPED:])


def _times(query: StreamingQuery, count: int) -> list[float]:
    deadline = time.monotonic() + SECONDS_MAX
    while time.monotonic() < deadline:
        if query.awaitTermination(1):
            raise RuntimeError("the stream has ended although nobody stopped it")
        filled = [progress for progress in query.recentProgress if progress.numInputRows]
        if len(filled) >= count:
            return [float(progress.durationMs["triggerExecution"]) for progress in filled[:count]]
    raise RuntimeError(f"the stream has not had {count} batches in {SECONDS_MAX} s")


@contextmanager
def _trigger_sides(scale: Scale) -> Iterator[tuple[Side | None, Side]]:
    ground = spark_session.ground(scale)
    client.create_topic(ground.bootstrap, TICKS, TICK_PARTITIONS)
    triggers = TRIGGERS_QUICK if scale.quick else TRIGGERS

    def rate() -> float:
        options = {"rowsPerSecond": TICK_RECORDS, "numPartitions": TICK_PARTITIONS}
        return _trigger_ms(ground, ground.spark.readStream.format("rate").options(**options).load(), triggers)

    def ours() -> float:
        options = ground.source(subscribe=TICKS, startingOffsets="latest")
        with _ticking(ground.bootstrap):
            return _trigger_ms(ground, ground.spark.readStream.format("millstream").options(**options).load(), triggers)

    rate()
    ours()
    yield rate, ours


MEASURES = [
    Measure(
        key="spark-stream",
        title="Spark stream, AvailableNow, all columns to noop",
        reference="Spark's Parquet file stream",
        unit="records/s",
        must=0.35,
        aim=0.5,
        lower_is_better=False,
        sides=_drain_sides,
    ),
    Measure(
        key="spark-trigger",
        title="time of a near-empty trigger",
        reference="Spark's rate source",
        unit="ms",
        must=2.5,
        aim=2,
        lower_is_better=True,
        sides=_trigger_sides,
    ),
]
