"""`format("millstream")`: topics as a Spark source and sink, in Python alone.

It speaks plain Kafka protocol, so it works with any Kafka cluster. Every class here is pickled to Spark's workers,
so each holds options and no open resources.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    InputPartition,
)
from pyspark.sql.types import StructType

from millstream.client.cluster import KafkaCluster
from millstream.spark.options import SourceOptions, parse_source
from millstream.spark.ranges import OffsetRange, RangePartition, connect, find_places, find_starts, resolve, split
from millstream.spark.reading import read_range
from millstream.spark.schema import Shape, check_schema, full_schema

if TYPE_CHECKING:
    import pyarrow as pa


class MillstreamSource(DataSource):
    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)

    @classmethod
    def name(cls) -> str:
        return "millstream"

    def schema(self) -> StructType:
        return full_schema(self.options.get("includeHeaders", "false").lower() == "true")

    def reader(self, schema: StructType) -> DataSourceReader:
        check_schema(schema)
        options = parse_source(self.options, streaming=False)
        if options.push_filters:
            from millstream.spark.filters import FilteringReader

            return FilteringReader(options, schema)
        return BatchReader(options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from millstream.spark.stream import StreamReader

        check_schema(schema)
        return StreamReader(parse_source(self.options, streaming=True), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from millstream.spark.sink import batch_writer

        return batch_writer(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from millstream.spark.sink import stream_writer

        return stream_writer(self.options, schema, overwrite)


class BatchReader(DataSourceReader):
    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        cluster = connect(self._options)
        try:
            ranges = self._ranges(cluster)
        finally:
            cluster.close()
        parts = split(ranges, self._options.partitions_min, self._options.rows_per_partition_max)
        return [RangePartition(part) for part in parts]

    def _ranges(self, cluster: KafkaCluster) -> list[OffsetRange]:
        options = self._options
        places = find_places(cluster, options)
        starts = find_starts(cluster, options, places)
        ends = resolve(cluster, options.ending, places)
        return [OffsetRange(*place, starts[place], ends[place]) for place in places]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, RangePartition):
            return  # Spark's partition if there is nothing to read
        cluster = connect(self._options)
        try:
            yield from read_range(cluster, self._options, partition.range, Shape(self._schema))
        finally:
            cluster.close()
