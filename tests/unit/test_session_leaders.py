"""A cluster with leaders: a session serves a partition only while this broker leads it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from uuid import UUID

import pytest

from millstream.broker.broker import Broker
from millstream.broker.fetch import Fetched, Wanted
from millstream.broker.session import Session, Sessions
from millstream.cluster.base import Leadership, Solo
from millstream.config import Config
from millstream.core.errors import Code, RequestError
from millstream.core.metrics import Metrics
from millstream.doors.kafka.door import KafkaDoor
from millstream.security.rights import Kind, Operation
from millstream.stores.keys import MemoryMeta
from millstream.stores.memory import MemoryLogStore
from millstream.testing.clock import VirtualClock
from tests.batches import append, batch
from tests.refusing import Refusing

HERE, ELSEWHERE = 1, 2


class Led(Solo):
    """The second cluster, which proves the seam: partition 0 is led here, partition 1 by broker 2."""

    has_leaders = True

    def __init__(self) -> None:
        super().__init__(HERE)
        self.leaders = [HERE, ELSEWHERE]

    def leaderships(self, topic_id: UUID) -> Sequence[Leadership]:
        return [Leadership(leader, 3, (HERE, ELSEWHERE), (HERE, ELSEWHERE)) for leader in self.leaders]


@pytest.fixture
async def broker() -> AsyncIterator[Broker]:
    clock = VirtualClock()
    broker = Broker(Config(node_id=HERE), MemoryLogStore(clock), MemoryMeta(), clock, Metrics(), Led(), Refusing())
    await broker.start()
    topic = await broker.topics.create("orders", 2, {})
    for partition in topic.partitions:
        await append(partition.log, batch(b"x"))
    yield broker
    await broker.close()


@pytest.fixture
def session(broker: Broker) -> Session:
    return Session(broker, "kafka", "10.0.0.1")


def led(broker: Broker) -> Led:
    assert isinstance(broker.cluster, Led)
    return broker.cluster


@pytest.mark.parametrize("operation", [Operation.WRITE, Operation.READ, Operation.DESCRIBE, Operation.DELETE])
def test_a_partition_that_another_broker_leads_is_refused(session: Session, operation: Operation) -> None:
    assert session.partition("orders", 0, operation).index == 0
    with pytest.raises(RequestError, match="broker 2 leads orders-1") as raised:
        session.partition("orders", 1, operation)
    assert raised.value.code == Code.NOT_LEADER_OR_FOLLOWER


def test_rights_come_before_leadership(broker: Broker, session: Session) -> None:
    assert isinstance(broker.authorizer, Refusing)
    broker.authorizer.deny(Operation.READ, Kind.TOPIC, "orders")
    with pytest.raises(RequestError) as raised:
        session.partition("orders", 1, Operation.READ)
    assert raised.value.code == Code.TOPIC_AUTHORIZATION_FAILED
    assert codes(session) == [Code.TOPIC_AUTHORIZATION_FAILED] * 2


def codes(session: Session) -> list[Code]:
    fetch = session.fetch([Wanted("orders", index, -1, 0, 1000) for index in (0, 1)], 1, 1000)
    assert fetch.run(session.clock, 0)
    answered: list[Fetched] = fetch.answer.value()
    assert all((one.slice.size > 0) == (one.code == Code.NONE) for one in answered)
    return [one.code for one in answered]


def test_a_fetch_reads_only_partitions_that_this_broker_leads(broker: Broker, session: Session) -> None:
    assert codes(session) == [Code.NONE, Code.NOT_LEADER_OR_FOLLOWER]
    led(broker).leaders.reverse()
    assert codes(session) == [Code.NOT_LEADER_OR_FOLLOWER, Code.NONE]


async def test_known_produce_requests_are_forgotten_when_a_leader_moves(broker: Broker, session: Session) -> None:
    door = KafkaDoor(Sessions(broker))
    shapes = door.known_for(session).shapes()
    shapes[9, b"known"] = None  # type: ignore[assignment]
    assert door.known_for(session).shapes()
    led(broker).leaders.reverse()
    broker.topics.changes += 1
    assert not door.known_for(session).shapes()
    door.abort()
