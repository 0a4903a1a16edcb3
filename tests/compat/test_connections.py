"""Connections of clients that are gone, that wait, or that are too many: real sockets, and a clock moved by hand.

The clock does not move by itself, so a wait of a minute lasts until the broker notices that the client hung up.
"""

from __future__ import annotations

import contextlib
import resource
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millstream.config import Config
from millstream.core.disk import Disk, OpenFile
from millstream.core.errors import Code
from millstream.core.metrics import Metrics
from millstream.doors.connections import Connections
from millstream.doors.kafka import protocol as kafka_protocol
from millstream.doors.listener import KEEPALIVE
from millstream.server import Server
from millstream.stores.sqlite_meta import SqliteMeta
from millstream.testing.clock import VirtualClock
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
        return sum(bool(getattr(each, "protocol", each)._in_line) for each in found._connections)  # type: ignore[union-attr]

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


def test_a_fetch_behind_a_produce_request_is_noticed_when_it_is_abandoned(
    broker: BrokerInThread, held_syncs: threading.Event
) -> None:
    """Sarama shares a connection between its producer and its consumer: the answer to the produce request, which comes
    while the fetch waits, does not end the fetch.
    """
    raw.create_topic(broker.address("kafka"), "written")
    before = open_connections(broker)
    for how in ("with bytes that wait", "without"):
        held_syncs.clear()
        client = Raw(broker.address("kafka"))
        client.send(raw.produce("written", raw.batch(b"one")) + raw.fetch("quiet", 0, wait_ms=60_000))
        wait_for(lambda: fetches(broker) == 1, "a fetch behind a produce request")
        held_syncs.set()
        assert client.answer(0, 9).responses[0].partition_responses[0].error_code == 0
        if how == "with bytes that wait":
            client.send(API_VERSIONS)
        client.close()
        until_open(broker, before)
        assert broker.ask(lambda server: wakers(server, "quiet")) == 0, "the fetch waits no more"


def fetches(broker: BrokerInThread) -> int:
    """How many wait for records."""
    return broker.ask(lambda server: wakers(server, "quiet"))


def wakers(server: Server, topic: str) -> int:
    found = server.broker.topics.find(topic)
    assert found is not None
    log: Any = found.partitions[0].log
    return len(log._wakers or ())


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
    wait_for(lambda: broker.ask(lambda server: log.high_watermark) == 3, "three records")


def test_an_abandoned_flume_join_is_closed_within_twenty_seconds(
    broker: BrokerInThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Joins of Flume's clients wait for no other client, but for the metadata: here for a disk that hangs."""
    may_go_on, write = threading.Event(), SqliteMeta._write

    def held(meta: SqliteMeta, *arguments: Any) -> None:
        assert may_go_on.wait(60)
        write(meta, *arguments)

    before = open_connections(broker)
    with flume.Flume(broker.address("flume")) as first:
        assert first.join("flumes", ["quiet"], session_ms=300_000).error == 0
        monkeypatch.setattr(SqliteMeta, "_write", held)
        join = flume.request(flume.JOIN_GROUP, 1, flume.join_payload("flumes", ["quiet"], session_ms=300_000))
        abandon(broker, [connected(broker.address("flume")) for _ in range(COUNT)], join, "flume")

        def are_gone() -> bool:
            broker.advance(0.5)
            return open_connections(broker) <= before + 1

        start = broker.clock.monotonic()
        wait_for(are_gone, "connections that are closed")
        assert broker.clock.monotonic() - start <= 20.5
        may_go_on.set()
    until_open(broker, before)


def test_a_flowmq_connection_that_is_reset_while_it_waits_for_memory_is_closed_at_once(
    broker: BrokerInThread,
) -> None:
    before = open_connections(broker)
    door = broker.ask(lambda server: server._doors[0])
    free = broker.ask(lambda server: door.frames.free)  # type: ignore[attr-defined]
    broker.ask(lambda server: door.frames.take(free))  # type: ignore[attr-defined]
    client = connected(broker.address("flowmq"))
    client.sendall(flowmq_frame(Command.PUBLISH, b"quiet\0" + bytes(200_000))[:150_000])
    wait_for(lambda: broker.ask(lambda server: door.frames.is_contested), "a frame that waits")  # type: ignore[attr-defined]
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ALONE)
    client.close()
    until_open(broker, before)
    broker.ask(lambda server: door.frames.give(free))  # type: ignore[attr-defined]


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


