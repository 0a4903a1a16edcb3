"""Cursors: positions that the broker moves, one per fanout id and topic."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from millstream.broker.groups import cursor as cursors
from millstream.broker.groups.cursor import Cursors
from millstream.broker.outlet import Outlet, Taken
from millstream.broker.topics import Topic, Topics
from millstream.cluster.base import Solo
from millstream.core.clock import Clock
from millstream.core.errors import Code, RequestError
from millstream.records import codec
from millstream.records.record import Record
from millstream.stores.base import PartitionLog
from millstream.stores.memory import MemoryLogStore
from millstream.testing.clock import VirtualClock
from tests.unit.groups_kit import HeldMeta, code_of, turn


class Bench:
    def __init__(self) -> None:
        self.clock: Clock = VirtualClock()
        self.meta = HeldMeta()
        self.topics = Topics(self.meta, MemoryLogStore(self.clock), self.clock, {}, 100, 1, True)
        self.cursors = Cursors(self.meta, self.clock, self.topics, Outlet(), Solo(0))

    async def topic(self, count: int, name: str = "t") -> Topic:
        topic = await self.topics.create(name, 1, {})
        if count:
            await self.append(topic, count)
        return topic

    async def append(self, topic: Topic, count: int) -> None:
        start = topic.partitions[0].log.end
        rows = [(0, 0, None, b"%d" % (start + at)) for at in range(count)]
        await topic.partitions[0].append(memoryview(codec.encode(rows)), self.clock)[1]

    async def restart(self) -> None:
        await self.cursors.close()
        self.cursors = Cursors(self.meta, self.clock, self.topics, Outlet(), Solo(0))
        await self.cursors.adopt(lambda fanout_id: True)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    await bench.topics.start()
    await bench.cursors.adopt(lambda fanout_id: True)
    yield bench
    await bench.cursors.close()


def numbers(records: list[Record]) -> list[int]:
    return [int(record.value or b"") for record in records]


async def test_each_fanout_id_has_a_position_of_its_own(bench: Bench) -> None:
    topic = await bench.topic(5)
    assert numbers(await bench.cursors.read("a", topic, 2)) == [0, 1]
    assert numbers(await bench.cursors.read("a", topic, 0, 1)) == [2]
    assert numbers(await bench.cursors.read("b", topic, 1 << 20)) == [0, 1, 2, 3, 4]
    assert numbers(await bench.cursors.read("a", topic, 1 << 20)) == [3, 4]
    assert numbers(await bench.cursors.read("a", topic, 1 << 20)) == []
    assert [bench.cursors.position(name, topic) for name in "abc"] == [5, 5, 0]


async def test_nothing_is_answered_before_the_position_is_durable(bench: Bench) -> None:
    topic = await bench.topic(5)
    bench.meta.holding = True
    reading = bench.cursors.read("a", topic, 2)
    await turn()
    assert not reading.done and bench.cursors.position("a", topic) == 0
    bench.meta.land()
    await turn()
    assert numbers(reading.value()) == [0, 1] and bench.cursors.position("a", topic) == 2


async def test_readers_that_come_meanwhile_share_the_next_write(bench: Bench) -> None:
    topic = await bench.topic(10)
    bench.meta.holding = True
    first = bench.cursors.read("a", topic, 0, 1)
    await turn()
    others = [bench.cursors.read("a", topic, 0, 1) for _ in range(5)]
    await turn()
    assert len(bench.meta.held) == 1
    bench.meta.land()
    await turn()
    assert len(bench.meta.held) == 1 and first.done and not any(other.done for other in others)
    bench.meta.land()
    await turn()
    assert [numbers(other.value()) for other in others] == [[1], [2], [3], [4], [5]]


async def test_a_position_that_cannot_be_stored_does_not_move(bench: Bench) -> None:
    topic = await bench.topic(10)
    bench.meta.holding = True
    failing = bench.cursors.read("a", topic, 3)
    await turn()
    waiting = bench.cursors.read("a", topic, 2)
    bench.meta.lose()
    assert await code_of(failing) == Code.COORDINATOR_NOT_AVAILABLE
    await turn()
    bench.meta.land()
    assert numbers(await waiting) == [0, 1], "records that no reader received go to the next"


async def test_positions_survive_a_restart_and_never_go_back(bench: Bench) -> None:
    topic = await bench.topic(10)
    assert numbers(await bench.cursors.read("a/b ✓", topic, 4)) == [0, 1, 2, 3]
    await bench.restart()
    assert bench.cursors.position("a/b ✓", topic) == 4
    assert numbers(await bench.cursors.read("a/b ✓", topic, 1)) == [4]


async def test_a_crash_between_the_write_and_the_answer_skips_and_does_not_repeat(bench: Bench) -> None:
    topic = await bench.topic(10)
    bench.meta.holding = True
    bench.cursors.read("a", topic, 4)
    await turn()
    operations, _ = bench.meta.held.pop()
    bench.meta.holding = False
    await bench.meta.transact(*operations)  # durable, then the broker dies before it answers
    bench.cursors = Cursors(bench.meta, bench.clock, bench.topics, Outlet(), Solo(0))
    await bench.cursors.adopt(lambda fanout_id: True)
    assert numbers(await bench.cursors.read("a", topic, 2)) == [4, 5]


async def test_a_topic_made_anew_is_read_from_its_start(bench: Bench) -> None:
    topic = await bench.topic(5)
    await bench.cursors.read("a", topic, 3)
    await (await bench.topics.delete("t"))
    assert not await bench.meta.list("cursors/")
    again = await bench.topic(2)
    assert numbers(await bench.cursors.read("a", again, 100)) == [0, 1]


async def test_a_topic_deleted_while_the_broker_was_down_leaves_no_cursor(bench: Bench) -> None:
    topic = await bench.topic(5)
    await bench.cursors.read("a", topic, 3)
    await bench.cursors.close()
    await (await bench.topics.delete("t"))
    again = await bench.topic(5)
    bench.cursors = Cursors(bench.meta, bench.clock, bench.topics, Outlet(), Solo(0))
    await bench.cursors.adopt(lambda fanout_id: True)
    assert bench.cursors.position("a", again) == 0 and not await bench.meta.list("cursors/")


async def test_a_read_of_a_topic_that_is_deleted_meanwhile_is_refused(bench: Bench) -> None:
    topic = await bench.topic(5)
    bench.meta.holding = True
    bench.cursors.read("other", topic, 1)
    await turn()
    reading = bench.cursors.read("a", topic, 1)
    deleting = asyncio.ensure_future(bench.topics.delete("t"))
    await turn()
    bench.meta.held.reverse()  # the deletion lands first
    bench.meta.land()
    await (await deleting)
    bench.meta.holding = False
    bench.meta.land()
    assert await code_of(reading) == Code.UNKNOWN_TOPIC_OR_PARTITION
    assert not await bench.meta.list("cursors/t")


async def test_a_late_read_of_a_topic_that_is_gone_leaves_the_cursor_of_its_successor_alone(bench: Bench) -> None:
    old = await bench.topic(1)
    await (await bench.topics.delete("t"))
    new = await bench.topic(2)
    assert numbers(await bench.cursors.read("a", new, 1 << 20, 1)) == [0]
    assert await code_of(bench.cursors.read("a", old, 1 << 20, 1)) == Code.UNKNOWN_TOPIC_OR_PARTITION
    assert numbers(await bench.cursors.read("a", new, 1 << 20, 1)) == [1]


async def test_what_retention_removed_is_skipped(bench: Bench) -> None:
    topic = await bench.topic(10)
    await bench.cursors.read("a", topic, 2)
    await topic.partitions[0].log.trim(6)
    assert bench.cursors.position("a", topic) == 6
    assert numbers(await bench.cursors.read("a", topic, 2)) == [6, 7]


class Interrupted(Outlet):
    """Something else happens while records are read, as with stores that do not answer at once."""

    def __init__(self, happens: Callable[[], Awaitable[object]]) -> None:
        super().__init__()
        self._happens = happens

    async def take(self, *arguments: Any, **options: Any) -> Taken:
        happens, self._happens = self._happens, turn
        await happens()
        return await super().take(*arguments, **options)


async def test_what_retention_removes_while_it_is_read_is_skipped(bench: Bench) -> None:
    topic = await bench.topic(10)
    log = topic.partitions[0].log
    bench.cursors._outlet = Interrupted(lambda: log.trim(6))
    reads = [bench.cursors.read("a", topic, 2) for _ in range(3)]
    assert [numbers(await each) for each in reads] == [[6, 7], [8, 9], []]


async def test_readers_of_a_topic_whose_files_are_gone_hear_that_it_was_deleted(bench: Bench) -> None:
    topic = await bench.topic(10)

    async def delete() -> None:
        await (await bench.topics.delete("t"))
        raise FileNotFoundError("00000000000000000000.index")

    bench.cursors._outlet = Interrupted(delete)
    for reading in [bench.cursors.read("a", topic, 2) for _ in range(3)]:
        assert await code_of(reading) == Code.UNKNOWN_TOPIC_OR_PARTITION


async def test_fanout_ids_have_bounds(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = await bench.topic(5)
    assert await code_of(bench.cursors.read("", topic, 1)) == Code.INVALID_GROUP_ID
    assert await code_of(bench.cursors.read("x" * 513, topic, 1)) == Code.INVALID_GROUP_ID
    monkeypatch.setattr(cursors, "CURSORS_MAX", 2)
    for name in "ab":
        await bench.cursors.read(name, topic, 1)
    assert await code_of(bench.cursors.read("c", topic, 1)) == Code.POLICY_VIOLATION
    assert numbers(await bench.cursors.read("a", topic, 1)) == [1]


async def test_a_hundred_readers_at_once_get_every_record_once(bench: Bench) -> None:
    topic = await bench.topic(1000)
    reads = [bench.cursors.read("a", topic, bytes_max) for bytes_max in range(100)]
    shares = [numbers(await read) for read in reads]
    together = [number for share in shares for number in share]
    assert together == list(range(len(together))) and len(together) > 500


class Elsewhere(Solo):
    """A cluster in which another broker may coordinate every group."""

    is_ours = True

    def check(self, group_id: str) -> None:
        if not self.is_ours:
            raise RequestError(Code.NOT_COORDINATOR)


class SlowOutlet(Outlet):
    """Has read, and does not say so before the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()

    async def take(
        self, log: PartitionLog, offset: int, bytes_max: int, *, head_bytes: int = 0, count_max: int | None = None
    ) -> Taken:
        taken = await super().take(log, offset, bytes_max, head_bytes=head_bytes, count_max=count_max)
        await self.gate.wait()
        return taken


