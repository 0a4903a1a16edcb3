"""The source as it would be without Arrow: a tuple per record. Apart, because Spark's workers import it by name."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from millstream.records import codec
from millstream.spark.options import parse_source
from millstream.spark.ranges import RangePartition, connect
from millstream.spark.reading import WAIT_MS_MAX
from millstream.spark.source import BatchReader, MillstreamSource


class TupleSource(MillstreamSource):
    @classmethod
    def name(cls) -> str:
        return "millstream-tuples"

    def reader(self, schema: StructType) -> DataSourceReader:
        return TupleReader(parse_source(self.options, streaming=False), schema)


class TupleReader(BatchReader):
    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, RangePartition)
        wanted = partition.range
        cluster = connect(self._options)
        offset = wanted.start
        while offset < wanted.end:
            fetched = cluster.fetch(wanted.place, offset, self._options.fetch_bytes, WAIT_MS_MAX)
            for record in codec.iterate(fetched.records):
                if offset <= record.offset < wanted.end:
                    offset = record.offset + 1
                    at = datetime.fromtimestamp(record.timestamp / 1000, UTC)
                    yield record.key, record.value, *wanted.place, record.offset, at, 0
        cluster.close()
