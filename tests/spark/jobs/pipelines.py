"""Runs pipelines until they are killed: `python pipelines.py BROKER MASTER once|on FILE...`, a line for each batch."""

from __future__ import annotations

import json
import logging
import sys
import threading
from pathlib import Path

from millstream.pipeline.run import Pipeline
from millstream.pipeline.spec import parse
from millstream.spark import session


def main() -> None:
    broker, master, mode, *files = sys.argv[1:]
    spark = session.start("pipelines", master, {"spark.sql.shuffle.partitions": "2"})
    stop = threading.Event()
    pipelines = []
    for file in files:
        spec, mistakes = parse(Path(file))
        assert spec is not None, mistakes
        pipelines.append(Pipeline(spec, spark, broker))
    for pipeline in pipelines:
        pipeline.start(once=mode == "once")
    print("started", flush=True)
    failures: list[Exception] = []
    watchers = [threading.Thread(target=watch, args=(pipeline, stop, failures)) for pipeline in pipelines]
    for watcher in watchers:
        watcher.start()
    for watcher in watchers:
        watcher.join()
    for pipeline in pipelines:
        pipeline.stop()
    spark.stop()
    if failures:
        sys.exit(f"a pipeline failed: {failures}")
    print("ended", flush=True)


def watch(pipeline: Pipeline, stop: threading.Event, failures: list[Exception]) -> None:
    try:
        for report in pipeline.watch(stop.is_set):
            line = {"sink": report.sink, "batch": report.batch, "rows": report.rows, "lag": sum(report.lag.values())}
            print(json.dumps(line), flush=True)
    except Exception as error:  # the other pipelines go on to their end
        logging.exception("a pipeline failed")
        failures.append(error)


if __name__ == "__main__":
    main()
