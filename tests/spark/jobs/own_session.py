"""A job with a SparkSession of its own, as a user writes it: nothing of Millstream is imported before Spark runs.

Arguments and report are JSON: `tests/spark/standalone.py` runs it.
"""

from __future__ import annotations

import json
import sys

from pyspark import __version__
from pyspark.sql import SparkSession

SETTINGS = {"spark.ui.enabled": "false", "spark.sql.shuffle.partitions": "1", "spark.driver.host": "127.0.0.1"}


def main() -> None:
    arguments = json.loads(sys.argv[1])
    builder = SparkSession.builder.master("local[2]").config("spark.driver.bindAddress", "127.0.0.1")
    for name, value in SETTINGS.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    source = {"bootstrap.servers": arguments["broker"], "subscribe": arguments["topic"]}
    found = spark.read.format("millstream").options(**source).load().count()
    report = {"found": found, "version": __version__}
    if "copy" in arguments:
        import connector  # type: ignore[import-not-found]  # beside this file, now that Spark runs: it imports Millstream

        report |= connector.run(spark, arguments)
    spark.stop()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
