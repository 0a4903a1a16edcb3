"""Moving what the WAL of an SQLite file holds into the file, beside the commits that go on.

    commits --look--> enough --> a checkpoint in a thread of its own: nearly all of it
                             --> one by the writer: what was committed meanwhile, the sync, and the WAL begins anew

Rules
-----
1. A sync that fails here is as final as one of a commit: the WAL is about to be written over, and what the file lacks
   would be gone. SQLite's own checkpoints, which a commit makes now and then while everyone waits, say nothing of it.
2. A checkpoint begins only where something was committed that no other one has moved. SQLite before 3.51.3 otherwise
   loses commits: a checkpoint that finds all moved, and a commit that begins the WAL anew at that very moment, leave
   frames behind that count as moved and are not (sqlite.org/wal.html, "The WAL-Reset Bug").
3. So one process makes one at a time, which has the lock on the file's directory, and commits something before each.
   A file for that lock would have to stay behind for ever, beside a store that is one file.
4. From taking the lock to giving it back all is done by one thread, which waits for the writer's: tasks can be
   cancelled, and loops end, while what they began goes on.

One that would be in the way of readers, or of another process, is left to the next time.
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
"""At which it begins. Up to twice as many are in the WAL when it is done, and stay on disk."""
PATIENCE_MS = 20
"""How long the writer waits for readers that still need the WAL, which ours do for one read."""
REST_PAGES = 2_000
"""Where readers have kept more than this from being moved, the writer does not: it might have to, all at once."""


class Checkpoints:
    def __init__(
        self,
        path: str,
        connect: Callable[[], sqlite3.Connection],
        writing: Worker,
        guard: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._path = os.path.realpath(path)  # where the WAL is: one directory, by whichever name
        self._connect = connect
        self._writing = writing
        self._guard = guard
        """Around what is done to the file: refuses it where the store takes no changes (any more), makes `RequestError`
        of what SQLite raises, and ends the store where that was the disk.
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
        self._connection = self._connect()  # now, for later there may be no descriptor left
        self._connection.execute("PRAGMA synchronous=FULL")
        self._directory = os.open(os.path.dirname(self._path), os.O_RDONLY | os.O_CLOEXEC)
        with suppress(FileNotFoundError):  # left by others, who may not have written enough to move it
            self._moved = -os.stat(f"{self._path}-wal").st_size
        self._writer = writer

    def look(self) -> None:
        """Another transaction is on its way."""
        if self._writer is None or self._closed or not self._running.done:
            return
        if self._writer.written - self._moved > WAL_BYTES:
            self._moved = self._writer.written
            self._running = self._beside.do(self._run)

    def _run(self) -> None:
        try:
            fcntl.flock(self._directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another process does it
            return
        except OSError as error:
            self._damped.warning("the WAL of %s stays as it is, its directory has no locks: %s", self._path, error)
            return
        try:
            self._writing.wait(self._touch)
            with self._guard():
                rest = self._move()
            if rest <= REST_PAGES:
                self._writing.wait(self._begin_anew)
        except RequestError as error:
            if not self._closed:
                self._damped.warning("the WAL could not be moved into its file, and will be later: %s", error)
        except Exception:
            logger.exception("the WAL could not be moved into its file, and will be later")
        finally:
            fcntl.flock(self._directory, fcntl.LOCK_UN)  # said, for a forked child has the descriptor as well

    def _move(self) -> int:
        """What readers kept in the WAL, in pages."""
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
        """No more of them begin."""
        self._closed = True

    def close(self) -> None:
        """Blocks until one that runs is done, for which the writer's thread must still be there."""
        self._beside.close()
        if self._directory >= 0:
            os.close(self._directory)
