"""Lakes and tables fed by Spark, and lakes read by Spark."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema

from millstream.pipeline.files import FILE_SCHEMA, FileEntry, write_files
from millstream.pipeline.lake import Lake, create_lake, open_lake
from millstream.pipeline.table import open_table

ROWS = 20_000


def everything(spark: SparkSession) -> DataFrame:
    """Rows of every type that Spark's SQL has, over three days, with nulls."""
    number = F.col("id")
    return spark.range(ROWS, numPartitions=3).select(
        F.when(number % 7 > 0, F.concat(F.lit("value "), number)).cast("binary").alias("value"),
        (number % 100).cast("byte").alias("tiny"),
        (number * 100_003).cast("int").alias("whole"),
        (number / 3).alias("real"),
        (number / 7).cast("float").alias("single"),
        (number / 100).cast("decimal(18,2)").alias("exact"),
        (number % 2 == 0).alias("flag"),
        F.concat(F.lit("page "), number % 50).alias("page"),
        F.expr("date_add(DATE'2024-01-01', cast(id % 400 as int))").alias("on"),
        F.expr("cast(timestamp_micros(id * 1000003) as timestamp_ntz)").alias("local"),
        F.array(number, F.lit(None)).alias("list"),
        F.struct(number.alias("a"), F.lit(None).cast("string").alias("b")).alias("struct"),
        F.create_map(F.lit("k"), F.array(F.struct(number.alias("x")))).alias("map"),
        number.alias("_offset"),
        F.expr("timestamp_micros(1714600000000000 + id * 10000000)").alias("_timestamp"),
    )


def deliver(rows: DataFrame, lake: Lake, by: str, batch: int) -> None:
    root, suffix = lake.root, lake.suffix

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for entry in write_files(batches, root, by, "_timestamp", 1 << 20, f"batch-{batch}", suffix):
            yield entry.to_batch()

    described = rows.mapInArrow(write, FILE_SCHEMA)
    lake.commit(batch, [FileEntry.from_row(row) for row in described.collect()])


@pytest.mark.parametrize(
    ("format", "by"),
    [
        ("delta", "day"),
        ("parquet", "none"),
        pytest.param("delta", "none", marks=pytest.mark.slow),
        pytest.param("parquet", "day", marks=pytest.mark.slow),
    ],
)
def test_what_tasks_write_spark_and_arrow_read_back(spark: SparkSession, tmp_path: Path, format: str, by: str) -> None:
    rows = everything(spark)
    schema = to_arrow_schema(rows.schema, timezone="UTC")
    lake = create_lake(str(tmp_path), format, schema, by, "spark/lake/1")
    deliver(rows, lake, by, 0)
    deliver(rows, lake, by, 0)
    assert lake.has(0)
    if format == "delta":
        files = DeltaTable(str(tmp_path)).file_uris()
        seen = spark.read.option("basePath", str(tmp_path)).parquet(*files)
    else:
        seen = spark.read.parquet(str(tmp_path))
    assert seen.columns == [*rows.columns, *(["day"] if by == "day" else [])]
    back = seen.select(*rows.columns)
    assert back.schema.simpleString() == rows.schema.simpleString()
    wanted = {row["_offset"]: row for row in rows.collect()}
    found = back.collect()
    assert len(found) == ROWS
    assert {row["_offset"]: row for row in found} == wanted
    if by == "day":
        assert seen.filter("day = to_date(_timestamp)").count() == ROWS
    by_arrow = sum(batch.num_rows for batch in open_lake(str(tmp_path)).read(["_offset"]))
    assert by_arrow == ROWS


def test_a_table_takes_what_spark_hands_over(spark: SparkSession, tmp_path: Path) -> None:
    rows = everything(spark).drop("_timestamp")
    schema = to_arrow_schema(rows.schema, timezone="UTC")
    with closing(open_table(f"sqlite:{tmp_path}/t.db", "things", ("_offset",), schema, "spark/table/1")) as table:
        assert table.upsert(0, rows.toArrow().to_batches()) == ROWS
    with closing(sqlite3.connect(tmp_path / "t.db")) as database:
        counted = database.execute('SELECT count(*), sum(flag), min("on"), count("value") FROM things').fetchone()
    assert counted == (ROWS, ROWS // 2, "2024-01-01", ROWS - len(range(0, ROWS, 7)))
