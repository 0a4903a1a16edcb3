"""What an embedded broker does beyond the verbs that both kinds share: its clock, its store, several over one store."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import millstream
from millstream import (
    Closed,
    LeaseLost,
    Message,
    Millstream,
    MillstreamError,
    NotActive,
    RequestError,
    TooLarge,
    UnknownTopic,
)
from millstream.broker.groups.queue.partition import QueuePartition
from millstream.client.api import Batch
from millstream.client.embedded import Embedded
from millstream.records.batch import read_header
from millstream.records.compression import Codec
from millstream.stores.keys import MemoryMeta
from millstream.stores.memory import MemoryLogStore
from millstream.stores.url import open_store
from millstream.testing.clock import VirtualClock


async def turn() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


class Kit:
    """One store in memory and one clock that stands still; as many brokers over them as asked for."""

    def __init__(self, stack: contextlib.AsyncExitStack) -> None:
        self.clock = VirtualClock()
        self.stores = MemoryLogStore(self.clock), MemoryMeta()
        self._stack = stack

    async def open(self, **options: Any) -> Embedded:
        return await self._stack.enter_async_context(
            Embedded("memory:", clock=self.clock, stores=self.stores, **options)
        )

    async def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        await turn()


@pytest.fixture
async def kit() -> AsyncIterator[Kit]:
    async with contextlib.AsyncExitStack() as stack:
        yield Kit(stack)


async def now(waiting: Any) -> Any:
    """The answer of something that needs no time."""
    task = asyncio.ensure_future(waiting)
    await turn()
    assert task.done()
    return task.result()


# Time


async def test_receive_gives_control_back_by_the_brokers_clock(kit: Kit) -> None:
    ms = await kit.open()
    await ms.create_topic("orders")
    for each in (
        ms.read("orders"),
        ms.stream("orders", group="s"),
        ms.queue("orders", group="q"),
        ms.exclusive("orders", group="e"),
    ):
        waiting = asyncio.ensure_future(each.receive(10))
        await turn()
        await kit.advance(9.9)
        assert not waiting.done()
        await kit.advance(0.2)
        assert waiting.done() and waiting.result() is None
        await each.close()


async def test_a_lease_ends_after_30_seconds_unless_it_is_renewed(kit: Kit) -> None:
    ms = await kit.open()
    await ms.send("jobs", b"x")
    async with ms.queue("jobs", group="workers") as slow, ms.queue("jobs", group="workers") as quick:
        job = await now(slow.receive(0))
        await kit.advance(29)
        await job.renew()
        await kit.advance(29)
        assert await now(quick.receive(0)) is None
        await kit.advance(2)
        again = await now(quick.receive(0))
        assert again is not None and again.attempt == 2
        with pytest.raises(LeaseLost):
            await job.accept()
        await again.accept()


async def test_a_job_released_with_a_delay_comes_when_it_is_over(kit: Kit) -> None:
    ms = await kit.open()
    await ms.send("jobs", b"x")
    async with ms.queue("jobs", group="workers") as jobs:
        await (await now(jobs.receive(0))).release(delay=30, reason="busy")
        await kit.advance(29)
        assert await now(jobs.receive(0)) is None
        await kit.advance(2)
        assert (await now(jobs.receive(0))).attempt == 2


async def test_no_more_jobs_are_leased_than_asked_for(kit: Kit) -> None:
    ms = await kit.open()
    await ms.send_many([("jobs", b"%d" % number) for number in range(10)])
    async with ms.queue("jobs", group="workers", prefetch=4) as jobs:
        await now(jobs.receive(0))
        queue = ms.broker.queues.get("workers")
        assert queue is not None and queue.leases == 4


async def test_a_job_that_nobody_fetched_before_its_lease_ended_is_given_out_once(kit: Kit) -> None:
    ms = await kit.open()
    await ms.send_many([("jobs", b"one"), ("jobs", b"two")])
    async with (
        ms.queue("jobs", group="workers", prefetch=2) as slow,
        ms.queue("jobs", group="workers", prefetch=2) as quick,
    ):
        first = await now(slow.receive(0))
        await kit.advance(20)
        await first.renew()
        await kit.advance(20)
        second = await now(quick.receive(0))
        assert (first.value, second.value, second.attempt) == (b"one", b"two", 2)
        assert await now(slow.receive(0)) is None


async def test_progress_is_committed_every_so_often_and_when_there_is_nothing_to_do(kit: Kit) -> None:
    ms = await kit.open()
    await ms.send_many([("orders", b"%d" % number) for number in range(10)])

    def committed() -> int | None:
        [fetched] = ms.broker.groups.fetch("g", [("orders", [0])])
        found = fetched.partitions[0][1]
        return None if found is None else found.offset

    async with ms.stream("orders", group="g", commit_every=5) as stream:
        for _ in range(3):
            assert await now(stream.receive(0)) is not None
        assert committed() is None
        await kit.advance(6)
        assert await now(stream.receive(0)) is not None
        assert committed() == 3
        for _ in range(6):
            assert await now(stream.receive(0)) is not None
        assert committed() == 3
        assert await now(stream.receive(0)) is None
        await turn()
        assert committed() == 10


async def test_a_take_from_a_queue_that_was_lost_is_none_from_the_one_that_came_after(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller has gone and the take goes on; the queue is lost, and the next caller opens it again."""
    take = QueuePartition.take
    is_taking, may_take = asyncio.Event(), asyncio.Event()

    async def take_later(self: QueuePartition, *arguments: Any) -> Any:
        is_taking.set()
        await may_take.wait()
        return await take(self, *arguments)

    ms = await kit.open()
    await ms.send("jobs", b"x")
    async with ms.queue("jobs", group="g") as jobs:
        monkeypatch.setattr(QueuePartition, "take", take_later)
        waiting = asyncio.ensure_future(jobs.receive())
        await is_taking.wait()
        waiting.cancel()
        await asyncio.wait([waiting])
        lost = ms.broker.queues.get("g")
        ms.broker.groups.release()
        waiting = asyncio.ensure_future(jobs.receive())
        await turn()
        assert ms.broker.queues.get("g") not in (lost, None)
        may_take.set()
        job = await now(waiting)
        await job.accept()


