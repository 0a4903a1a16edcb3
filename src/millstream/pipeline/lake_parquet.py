"""A lake of plain Parquet files, for readers without a table format, which read every file that they find.

Tasks write below `_staging`, under names that do not end in .parquet. A batch is then stored like this:

    1. its list of files replaces that of the batch before, in `_millstream/APP.json`     from here on it is stored
    2. each file is renamed into its place
    3. (the next batch begins again at 1)

A crash before 1 leaves invisible files, and Spark repeats the batch. A crash after 1 leaves a part of the files in
place: the next open or commit continues with 2 from the list. So no row is ever stored twice, and none is missing once
the pipeline runs again. Readers may see a batch arrive file by file; for whole batches use Delta Lake.

A lock on `_millstream/APP.lock` keeps a driver that was thought dead and its successor apart. Small files are not
merged here: during a merge a reader would find rows twice, or not at all.
"""

from __future__ import annotations

import json
import logging
import os
import time
from contextlib import suppress
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from millstream.core.disk import Disk
from millstream.pipeline.files import ORPHAN_SECONDS, OWN_NAME, PARTITIONS, FileEntry, check_fresh
from millstream.pipeline.lake_rows import LakeRows
from millstream.pipeline.lake_schema import LakeError, new_columns, with_partition
from millstream.pipeline.lock import locked

logger = logging.getLogger(__name__)

ABOUT = "_common_metadata"
"""Parquet's customary name for a file with a schema and no rows; ours also holds the lake's partitioning."""
STATE = "_millstream"
STAGING = "_staging"
_PARTITION_BY = b"millstream.partition_by"


