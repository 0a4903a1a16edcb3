"""`sqlite:FILE`: logs and metadata in one file that several processes may open.

One thread writes, two read, each with its own connection; the loop never waits for the file. In WAL mode readers and
the writer do not block each other; with synchronous=FULL a commit is one sync (sqlite.org/wal.html).

    processes that share the file    SQLite's write lock (BEGIN IMMEDIATE) serialises their transactions
    changes by other processes       `PRAGMA data_version`, polled every `POLL_SECONDS` and before every own write; by
                                     the machine's clock, because other processes do not use a test's clock

The writer caches logs and producers between transactions and drops the cache as soon as another connection has
written. A commit that fails with an I/O error is final, as for a log: the state on disk is then unknown.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from millstream.core.errors import Code, RequestError, RevisionConflict, StartupError
from millstream.core.promise import Promise
from millstream.log.producers import Producers
from millstream.stores import queries
from millstream.stores.base import Operation, Versioned
from millstream.stores.database import Append, Changes, Landed, LogState, Row
from millstream.stores.sqlite_checkpoints import Checkpoints
from millstream.stores.sqlite_file import BUSY_MS, error_name, open_file, sentence
from millstream.stores.sqlite_writer import SqliteWriter, changes, load_producers
from millstream.stores.worker import Worker

logger = logging.getLogger(__name__)

POLL_SECONDS, POLL_SECONDS_MAX = 0.02, 1.0
READERS = 2
_SQL = queries.named("sqlite_queries.sql")

T = TypeVar("T")


class SqliteDatabase:
    """Implements `stores.database.Database`."""

    def __init__(self, path: str) -> None:
        self.path = self.location = os.path.abspath(path)
        self.failure: str | None = None
        self._writer: SqliteWriter | None = None
        self._writing = Worker("sqlite-write", 1)
        self._reading = Worker("sqlite-read", READERS)
        self._checkpoints = Checkpoints(self.path, self._connect, self._writing, self._changing)
        self._readers = threading.local()
        self._opened: list[sqlite3.Connection] = []
        self._poller: sqlite3.Connection | None = None
        self._poll_timer: asyncio.TimerHandle | None = None
        self._data_version = -1
        self._on_logs: Callable[[Sequence[LogState]], None] = lambda states: None
        self._on_meta: Callable[[int], None] = lambda revision: None
        self._closed = False

    def listen(
        self, logs: Callable[[Sequence[LogState]], None], meta: Callable[[int], None], lost: Callable[[], None]
    ) -> None:
        self._on_logs, self._on_meta = logs, meta

    async def start(self) -> None:
        if self._writer is not None:
            return
        try:
            connection = await self._writing.do(lambda: open_file(self.path))
        except sqlite3.Error as error:
            raise StartupError(f"{self.path} cannot be opened as a store: {error}") from error
        self._opened.append(connection)
        writer = SqliteWriter(connection)
        try:
            self._checkpoints.start(writer)
            self._poller = self._connect()
            self._poller.execute("PRAGMA busy_timeout=0")  # used on the loop, which must not wait
            self._data_version = self._poller.execute("PRAGMA data_version").fetchone()[0]
        except (OSError, sqlite3.Error) as error:
            raise StartupError(f"{self.path} cannot be opened as a store: {error}") from error
        self._writer = writer
        self._poll_timer = asyncio.get_running_loop().call_later(POLL_SECONDS, self._poll)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._poll_timer is not None:
            self._poll_timer.cancel()
        self._checkpoints.end()
        await asyncio.get_running_loop().run_in_executor(None, self._shut_down)

    def _shut_down(self) -> None:
        self._checkpoints.close()
        self._reading.close()
        self._writing.close()
        if self.failure is not None and self._poller is not None:
            # The last connection that closes checkpoints and removes the WAL (sqlite.org/wal.html). It skips frames
            # moved before, whose sync may have failed. If one connection never closes, not even when Python ends, the
            # WAL stays, and the next process moves all of it.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._poller))
            self._opened.remove(self._poller)
        for connection in reversed(self._opened):
            connection.close()

    def room(self) -> tuple[int, int]:
        usage = shutil.disk_usage(os.path.dirname(self.path))
        return usage.total, usage.free

    # -- threads -----------------------------------------------------------------------------------------------------

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, cached_statements=64)
        connection.execute(f"PRAGMA busy_timeout={BUSY_MS}")
        connection.execute("PRAGMA query_only=ON")
        self._opened.append(connection)
        return connection

    async def _read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        def run() -> T:
            if not hasattr(self._readers, "connection"):
                self._readers.connection = self._connect()
            return work(self._readers.connection)

        if self._closed:  # set before another thread closes the workers
            raise RequestError(Code.KAFKA_STORAGE_ERROR, "the store is closed")
        with self._errors():
            return await self._reading.do(run)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """In any thread: wraps changes of the file."""
        if (refusal := self._refusal()) is not None:
            raise refusal
        with self._errors():
            yield

    def _refusal(self) -> RequestError | None:
        if self.failure is not None:
            detail = f"{self.path} is read-only until a restart: {self.failure}"
            return RequestError(Code.KAFKA_STORAGE_ERROR, detail)
        return RequestError(Code.KAFKA_STORAGE_ERROR, "the store is closed") if self._closed else None

    def _write(self, work: Callable[[SqliteWriter], T]) -> Promise[T]:
        """One transaction."""
        if (refusal := self._refusal()) is not None:
            return Promise.failed(refusal)
        self._checkpoints.look()

        def run() -> T:
            assert self._writer is not None
            with self._errors(), self._writer.transaction():
                return work(self._writer)

        try:
            with self._errors():
                return self._writing.do(run)
        except RequestError as error:  # closed
            return Promise.failed(error)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            if error_name(error).startswith("SQLITE_IOERR") and self.failure is None:
                self.failure = str(error)
                logger.critical("%s is read-only until a restart: %s", self.path, error)
            raise RequestError(Code.KAFKA_STORAGE_ERROR, f"{self.path}: {sentence(error)}") from error
        except RuntimeError as error:
            if not self._closed:
                raise
            raise RequestError(Code.KAFKA_STORAGE_ERROR, "the store is closed") from error

    def _poll(self) -> None:
        """On the loop: reads shared memory, and the file only after a change."""
        if self._closed or self._poller is None:
            return
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            self._look()
        except sqlite3.OperationalError:
            pass  # busy for a moment; the next poll is soon
        except Exception:
            logger.exception("cannot poll %s for changes of other processes; retrying", self.path)
        finally:
            # Polling takes at most a twentieth of the loop's time, however many logs there are. The upper bound limits
            # the pause after a poll that a busy machine delayed.
            pause = min(max(POLL_SECONDS, (loop.time() - started) * 20), POLL_SECONDS_MAX)
            self._poll_timer = loop.call_later(pause, self._poll)

    def _look(self) -> None:
        assert self._poller is not None
        (data_version,) = self._poller.execute("PRAGMA data_version").fetchone()
        if data_version == self._data_version:
            return
        states = [LogState(*row) for row in self._poller.execute(_SQL["logs"])]
        (revision, _) = self._poller.execute(_SQL["revision"]).fetchone()
        self._data_version = data_version
        self._on_logs(states)
        self._on_meta(revision)

    # -- logs --------------------------------------------------------------------------------------------------------

    async def open_logs(self, topic_id: str, partitions: int) -> list[LogState]:
        def find(connection: sqlite3.Connection) -> list[LogState]:
            return [LogState(*row) for row in connection.execute(_SQL["logs_of_topic"], (topic_id, partitions))]

        def make(writer: SqliteWriter) -> None:
            writer.connection.executemany(_SQL["make_log"], [(topic_id, index) for index in range(partitions)])

        states = await self._read(find)
        if len(states) < partitions:
            await self._write(make)
            states = await self._read(find)
        return states

    async def states(self, log_ids: Sequence[int]) -> list[LogState]:
        def find(connection: sqlite3.Connection) -> list[LogState]:
            rows = (connection.execute(_SQL["log"], (log_id,)).fetchone() for log_id in log_ids)
            return [LogState(*row) for row in rows if row is not None]

        return await self._read(find)

    def append(self, appends: Sequence[Append], now_ms: int) -> Promise[Landed]:
        return self._write(lambda writer: writer.append(appends, now_ms))

    async def read(self, log_id: int, offset: int, below: int, bytes_max: int) -> tuple[bytes, int]:
        def find(connection: sqlite3.Connection) -> tuple[bytes, int]:
            taken: list[bytes] = []
            size, next_offset = 0, offset
            rows = connection.execute(_SQL["read"], {"log": log_id, "offset": offset, "below": below})
            for row_size, last_offset, data in rows:
                if taken and size + row_size > bytes_max:
                    break
                taken.append(data)
                size += row_size
                next_offset = last_offset + 1
                if size >= bytes_max:
                    break
            rows.close()
            return taken[0] if len(taken) == 1 else b"".join(taken), next_offset

        return await self._read(find)

    async def rows(self, log_id: int, offset: int, count_max: int) -> list[Row]:
        place = {"log": log_id, "offset": offset, "count": count_max}
        return await self._read(lambda each: [Row(*row) for row in each.execute(_SQL["rows"], place)])

    async def first_at(self, log_id: int, timestamp: int, offset: int, below: int) -> bytes | None:
        place = {"log": log_id, "offset": offset, "below": below, "timestamp": timestamp}
        row = await self._read(lambda each: each.execute(_SQL["first_at"], place).fetchone())
        return None if row is None else bytes(row[0])

    async def newest_time(self, log_id: int, offset: int, below: int) -> int:
        place = {"log": log_id, "offset": offset, "below": below}
        row = await self._read(lambda each: each.execute(_SQL["newest_time"], place).fetchone())
        return int(row[0])

    async def trim(self, log_id: int, offset: int) -> LogState:
        state = await self._write(lambda writer: writer.trim(log_id, offset))
        while await self._write(lambda writer: writer.remove_below_start(log_id)):
            pass  # other transactions run in between
        return (await self.states([log_id]) or [state])[0]

    async def truncate(self, log_id: int, offset: int) -> LogState:
        return await self._write(lambda writer: writer.truncate(log_id, offset))

    async def producers(self, log_id: int) -> Producers:
        return await self._read(lambda connection: load_producers(connection, log_id))

    async def forget_producers(self, before_ms: int, per_log_max: int) -> None:
        await self._write(lambda writer: writer.forget_producers(before_ms, per_log_max))

    async def discard(self, topic_id: str) -> None:
        for (log_id,) in await self._read(
            lambda each: each.execute(_SQL["every_log_of_topic"], (topic_id,)).fetchall()
        ):
            await self._write(partial(SqliteWriter.close_log, log_id=log_id))
            while await self._write(partial(SqliteWriter.remove, log_id=log_id, offset=1 << 62)):
                pass  # other transactions run in between
            await self._write(partial(SqliteWriter.delete_log, log_id=log_id))

    async def topic_ids(self) -> set[str]:
        return await self._read(lambda each: {row[0] for row in each.execute(_SQL["topic_ids"])})

    # -- metadata ----------------------------------------------------------------------------------------------------

    async def revision(self) -> int:
        row = await self._read(lambda connection: connection.execute(_SQL["revision"]).fetchone())
        return int(row[0])

    async def get(self, key: str) -> Versioned | None:
        row = await self._read(lambda connection: connection.execute(_SQL["get"], (key,)).fetchone())
        return None if row is None else Versioned(*row)

    async def list_keys(self, prefix: str) -> list[tuple[str, Versioned]]:
        def find(connection: sqlite3.Connection) -> list[tuple[str, Versioned]]:
            rows = connection.execute(_SQL["list"], (prefix, len(prefix), prefix))
            return [(key, Versioned(value, revision)) for key, value, revision in rows]

        return await self._read(find)

    async def transact(
        self, transactions: Sequence[Sequence[Operation]], since: int, prefixes: Sequence[str]
    ) -> tuple[list[int | RevisionConflict], Changes]:
        def run(writer: SqliteWriter) -> tuple[list[int | RevisionConflict], Changes]:
            answers = writer.transact(transactions)
            return answers, changes(writer.connection, since, prefixes)

        return await self._write(run)

    async def changes(self, since: int, prefixes: Sequence[str]) -> Changes:
        def run(connection: sqlite3.Connection) -> Changes:
            connection.execute("BEGIN")
            try:
                return changes(connection, since, prefixes)
            finally:
                connection.execute("COMMIT")

        return await self._read(run)

    async def forget_deleted(self, keep: int) -> None:
        def run(writer: SqliteWriter) -> None:
            revision, _ = writer.connection.execute(_SQL["revision"]).fetchone()
            if writer.connection.execute(_SQL["forget_deleted"], (revision - keep,)).rowcount > 0:
                writer.connection.execute(_SQL["set_floor"], (revision - keep,))

        await self._write(run)
