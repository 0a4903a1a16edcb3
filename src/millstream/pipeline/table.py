"""Tables that a pipeline keeps up to date: upserted by key, each batch once.

The number of the last batch is stored beside the table and changes in the same transaction as its rows. If a batch is
repeated, after a crash or by a driver that was thought dead, its number is already there and nothing changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import pyarrow as pa

from millstream.pipeline.table_columns import Columns, TableError, TableGone

__all__ = ["Table", "TableError", "TableGone", "empty_table", "open_table"]

NEEDS_POSTGRES = "a table in PostgreSQL needs pip install 'millstream[postgres]'"


class Table(Protocol):
    """The driver's side. `app_id` names the counter of batches: a pipeline's sink and its checkpoint."""

    def has(self, batch_id: int) -> bool:
        """Whether this batch, or a later one, is stored already."""

    def upsert(self, batch_id: int, batches: Iterable[pa.RecordBatch]) -> int:
        """Stores a batch atomically; of several rows with one key the last one wins. Returns the number of received
        rows, 0 if the batch is stored already.
        """

    def close(self) -> None: ...


def open_table(url: str, name: str, key: tuple[str, ...], schema: pa.Schema, app_id: str) -> Table:
    """Opens a table and creates it if it is missing; refuses one that does not fit the rows.

    If it is missing though batches of `app_id` are counted, raises `TableGone`, and creates nothing.

    `url` is `sqlite:FILE` or `postgresql://...` as libpq reads it; with PostgreSQL, `name` may be SCHEMA.TABLE.
    """
    columns = Columns(name, schema, key)
    if _is_sqlite(url):
        from millstream.pipeline.table_sqlite import SqliteTable

        return SqliteTable(url.partition(":")[2], columns, app_id)
    try:
        from millstream.pipeline.table_postgres import PostgresTable
    except ImportError:
        raise TableError(NEEDS_POSTGRES) from None
    return PostgresTable(url, columns, app_id)


def empty_table(url: str, name: str, apps: str) -> int:
    """Deletes every row of a table, and the batch counts of applications whose ids begin with `apps`.
    Returns the number of rows; 0 if there is no table.
    """
    if _is_sqlite(url):
        from millstream.pipeline import table_sqlite

        return table_sqlite.empty(url.partition(":")[2], name, apps)
    try:
        from millstream.pipeline import table_postgres
    except ImportError:
        raise TableError(NEEDS_POSTGRES) from None
    return table_postgres.empty(url, name, apps)


def _is_sqlite(url: str) -> bool:
    scheme, _, rest = url.partition(":")
    if scheme == "sqlite" and rest:
        return True
    if scheme in ("postgresql", "postgres"):
        return False
    raise TableError(f"the table's database {scheme}: is not known; use sqlite:FILE or postgresql://USER@HOST/DATABASE")
