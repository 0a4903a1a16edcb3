"""Store URLs: `file:DIR`, `memory:`, `sqlite:FILE`, `postgresql://…`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from millstream.config import without_secrets
from millstream.core.clock import Clock
from millstream.core.errors import StartupError
from millstream.log.flusher import Flusher
from millstream.log.reserve import ReservingDisk
from millstream.stores.base import LogStore, MetaStore
from millstream.stores.keys import MemoryMeta
from millstream.stores.local import LocalLogStore
from millstream.stores.memory import MemoryLogStore
from millstream.stores.sqlite_meta import SqliteMeta

if TYPE_CHECKING:
    from millstream.stores.database import Database


def open_store(url: str, clock: Clock, observe_sync: Callable[[float], None]) -> tuple[LogStore, MetaStore]:
    scheme, _, rest = url.partition(":")
    if scheme == "memory" and not rest:
        return MemoryLogStore(clock), MemoryMeta()
    if scheme == "file" and rest:
        disk = ReservingDisk(os.path.abspath(rest))
        logs = LocalLogStore(rest, clock, Flusher(asyncio.get_running_loop(), observe_sync), disk)
        logs.lock()
        try:
            return logs, SqliteMeta(os.path.join(logs.directory, "meta.db"), disk.make_room)
        except StartupError:
            logs.unlock()
            raise
    if (scheme == "sqlite" and rest) or scheme in ("postgresql", "postgres"):
        from millstream.stores.table_store import TableLogStore  # a broker on files starts faster without

        store = TableLogStore(_sqlite(rest) if scheme == "sqlite" else _postgres(url), clock)
        return store, store.meta
    raise StartupError(
        f"the store {without_secrets(url)} is not known: use file:DIR (or --data DIR), sqlite:FILE, postgresql://… "
        "or memory:"
    )


def _check_file(name: str) -> None:
    """SQLite's special names and URI options would create a file of that name here."""
    if name.strip("/") == ":memory:":
        raise StartupError("a store in memory is written memory:, not sqlite::memory:")
    if "?" in name:
        raise StartupError(
            f"the store sqlite:{name} has options, which sqlite: does not take: write sqlite:{name.partition('?')[0]}"
        )


def is_shared(url: str) -> bool:
    """Whether several brokers may share such a store."""
    return url.partition(":")[0] in ("sqlite", "postgresql", "postgres")


def _sqlite(path: str) -> Database:
    from millstream.stores.sqlite import SqliteDatabase

    _check_file(path)
    return SqliteDatabase(path)


def _postgres(url: str) -> Database:
    try:
        from millstream.stores.postgres import PostgresDatabase
    except ImportError as error:
        raise StartupError(
            "a postgresql:// store needs the driver asyncpg: pip install 'millstream[postgres]'"
        ) from error
    return PostgresDatabase(url)