@contextlib.contextmanager
def unread(broker: BrokerInThread, topic: str, count: int) -> Iterator[list[socket.socket]]:
    """Clients that ask for more than their sockets hold, and read nothing."""
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(small_socket(broker.address("kafka"))) for _ in range(count)]
        for client in clients:
            client.sendall(raw.fetch(topic, 0, bytes_max=50 << 20))
        wait_for(lambda: broker.ask(unread_connections) == count, "answers that wait for their readers")
        yield clients


def small_socket(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((host, int(port)))
    return client


def unread_connections(server: Server) -> int:
    return sum(each.is_unread for each in server._kafka._connections)  # type: ignore[union-attr]


def test_clients_that_read_no_answers_make_room_for_others(tmp_path: Path) -> None:
    with BrokerInThread(tmp_path, connections_max=5, message_bytes_max=8 << 20, flush="os") as broker:
        address = broker.address("kafka")
        raw.create_topic(address, "large", max_message_bytes=str(8 << 20))
        with Raw(address) as producer:
            for _ in range(3):
                answer = producer.ask(raw.produce("large", raw.batch(bytes(7 << 20))))
                assert answer.responses[0].partition_responses[0].error_code == 0
        until_open(broker, 0)
        with unread(broker, "large", 5), contextlib.ExitStack() as stack:
            for _ in range(5):
                assert answers(stack.enter_context(from_address(address, "127.0.0.2")))
            assert broker.ask(lambda server: server.metrics.connections_evicted) == 5


@pytest.fixture
def held_syncs(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """While this is not set, no sync of a log ends."""
    may_go_on = threading.Event()
    may_go_on.set()
    sync = Disk.sync

    def held(disk: Disk, file: OpenFile) -> None:
        assert may_go_on.wait(60)
        sync(disk, file)

    monkeypatch.setattr(Disk, "sync", held)
    yield may_go_on
    may_go_on.set()


HELD_BACK = {
    "too much unsynced": {"partition_unsynced_bytes_max": 1024},
    "too many in line": {},
    "another request behind": {},
    "a fetch behind": {},
}


@contextlib.contextmanager
def producing(
    tmp_path: Path, held_syncs: threading.Event, monkeypatch: pytest.MonkeyPatch, why: str, **settings: int
) -> Iterator[tuple[BrokerInThread, Raw]]:
    """A producer whose connection is parked while its records wait for their sync."""
    if why == "too many in line":
        monkeypatch.setattr(kafka_protocol, "IN_LINE_MAX", 0)
    with BrokerInThread(tmp_path, **HELD_BACK[why], **settings) as broker:
        raw.create_topic(broker.address("kafka"), "written")
        until_open(broker, 0)
        held_syncs.clear()
        with Raw(broker.address("kafka")) as producer:
            behind = {"another request behind": API_VERSIONS, "a fetch behind": raw.fetch("written", 9, wait_ms=60_000)}
            producer.send(raw.produce("written", raw.batch(bytes(2000))) + behind.get(why, b""))
            wait_for(lambda: broker.ask(parked) == 1, "a parked producer")
            try:
                yield broker, producer
            finally:
                held_syncs.set()


def parked(server: Server) -> int:
    return sum(each.is_parked for each in server._kafka._connections)  # type: ignore[union-attr]


@pytest.mark.parametrize("why", HELD_BACK)
def test_a_producer_that_is_held_back_is_owed_its_answer_and_makes_no_room(
    tmp_path: Path, held_syncs: threading.Event, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    with producing(tmp_path, held_syncs, monkeypatch, why, connections_max=1) as (broker, producer):
        with from_address(broker.address("kafka"), "127.0.0.2") as refused, contextlib.suppress(ConnectionError):
            assert not answers(refused)
        assert broker.ask(lambda server: server.metrics.connections_evicted) == 0
        held_syncs.set()
        assert producer.answer(0, 9).responses[0].partition_responses[0].error_code == 0


@pytest.mark.parametrize("why", HELD_BACK)
def test_a_door_that_closes_waits_for_the_answers_of_producers_that_are_held_back(
    tmp_path: Path, held_syncs: threading.Event, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    with producing(tmp_path, held_syncs, monkeypatch, why) as (broker, producer):
        door = broker.ask(lambda server: server._kafka)
        closing = threading.Thread(target=broker._wait, args=(door.close(),))  # type: ignore[union-attr]
        closing.start()
        wait_for(lambda: broker.ask(lambda server: door._listener.fileno()) == -1, "a door that closes")  # type: ignore[union-attr]
        held_syncs.set()
        assert producer.answer(0, 9).responses[0].partition_responses[0].error_code == 0
        closing.join()


def test_where_all_connections_of_a_peer_are_owed_answers_another_peer_makes_room(
    tmp_path: Path, held_syncs: threading.Event
) -> None:
    with BrokerInThread(tmp_path, connections_max=5) as broker, contextlib.ExitStack() as stack:
        address = broker.address("kafka")
        raw.create_topic(address, "written")
        until_open(broker, 0)
        held_syncs.clear()
        stack.callback(held_syncs.set)
        idle = stack.enter_context(from_address(address, "127.0.0.2"))
        assert answers(idle)
        producers = [stack.enter_context(Raw(address)) for _ in range(4)]
        for producer in producers:
            producer.send(raw.produce("written", raw.batch(b"kept")))
        wait_for(lambda: waiting(broker) == 4, "producers that wait")
        with from_address(address, "127.0.0.3") as newcomer:
            assert answers(newcomer)
        assert idle.receive() == b""
        held_syncs.set()
        for producer in producers:
            assert producer.answer(0, 9).responses[0].partition_responses[0].error_code == 0


def test_kafka_clients_that_are_gone_without_a_word_are_detected(broker: BrokerInThread) -> None:
    def options(server: Server) -> list[list[int]]:
        assert server._kafka is not None
        transports: list[Any] = [each.transport for each in server._kafka._connections]
        return [
            [each._socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)]
            + [each._socket.getsockopt(socket.IPPROTO_TCP, option) for option, _ in KEEPALIVE]
            for each in transports
        ]

    with Raw(broker.address("kafka")) as client:
        assert answers(client)
        assert broker.ask(options) == [[1, *(value for _, value in KEEPALIVE)]]


@pytest.mark.parametrize(
    ("doors", "share"),
    [
        ({"http": "off"}, 750),
        ({"http": "127.0.0.1:0"}, 375),
        ({"http": "127.0.0.1:0", "flume": "127.0.0.1:0", "luxun": "127.0.0.1:0", "flowmq": "127.0.0.1:0"}, 150),
    ],
)
def test_the_open_doors_share_three_quarters_of_the_descriptors(
    monkeypatch: pytest.MonkeyPatch, doors: dict[str, str], share: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1000, 1000))
    config = Config(**doors)  # type: ignore[arg-type]
    assert Connections(config, Metrics(), VirtualClock())._limit == share


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
    assert "Too many open files" in errors and "closing an idle connection from 127.0.0.1" in errors


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
        with pytest.raises(FlowmqError, match="has created 2 queues, the limit per address"):
            clients[2].subscribe("jobs", "workers-2")
        clients[2].subscribe("jobs", "workers-1")
        for client in clients:
            client.close()
