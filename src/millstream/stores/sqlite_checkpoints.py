"""Checkpoints: move the WAL of an SQLite file into the file while commits continue.

    commits --look--> enough --> a checkpoint in its own thread (PASSIVE): moves nearly all frames
                             --> one by the writer (RESTART): moves the latest commits, syncs, restarts the WAL

Rules
-----
1. A failed sync here is as final as in a commit: SQLite is about to overwrite the WAL, and pages missing in the file
   would be lost. SQLite's automatic checkpoints, which run inside a commit while all wait, do not report it.
2. A checkpoint begins only if a commit exists that no other one has moved. Otherwise SQLite before 3.51.3 loses
   commits: a checkpoint of a fully checkpointed WAL, and a commit that restarts the WAL at the same moment, leave
   frames that count as moved and are not (sqlite.org/wal.html, "The WAL-Reset Bug").
3. So one process at a time checkpoints, under a lock on the file's directory, and commits a change before each one.
   A lock file would have to stay for ever, beside a store that is one file.
4. One thread does everything from lock to unlock and waits for the writer's thread: tasks can be cancelled, and loops
   end, while their work continues.

A checkpoint that readers or another process would block is left to the next time.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress

from millstream.core.errors import RequestError
from millstream.core.logs import Damped
from millstream.core.promise import Promise
from millstream.stores.sqlite_file import BUSY_MS
from millstream.stores.sqlite_writer import SqliteWriter
from millstream.stores.worker import Worker

logger = logging.getLogger(__name__)

WAL_BYTES = 32 << 20
"""A checkpoint begins at this size. At its end the WAL has up to twice this, and stays so."""
PATIENCE_MS = 20
"""How long the writer waits for readers of the WAL; ours use it for one read."""
REST_PAGES = 2_000
"""If readers kept more pages than this in the WAL, the writer skips its part: it might have to move all."""


class Checkpoints:
    def __init__(
        self,
        path: str,
        connect: Callable[[], sqlite3.Connection],
        writing: Worker,
        guard: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._path = os.path.realpath(path)  # the WAL's directory, the same for every alias
        self._connect = connect
        self._writing = writing
        self._guard = guard
        """Wraps work on the file: refuses it if the store is closed or read-only, turns SQLite's errors into
        `RequestError`, and makes the store read-only after an I/O error.
        """
        self._beside = Worker("sqlite-checkpoint", 1)
        self._connection: sqlite3.Connection | None = None
        self._writer: SqliteWriter | None = None
        self._directory = -1
        self._moved = 0
        self._running: Promise[None] = Promise.of(None)
        self._closed = False
        self._damped = Damped(__name__)

    def start(self, writer: SqliteWriter) -> None:
        self._connection = self._connect()  # now: later there may be no free descriptor
        self._connection.execute("PRAGMA synchronous=FULL")
        self._directory = os.open(os.path.dirname(self._path), os.O_RDONLY | os.O_CLOEXEC)
        with suppress(FileNotFoundError):  # counts a WAL that other processes left below the limit
            self._moved = -os.stat(f"{self._path}-wal").st_size
        self._writer = writer

    def look(self) -> None:
        """Called before each transaction."""
        if self._writer is None or self._closed or not self._running.done:
            return
        if self._writer.written - self._moved > WAL_BYTES:
            self._moved = self._writer.written
            self._running = self._beside.do(self._run)

    def _run(self) -> None:
        try:
            fcntl.flock(self._directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another process has it
            return
        except OSError as error:
            self._damped.warning("cannot checkpoint the WAL of %s: its directory has no locks: %s", self._path, error)
            return
        try:
            self._writing.wait(self._touch)
            with self._guard():
                rest = self._move()
            if rest <= REST_PAGES:
                self._writing.wait(self._begin_anew)
        except RequestError as error:
            if not self._closed:
                self._damped.warning("checkpoint of the WAL failed; retrying later: %s", error)
        except Exception:
            logger.exception("checkpoint of the WAL failed; retrying later")
        finally:
            fcntl.flock(self._directory, fcntl.LOCK_UN)  # explicit: a forked child shares the descriptor

    def _move(self) -> int:
        """The pages that readers kept in the WAL."""
        assert self._connection is not None
        _, pages, moved = self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        return int(pages - moved)

    def _touch(self) -> None:
        assert self._writer is not None
        with self._guard(), self._writer.transaction():
            self._writer.touch()

    def _begin_anew(self) -> None:
        assert self._writer is not None
        self._touch()
        connection = self._writer.connection
        with self._guard():
            connection.execute(f"PRAGMA busy_timeout={PATIENCE_MS}")
            try:
                connection.execute("PRAGMA wal_checkpoint(RESTART)").fetchone()
            finally:
                connection.execute(f"PRAGMA busy_timeout={BUSY_MS}")

    def end(self) -> None:
        """No further one begins."""
        self._closed = True

    def close(self) -> None:
        """Blocks until a running checkpoint ends, which needs the writer's thread."""
        self._beside.close()
        if self._directory >= 0:
            os.close(self._directory)
