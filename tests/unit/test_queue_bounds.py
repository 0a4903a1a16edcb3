"""A queue at its bounds and under failures: no record is skipped, and no fetch waits for a lost wake-up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from millstream.broker.broker import Broker
from millstream.broker.groups.queue.partition import QueuePartition
from millstream.broker.groups.queue.verbs import Answer, Member, Verb
from millstream.config import Config
from millstream.core.clock import SystemClock
from millstream.core.errors import Code, RequestError
from millstream.core.metrics import Metrics
from millstream.core.promise import Promise
from millstream.stores.base import Operation
from millstream.stores.keys import MemoryMeta
from millstream.stores.memory import MemoryLogStore
from millstream.stores.sqlite import SqliteDatabase
from millstream.stores.table_store import TableLogStore
from millstream.testing.clock import VirtualClock

MEGABYTE = 1 << 20
LOCKS = "group.share.partition.max.record.locks"


class Meta(MemoryMeta):
    is_away = False

    def transact(self, *operations: Operation) -> Promise[int]:
        if self.is_away:
            return Promise.failed(RequestError(Code.KAFKA_STORAGE_ERROR, "the database is away"))
        return super().transact(*operations)


class Place:
    """A queue of one partition, and one worker."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.partition: QueuePartition
        self.member: Member

    async def open(self, **settings: str) -> Place:
        topic = await self.broker.topics.create("jobs", 1, settings)
        queue = self.broker.queues.open("workers")
        self.partition = await queue.partition(topic, 0)
        self.member = queue.join("worker")
        self.inlet = self.broker.inlet(topic.partitions[0])
        return self

    async def fill(self, count: int) -> None:
        for number in range(count):
            await self.inlet.put(b"%d" % number)

    async def take(self, count: int = 100) -> list[int]:
        return [taken.record.offset for taken in await self.partition.take(self.member, count, MEGABYTE)]

    async def acquire(self, count: int = 100) -> list[int]:
        taken = await self.partition.acquire(self.member, count, MEGABYTE)
        return [offset for run in taken.runs for offset in range(run.first, run.last + 1)]

    async def answer(self, offset: int, verb: Verb = Verb.ACCEPT) -> None:
        await self.partition.answer(self.member, [Answer(offset, offset, verb)])


@pytest.fixture
async def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
async def meta() -> Meta:
    return Meta()


@pytest.fixture
async def in_memory(clock: VirtualClock, meta: Meta) -> AsyncIterator[Place]:
    broker = Broker(Config(), MemoryLogStore(clock), meta, clock, Metrics())
    await broker.start()
    yield Place(broker)
    await broker.close()


@pytest.fixture
async def in_a_file(tmp_path: Path) -> AsyncIterator[Place]:
    store = TableLogStore(SqliteDatabase(str(tmp_path / "store.db")), SystemClock())
    broker = Broker(Config(), store, store.meta, SystemClock(), Metrics())
    await broker.start()
    yield Place(broker)
    await broker.close()


@pytest.mark.parametrize("how", ["take", "acquire"])
@pytest.mark.parametrize(("locks", "records", "at_a_time"), [(2, 8, 10), (100, 1000, 70), (10_000, 12_000, 700)])
async def test_what_does_not_fit_into_the_leases_comes_later(
    in_memory: Place, how: str, locks: int, records: int, at_a_time: int
) -> None:
    place = await in_memory.open(**{LOCKS: str(locks)})
    await place.fill(records)
    given: list[int] = []
    while True:
        out: list[int] = []
        while more := await getattr(place, how)(at_a_time):
            out += more
        if not out:
            break
        assert len(out) <= locks
        given += out
        for offset in out:
            await place.answer(offset)
    assert given == list(range(records))
    assert place.partition.low == records


async def test_whoever_got_nothing_because_too_much_was_leased_is_called_when_there_is_room(in_memory: Place) -> None:
    place = await in_memory.open(**{LOCKS: "2"})
    await place.fill(8)
    calls: list[bool] = []
    place.partition.wake(lambda: calls.append(True))
    given = pending = await place.take()
    assert given == [0, 1] and await place.take() == []
    while pending:
        calls.clear()
        await place.answer(pending[0])
        assert calls or len(given) == 8
        pending = pending[1:] + (more := await place.take())
        given = given + more
        await place.take()  # until it is full again
    assert given == list(range(8))


