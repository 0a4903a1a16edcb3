"""From topic to lake without Spark's rows: where nothing transforms the records, tasks move them themselves.

Handing rows from Python to the JVM costs most of a read. A task of this source fetches, decodes into Arrow and writes
Parquet, and all that reaches Spark is a row per file. Spark still plans, retries and keeps the checkpoint, and the
driver commits the files of a batch to the lake together. Files of failed attempts stay behind unnamed, and `Lake.tidy`
removes them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, MutableMapping
from dataclasses import asdict, dataclass

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from millstream.pipeline import files
from millstream.pipeline.decode import META
from millstream.spark.options import SourceOptions, parse_source
from millstream.spark.ranges import RangePartition, connect
from millstream.spark.reading import read_range
from millstream.spark.schema import Shape, full_schema
from millstream.spark.stream import StreamReader

FORMAT = "millstream-mover"
MOVE = "move"
ROWS_PER_TASK_MIN = 500_000
"""Short ranges share a task, and so a file."""


@dataclass(frozen=True)
class Move:
    root: str
    suffix: str
    partition_by: str
    file_bytes: int
    with_headers: bool = False

    def to_option(self) -> str:
        return json.dumps(asdict(self))


class Mover(DataSource):
    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        return files.FILE_SCHEMA

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        move = Move(**json.loads(self.options[MOVE]))
        options = {name: value for name, value in self.options.items() if name.lower() != MOVE}
        return MovingReader(parse_source(options, streaming=True), schema, move)


class RangesPartition(InputPartition):
    def __init__(self, parts: list[RangePartition]) -> None:
        super().__init__(parts)
        self.parts = parts


class MovingReader(StreamReader):
    def __init__(self, options: SourceOptions, schema: StructType, move: Move) -> None:
        super().__init__(options, schema)
        self._move = move

    def partitions(self, start: dict[str, dict[str, int]], end: dict[str, dict[str, int]]) -> list[InputPartition]:
        together: list[RangesPartition] = []
        room = 0
        for part in super().partitions(start, end):
            assert isinstance(part, RangePartition)
            if together and part.range.size <= room:
                together[-1].parts.append(part)
            else:
                together.append(RangesPartition([part]))
                room = ROWS_PER_TASK_MIN
            room -= part.range.size
        return list(together)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, RangesPartition):
            return
        move = self._move
        rows = self._rows(partition.parts)
        first = partition.parts[0].range
        name = f"{first.topic}-{first.partition}-{first.start}"
        written = files.write_files(
            rows, move.root, move.partition_by, "_timestamp", move.file_bytes, name, move.suffix
        )
        for entry in written:
            yield entry.to_batch()

    def _rows(self, parts: list[RangePartition]) -> Iterator[pa.RecordBatch]:
        """The rows of the view, as `decode` makes them of bytes."""
        source = full_schema(self._move.with_headers)
        names = ["value", *(name for name, column in META.items() if column in source.fieldNames())]
        shape = Shape(StructType([source[META.get(name, name)] for name in names]))
        cluster = connect(self._options)
        try:
            for part in parts:
                for batch in read_range(cluster, self._options, part.range, shape):
                    yield batch.rename_columns(names)
                if part.is_last and self._options.group is not None:
                    self._tell(cluster, {part.range.place: part.range.end})
        finally:
            cluster.close()
