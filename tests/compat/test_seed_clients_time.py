"""Luxun's and Flume's own clients as time passes, on a clock that the test moves: idle for long, and never rejoining.

Flume's clients write a request's head and its body by two calls, and do one request at a time. `GroupConsumer` joins
once, sends a heartbeat every three seconds under the generation of that join whatever the answer is, and commits.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from millstream.core.errors import Code, RequestError
from millstream.core.promise import Promise
from millstream.server import Server
from tests.compat import client_flume as flume
from tests.compat.client_flume import Flume
from tests.compat.client_luxun import Luxun
from tests.compat.clients import wait_for
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


def test_luxuns_producer_sleeps_for_hours_and_its_next_item_is_there(
    broker: BrokerInThread, generated: tuple[Any, Any]
) -> None:
    address = broker.address("luxun")
    with Luxun(address, generated) as producer, Luxun(address, generated) as consumer:
        for number in range(3):
            producer.async_produce("idle", b"%d" % number)
            assert consumer.consume("idle", "fanout").itemList == [b"%d" % number]
            broker.advance(LONG)


# -- Luxun's reads behind oneway items ---------------------------------------------------------------------------------


class HeldCreation:
    """Topics are created when the test says so, or never: a store that does not answer."""

    def __init__(self, broker: BrokerInThread) -> None:
        self._broker = broker
        self._may_go_on = asyncio.Event()
        self.refusal: RequestError | None = None
        self.count = 0
        broker.ask(self._hold)

    def _hold(self, server: Server) -> None:
        ensure = server.broker.topics.ensure

        async def held(*arguments: Any) -> Any:
            self.count += 1
            await self._may_go_on.wait()
            if self.refusal is not None:
                raise self.refusal
            return await ensure(*arguments)

        server.broker.topics.ensure = held  # type: ignore[assignment, method-assign]

    def go_on(self, refusal: RequestError | None = None) -> None:
        self.refusal = refusal
        self._broker.ask(lambda server: self._may_go_on.set())


def open_connections(broker: BrokerInThread) -> int:
    return broker.ask(lambda server: server.metrics.connections_active)


def has_connections(broker: BrokerInThread, count: int) -> bool:
    return open_connections(broker) == count


def waiting(broker: BrokerInThread) -> int:
    """Luxun connections that wait for the answer to a read."""

    def count(server: Server) -> int:
        doors: list[Any] = [*server._doors]
        [door] = [each for each in doors if each.name == "luxun"]
        return sum(bool(each.protocol._in_line) and not each.protocol.creates for each in door._connections)

    return broker.ask(count)


def ask_to_consume(client: Luxun, topic: str, times: int = 1) -> None:
    for _ in range(times):
        client.calls.send_consume(client.types.ConsumeRequest(topic=topic, fanoutId="fanout", maxFetchSize=1 << 20))


READS = {
    "consume by index": lambda client, topic: client.consume(topic, index=0).itemList == [b"first"],
    "consume by fanout id": lambda client, topic: client.consume(topic, "fanout").itemList == [b"first"],
    "getSize": lambda client, topic: client.size(topic).size == 1,
    "findClosestIndexByTime": lambda client, topic: client.find(topic, -2).index == 1,
}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_a_luxun_read_waits_for_the_item_that_creates_its_topic_although_the_producer_is_gone(
    broker: BrokerInThread, generated: tuple[Any, Any], read: Any
) -> None:
    held, address = HeldCreation(broker), broker.address("luxun")
    with Luxun(address, generated) as reader:
        with Luxun(address, generated) as producer:
            producer.async_produce("slow", b"first")
            wait_for(lambda: held.count == 1, "the item")
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(read, reader, "slow")
            wait_for(lambda: waiting(broker) == 1, "a read that waits")
            held.go_on()
            assert answer.result(20)


def test_a_luxun_read_does_not_wait_for_an_item_whose_topic_cannot_be_created(
    broker: BrokerInThread, generated: tuple[Any, Any]
) -> None:
    held, address = HeldCreation(broker), broker.address("luxun")
    with Luxun(address, generated) as producer, Luxun(address, generated) as reader:
        producer.async_produce("refused", b"first")
        wait_for(lambda: held.count == 1, "the item")
        ask_to_consume(reader, "refused")
        wait_for(lambda: waiting(broker) == 1, "a read that waits")
        held.go_on(RequestError(Code.KAFKA_STORAGE_ERROR, "the disk is full"))
        assert reader.calls.recv_consume().result.errorCode == reader.types.ErrorCode.TOPIC_NOT_EXIST
        for _ in range(3):
            assert reader.size("refused").result.errorCode == reader.types.ErrorCode.TOPIC_NOT_EXIST


def test_luxun_reads_do_not_wait_for_items_that_are_refused_or_cannot_be_stored(
    broker: BrokerInThread, generated: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock stands still, so a read that waited for one of them would never be answered."""
    address = broker.address("luxun")
    with Luxun(address, generated) as producer, Luxun(address, generated) as reader:
        assert producer.produce("items", b"first").index == 0
        topic = broker.ask(lambda server: server.broker.topics.get("items"))
        assert topic is not None
        kind = type(topic.partitions[0].log)
        failure = RequestError(Code.KAFKA_STORAGE_ERROR, "the disk does not answer")

        def fails(*_: Any) -> Any:
            raise failure

        def fails_later(*_: Any) -> Promise[Any]:
            promise: Promise[Any] = Promise()
            asyncio.get_running_loop().call_later(0.05, promise.fail, failure)
            return promise

        producer.async_produce("items", bytes(2 << 20))
        assert reader.size("items").size == 1
        producer.async_produce("no topic", b"x")
        assert reader.consume("no topic", index=0).result.errorCode == reader.types.ErrorCode.INVALID_TOPIC
        for append in (fails, fails_later):
            with monkeypatch.context() as away:
                away.setattr(kind, "append", append)
                for item in (b"small", bytes(100_000)):
                    producer.async_produce("items", item)
                    assert reader.size("items").size == 1
        producer.async_produce("items", b"second")
        assert reader.size("items").size == 2


