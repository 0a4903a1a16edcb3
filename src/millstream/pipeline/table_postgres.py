"""A table in PostgreSQL, upserted at the speed of COPY.

One transaction per batch:

    1. the application's row of `millstream_batches` takes the batch's number, if it is larger than the one there. That
       locks the row: a second driver with the same batch waits here, then finds the number taken and does nothing
    2. COPY into a temporary table
    3. INSERT ... ON CONFLICT DO UPDATE from there, of the last row of each key, in the key's order, so that two
       pipelines on one table cannot deadlock

An existing table is used as it is if it has our columns and a unique key; its other columns must be nullable or have
defaults. PostgreSQL's text cannot hold U+0000: it becomes U+FFFD, so that one record does not stop all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from millstream.pipeline.table_columns import BATCHES, Columns, TableError, TableGone, as_json

CONNECT_SECONDS = 10
LOCK_WAIT = "60s"
SORT_MEMORY = "64MB"
"""Enough to sort some hundred thousand rows without a file; the server's default is 4 MB."""
NAME_BYTES_MAX = 63
SETUP_LOCK = 0x6D696C6C
"""An advisory lock, so that two pipelines do not create the same table at once."""

TYPES: dict[str, tuple[str, ...]] = {
    "bool": ("boolean",),
    "int16": ("smallint", "integer", "bigint", "numeric"),
    "int32": ("integer", "bigint", "numeric"),
    "int64": ("bigint", "numeric"),
    "float32": ("real", "double precision"),
    "float64": ("double precision",),
    "text": ("text", "character varying"),
    "bytes": ("bytea",),
    "date": ("date",),
    "instant": ("timestamp with time zone",),
    "time": ("timestamp without time zone",),
    "decimal": ("numeric",),
    "json": ("jsonb", "json", "text"),
}
"""A column's type at creation, and the other accepted types in an existing table."""

_COLUMNS = """
SELECT a.attname, format_type(a.atttypid, NULL), a.attnotnull AND NOT a.atthasdef AND a.attidentity = ''
FROM pg_attribute a WHERE a.attrelid = %s::regclass AND a.attnum > 0 AND NOT a.attisdropped
"""
_UNIQUE_KEYS = """
SELECT array(SELECT a.attname::text FROM pg_attribute a
             WHERE a.attrelid = i.indrelid AND a.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1]))
FROM pg_index i
WHERE i.indrelid = %s::regclass AND i.indisunique AND i.indimmediate AND i.indisvalid
  AND i.indpred IS NULL AND i.indexprs IS NULL
"""
_BATCHES = "CREATE TABLE {} (app text PRIMARY KEY, batch bigint NOT NULL, at timestamptz NOT NULL)"
_TAKE = """
INSERT INTO {batches} (app, batch, at) VALUES (%s, %s, now())
ON CONFLICT (app) DO UPDATE SET batch = excluded.batch, at = excluded.at WHERE {batches}.batch < excluded.batch
"""


