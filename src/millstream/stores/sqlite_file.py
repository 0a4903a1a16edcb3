"""An SQLite file as a store: creates it, upgrades its schema, or refuses it with a reason.

Only SQLite opens the file. Under POSIX, closing any other descriptor of it releases every lock of this process
(sqlite.org/howtocorrupt.html, 2.2): another process would then take the WAL for abandoned, and remove it.

The mode is 0600. SQLite gives the `-wal` and `-shm` files the mode of the database. So the file is created before
SQLite opens it: by `mknod`, which needs no descriptor.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sqlite3
import stat
import time

from millstream.core.disk import FILE_MODE, restrict
from millstream.core.errors import StartupError
from millstream.stores import queries

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 2
APPLICATION_ID = 0x4D494C4C
"""Marks the file as ours ("MILL"): other programs' databases are refused."""
PAGE_BYTES = 8192
BUSY_MS = 10_000
"""How long to wait for another process's transaction."""
BUSY_STEP_SECONDS = 0.01
READ_ONLY = "the file or its directory is read-only"


def open_file(path: str) -> sqlite3.Connection:
    """The writing connection, to a file of ours with a known schema; raises `StartupError`."""
    refusal = _refusal(path)
    if refusal is not None:
        raise StartupError(f"{path} cannot be opened as a store: {refusal}")
    try:
        make_private(path)
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, cached_statements=64)
    except sqlite3.Error as error:
        raise StartupError(f"{path} cannot be opened as a store: {sentence(error)}") from error
    try:
        connection.execute(f"PRAGMA busy_timeout={BUSY_MS}")
        connection.execute("PRAGMA wal_autocheckpoint=0")  # see `sqlite_checkpoints.py`
        connection.execute(f"PRAGMA page_size={PAGE_BYTES}")  # takes effect in a new file only
        _migrate(connection, path)
        _write_ahead(connection)
        connection.execute("PRAGMA synchronous=FULL")
    except sqlite3.Error as error:
        connection.close()
        raise StartupError(f"{path} cannot be opened as a store: {sentence(error)}") from error
    except BaseException:
        connection.close()
        raise
    return connection


def make_private(path: str) -> None:
    """Creates a missing file with mode 0600; restricts files of an earlier version."""
    with contextlib.suppress(OSError):  # on failure SQLite tries too, and reports the reason
        os.mknod(path, stat.S_IFREG | FILE_MODE)
    for suffix in ("", "-wal", "-shm"):
        restrict(path + suffix, FILE_MODE)


def _refusal(path: str) -> str | None:
    """The reason behind SQLite's "unable to open database file"."""
    directory = os.path.dirname(path)
    if os.path.isdir(path):
        return os.strerror(errno.EISDIR)
    if not os.path.isdir(directory):
        return os.strerror(errno.ENOTDIR if os.path.exists(directory) else errno.ENOENT)
    if not all(os.access(each, os.W_OK) for each in (directory, path) if os.path.exists(each)):
        return READ_ONLY
    return None


def _write_ahead(connection: sqlite3.Connection) -> None:
    """SQLite does not wait for the lock that this needs; its holder does the same, or already writes."""
    deadline = time.monotonic() + BUSY_MS / 1000
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if error_name(error) != "SQLITE_BUSY" or time.monotonic() > deadline:
                raise
        time.sleep(BUSY_STEP_SECONDS)


def _migrate(connection: sqlite3.Connection, path: str) -> None:
    connection.execute("BEGIN IMMEDIATE")
    try:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if application != APPLICATION_ID and tables:
            raise StartupError(f"{path} is a database of another program; name another file")
        if version > SCHEMA_VERSION:
            raise StartupError(f"{path} was written by a newer Millstream (schema {version}); upgrade this one")
        if not tables:
            _run(connection, "sqlite_schema.sql")
            connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
        else:
            for older in range(version, SCHEMA_VERSION):
                logger.info("upgrading %s from schema %d to %d", path, older, older + 1)
                _run(connection, f"sqlite_schema_{older}_to_{older + 1}.sql")
        if version != SCHEMA_VERSION:  # avoids a write, which a full disk would refuse
            connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _run(connection: sqlite3.Connection, file: str) -> None:
    for statement in queries.text(file).split(";"):
        connection.execute(statement)


def error_name(error: sqlite3.Error) -> str:
    return getattr(error, "sqlite_errorname", "")  # errors of the Python module have none


def sentence(error: sqlite3.Error) -> str:
    if error_name(error) == "SQLITE_FULL":
        return "the disk is full"
    if error_name(error).startswith("SQLITE_READONLY"):
        return READ_ONLY
    if error_name(error) == "SQLITE_NOTADB":
        return "it is not an SQLite database"
    return str(error)