@pytest.mark.parametrize("how", ["closed", "reset"])
def test_luxun_reads_do_not_wait_for_a_producer_that_dies_within_an_item(
    broker: BrokerInThread, generated: tuple[Any, Any], how: str
) -> None:
    address = broker.address("luxun")
    with Luxun(address, generated) as reader:
        assert reader.produce("items", b"first").index == 0
        for _ in range(5):
            before = open_connections(broker)
            dying = Luxun(address, generated)
            dying.socket.handle.sendall(struct.pack(">i", 500_000) + bytes(200_000))
            if how == "reset":
                dying.socket.handle.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            dying.transport.close()
            assert reader.size("items").size == 1
            wait_for(partial(has_connections, broker, before), "the producer's end")


@pytest.mark.parametrize("behind", [0, 3], ids=["alone", "with frames that are not handled yet"])
def test_a_luxun_read_waits_ten_seconds_at_most(
    broker: BrokerInThread, generated: tuple[Any, Any], behind: int
) -> None:
    held, address = HeldCreation(broker), broker.address("luxun")
    with Luxun(address, generated) as producer, Luxun(address, generated) as reader:
        producer.async_produce("stuck", b"first")
        wait_for(lambda: held.count == 1, "the item")
        received = broker.ask(lambda server: server.metrics.bytes_in)
        for _ in range(behind):
            producer.async_produce("stuck", b"more")
        wait_for(lambda: broker.ask(lambda server: server.metrics.bytes_in) > received or not behind, "more items")
        ask_to_consume(reader, "stuck")
        wait_for(lambda: waiting(broker) == 1, "a read that waits")
        broker.advance(9.9)
        assert waiting(broker) == 1
        broker.advance(0.2)
        assert reader.calls.recv_consume().result.errorCode == reader.types.ErrorCode.TOPIC_NOT_EXIST
        held.go_on()
        assert reader.consume("stuck", "fanout").itemList[0] == b"first"


@pytest.mark.parametrize("how", ["closed", "reset"])
def test_a_luxun_client_that_hangs_up_behind_a_read_that_waits_is_noticed_and_takes_nothing(
    broker: BrokerInThread, generated: tuple[Any, Any], how: str
) -> None:
    """It has sent more requests than the broker reads ahead: nothing reads the end of its stream."""
    held, address, count = HeldCreation(broker), broker.address("luxun"), 5
    with Luxun(address, generated) as producer, contextlib.ExitStack() as stack:
        producer.async_produce("held", b"first")
        wait_for(lambda: held.count == 1, "the item")
        before = open_connections(broker)
        clients = [stack.enter_context(Luxun(address, generated)) for _ in range(count)]
        for client in clients:
            ask_to_consume(client, "held")
        wait_for(lambda: waiting(broker) == count, "reads that wait")
        received = broker.ask(lambda server: server.metrics.bytes_in)
        for client in clients:
            ask_to_consume(client, "held")
        wait_for(lambda: broker.ask(lambda server: server.metrics.bytes_in) > received, "requests behind them")
        for client in clients:
            ask_to_consume(client, "held", 20)
            if how == "reset":
                client.socket.handle.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.transport.close()
        if how == "reset":  # at once
            wait_for(lambda: open_connections(broker) == before, "connections that are closed")
        for _ in range(2):
            broker.advance(5.1)
        wait_for(lambda: open_connections(broker) == before, "connections that are closed")
        held.go_on()
        with Luxun(address, generated) as reader:
            assert reader.consume("held", "fanout").itemList == [b"first"]


# -- Flume -------------------------------------------------------------------------------------------------------------


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
