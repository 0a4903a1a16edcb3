"""A table in an SQLite file.

One transaction per batch, with the writer's lock from its start (BEGIN IMMEDIATE): the application's row of
`millstream_batches` takes the batch's number, then the rows are upserted in order, so the last one of a key wins.

SQLite has no type for time: instants are text in ISO 8601 with microseconds and a Z, so that they sort correctly.
Decimals are text as well, because a floating-point number would change them.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from millstream.pipeline.table_columns import BATCHES, Columns, TableError, TableGone, as_json

WAIT_SECONDS = 30.0
TYPES = {
    "bool": "INTEGER",
    "int16": "INTEGER",
    "int32": "INTEGER",
    "int64": "INTEGER",
    "float32": "REAL",
    "float64": "REAL",
    "text": "TEXT",
    "bytes": "BLOB",
    "date": "TEXT",
    "instant": "TEXT",
    "time": "TEXT",
    "decimal": "TEXT",
    "json": "TEXT",
}


class SqliteTable:
    def __init__(self, path: str, columns: Columns, app_id: str) -> None:
        self._path = path
        self._columns = columns
        self._app_id = app_id
        self._table = _quoted(columns.table)
        self._connection = self._open(path)
        try:
            with self._transaction() as transaction:
                self._make_missing(transaction)
                self._check(transaction)
        except BaseException:
            self.close()
            raise

    def _open(self, path: str) -> sqlite3.Connection:
        is_new = not os.path.exists(path)
        try:
            # Spark calls back on any thread, one call after the other.
            connection = sqlite3.connect(path, timeout=WAIT_SECONDS, isolation_level=None, check_same_thread=False)
            if is_new:
                _write_ahead(connection)
            connection.execute("PRAGMA synchronous=FULL")
            return connection
        except sqlite3.Error as error:
            raise TableError(
                f"cannot open the SQLite file {path}: {error}; check that its folder exists and can be written to"
            ) from error

    # -- setting up --------------------------------------------------------------------------------------------------

    def _make_missing(self, transaction: sqlite3.Connection) -> None:
        transaction.execute(
            f"CREATE TABLE IF NOT EXISTS {BATCHES} (app TEXT PRIMARY KEY, batch INTEGER NOT NULL, at TEXT NOT NULL)"
        )
        is_there = transaction.execute(f"PRAGMA table_info({self._table})").fetchone() is not None
        if not is_there and self._last(transaction) is not None:
            raise TableGone(self._columns.table)
        fields = [
            f"{_quoted(name)} {TYPES[self._columns.kinds[name]]}{' NOT NULL' if name in self._columns.key else ''}"
            for name in self._columns.names
        ]
        key = ", ".join(map(_quoted, self._columns.key))
        transaction.execute(f"CREATE TABLE IF NOT EXISTS {self._table} ({', '.join(fields)}, PRIMARY KEY ({key}))")

    def _check(self, transaction: sqlite3.Connection) -> None:
        """Adds new columns; refuses a table that does not fit, with all its problems."""
        wrong = []
        there = {row[1]: row for row in transaction.execute(f"PRAGMA table_info({self._table})")}
        for name in self._columns.names:
            wanted = TYPES[self._columns.kinds[name]]
            if name not in there and name in self._columns.key:
                wrong.append(f"it has no column {name} ({wanted}), which is part of the key")
            elif name not in there:
                transaction.execute(f"ALTER TABLE {self._table} ADD COLUMN {_quoted(name)} {wanted}")
            elif _affinity(there[name][2]) not in (wanted, "NUMERIC" if wanted == "INTEGER" else wanted):
                wrong.append(f"its column {name} is {there[name][2] or 'untyped'}, not {wanted}")
        for name, (_, _, _, must, default, _) in there.items():
            if must and default is None and name not in self._columns.names:
                wrong.append(f"its column {name} must not be null, and the rows do not have it")
        if set(self._columns.key) not in self._unique_keys(transaction, there):
            columns = ", ".join(map(_quoted, self._columns.key))
            statement = f"CREATE UNIQUE INDEX {_quoted(self._columns.table + '_key')} ON {self._table} ({columns})"
            wrong.append(f"it has no unique key for {', '.join(self._columns.key)} ({statement})")
        if wrong:
            raise TableError(f"the table {self._columns.table} in {self._path} does not fit: {'; '.join(wrong)}")

    def _unique_keys(self, transaction: sqlite3.Connection, there: dict[str, Any]) -> list[set[str]]:
        keys = [{name for name, row in there.items() if row[5]}]
        for _, index, is_unique, _, is_partial in transaction.execute(f"PRAGMA index_list({self._table})").fetchall():
            if is_unique and not is_partial:
                keys.append({row[2] for row in transaction.execute(f"PRAGMA index_info({_quoted(index)})")})
        return keys

    # -- batches -----------------------------------------------------------------------------------------------------

    def has(self, batch_id: int) -> bool:
        with self._sentences():
            last = self._last(self._connection)
        return last is not None and last >= batch_id

    def _last(self, connection: sqlite3.Connection) -> int | None:
        found = connection.execute(f"SELECT batch FROM {BATCHES} WHERE app = ?", (self._app_id,)).fetchone()
        return None if found is None else int(found[0])

    def upsert(self, batch_id: int, batches: Iterable[pa.RecordBatch]) -> int:
        rows = 0
        with self._transaction() as transaction:
            taken = transaction.execute(
                f"INSERT INTO {BATCHES} VALUES (?, ?, strftime('%Y-%m-%dT%H:%M:%fZ')) ON CONFLICT (app) DO UPDATE "
                f"SET batch = excluded.batch, at = excluded.at WHERE {BATCHES}.batch < excluded.batch",
                (self._app_id, batch_id),
            )
            if taken.rowcount == 0:
                return 0
            statement = self._statement()
            for batch in self._columns.slices(batches):
                columns = [_values(batch.column(name), self._columns.kinds[name]) for name in self._columns.names]
                transaction.executemany(statement, zip(*columns, strict=True))
                rows += batch.num_rows
        return rows

    def _statement(self) -> str:
        names = ", ".join(map(_quoted, self._columns.names))
        key = ", ".join(map(_quoted, self._columns.key))
        changes = ", ".join(f"{_quoted(name)} = excluded.{_quoted(name)}" for name in self._columns.rest)
        return (
            f"INSERT INTO {self._table} ({names}) VALUES ({', '.join('?' * len(self._columns.names))}) "
            f"ON CONFLICT ({key}) DO {'UPDATE SET ' + changes if changes else 'NOTHING'}"
        )

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._sentences():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    @contextmanager
    def _sentences(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise TableError(f"the table {self._columns.table} in {self._path}: {error}") from error

    def close(self) -> None:
        self._connection.close()


def _values(array: pa.Array, kind: str) -> list[Any]:
    if kind in ("instant", "time"):
        plain = array.cast(pa.timestamp("us", array.type.tz and "UTC"), safe=False)
        array = pc.strftime(plain, format="%Y-%m-%dT%H:%M:%S" + ("Z" if kind == "instant" else ""))
    elif kind in ("date", "decimal"):
        array = array.cast(pa.string())
    elif kind == "json":
        array = as_json(array)
    values: list[Any] = array.to_pylist()
    return values


def empty(path: str, table: str, apps: str) -> int:
    if not os.path.exists(path):
        return 0
    try:
        with closing(sqlite3.connect(path, timeout=WAIT_SECONDS)) as connection, connection:
            there = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            rows = connection.execute(f"DELETE FROM {_quoted(table)}").rowcount if table in there else 0
            if BATCHES in there:
                connection.execute(f"DELETE FROM {BATCHES} WHERE substr(app, 1, ?) = ?", (len(apps), apps))
            return rows
    except sqlite3.Error as error:
        raise TableError(f"the table {table} in {path} cannot be emptied: {error}") from error


def _affinity(declared: str) -> str:
    """SQLite's affinity rules, in its order."""
    declared = declared.upper()
    for affinity, words in {
        "INTEGER": ("INT",),
        "TEXT": ("CHAR", "CLOB", "TEXT"),
        "BLOB": ("BLOB",),
        "REAL": ("REAL", "FLOA", "DOUB"),
    }.items():
        if any(word in declared for word in words):
            return affinity
    return "NUMERIC" if declared else "BLOB"


def _write_ahead(connection: sqlite3.Connection) -> None:
    """WAL mode, so that readers and this writer do not wait for each other. SQLite does not wait for the lock that this
    needs, and two processes that create the file at once may both find it taken: each must retry.
    """
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
        time.sleep(0.01)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
