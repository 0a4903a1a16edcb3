"""Moves what was written out of SQLite's WAL into the file, beside the writer instead of in its way.

A commit that finds the WAL too long moves it itself: tens of milliseconds in which nobody is answered, a quarter of the
writer's time under load. A connection of its own may do that while the writer goes on. It never comes to the end while
there is load, and only then does SQLite begin the WAL anew; so the writer still moves the rest, a little, when the WAL
is several times as long (`sqlite.WAL_PAGES`).
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable

from millstream.promise import Promise
from millstream.stores.worker import Worker

logger = logging.getLogger(__name__)

CHECKPOINT_BYTES = 8 << 20


class Checkpointer:
    def __init__(self, connect: Callable[[], sqlite3.Connection]) -> None:
        self._connect = connect
        self._connection: sqlite3.Connection | None = None
        self._worker = Worker("sqlite-checkpoint", 1)
        self._unmoved = 0
        self._is_moving = False

    def written(self, size: int) -> None:
        """So many bytes are on their way into the WAL."""
        self._unmoved += size
        if self._unmoved >= CHECKPOINT_BYTES and not self._is_moving:
            self._unmoved, self._is_moving = 0, True
            self._worker.do(self._move).then(self._moved)

    def _move(self) -> None:
        if self._connection is None:
            self._connection = self._connect()
        self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()

    def _moved(self, done: Promise[None]) -> None:
        self._is_moving = False
        if done.error is not None:  # nothing is lost: it stays in the WAL
            logger.warning("what was written could not be moved out of the WAL, and will be later: %s", done.error)

    def close(self) -> None:
        self._worker.close()
