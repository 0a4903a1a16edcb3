"""Batch reads of a topic in Spark, against Spark's own Parquet reader, and Arrow against tuples.

spark-read    every column of every record to Spark's `noop` sink, which asks for all rows and drops them. The JVM
              reads Parquet itself; ours fetches and decodes in Python workers and hands Arrow over.
spark-value   sum(length(value)) with one column: `.schema("value BINARY")` for us, since Spark does not prune the
              columns of Python sources. Parquet's reader prunes by itself.
spark-arrow   what Arrow is good for: the same source, but yielding a tuple per record, as most Python sources do.
              It fetches the same answers and decodes them with the same kernel into records.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from bench import spark_session
from bench.measure import Measure, Scale, Side, Sides
from bench.spark_session import RECORD_BYTES, Ground

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PARQUET = "Spark reading Parquet"


def _to_noop(rows: DataFrame) -> float:
    start = time.perf_counter()
    rows.write.format("noop").mode("overwrite").save()
    return time.perf_counter() - start


def _sum_of_lengths(rows: DataFrame, records: int) -> float:
    start = time.perf_counter()
    total = rows.selectExpr("sum(length(value))").first()
    seconds = time.perf_counter() - start
    if total is None or total[0] != records * RECORD_BYTES:
        raise RuntimeError(f"{records * RECORD_BYTES} bytes were to be summed up, not {total}")
    return seconds


def _ours(ground: Ground, schema: str | None = None) -> DataFrame:
    reader = ground.spark.read.format("millstream").options(**ground.source())
    return reader.schema(schema).load() if schema else reader.load()


def _parquet(ground: Ground) -> DataFrame:
    return ground.spark.read.parquet(ground.parquet)


def _read(ground: Ground) -> tuple[Side, Side]:
    """Nothing checks what `noop` drops: that both sides give the same rows was shown when they were made."""
    records = ground.records
    return (lambda: records / _to_noop(_parquet(ground))), (lambda: records / _to_noop(_ours(ground)))


def _value(ground: Ground) -> tuple[Side, Side]:
    records = ground.records

    def parquet() -> float:
        return records / _sum_of_lengths(_parquet(ground).select("value"), records)

    def ours() -> float:
        return records / _sum_of_lengths(_ours(ground, "value BINARY"), records)

    return parquet, ours


def _arrow(ground: Ground) -> tuple[Side, Side]:
    from bench.spark_tuples import TupleSource

    ground.spark.dataSource.register(TupleSource)
    records = ground.records

    def rows(source: str) -> DataFrame:
        return ground.spark.read.format(source).options(**ground.source()).load()

    if (found := rows(TupleSource.name()).count()) != records:
        raise RuntimeError(f"{records} tuples were to be read, not {found}")
    return (lambda: records / _to_noop(rows(TupleSource.name()))), (lambda: records / _to_noop(rows("millstream")))


def _sides(make: Callable[[Ground], tuple[Side, Side]]) -> Sides:
    @contextmanager
    def sides(scale: Scale) -> Iterator[tuple[Side | None, Side]]:
        reference, ours = make(spark_session.ground(scale))
        reference()
        ours()
        yield reference, ours

    return sides


def _measure(key: str, title: str, reference: str, must: float, aim: float, sides: Sides) -> Measure:
    return Measure(key, title, reference, "records/s", must, aim, lower_is_better=False, sides=sides)


MEASURES = [
    _measure("spark-read", "Spark batch read, all columns to noop", PARQUET, 0.55, 0.75, _sides(_read)),
    _measure("spark-value", "Spark batch read, sum(length(value))", PARQUET, 0.45, 0.6, _sides(_value)),
    _measure("spark-arrow", "Arrow path of the source", "the same source, tuples", 6, 8, _sides(_arrow)),
]
