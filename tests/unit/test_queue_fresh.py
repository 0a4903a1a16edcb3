"""Records that a queue takes from the hands of those who bring them: the same as if it had read them from the log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from millstream.broker.broker import Broker
from millstream.broker.groups.queue.partition import QueuePartition
from millstream.broker.groups.queue.queue import Queue
from millstream.broker.groups.queue.verbs import Answer, Member, TakenRecord, Verb
from millstream.config import Config
from millstream.core.metrics import Metrics
from millstream.stores.keys import MemoryMeta
from millstream.stores.memory import MemoryLogStore
from millstream.testing.clock import VirtualClock


class Bench:
    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.logs = MemoryLogStore(self.clock)
        self.meta = MemoryMeta()
        self.fresh: list[list[tuple[int, bytes | None]] | None] = []

    async def start(self, records_max: int = 100, **settings: str) -> None:
        self.broker = Broker(Config(), self.logs, self.meta, self.clock, Metrics())
        await self.broker.start()
        self.topic = self.broker.topics.get("jobs") or await self.broker.topics.create(
            "jobs", 1, {name.replace("_", "."): value for name, value in settings.items()}
        )
        self.queue: Queue = self.broker.queues.open("workers")
        self.partition: QueuePartition = await self.queue.partition(self.topic, 0)
        self.member: Member = self.queue.join("worker")
        self.partition.wake(lambda: self.fresh.append(self.partition.take_fresh(self.member, records_max)))

    async def put(self, *values: bytes, headers: tuple[tuple[str, bytes | None], ...] = ()) -> None:
        inlet = self.broker.inlet(self.topic.partitions[0])
        for put in [inlet.put(value, headers=headers) for value in values]:
            await put

    async def take(self) -> list[TakenRecord]:
        return await self.partition.take(self.member, 100, 1 << 20)

    def accept(self, offset: int) -> None:
        self.partition.answer(self.member, [Answer(offset, offset, Verb.ACCEPT)])


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    await bench.broker.close()


def values(taken: list[TakenRecord]) -> list[bytes | None]:
    return [each.record.value for each in taken]


async def test_records_are_leased_while_they_are_appended(bench: Bench) -> None:
    await bench.start()
    await bench.put(b"a", b"b")
    await bench.put(b"c")
    assert bench.fresh == [[(0, b"a"), (1, b"b")], [(2, b"c")]]
    figures = bench.partition.figures()
    assert (figures.available, figures.leased, bench.member.leases, bench.partition.next) == (0, 3, 3, 3)
    assert await bench.take() == []


async def test_what_is_taken_so_is_what_the_log_holds(bench: Bench) -> None:
    await bench.start()
    await bench.put(b"a" * 300, b"")
    bench.queue.leave(bench.member)
    bench.member = bench.queue.join("other")
    again = await bench.take()
    assert [(each.record.offset, each.record.value) for each in again] == bench.fresh[0]
    assert [each.attempt for each in again] == [2, 2]


async def test_across_blocks_and_up_to_the_end_of_a_lease(bench: Bench) -> None:
    await bench.start()
    for start in range(0, 200, 50):
        await bench.put(*[b"%d" % number for number in range(start, start + 50)])
    assert bench.member.leases == 200
    for offset in range(100):
        bench.accept(offset)
    assert (bench.partition.low, bench.partition.next) == (100, 200)
    bench.clock.advance(30.1)
    await asyncio.sleep(0)
    assert bench.member.leases == 0
    assert [each.record.offset for each in await bench.take()] == list(range(100, 200))


async def test_a_restart_knows_what_was_taken_and_what_was_answered(bench: Bench) -> None:
    await bench.start()
    await bench.put(b"a", b"b", b"c")
    bench.accept(1)
    await asyncio.sleep(0)
    bench.partition.close()  # as kill -9: nothing more is written
    bench.fresh.clear()
    await bench.start()
    assert [(each.record.value, each.attempt) for each in await bench.take()] == [(b"a", 2), (b"c", 2)]


async def test_not_while_earlier_records_wait(bench: Bench) -> None:
    await bench.start(records_max=1)
    await bench.put(b"a", b"b")
    await bench.put(b"c")
    assert bench.fresh == [None, None]
    assert values(await bench.take()) == [b"a", b"b", b"c"]


async def test_not_before_a_record_that_came_back(bench: Bench) -> None:
    await bench.start()
    await bench.put(b"a")
    bench.fresh.clear()
    bench.partition.answer(bench.member, [Answer(0, 0, Verb.RELEASE)])
    await bench.put(b"b")
    assert set(map(str, bench.fresh)) == {"None"}
    assert values(await bench.take()) == [b"a", b"b"]


@pytest.mark.parametrize("settings", [{"millstream_delay_ms": "60000"}, {"group_millstream_key_order": "true"}])
async def test_not_where_records_must_be_looked_at(bench: Bench, settings: dict[str, Any]) -> None:
    await bench.start(**settings)
    await bench.put(b"a")
    assert bench.fresh == [None]


async def test_not_with_headers_for_they_may_say_when(bench: Bench) -> None:
    await bench.start()
    await bench.put(b"a", headers=(("millstream-deliver-at", b"%d" % (bench.clock.now_ms() + 1000)),))
    assert bench.fresh == [None] and await bench.take() == []
    bench.clock.advance(1.1)
    await asyncio.sleep(0)
    assert values(await bench.take()) == [b"a"]


async def test_nothing_is_kept_when_the_record_is_durable(bench: Bench) -> None:
    await bench.start()
    await bench.put(b"a" * 100_000)
    inlet = bench.topic.partitions[0].inlet
    assert inlet is not None and inlet.leaving is None