@pytest.mark.parametrize("is_back", [False, True])
async def test_a_round_that_another_broker_overtook_moves_no_position(bench: Bench, is_back: bool) -> None:
    topic = await bench.topic(10)
    cluster, outlet = Elsewhere(0), SlowOutlet()
    loser = Cursors(bench.meta, bench.clock, bench.topics, outlet, cluster)
    reading = loser.read("a", topic, 2)
    await turn()
    loser.release()
    cluster.is_ours = False
    await bench.cursors.read("a", topic, 8)
    cluster.is_ours = is_back
    if is_back:
        await loser.adopt(lambda fanout_id: True)
    outlet.gate.set()
    assert await code_of(reading) == Code.NOT_COORDINATOR
    await bench.restart()
    assert bench.cursors.position("a", topic) == 8
    await loser.close()


async def test_closing_waits_for_a_stuck_round_by_the_clock_of_the_broker() -> None:
    bench = Bench()
    topic, outlet = await bench.topic(10), SlowOutlet()
    cursors = Cursors(bench.meta, bench.clock, bench.topics, outlet, Solo(0))
    reading = cursors.read("a", topic, 2)
    await turn()
    closing = asyncio.ensure_future(cursors.close())
    await turn()
    assert isinstance(bench.clock, VirtualClock)
    bench.clock.advance(9)
    await turn()
    assert not closing.done()
    bench.clock.advance(1)
    await closing
    assert not reading.done
    outlet.gate.set()
    await reading
