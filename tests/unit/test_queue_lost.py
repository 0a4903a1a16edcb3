"""Queues that move to another broker, or are deleted, while members use them: no member gets a false answer."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from millstream.broker.broker import Broker
from millstream.broker.groups.groups import PartitionCommit, ShareBeat, TopicCommit
from millstream.broker.groups.queue import block as queue_block
from millstream.broker.groups.queue.verbs import Answer, Verb
from millstream.broker.session import Session, Sessions
from millstream.cluster.base import Node
from millstream.config import Config
from millstream.core.errors import Code, RequestError
from millstream.core.metrics import Metrics
from millstream.core.promise import Promise, begin
from millstream.doors.engine.connection import Connection
from millstream.doors.kafka import share_relay
from millstream.doors.kafka.context import Context
from millstream.doors.kafka.door import KafkaDoor
from millstream.doors.kafka.protocol import KafkaProtocol
from millstream.doors.kafka.sessions import FetchSessions
from millstream.doors.transport import PlainTransport
from millstream.stores.base import Versioned
from millstream.stores.keys import MemoryMeta
from millstream.stores.memory import MemoryLogStore
from millstream.testing.clock import VirtualClock
from tests.unit import share_kit
from tests.unit.groups_kit import start, turn
from tests.unit.queue_kit import EARLIEST, Kit, Losing, settle, take, values

ACCEPT_ALL = [Answer(0, 2, Verb.ACCEPT)]


async def test_a_queue_that_another_broker_has_gives_out_nothing_and_confirms_nothing(kit: Kit) -> None:
    await kit.topic()
    await kit.put(b"1", b"2", b"3", b"4")
    queue, partition = await kit.queue()
    member = queue.join("one")
    assert len(await take(partition, member, 3)) == 3
    kit.broker.queues.release()
    revision = kit.meta.revision
    with pytest.raises(RequestError) as refused:
        partition.answer(member, ACCEPT_ALL)
    assert refused.value.code == Code.NOT_COORDINATOR
    with pytest.raises(RequestError) as refused:
        await take(partition, member)
    assert refused.value.code == Code.NOT_COORDINATOR
    with pytest.raises(RequestError) as refused:
        await partition.acquire(member, 10, 1 << 20)
    assert refused.value.code == Code.NOT_COORDINATOR
    assert isinstance(partition.save().error, RequestError), "nothing is written, so nothing was saved"
    with pytest.raises(RequestError):
        await queue.partition(partition.topic, 0 if partition.index else 1)
    await settle()
    assert kit.meta.revision == revision


async def test_a_queue_that_is_lost_while_the_log_is_read_gives_out_nothing(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    await kit.topic()
    await kit.put(b"1")
    queue, partition = await kit.queue()
    member = queue.join("one")
    read, gate = partition.log.read(0, 1 << 20), Promise[Any]()
    monkeypatch.setattr(type(partition.log), "read", lambda *_: gate)
    taking, acquiring = begin(take(partition, member)), begin(partition.acquire(member, 10, 1 << 20))
    assert not taking.done
    kit.broker.queues.release()
    gate.settle(read.value())
    await settle()
    for each in (taking, acquiring):
        assert isinstance(each.error, RequestError) and each.error.code == Code.NOT_COORDINATOR


async def test_an_answer_that_waits_to_be_written_when_its_place_ends_is_refused(shares: share_kit.Kit) -> None:
    await shares.put(b"1", b"2", b"3")
    partition = await shares.partition()
    member = shares.broker.queues.open("g").join("one")
    await take(partition, member)
    await partition.save()
    shares.meta.holding = True
    other = partition.answer(member, [Answer(0, 0, Verb.ACCEPT)])  # is on its way
    waiting = partition.answer(member, [Answer(1, 2, Verb.ACCEPT)])
    partition.close()
    shares.meta.holding = False
    shares.meta.land()
    await turn()
    assert other.done and other.error is None, "it was written"
    assert isinstance(waiting.error, RequestError) and waiting.error.code == Code.NOT_COORDINATOR


async def test_all_parked_fetches_of_a_queue_that_is_lost_hear_it_at_once(shares: share_kit.Kit) -> None:
    parked = [start(shares.fetch(f"m{number}").run(shares.clock, 300_000, True, lambda: None)) for number in range(3)]
    await turn()
    assert not any(fetch.done() for fetch in parked)
    shares.broker.queues.release()
    for fetch in parked:
        with pytest.raises(RequestError) as refused:
            await asyncio.wait_for(fetch, 20)
        assert refused.value.code == Code.SHARE_SESSION_NOT_FOUND, "on which clients open another"


async def test_records_that_come_to_a_lost_queue_are_not_given_to_a_parked_fetch(shares: share_kit.Kit) -> None:
    fetch = shares.fetch("m")
    parked = start(fetch.run(shares.clock, 300_000, True, lambda: None))
    await turn()
    shares.broker.queues.release()
    await shares.put(b"1")
    with pytest.raises(RequestError):
        await asyncio.wait_for(parked, 20)


async def test_taking_a_queue_up_twice_leaves_one_place(kit: Kit) -> None:
    """The first time may have failed half-way."""
    await kit.topic()
    await kit.put(*(b"%d" % number for number in range(6)))
    queue, partition = await kit.queue()
    member = queue.join("one")
    await take(partition, member, 2)
    await partition.answer(member, [Answer(0, 0, Verb.ACCEPT), Answer(1, 1, Verb.RELEASE, 10_000, "later")])
    kit.broker.queues.release()
    await kit.broker.queues.adopt(lambda group_id: True)
    first = kit.broker.queues.get("workers")
    assert first is not None
    (ghost,) = first.partitions()
    await kit.broker.queues.adopt(lambda group_id: True)
    queue, partition = await kit.queue()
    assert ghost.is_closed and partition is not ghost
    member = queue.join("one")
    for each in await take(partition, member):
        await partition.answer(member, [Answer(each.record.offset, each.record.offset, Verb.ACCEPT)])
    kit.clock.advance(11)
    await settle()
    assert ghost.save().error is not None
    await kit.restart()
    queue, partition = await kit.queue()
    assert values(await take(partition, queue.join("one"))) == [b"1"]
    assert partition.next == 6


class SlowMeta(MemoryMeta):
    """A store whose lists take as long as the test says."""

    gate: Promise[Any] | None = None

    def list(self, prefix: str) -> Promise[Sequence[tuple[str, Versioned]]]:
        found = super().list(prefix)
        if self.gate is None:
            return found
        answer: Promise[Sequence[tuple[str, Versioned]]] = Promise()
        self.gate.then(lambda _: answer.settle(found.value()))
        return answer


@pytest.mark.parametrize("what", ["delete", "forget"])
async def test_nothing_is_deleted_of_a_queue_that_is_lost_while_its_keys_are_listed(what: str) -> None:
    clock, meta, cluster = VirtualClock(), SlowMeta(), Losing(0)
    broker = Broker(Config(), MemoryLogStore(clock), meta, clock, Metrics(), cluster)
    await broker.start()
    topic = await broker.topics.create("jobs", 1, {})
    await broker.queues.open("workers").partition(topic, 0)
    kept = await meta.list("queues/")
    meta.gate = Promise()
    work = broker.queues.delete("workers") if what == "delete" else broker.queues.forget("workers", "jobs")
    deleting = begin(work)
    cluster.has_lost = True
    meta.gate.settle(None)
    await turn()
    assert isinstance(deleting.error, RequestError) and deleting.error.code == Code.NOT_COORDINATOR
    assert [key for key, _ in await meta.list("queues/")] == [key for key, _ in kept] != []
    await broker.close()


async def test_what_a_worker_takes_while_a_topic_is_forgotten_is_not_forgotten() -> None:
    clock, meta = VirtualClock(), SlowMeta()
    logs = MemoryLogStore(clock)
    broker = Broker(Config(), logs, meta, clock, Metrics())
    await broker.start()
    topic = await broker.topics.create("jobs", 1, {})
    for number in range(2 * queue_block.SIZE):
        await broker.inlet(topic.partitions[0]).put(b"%d" % number)
    queue = broker.queues.open("workers", settings=EARLIEST)
    partition, old = await queue.partition(topic, 0), queue.join("old")
    await take(partition, old, queue_block.SIZE)
    queue.leave(old)  # so that a block is in the store
    await settle()
    meta.gate = Promise()
    forgetting = begin(broker.queues.forget("workers", "jobs"))
    new, partition = queue.join("new"), await queue.partition(topic, 0)
    await take(partition, new, queue_block.SIZE)
    clock.advance(0.1)  # the delivery is written down
    meta.gate.settle(None)
    meta.gate = None
    await settle()
    for each in await take(partition, new):
        await partition.answer(new, [Answer(each.record.offset, each.record.offset, Verb.ACCEPT)])
    partition.close()  # as a crash does: nothing more is written
    broker = Broker(Config(), logs, meta, clock, Metrics())
    await broker.start()
    found, queue = broker.topics.get("jobs"), broker.queues.open("workers")
    assert found is not None
    again = await take(await queue.partition(found, 0), queue.join("later"))
    assert [each.record.offset for each in again] == list(range(queue_block.SIZE)), "no member acknowledged them"
    assert isinstance(forgetting.error, RequestError) and forgetting.error.code == Code.NON_EMPTY_GROUP
    await broker.close()


async def test_a_queue_whose_deletion_failed_goes_on_where_it_was(shares: share_kit.Kit) -> None:
    await shares.put(b"1", b"2")
    partition = await shares.partition()
    queue = shares.broker.queues.open("g")
    member = queue.join("one")
    await take(partition, member, 1)
    await partition.answer(member, [Answer(0, 0, Verb.ACCEPT)])
    queue.leave(member)
    shares.meta.holding = True
    deleting = begin(shares.broker.queues.delete("g"))
    await turn()
    shares.meta.lose()
    shares.meta.holding = False
    await settle()
    assert isinstance(deleting.error, RequestError)
    taken = await take(await shares.partition(), shares.broker.queues.open("g").join("two"))
    assert values(taken) == [b"2"]


async def test_a_queue_that_is_lost_while_its_deletion_waits_is_not_taken_back(shares: share_kit.Kit) -> None:
    await shares.partition()
    shares.meta.holding = True
    shares.broker.queues.open("other")  # what is written of it keeps the deletion waiting
    deleting = begin(shares.broker.queues.delete("g"))
    await turn()
    shares.broker.queues.release()
    shares.meta.land_all()
    await settle()
    assert isinstance(deleting.error, RequestError) and deleting.error.code == Code.NOT_COORDINATOR
    assert shares.broker.queues.get("g") is None


async def test_a_beginning_that_could_not_be_written_is_forgotten(shares: share_kit.Kit) -> None:
    topic = shares.broker.topics.get("jobs")
    assert topic is not None
    await shares.put(b"1")
    queue = shares.broker.queues.open("g")
    shares.meta.holding = True
    first, second = (start(queue.partition(topic, 0)) for _ in range(2))
    await turn()
    assert queue.opened(topic, 0) is None and not second.done(), "nothing is given out before it is durable"
    shares.meta.lose()
    for each in (first, second):
        with pytest.raises(RequestError):
            await asyncio.wait_for(each, 20)
    assert queue.opened(topic, 0) is None
    third = start(queue.partition(topic, 0))
    await turn()
    assert not third.done(), "it starts over, and waits for that"
    shares.meta.land_all()
    partition = await asyncio.wait_for(third, 20)
    assert len(await take(partition, queue.join("one"))) == 1


async def test_a_topic_that_is_deleted_takes_its_leases_with_it(kit: Kit) -> None:
    await kit.topic()
    await kit.put(b"1", b"2", b"3")
    queue, partition = await kit.queue()
    member = queue.join("one")
    await take(partition, member)
    await kit.broker.delete_topic("jobs")
    with pytest.raises(RequestError) as refused:
        partition.answer(member, ACCEPT_ALL)
    assert refused.value.code == Code.UNKNOWN_TOPIC_OR_PARTITION
    assert (queue.leases, member.leases) == (0, 0)


def context_of(broker: Broker) -> Context:
    return Context(Session(broker, "kafka", "127.0.0.1"), FetchSessions(), "127.0.0.1", 9092)


async def test_an_open_session_is_not_served_when_the_lease_has_run_out() -> None:
    clock, cluster = VirtualClock(), Losing(0)
    broker = Broker(Config(), MemoryLogStore(clock), MemoryMeta(), clock, Metrics(), cluster)
    await broker.start()
    broker.queues.open("g")
    context = context_of(broker)
    context.shares.open("g", "m", context)
    assert context.shares.find("g", "m", 1, context)
    cluster.has_lost = True
    with pytest.raises(RequestError) as refused:
        context.shares.find("g", "m", 2, context)
    assert refused.value.code == Code.SHARE_SESSION_NOT_FOUND
    cluster.has_lost = False
    assert context.shares.find("g", "m", 2, context), "no broker took over, so it goes on"
    await broker.close()


async def test_no_relay_is_opened_for_a_client_that_has_gone(kit: Kit) -> None:
    context = context_of(kit.broker)
    context.shares.disconnected(context)
    with pytest.raises(ConnectionError):
        share_relay._relay_to(Node(2, "127.0.0.1", 1), context)
    assert not context.relays


async def test_no_relay_is_opened_for_a_client_whose_connection_closed_while_the_coordinator_was_looked_for(
    kit: Kit,
) -> None:
    door = KafkaDoor(Sessions(kit.broker))
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    context = context_of(kit.broker)
    transport = PlainTransport(ours, door._listener.hang_ups)
    Connection(door, transport, "here", partial(KafkaProtocol, door, context)).close()
    theirs.close()
    with pytest.raises(ConnectionError):
        share_relay._relay_to(Node(2, "127.0.0.1", 1), context)
    assert not context.relays


async def test_a_group_that_is_no_queue_is_refused_with_what_to_do(shares: share_kit.Kit) -> None:
    groups = shares.broker.groups
    await groups.commit("readers", "", None, -1, [TopicCommit("jobs", [PartitionCommit(0, 5)])])
    with pytest.raises(RequestError, match="choose another name, or delete it"):
        groups.share("readers")
    with pytest.raises(RequestError, match="choose another name, or delete it"):
        await groups.share_heartbeat(ShareBeat("readers", "m", 0, topics=frozenset({"jobs"})))
