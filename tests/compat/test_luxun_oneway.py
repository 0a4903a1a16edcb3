"""What Luxun's producers rely on: an item is visible on every connection as soon as `asyncProduce` returned.

Luxun's own `SyncProducer` sends the oneway call `asyncProduce` and nothing else; its `SimpleConsumer` reads over a
connection of its own. Between the two there is no answer that one could wait for.
"""

from __future__ import annotations

import contextlib
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.compat.client_luxun import PASSWORD, Luxun, Open
from tests.serving import ServedBroker

Unique = Callable[[str], str]


def test_each_item_is_visible_to_the_next_consume_on_another_connection(open_client: Open, unique: Unique) -> None:
    producer, consumer = open_client(), open_client()
    topics = [unique("visible") for _ in range(4)]
    for number in range(400):
        topic, item = topics[number % 4], b"%d" % number
        producer.async_produce(topic, item)
        assert consumer.consume(topic, index=number // 4).itemList == [item]
        assert consumer.consume(topic, "fanout").itemList == [item]


def test_the_item_that_creates_a_topic_is_visible_from_a_connection_that_is_new(
    open_client: Open, unique: Unique
) -> None:
    consumer = open_client()
    for number in range(40):
        topic = unique("created")
        producer = open_client()
        producer.async_produce(topic, b"first")
        if number % 2:
            producer.transport.close()
        assert consumer.consume(topic, index=0).itemList == [b"first"]


def test_sizes_times_and_deletions_count_every_item(open_client: Open, unique: Unique) -> None:
    producer, consumer = open_client(), open_client()
    for number in range(40):
        topic = unique("counted")
        for item in range(3):
            producer.async_produce(topic, b"%d" % item)
        if number % 4 == 0:
            assert consumer.size(topic).size == 3
        elif number % 4 == 1:
            assert consumer.size(topic, "fanout").size == 3
        elif number % 4 == 2:
            assert consumer.find(topic, -2).index == 3
        else:
            assert consumer.delete(topic, PASSWORD).result.resultCode == consumer.types.ResultCode.SUCCESS
            assert consumer.size(topic).result.errorCode == consumer.types.ErrorCode.TOPIC_NOT_EXIST


@pytest.mark.parametrize("size", [20_000, 300_000, 1_000_000])
def test_large_items_are_visible_although_they_arrive_in_pieces(open_client: Open, unique: Unique, size: int) -> None:
    producer, consumer, topic = open_client(), open_client(), unique("large")
    for number in range(30):
        item = bytes([number]) * size
        producer.async_produce(topic, item)
        assert consumer.consume(topic, index=number).itemList == [item]


def test_items_behind_backpressure_are_visible(tmp_path: Path, generated: tuple[Any, Any]) -> None:
    """With 64 KiB unsynced a partition is full: the rest waits with the connection, in its socket, in the sender's."""
    config = tmp_path / "millstream.toml"
    config.write_text("partition_unsynced_bytes_max = 65536\n")
    flags = ("--luxun", "127.0.0.1:0", "--config", str(config))
    with ServedBroker(tmp_path / "data", *flags) as broker, contextlib.ExitStack() as stack:
        consumer, *producers = [stack.enter_context(Luxun(broker.doors["luxun"], generated)) for _ in range(5)]
        producers[0].produce("parked", b"first")
        total = 1
        for _ in range(20):
            for producer in producers:
                for _ in range(50):
                    producer.async_produce("parked", bytes(5000))
            total += 200
            assert consumer.size("parked").size == total


def test_readers_beside_busy_producers_are_served(open_client: Open, unique: Unique) -> None:
    producers, topic, stopping = [open_client() for _ in range(3)], unique("busy"), threading.Event()
    own, consumer = open_client(), open_client()

    def produce(producer: Luxun) -> None:
        while not stopping.is_set():
            producer.async_produce(topic, bytes(500))

    threads = [threading.Thread(target=produce, args=(each,)) for each in producers]
    for thread in threads:
        thread.start()
    try:
        mine = unique("mine")
        for number in range(5):
            own.async_produce(mine, b"%d" % number)
            assert consumer.consume(mine, index=number).itemList == [b"%d" % number]
            consumer.consume(topic, index=0, size=1000)
    finally:
        stopping.set()
        for thread in threads:
            thread.join(20)


def test_two_clients_that_pipeline_a_read_and_an_item_do_not_wait_for_each_other(
    open_client: Open, unique: Unique
) -> None:
    clients, topic = [open_client(), open_client()], unique("circle")
    clients[0].produce(topic, b"first")
    for _ in range(20):
        for client in clients:
            client.calls.send_consume(client.types.ConsumeRequest(topic=topic, startIndex=0))
            client.async_produce(topic, b"more")
        for client in clients:
            assert client.calls.recv_consume().itemList == [b"first"]


def test_a_producer_that_stops_within_a_frame_holds_nobody_up(open_client: Open, unique: Unique) -> None:
    stopped, producer, consumer, topic = open_client(), open_client(), open_client(), unique("half")
    stopped.socket.handle.sendall(struct.pack(">i", 100_000) + bytes(50_000))
    for number in range(100):
        producer.async_produce(topic, b"%d" % number)
        assert consumer.consume(topic, index=number).itemList == [b"%d" % number]
