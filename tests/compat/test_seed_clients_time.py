"""Luxun's and Flume's own clients as time passes, on a clock that the test moves: idle for long, and never rejoining.

Flume's clients write a request's head and its body by two calls, and do one request at a time. `GroupConsumer` joins
once, sends a heartbeat every three seconds under the generation of that join whatever the answer is, and commits.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compat import client_flume as flume
from tests.compat.client_flume import Flume
from tests.compat.client_luxun import Luxun, generate
from tests.in_thread import BrokerInThread

LONG = 3 * 3600


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerInThread]:
    doors = {"flume": "127.0.0.1:0", "luxun": "127.0.0.1:0"}
    with BrokerInThread(tmp_path, **doors) as started:
        yield started


class TwoWrites(Flume):
    """Sends as Flume's Go client does."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as Go does

    def send(self, key: int, payload: bytes) -> int:
        request_id = next(self._ids)
        self.socket.sendall(struct.pack(">ihi", 6 + len(payload), key, request_id))
        self.socket.sendall(payload)
        return request_id


class GroupConsumer:
    def __init__(self, broker: BrokerInThread, group: str, topic: str) -> None:
        self.connection = TwoWrites(broker.address("flume"))
        self.group, self.topic = group, topic
        joined = self.connection.join(group, [topic])
        assert joined.error == flume.NONE
        self.member, self.generation, self.members = joined.member, joined.generation, joined.members

    def heartbeat(self) -> int:
        return self.connection.heartbeat(self.group, self.generation, self.member)

    def fetch(self, partition: int) -> list[tuple[int, bytes]]:
        error, offset = self.connection.committed(self.group, self.topic, partition)
        assert error == flume.NONE
        fetched = self.connection.fetch(self.topic, partition, max(offset, 0))
        assert fetched.error == flume.NONE
        return fetched.records

    def commit(self, partition: int, offset: int) -> int:
        return self.connection.commit(self.group, self.topic, partition, offset)

    def close(self) -> None:
        """Leaves without waiting for the answer."""
        self.connection.send(flume.LEAVE_GROUP, flume.string(self.group) + flume.string(self.member))
        self.connection.close()


def test_luxuns_producer_sleeps_for_hours_and_its_next_item_is_there(broker: BrokerInThread, tmp_path: Path) -> None:
    generated = generate(tmp_path)
    address = broker.address("luxun")
    with Luxun(address, generated) as producer, Luxun(address, generated) as consumer:
        for number in range(3):
            producer.async_produce("idle", b"%d" % number)
            assert consumer.consume("idle", "fanout").itemList == [b"%d" % number]
            broker.advance(LONG)


def test_flumes_producer_sleeps_for_hours_and_is_not_disconnected(broker: BrokerInThread) -> None:
    with TwoWrites(broker.address("flume")) as producer:
        for number in range(3):
            assert producer.produce("idle", b"%d" % number) == (0, number, flume.NONE)
            broker.advance(LONG)


def test_half_a_frame_is_not_waited_for_longer_than_a_minute(broker: BrokerInThread) -> None:
    with TwoWrites(broker.address("flume")) as stuck:
        stuck.socket.sendall(struct.pack(">ihi", 1000, flume.PRODUCE, 1))
        broker.advance(5)
        for _ in range(10):
            broker.advance(10)
        with pytest.raises((EOFError, ConnectionError)):
            stuck.receive()


def test_flumes_group_consumers_share_a_topic_without_ever_rejoining(broker: BrokerInThread) -> None:
    with TwoWrites(broker.address("flume")) as producer:
        for partition in range(3):
            producer.produce("orders", b"%d" % partition, partition=partition)
    first = GroupConsumer(broker, "workers", "orders")
    second = GroupConsumer(broker, "workers", "orders")
    assert second.members == [first.member, second.member], "the join was answered at once, with both"
    for _ in range(20):
        broker.advance(3)
        assert first.heartbeat() == flume.REBALANCE_NEEDED
        assert second.heartbeat() == flume.NONE
    for consumer, partitions in ((first, (0, 1)), (second, (2,))):
        for partition in partitions:
            assert consumer.fetch(partition) == [(0, b"%d" % partition)]
            assert consumer.commit(partition, 1) == flume.NONE
    assert first.commit(2, 0) == flume.REBALANCE_NEEDED, "it is the second member's"
    second.close()
    broker.advance(3)
    assert first.heartbeat() == flume.REBALANCE_NEEDED
    assert first.fetch(2) == [] and first.commit(2, 1) == flume.NONE
    first.close()


def test_a_group_consumer_that_dies_leaves_its_partitions_to_one_that_never_rejoins(broker: BrokerInThread) -> None:
    with TwoWrites(broker.address("flume")) as producer:
        producer.produce("orders", b"x", partition=2)
    survivor, dying = (GroupConsumer(broker, "workers", "orders") for _ in range(2))
    assert survivor.commit(2, 1) == flume.REBALANCE_NEEDED
    for _ in range(4):  # dies without a word; its session ends after 10 seconds
        broker.advance(3)
        survivor.heartbeat()
    assert survivor.commit(2, 1) == flume.NONE
    assert dying.heartbeat() == dying.commit(2, 0) == flume.UNKNOWN_MEMBER
    assert survivor.fetch(2) == []
