"""`sqlite:` appends against SQLite itself: the same batches, one transaction for each.

Eight writers, as `store_writers` has them. The reference inserts the same bytes into a plain table of one connection,
without a loop, threads or offsets in its way: WAL, synchronous=FULL, as ours. It has one writer, because SQLite has one
at a time and more would only wait for each other; the rows with an 8 show how much, with eight threads that each have
a connection. In the last of them both sides have the same eight writers, and each of them waits for its answer.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from bench import servers, store_writers
from bench.measure import Measure, Scale, Side, Sides
from bench.store_writers import IN_FLIGHT, WAITING
from millstream.stores.sqlite import SqliteDatabase

SECONDS = 4.0


def _connect(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, isolation_level=None, timeout=60)
    database.execute("PRAGMA synchronous=FULL")
    return database


def _write(path: Path, batch: bytes, until: float) -> int:
    """One writer; how many it has written."""
    database = _connect(path)
    done = 0
    while time.perf_counter() < until:
        database.execute("BEGIN IMMEDIATE")
        database.execute("INSERT INTO batches (data) VALUES (?)", (batch,))
        database.execute("COMMIT")
        done += 1
    database.close()
    return done


def _reference(seconds: float, writers: int) -> float:
    batch = store_writers.make_batch()
    with servers.scratch() as directory, ThreadPoolExecutor(writers) as pool:
        made = _connect(directory / "plain.db")  # by one: eight at once would lock each other out
        made.execute("PRAGMA journal_mode=WAL")
        made.execute("CREATE TABLE batches (id INTEGER PRIMARY KEY, data BLOB NOT NULL)")
        made.close()
        start = time.perf_counter()
        work = [pool.submit(_write, directory / "plain.db", batch, start + seconds) for _ in range(writers)]
        return sum(each.result() for each in work) / (time.perf_counter() - start)


def _ours(seconds: float, in_flight: int) -> float:
    with servers.scratch() as directory:
        return store_writers.append(SqliteDatabase(str(directory / "store.db")), seconds, in_flight)


def _sides(writers: int, in_flight: int = IN_FLIGHT) -> Sides:
    @contextmanager
    def sides(scale: Scale) -> Iterator[tuple[Side | None, Side]]:
        seconds = scale.seconds(SECONDS)
        yield (lambda: _reference(seconds, writers)), (lambda: _ours(seconds, in_flight))

    return sides


_TITLE = "sqlite: append, durable, 100-record batches, 8 writers"
_WAITING = f"{_TITLE} that wait for every answer"
_PLAIN = "SQLite, one transaction per batch"
_EIGHT = f"{_PLAIN}, 8 threads"
MEASURES = [
    Measure("sqlite-append", _TITLE, _PLAIN, "batches/s", 2, 4, lower_is_better=False, sides=_sides(1)),
    Measure("sqlite-append-waiting", _WAITING, _PLAIN, "batches/s", 2, 4, False, _sides(1, WAITING)),
    Measure("sqlite-append-8", _TITLE, _EIGHT, "batches/s", None, None, False, _sides(8)),
    Measure("sqlite-append-waiting-8", _WAITING, _EIGHT, "batches/s", None, None, False, _sides(8, WAITING)),
]