# Exclusive, over one store


async def test_a_standby_takes_over_60_seconds_after_the_active_one_was_last_heard_of(kit: Kit) -> None:
    one = await kit.open()
    await one.send_many([("ledger", b"%d" % number) for number in range(5)])
    two = await kit.open()
    changes: list[bool] = []
    active = await one.exclusive("ledger", group="g").__aenter__()
    standby = await two.exclusive("ledger", group="g", on_change=changes.append).__aenter__()
    event = await now(active.receive(0))
    await event.commit()
    assert active.is_active and not standby.is_active
    late = await now(active.receive(0))
    assert active._member is not None  # type: ignore[attr-defined]
    active._member.abandon()  # type: ignore[attr-defined]  # as a process that dies
    told = asyncio.ensure_future(standby.changed())
    await kit.advance(59)
    assert await now(standby.receive(0)) is None and not told.done()
    await kit.advance(2)
    assert told.done() and told.result() and changes == [True]
    assert (await now(standby.receive(0))).offset == 1
    with pytest.raises(NotActive):
        await late.commit()


async def test_a_member_that_processes_for_long_stays_active(kit: Kit) -> None:
    one = await kit.open()
    await one.send("ledger", b"x")
    two = await kit.open()
    async with one.exclusive("ledger", group="g") as active, two.exclusive("ledger", group="g") as standby:
        event = await now(active.receive(0))
        for _ in range(10):
            await kit.advance(30)
        assert active.is_active and not standby.is_active
        await event.commit()


async def test_events_of_an_earlier_time_as_the_active_one_are_refused_also_when_it_is_active_again(kit: Kit) -> None:
    one = await kit.open()
    await one.send_many([("ledger", b"0"), ("ledger", b"1")])
    two = await kit.open()
    async with one.exclusive("ledger", group="g") as first:
        old = await now(first.receive(0))
        member = first._member  # type: ignore[attr-defined]
        member._heartbeat.stop()  # it is stopped for a while
        async with two.exclusive("ledger", group="g") as second:
            await kit.advance(61)
            assert second.is_active and not first.is_active
            assert await now(first.receive(0)) is None
        assert first.is_active
        with pytest.raises(NotActive):
            await old.commit()
        assert (await now(first.receive(0))).offset == 0


async def test_times_of_an_exclusive_group_are_settings_and_are_checked(kit: Kit) -> None:
    ms = await kit.open()
    with pytest.raises(MillstreamError, match="must be shorter than the takeover"):
        ms.exclusive("ledger", group="g", heartbeat=10, takeover=5)
    await ms.send("ledger", b"x")
    active = await ms.exclusive("ledger", group="g", heartbeat=1, takeover=2).__aenter__()
    active._member.abandon()  # type: ignore[attr-defined]
    async with ms.exclusive("ledger", group="g", heartbeat=1, takeover=2) as standby:
        await kit.advance(2.1)
        assert standby.is_active


