"""Topics to a lake and back, against Spark copying Parquet to Parquet.

    spark-lake   a pipeline that takes the topic's records as they are (`format = "bytes"`) into a Delta lake, with all
                 its defaults, run once: from `start` to the end of `watch`. Every batch is synced and committed, and
                 the checkpoint written. Spark's copy has the same six columns; it is one
                 job that syncs nothing.
    spark-sink   rows of the Parquet files into a topic with four partitions on a broker with its default flush: synced
                 before it is acknowledged. Spark's copy has the same columns: key and value.

Spark's copy writes with its defaults, Snappy and a file per task. Each sample writes a gigabyte: as much page cache is
filled and freed before it, for both sides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from confluent_kafka.admin import AdminClient

from bench import client, servers, spark_session
from bench.measure import Measure, Scale, Side, Sides
from bench.spark_session import PARTITIONS, RECORD_BYTES, TOPIC, Ground

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

LAKE_COLUMNS = ("value", "key", "topic", "partition", "offset", "timestamp")
SINK_COLUMNS = ("key", "value")
COPIED = "copied"
COPY = "Spark, Parquet to Parquet"
PIPELINE = """
name = "bench"
[source]
topic = "{topic}"
format = "bytes"
[[sink]]
from = "{topic}"
lake = "lake"
"""


def _rows(ground: Ground, columns: tuple[str, ...]) -> DataFrame:
    return ground.spark.read.parquet(ground.parquet).select(*columns)


def _copy(ground: Ground, columns: tuple[str, ...]) -> float:
    with ground.folder() as folder:
        servers.touch_memory(ground.records * RECORD_BYTES * 3 // 2)
        start = time.perf_counter()
        _rows(ground, columns).write.parquet(str(folder / "copy"))
        seconds = time.perf_counter() - start
        _check("Spark's copy", ground.spark.read.parquet(str(folder / "copy")).count(), ground.records)
    return ground.records / seconds


def _lake(ground: Ground) -> float:
    with ground.folder() as folder:
        servers.touch_memory(ground.records * RECORD_BYTES * 3 // 2)
        seconds = _run_pipeline(ground, folder / "bench.toml")
        _check("the lake", _rows_of_lake(folder / "lake"), ground.records)
    return ground.records / seconds


def _run_pipeline(ground: Ground, file: Path) -> float:
    from millstream.pipeline.run import Pipeline
    from millstream.pipeline.spec import parse

    spec, mistakes = parse(file, PIPELINE.format(topic=TOPIC))
    if spec is None or mistakes:
        raise RuntimeError(f"the pipeline has mistakes: {mistakes}")
    pipeline = Pipeline(spec, ground.spark, ground.bootstrap)
    start = time.perf_counter()
    pipeline.start(once=True)
    try:
        rows = sum(report.rows for report in pipeline.watch())
        seconds = time.perf_counter() - start
    finally:
        pipeline.stop()
    _check("the pipeline", rows, ground.records)
    return seconds


def _rows_of_lake(path: Path) -> int:
    from deltalake import DeltaTable

    return int(DeltaTable(str(path)).to_pyarrow_dataset().count_rows())


def _sink(ground: Ground) -> float:
    admin = AdminClient({"bootstrap.servers": ground.bootstrap, **client.QUIET})
    client.create_topic(ground.bootstrap, COPIED, PARTITIONS)
    try:
        servers.touch_memory(ground.records * RECORD_BYTES * 3 // 2)
        start = time.perf_counter()
        writer = _rows(ground, SINK_COLUMNS).write.format("millstream").mode("append")
        writer.options(**{"bootstrap.servers": ground.bootstrap, "topic": COPIED}).save()
        seconds = time.perf_counter() - start
        _check("the topic", ground.count(COPIED), ground.records)
    finally:
        admin.delete_topics([COPIED])[COPIED].result(30)
    return ground.records / seconds


def _check(what: str, found: int, wanted: int) -> None:
    if found != wanted:
        raise RuntimeError(f"{what} has {found} rows, not {wanted}")


def _sides(columns: tuple[str, ...], ours: Callable[[Ground], float]) -> Sides:
    @contextmanager
    def sides(scale: Scale) -> Iterator[tuple[Side | None, Side]]:
        ground = spark_session.ground(scale)
        _copy(ground, columns)
        ours(ground)
        yield (lambda: _copy(ground, columns)), (lambda: ours(ground))

    return sides


def _measure(key: str, title: str, must: float, aim: float, sides: Sides) -> Measure:
    return Measure(key, title, COPY, "records/s", must, aim, lower_is_better=False, sides=sides)


MEASURES = [
    _measure("spark-lake", "topic to lake, untransformed", 1.5, 2.5, _sides(LAKE_COLUMNS, _lake)),
    _measure("spark-sink", "Parquet to topic", 0.6, 0.8, _sides(SINK_COLUMNS, _sink)),
]
