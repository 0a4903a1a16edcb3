"""A lake as a Delta Lake table: each batch is one entry of its log, together with the batch's number.

Rules
-----
1. The log decides. A batch is stored if the log has the application's transaction with its number or a later one;
   readers never see files that no entry names.
2. An entry is written only as the next version after the one last read (`max_commit_retries=0`). The second writer,
   a driver thought dead or its successor, reads again and finds the batch there. The library's own conflict
   resolution is not enough: two merges of the same files would both be written, and double the rows.
3. Nothing counts before it is on disk. The library does not sync, so this module syncs entries, its own and earlier
   ones of other writers; a torn entry at the end of the log was never acknowledged and is set aside.
4. Merging small files changes no row and carries no batch. The merged files stay for a week, for readers of older
   versions and for time travel.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Transaction
from deltalake import Schema as DeltaSchema
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction

from millstream.core.disk import Disk
from millstream.pipeline.files import ORPHAN_SECONDS, OWN_NAME, PARTITIONS, FileEntry, check_fresh, write_partition
from millstream.pipeline.lake_rows import LakeRows
from millstream.pipeline.lake_schema import LakeError, new_columns, partitioned_by, with_partition
from millstream.pipeline.lock import locked

logger = logging.getLogger(__name__)

TRIES_MAX = 100
CHECKPOINT_EVERY = 50
"""Log entries between two checkpoints, so that opening stays fast."""
SMALL_FILES_MAX = 16
MERGES_MAX = 4
"""Merges per `tidy`, each of one file's worth of rows, so that a batch never waits long for it."""
SWEEP_SECONDS = 6 * 3600
LOG = "_delta_log"
LOCK = "_millstream.lock"
"""Beside the log; readers of Delta Lake ignore names that begin with _."""
_ENTRY = re.compile(r"(\d{20})\.json")
_NO_HOOKS = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)
_MERGEABLE = {"timestampNtz", "appendOnly", "invariants"}
"""Table features under which a file holds exactly its rows. Deletion vectors are not among them."""