class PostgresTable:
    def __init__(self, url: str, columns: Columns, app_id: str) -> None:
        self._url, self._where = _understand(url)
        self._columns = columns
        self._app_id = app_id
        self._row = _unused_name(columns.names)
        schema, _, name = columns.table.rpartition(".")
        self._table, self._batches = _identifier(schema, name), _identifier(schema, BATCHES)
        long = [name for name in (*columns.names, name) if len(name.encode()) > NAME_BYTES_MAX]
        if long:
            raise TableError(f"{long[0]} is too long a name for PostgreSQL, which takes {NAME_BYTES_MAX} bytes")
        self._connection: psycopg.Connection[Any] | None = None
        with self._transaction() as transaction:
            transaction.execute("SELECT pg_advisory_xact_lock(%s)", (SETUP_LOCK,))
            self._make_missing(transaction)
            self._check(transaction)

    # -- setting up --------------------------------------------------------------------------------------------------

    def _make_missing(self, transaction: psycopg.Cursor[Any]) -> None:
        if not _exists(transaction, self._batches):
            transaction.execute(sql.SQL(_BATCHES).format(self._batches))
        if not _exists(transaction, self._table):
            if self._last(transaction) is not None:
                raise TableGone(self._columns.table)
            fields = [sql.SQL("{} {}").format(sql.Identifier(name), self._type(name)) for name in self._columns.names]
            key = sql.SQL("PRIMARY KEY ({})").format(_names(self._columns.key))
            transaction.execute(sql.SQL("CREATE TABLE {} ({})").format(self._table, sql.SQL(", ").join([*fields, key])))

    def _type(self, name: str) -> sql.SQL:
        kind = self._columns.kinds[name]
        text = TYPES[kind][0]
        if kind == "decimal":
            decimal = self._columns.type(name)
            text = f"numeric({decimal.precision},{decimal.scale})"
        return sql.SQL(text)

    def _check(self, transaction: psycopg.Cursor[Any]) -> None:
        """Adds new columns; refuses a table that does not fit, with all its problems."""
        name = self._table.as_string(transaction)
        there = {each: (kind, must) for each, kind, must in transaction.execute(_COLUMNS, (name,)).fetchall()}
        wrong = []
        for each in self._columns.names:
            wanted = TYPES[self._columns.kinds[each]]
            if each not in there and each in self._columns.key:
                wrong.append(f"it has no column {each} ({wanted[0]}), which is part of the key")
            elif each not in there:
                add = sql.SQL("ALTER TABLE {} ADD COLUMN {} {}")
                transaction.execute(add.format(self._table, sql.Identifier(each), self._type(each)))
            elif there[each][0] not in wanted:
                wrong.append(f"its column {each} is {there[each][0]}, not {wanted[0]}")
        for each, (_, must) in there.items():
            if must and each not in self._columns.names:
                wrong.append(f"its column {each} must not be null, and the rows do not have it")
        keys = [set(key) for (key,) in transaction.execute(_UNIQUE_KEYS, (name,)).fetchall()]
        if set(self._columns.key) not in keys:
            statement = sql.SQL("CREATE UNIQUE INDEX ON {} ({})").format(self._table, _names(self._columns.key))
            wrong.append(
                f"it has no unique key for {', '.join(self._columns.key)} ({statement.as_string(transaction)})"
            )
        if wrong:
            raise TableError(f"the table {self._columns.table} at {self._where} does not fit: {'; '.join(wrong)}")

    # -- batches -----------------------------------------------------------------------------------------------------

    def has(self, batch_id: int) -> bool:
        with self._transaction() as transaction:
            last = self._last(transaction)
        return last is not None and last >= batch_id

    def _last(self, transaction: psycopg.Cursor[Any]) -> int | None:
        query = sql.SQL("SELECT batch FROM {} WHERE app = %s").format(self._batches)
        row = transaction.execute(query, (self._app_id,)).fetchone()
        return None if row is None else int(row[0])

    def upsert(self, batch_id: int, batches: Iterable[pa.RecordBatch]) -> int:
        with self._transaction() as transaction:
            transaction.execute(sql.SQL(_TAKE).format(batches=self._batches), (self._app_id, batch_id))
            if transaction.rowcount == 0:
                return 0
            rows = self._copy(transaction, batches)
            if rows:
                self._merge(transaction)
        return rows

    def _copy(self, transaction: psycopg.Cursor[Any], batches: Iterable[pa.RecordBatch]) -> int:
        names = _names(self._columns.names)
        number = sql.Identifier(self._row)
        # As a query, so that the types are those of the existing table.
        transaction.execute(
            sql.SQL(
                "CREATE TEMPORARY TABLE millstream_new ON COMMIT DROP AS SELECT 0::bigint AS {}, {} FROM {} LIMIT 0"
            ).format(number, names, self._table)
        )
        rows = 0
        copy_in = sql.SQL("COPY millstream_new ({}, {}) FROM STDIN (FORMAT csv)").format(number, names)
        with transaction.copy(copy_in) as copy:
            for batch in self._columns.slices(batches):
                copy.write(self._csv(batch, rows))
                rows += batch.num_rows
        return rows

    def _csv(self, batch: pa.RecordBatch, first: int) -> bytes:
        arrays = [pa.array(np.arange(first, first + batch.num_rows))]
        arrays += [_text(batch.column(name), self._columns.kinds[name]) for name in self._columns.names]
        sink = pa.BufferOutputStream()
        pyarrow.csv.write_csv(
            pa.RecordBatch.from_arrays(arrays, names=[self._row, *self._columns.names]),
            sink,
            pyarrow.csv.WriteOptions(include_header=False),
        )
        written: bytes = sink.getvalue().to_pybytes()
        return written

    def _merge(self, transaction: psycopg.Cursor[Any]) -> None:
        key, names = _names(self._columns.key), _names(self._columns.names)
        changes = [sql.SQL("{0} = excluded.{0}").format(sql.Identifier(name)) for name in self._columns.rest]
        then = sql.SQL("UPDATE SET ") + sql.SQL(", ").join(changes) if changes else sql.SQL("NOTHING")
        transaction.execute(
            sql.SQL(
                "INSERT INTO {table} ({names}) SELECT DISTINCT ON ({key}) {names} FROM millstream_new "
                "ORDER BY {key}, {row} DESC ON CONFLICT ({key}) DO {then}"
            ).format(table=self._table, names=names, key=key, row=sql.Identifier(self._row), then=then)
        )

    # -- the connection ----------------------------------------------------------------------------------------------

    @contextmanager
    def _transaction(self) -> Iterator[psycopg.Cursor[Any]]:
        """All or nothing; database errors become one sentence without the password."""
        connection = self._connect()
        try:
            with connection.transaction(), connection.cursor() as cursor:
                cursor.execute(f"SET LOCAL lock_timeout = '{LOCK_WAIT}'")
                cursor.execute(f"SET LOCAL work_mem = '{SORT_MEMORY}'")
                yield cursor
        except psycopg.Error as error:
            if connection.closed:
                self._connection = None
            raise TableError(f"the table {self._columns.table} at {self._where}: {_sentence(error)}") from error

    def _connect(self) -> psycopg.Connection[Any]:
        """A working connection: the last batch may have been hours ago, and the database restarted since."""
        if self._connection is not None:
            try:
                self._connection.execute("SELECT 1")
                return self._connection
            except psycopg.Error:
                self.close()
        try:
            self._connection = psycopg.connect(self._url, autocommit=True)
        except psycopg.Error as error:
            raise TableError(
                f"cannot reach PostgreSQL at {self._where}: {_sentence(error)}; check that it runs, and the host, the "
                "user and the password in the URL"
            ) from error
        return self._connection

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def empty(url: str, table: str, apps: str) -> int:
    wanted, where = _understand(url)
    schema, _, name = table.rpartition(".")
    try:
        with psycopg.connect(wanted) as connection, connection.cursor() as cursor:
            cursor.execute(f"SET LOCAL lock_timeout = '{LOCK_WAIT}'")
            rows = 0
            if _exists(cursor, one := _identifier(schema, name)):
                rows = cursor.execute(sql.SQL("DELETE FROM {}").format(one)).rowcount
            if _exists(cursor, batches := _identifier(schema, BATCHES)):
                cursor.execute(sql.SQL("DELETE FROM {} WHERE starts_with(app, %s)").format(batches), (apps,))
            return rows
    except psycopg.Error as error:
        raise TableError(f"the table {table} at {where} cannot be emptied: {_sentence(error)}") from error


