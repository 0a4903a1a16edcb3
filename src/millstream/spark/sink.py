"""`df.write` and `df.writeStream` with `format("millstream")`.

A task writes its rows with a producer of its own and reports them when all are acknowledged. If it fails, Spark runs it
again and its rows are sent again: none is lost, some may be stored twice.

A report names the query, the batch and the attempt. Rows are readable as soon as they are acknowledged, so `commit`
has nothing to publish. With transactions it will: it gets the winning attempts of a batch and no others, once, though
perhaps in another process than last time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import ArrayType, BinaryType, DataType, IntegerType, StringType, StructType, TimestampType

from millstream.spark.options import BadOption, SinkOptions, parse_sink
from millstream.spark.writing import Delivered, Writing, connect, count_partitions

COLUMNS = {
    "key": "STRING or BINARY",
    "value": "STRING or BINARY",
    "headers": "ARRAY<STRUCT<key: STRING, value: BINARY>>",
    "topic": "STRING",
    "partition": "INT",
    "timestamp": "TIMESTAMP",
}


@dataclass(frozen=True)
class Attempt:
    """One run of one task. Of all runs of the same task and batch, one wins."""

    query: str | None
    batch: int | None
    """None outside of streams, as is the query."""
    partition: int
    number: int


@dataclass(frozen=True)
class Written(WriterCommitMessage):
    """The rows that one attempt has written, all acknowledged."""

    attempt: Attempt
    producer: tuple[int, int] | None
    """Id and epoch; None if there was nothing to write."""
    delivered: tuple[Delivered, ...]


def batch_writer(given: Mapping[str, str], schema: StructType, overwrite: bool) -> BatchWriter:
    if overwrite:
        raise BadOption('a topic can only be added to: use mode("append")')
    return BatchWriter(_check(given, schema))


def stream_writer(given: Mapping[str, str], schema: StructType, overwrite: bool) -> StreamWriter:
    if overwrite:
        raise BadOption('a topic can only be added to: use outputMode("append") or outputMode("update")')
    return StreamWriter(_check(given, schema))


class BatchWriter(DataSourceArrowWriter):
    def __init__(self, options: SinkOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        return _write(self._options, iterator)


class StreamWriter(DataSourceStreamArrowWriter):
    def __init__(self, options: SinkOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        return _write(self._options, iterator)


def _write(options: SinkOptions, batches: Iterator[pa.RecordBatch]) -> Written:
    attempt = _attempt()
    # If every batch of a query began at the first partition, triggers with few rows would fill only that one.
    writing = Writing(options, spread=attempt.partition + (attempt.batch or 0))
    try:
        for batch in batches:
            writing.add(batch)
        delivered = writing.finish()
    finally:
        writing.stop()
    return Written(attempt, writing.producer, tuple(delivered))


def _attempt() -> Attempt:
    context = TaskContext.get()
    if context is None:
        return Attempt(None, None, 0, 0)
    batch = context.getLocalProperty("streaming.sql.batchId")
    return Attempt(
        context.getLocalProperty("sql.streaming.queryId"),
        int(batch) if batch is not None else None,
        context.partitionId(),
        context.attemptNumber(),
    )


def _check(given: Mapping[str, str], schema: StructType) -> SinkOptions:
    """The options, after a check of the rows: columns, types, and the topic if it is known already."""
    options = parse_sink(given)
    names = schema.fieldNames()
    unknown = [name for name in names if name not in COLUMNS]
    if unknown:
        raise BadOption(f"a topic has no column {', '.join(unknown)}; it takes {', '.join(COLUMNS)}: select these")
    if "value" not in names:
        raise BadOption("there is no column value; select the content of the records AS value")
    if options.topic is None and "topic" not in names:
        raise BadOption("the rows have no topic: set the option topic, or select a column topic")
    for field in schema.fields:
        if not _fits(field.name, field.dataType):
            raise BadOption(
                f"column {field.name} must be {COLUMNS[field.name]}, not {field.dataType.simpleString().upper()}; "
                "cast it"
            )
    if options.topic is not None:
        cluster = connect(options)
        try:
            count_partitions(cluster, options.topic, options)
        finally:
            cluster.close()
    return options


def _fits(name: str, kind: DataType) -> bool:
    match name:
        case "key" | "value":
            return isinstance(kind, StringType | BinaryType)
        case "topic":
            return isinstance(kind, StringType)
        case "partition":
            return isinstance(kind, IntegerType)
        case "timestamp":
            return isinstance(kind, TimestampType)
        case _:
            pair = kind.elementType if isinstance(kind, ArrayType) else None
            return (
                isinstance(pair, StructType)
                and pair.fieldNames() == ["key", "value"]
                and isinstance(pair["key"].dataType, StringType)
                and isinstance(pair["value"].dataType, BinaryType)
            )