class DeltaLake:
    suffix = ".parquet"

    def __init__(self, path: str, schema: pa.Schema, partition_by: str, app_id: str, file_bytes: int) -> None:
        self.root = path
        self._app_id = app_id
        self._file_bytes = file_bytes
        self._disk = Disk()
        self._log = os.path.join(path, LOG)
        self._synced = -1
        self._swept_at = float("-inf")
        wanted = with_partition(schema, partition_by)
        if "%" in path:  # the library decodes the path once too often, and then opens another folder
            raise LakeError(f"the lake {path} has a % in its path, which Delta Lake's library cannot take; rename it")
        try:
            self._table = self._open(wanted, partition_by)
            self._grow(wanted)
        except DeltaError as error:
            raise LakeError(f"the lake {path} cannot be opened: {_sentence(error)}") from error

    # -- opening -----------------------------------------------------------------------------------------------------

    def _open(self, wanted: pa.Schema, partition_by: str) -> DeltaTable:
        self._disk.make_directory(os.path.abspath(self._log))
        self._mend()
        try:
            table = DeltaTable(self.root)
        except TableNotFoundError:
            with contextlib.suppress(CommitFailedError):  # another driver created it at the same moment
                DeltaTable.create(self.root, wanted, mode="ignore", partition_by=list(PARTITIONS[partition_by]))
            table = DeltaTable(self.root)
        there = partitioned_by(table.metadata().partition_columns, self.root)
        if there != partition_by:
            raise LakeError(
                f"the lake {self.root} is partitioned by {there}, not by {partition_by}: set partition_by to {there}, "
                "or write to another lake"
            )
        checkpoint = self._last_checkpoint()
        self._synced = checkpoint if checkpoint is not None else -1
        self._sync(table.version())
        return table

    def _mend(self) -> None:
        """Sets aside files torn by a machine's crash: the last entry of the log, or a checkpoint, which is a copy.

        One driver at a time: another may have written a whole entry in the place of the torn one.
        """
        with locked(os.path.join(self.root, LOCK)):
            self._mend_entry()
            self._mend_checkpoint()

    def _mend_entry(self) -> None:
        entries = sorted(name for name in os.listdir(self._log) if _ENTRY.fullmatch(name))
        if entries and not _is_whole(os.path.join(self._log, entries[-1])):
            torn = os.path.join(self._log, entries[-1])
            logger.warning("%s is incomplete; set aside as %s.torn", torn, entries[-1])
            self._disk.rename(torn, torn + ".torn")
            self._disk.sync_directory(self._log)

    def _mend_checkpoint(self) -> None:
        hint = os.path.join(self._log, "_last_checkpoint")
        if not os.path.exists(hint):
            return
        version = self._last_checkpoint()
        copies = [name for name in os.listdir(self._log) if version and name.startswith(f"{version:020}.checkpoint.")]
        if copies and all(_is_parquet(os.path.join(self._log, name)) for name in copies if name.endswith(".parquet")):
            return
        # Entries are deleted only after their checkpoint is synced, so without this one all still exist.
        logger.warning("removed an incomplete checkpoint of %s", self._log)
        for torn in (hint, *(os.path.join(self._log, name) for name in copies)):
            self._disk.remove(torn)

    def _last_checkpoint(self) -> int | None:
        try:
            with open(os.path.join(self._log, "_last_checkpoint"), encoding="utf-8") as file:
                return int(json.load(file)["version"])
        except (OSError, ValueError, KeyError):
            return None

    def _grow(self, wanted: pa.Schema) -> None:
        for _ in range(TRIES_MAX):
            added = new_columns(self.root, _schema(self._table), wanted)
            if not added:
                return
            try:
                self._table.alter.add_columns(DeltaSchema.from_arrow(pa.schema(added)).fields)
                logger.info("the lake %s has new columns: %s", self.root, ", ".join(field.name for field in added))
            except CommitFailedError:
                logger.debug("another writer committed to %s first", self.root)
            self._table = DeltaTable(self.root)
            self._sync(self._table.version())

    # -- batches -----------------------------------------------------------------------------------------------------

    def has(self, batch_id: int) -> bool:
        self._look_again()
        last = self._table.transaction_version(self._app_id)
        return last is not None and last >= batch_id

    def commit(self, batch_id: int, entries: list[FileEntry]) -> None:
        """Stores the files of a batch, once.

        A batch without files leaves no trace, since a repeat is empty too; but the first stores its number.
        """
        if not entries and batch_id > 0:
            return
        actions = [_add(entry, is_new=True) for entry in entries]
        for _ in range(TRIES_MAX):
            if self.has(batch_id):
                return
            check_fresh(batch_id, self.root, entries)
            if self._transact(actions, [Transaction(self._app_id, batch_id)]):
                return
        raise LakeError(f"cannot commit batch {batch_id} to the lake {self.root}: other writers always commit first")

    def _look_again(self) -> None:
        try:
            self._table.update_incremental()
        except DeltaError as error:
            raise LakeError(f"the log of the lake {self.root} cannot be read: {_sentence(error)}") from error
        self._sync(self._table.version())

    def _transact(self, actions: Sequence[AddAction | RemoveAction], transactions: list[Transaction]) -> bool:
        """Writes the log's next entry; False if another writer just did."""
        seen = self._table.version()
        try:
            self._table.create_write_transaction(
                list(actions),
                "append",
                self._table.schema(),
                self._table.metadata().partition_columns,
                commit_properties=CommitProperties(max_commit_retries=0, app_transactions=transactions),
                post_commithook_properties=_NO_HOOKS,
            )
        except CommitFailedError as error:
            self._look_again()
            if self._table.version() == seen:
                raise LakeError(f"the lake {self.root} cannot be written: {_sentence(error)}") from error
            return False
        self._look_again()
        return True

    def _sync(self, version: int) -> None:
        if version <= self._synced:
            return
        for each in range(self._synced + 1, version + 1):
            name = os.path.join(self._log, f"{each:020}.json")
            if os.path.exists(name):  # else it is older than the log's retention
                _sync_file(name)
        self._disk.sync_directory(self._log)
        self._synced = version

    def rows(self) -> LakeRows:
        return rows(self.root)

    # -- tidying -----------------------------------------------------------------------------------------------------

    def tidy(self) -> None:
        """Merges small files, keeps the log short and deletes files of failed attempts; little at a time.

        Errors here fail no batch: they are logged, and the next call retries.
        """
        try:
            self._look_again()
            self._checkpoint()
            for _ in range(MERGES_MAX):
                small = self._small_files()
                if small is None:
                    break
                self._merge(*small)
            if time.monotonic() - self._swept_at > SWEEP_SECONDS:
                self._swept_at = time.monotonic()
                self._sweep()
        except (DeltaError, LakeError, OSError, pa.ArrowException) as error:
            logger.warning("housekeeping of the lake %s failed: %s", self.root, _sentence(error))

    def _checkpoint(self) -> None:
        version = self._table.version()
        last = self._last_checkpoint()
        if version - (last if last is not None else 0) < CHECKPOINT_EVERY:
            return
        self._table.create_checkpoint()
        # Old entries may be deleted only when their checkpoint is on disk.
        _sync_file(os.path.join(self._log, f"{version:020}.checkpoint.parquet"))
        _sync_file(os.path.join(self._log, "_last_checkpoint"))
        self._disk.sync_directory(self._log)
        self._table.cleanup_metadata()

    def _small_files(self) -> tuple[dict[str, str | None], list[tuple[str, int]]] | None:
        """The partition with the most small files, if they are too many; (path, size), the oldest first.

        Read again for each merge: a transaction reads the log again. Files that another writer has merged by then would
        be merged a second time, and their rows doubled.
        """
        protocol = self._table.protocol()
        if not {*(protocol.reader_features or ()), *(protocol.writer_features or ())} <= _MERGEABLE:
            return None
        columns = self._table.metadata().partition_columns
        found: dict[tuple[Any, ...], list[tuple[int, str, int]]] = {}
        for file in pa.table(self._table.get_add_actions(flatten=True)).to_pylist():
            if file["size_bytes"] < self._file_bytes // 4 and OWN_NAME.fullmatch(os.path.basename(file["path"])):
                values = tuple(file[f"partition.{column}"] for column in columns)
                found.setdefault(values, []).append((file["modification_time"], file["path"], file["size_bytes"]))
        values, files = max(found.items(), key=lambda item: len(item[1]), default=((), []))
        if len(files) <= SMALL_FILES_MAX:
            return None
        partition = {
            column: None if value is None else str(value) for column, value in zip(columns, values, strict=True)
        }
        return partition, [(path, size) for _, path, size in sorted(files)]

    def _merge(self, partition: dict[str, str | None], small: list[tuple[str, int]]) -> None:
        """Merges as many files as fit into one."""
        chosen: list[tuple[str, int]] = []
        size = 0
        for path, each in small:
            if chosen and size + each > self._file_bytes:
                break
            chosen.append((path, each))
            size += each
        entries = list(
            write_partition(self._rows_of(path for path, _ in chosen), self.root, partition, 1 << 62, "merged")
        )
        now_ms = int(time.time() * 1000)
        actions: list[AddAction | RemoveAction] = [_add(entry, is_new=False) for entry in entries]
        actions += [RemoveAction(path, False, now_ms, each, partition) for path, each in chosen]
        if not self._transact(actions, []):
            for entry in entries:
                self._disk.remove(os.path.join(self.root, entry.path))

    def _rows_of(self, paths: Iterable[str]) -> Iterator[pa.RecordBatch]:
        """Columns that older files lack are null."""
        partitions = self._table.metadata().partition_columns
        schema = pa.schema([field for field in _schema(self._table) if field.name not in partitions])
        for path in paths:
            with pq.ParquetFile(os.path.join(self.root, path)) as file:
                for batch in file.iter_batches():
                    columns = [
                        batch.column(field.name).cast(field.type)
                        if field.name in batch.schema.names
                        else pa.nulls(batch.num_rows, field.type)
                        for field in schema
                    ]
                    yield pa.RecordBatch.from_arrays(columns, schema=schema)

    def _sweep(self) -> None:
        """Deletes files that merges and other writers have removed from the log, after its retention (default: a week),
        and files of ours that no entry ever named, after a week.

        The library only lists them: if it deletes them itself, it writes two entries about that and syncs neither.
        """
        taken_out = set(self._table.vacuum(dry_run=True))
        removed = 0
        for path in sorted({*taken_out, *self._table.vacuum(dry_run=True, full=True)}):
            full_path = os.path.join(self.root, path)
            with contextlib.suppress(FileNotFoundError):  # another driver sweeps too
                if path in taken_out or _is_orphan(full_path):
                    self._disk.remove(full_path)
                    removed += 1
        if removed:
            logger.info("removed %d unused files from %s", removed, self.root)


