"""The Comet door against clients that mean harm or are broken: each costs its own call, or its own connection."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from millstream.broker.groups.stream import polling
from millstream.doors.comet import calls
from millstream.server import Server
from tests.compat.client_comet import METHODS, Comet
from tests.compat.http2 import HEADERS, PREFACE, SETTINGS, Http2, frame
from tests.in_thread import BrokerInThread

MIB = 1 << 20


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerInThread]:
    with BrokerInThread(tmp_path_factory.mktemp("comet"), comet="127.0.0.1:0") as started:
        yield started


@pytest.fixture
def client(broker: BrokerInThread) -> Iterator[Comet]:
    with Comet(broker.address("comet")) as channel:
        channel.CreateTopic(name="t", partitions=1)
        yield channel
        assert channel.ListTopics().topics, "the door goes on"


def refused(client: Comet, method: str, data: bytes) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as raised:
        client.raw(method, data)
    return raised.value.code(), raised.value.details()


def test_a_message_above_4_mib_costs_its_call(client: Comet) -> None:
    request = client.messages.ProduceRequest(topic="t", records=[{"value": bytes(4 * MIB)}])
    code, details = refused(client, "Produce", request.SerializeToString())
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details


def test_bytes_that_are_no_message_cost_their_call(client: Comet) -> None:
    dice = random.Random(5)
    for number in range(300):
        method = METHODS[number % len(METHODS)]
        try:
            client.raw(method, dice.randbytes(dice.randrange(1, 60)))
        except grpc.RpcError as error:
            assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, (method, error.details())
    code, details = refused(client, "CreateTopic", b"\x0a\x02\xff\xfe")
    assert code == grpc.StatusCode.INVALID_ARGUMENT and "UTF-8" in details
    assert refused(client, "Watch", b"")[0] == grpc.StatusCode.UNIMPLEMENTED


def test_millions_of_empty_elements_are_refused_before_they_take_memory(client: Comet) -> None:
    begun = time.process_time()
    for method, field in (("Produce", 2), ("GetMetadata", 1), ("Replicate", 3)):
        element = bytes([field << 3 | 2, 0])
        code, details = refused(client, method, element * (2 * MIB - 100))
        assert code == grpc.StatusCode.INVALID_ARGUMENT and "more than 10000 elements" in details
    assert time.process_time() - begun < 2
    assert client.raw("GetMetadata", b"\x0a\x00" * 10_000)
    assert len(client.produce("t", *[b""] * 10_000)) == 10_000


def test_garbage_on_the_port_costs_its_connection(broker: BrokerInThread, client: Comet) -> None:
    host, _, port = broker.address("comet").rpartition(":")
    dice = random.Random(7)
    beginnings = (b"", PREFACE, PREFACE + frame(SETTINGS, 0, 0), b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\x0c")
    for beginning in beginnings * 6:
        with socket.create_connection((host, int(port)), 20) as connection:
            connection.sendall(beginning + dice.randbytes(dice.randrange(1, 4000)))
    for _ in range(20):
        with Http2(broker.address("comet")) as connection:
            connection.open(1, "Poll")
            connection.socket.sendall(
                frame(dice.randrange(12), dice.randrange(256), dice.randrange(4), dice.randbytes(50))
            )


def test_a_call_without_a_request_is_invalid(broker: BrokerInThread, client: Comet) -> None:
    with Http2(broker.address("comet")) as connection:
        connection.open(1, "Poll", end=True)
        assert b"grpc-status" in connection.receive_until(HEADERS, 1).body


def test_a_connection_may_have_a_hundred_calls_in_flight(broker: BrokerInThread, client: Comet) -> None:
    with Http2(broker.address("comet")) as connection:
        body = connection.receive_until(SETTINGS).body
        settings = {
            int.from_bytes(body[at : at + 2]): int.from_bytes(body[at + 2 : at + 6]) for at in range(0, len(body), 6)
        }
    assert settings[3] == 100


def test_a_client_that_does_not_send_its_request_is_disconnected(broker: BrokerInThread, client: Comet) -> None:
    with Http2(broker.address("comet")) as connection:
        connection.open(1, "Produce")
        connection.send(1, b"begun", size=1000)
        wait_for(lambda: broker.ask(reading) == 1)
        broker.advance(59)
        assert in_flight(broker) == 1
        broker.advance(3)
        assert connection.has_ended()
    wait_for_calls(broker, 0)


def test_a_client_that_does_not_take_its_answer_is_disconnected(broker: BrokerInThread, client: Comet) -> None:
    client.produce("t", bytes(100_000))
    with Http2(broker.address("comet"), initial_window=0) as connection:
        connection.open(1, "Consume")
        connection.send(1, client.messages.ConsumeRequest(topic="t").SerializeToString())
        wait_for(lambda: broker.ask(answering) == 1)
        broker.advance(62)
        assert connection.has_ended()
    wait_for_calls(broker, 0)


def test_clients_that_hold_the_memory_are_disconnected_after_ten_seconds_while_others_wait(tmp_path: Path) -> None:
    """Room for one request and one answer at a time."""
    with (
        BrokerInThread(tmp_path, comet="127.0.0.1:0", inflight_bytes_max=8 * MIB) as broker,
        Comet(broker.address("comet")) as client,
    ):
        client.CreateTopic(name="t", partitions=1)
        client.produce("t", bytes(100_000))
        with Http2(broker.address("comet"), initial_window=0) as reader:
            reader.open(1, "Consume")
            reader.send(1, client.messages.ConsumeRequest(topic="t").SerializeToString())
            wait_for(lambda: broker.ask(answering) == 1)
            with Http2(broker.address("comet")) as writer:
                writer.open(1, "Produce")
                writer.send(1, b"begun", size=1000)
                wait_for(lambda: broker.ask(reading) == 1)
                answers: list[Any] = []
                waiting = threading.Thread(target=lambda: answers.append(client.consume("t")))
                waiting.start()
                wait_for_calls(broker, 3)
                broker.advance(9)
                assert not answers
                broker.advance(3)
                waiting.join(20)
                assert answers == [[(0, bytes(100_000))]]
                assert writer.has_ended()
        wait_for_calls(broker, 0)
        assert broker.ask(budgets) == [(4 * MIB, False), (4 * MIB, False)], "all memory is given back"


def door_calls(server: Server) -> calls.Calls:
    [door] = [each for each in server._doors if each.name == "comet"]  # type: ignore[attr-defined]
    found: calls.Calls = door._calls  # type: ignore[attr-defined]
    return found


def budgets(server: Server) -> list[tuple[int, bool]]:
    found = door_calls(server)
    return [(budget.free, budget.is_contested) for budget in (found.requests, found.answers)]


def in_flight(broker: BrokerInThread) -> int:
    return broker.ask(lambda server: len(door_calls(server)))


def reading(server: Server) -> int:
    """Calls whose clients have not sent their requests."""
    return sum(call.since is not None and call._request_room > 0 for call in door_calls(server)._open)


def answering(server: Server) -> int:
    """Calls of clients that have not taken an answer with a record."""
    return sum(call.since is not None and call._answer_room > 1000 for call in door_calls(server)._open)


def wait_for_calls(broker: BrokerInThread, count: int) -> None:
    wait_for(lambda: in_flight(broker) == count)


def wait_for(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_client_that_gives_up_leaves_nothing_behind(broker: BrokerInThread, client: Comet) -> None:
    for _ in range(20):
        with Http2(broker.address("comet")) as connection:
            for stream in range(1, 41, 2):
                connection.open(stream, "Poll")
                connection.send(stream, b"begun", size=1000)
            connection.receive_until(SETTINGS)
    wait_for(lambda: broker.ask(budgets) == [(128 * MIB, False)] * 2 and not in_flight(broker))


async def test_an_address_has_half_of_all_calls_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "CALLS_MAX", 4)
    from millstream.config import Config
    from millstream.core.metrics import Metrics
    from millstream.testing.clock import VirtualClock

    class Context:
        def __init__(self, peer: str) -> None:
            self._peer = peer

        def peer(self) -> str:
            return self._peer

        def add_done_callback(self, callback: object) -> None:
            pass

        async def abort(self, code: grpc.StatusCode, details: str) -> None:
            raise PermissionError(code)

    door = calls.Calls(Config(), VirtualClock(0), Metrics())
    first = [await door.open(Context(f"ipv4:10.0.0.1:{port}")) for port in range(2)]
    with pytest.raises(PermissionError):
        await door.open(Context("ipv4:10.0.0.1:9"))
    for number in range(3):
        await door.open(Context(f"ipv4:127.0.0.1:{number}"))
    await door.open(Context("ipv6:%5B2001:db8::1%5D:9"))
    first[0].close()
    await door.open(Context("ipv4:10.0.0.1:9"))
    assert calls.host_of("ipv6:%5B::ffff:10.0.0.1%5D:9") == "10.0.0.1"


def test_members_and_groups_are_bounded(broker: BrokerInThread, client: Comet, monkeypatch: pytest.MonkeyPatch) -> None:
    live = sum(broker.ask(lambda server: [each.members for each in server.broker.groups.list()]))
    assert live == 0
    broker.ask(lambda server: server.broker.polling._members.clear())
    monkeypatch.setattr(polling, "MEMBERS_MAX", 3)
    members = [client.Subscribe(topic="t", group=f"bounded-{number}") for number in range(4)]
    assert [each.error == "" for each in members] == [True, True, True, False]
    assert "3 members that poll, the limit" in members[3].error
    client.Unsubscribe(topic="t", group="bounded-0", member_id=members[0].member_id)
    assert client.Subscribe(topic="t", group="bounded-3").error == ""
    broker.advance(11)
    assert client.Subscribe(topic="t", group="bounded-4").error == ""


def test_thousands_of_topics_are_listed_without_a_stall(tmp_path: Path) -> None:
    async def create(server: Server) -> None:
        for number in range(1_000):
            await server.broker.topics.create(f"topic-{number}", 10, {})

    with (
        BrokerInThread(tmp_path, store="memory:", comet="127.0.0.1:0", comet_broker_id="x" * 36) as broker,
        Comet(broker.address("comet")) as client,
    ):
        broker._wait(create(broker._server))  # type: ignore[arg-type]
        assert len(client.ListTopics().topics) == 1_000
        metadata = client.GetMetadata(topics=[f"topic-{number}" for number in range(10_000)])
        assert sum(len(each.partitions) for each in metadata.topics) == 10_000
        assert metadata == client.GetMetadata()


def test_connections_are_bounded(tmp_path: Path) -> None:
    with BrokerInThread(tmp_path, comet="127.0.0.1:0", connections_max=5) as broker:
        open_now: list[Http2] = []
        served = 0
        for _ in range(8):
            connection = Http2(broker.address("comet"))
            connection.socket.settimeout(1)
            open_now.append(connection)
            with contextlib.suppress(TimeoutError, ConnectionError):
                served += connection.receive() is not None
        assert served == 5
        for connection in open_now:
            connection.close()
