"""The client's connection: any transport, any handshake, and answers that are none."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest

from millstream.client.cluster import KafkaCluster
from millstream.client.link import Link, LinkBroken, plain
from millstream.core.errors import ProtocolError
from millstream.records import codec
from millstream.testing.broker_thread import BrokerThread
from millstream.wire.kafka import requests
from millstream.wire.kafka.conversation import Conversation, Handshake, Request, answer, answer_size

SECONDS = 10.0
MASK = bytes(byte ^ 0x5A for byte in range(256))


class Masked:
    """A transport with a cipher of its own, in the place of TLS."""

    def __init__(self, inner: socket.socket) -> None:
        self._inner = inner

    def sendall(self, data: bytes | memoryview) -> None:
        self._inner.sendall(bytes(data).translate(MASK))

    def recv_into(self, view: memoryview) -> int:
        data = self._inner.recv(len(view)).translate(MASK)
        view[: len(data)] = data
        return len(data)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._inner.shutdown(socket.SHUT_RDWR)
        self._inner.close()


def unmask(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data.translate(MASK))
        target.shutdown(socket.SHUT_WR)


def masked(host: str, port: int, seconds: float) -> socket.socket:
    """A pair of sockets instead of the broker's port; threads unmask what goes through them."""
    near, far = socket.socketpair()
    broker = plain(host, port, seconds)
    for pair in ((far, broker), (broker, far)):
        threading.Thread(target=unmask, args=pair, daemon=True).start()
    return cast(socket.socket, Masked(near))


@pytest.fixture
def broker() -> Iterator[BrokerThread]:
    with BrokerThread() as served:
        yield served


def test_a_cluster_over_another_transport_writes_and_reads(broker: BrokerThread) -> None:
    for name, dial in (("masked", masked), ("plain", plain)):
        cluster = KafkaCluster(broker.bootstrap, timeout_seconds=SECONDS, dial=dial)
        link = cluster.coordinator("g")
        metadata = link.ask(3, 4, 4, {"topics": [{"name": name}], "allow_auto_topic_creation": True})
        assert not metadata.topics[0].error_code
        batch = codec.encode([(0, 1_700_000_000_000, b"k", b"v" * 100_000, ())])
        assert cluster.produce((name, 0), batch) == 0
        fetched = cluster.fetch((name, 0), 0, 1 << 20, 100)
        assert [record.value for record in codec.iterate(fetched.records)] == [b"v" * 100_000]
        link.close()
        cluster.close()


def test_a_handshake_may_have_more_steps(broker: BrokerThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a login has."""
    greet, found = Conversation.greet, []

    def greet_and_look(self: Conversation) -> Handshake:
        yield from greet(self)
        version = self.version(requests.METADATA, *requests.VERSIONS[requests.METADATA])
        reader = yield Request(requests.METADATA, version, requests.encode_metadata([], version))
        found.append(requests.decode_metadata(reader, version).nodes)

    monkeypatch.setattr(Conversation, "greet", greet_and_look)
    host, port = broker.bootstrap.split(":")
    link = Link(host, int(port), "test", SECONDS)
    assert [node.port for nodes in found for node in nodes.values()] == [int(port)]
    assert link.serves(requests.FETCH, 11)
    link.close()


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (b"HTTP/1.1 400 Bad Request", r"announced an answer of \d+ bytes; is it a Kafka broker"),
        (struct.pack(">ii", 4, 7), "answered request 7, not 1"),
        (struct.pack(">iih", 6, 1, 0), "sent an invalid answer"),
        (b"", "the broker closed it"),
    ],
)
def test_an_answer_that_is_none_breaks_the_link(said: bytes, text: str) -> None:
    def dial(*_: Any) -> socket.socket:
        near, far = socket.socketpair()
        far.sendall(said)
        far.shutdown(socket.SHUT_WR)
        kept.append(far)
        return near

    kept: list[socket.socket] = []
    with pytest.raises(LinkBroken, match=text):
        Link("nowhere", 1, "test", SECONDS, dial)
    kept[0].close()


def test_a_conversation_speaks_the_highest_version_of_both_sides() -> None:
    conversation = Conversation("test")
    handshake = conversation.greet()
    assert conversation.request(next(handshake)) == b"\0\0\0\x0e" + b"\0\x12\0\0\0\0\0\1" + b"\0\4test"
    served = struct.pack(">hi3h3h", 0, 2, 0, 3, 9, 1, 12, 13)
    with pytest.raises(StopIteration):
        handshake.send(answer(memoryview(struct.pack(">i", 1) + served), 1))
    assert conversation.version(0, 3, 8) == 8 and conversation.serves(1, 12) and not conversation.serves(1, 11)
    for key, text in ((1, "versions 12 to 13"), (2, "serves API 2 not")):
        with pytest.raises(ProtocolError, match=text):
            conversation.version(key, 4, 11)


def test_the_size_of_an_answer_has_a_bound() -> None:
    assert answer_size(struct.pack(">i", 100), 100) == 100
    for size in (-1, 3, 101):
        with pytest.raises(ProtocolError):
            answer_size(struct.pack(">i", size), 100)
