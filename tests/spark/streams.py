"""Streams of the source in tests: run, with what each batch brought."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from tests.spark.topics import Row, Topics, from_spark


def stream(spark: SparkSession, topics: Topics, **options: Any) -> DataFrame:
    given = {"bootstrap.servers": topics.address, "startingOffsets": "earliest", **options}
    return spark.readStream.format("millstream").options(**given).load()


class Batches:
    """What a query brought, batch by batch, for a test to wait for."""

    def __init__(self) -> None:
        self.seen: list[list[Row]] = []
        self._changed = threading.Condition()

    def add(self, frame: DataFrame, batch_id: int) -> None:
        rows = from_spark(frame)
        with self._changed:
            self.seen.append(rows)
            self._changed.notify_all()

    @property
    def rows(self) -> list[Row]:
        return sorted((row for batch in self.seen for row in batch), key=lambda row: row[:3])

    def wait_for(self, count: int, query: StreamingQuery, seconds: float = 60) -> list[Row]:
        """Until so many rows came in all; a query that failed is told instead."""
        with self._changed:
            arrived = self._changed.wait_for(
                lambda: len(self.rows) >= count or query.exception() is not None, timeout=seconds
            )
        assert query.exception() is None, query.exception()
        assert arrived, f"{len(self.rows)} of {count} rows came within {seconds:.0f} s"
        return self.rows


def drain(frame: DataFrame, checkpoint: str | Path | None = None) -> Batches:
    """Runs a query with Trigger.AvailableNow to its end."""
    batches = Batches()
    query = start(frame, batches, checkpoint, availableNow=True)
    assert query.awaitTermination(60), "the query did not end"
    return batches


def start(frame: DataFrame, batches: Batches, checkpoint: str | Path | None = None, **trigger: Any) -> StreamingQuery:
    folder = str(checkpoint or tempfile.mkdtemp())
    return frame.writeStream.foreachBatch(batches.add).option("checkpointLocation", folder).trigger(**trigger).start()
