"""What Kafka's door does as time passes, and who loses when its memory is short: on a clock that the test moves."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from millstream.log.slice import Slice
from millstream.server import Server
from tests.compat import raw
from tests.compat.raw import Raw
from tests.in_thread import BrokerInThread

MB = 1 << 20
BUFFER_BYTES = 64 * 1024
"""What the door keeps for a frame that has begun."""


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerInThread]:
    with BrokerInThread(tmp_path, inflight_bytes_max=2 * MB) as started:
        yield started


def produce(address: str) -> int:
    """A frame that does not arrive with one read; the answer's error."""
    with Raw(address) as client:
        client.socket.settimeout(10)
        answer = client.ask(raw.produce("orders", raw.batch(os.urandom(900_000))))
        return int(answer.responses[0].partition_responses[0].error_code)


def free(broker: BrokerInThread) -> int:
    def look(server: Server) -> int:
        assert server._kafka is not None
        return server._kafka.frames.free

    return broker.ask(look)


def connections(broker: BrokerInThread) -> int:
    def look(server: Server) -> int:
        assert server._kafka is not None
        return len(server._kafka._connections)

    return broker.ask(look)


def wait_until_free(broker: BrokerInThread, least: int, most: int) -> None:
    for _ in range(2000):
        if least <= free(broker) <= most:
            return
    raise AssertionError(f"{free(broker)} bytes are free")


def test_many_who_send_a_byte_and_stop_keep_nobody_from_writing(broker: BrokerInThread) -> None:
    address = broker.address("kafka")
    raw.create_topic(address, "orders")
    with contextlib.ExitStack() as stack:
        for _ in range(2 * MB // BUFFER_BYTES + 8):
            stack.enter_context(Raw(address)).send(b"\0")
        assert produce(address) == 0
        assert free(broker) == 2 * MB


def test_who_takes_long_for_a_frame_gives_its_memory_to_those_who_wait(broker: BrokerInThread) -> None:
    address = broker.address("kafka")
    raw.create_topic(address, "orders")
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(Raw(address)) for _ in range(2 * MB // BUFFER_BYTES)]
        for each in slow:
            each.send(struct.pack(">i", 60_000) + bytes(5000))
        wait_until_free(broker, 0, 0)
        for _ in range(3):  # one that drips is not quiet, and still in the way
            broker.advance(5)
            for each in slow:
                each.send(b"\0")
        assert produce(address) == 0
        assert 0 < connections(broker) < len(slow), "as many as it took lost theirs"


def test_who_has_just_begun_a_frame_keeps_its_memory_although_others_wait(broker: BrokerInThread) -> None:
    address = broker.address("kafka")
    begun = struct.pack(">i", 60_000) + bytes(5000)
    broker.advance(9.5)  # the door's own time is that of its last sweep
    with contextlib.ExitStack() as stack:
        busy = [stack.enter_context(Raw(address)) for _ in range(2 * MB // BUFFER_BYTES)]
        for each in busy:
            each.send(begun)
        wait_until_free(broker, 0, 0)
        broker.advance(1)
        stack.enter_context(Raw(address)).send(begun)
        waiting = stack.enter_context(Raw(address))
        waiting.send(begun)
        for _ in range(2000):
            if connections(broker) < len(busy) or broker.ask(waiters) == 2:
                break
        assert connections(broker) == len(busy) + 2


def waiters(server: Server) -> int:
    assert server._kafka is not None
    return len(server._kafka.frames._waiting)


def stored(address: str) -> None:
    raw.create_topic(address, "orders")
    with Raw(address) as client:
        for _ in range(6):
            answer = client.ask(raw.produce("orders", raw.batch(os.urandom(900_000))))
            assert answer.responses[0].partition_responses[0].error_code == 0


def slow_reader(address: str) -> Raw:
    """Asks for all there is and takes nothing."""
    reader = Raw.__new__(Raw)
    reader.socket = socket.socket()
    reader.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    reader.socket.settimeout(20)
    host, _, port = address.rpartition(":")
    reader.socket.connect((host, int(port)))
    reader.send(raw.fetch("orders", 0, bytes_max=50 * MB))
    return reader


def test_readers_who_take_nothing_share_a_bounded_memory(tmp_path: Path) -> None:
    """Where records are not sent from files."""
    limit = 8 * MB
    with BrokerInThread(tmp_path, store="memory:", inflight_bytes_max=limit) as broker, contextlib.ExitStack() as stack:
        address = broker.address("kafka")
        stored(address)

        def held(server: Server) -> int:
            assert server._kafka is not None
            boxes = [connection.outbox for connection in server._kafka._connections]
            return sum(len(chunk) for box in boxes for chunk in box._chunks if not isinstance(chunk, Slice))

        for _ in range(40):
            stack.enter_context(slow_reader(address))
            assert broker.ask(held) <= limit + MB
        with Raw(address) as other:
            answer = other.ask(raw.fetch("orders", 0, bytes_max=MB))
            assert len(answer.responses[0].partitions[0].records) > 0, "who does read is served"


def test_a_reader_who_takes_nothing_for_ten_minutes_goes(tmp_path: Path) -> None:
    with BrokerInThread(tmp_path) as broker:
        address = broker.address("kafka")
        stored(address)
        with slow_reader(address):

            def unread(server: Server) -> int:
                assert server._kafka is not None
                return sum(bool(each.outbox) for each in server._kafka._connections)

            for _ in range(2000):
                if broker.ask(unread):
                    break
            for _ in range(59):
                broker.advance(10)
            assert broker.ask(unread) == 1
            for _ in range(3):
                broker.advance(10)
            assert broker.ask(unread) == 0
