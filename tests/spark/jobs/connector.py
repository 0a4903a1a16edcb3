"""Reads a topic, writes it to another, streams it to a third and runs pipelines on a cluster; says what tasks saw.

Arguments and report are JSON: `tests/spark/standalone.py` runs it.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

from millstream.core.errors import MillstreamError
from millstream.pipeline import check
from millstream.pipeline.run import Pipeline
from millstream.spark import session


def main() -> None:
    arguments = json.loads(sys.argv[1])
    try:
        spark = session.start("connector", arguments["master"], arguments["conf"])
    except MillstreamError as error:
        print(json.dumps({"error": str(error)}))
        return
    try:
        report = run(spark, arguments)
    finally:
        spark.stop()
    print(json.dumps(report))


def run(spark: SparkSession, arguments: dict[str, Any]) -> dict[str, Any]:
    broker = {"bootstrap.servers": arguments["broker"]}
    source = {**broker, "subscribe": arguments["topic"], "startingOffsets": "earliest"}
    report: dict[str, Any] = {"tasks": look_around(spark)}
    read = spark.read.format("millstream").options(**source).load()
    report["values"] = sorted(row[0] for row in read.selectExpr("CAST(value AS STRING)").collect())
    if "copy" in arguments:
        rows = read.select("key", "value")
        rows.write.format("millstream").mode("append").options(**broker, topic=arguments["copy"]).save()
    if "streamed" in arguments:
        rows = spark.readStream.format("millstream").options(**source).load().select("key", "value")
        query = (
            rows.writeStream.format("millstream")
            .options(**broker, topic=arguments["streamed"], checkpointLocation=arguments["checkpoint"])
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
    report["pipelines"] = {file: run_pipeline(spark, file, arguments["broker"]) for file in arguments.get("files", ())}
    return report


def run_pipeline(spark: SparkSession, file: str, broker: str) -> dict[str, int]:
    """Rows by sink."""
    pipeline = Pipeline(check.load(Path(file)), spark, broker)
    pipeline.start(once=True)
    rows: Counter[str] = Counter()
    for batch in pipeline.watch():
        rows[batch.sink] += batch.rows
    pipeline.stop()
    return rows


def look_around(spark: SparkSession) -> list[dict[str, str]]:
    """One row from each of two tasks, which Spark gives to the two executors."""

    def describe(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import os
        import sys

        from millstream.records import codec

        for _ in batches:
            found = {"folder": os.getcwd(), "prefix": sys.prefix, "code": codec.__file__, "kernel": codec.KERNEL}
            yield pa.RecordBatch.from_pylist([found])

    schema = "folder STRING, prefix STRING, code STRING, kernel STRING"
    return [row.asDict() for row in spark.range(2, numPartitions=2).mapInArrow(describe, schema).collect()]


if __name__ == "__main__":
    main()
