"""The delivery of a batch of rows: one class per kind of sink, all on the driver.

Spark may deliver the same batch again, after a crash or a failed attempt, with the same number and the same rows. The
lake and the table store the numbers of their batches and take each batch once. Topics take it again: exactly-once into
topics needs transactions, which will go into `TopicDelivery.deliver`, since it gets the number.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

from pyspark.sql import Column, DataFrame, Observation
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from millstream.core.errors import MillstreamError
from millstream.pipeline import decode, files
from millstream.pipeline.lake import Lake, create_lake, is_lake, is_only_of_others
from millstream.pipeline.spec import LakeSink, Sink, TableSink, TopicSink, redacted
from millstream.pipeline.table import Table, TableGone, open_table
from millstream.spark.schema import HEADERS

TIDY_EVERY = 10
"""Batches between two checks for small files."""
RENAMED = ", or the pipeline, whose name identifies its batches, was renamed"


class Delivery(Protocol):
    def deliver(self, rows: DataFrame, batch: int) -> int:
        """Writes a batch to the sink, and returns the number of rows. All of it, or an error."""
        ...

    def close(self) -> None: ...


class NotTheSame(MillstreamError):
    """A sink lacks batches that its checkpoint counts: going on would lose them for good."""

    def __init__(self, sink: Sink, what: str, batch: int, otherwise: str = "") -> None:
        super().__init__(
            f"{what} does not have the batches before batch {batch}: it was deleted, reset or replaced"
            f"{otherwise}; restore the old one, or, to read everything again, give the sink a new id or delete its "
            f"checkpoint (the folder {sink.name} in the pipeline's)"
        )


class LakeDelivery:
    """Rows into Parquet files, written by the tasks; the driver commits their list.

    The first batch creates the lake, even without rows, and is recorded in it. If the lake is missing at a
    later batch, or has only rows of other sinks, it is not the lake of the earlier batches.
    """

    def __init__(self, sink: LakeSink, schema: StructType, time_column: str | None, app_id: str, batch: int) -> None:
        what = f"the lake {sink.path}"
        if batch > 0 and not is_lake(sink.path):
            raise NotTheSame(sink, what, batch)
        if batch > 0 and is_only_of_others(sink.path, app_id):
            raise NotTheSame(sink, what, batch, RENAMED)
        self._sink = sink
        self._time_column = time_column
        arrow = to_arrow_schema(schema, timezone="UTC")
        self._lake: Lake = create_lake(sink.path, sink.format, arrow, sink.partition_by, app_id, sink.file_mb << 20)

    def deliver(self, rows: DataFrame, batch: int) -> int:
        if self._lake.has(batch):
            return 0
        write = partial(
            files.describe_files,
            root=self._lake.root,
            suffix=self._lake.suffix,
            partition_by=self._sink.partition_by,
            time_column=self._time_column,
            file_bytes=self._sink.file_mb << 20,
            name=f"batch-{batch}",
        )
        described = rows.mapInArrow(write, files.FILE_SCHEMA)
        return self.commit(described, batch)

    def commit(self, described: DataFrame, batch: int) -> int:
        """Commits the files that the rows describe. Collects once: collecting twice would write twice."""
        if self._lake.has(batch):
            return 0
        entries = [files.FileEntry.from_row(row) for row in described.collect()]
        self._lake.commit(batch, entries)
        if batch % TIDY_EVERY == TIDY_EVERY - 1:
            self._lake.tidy()
        return sum(entry.rows for entry in entries)

    def close(self) -> None:
        pass


class MovedDelivery(LakeDelivery):
    """Commits files that the source itself has written (see mover.py)."""

    def deliver(self, rows: DataFrame, batch: int) -> int:
        return self.commit(rows, batch)


class TableDelivery:
    """Every batch stores its number in the database, even without rows."""

    def __init__(self, sink: TableSink, schema: StructType, app_id: str, batch: int) -> None:
        arrow = to_arrow_schema(schema, timezone="UTC")
        what = f"the table {sink.table} in {redacted(sink.url)}"
        try:
            self._table: Table = open_table(sink.url, sink.table, sink.key, arrow, app_id)
        except TableGone:
            raise NotTheSame(sink, what, batch) from None
        if batch > 0 and not self._table.has(batch - 1):
            self._table.close()
            raise NotTheSame(sink, what, batch, RENAMED)

    def deliver(self, rows: DataFrame, batch: int) -> int:
        if self._table.has(batch):
            return 0
        return self._table.upsert(batch, rows.toArrow().to_batches())

    def close(self) -> None:
        self._table.close()


class TopicDelivery:
    def __init__(self, sink: TopicSink, broker: str) -> None:
        self._sink = sink
        self._broker = broker

    def deliver(self, rows: DataFrame, batch: int) -> int:
        return _send(as_records(rows, self._sink), self._broker, self._sink.topic, self._sink.compression)

    def close(self) -> None:
        pass


class DeadLetterDelivery:
    """Rows that could not be decoded: unchanged, with headers for the cause, the origin and the pipeline.

    Pipelines that read one topic share its dead letters. Compressed, because the originals may have been: a topic's
    limit applies to the compressed batch.
    """

    def __init__(self, topic: str, broker: str, pipeline: str) -> None:
        self._topic = topic
        self._broker = broker
        self._pipeline = pipeline

    def deliver(self, rows: DataFrame, batch: int) -> int:
        about = {
            "millstream-pipeline": F.lit(self._pipeline),
            "millstream-cause": F.col(decode.CAUSE),
            "millstream-column": F.col(decode.COLUMN),
            "millstream-topic": F.col("_topic"),
            "millstream-partition": F.col("_partition"),
            "millstream-offset": F.col("_offset"),
            "millstream-timestamp": F.col("_timestamp"),
        }
        headers = F.array(
            *(
                F.struct(F.lit(name).alias("key"), value.cast("string").cast("binary").alias("value"))
                for name, value in about.items()
            )
        )
        came = F.coalesce(F.col("_headers"), F.array())
        known = F.filter(headers, lambda header: header["value"].isNotNull())
        letters = decode.bad(rows).select(
            F.col("_key").alias("key"),
            F.col(decode.RAW).alias("value"),
            F.concat(came, known).cast(HEADERS).alias("headers"),
        )
        return _send(letters, self._broker, self._topic, "zstd")

    def close(self) -> None:
        pass


def as_records(rows: DataFrame, sink: TopicSink) -> DataFrame:
    """Rows as key and value: a JSON object of all columns but those about the source, or the column `value` itself."""
    columns = [name for name in rows.columns if name not in decode.META]
    whole = F.to_json(F.struct(*(_column(name) for name in columns)))
    chosen = [(whole if sink.format == "json" else F.col("value")).alias("value")]
    if sink.key is not None:
        chosen.append(_column(sink.key).cast("string").alias("key"))
    elif "_key" in rows.columns:
        chosen.append(F.col("_key").alias("key"))
    return rows.select(*chosen)


def _column(name: str) -> Column:
    """By its exact name, with any characters."""
    return F.col(f"`{name.replace('`', '``')}`")


def _send(records: DataFrame, broker: str, topic: str, compression: str) -> int:
    """Writes records and counts them."""
    observation = Observation()
    seen = F.count(F.lit(1)).alias("rows")
    options = {"bootstrap.servers": broker, "topic": topic, "compression": compression}
    records.observe(observation, seen).write.format("millstream").mode("append").options(**options).save()
    return int(observation.get["rows"] or 0)
