"""Connections of clients that are gone, that wait, or that are too many: real sockets, and a clock moved by hand.

The clock does not move by itself, so a wait of a minute lasts until the broker notices that the client hung up.
"""

from __future__ import annotations

import contextlib
import resource
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from millstream.errors import Code
from millstream.server import Server
from millstream.wire.flowmq import Command
from millstream.wire.flowmq import frame as flowmq_frame
from tests.compat import client_flume as flume
from tests.compat import raw
from tests.compat.client_flowmq import FlowmqClient, FlowmqError
from tests.compat.clients import wait_for
from tests.compat.raw import Raw
from tests.compat.share_frames import Bare
from tests.in_thread import BrokerInThread
from tests.serving import ServedBroker

COUNT = 20
ALONE = struct.pack("ii", 1, 0)
"""SO_LINGER: closing resets the connection."""
API_VERSIONS = raw.request(18, 0, {})


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerInThread]:
    with BrokerInThread(tmp_path, flume="127.0.0.1:0", flowmq="127.0.0.1:0") as started:
        raw.create_topic(started.address("kafka"), "quiet")
        yield started


def open_connections(broker: BrokerInThread) -> int:
    return broker.ask(lambda server: server.metrics.connections_active)


def until_open(broker: BrokerInThread, count: int) -> None:
    wait_for(lambda: open_connections(broker) == count, f"{count} connections")


def connected(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=raw.TIMEOUT_SECONDS)


def joining(group: str, version: int = 3) -> bytes:
    """What librdkafka and kafka-python send to join: here a version that gives no member an id first."""
    fields = {
        "group_id": group,
        "session_timeout": 300_000,
        "rebalance_timeout": 300_000,
        "member_id": "",
        "protocol_type": "consumer",
        "protocols": [{"name": "range", "metadata": b"\0\0\0\1\0\5quiet\0\0\0\0"}],
    }
    return raw.request(11, version, fields)


def waiting(broker: BrokerInThread, door: str = "kafka") -> int:
    """How many connections wait for the answer to a request."""

    def count(server: Server) -> int:
        doors = [server._kafka, *server._doors]
        found = next(each for each in doors if type(each).__name__.lower() == f"{door}door")
        return sum(bool(each._in_line) for each in found._connections)  # type: ignore[union-attr]

    return broker.ask(count)


def abandon(broker: BrokerInThread, clients: list[socket.socket], request: bytes, door: str = "kafka") -> None:
    """Each has a request under way when it sends others and closes: what is sent last, nothing reads."""
    before = waiting(broker, door)
    for client in clients:
        client.sendall(request)
    wait_for(lambda: waiting(broker, door) == before + len(clients), "requests that wait")
    received = broker.ask(lambda server: server.metrics.bytes_in)
    for client in clients:
        client.sendall(request)
    if door == "flume":  # reads one request ahead
        received += len(request) * len(clients)
        wait_for(lambda: broker.ask(lambda server: server.metrics.bytes_in) == received, "one request more of each")
    for client in clients:
        client.sendall(request)
        client.close()


# -- hang-ups ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["closed", "reset"])
def test_an_abandoned_fetch_is_noticed_although_a_request_waits_behind_it(broker: BrokerInThread, how: str) -> None:
    before = open_connections(broker)
    clients = [connected(broker.address("kafka")) for _ in range(COUNT)]
    if how == "reset":
        for client in clients:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ALONE)
    abandon(broker, clients, raw.fetch("quiet", 0, wait_ms=60_000))
    until_open(broker, before)


def test_an_abandoned_join_is_noticed_although_a_request_waits_behind_it(broker: BrokerInThread) -> None:
    before = open_connections(broker)
    with Raw(broker.address("kafka")) as first:
        assert first.ask(joining("abandoned")).error_code == 0
        abandon(broker, [connected(broker.address("kafka")) for _ in range(COUNT)], joining("abandoned"))
        until_open(broker, before + 1)
    until_open(broker, before)


def test_an_abandoned_share_fetch_is_noticed_although_a_request_waits_behind_it(broker: BrokerInThread) -> None:
    before = open_connections(broker)
    topic = broker.ask(lambda server: server.broker.topics.find("quiet")).id  # type: ignore[union-attr]
    worker = Bare(broker.address("kafka"), "workers", "quiet")
    worker.fetch(0, {(topic, 0): ()})
    abandon(broker, [worker.raw.socket], worker.fetch_frame(1, wait_ms=60_000))
    until_open(broker, before)