def rows(path: str) -> LakeRows:
    try:
        table = DeltaTable(path)
        return LakeRows(path, table.to_pyarrow_dataset(), table.metadata().partition_columns)
    except DeltaError as error:
        raise LakeError(f"the lake {path} cannot be read: {_sentence(error)}") from error


def is_only_of_others(path: str, app_id: str) -> bool:
    try:
        table = DeltaTable(path)
    except DeltaError:  # perhaps torn by a crash: the next writer repairs it, or reports the error
        return False
    return table.transaction_version(app_id) is None and bool(table.file_uris())


def _is_orphan(path: str) -> bool:
    return OWN_NAME.fullmatch(os.path.basename(path)) is not None and (
        time.time() - os.path.getmtime(path) > ORPHAN_SECONDS
    )


def _add(entry: FileEntry, *, is_new: bool) -> AddAction:
    """The only statistic is the number of rows: in Python's `deltalake` a filter finds nothing in a column without
    bounds beside others with bounds. The same holds for a column that was added later, and for a time outside the
    calendar. The file's own footer tells readers which parts to skip.
    """
    stats = json.dumps({"numRecords": entry.rows})
    return AddAction(entry.path, entry.size, entry.partition, entry.modified_ms, is_new, stats)


def _schema(table: DeltaTable) -> pa.Schema:
    return pa.schema(table.schema().to_arrow())


def _is_whole(path: str) -> bool:
    """An entry is written elsewhere and linked into place, so only a crash of the machine can tear one."""
    with open(path, encoding="utf-8") as file:
        try:
            return len([json.loads(line) for line in file if line.strip()]) > 0
        except ValueError:
            return False


def _is_parquet(path: str) -> bool:
    try:
        pq.read_metadata(path)
        return True
    except (OSError, pa.ArrowException):
        return False


def _sync_file(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _sentence(error: Exception) -> str:
    """The library appends a backtrace to its message."""
    return str(error).split("\n", 1)[0]
