"""Reads a topic, writes it to another and streams it to a third on a cluster, and says what the tasks saw.

Arguments and report are JSON: `tests/spark/standalone.py` runs it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

from millstream.errors import MillstreamError
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
    return report


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
