"""Arrow batches into Parquet files: the work of a lake sink's tasks.

Rules
-----
1. An entry is returned when its file and its directory are complete and synced. A crash cannot undo a committed
   entry.
2. A name is used once. Tasks never rename or delete finished files: uncommitted files are invisible, and `Lake.tidy`
   deletes them a week later. A task itself deletes an unfinished file.
3. Memory is bounded: rows wait in a buffer per day (or hour) until there are enough for a row group, or until all
   buffers together are too large, and then the largest is written.
"""

from __future__ import annotations

import json
import os
import re
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import LongType, StringType, StructField, StructType

from millstream.core.disk import Disk
from millstream.core.errors import MillstreamError
from millstream.pipeline.parquet import ParquetFile

ROW_GROUP_BYTES = 64 << 20
ROW_GROUP_ROWS = 1_000_000
BUFFERED_BYTES_MAX = 192 << 20
OPEN_FILES_MAX = 256
NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"

OWN_NAME = re.compile(r"mill-[A-Za-z0-9_.-]*-[0-9a-f]{12}-\d{5,}\.parquet(\.staged)?")
"""The names of our files, so that a sweep never deletes other files."""

PARTITIONS: dict[str, tuple[str, ...]] = {"none": (), "day": ("day",), "hour": ("day", "hour")}
"""The partition columns of a lake."""

ORPHAN_SECONDS = 7 * 24 * 3600
"""The age at which `Lake.tidy` deletes a file that no batch names."""
FRESH_SECONDS = ORPHAN_SECONDS // 2
"""The age limit for a commit: early enough that a commit and a deletion cannot meet."""

FILE_SCHEMA = StructType(
    [
        StructField("path", StringType()),
        StructField("size", LongType()),
        StructField("rows", LongType()),
        StructField("partition", StringType()),
        StructField("modified_ms", LongType()),
    ]
)
"""Files as rows of Spark; `partition` is JSON."""

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.-]+")
_HOUR_US = 3_600_000_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FIRST_HOUR = (datetime(1, 1, 1, tzinfo=UTC) - _EPOCH) // timedelta(hours=1)
_LAST_HOUR = (datetime(9999, 12, 31, 23, tzinfo=UTC) - _EPOCH) // timedelta(hours=1)
_disk = Disk()


@dataclass(frozen=True)
class FileEntry:
    """One finished file, as a task describes it to the driver."""

    path: str
    """Relative to the task's folder."""
    size: int
    rows: int
    partition: dict[str, str | None]
    modified_ms: int

    def to_batch(self) -> pa.RecordBatch:
        """A row of `FILE_SCHEMA`."""
        row = {**vars(self), "partition": json.dumps(self.partition)}
        return pa.RecordBatch.from_pylist([row], schema=to_arrow_schema(FILE_SCHEMA))

    @staticmethod
    def from_row(row: Any) -> FileEntry:
        """From a row of `FILE_SCHEMA`: a dict or a Spark Row."""
        fields = {name: row[name] for name in FILE_SCHEMA.fieldNames()}
        return FileEntry(**{**fields, "partition": json.loads(fields["partition"])})


class FilesTooOld(MillstreamError):
    """A batch was committed so long after its writing that its files may be gone."""


def check_fresh(batch_id: int, root: str, entries: Iterable[FileEntry]) -> None:
    """Refuses a batch whose files another driver may delete, or has deleted, as those of a failed attempt."""
    for entry in entries:
        try:
            is_fresh = time.time() - os.path.getmtime(os.path.join(root, entry.path)) < FRESH_SECONDS
        except FileNotFoundError:
            is_fresh = False
        if not is_fresh:
            raise FilesTooOld(
                f"the file {entry.path} of batch {batch_id} in {root} is missing, or so old that it may be removed at "
                "any moment; start the pipeline again to repeat the batch"
            )


def write_files(
    batches: Iterable[pa.RecordBatch],
    root: str,
    partition_by: str,
    time_column: str | None,
    file_bytes: int,
    name: str,
    suffix: str = ".parquet",
) -> Iterator[FileEntry]:
    """Writes all rows below `root`, in files of about `file_bytes`. All batches have one schema.

    The day and the hour are those of `time_column` in UTC. Rows without a time, or with one outside the calendar, go
    to a partition of their own.
    """
    with _Writing(root, file_bytes, name, suffix) as writing:
        for batch in batches:
            for hours, part in _split(batch, partition_by, time_column):
                yield from writing.add(_partition(partition_by, hours), part)
        yield from writing.finish()


def describe_files(
    batches: Iterable[pa.RecordBatch],
    *,
    root: str,
    suffix: str,
    partition_by: str,
    time_column: str | None,
    file_bytes: int,
    name: str,
) -> Iterator[pa.RecordBatch]:
    """`write_files` for `mapInArrow`: rows in, rows of `FILE_SCHEMA` out."""
    for entry in write_files(batches, root, partition_by, time_column, file_bytes, name, suffix):
        yield entry.to_batch()


def write_partition(
    batches: Iterable[pa.RecordBatch], root: str, partition: dict[str, str | None], file_bytes: int, name: str
) -> Iterator[FileEntry]:
    """Like `write_files`, for rows of one known partition."""
    with _Writing(root, file_bytes, name, ".parquet") as writing:
        for batch in batches:
            yield from writing.add(partition, batch)
        yield from writing.finish()


