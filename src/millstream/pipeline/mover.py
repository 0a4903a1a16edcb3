"""From topic to lake without Spark's rows: if nothing transforms the records, tasks move them themselves.

Passing rows from Python to the JVM costs most of a read. A task of this source fetches, decodes into Arrow and writes
Parquet, and Spark gets only one row per file. Spark still plans, retries and keeps the checkpoint, and the
driver commits the files of a batch to the lake together. Files of failed attempts stay uncommitted, and `Lake.tidy`
deletes them.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, MutableMapping
from dataclasses import asdict, dataclass, replace

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
ROWS_PER_BATCH = 4_000_000
"""The default: as no row reaches Spark, a batch costs no memory, and planning and committing one
costs as much as moving some hundred thousand records.
"""
ROWS_PER_TASK_MIN, ROWS_PER_TASK_MAX = 500_000, 1_000_000
"""Short ranges share a task, and so a file; a long one is split, so that one partition keeps all cores busy."""


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
        rows_max = min(options.rows_per_partition_max, ROWS_PER_TASK_MAX)
        super().__init__(replace(options, rows_per_partition_max=rows_max), schema)
        self._move = move

    def partitions(self, start: dict[str, dict[str, int]], end: dict[str, dict[str, int]]) -> list[InputPartition]:
        parts = [part for part in super().partitions(start, end) if isinstance(part, RangePartition)]
        return [RangesPartition(together) for together in _even(parts)]

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
        """The rows of the view, as `decode` returns them for bytes."""
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


def _even(parts: list[RangePartition]) -> list[list[RangePartition]]:
    """Ranges per task: as many tasks as the work needs, with about equal loads."""
    count = max(1, sum(part.range.size for part in parts) // ROWS_PER_TASK_MIN)
    tasks: list[list[RangePartition]] = [[] for _ in range(min(count, len(parts)))]
    loads = [(0, at) for at in range(len(tasks))]
    for part in sorted(parts, key=lambda part: -part.range.size):
        load, at = heapq.heappop(loads)
        tasks[at].append(part)
        heapq.heappush(loads, (load + part.range.size, at))
    # Tasks that commit a partition's offset to the group come last, after its other ranges.
    tasks.sort(key=lambda task: any(part.is_last for part in task))
    return [sorted(task, key=lambda part: (part.range.place, part.range.start)) for task in tasks]
