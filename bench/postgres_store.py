"""`postgresql:` appends and reads against PostgreSQL itself, through the same driver.

Append: eight writers, as `store_writers` has them; the reference COPYs the same bytes into a plain table, one commit
per batch, on one connection. Another row gives the reference eight connections: PostgreSQL then shares syncs between
them itself.

Read: a log from its beginning to its end, a megabyte at a time, against SELECTs of the same rows that do nothing with
them. One server for all samples of a row, with its defaults for durability.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

import asyncpg  # type: ignore[import-untyped]
import uvloop

from bench import store_writers
from bench.measure import Measure, Scale, Side, Sides
from bench.store_writers import IN_FLIGHT, WAITING
from millstream.stores.postgres import PostgresDatabase
from tests.postgres import DURABLE, PrivatePostgres

SECONDS = 4.0
READ_BATCHES = 12_000
READ_BYTES = 1 << 20


async def _copy(url: str, seconds: float, connections: int) -> float:
    batch = store_writers.make_batch()
    opened = [await asyncpg.connect(url) for _ in range(connections)]
    await opened[0].execute("DROP TABLE IF EXISTS plain")
    await opened[0].execute("CREATE TABLE plain (id bigint PRIMARY KEY, data bytea NOT NULL)")
    await opened[0].execute("ALTER TABLE plain ALTER COLUMN data SET STORAGE EXTERNAL")
    done, start = 0, time.perf_counter()

    async def write(connection: asyncpg.Connection, first: int) -> None:
        nonlocal done
        number = first
        while time.perf_counter() - start < seconds:
            await connection.copy_records_to_table("plain", records=[(number, batch)])
            number += 1
            done += 1

    await asyncio.gather(*(write(each, at << 40) for at, each in enumerate(opened)))
    figure = done / (time.perf_counter() - start)
    for each in opened:
        await each.close()
    return figure


def _append_sides(connections: int, in_flight: int = IN_FLIGHT) -> Sides:
    @contextmanager
    def sides(scale: Scale) -> Iterator[tuple[Side | None, Side]]:
        seconds = scale.seconds(SECONDS)
        with PrivatePostgres(**DURABLE) as server:
            yield (
                lambda: uvloop.run(_copy(server.new_database(), seconds, connections)),
                lambda: store_writers.append(PostgresDatabase(server.new_database()), seconds, in_flight),
            )

    return sides


async def _fill(url: str, batches: int) -> None:
    store, [log] = await store_writers.open_logs(PostgresDatabase(url), 1)
    await store_writers.fill(log, batches)
    await store.close()
    connection = await asyncpg.connect(url)
    await connection.execute("VACUUM ANALYZE millstream.batches")
    await connection.close()


async def _read_bare(url: str) -> float:
    """MB/s."""
    connection = await asyncpg.connect(url)
    per_read = READ_BYTES // len(store_writers.make_batch())
    log_id = await connection.fetchval("SELECT id FROM millstream.logs")
    query = (
        "SELECT last_offset, data FROM millstream.batches WHERE log_id = $1 AND last_offset >= $2 "
        "ORDER BY last_offset LIMIT $3"
    )
    at, size, start = 0, 0, time.perf_counter()
    while rows := await connection.fetch(query, log_id, at, per_read):
        at = rows[-1][0] + 1
        size += sum(len(row[1]) for row in rows)
    figure = size / 1e6 / (time.perf_counter() - start)
    await connection.close()
    return figure


async def _read_ours(url: str) -> float:
    store, [log] = await store_writers.open_logs(PostgresDatabase(url), 1)
    at, size, start = 0, 0, time.perf_counter()
    while at < log.high_watermark:
        piece = await log.read(at, READ_BYTES)
        at = piece.next_offset
        size += piece.size
    figure = size / 1e6 / (time.perf_counter() - start)
    await store.close()
    return figure


@contextmanager
def _read_sides(scale: Scale) -> Iterator[tuple[Side | None, Side]]:
    with PrivatePostgres(**DURABLE) as server:
        url = server.new_database()
        uvloop.run(_fill(url, scale.of(READ_BATCHES)))
        uvloop.run(_read_bare(url))  # into the server's cache
        yield (lambda: uvloop.run(_read_bare(url))), (lambda: uvloop.run(_read_ours(url)))


def _measure(
    key: str, title: str, reference: str, unit: str, bounds: tuple[float, float] | None, sides: Sides
) -> Measure:
    must, aim = bounds or (None, None)
    return Measure(key, title, reference, unit, must, aim, lower_is_better=False, sides=sides)


_APPEND = "postgresql: append, durable, 100-record batches, 8 writers"
_WAITING, _COPY = f"{_APPEND} that wait for every answer", "COPY, one commit per batch"
MEASURES = [
    _measure("postgres-append", _APPEND, _COPY, "batches/s", (1, 2), _append_sides(1)),
    _measure("postgres-append-waiting", _WAITING, _COPY, "batches/s", None, _append_sides(1, WAITING)),
    _measure("postgres-append-8", _APPEND, "COPY on 8 connections", "batches/s", None, _append_sides(8)),
    _measure("postgres-read", "postgresql: read", "SELECT, bare driver", "MB/s", (0.8, 0.95), _read_sides),
]