# -- days and hours ------------------------------------------------------------------------------------------------


def _split(
    batch: pa.RecordBatch, partition_by: str, time_column: str | None
) -> Iterator[tuple[int | None, pa.RecordBatch]]:
    """The rows of each hour, or of each day by its first hour; most batches have just one and stay unsplit."""
    if batch.num_rows == 0:
        return
    if partition_by == "none":
        yield None, batch
        return
    assert time_column is not None
    step = 1 if partition_by == "hour" else 24
    times = _microseconds(batch.column(time_column))
    extremes = pc.min_max(times).as_py()
    first, last = (_floor(extremes[which], step) for which in ("min", "max"))
    is_same = first == last and (first is not None or extremes["min"] == extremes["max"])
    if is_same and times.null_count in (0, len(times)):
        yield first, batch
        return
    hours = np.floor_divide(times.fill_null(0).to_numpy(zero_copy_only=False), _HOUR_US * step) * step
    unknown = (hours < _FIRST_HOUR) | (hours > _LAST_HOUR) | times.is_null().to_numpy(zero_copy_only=False)
    hours[unknown] = _LAST_HOUR + 1
    order = np.argsort(hours, kind="stable")
    ordered = batch.take(pa.array(order))
    values, starts = np.unique(hours[order], return_index=True)
    for value, start, end in zip(values, starts, [*starts[1:], len(order)], strict=True):
        yield (None if value > _LAST_HOUR else int(value)), ordered.slice(start, end - start)


def _microseconds(column: pa.Array) -> pa.Array:
    if pa.types.is_date(column.type):
        column = column.cast(pa.timestamp("s"))
    if column.type.unit != "us":
        column = column.cast(pa.timestamp("us", column.type.tz), safe=False)
    return column.view(pa.int64())


def _floor(microseconds: int | None, step: int) -> int | None:
    if microseconds is None:
        return None
    hours = microseconds // (_HOUR_US * step) * step
    return hours if _FIRST_HOUR <= hours <= _LAST_HOUR else None


def _partition(partition_by: str, hours: int | None) -> dict[str, str | None]:
    columns = PARTITIONS[partition_by]
    if hours is None:
        return dict.fromkeys(columns)
    at = _EPOCH + timedelta(hours=hours)
    values = {"day": at.date().isoformat(), "hour": str(at.hour)}
    return {column: values[column] for column in columns}


# -- writing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Open:
    path: str
    partition: dict[str, str | None]
    file: ParquetFile


class _Writing:
    """The open files of one task, one per partition."""

    def __init__(self, root: str, file_bytes: int, name: str, suffix: str) -> None:
        self._root = root
        self._file_bytes = file_bytes
        self._stem = f"mill-{_NOT_IN_NAMES.sub('-', name)[:120]}-{uuid.uuid4().hex[:12]}"
        self._suffix = suffix
        self._files: dict[tuple[str | None, ...], _Open] = {}
        self._buffered_bytes = 0
        self._count = 0

    def __enter__(self) -> _Writing:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        for each in self._files.values():
            each.file.abandon()

    def add(self, partition: dict[str, str | None], batch: pa.RecordBatch) -> Iterator[FileEntry]:
        if batch.num_rows == 0:
            return
        key = tuple(partition.values())
        each = self._files.get(key)
        if each is None:
            if len(self._files) >= OPEN_FILES_MAX:
                yield self._close(max(self._files, key=lambda key: self._files[key].file.size))
            each = self._files[key] = self._open(partition)
        self._buffered_bytes += each.file.add(batch)
        if each.file.buffered_bytes >= ROW_GROUP_BYTES or each.file.buffered_rows >= ROW_GROUP_ROWS:
            yield from self._flush(key)
        elif self._buffered_bytes >= BUFFERED_BYTES_MAX:
            yield from self._flush(max(self._files, key=lambda key: self._files[key].file.buffered_bytes))

    def finish(self) -> Iterator[FileEntry]:
        for key in list(self._files):
            yield self._close(key)

    def _open(self, partition: dict[str, str | None]) -> _Open:
        folders = [f"{name}={NULL_PARTITION if value is None else value}" for name, value in partition.items()]
        path = "/".join([*folders, f"{self._stem}-{self._count:05d}{self._suffix}"])
        self._count += 1
        return _Open(path, partition, ParquetFile(os.path.join(self._root, path)))

    def _flush(self, key: tuple[str | None, ...]) -> Iterator[FileEntry]:
        file = self._files[key].file
        self._buffered_bytes -= file.buffered_bytes
        file.flush()
        if file.size >= self._file_bytes:
            yield self._close(key)

    def _close(self, key: tuple[str | None, ...]) -> FileEntry:
        each = self._files[key]
        self._buffered_bytes -= each.file.buffered_bytes
        each.file.flush()
        size = each.file.close()
        # All the way up: another task may have created a folder and not synced its name yet.
        folder = os.path.dirname(each.file.path)
        for _ in range(len(each.partition) + 1):
            _disk.sync_directory(folder)
            folder = os.path.dirname(folder)
        del self._files[key]
        return FileEntry(each.path, size, each.file.rows, each.partition, int(time.time() * 1000))
