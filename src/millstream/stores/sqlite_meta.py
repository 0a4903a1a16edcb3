"""`MetaStore` for `file:`: keys in memory for reads, in SQLite for durability.

Transactions queue on the loop. A single thread writes the queue as one SQLite transaction (WAL, synchronous=FULL, so
one sync). Then they take effect in memory and are answered. Memory never shows a change before it is durable.

If SQLite cannot commit, the store refuses every further transaction until a restart, for the same reason as a log does
after a failed sync. Reads still work. A full disk is no such failure, as for a log: nothing was written, the
transactions are refused, and the next may find room. A transaction that only deletes first frees the space reserved
for a full disk (`make_room`), so that a topic can be deleted there. Other transactions do not get it: offset commits
would use it up.

The store checks the structure of the file when it opens it, and the broker decodes every value at start. If either
fails, the broker does not start, and says how to restore the file. A commit to a damaged file could make it worse.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from millstream.core.errors import Code, RequestError, RevisionConflict, StartupError
from millstream.core.logs import Damped
from millstream.core.promise import Promise
from millstream.stores.base import Delete, Operation, Put, Versioned
from millstream.stores.keys import Keys
from millstream.stores.sqlite_file import error_name, make_private, sentence

logger = logging.getLogger(__name__)
refusals = Damped(__name__)

SCHEMA_VERSION = 1
DAMAGED = ("SQLITE_CORRUPT", "SQLITE_NOTADB")
_SCHEMA = Path(__file__).parent / "sql" / "meta.sql"


def salvage(damaged: str, path: str) -> str:
    """A shell command that copies the readable rows. `.dump` ends with ROLLBACK after damage.

    Not `.recover`: Debian's sqlite3 is built without SQLITE_ENABLE_DBPAGE_VTAB, and gives an empty file.
    """
    return f"sqlite3 {damaged} .dump | sed 's/^ROLLBACK.*/COMMIT;/' | sqlite3 {path}"


class SqliteMeta(Keys):
    def __init__(self, path: str, make_room: Callable[[], bool] = lambda: False) -> None:
        super().__init__()
        self._path = path
        self._make_room = make_room
        self._database = self._open(path)
        self._queue: list[tuple[tuple[Operation, ...], Promise[int]]] = []
        self._busy = False
        self._is_closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="meta")
        try:
            self._load()
        except sqlite3.DatabaseError as error:
            self._database.close()
            raise self.unreadable(error) from error

    def unreadable(self, error: Exception) -> StartupError:
        logs = os.path.join(os.path.dirname(self._path), "logs")
        return StartupError(
            f"the metadata file {self._path} is damaged ({error}). Restore it from a backup. Without a backup, move it "
            f"and its -wal and -shm files away and salvage it with: {salvage('DAMAGED', self._path)}. The records in "
            f"{logs} are not affected"
        )

    def _load(self) -> None:
        (state,) = self._database.execute("PRAGMA quick_check(1)").fetchone()
        if state != "ok":
            raise sqlite3.DatabaseError(state)
        for key, value, revision in self._database.execute("SELECT key, value, revision FROM meta"):
            self.values[key] = Versioned(value, revision)
            self.revision = max(self.revision, revision)
        for (revision,) in self._database.execute("SELECT revision FROM last_revision"):
            self.revision = max(self.revision, revision)

    def _open(self, path: str) -> sqlite3.Connection:
        try:
            make_private(path)
            database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            database.execute("PRAGMA journal_mode=WAL")
            database.execute("PRAGMA synchronous=FULL")
            (version,) = database.execute("PRAGMA user_version").fetchone()
            if version > SCHEMA_VERSION:
                raise StartupError(f"{path} was written by a newer Millstream (schema {version}); upgrade this one")
            if version < SCHEMA_VERSION:  # avoids a write, which a full disk would refuse
                database.executescript(_SCHEMA.read_text())
                database.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
        except sqlite3.DatabaseError as error:
            if error_name(error).startswith(DAMAGED):
                raise self.unreadable(error) from error
            raise StartupError(f"{path} cannot be opened as a metadata store: {sentence(error)}") from error
        return database

    def transact(self, *operations: Operation) -> Promise[int]:
        if self.failure is not None or self._is_closed:
            return Promise.failed(self._refusal())
        promise: Promise[int] = Promise()
        self._queue.append((operations, promise))
        if not self._busy:
            self._busy = True
            # At the end of this turn of the loop, so that all its transactions share the commit.
            asyncio.get_running_loop().call_soon(self._commit_queued)
        return promise

    def _commit_queued(self) -> None:
        queue, self._queue = self._queue, []
        revision = self.revision
        changes: dict[str, Versioned | None] = {}
        accepted: list[tuple[Promise[int], int]] = []
        refused: list[tuple[Promise[int], RevisionConflict]] = []
        is_deletion = False
        for operations, promise in queue:
            try:
                changes.update(self.plan(operations, revision + 1, changes))
            except RevisionConflict as conflict:
                refused.append((promise, conflict))
                continue
            revision += 1
            accepted.append((promise, revision))
            is_deletion = is_deletion or _only_deletes(operations)
        if not changes:
            self._finish(None, changes, revision, accepted, refused)
            return
        loop = asyncio.get_running_loop()
        writing = loop.run_in_executor(self._thread, self._write, changes, revision, is_deletion)
        writing.add_done_callback(lambda done: self._finish(done.exception(), changes, revision, accepted, refused))

    def _write(self, changes: dict[str, Versioned | None], revision: int, is_deletion: bool) -> None:
        try:
            self._write_once(changes, revision)
        except sqlite3.Error as error:
            if not (is_deletion and _is_full(error) and self._make_room()):
                raise
            self._write_once(changes, revision)

    def _write_once(self, changes: dict[str, Versioned | None], revision: int) -> None:
        puts = [(key, item.value, item.revision) for key, item in changes.items() if item is not None]
        deletes = [(key,) for key, item in changes.items() if item is None]
        self._database.execute("BEGIN IMMEDIATE")
        try:
            self._database.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?, ?)", puts)
            self._database.executemany("DELETE FROM meta WHERE key = ?", deletes)
            self._database.execute("INSERT OR REPLACE INTO last_revision VALUES (0, ?)", (revision,))
            self._database.execute("COMMIT")
        except BaseException:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            raise

    def _finish(
        self,
        error: BaseException | None,
        changes: dict[str, Versioned | None],
        revision: int,
        accepted: list[tuple[Promise[int], int]],
        refused: list[tuple[Promise[int], RevisionConflict]],
    ) -> None:
        if _is_full(error):
            refusals.error("%s cannot be written: the disk is full", self._path)
            # Conflicts fail too: they may be with changes that were not stored.
            for promise in [promise for promise, _ in (*accepted, *refused)]:
                promise.fail(RequestError(Code.KAFKA_STORAGE_ERROR, f"{self._path}: the disk is full"))
            refused = []
        elif error is not None:
            self.failure = str(error)
            logger.critical("%s is read-only until the broker restarts: %s", self._path, error)
            waiting, self._queue = self._queue, []
            for promise in [promise for promise, _ in accepted] + [promise for _, promise in waiting]:
                promise.fail(self._refusal())
        else:
            self.apply(changes, revision)
            for promise, at in accepted:
                promise.settle(at)
        for promise, conflict in refused:
            promise.fail(conflict)
        self._busy = bool(self._queue)
        if self._queue:
            self._commit_queued()

    def _refusal(self) -> RequestError:
        if self.failure is None:
            return RequestError(Code.KAFKA_STORAGE_ERROR, "the metadata store is closed")
        return RequestError(Code.KAFKA_STORAGE_ERROR, f"the metadata store is read-only: {self.failure}")

    async def close(self) -> None:
        last = self.transact() if self._busy else Promise.of(self.revision)
        self._is_closed = True
        with contextlib.suppress(RequestError):  # the store failed: no transaction waits
            await last  # an empty transaction is answered after all queued ones
        self._thread.shutdown()
        self._database.close()


def _only_deletes(operations: Sequence[Operation]) -> bool:
    return any(isinstance(each, Delete) for each in operations) and not any(
        isinstance(each, Put) for each in operations
    )


def _is_full(error: BaseException | None) -> bool:
    """Whether only the disk is full: SQLite rolled back, and the file is unchanged."""
    return getattr(error, "sqlite_errorname", "") == "SQLITE_FULL"
