"""Moving what the WAL of an SQLite file holds into the file, beside the commits that go on.

    commits --grow--> enough --> a checkpoint in a thread of its own: nearly all of it, with the long sync
                             --> one in the writer's thread: what was committed meanwhile, and the WAL begins anew

Left to itself SQLite does all of it inside a commit, while everyone waits, and tells nobody where that failed. A sync
that fails here is as final as one of a commit: the WAL is about to be written over, and what the file lacks would be
gone. A checkpoint that gets in the way of readers, or of another process that makes one, is left to the next time.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import AbstractContextManager

from millstream.errors import RequestError
from millstream.logs import Damped
from millstream.promise import Promise, promised
from millstream.stores.sqlite_file import BUSY_MS
from millstream.stores.worker import Worker

WAL_BYTES = 16 << 20
"""At which it begins. About twice as many are in the WAL when it is done, and as many stay on disk."""
TRANSACTION_BYTES = 32 << 10
"""What a transaction writes beside its batches: some pages."""
PATIENCE_MS = 20
"""How long the writer waits for readers that still need the WAL, which ours do for one read."""


class Checkpoints:
    def __init__(
        self,
        connect: Callable[[], sqlite3.Connection],
        writing: Worker,
        errors: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._connect = connect
        self._writing = writing
        self._errors = errors
        """Makes `RequestError` of what SQLite raises, and ends the store where that was the disk."""
        self._beside = Worker("sqlite-checkpoint", 1)
        self._connection: sqlite3.Connection | None = None
        self._writer: sqlite3.Connection | None = None
        self._size = 0
        self._running: Promise[None] = Promise.of(None)
        self._closed = False
        self._damped = Damped(__name__)

    def start(self, writer: sqlite3.Connection) -> None:
        self._writer = writer

    def grow(self, size: int) -> None:
        """A transaction with so many bytes of batches is on its way."""
        self._size += size + TRANSACTION_BYTES
        if self._size > WAL_BYTES and self._running.done and not self._closed:
            self._size = 0
            self._running = promised(self._run())

    async def _run(self) -> None:
        try:
            with self._errors():
                await self._beside.do(self._move)
                if not self._closed:
                    await self._writing.do(self._begin_anew)
        except RequestError as error:
            self._damped.warning("the WAL could not be moved into its file, and will be later: %s", error)

    def _move(self) -> None:
        if self._connection is None:
            self._connection = self._connect()
            self._connection.execute("PRAGMA synchronous=FULL")
        self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()

    def _begin_anew(self) -> None:
        assert self._writer is not None
        self._writer.execute(f"PRAGMA busy_timeout={PATIENCE_MS}")
        try:
            self._writer.execute("PRAGMA wal_checkpoint(RESTART)").fetchone()
        finally:
            self._writer.execute(f"PRAGMA busy_timeout={BUSY_MS}")

    async def close(self) -> None:
        self._closed = True
        await self._running
        self._beside.close()
