"""What the rows of the stores on databases have in common: a batch, and eight writers that append it.

A writer does what a Kafka producer does by default: it has up to five batches on their way (`IN_FLIGHT`), and sends the
next when the oldest is answered. In the rows called `-waiting` it waits for every answer (`WAITING`).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque

import uvloop

from millstream.core.clock import SystemClock
from millstream.core.promise import Promise
from millstream.log.answers import Appended
from millstream.log.config import LogConfig
from millstream.records import codec
from millstream.records.batch import read_header
from millstream.stores.base import PartitionLog
from millstream.stores.database import Database
from millstream.stores.table_store import TableLogStore

RECORDS, RECORD_BYTES = 100, 100
WRITERS = 8
PARTITIONS = 8
IN_FLIGHT, WAITING = 5, 1
TOPIC, TOPIC_ID = "bench", "0123456789abcdef0123456789abcdef"


def make_batch() -> bytes:
    return bytes(codec.encode([(0, 1_700_000_000_000, None, os.urandom(RECORD_BYTES)) for _ in range(RECORDS)]))


async def open_logs(database: Database, partitions: int) -> tuple[TableLogStore, list[PartitionLog]]:
    store = TableLogStore(database, SystemClock())
    await store.start()
    await store.prepare(TOPIC_ID, partitions)
    return store, [store.open(TOPIC, TOPIC_ID, index, LogConfig()) for index in range(partitions)]


async def _append(database: Database, seconds: float, in_flight: int) -> float:
    """Batches a second, each writer with a partition of its own and so many batches on their way at a time."""
    store, logs = await open_logs(database, PARTITIONS)
    batch = make_batch()
    header = read_header(batch)
    done = 0

    async def write(log: PartitionLog, until: float) -> None:
        nonlocal done
        waiting: deque[Promise[Appended]] = deque()
        while waiting or time.perf_counter() < until:
            while len(waiting) < in_flight and time.perf_counter() < until:
                waiting.append(log.append(memoryview(bytearray(batch)), header))
            await waiting.popleft()
            done += 1

    async def run(span: float) -> float:
        nonlocal done
        start, done = time.perf_counter(), 0
        await asyncio.gather(*(write(logs[number % len(logs)], start + span) for number in range(WRITERS)))
        return done / (time.perf_counter() - start)

    await run(seconds / 10)
    figure = await run(seconds)
    await store.close()
    return figure


def append(database: Database, seconds: float, in_flight: int) -> float:
    return uvloop.run(_append(database, seconds, in_flight))


async def fill(log: PartitionLog, batches: int) -> None:
    batch = make_batch()
    header = read_header(batch)
    waiting: list[Promise[object]] = []
    for _ in range(batches):
        waiting.append(log.append(memoryview(bytearray(batch)), header))  # type: ignore[arg-type]
        if len(waiting) == 500:
            await asyncio.gather(*waiting)
            waiting.clear()
    await asyncio.gather(*waiting)