# Topics that change


async def test_a_topic_that_grows_is_read_in_full(kit: Kit) -> None:
    ms = await kit.open()
    await ms.create_topic("orders", partitions=1)
    async with (
        ms.stream("orders", group="s") as stream,
        ms.queue("orders", group="q") as queue,
        ms.exclusive("orders", group="e") as exclusive,
    ):
        for each in (stream, queue, exclusive):
            assert await now(each.receive(0)) is None
        await ms.broker.topics.grow("orders", 3)
        await turn()
        await ms.send_many([Message("orders", b"x", partition=number) for number in range(3)])
        for each in (stream, queue, exclusive):
            found = [await now(each.receive(0)) for _ in range(3)]
            assert sorted(record.partition for record in found) == [0, 1, 2]


async def test_a_deleted_topic_ends_what_reads_it_with_an_error(kit: Kit) -> None:
    ms = await kit.open()
    await ms.create_topic("orders")
    reading, exclusive = ms.read("orders"), ms.exclusive("orders", group="e")
    waiting = [asyncio.ensure_future(each.receive()) for each in (reading, exclusive)]
    await turn()
    await ms.delete_topic("orders")
    await turn()
    for task in waiting:
        with pytest.raises(UnknownTopic):
            await task


async def test_partitions_are_read_in_turn(kit: Kit) -> None:
    """A partition that never runs dry does not keep the others waiting."""
    ms = await kit.open()
    await ms.create_topic("orders", partitions=2)
    for _ in range(5):
        await ms.send_many([Message("orders", b"x", partition=0)] * 10)
    await ms.send("orders", b"y", partition=1)
    for each in (ms.stream("orders", group="s"), ms.exclusive("orders", group="e")):
        found = [await now(each.receive(5)) for _ in range(21)]
        assert 1 in {record.partition for record in found}
        await each.close()


# Sending


async def test_one_call_is_one_batch(kit: Kit) -> None:
    ms = await kit.open()
    await ms.send_many([("orders", b"%d" % number) for number in range(50)])
    log = ms.broker.topics.get("orders").partitions[0].log  # type: ignore[union-attr]
    assert read_header((await log.read(0, 1)).to_bytes()).count == 50


async def test_one_call_is_stored_as_a_whole_or_not_at_all(kit: Kit) -> None:
    ms = await kit.open()
    assert ms.atomic_across
    await ms.create_topic("small", settings={"max.message.bytes": "1000"})
    await ms.create_topic("compacted", settings={"cleanup.policy": "compact"})
    for bad in (("small", b"x" * 2000), ("compacted", b"no key"), Message("orders", b"x", partition=9)):
        with pytest.raises(RequestError):
            await ms.send_many([("orders", b"a"), ("small", b"b"), bad])
    for topic in ("orders", "small"):
        assert [record async for record in ms.read(topic, follow=False)] == []
    with pytest.raises(TooLarge):
        await ms.send_many([("small", b"x" * 2000)])


async def test_many_senders_at_once_each_get_their_own_offset(kit: Kit) -> None:
    ms = await kit.open()
    await ms.create_topic("orders")
    sent = await asyncio.gather(*(ms.send("orders", b"%d" % number) for number in range(100)))
    assert sorted(each.offset for each in sent) == list(range(100))


async def test_what_was_stored_before_it_was_closed_is_answered_afterwards(kit: Kit) -> None:
    ms = await kit.open()
    await ms.create_topic("orders")
    answer = ms.append_each(Batch("orders", 0, [(0, None, None, b"x", ())]), Codec.NONE)
    await ms.close()
    assert list(await answer) == [0]


# Opening


@pytest.mark.parametrize(
    ("store", "sentence"),
    [
        ("mongodb://x", "the store mongodb://x is not known"),
        ("file:", "store names no directory"),
        ("file:/proc/nowhere", "cannot be used as a data directory"),
    ],
)
async def test_a_store_that_cannot_be_is_said_in_one_sentence(store: str, sentence: str) -> None:
    with pytest.raises(MillstreamError, match=sentence):
        async with millstream.open(store):
            pass


