"""A refusing authorizer behind the FlowMQ, Flume, Luxun and Comet doors: a refusal is an answer of the protocol. It
changes nothing, and leaves the connection open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from millstream.security.rights import CLUSTER_NAME, Kind, Operation
from millstream.server import Server
from tests.compat import client_flume as flume
from tests.compat.client_comet import Comet
from tests.compat.client_flowmq import FlowmqClient, FlowmqError
from tests.compat.client_flume import Flume
from tests.compat.client_luxun import Luxun
from tests.in_thread import BrokerInThread
from tests.refusing import Refusing

DOORS = dict.fromkeys(("flowmq", "flume", "luxun", "comet"), "127.0.0.1:0")
LATEST = -1


class Guarded:
    """A broker with rules that the test changes."""

    def __init__(self, broker: BrokerInThread) -> None:
        self._broker = broker
        self.rules = Refusing()
        broker.ask(lambda server: setattr(server.broker, "authorizer", self.rules))

    def address(self, door: str) -> str:
        return self._broker.address(door)

    def deny(self, operation: Operation, kind: Kind, *names: str) -> None:
        def deny_all(server: Server) -> None:
            for name in names:
                self.rules.deny(operation, kind, name)

        self._broker.ask(deny_all)

    def deny_creation(self, *names: str) -> None:
        self.deny(Operation.CREATE, Kind.CLUSTER, CLUSTER_NAME)
        self.deny(Operation.CREATE, Kind.TOPIC, *names)

    def allow_all(self) -> None:
        def allow(server: Server) -> None:
            self.rules.denied.clear()
            self.rules.changes += 1

        self._broker.ask(allow)

    def state(self) -> tuple[dict[str, int], list[str], list[str]]:
        """Topics with their number of records, groups, and cursors with their positions."""

        def look(server: Server) -> Any:
            topics = {topic.name: sum(each.log.end for each in topic.partitions) for topic in server.broker.topics}
            groups = [f"{each.group_id} {each.members}" for each in server.broker.groups.list()]
            return topics, sorted(groups), sorted(map(str, server.broker.cursors.positions()))

        found: tuple[dict[str, int], list[str], list[str]] = self._broker.ask(look)
        return found


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Guarded]:
    running = BrokerInThread(tmp_path, **DOORS).start()
    yield Guarded(running)
    running.stop()


# -- FlowMQ ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def worker(broker: Guarded) -> Iterator[FlowmqClient]:
    with FlowmqClient(broker.address("flowmq")) as client:
        yield client


def refused(call: Callable[..., Any], *arguments: Any) -> str:
    with pytest.raises(FlowmqError) as raised:
        call(*arguments)
    return str(raised.value)


def test_flowmq_refuses_each_command_with_an_error(broker: Guarded, worker: FlowmqClient) -> None:
    for topic in ("jobs", "open"):
        worker.publish(topic, b"first")
    before = broker.state()
    for operation in (Operation.WRITE, Operation.READ, Operation.DELETE, Operation.DESCRIBE):
        broker.deny(operation, Kind.TOPIC, "jobs")
    broker.deny(Operation.READ, Kind.GROUP, "secret")
    broker.deny_creation("new", "jobs")
    assert refused(worker.publish, "jobs", b"x") == "User:ANONYMOUS may not write topic jobs"
    assert refused(worker.publish, "new", b"x") == "User:ANONYMOUS may not create topic new"
    assert refused(worker.create_topic, "new") == "User:ANONYMOUS may not create topic new"
    assert refused(worker.create_topic, "jobs") == "User:ANONYMOUS may not create topic jobs"
    assert refused(worker.delete_topic, "jobs") == "User:ANONYMOUS may not delete topic jobs"
    assert refused(worker.subscribe, "jobs") == "User:ANONYMOUS may not read topic jobs"
    assert refused(worker.subscribe, "jobs", "workers") == "User:ANONYMOUS may not read topic jobs"
    assert refused(worker.subscribe, "open", "secret") == "User:ANONYMOUS may not read group secret"
    assert refused(worker.subscribe, "new") == "User:ANONYMOUS may not create topic new"
    assert refused(worker.subscribe, "new", "secret") == "User:ANONYMOUS may not read group secret"
    assert worker.list_topics() == ["open"]
    assert broker.state() == before
    worker.subscribe("open", "workers")
    assert worker.next().payload == b"first"


def test_flowmq_stops_at_a_right_that_is_gone_and_goes_on_when_it_is_back(
    broker: Guarded, worker: FlowmqClient
) -> None:
    with FlowmqClient(broker.address("flowmq")) as publisher:
        worker.subscribe("jobs", "workers")
        publisher.publish("jobs", b"1")
        first = worker.next()
        broker.deny(Operation.READ, Kind.GROUP, "workers")
        publisher.publish("jobs", b"2")
        assert worker.has_nothing()
        for answer in (worker.ack, worker.nack):
            assert refused(answer, first) == "User:ANONYMOUS may not read group workers"
        broker.allow_all()
        publisher.publish("jobs", b"3")
        assert [each.payload for each in worker.take(2)] == [b"2", b"3"]
        worker.ack(first)
        broker.deny(Operation.WRITE, Kind.TOPIC, "jobs")
        assert "may not write" in refused(publisher.publish, "jobs", b"4")


# -- Flume -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def client(broker: Guarded) -> Iterator[Flume]:
    with Flume(broker.address("flume")) as connection:
        yield connection


def test_flume_refuses_each_request_with_error_1(broker: Guarded, client: Flume) -> None:
    for topic in ("orders", "open"):
        assert client.produce(topic, b"first", partition=0) == (0, 0, flume.NONE)
    assert client.commit("readers", "orders", 0, 1) == flume.NONE
    member = client.join("readers", ["orders"])
    before = broker.state()
    for operation in (Operation.WRITE, Operation.READ, Operation.DESCRIBE):
        broker.deny(operation, Kind.TOPIC, "orders")
        broker.deny(operation, Kind.GROUP, "secret", "readers")
    broker.deny_creation("new")
    assert client.produce("orders", b"x", partition=0) == (0, -1, flume.UNKNOWN)
    assert client.produce("new", b"x").error == flume.UNKNOWN
    assert client.fetch("orders", 0, 0) == (flume.UNKNOWN, [])
    assert client.join("others", ["orders"]).error == flume.UNKNOWN
    assert client.join("secret", ["open"]).error == flume.UNKNOWN
    assert client.heartbeat("readers", member.generation, member.member) == flume.UNKNOWN
    assert client.leave("readers", member.member) == flume.UNKNOWN
    assert client.commit("secret", "open", 0, 1) == flume.UNKNOWN
    assert client.commit("others", "orders", 0, 1) == flume.UNKNOWN
    assert client.committed("secret", "open", 0)[0] == flume.UNKNOWN
    assert client.committed("others", "orders", 0)[0] == flume.UNKNOWN
    assert broker.state() == before
    assert client.produce("open", b"second", partition=0) == (0, 1, flume.NONE)
    assert client.fetch("open", 0, 0).records == [(0, b"first"), (1, b"second")]
    assert client.join("others", ["open"]).error == flume.NONE


def test_flume_refuses_a_pipelined_record_once_its_right_is_gone(broker: Guarded, client: Flume) -> None:
    assert client.produce("orders", b"1", partition=0) == (0, 0, flume.NONE)
    assert client.produce("orders", b"2", partition=0) == (0, 1, flume.NONE)
    broker.deny(Operation.WRITE, Kind.TOPIC, "orders")
    for _ in range(3):
        client.send(flume.PRODUCE, flume.produce_payload("orders", b"x", partition=0))
    assert [flume.produced(client.receive()[1]) for _ in range(3)] == [(0, -1, flume.UNKNOWN)] * 3
    broker.allow_all()
    assert client.produce("orders", b"3", partition=0) == (0, 2, flume.NONE)


# -- Luxun -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def luxun(broker: Guarded, generated: tuple[Any, Any]) -> Iterator[Luxun]:
    with Luxun(broker.address("luxun"), generated) as connection:
        yield connection


def test_luxun_refuses_each_call_in_its_result(broker: Guarded, luxun: Luxun) -> None:
    def refusal(response: Any) -> str:
        assert response.result.resultCode == luxun.types.ResultCode.FAILURE
        assert response.result.errorCode == luxun.types.ErrorCode.INTERNAL_ERROR
        text: str = response.result.errorMessage
        return text

    for topic in ("items", "open"):
        luxun.produce(topic, b"first")
    luxun.consume("items", "reader")
    before = broker.state()
    for operation in (Operation.WRITE, Operation.READ, Operation.DELETE, Operation.DESCRIBE):
        broker.deny(operation, Kind.TOPIC, "items")
        broker.deny(operation, Kind.GROUP, "secret")
    broker.deny_creation("new")
    assert refusal(luxun.produce("items", b"x")) == "User:ANONYMOUS may not write topic items"
    assert refusal(luxun.produce("new", b"x")) == "User:ANONYMOUS may not create topic new"
    assert refusal(luxun.consume("items", index=0)) == "User:ANONYMOUS may not read topic items"
    assert refusal(luxun.consume("items", "reader")) == "User:ANONYMOUS may not read topic items"
    assert refusal(luxun.consume("open", "secret")) == "User:ANONYMOUS may not read group secret"
    assert refusal(luxun.find("items", LATEST)) == "User:ANONYMOUS may not describe topic items"
    assert refusal(luxun.size("items")) == "User:ANONYMOUS may not describe topic items"
    assert refusal(luxun.size("open", "secret")) == "User:ANONYMOUS may not describe group secret"
    assert refusal(luxun.delete("items", "")) == "User:ANONYMOUS may not delete topic items"
    for topic in ("items", "new"):
        luxun.async_produce(topic, b"x")
    assert refusal(luxun.consume("items", index=0)), "the oneway items before it were refused, too"
    assert broker.state() == before
    assert luxun.produce("open", b"second").index == 1
    assert luxun.consume("open", "reader", size=100).itemList == [b"first", b"second"]


# -- Comet -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def comet(broker: Guarded) -> Iterator[Comet]:
    with Comet(broker.address("comet")) as connection:
        yield connection


def test_comet_refuses_each_call_in_its_error(broker: Guarded, comet: Comet) -> None:
    for topic in ("prices", "open"):
        assert comet.CreateTopic(name=topic, partitions=1).success
        comet.produce(topic, b"first")
    member = comet.Subscribe(topic="prices", group="readers").member_id
    assert len(comet.Poll(topic="prices", group="readers", member_id=member).messages) == 1
    hidden = comet.Subscribe(topic="open", group="secret").member_id
    before = broker.state()
    for operation in (Operation.WRITE, Operation.READ, Operation.DELETE, Operation.DESCRIBE):
        broker.deny(operation, Kind.TOPIC, "prices")
        broker.deny(operation, Kind.GROUP, "secret")
    broker.deny(Operation.CLUSTER_ACTION, Kind.CLUSTER, CLUSTER_NAME)
    broker.deny_creation("new", "prices")
    record = {"offset": 1, "value": b"x", "timestamp": 1}
    for answer, refusal in (
        (comet.CreateTopic(name="new", partitions=1), "create topic new"),
        (comet.CreateTopic(name="prices", partitions=1), "create topic prices"),
        (comet.DeleteTopic(name="prices"), "delete topic prices"),
        (comet.Produce(topic="prices", records=[{"value": b"x"}]), "write topic prices"),
        (comet.Consume(topic="prices"), "read topic prices"),
        (comet.Subscribe(topic="prices", group="others"), "read topic prices"),
        (comet.Subscribe(topic="open", group="secret"), "read group secret"),
        (comet.Poll(topic="prices", group="readers", member_id=member), "read topic prices"),
        (comet.Poll(topic="open", group="secret", member_id=hidden), "read group secret"),
        (comet.Unsubscribe(topic="prices", group="readers", member_id=member), "read topic prices"),
        (comet.Unsubscribe(topic="open", group="secret", member_id=hidden), "read group secret"),
        (comet.Replicate(topic="open", records=[record]), "cluster action cluster kafka-cluster"),
        (comet.Replicate(topic="new"), "cluster action cluster kafka-cluster"),
    ):
        assert answer.error == f"User:ANONYMOUS may not {refusal}"
    assert [each.name for each in comet.ListTopics().topics] == ["open"]
    for asked in ([], ["prices", "open"]):
        assert [each.name for each in comet.GetMetadata(topics=asked).topics] == ["open"]
    assert broker.state() == before
    assert comet.produce("open", b"second") == [(0, 1)]
    broker.allow_all()
    assert comet.Replicate(topic="open", records=[{**record, "offset": 2}]).success
    assert len(comet.Poll(topic="open", group="secret", member_id=hidden).messages) == 3
