"""Lakes: folders of Parquet files that store each batch of a pipeline once.

Tasks write files (`files.write_files`) into `lake.root`, with names that end in `lake.suffix`; the driver commits the
list of files together with the batch's number. If a batch is repeated, after a crash or a failed attempt, its number is
already there.
"""

from __future__ import annotations

import os
from typing import Protocol

import pyarrow as pa

from millstream.pipeline import lake_delta, lake_parquet
from millstream.pipeline.files import PARTITIONS, FileEntry
from millstream.pipeline.lake_delta import DeltaLake
from millstream.pipeline.lake_parquet import ParquetLake
from millstream.pipeline.lake_rows import LakeRows
from millstream.pipeline.lake_schema import LakeError, settle

__all__ = ["Lake", "LakeError", "LakeRows", "create_lake", "is_lake", "is_only_of_others", "open_lake", "task_folder"]

FILE_BYTES = 128 << 20


class Lake(Protocol):
    """The driver's side. `app_id` names the counter of batches: a pipeline's sink and its checkpoint."""

    root: str
    suffix: str

    def has(self, batch_id: int) -> bool:
        """Whether this batch, or a later one, is stored already."""

    def commit(self, batch_id: int, entries: list[FileEntry]) -> None:
        """Stores a batch atomically. If it is stored already, nothing happens, and `tidy` deletes the files."""

    def tidy(self) -> None:
        """Periodic maintenance. Call it every few batches: it does little at a time."""

    def rows(self) -> LakeRows: ...


def create_lake(
    path: str, format: str, schema: pa.Schema, partition_by: str, app_id: str, file_bytes: int = FILE_BYTES
) -> Lake:
    """Opens a lake for writing; creates it if it is missing, and adds new columns to an existing one.

    `schema` is that of the rows, without the columns that `partition_by` (none, day, hour) adds.
    """
    path = _folder(path)
    if partition_by not in PARTITIONS:
        raise LakeError(f"partition_by={partition_by} is not known; use {', '.join(PARTITIONS)}")
    if format not in ("delta", "parquet"):
        raise LakeError(f"the lake format {format} is not known; use delta or parquet")
    there = _format(path)
    if there not in (None, format):
        raise LakeError(f'the lake {path} is of format {there}; say format = "{there}", or write to another folder')
    try:
        if format == "delta":
            return DeltaLake(path, settle(schema), partition_by, app_id, file_bytes)
        return ParquetLake(path, settle(schema), partition_by, app_id)
    except OSError as error:
        raise LakeError(f"cannot write to the lake {path}: {error.strerror or error}") from error


def task_folder(path: str, format: str) -> tuple[str, str]:
    """The tasks' folder, and the suffix of their files: `root` and `suffix` of a lake that is not open yet."""
    if format == "parquet":
        return os.path.join(_folder(path), lake_parquet.STAGING), ParquetLake.suffix
    return _folder(path), DeltaLake.suffix


def open_lake(path: str) -> LakeRows:
    """The rows of an existing lake."""
    path = _folder(path)
    there = _format(path)
    if there is None:
        what = "holds no lake" if os.path.isdir(path) else "does not exist"
        raise LakeError(f"{path} {what}; name a folder that a pipeline's lake sink has written")
    return lake_delta.rows(path) if there == "delta" else lake_parquet.rows(path)


def is_lake(path: str) -> bool:
    return _format(_folder(path)) is not None


def is_only_of_others(path: str, app_id: str) -> bool:
    """Whether a lake has rows but no batch of this application, not even a first batch without rows."""
    path = _folder(path)
    if _format(path) == "delta":
        return lake_delta.is_only_of_others(path, app_id)
    return lake_parquet.is_only_of_others(path, app_id)


def _format(path: str) -> str | None:
    if os.path.isdir(os.path.join(path, lake_delta.LOG)):
        return "delta"
    return "parquet" if lake_parquet.is_parquet_lake(path) else None


def _folder(path: str) -> str:
    path = path.removeprefix("file://")
    if "://" in path:
        raise LakeError(f"the lake {path} is not a folder; lakes are written to folders that all workers share")
    return os.path.abspath(path)
