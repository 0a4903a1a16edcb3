"""A fetch that waits: woken by what it waits for, by an error, or by its time being over; never twice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from millstream.broker.fetch import PARTITIONS_MANY, TURN_BYTES, TURN_PARTITIONS, Fetch, Wanted
from millstream.broker.topics import Topics
from millstream.core.errors import Code
from millstream.core.promise import Promise
from millstream.log.checked import Work
from millstream.log.config import LogConfig
from millstream.log.slice import Slice
from millstream.records import codec
from millstream.records.batch import CorruptBatch
from millstream.stores.keys import MemoryMeta
from millstream.stores.memory import MemoryLog, MemoryLogStore
from millstream.testing.clock import VirtualClock

WAIT_MS = 500


class Bench:
    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.topics = Topics(MemoryMeta(), MemoryLogStore(self.clock), self.clock, {}, 5000, 1, False)

    def append(self, partition: int = 0, value: bytes = b"x") -> int:
        """The size of the batch."""
        topic = self.topics.get("orders")
        assert topic is not None
        batch = codec.encode([(0, 1, None, value)])
        topic.partitions[partition].append(memoryview(batch), self.clock)
        return len(batch)

    def fetch(self, *wanted: Wanted, bytes_min: int = 1, bytes_max: int = 1 << 20, committed: bool = False) -> Fetch:
        return Fetch(self.topics, list(wanted), bytes_min, bytes_max, committed=committed)

    def read(self, fetch: Fetch) -> list[tuple[Code, int]]:
        """Codes and sizes; the fetch must be answered."""
        return [(one.code, one.slice.size) for one in fetch.answer.value()]


def at(offset: int = 0, partition: int = 0, topic: Any = "orders", epoch: int = -1, bytes_max: int = 1 << 20) -> Wanted:
    return Wanted(topic, partition, epoch, offset, bytes_max)


@pytest.fixture
async def bench() -> Bench:
    made = Bench()
    await made.topics.create("orders", 3, {})
    return made


async def test_what_is_there_is_answered_at_once(bench: Bench) -> None:
    size = bench.append()
    fetch = bench.fetch(at())
    assert fetch.run(bench.clock, WAIT_MS)
    assert bench.read(fetch) == [(Code.NONE, size)]


async def test_without_waiting_nothing_is_an_answer_too(bench: Bench) -> None:
    fetch = bench.fetch(at())
    assert fetch.run(bench.clock, 0)
    assert bench.read(fetch) == [(Code.NONE, 0)]


async def test_an_append_wakes_it_and_its_timer_is_gone(bench: Bench) -> None:
    fetch = bench.fetch(at())
    answered: list[int] = []
    fetch.answer.then(lambda _: answered.append(1))
    assert not fetch.run(bench.clock, WAIT_MS)
    bench.clock.advance(0.2)
    size = bench.append()
    assert bench.read(fetch) == [(Code.NONE, size)]
    bench.append()
    bench.clock.advance(10)
    assert answered == [1]


async def test_it_waits_for_as_many_bytes_as_it_asked_for(bench: Bench) -> None:
    size = bench.append()
    fetch = bench.fetch(at(), at(partition=1), bytes_min=3 * size)
    assert not fetch.run(bench.clock, WAIT_MS)
    bench.append(partition=1)
    assert not fetch.answer.done
    bench.append(partition=1)
    assert bench.read(fetch) == [(Code.NONE, size), (Code.NONE, 2 * size)]


async def test_when_its_time_is_over_it_takes_what_there_is(bench: Bench) -> None:
    size = bench.append()
    fetch = bench.fetch(at(), bytes_min=10_000)
    assert not fetch.run(bench.clock, WAIT_MS)
    bench.clock.advance(0.499)
    assert not fetch.answer.done
    bench.clock.advance(0.001)
    assert bench.read(fetch) == [(Code.NONE, size)]


@pytest.mark.parametrize(
    ("wanted", "code"),
    [
        (at(topic="nothing"), Code.UNKNOWN_TOPIC_OR_PARTITION),
        (at(partition=3), Code.UNKNOWN_TOPIC_OR_PARTITION),
        (at(partition=-1), Code.UNKNOWN_TOPIC_OR_PARTITION),
        (at(offset=1), Code.OFFSET_OUT_OF_RANGE),
        (at(offset=-1), Code.OFFSET_OUT_OF_RANGE),
        (at(epoch=1), Code.UNKNOWN_LEADER_EPOCH),
    ],
)
async def test_an_error_is_answered_at_once_beside_the_others(wanted: Wanted, code: Code, bench: Bench) -> None:
    fetch = bench.fetch(at(partition=1), wanted)
    assert fetch.run(bench.clock, WAIT_MS)
    assert bench.read(fetch) == [(Code.NONE, 0), (code, 0)]


async def test_nobody_waits_for_no_partitions(bench: Bench) -> None:
    fetch = bench.fetch()
    assert fetch.run(bench.clock, WAIT_MS)
    assert bench.read(fetch) == []


async def test_one_that_is_given_up_is_never_answered(bench: Bench) -> None:
    fetch = bench.fetch(at(), at(partition=1))
    assert not fetch.run(bench.clock, WAIT_MS)
    fetch.cancel()
    bench.append()
    bench.clock.advance(10)
    assert not fetch.answer.done


async def test_the_limit_of_the_whole_answer_is_kept_over_all_partitions(bench: Bench) -> None:
    size = bench.append(0)
    for partition in (1, 2):
        assert bench.append(partition) == size
    fetch = bench.fetch(at(), at(partition=1), at(partition=2), bytes_max=2 * size + 1)
    assert fetch.run(bench.clock, 0)
    assert bench.read(fetch) == [(Code.NONE, size), (Code.NONE, size), (Code.NONE, 0)]


async def test_a_batch_larger_than_all_limits_is_given_if_it_is_the_first(bench: Bench) -> None:
    size = bench.append(0, b"x" * 1000)
    bench.append(1, b"x" * 1000)
    fetch = bench.fetch(at(bytes_max=10), at(partition=1, bytes_max=10), bytes_max=10)
    assert fetch.run(bench.clock, 0)
    assert bench.read(fetch) == [(Code.NONE, size), (Code.NONE, 0)]


async def test_topics_can_be_asked_for_by_id(bench: Bench) -> None:
    import uuid

    topic = bench.topics.get("orders")
    assert topic is not None
    size = bench.append()
    fetch = bench.fetch(at(topic=topic.id), at(topic=uuid.uuid4()))
    assert fetch.run(bench.clock, WAIT_MS)
    assert bench.read(fetch) == [(Code.NONE, size), (Code.UNKNOWN_TOPIC_ID, 0)]


async def test_an_error_of_any_kind_costs_its_partition_only(bench: Bench) -> None:
    size = bench.append()
    bench.append(partition=1)
    bench.append(partition=2)
    topic = bench.topics.get("orders")
    assert topic is not None

    class Broken(MemoryLog):
        def read(self, offset: int, bytes_max: int, below: int | None = None) -> Promise[Slice]:
            raise self.failure_of_read

        failure_of_read: Exception = CorruptBatch("no batch here")

    class Stranger(Broken):
        failure_of_read = ValueError("a bug")

    for index, kind in ((0, Broken), (1, Stranger)):
        topic.partitions[index].log = kind(LogConfig(), bench.clock, MemoryLogStore(bench.clock))
    fetch = bench.fetch(at(), at(partition=1), at(partition=2))
    assert fetch.run(bench.clock, WAIT_MS)
    assert bench.read(fetch) == [(Code.CORRUPT_MESSAGE, 0), (Code.UNKNOWN_SERVER_ERROR, 0), (Code.NONE, size)]


class OpenTransaction(MemoryLog):
    """A log with a transaction open from offset 2 on."""

    @property
    def stable(self) -> int:
        return min(2, self.high_watermark)


async def test_a_committed_read_stops_at_the_stable_offset(bench: Bench) -> None:
    topic = bench.topics.get("orders")
    assert topic is not None
    topic.partitions[0].log = OpenTransaction(LogConfig(), bench.clock, MemoryLogStore(bench.clock))
    size = sum(bench.append() for _ in range(3)) // 3

    def fetched(offset: int, committed: bool) -> tuple[int, int, int]:
        fetch = bench.fetch(at(offset=offset), committed=committed)
        fetch.run(bench.clock, 0)
        (one,) = fetch.answer.value()
        return one.slice.size, one.stable, one.high_watermark

    assert fetched(0, True) == (2 * size, 2, 3)
    assert fetched(2, True) == (0, 2, 3)
    assert fetched(0, False) == (3 * size, 2, 3)
    assert fetched(2, False) == (size, 2, 3)
    waiting = bench.fetch(at(offset=2), committed=True)
    assert not waiting.run(bench.clock, WAIT_MS)
    bench.append()
    assert not waiting.answer.done, "an append behind an open transaction is not for its readers"
    waiting.cancel()


class SlowLog(MemoryLog):
    """A log whose reads are answered when the test says so."""

    __slots__ = ("held",)

    def __init__(self, config: LogConfig, clock: VirtualClock) -> None:
        super().__init__(config, clock, MemoryLogStore(clock))
        self.held: list[tuple[Promise[Slice], Promise[Slice]]] = []

    def read(self, offset: int, bytes_max: int, below: int | None = None) -> Promise[Slice]:
        if offset == self.high_watermark:
            return super().read(offset, bytes_max, below)
        later: Promise[Slice] = Promise()
        self.held.append((later, super().read(offset, bytes_max, below)))
        return later

    def answer(self) -> None:
        held, self.held = self.held, []
        for later, found in held:
            if found.error is not None:
                later.fail(found.error)
            else:
                later.settle(found.value())


class TestReadsThatTakeTheirTime:
    @pytest.fixture
    async def slow(self, bench: Bench) -> list[SlowLog]:
        topic = bench.topics.get("orders")
        assert topic is not None
        logs = [SlowLog(LogConfig(), bench.clock) for _ in topic.partitions]
        for partition, log in zip(topic.partitions, logs, strict=True):
            partition.log = log
        return logs

    async def test_it_is_answered_when_the_last_of_them_is_there(self, bench: Bench, slow: list[SlowLog]) -> None:
        size = bench.append()
        bench.append(partition=1)
        fetch = bench.fetch(at(), at(partition=1), at(partition=2))
        assert not fetch.run(bench.clock, WAIT_MS)
        slow[1].answer()
        assert not fetch.answer.done
        slow[0].answer()
        assert bench.read(fetch) == [(Code.NONE, size), (Code.NONE, size), (Code.NONE, 0)]

    async def test_without_waiting_it_waits_for_the_reads_only(self, bench: Bench, slow: list[SlowLog]) -> None:
        size = bench.append()
        fetch = bench.fetch(at())
        assert not fetch.run(bench.clock, 0)
        slow[0].answer()
        assert bench.read(fetch) == [(Code.NONE, size)]

    async def test_an_append_meanwhile_makes_for_another_round(self, bench: Bench, slow: list[SlowLog]) -> None:
        size = bench.append()
        fetch = bench.fetch(at(), bytes_min=2 * size)
        assert not fetch.run(bench.clock, WAIT_MS)
        bench.append()
        slow[0].answer()
        assert not fetch.answer.done
        slow[0].answer()
        assert bench.read(fetch) == [(Code.NONE, 2 * size)]

    async def test_time_that_is_over_meanwhile_makes_the_round_the_last(
        self, bench: Bench, slow: list[SlowLog]
    ) -> None:
        size = bench.append()
        fetch = bench.fetch(at(), bytes_min=10_000)
        assert not fetch.run(bench.clock, WAIT_MS)
        bench.clock.advance(1)
        assert not fetch.answer.done
        slow[0].answer()
        assert bench.read(fetch) == [(Code.NONE, size)]

    async def test_a_read_that_fails_is_answered_beside_the_others(self, bench: Bench, slow: list[SlowLog]) -> None:
        size = bench.append()
        fetch = bench.fetch(at(offset=5), at())
        assert not fetch.run(bench.clock, WAIT_MS)
        slow[0].answer()
        assert bench.read(fetch) == [(Code.OFFSET_OUT_OF_RANGE, 0), (Code.NONE, size)]

    async def test_one_that_is_given_up_ignores_what_still_comes(self, bench: Bench, slow: list[SlowLog]) -> None:
        bench.append()
        fetch = bench.fetch(at(), bytes_min=10_000)
        assert not fetch.run(bench.clock, WAIT_MS)
        fetch.cancel()
        slow[0].answer()
        assert not fetch.answer.done

    async def test_room_is_set_aside_for_what_a_read_may_bring(self, bench: Bench, slow: list[SlowLog]) -> None:
        size = bench.append()
        for partition in (1, 1, 2):
            bench.append(partition)
        fetch = bench.fetch(at(), at(partition=1), at(partition=2), bytes_max=3 * size)
        assert not fetch.run(bench.clock, WAIT_MS)
        assert [len(log.held) for log in slow] == [1, 1, 0]


class TestReadsThatCheckOldData:
    """A round lets the event loop run after some of it, and comes to the same answer."""

    @pytest.fixture
    async def costly(self, bench: Bench) -> list[int]:
        """Reads of these logs count as a megabyte each; the answer fills with the turn that each was in."""
        turns: list[int] = []
        topic = bench.topics.get("orders")
        assert topic is not None

        class Costly(MemoryLog):
            def read(self, offset: int, bytes_max: int, below: int | None = None) -> Promise[Slice]:
                turns.append(Turns.count)
                Work.bytes += TURN_BYTES
                return super().read(offset, bytes_max, below)

        for part in topic.partitions:
            part.log = Costly(LogConfig(), bench.clock, MemoryLogStore(bench.clock))
        Turns.count = 0
        return turns

    @pytest.mark.parametrize("wait_ms", [0, WAIT_MS])
    async def test_the_others_are_read_in_the_next_turns(self, bench: Bench, costly: list[int], wait_ms: int) -> None:
        sizes = [bench.append(partition, b"x" * partition) for partition in range(3)]
        fetch = bench.fetch(*(at(partition=partition) for partition in range(3)), bytes_min=sum(sizes))
        assert not fetch.run(bench.clock, wait_ms)
        assert len(costly) == 1
        await Turns.pass_until(lambda: fetch.answer.done)
        assert bench.read(fetch) == [(Code.NONE, size) for size in sizes]
        assert len(set(costly)) == 3, "each in a turn of its own"

    async def test_an_append_meanwhile_makes_for_another_round(self, bench: Bench, costly: list[int]) -> None:
        size = bench.append()
        fetch = bench.fetch(at(), at(partition=1), bytes_min=2 * size)
        assert not fetch.run(bench.clock, WAIT_MS)
        bench.append()
        await Turns.pass_until(lambda: fetch.answer.done)
        assert bench.read(fetch) == [(Code.NONE, 2 * size), (Code.NONE, 0)]

    async def test_a_fetch_without_enough_waits_and_does_not_spin(self, bench: Bench, costly: list[int]) -> None:
        size = bench.append()
        fetch = bench.fetch(*(at(partition=partition) for partition in range(3)), bytes_min=10_000)
        assert not fetch.run(bench.clock, WAIT_MS)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not fetch.answer.done and len(costly) == 3
        bench.clock.advance(1)
        await Turns.pass_until(lambda: fetch.answer.done)
        assert bench.read(fetch)[0] == (Code.NONE, size) and len(costly) == 6


class Turns:
    count = 0

    @classmethod
    async def pass_until(cls, holds: Callable[[], bool]) -> None:
        for _ in range(50):
            if holds():
                return
            cls.count += 1
            await asyncio.sleep(0)
        raise AssertionError("it never came to that")


async def turns(count: int = 50) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.fixture
async def many(bench: Bench) -> Bench:
    await bench.topics.create("many", 2 * PARTITIONS_MANY + 1, {})
    return bench


def at_all(bench: Bench, topic: str = "many") -> list[Wanted]:
    found = bench.topics.get(topic)
    assert found is not None
    return [at(partition=index, topic=topic) for index in range(len(found.partitions))]


def wakers(bench: Bench) -> int:
    found = bench.topics.get("many")
    assert found is not None
    logs: list[Any] = [each.log for each in found.partitions]
    return sum(len(log._wakers) for log in logs)


async def test_many_partitions_are_read_in_several_turns_and_answered_in_order(many: Bench) -> None:
    wanted = at_all(many)
    fetch = many.fetch(*wanted)
    assert not fetch.run(many.clock, 0)
    assert len(fetch._round) == TURN_PARTITIONS
    await turns()
    assert [one.wanted for one in fetch.answer.value()] == wanted


async def test_a_fetch_of_many_partitions_misses_no_append_and_takes_its_wakers_back(many: Bench) -> None:
    wanted, topic = at_all(many), many.topics.get("many")
    assert topic is not None
    for turn in range(0, 30, 3):
        for partition in (0, PARTITIONS_MANY, len(wanted) - 1):
            end = topic.partitions[partition].log.high_watermark
            fetch = many.fetch(
                *(each._replace(offset=topic.partitions[each.partition].log.high_watermark) for each in wanted)
            )
            assert not fetch.run(many.clock, WAIT_MS)
            await turns(turn)
            topic.partitions[partition].append(memoryview(codec.encode([(0, 1, None, b"x")])), many.clock)
            await turns()
            assert [one.wanted.partition for one in fetch.answer.value() if one.slice.size] == [partition], (turn, end)
            assert wakers(many) == 0


async def test_a_cancelled_fetch_of_many_partitions_reads_no_more(many: Bench) -> None:
    for turn in (0, 1, 3, 30):
        fetch = many.fetch(*at_all(many))
        assert not fetch.run(many.clock, WAIT_MS)
        await turns(turn)
        fetch.cancel()
        await turns()
        assert not fetch.answer.done and wakers(many) == 0


async def test_a_fetch_of_many_partitions_ends_when_its_time_is_over(many: Bench) -> None:
    fetch = many.fetch(*at_all(many))
    assert not fetch.run(many.clock, WAIT_MS)
    await turns()
    assert wakers(many) == 2 * PARTITIONS_MANY + 1
    many.clock.advance(WAIT_MS / 1000)
    await turns()
    assert len(many.read(fetch)) == 2 * PARTITIONS_MANY + 1 and wakers(many) == 0