async def test_settings_are_the_brokers_and_are_checked(tmp_path: Path) -> None:
    async with millstream.open(f"file:{tmp_path}", default_partitions=4, flush="os") as ms:
        await ms.send("orders", b"x")
        assert await ms.topics() == {"orders": 4}
    with pytest.raises(MillstreamError, match="must be a whole number"):
        millstream.open("memory:", default_partitions="four")
    with pytest.raises(MillstreamError, match=r"partitions is not a setting; did you mean \w+\?"):
        millstream.open("memory:", partitions=4)


async def test_what_was_sent_is_there_when_it_is_opened_again(tmp_path: Path) -> None:
    for number in range(3):
        async with millstream.open(f"file:{tmp_path}") as ms:
            await ms.send("orders", b"%d" % number)
            with pytest.raises(MillstreamError, match="in use by another broker"):
                async with millstream.open(f"file:{tmp_path}"):
                    pass
    async with millstream.open(f"file:{tmp_path}") as ms:
        assert [record.value async for record in ms.read("orders", follow=False)] == [b"0", b"1", b"2"]


async def test_reading_a_topic_ends_of_which_compaction_need_not_keep_anything(tmp_path: Path) -> None:
    clock = VirtualClock()
    settings = {
        "cleanup.policy": "compact",
        "min.cleanable.dirty.ratio": "0.01",
        "delete.retention.ms": "0",
        "segment.ms": "1",
    }
    logs, meta = open_store(f"file:{tmp_path}", clock, lambda seconds: None)
    async with Embedded("memory:", clock=clock, stores=(logs, meta)) as ms:
        await ms.create_topic("orders", partitions=1, settings=settings)
        await ms.send("orders", b"value", key=b"only")
        await ms.send("orders", None, key=b"only")
        clock.advance(10)
        await logs.housekeep()
    logs, meta = open_store(f"file:{tmp_path}", clock, lambda seconds: None)
    async with Embedded("memory:", clock=clock, stores=(logs, meta)) as ms:
        await logs.housekeep()
        values = {record.key: record.value async for record in ms.read("orders", follow=False)}
        assert values.get(b"only") is None


async def test_a_closed_one_says_so() -> None:
    ms = millstream.open("memory:")
    for verb in (lambda: ms.send("orders", b"x"), lambda: ms.read("orders").receive(), ms.topics):
        with pytest.raises(Closed):
            await verb()
    async with ms:
        with pytest.raises(Closed):
            await ms.__aenter__()


async def test_closing_ends_those_who_wait(kit: Kit) -> None:
    ms = await kit.open()
    await ms.create_topic("orders")
    iterators: list[Any] = [
        ms.read("orders"),
        ms.stream("orders", group="s"),
        ms.queue("orders", group="q"),
        ms.exclusive("orders", group="e"),
    ]
    waiting = [asyncio.ensure_future(each.receive()) for each in iterators]
    await turn()
    await ms.close()
    assert await asyncio.gather(*waiting) == [None] * 4


def test_both_kinds_have_every_verb() -> None:
    for verb in ("send", "send_many", "sender", "read", "stream", "streams", "queue", "exclusive", "topics"):
        assert callable(getattr(Millstream, verb))


def test_who_asks_it_on_another_event_loop_is_told(tmp_path: Path) -> None:
    """As in a test whose fixture has its own loop: nothing would ever wake it."""
    ms = millstream.open(f"file:{tmp_path}")
    with asyncio.Runner() as its, asyncio.Runner() as another:
        its.run(ms.__aenter__())
        its.run(ms.send("orders", b"x"))
        for ask in (
            lambda: ms.send("orders", b"y"),
            lambda: ms.send_many([("orders", b"y")]),
            lambda: ms.sender("orders").send(b"y"),
            ms.topics,
            lambda: ms.create_topic("audit"),
            lambda: ms.delete_topic("orders"),
            lambda: ms.read("orders").receive(),
            lambda: ms.stream("orders", group="s").receive(),
            lambda: ms.queue("orders", group="q").receive(),
            lambda: ms.exclusive("orders", group="e").receive(),
        ):
            with pytest.raises(MillstreamError, match="another event loop"):
                another.run(asyncio.wait_for(ask(), 20))
        its.run(ms.send("orders", b"z"))
        sender = ms.sender("orders")  # which has asked before, and knows the topic
        its.run(sender.send(b"u"))
        its.run(sender.flush())
        with pytest.raises(MillstreamError, match="another event loop"):
            another.run(sender.send(b"v"))
        its.run(ms.close())
