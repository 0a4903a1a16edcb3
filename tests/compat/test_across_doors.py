"""One log, every door: a record that goes in through any of them comes out through every other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

import millstream.sync
from tests.compat.client_flowmq import FlowmqClient
from tests.compat.client_flume import Flume
from tests.compat.client_luxun import Luxun, generate
from tests.compat.raw import create_topic
from tests.serving import ServedBroker

DOORS = ("kafka", "flowmq", "flume", "luxun", "python")
SECONDS = 20.0


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedBroker]:
    flags = [part for door in ("flowmq", "flume", "luxun") for part in (f"--{door}", "127.0.0.1:0")]
    with ServedBroker(tmp_path_factory.mktemp("doors"), *flags) as broker:
        yield broker


@pytest.fixture(scope="module")
def thrift(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    return generate(tmp_path_factory.mktemp("generated"))


def put(door: str, served: ServedBroker, thrift: tuple[Any, Any], topic: str, value: bytes) -> None:
    if door == "kafka":
        producer = Producer({"bootstrap.servers": served.address})
        producer.produce(topic, value)
        assert producer.flush(SECONDS) == 0
    elif door == "flowmq":
        with FlowmqClient(served.doors["flowmq"]) as flowmq:
            flowmq.publish(topic, value)
    elif door == "flume":
        with Flume(served.doors["flume"]) as flume:
            assert flume.produce(topic, value).error == 0
    elif door == "luxun":
        with Luxun(served.doors["luxun"], thrift) as luxun:
            luxun.produce(topic, value)
    else:
        with millstream.sync.connect(served.address) as ms:
            ms.send(topic, value)


def take(door: str, served: ServedBroker, thrift: tuple[Any, Any], topic: str) -> bytes:
    """The first record of the topic."""
    if door == "kafka":
        consumer = Consumer({"bootstrap.servers": served.address, "group.id": "across", "log_level": 0})
        consumer.assign([TopicPartition(topic, 0, 0)])
        message = consumer.poll(SECONDS)
        assert message is not None and message.error() is None
        consumer.close()
        return bytes(message.value())
    if door == "flowmq":
        with FlowmqClient(served.doors["flowmq"]) as flowmq:
            flowmq.subscribe(topic, f"across-{topic}")
            delivered = flowmq.next(SECONDS)
            flowmq.ack(delivered)
            return delivered.payload
    if door == "flume":
        with Flume(served.doors["flume"]) as flume:
            return flume.fetch(topic, 0, 0).records[0][1]
    if door == "luxun":
        with Luxun(served.doors["luxun"], thrift) as luxun:
            return bytes(luxun.consume(topic, fanout="across").itemList[0])
    with millstream.sync.connect(served.address) as ms:
        for record in ms.read(topic, partition=0, offset=0):
            assert record.value is not None
            return record.value
    raise AssertionError("nothing came out")


@pytest.mark.parametrize("out", DOORS)
@pytest.mark.parametrize("into", DOORS)
def test_what_goes_in_through_one_door_comes_out_through_another(
    served: ServedBroker, thrift: tuple[Any, Any], unique: Callable[[str], str], into: str, out: str
) -> None:
    topic = unique("across")
    create_topic(served.address, topic)
    value = f"from {into} to {out} ".encode() + bytes(range(256))
    put(into, served, thrift, topic, value)
    assert take(out, served, thrift, topic) == value