def test_a_client_that_stops_sending_gets_all_answers_without_waiting_for_records(broker: BrokerInThread) -> None:
    """`printf … | nc -N`: every answer comes in its place, and a long poll ends as if its time were over."""
    with Raw(broker.address("kafka")) as client:
        client.send(raw.fetch("quiet", 0, wait_ms=60_000))
        wait_for(lambda: waiting(broker) > 0, "a fetch that waits")
        client.send(API_VERSIONS + raw.fetch("quiet", 0, wait_ms=60_000) + API_VERSIONS)
        client.socket.shutdown(socket.SHUT_WR)
        for _ in range(2):
            assert not client.answer(1, 11).responses[0].partitions[0].records
            assert client.answer(18, 0).error_code == 0
        assert client.receive() == b""


def test_records_without_acknowledgement_are_stored_although_their_producer_hung_up(broker: BrokerInThread) -> None:
    """Behind a long poll of the same connection, as Sarama shares one between its producer and its consumer."""
    raw.create_topic(broker.address("kafka"), "unacknowledged")
    with Raw(broker.address("kafka")) as client:
        client.send(raw.fetch("quiet", 0, wait_ms=60_000))
        wait_for(lambda: waiting(broker) > 0, "a fetch that waits")
        client.send(raw.produce("unacknowledged", raw.batch(b"kept"), acks=0) * 3)
    log = broker.ask(lambda server: server.broker.topics.find("unacknowledged")).partitions[0].log  # type: ignore[union-attr]
    wait_for(lambda: broker.ask(lambda server: log.durable) == 3, "three records")


def test_an_abandoned_flume_join_is_closed_within_twenty_seconds(broker: BrokerInThread) -> None:
    before = open_connections(broker)
    with flume.Flume(broker.address("flume")) as first:
        assert first.join("flumes", ["quiet"], session_ms=300_000).error == 0
        join = flume.request(flume.JOIN_GROUP, 1, flume.join_payload("flumes", ["quiet"], session_ms=300_000))
        abandon(broker, [connected(broker.address("flume")) for _ in range(COUNT)], join, "flume")

        def are_gone() -> bool:
            broker.advance(0.5)
            return open_connections(broker) <= before + 1

        start = broker.clock.monotonic()
        wait_for(are_gone, "connections that are closed")
        assert broker.clock.monotonic() - start <= 20.5
    until_open(broker, before)


def test_a_flowmq_connection_that_is_reset_while_it_waits_for_memory_is_closed_at_once(
    broker: BrokerInThread,
) -> None:
    before = open_connections(broker)
    door = broker.ask(lambda server: server._doors[0])
    free = broker.ask(lambda server: door.budget.free)  # type: ignore[attr-defined]
    broker.ask(lambda server: door.budget.take(free))  # type: ignore[attr-defined]
    client = connected(broker.address("flowmq"))
    client.sendall(flowmq_frame(Command.PUBLISH, b"quiet\0" + bytes(200_000))[:150_000])
    wait_for(lambda: broker.ask(lambda server: door.budget.is_contested), "a frame that waits")  # type: ignore[attr-defined]
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ALONE)
    client.close()
    until_open(broker, before)
    broker.ask(lambda server: door.budget.give(free))  # type: ignore[attr-defined]


# -- too many ----------------------------------------------------------------------------------------------------------


def from_address(address: str, source: str) -> Raw:
    """A client of another host: all of 127.0.0.0/8 is this machine."""
    host, _, port = address.rpartition(":")
    client = Raw.__new__(Raw)
    client.socket = socket.create_connection((host, int(port)), raw.TIMEOUT_SECONDS, source_address=(source, 0))
    return client


def answers(client: Raw) -> bool:
    answer = client.ask(API_VERSIONS)
    return answer is not None and answer.error_code == 0


def test_a_client_that_takes_all_connections_makes_room_for_others(tmp_path: Path) -> None:
    with BrokerInThread(tmp_path, connections_max=COUNT) as broker, contextlib.ExitStack() as stack:
        raw.create_topic(broker.address("kafka"), "quiet")
        until_open(broker, 0)
        other = stack.enter_context(from_address(broker.address("kafka"), "127.0.0.2"))
        assert answers(other)
        greedy = [stack.enter_context(Raw(broker.address("kafka"))) for _ in range(COUNT - 1)]
        for client in greedy:
            client.send(raw.fetch("quiet", 0, wait_ms=60_000))
        wait_for(lambda: waiting(broker) == COUNT - 1, "fetches that wait")
        newcomers = [stack.enter_context(from_address(broker.address("kafka"), "127.0.0.3")) for _ in range(5)]
        assert all(map(answers, newcomers))
        assert [client.receive() for client in greedy[:5]] == [b""] * 5, "the oldest went"
        assert answers(other), "a client with one connection keeps it"
        assert broker.ask(lambda server: server.metrics.connections_evicted) == 5