async def test_records_that_are_on_their_way_to_a_database_are_given_out_under_their_own_offsets(
    in_a_file: Place,
) -> None:
    place = await in_a_file.open()
    given: list[tuple[int, bytes | None]] = []
    place.partition.wake(lambda: given.extend(place.partition.take_fresh(place.member, 100) or ()))
    first = place.inlet.put(b"A")
    for _ in range(3):
        await asyncio.sleep(0)  # it is on its way
    second = place.inlet.put(b"B")
    assert (await first, await second) == (0, 1)
    taken = await place.partition.take(place.member, 100, MEGABYTE)
    given += [(each.record.offset, each.record.value) for each in taken]
    assert given == [(0, b"A"), (1, b"B")]


async def test_a_record_that_is_given_up_is_buried_when_the_store_is_back(
    in_memory: Place, clock: VirtualClock, meta: Meta
) -> None:
    place = await in_memory.open()
    await place.fill(2)
    for _ in range(5):  # deliveries that end with the lease: no member is told, so none is refused
        assert await place.take() == [0, 1]
        meta.is_away = True
        clock.advance(31)
        await asyncio.sleep(0)
    meta.is_away = False
    for _ in range(100):
        clock.advance(0.1)
        await asyncio.sleep(0)
    figures = place.partition.figures()
    assert (figures.dying, figures.dead) == (0, 2)
    assert "__dlq__" in place.broker.topics.names()


async def test_what_was_being_read_when_a_queue_was_moved_back_does_not_move_it_forward(in_a_file: Place) -> None:
    place = await in_a_file.open()
    await place.fill(10)
    for offset in await place.take():
        await place.answer(offset)
    await place.inlet.put(b"10")
    taking = asyncio.ensure_future(place.take())
    await asyncio.sleep(0)  # it reads
    await place.partition.seek(0)
    given = await taking
    while more := await place.take():
        given += more
    assert given == list(range(11))


async def test_a_queue_that_is_being_deleted_is_not_made_anew_before_it_is_gone(
    in_memory: Place, monkeypatch: pytest.MonkeyPatch, meta: Meta
) -> None:
    place = await in_memory.open()
    place.broker.queues.open("workers").leave(place.member)
    listed, gate = meta.list, asyncio.Event()

    async def slow(prefix: str) -> object:
        await gate.wait()
        return await listed(prefix)

    monkeypatch.setattr(meta, "list", slow)
    deleting = asyncio.ensure_future(place.broker.queues.delete("workers"))
    await asyncio.sleep(0)
    with pytest.raises(RequestError) as caught:
        place.broker.queues.open("workers")
    assert caught.value.code.retriable
    gate.set()
    await deleting
    assert place.broker.queues.open("workers").members == {}


async def test_the_settings_of_a_new_queue_are_kept_when_the_store_is_back(
    in_memory: Place, clock: VirtualClock, meta: Meta
) -> None:
    settings = {"share.auto.offset.reset": "latest"}
    meta.is_away = True
    in_memory.broker.queues.open("workers", settings=settings)
    meta.is_away = False
    clock.advance(2)
    again = Broker(Config(), MemoryLogStore(clock), meta, clock, Metrics())
    await again.start()
    assert again.queues.overrides("workers") == settings
    await again.close()


async def test_a_broker_closes_its_logs_though_a_queue_cannot_be_written_down(
    in_memory: Place, monkeypatch: pytest.MonkeyPatch, meta: Meta
) -> None:
    place = await in_memory.open()
    await place.fill(1)
    assert await place.take() == [0]
    closed: list[str] = []

    async def close(store: MemoryLogStore) -> None:
        closed.append("logs")

    monkeypatch.setattr(MemoryLogStore, "close", close)
    meta.is_away = True
    await place.broker.close()
    assert closed == ["logs"]
