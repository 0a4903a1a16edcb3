"""Members that only poll: what an answer holds, and what a poll does beside a rebalance, a damaged log, a lost tail."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from millstream.broker.broker import Broker
from millstream.broker.groups.groups import PartitionCommit, TopicCommit
from millstream.broker.groups.stream.classic_member import Join, Member
from millstream.broker.groups.stream.plan import ROUND_ROBIN, decode_assignment, encode_subscription, plan
from millstream.broker.groups.stream.polling import Answer, Size, Subscribed
from millstream.broker.session import Session, Topic
from millstream.config import Config
from millstream.core.errors import Code, RequestError
from millstream.core.metrics import Metrics
from millstream.log.damage import UnreadableOffset
from millstream.security.principal import Principal
from millstream.stores.keys import MemoryMeta
from millstream.stores.memory import MemoryLogStore
from millstream.testing.clock import VirtualClock
from tests.unit.groups_kit import FakeTopics

SIZE = Size(100, 1 << 20, 10)


@pytest.fixture
async def broker() -> AsyncIterator[Broker]:
    clock = VirtualClock()
    broker = Broker(Config(), MemoryLogStore(clock), MemoryMeta(), clock, Metrics())
    await broker.start()
    await broker.topics.create("t", 4, {})
    yield broker
    await broker.close()


@pytest.fixture
def session(broker: Broker) -> Session:
    return Session(broker, "comet", "127.0.0.1", client_id="comet")


def topic(broker: Broker) -> Topic:
    found = broker.topics.get("t")
    assert found is not None
    return found


async def put(broker: Broker, partition: int, *values: bytes, key: bytes | None = None) -> None:
    inlet = broker.inlet(topic(broker).partitions[partition])
    for value in values:
        await inlet.put(value, key)


async def poll(session: Session, member: Subscribed, size: Size = SIZE) -> Answer:
    return await session.poll("t", "g", member.member_id, size)


def seen(answer: Answer) -> list[tuple[int, int]]:
    return [(partition, record.offset) for partition, records in answer.records for record in records]


async def test_an_answer_is_bounded_in_bytes_and_no_partition_waits_for_ever(broker: Broker, session: Session) -> None:
    for partition in range(4):
        await put(broker, partition, *[bytes(500)] * 3, key=bytes(490))
    member = await session.subscribe("t", "g")
    found: list[tuple[int, int]] = []
    first_four = set()
    for number in range(12):
        answer = seen(await poll(session, member, Size(100, 1500, 10)))
        assert len(answer) == 1, "one record of 1,000 bytes fits, and always one"
        found += answer
        if number < 4:
            first_four.add(answer[0][0])
    assert first_four == {0, 1, 2, 3}
    assert sorted(found) == [(partition, offset) for partition in range(4) for offset in range(3)]
    assert seen(await poll(session, member)) == []


async def test_a_record_above_the_limit_comes_alone(broker: Broker, session: Session) -> None:
    await put(broker, 0, b"small", bytes(5000), b"small")
    member = await session.subscribe("t", "g")
    assert [seen(await poll(session, member, Size(100, 1000, 10))) for _ in range(3)] == [[(0, 0)], [(0, 1)], [(0, 2)]]


async def test_a_damaged_partition_does_not_hold_up_the_others(
    broker: Broker, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    for partition in range(4):
        await put(broker, partition, b"x")
    take, bad = broker.outlet.take, topic(broker).partitions[1].log

    async def failing(log: Any, offset: int, bytes_max: int, **limits: Any) -> Any:
        if log is bad:
            raise UnreadableOffset(0, 1, "offset 0 is damaged")
        return await take(log, offset, bytes_max, **limits)

    monkeypatch.setattr(broker.outlet, "take", failing)
    member = await session.subscribe("t", "g")
    assert seen(await poll(session, member)) == [(0, 0), (2, 0), (3, 0)]
    with pytest.raises(UnreadableOffset):
        await poll(session, member)
    committed = broker.groups.fetch("g", [("t", range(4))])[0].partitions
    assert [each.offset if each else None for _, each, _ in committed] == [1, None, 1, 1]


async def test_a_position_beyond_the_end_goes_on_at_the_end(broker: Broker, session: Session) -> None:
    """The log lost its tail, and the lost records' offsets are given to new ones."""
    await put(broker, 0, b"x")
    await session.commit("g", "", None, -1, [TopicCommit("t", [PartitionCommit(0, 100)])])
    member = await session.subscribe("t", "g")
    assert seen(await poll(session, member)) == []


async def test_a_commit_that_meets_a_rebalance_keeps_the_partitions_that_stay(
    broker: Broker, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    for partition in range(4):
        await put(broker, partition, b"x")
    first = await session.subscribe("t", "g")
    assert len(seen(await poll(session, first))) == 4
    commit = broker.groups.commit
    joined: list[Subscribed] = []

    async def commit_meanwhile(*arguments: Any, **more: Any) -> Any:
        if not joined:
            joined.append(await session.subscribe("t", "g"))
        return await commit(*arguments, **more)

    monkeypatch.setattr(broker.groups, "commit", commit_meanwhile)
    answer = await poll(session, first)
    assert answer.rebalance and not answer.records and answer.generation == 2
    committed = broker.groups.fetch("g", [("t", range(4))])[0].partitions
    assert [each.offset if each else None for _, each, _ in committed] == [1, None, 1, None]
    assert seen(await poll(session, joined[0])) == [(1, 0), (3, 0)]


async def test_a_member_that_is_evicted_during_its_poll_gets_no_records(
    broker: Broker, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put(broker, 0, b"x")
    member = await session.subscribe("t", "g")
    take = broker.outlet.take

    async def slow(*arguments: Any, **limits: Any) -> Any:
        assert isinstance(broker.clock, VirtualClock)
        broker.clock.advance(11)
        return await take(*arguments, **limits)

    monkeypatch.setattr(broker.outlet, "take", slow)
    with pytest.raises(RequestError) as raised:
        await poll(session, member)
    assert raised.value.code == Code.UNKNOWN_MEMBER_ID


async def test_another_principal_may_not_poll_for_a_member(broker: Broker, session: Session) -> None:
    member = await session.subscribe("t", "g")
    other = Session(broker, "comet", "127.0.0.1", principal=Principal("User", "mallory"))
    for call in (poll(other, member), other.unsubscribe("t", "g", member.member_id)):
        with pytest.raises(RequestError) as raised:
            await call
        assert raised.value.code == Code.UNKNOWN_MEMBER_ID


def test_round_robin_gives_partition_p_to_the_member_at_p_mod_n_of_each_topic() -> None:
    def member(name: str, *topics: str) -> Member:
        protocols = ((ROUND_ROBIN, encode_subscription(topics)),)
        join = Join("g", name, None, "", "", 10_000, 10_000, "consumer", protocols, planned=True)
        return Member(name, join, VirtualClock(), lambda member: None)

    members = [member("c", "orders"), member("a", "orders", "prices"), member("b", "orders", "missing")]
    topics: Any = FakeTopics(orders=5, prices=2)
    target = {name: decode_assignment(assigned) for name, assigned in plan(members, topics).items()}
    assert {name: sorted(found[0]) for name, found in target.items() if found is not None} == {
        "a": [("orders", 0), ("orders", 3), ("prices", 0), ("prices", 1)],
        "b": [("orders", 1), ("orders", 4)],
        "c": [("orders", 2)],
    }