def test_of_too_many_flowmq_connections_the_quietest_makes_room(tmp_path: Path) -> None:
    with BrokerInThread(tmp_path, flowmq="127.0.0.1:0", connections_max=3) as broker, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(FlowmqClient(broker.address("flowmq"))) for _ in range(3)]
        until_open(broker, 3)
        broker.advance(11)
        for client in (clients[0], clients[2]):
            assert client.ping() == b""
        newcomer = stack.enter_context(FlowmqClient(broker.address("flowmq")))
        assert newcomer.ping() == b""
        with pytest.raises(ConnectionError):
            clients[1].ping()
        assert clients[0].ping() == clients[2].ping() == b""


def test_an_address_has_no_more_connections_than_its_share(tmp_path: Path) -> None:
    with BrokerInThread(tmp_path, connections_per_peer_max=3) as broker, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(Raw(broker.address("kafka"))) for _ in range(3)]
        assert all(map(answers, clients))
        with Raw(broker.address("kafka")) as refused, contextlib.suppress(ConnectionError):
            assert not answers(refused)
        with from_address(broker.address("kafka"), "127.0.0.2") as other:
            assert answers(other)
        assert broker.ask(lambda server: server.metrics.connections_refused) == 1
        clients[0].close()
        until_open(broker, 2)
        with Raw(broker.address("kafka")) as again:
            assert answers(again)


def test_without_descriptors_a_quiet_connection_makes_room_for_a_new_one(tmp_path: Path) -> None:
    with ServedBroker(tmp_path) as broker, contextlib.ExitStack() as stack:
        resource.prlimit(broker.pid, resource.RLIMIT_NOFILE, (100, 100))
        for _ in range(150):
            client = stack.enter_context(Raw(broker.address))
            assert answers(client)
        errors = broker.errors()
    assert "Too many open files" in errors and "closing a quiet connection from 127.0.0.1" in errors


# -- groups ------------------------------------------------------------------------------------------------------------


def committing(group: str) -> bytes:
    """An offset of a group that its client is no member of, as kcat and the command-line tools store it."""
    partition = {"partition_index": 0, "committed_offset": 0, "committed_leader_epoch": -1, "committed_metadata": ""}
    fields = {
        "group_id": group,
        "generation_id_or_member_epoch": -1,
        "member_id": "",
        "group_instance_id": None,
        "topics": [{"name": "quiet", "partitions": [partition]}],
    }
    return raw.request(8, 8, fields)


def test_the_clients_of_one_address_cannot_take_all_groups(tmp_path: Path) -> None:
    with BrokerInThread(tmp_path, groups_max=10, groups_per_peer_max=4) as broker:
        raw.create_topic(broker.address("kafka"), "quiet")
        with Raw(broker.address("kafka")) as greedy, from_address(broker.address("kafka"), "127.0.0.2") as other:
            assert [greedy.ask(joining(f"joined-{number}")).error_code for number in range(2)] == [0, 0]
            codes = [greedy.ask(committing(f"committed-{number}")) for number in range(3)]
            assert [each.topics[0].partitions[0].error_code for each in codes] == [0, 0, Code.POLICY_VIOLATION]
            assert greedy.ask(joining("one more")).error_code == Code.POLICY_VIOLATION
            assert greedy.ask(committing("committed-1")).topics[0].partitions[0].error_code == 0
            assert other.ask(joining("another")).error_code == 0


def test_the_flowmq_clients_of_one_address_cannot_take_all_queues(tmp_path: Path) -> None:
    with BrokerInThread(tmp_path, flowmq="127.0.0.1:0", groups_max=10, groups_per_peer_max=2) as broker:
        clients = [FlowmqClient(broker.address("flowmq")) for _ in range(3)]
        for number, client in enumerate(clients[:2]):
            client.subscribe("jobs", f"workers-{number}")
        with pytest.raises(FlowmqError, match="has made 2 queues, the share of one address"):
            clients[2].subscribe("jobs", "workers-2")
        clients[2].subscribe("jobs", "workers-1")
        for client in clients:
            client.close()