class ParquetLake:
    suffix = ".parquet.staged"

    def __init__(self, path: str, schema: pa.Schema, partition_by: str, app_id: str, disk: Disk | None = None) -> None:
        self._path = os.path.abspath(path)
        self.root = os.path.join(self._path, STAGING)
        self._disk = disk or Disk()
        self._app = _state(self._path, app_id)
        self._finished = -1
        for folder in (self.root, os.path.dirname(self._app)):
            self._disk.make_directory(folder)
        with locked(os.path.join(self._path, STATE, "lake") + ".lock"):
            self._fit(with_partition(schema, partition_by), partition_by)
        with locked(self._app + ".lock"):
            self._finish(self._read())

    def _fit(self, wanted: pa.Schema, partition_by: str) -> None:
        about = _read_about(self._path)
        stored = pa.schema([])
        if about is not None:
            stored, there = about
            if there != partition_by:
                raise LakeError(
                    f"the lake {self._path} is partitioned by {there}, not by {partition_by}: set partition_by to "
                    f"{there}, or write to another lake"
                )
        added = new_columns(self._path, stored, wanted)
        if added:
            partitions = PARTITIONS[partition_by]
            columns = [field for field in [*stored, *added] if field.name not in partitions]
            schema = with_partition(pa.schema(columns), partition_by)
            sink = pa.BufferOutputStream()
            pq.write_metadata(schema.with_metadata({_PARTITION_BY: partition_by.encode()}), sink)
            self._disk.replace(os.path.join(self._path, ABOUT), sink.getvalue().to_pybytes())

    # -- batches -----------------------------------------------------------------------------------------------------

    def has(self, batch_id: int) -> bool:
        batch = int(self._read()["batch"])
        if batch >= batch_id and batch > self._finished:  # another driver's, which may have died before step 2
            with locked(self._app + ".lock"):
                self._finish(self._read())
        return batch >= batch_id

    def commit(self, batch_id: int, entries: list[FileEntry]) -> None:
        """Stores the files of a batch, once.

        A batch without files leaves no trace, since a repeat is empty too; but the first stores its number.
        """
        if not entries and batch_id > 0:
            return
        with locked(self._app + ".lock"):
            state = self._read()
            self._finish(state)
            if state["batch"] >= batch_id:
                return
            check_fresh(batch_id, self.root, entries)
            state = {"batch": batch_id, "files": [entry.path for entry in entries]}
            self._disk.replace(self._app + ".json", json.dumps(state).encode())
            self._finish(state)

    def _read(self) -> dict[str, Any]:
        try:
            with open(self._app + ".json", encoding="utf-8") as file:
                state: dict[str, Any] = json.load(file)
                return state
        except FileNotFoundError:
            return {"batch": -1, "files": []}

    def _finish(self, state: dict[str, Any]) -> None:
        """Renames the batch's files into place. Idempotent."""
        if state["batch"] <= self._finished:
            return
        folders = {
            self._path,
            os.path.dirname(self._app),
        }  # another driver may have written the list, and died before syncing its name
        for path in state["files"]:
            staged = os.path.join(self.root, path)
            place = os.path.join(self._path, path.removesuffix(".staged"))
            folder = os.path.dirname(path)
            while folder:
                folders.add(os.path.join(self._path, folder))
                folder = os.path.dirname(folder)
            if os.path.exists(staged):
                self._disk.make_directory(os.path.dirname(place))
                self._disk.rename(staged, place)
        for folder in sorted(folders):
            if os.path.exists(folder):
                self._disk.sync_directory(folder)
        self._finished = state["batch"]

    def rows(self) -> LakeRows:
        return rows(self._path)

    # -- tidying -----------------------------------------------------------------------------------------------------

    def tidy(self) -> None:
        """Deletes staged files that are uncommitted after a week. The next call retries after an error."""
        removed = 0
        try:
            old = self._old_files()
            for path in old - self._listed() if old else ():
                with suppress(FileNotFoundError):  # another driver tidies too
                    self._disk.remove(os.path.join(self.root, path))
                    removed += 1
        except (OSError, ValueError) as error:
            logger.warning("housekeeping of the lake %s failed: %s", self._path, error)
        if removed:
            logger.info("removed %d files of failed attempts from %s", removed, self._path)

    def _old_files(self) -> set[str]:
        found = set()
        for folder, _, names in os.walk(self.root):
            for name in filter(OWN_NAME.fullmatch, names):
                path = os.path.join(folder, name)
                with suppress(FileNotFoundError):  # moved into place meanwhile
                    if time.time() - os.path.getmtime(path) > ORPHAN_SECONDS:
                        found.add(os.path.relpath(path, self.root))
        return found

    def _listed(self) -> set[str]:
        """Files of stored batches of any sink, whose driver may have died before they were in place."""
        found: set[str] = set()
        folder = os.path.dirname(self._app)
        for name in os.listdir(folder):
            if name.endswith(".json"):
                with open(os.path.join(folder, name), encoding="utf-8") as file:
                    found.update(json.load(file)["files"])
        return found


def is_parquet_lake(path: str) -> bool:
    return _read_about(path) is not None


def rows(path: str) -> LakeRows:
    about = _read_about(path)
    if about is None:
        raise LakeError(f"{path} is not a lake that a pipeline has written")
    schema, partition_by = about
    columns = PARTITIONS[partition_by]
    hive = ds.partitioning(pa.schema([schema.field(name) for name in columns]), flavor="hive") if columns else None
    return LakeRows(path, ds.dataset(path, schema=schema, format="parquet", partitioning=hive), columns)


def is_only_of_others(path: str, app_id: str) -> bool:
    if os.path.exists(_state(path, app_id) + ".json"):
        return False
    try:
        return rows(path).count() > 0
    except (OSError, pa.ArrowException) as error:
        raise LakeError(f"the lake {path} cannot be read: {error}") from error


def _state(path: str, app_id: str) -> str:
    """The path of a writer's state, without the suffix."""
    return os.path.join(path, STATE, quote(app_id, safe=""))


def _read_about(path: str) -> tuple[pa.Schema, str] | None:
    try:
        schema = pq.read_schema(os.path.join(path, ABOUT))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except pa.ArrowException as error:
        raise LakeError(f"{os.path.join(path, ABOUT)} cannot be read: {error}") from error
    partition_by = (schema.metadata or {}).get(_PARTITION_BY)
    return None if partition_by is None else (schema.remove_metadata(), partition_by.decode())