def _identifier(schema: str, name: str) -> sql.Identifier:
    return sql.Identifier(schema, name) if schema else sql.Identifier(name)


def _understand(url: str) -> tuple[str, str]:
    """The URL with our defaults, and a description of it without the password."""
    try:
        parts = conninfo_to_dict(url)
    except psycopg.Error:
        # Its message may quote the URL.
        raise TableError(
            "the table's URL is not one that PostgreSQL understands; it looks like postgresql://USER:PASSWORD@HOST:5432"
            "/DATABASE, with %XX for special characters in the password"
        ) from None
    host, port = parts.get("host") or parts.get("hostaddr") or "the local socket", parts.get("port") or 5432
    where = f"{host}:{port}, database {parts.get('dbname') or parts.get('user') or 'of the user'}"
    defaults: dict[str, Any] = {"connect_timeout": CONNECT_SECONDS, "application_name": "millstream"}
    return make_conninfo("", **{**defaults, **parts, "client_encoding": "utf8"}), where


def _exists(transaction: psycopg.Cursor[Any], table: sql.Identifier) -> bool:
    row = transaction.execute("SELECT to_regclass(%s) IS NOT NULL", (table.as_string(transaction),)).fetchone()
    return row is not None and bool(row[0])


def _text(array: pa.Array, kind: str) -> pa.Array:
    """A column in a CSV form that PostgreSQL reads."""
    if kind == "bytes":
        return pa.array([None if value is None else "\\x" + value.hex() for value in array.to_pylist()], pa.string())
    if kind == "json":
        return as_json(array)
    if kind == "text" and array.type != pa.null() and pc.any(pc.match_substring(array, "\0")).as_py():
        return pc.replace_substring(array, "\0", "\ufffd")
    return array


def _names(names: Iterable[str]) -> sql.Composed:
    return sql.SQL(", ").join(map(sql.Identifier, names))


def _unused_name(names: list[str]) -> str:
    name = "millstream_row"
    while name in names:
        name += "_"
    return name


def _sentence(error: psycopg.Error) -> str:
    if error.diag.message_primary is None:
        return " ".join(str(error).split()) or type(error).__name__
    detail = error.diag.message_detail
    return error.diag.message_primary + (f" ({detail})" if detail else "")
