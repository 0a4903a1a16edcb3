"""Bytes that no client sends, on FlowMQ's port: an ERROR or a closed connection, and no effect on other clients."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.compat.client_flowmq import (
    ACK,
    ERROR,
    LIST_TOPICS,
    PING,
    PUBLISH,
    SUBSCRIBE,
    FlowmqClient,
    FlowmqError,
)
from tests.serving import ServedBroker

MB = 1 << 20
RSS_GROWTH_MAX = 96 * MB
LEFT = [f"left-{number}" for number in range(5)]
LONG = [f"{'long' * 50}-{number}" for number in range(50)]
COMMANDS = [*range(0x12), 0x77, 0xFE, 0xFF]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedBroker]:
    directory = tmp_path_factory.mktemp("flowmq-hostile")
    config = directory / "millstream.toml"
    config.write_text("partitions_max = 300\nconnections_max = 200\ninflight_bytes_max = 33554432\n")
    with ServedBroker(directory / "data", "--flowmq", "127.0.0.1:0", "--config", str(config)) as served:
        with open_client(served) as client:  # random names will use up the rest of the partitions
            for name in ("precious", "precious-too", "heavy", *LEFT, *LONG):
                client.create_topic(name)
        yield served


@pytest.fixture(autouse=True)
def unharmed(target: ServedBroker) -> Iterator[None]:
    """While each test runs another client works; after it the broker lives and met nothing that it did not expect."""
    seen = len(target.errors())
    with open_client(target) as worker:
        worker.subscribe("precious", "workers")
        yield
        name = worker.publish("precious", b"still here")
        message = worker.next()
        assert (message.id, message.payload) == (name, b"still here")
        worker.ack(message)
    log = target.errors()[seen:]
    assert target.is_running
    assert "Traceback" not in log and "failed" not in log, log[max(log.find("Traceback") - 500, 0) :][:4000]


def open_client(target: ServedBroker) -> FlowmqClient:
    return FlowmqClient(target.doors["flowmq"])


def everything(client: FlowmqClient) -> bytes:
    """What the broker sends until it closes the connection."""
    data = bytearray()
    with contextlib.suppress(ConnectionResetError):
        while piece := client.socket.recv(1 << 16):
            data += piece
    return bytes(data)


@pytest.mark.parametrize(
    ("command", "size"),
    [(PUBLISH, 0x7FFF_FFFF), (PUBLISH, 0xFFFF_FFFF), (SUBSCRIBE, 1 << 20), (PING, 65_537), (0x47, 0x4554_2F20)],
)
def test_an_oversized_frame_is_an_error_and_ends_the_connection(target: ServedBroker, command: int, size: int) -> None:
    with open_client(target) as client:
        client.socket.sendall(struct.pack(">BI", PING, 0) + struct.pack(">BI", command, size) + b"x" * 100_000)
        answers = everything(client)
    assert answers[:5] == b"\x02\0\0\0\0"
    kind, length = struct.unpack_from(">BI", answers, 5)
    assert kind == ERROR and length == len(answers) - 10
    assert str(size) in answers[10:].decode()


def test_a_web_browser_is_told_that_this_is_not_for_it(target: ServedBroker) -> None:
    with open_client(target) as client:
        client.socket.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"the unknown command 0x47" in everything(client)


@pytest.mark.parametrize("command", [0x00, 0x0B, 0x11, 0x77, 0xFE])
def test_an_unknown_command_is_an_error_and_the_connection_goes_on(target: ServedBroker, command: int) -> None:
    with open_client(target) as client:
        with pytest.raises(FlowmqError, match=f"the unknown command 0x{command:02X}"):
            client.ask(command, b"whatever")
        assert client.ping() == b""


@pytest.mark.parametrize("kept", [1, 4, 5, 20, 70_000])
def test_a_frame_that_is_cut_short_costs_nothing_but_its_connection(target: ServedBroker, kept: int) -> None:
    frame = struct.pack(">BI", PUBLISH, 100_000) + b"cut\0" + b"x" * 99_996
    with open_client(target) as client:
        client.socket.sendall(frame[:kept])
    with open_client(target) as client:
        client.socket.sendall(frame[:kept])
        client.socket.shutdown(socket.SHUT_WR)
        assert everything(client) == b""
    with open_client(target) as client:
        assert "cut" not in client.list_topics()


@pytest.mark.parametrize("frames", [20_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_random_frames_are_answered_one_by_one(frames: int, target: ServedBroker) -> None:
    """Their lengths are right, all else is wild. A wrong length is what other tests are about."""
    before = rss(target)
    chance = random.Random(4)
    answered = 0
    while answered < frames:
        wave = [wild(chance) for _ in range(1000)]
        with open_client(target) as client:
            answered += exchange(client.socket, b"".join(wave), len(wave))
    assert rss(target) - before < RSS_GROWTH_MAX


def test_random_bytes_end_their_connection_or_are_waited_for(target: ServedBroker) -> None:
    chance = random.Random(5)
    for _ in range(300):
        with open_client(target) as client:
            client.socket.sendall(chance.randbytes(chance.choice((1, 5, 30, 3000))))
            client.socket.shutdown(socket.SHUT_WR)
            everything(client)


def wild(chance: random.Random) -> bytes:
    names = [b"common", b"orders", b"a", b"", b"x/y", b"\xff", b"n" * 300, b"__dlq__", b"%d" % chance.randrange(400)]
    payloads = [b"", b"\0", chance.choice(names) + b"\0" + chance.choice((b"", b"g", chance.randbytes(50)))]
    payloads += [chance.choice(names), b"A" * 22 + b":0:%d" % chance.randrange(5), chance.randbytes(40)]
    payload = bytearray(chance.choice(payloads))
    if payload and chance.random() < 0.3:
        payload[chance.randrange(len(payload))] ^= 1 << chance.randrange(8)
    return struct.pack(">BI", chance.choice(COMMANDS), len(payload)) + payload


def exchange(connection: socket.socket, data: bytes, count: int) -> int:
    """Sends all, and reads until there are so many answers; messages do not count."""
    connection.setblocking(False)
    received = bytearray()
    at = answers = 0
    deadline = time.monotonic() + 30
    while answers < count:
        assert time.monotonic() < deadline, f"{answers} of {count} frames were answered"
        with contextlib.suppress(BlockingIOError):
            if data:
                data = data[connection.send(data) :]
        try:
            piece = connection.recv(1 << 16)
            assert piece, "the broker closed the connection"
            received += piece
        except BlockingIOError:
            time.sleep(0.0005)
        while len(received) - at >= 5:
            command, size = struct.unpack_from(">BI", received, at)
            if len(received) - at < 5 + size:
                break
            at += 5 + size
            answers += command != 0x07
    return answers


def rss(target: ServedBroker) -> int:
    return int(psutil.Process(target.pid).memory_info().rss)


def test_large_claims_cost_no_memory(target: ServedBroker) -> None:
    before = rss(target)
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            client = stack.enter_context(open_client(target))
            client.socket.sendall(struct.pack(">BI", PUBLISH, 90 * MB) + b"topic\0" + b"x" * 1000)
        with open_client(target) as other:
            assert other.ping() == b""
        assert rss(target) - before < 16 * MB


def test_frames_that_never_end_share_a_bounded_memory(target: ServedBroker) -> None:
    """Some of them grow, others end because there is no memory left, and small and usual frames pass all the time."""
    before = rss(target)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(open_client(target)) for _ in range(40)]
        chunk = b"x" * (64 << 10)
        for client in clients:
            client.socket.sendall(struct.pack(">BI", PUBLISH, 90 * MB) + b"topic\0")
            client.socket.setblocking(False)
        other = stack.enter_context(open_client(target))
        ended: set[FlowmqClient] = set()
        started, sent = time.monotonic(), 0
        while (lasted := time.monotonic() - started) < 2 or (lasted < 30 and not (sent > 48 * MB and ended)):
            for client in clients:
                try:
                    sent += client.socket.send(chunk)
                except BlockingIOError:
                    pass
                except OSError:
                    ended.add(client)
            assert other.publish("precious-too", b"small")
        assert other.publish("precious-too", bytes(MB))
        assert sent > 48 * MB and ended
        assert rss(target) - before < 32 * MB + RSS_GROWTH_MAX


def test_answers_that_nobody_reads_are_not_made(target: ServedBroker) -> None:
    """Three bytes a request could ask for a long answer: the rest waits in the socket until these are taken."""
    with open_client(target) as client:
        assert len(",".join(client.list_topics())) > 10_000
        before = rss(target)
        client.socket.setblocking(False)
        request = struct.pack(">BI", LIST_TOPICS, 0) * 10_000
        deadline = time.monotonic() + 1.5
        with contextlib.suppress(BlockingIOError):
            while time.monotonic() < deadline:
                client.socket.send(request)
        time.sleep(0.2)
        assert rss(target) - before < 32 * MB


def test_subscribers_that_read_nothing_hold_a_bounded_memory_and_get_no_more(target: ServedBroker) -> None:
    payload = os.urandom(MB - 1000)
    before = rss(target)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(open_client(target)) for _ in range(60)]
        for client in silent:
            client.subscribe("heavy")
        with open_client(target) as publisher:
            for _ in range(30):
                publisher.publish("heavy", payload)
        assert rss(target) - before < 32 * MB + 60 * 2 * MB + RSS_GROWTH_MAX


def test_a_client_that_leaves_while_it_is_answered_leaves_nothing_behind(target: ServedBroker) -> None:
    for number in range(200):
        client = open_client(target)
        topic = LEFT[number % 5].encode()
        client.send(SUBSCRIBE, topic + (b"\0workers" if number % 2 else b""))
        for _ in range(5):
            client.send(PUBLISH, topic + b"\0job")
        client.send(ACK, b"nonsense")
        client.close()
    with open_client(target) as client:
        client.subscribe(LEFT[0], "others")
        assert client.next().payload == b"job"
