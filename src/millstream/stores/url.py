"""Store URLs: `file:DIR`, `memory:`, `sqlite:FILE`, `postgresql://…`; and for metadata alone `etcd://…`.

Logs and metadata may live apart only if one broker at a time can use them: logs in `file:DIR`, which its broker locks,
and metadata in a database or in etcd. `pair.py` keeps the two together.
"""

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

_ETCD = ("etcd", "etcds")


def open_store(
    url: str, clock: Clock, observe_sync: Callable[[float], None], meta: str = ""
) -> tuple[LogStore, MetaStore]:
    """The logs of a store, and its metadata or those of another store, `meta`."""
    scheme, _, rest = url.partition(":")
    if meta and meta != url:
        _check_apart(url, meta)
    else:
        meta = ""
    if scheme == "memory" and not rest:
        return MemoryLogStore(clock), MemoryMeta()
    if scheme == "file" and rest:
        disk = ReservingDisk(os.path.abspath(rest))
        logs = LocalLogStore(rest, clock, Flusher(asyncio.get_running_loop(), observe_sync), disk, not meta)
        logs.lock()
        try:
            if meta:
                return logs, open_meta(meta, clock)
            return logs, SqliteMeta(os.path.join(logs.directory, "meta.db"), disk.make_room)
        except StartupError:
            logs.unlock()
            raise
    if (scheme == "sqlite" and rest) or scheme in ("postgresql", "postgres"):
        from millstream.stores.table_store import TableLogStore  # a broker on files starts faster without

        store = TableLogStore(_database(url), clock)
        return store, store.meta
    if scheme in _ETCD:
        raise StartupError("etcd holds metadata only: give --data DIR for the logs, and this URL to --meta")
    raise StartupError(
        f"the store {without_secrets(url)} is not known: use file:DIR (or --data DIR), sqlite:FILE, postgresql://… "
        "or memory:"
    )


def _check_apart(url: str, meta: str) -> None:
    scheme, _, directory = url.partition(":")
    kind, _, rest = meta.partition(":")
    if not (kind == "sqlite" and rest) and kind not in ("postgresql", "postgres", *_ETCD):
        raise StartupError(
            f"metadata cannot live in {without_secrets(meta)} without the logs: give --meta sqlite:FILE, "
            "postgresql://… or etcd://…, or leave it out"
        )
    if scheme != "file":
        raise StartupError(
            "--meta is for logs in file:DIR only: other stores keep logs and metadata together; leave it out"
        )
    if kind == "sqlite" and os.path.abspath(rest) == os.path.join(os.path.abspath(directory), "meta.db"):
        raise StartupError(
            f"--data {directory} keeps its own metadata in meta.db: leave out --meta, or name another file"
        )


def open_meta(url: str, clock: Clock) -> MetaStore:
    """Metadata without logs."""
    if url.partition(":")[0] in _ETCD:
        return _etcd(url, clock)
    from millstream.stores.table_meta import TableMeta

    database = _database(url)
    meta = TableMeta(database)
    database.listen(lambda logs: None, meta.news, meta.lost)
    return meta


def _database(url: str) -> Database:
    scheme, _, rest = url.partition(":")
    return _sqlite(rest) if scheme == "sqlite" else _postgres(url)


def _check_file(name: str) -> None:
    """SQLite's special names and URI options would create a file of that name here."""
    if name.strip("/") == ":memory:":
        raise StartupError("a store in memory is written memory:, not sqlite::memory:")
    if "?" in name:
        raise StartupError(
            f"the store sqlite:{name} has options, which sqlite: does not take: write sqlite:{name.partition('?')[0]}"
        )


def is_shared(url: str) -> bool:
    """Whether several brokers may share the store of these logs. Metadata alone do not make them share: `pair.py`."""
    return url.partition(":")[0] in ("sqlite", "postgresql", "postgres")


def _sqlite(path: str) -> Database:
    from millstream.stores.sqlite import SqliteDatabase

    _check_file(path)
    return SqliteDatabase(path)


def _etcd(url: str, clock: Clock) -> MetaStore:
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC writes lines of its own form to standard error
    try:
        from millstream.stores.etcd import EtcdMeta
    except ImportError as error:
        raise StartupError(
            "metadata in etcd need the libraries grpcio and aetcd: pip install 'millstream[etcd]'"
        ) from error
    return EtcdMeta(url, clock)


def _postgres(url: str) -> Database:
    try:
        from millstream.stores.postgres import PostgresDatabase
    except ImportError as error:
        raise StartupError(
            "a postgresql:// store needs the driver asyncpg: pip install 'millstream[postgres]'"
        ) from error
    return PostgresDatabase(url)
