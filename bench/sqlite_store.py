"""`sqlite:` appends against SQLite itself: the same batches, one transaction for each.

Eight writers, each waiting for its batch to be durable before it sends the next. The reference inserts the same bytes
into a plain table of one connection, without a loop, threads or offsets in its way: WAL, synchronous=FULL, as ours.
It has one writer, because SQLite has one at a time and more would only wait for each other.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager

from bench import servers, store_writers
from bench.measure import Measure, Scale, Side
from millstream.stores.sqlite import SqliteDatabase

SECONDS = 4.0


def _reference(seconds: float) -> float:
    batch = store_writers.make_batch()
    with servers.scratch() as directory:
        database = sqlite3.connect(directory / "plain.db", isolation_level=None)
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=FULL")
        database.execute("CREATE TABLE batches (id INTEGER PRIMARY KEY, data BLOB NOT NULL)")
        done, start = 0, time.perf_counter()
        while time.perf_counter() - start < seconds:
            database.execute("BEGIN IMMEDIATE")
            database.execute("INSERT INTO batches (data) VALUES (?)", (batch,))
            database.execute("COMMIT")
            done += 1
        figure = done / (time.perf_counter() - start)
        database.close()
    return figure


def _ours(seconds: float) -> float:
    with servers.scratch() as directory:
        return store_writers.append(SqliteDatabase(str(directory / "store.db")), seconds)


@contextmanager
def _sides(scale: Scale) -> Iterator[tuple[Side | None, Side]]:
    seconds = scale.seconds(SECONDS)
    yield (lambda: _reference(seconds)), (lambda: _ours(seconds))


MEASURES = [
    Measure(
        key="sqlite-append",
        title="sqlite: append, durable, 100-record batches, 8 writers",
        reference="SQLite, one transaction per batch",
        unit="batches/s",
        must=2,
        aim=4,
        lower_is_better=False,
        sides=_sides,
    )
]
