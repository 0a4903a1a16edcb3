"""Tables that a pipeline keeps up to date: upserted by key, each batch once.

The number of the last batch is kept beside the table and changes in the same transaction as its rows. A batch that
comes again, after a crash or from a driver that was thought dead, finds its number there and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import pyarrow as pa

from millstream.pipeline.table_columns import Columns, TableError, TableGone

__all__ = ["Table", "TableError", "TableGone", "empty_table", "open_table"]

NEEDS_POSTGRES = "a table in PostgreSQL needs pip install 'millstream[postgres]'"


class Table(Protocol):
    """The driver's side. `app_id` names who counts the batches: a pipeline's sink and its checkpoint."""

    def has(self, batch_id: int) -> bool:
        """Whether this batch, or a later one, is in already."""

    def upsert(self, batch_id: int, batches: Iterable[pa.RecordBatch]) -> int:
        """Puts a batch in as one step, where of several rows with one key the last one wins. Gives the number of rows
        that came, 0 if the batch is in already.
        """

    def close(self) -> None: ...


def open_table(url: str, name: str, key: tuple[str, ...], schema: pa.Schema, app_id: str) -> Table:
    """Opens a table and makes it where there is none; one that does not fit the rows is refused.

    One that is not there though batches of `app_id` are counted is a `TableGone`, and not made.

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
    """Deletes every row of a table, and the batches that are counted for applications whose ids begin with `apps`.
    Gives the number of rows; a table that is not there has none.
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
