"""Which library to speak to PostgreSQL with: asyncpg against psycopg 3, on what the store does with it.

    python -m bench.postgres_drivers

The same server, tables and statements for both: eight batches of 100 records appended in one call of the store's
function, and a megabyte of batches read by the store's query, each as often as it can be done one after the other.
On uvloop, as the broker runs. The figures behind `docs/decisions/0008-asyncpg.md` come from here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable
from statistics import median
from typing import Any

import asyncpg  # type: ignore[import-untyped]
import psycopg
import uvloop

from millstream.records import codec
from millstream.stores import queries
from tests.postgres import DURABLE, PrivatePostgres

SQL = queries.named("postgres_queries.sql")
BATCHES = 8
RECORDS, RECORD_BYTES = 100, 100
SECONDS = 2.0
ROUNDS = 5
READ_BYTES = 1 << 20

Call = Callable[[], Awaitable[int]]
"""Does it once, and answers with how many bytes went by."""


def _batch() -> bytes:
    return bytes(codec.encode([(0, 1_700_000_000_000, None, os.urandom(RECORD_BYTES)) for _ in range(RECORDS)]))


def _append_arguments(log: int, batch: bytes) -> list[Any]:
    many = [log] * BATCHES
    return [many, [RECORDS] * BATCHES, [1] * BATCHES, [-1] * BATCHES, [-1] * BATCHES, [-1] * BATCHES,
            [batch] * BATCHES, 0]  # fmt: skip


async def _rate(call: Call) -> float:
    """MB/s."""
    await call()
    total, start = 0, time.perf_counter()
    while time.perf_counter() - start < SECONDS:
        total += await call()
    return total / 1e6 / (time.perf_counter() - start)


async def _with_asyncpg(url: str, log: int, batch: bytes) -> tuple[float, float]:
    connection = await asyncpg.connect(url)
    arguments = _append_arguments(log, batch)

    async def append() -> int:
        await connection.fetchrow(SQL["append"], *arguments)
        return BATCHES * len(batch)

    async def read() -> int:
        rows = await connection.fetch(SQL["read"], log, 0, 1 << 40, READ_BYTES, 1000)
        return len(b"".join([row[1] for row in rows]))

    figures = await _rate(append), await _rate(read)
    await connection.close()
    return figures


def _for_psycopg(statement: str) -> str:
    for number in range(9, 0, -1):
        statement = statement.replace(f"${number}", f"%(a{number})b")
    return statement


async def _with_psycopg(url: str, log: int, batch: bytes) -> tuple[float, float]:
    connection = await psycopg.AsyncConnection.connect(url, autocommit=True, prepare_threshold=0)
    arguments = {f"a{at}": value for at, value in enumerate(_append_arguments(log, batch), 1)}
    append_sql, read_sql = _for_psycopg(SQL["append"]), _for_psycopg(SQL["read"])
    cursor = connection.cursor(binary=True)

    async def append() -> int:
        await cursor.execute(append_sql, arguments, binary=True)
        await cursor.fetchone()
        return BATCHES * len(batch)

    async def read() -> int:
        await cursor.execute(read_sql, {"a1": log, "a2": 0, "a3": 1 << 40, "a4": READ_BYTES, "a5": 1000}, binary=True)
        return len(b"".join([row[1] for row in await cursor.fetchall()]))

    figures = await _rate(append), await _rate(read)
    await connection.close()
    return figures


async def _prepare(url: str) -> int:
    connection = await asyncpg.connect(url)
    await connection.execute("DROP SCHEMA IF EXISTS millstream CASCADE; CREATE SCHEMA millstream")
    await connection.execute(queries.text("postgres_schema.sql"))
    await connection.execute(SQL["make_logs"], "bench", 1)
    log: int = await connection.fetchval("SELECT id FROM millstream.logs")
    await connection.close()
    return log


async def _measure(server: PrivatePostgres) -> None:
    batch = _batch()
    results: dict[str, list[tuple[float, float]]] = {"asyncpg": [], "psycopg": []}
    for _ in range(ROUNDS):
        for name, library in (("asyncpg", _with_asyncpg), ("psycopg", _with_psycopg)):
            results[name].append(await library(server.url, await _prepare(server.url), batch))
    print(f"{'':10}{'append MB/s':>14}{'read MB/s':>14}")
    for name, figures in results.items():
        print(f"{name:10}{median(each[0] for each in figures):14.1f}{median(each[1] for each in figures):14.1f}")


def main() -> None:
    with PrivatePostgres(**DURABLE) as server:
        uvloop.run(_measure(server))


if __name__ == "__main__":
    main()
