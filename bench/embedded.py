"""An embedded broker in memory against asyncio.Queue: one task puts records of 100 bytes in, another takes them out.

Both are bounded and both are awaited for every record. Ours encodes records into batches with checksums, keeps them at
offsets and decodes them again; the queue passes a reference on. The row for information awaits every `send` on its own,
until it is stored, in 100 tasks at a time.

Both sides run on asyncio's own event loop, in this process, one after the other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

import millstream
from bench.measure import Measure, Scale, Side

RECORDS = 400_000
EACH_RECORDS = 20_000
EACH_TASKS = 100
VALUE = b"x" * 100
QUEUE_MAX = 1_000
"""As many as our sender puts into a batch."""


async def _queue(count: int) -> float:
    queue: asyncio.Queue[bytes] = asyncio.Queue(QUEUE_MAX)

    async def put() -> None:
        for _ in range(count):
            await queue.put(VALUE)

    async def get() -> None:
        for _ in range(count):
            await queue.get()

    start = time.perf_counter()
    await asyncio.gather(put(), get())
    return count / (time.perf_counter() - start)


async def _read(ms: millstream.Millstream, count: int) -> None:
    async for record in ms.read("bench"):
        if record.offset == count - 1:
            return


async def _buffered(count: int) -> float:
    async with millstream.open("memory:") as ms:
        await ms.create_topic("bench")

        async def send() -> None:
            async with ms.sender("bench") as out:
                for _ in range(count):
                    await out.send(VALUE)

        start = time.perf_counter()
        await asyncio.gather(send(), _read(ms, count))
        return count / (time.perf_counter() - start)


async def _each(count: int) -> float:
    async with millstream.open("memory:") as ms:
        await ms.create_topic("bench")

        async def send() -> None:
            for _ in range(count // EACH_TASKS):
                await ms.send("bench", VALUE)

        start = time.perf_counter()
        await asyncio.gather(*(send() for _ in range(EACH_TASKS)), _read(ms, count // EACH_TASKS * EACH_TASKS))
        return count / (time.perf_counter() - start)


@contextmanager
def _buffered_sides(scale: Scale) -> Iterator[tuple[Side | None, Side]]:
    count = scale.of(RECORDS)
    yield lambda: asyncio.run(_queue(count)), lambda: asyncio.run(_buffered(count))


@contextmanager
def _each_sides(scale: Scale) -> Iterator[tuple[Side | None, Side]]:
    count = scale.of(EACH_RECORDS)
    yield lambda: asyncio.run(_queue(count)), lambda: asyncio.run(_each(count))


MEASURES = [
    Measure(
        key="embedded",
        title="embedded memory: buffered send + read",
        reference="asyncio.Queue put + get",
        unit="records/s",
        must=0.2,
        aim=0.4,
        lower_is_better=False,
        sides=_buffered_sides,
    ),
    Measure(
        key="embedded-each",
        title="the same, every send awaited, 100 at a time",
        reference="asyncio.Queue put + get",
        unit="records/s",
        must=None,
        aim=None,
        lower_is_better=False,
        sides=_each_sides,
    ),
]
