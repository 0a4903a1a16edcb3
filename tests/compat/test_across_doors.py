"""One log, every door: a record that goes in through any of them comes out through every other, with its key where both
have keys. The Python API is there twice: connected to the broker, and embedded over the same database.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

import millstream.sync
from tests.compat.client_comet import Comet
from tests.compat.client_flowmq import FlowmqClient
from tests.compat.client_flume import Flume
from tests.compat.client_luxun import Luxun
from tests.compat.raw import create_topic
from tests.serving import ServedBroker

DOORS = ("kafka", "flowmq", "flume", "luxun", "comet", "python", "embedded")
KEYED_IN = ("kafka", "flume", "comet", "python", "embedded")
KEYED_OUT = ("kafka", "comet", "python", "embedded")
"""Flume's answer to a Fetch has no keys."""
SECONDS = 20.0
FLAGS = [part for door in ("flowmq", "flume", "luxun", "comet") for part in (f"--{door}", "127.0.0.1:0")]


@pytest.fixture(scope="module")
def over_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedBroker]:
    with ServedBroker(tmp_path_factory.mktemp("doors"), *FLAGS) as broker:
        yield broker


@pytest.fixture(scope="module")
def over_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedBroker]:
    """A store that an embedded broker can share."""
    directory = tmp_path_factory.mktemp("shared")
    with ServedBroker(directory, *FLAGS, "--node-id", "7", store=f"sqlite:{directory / 'store.db'}") as broker:
        yield broker


def put(door: str, served: ServedBroker, generated: tuple[Any, Any], topic: str, value: bytes, key: bytes) -> None:
    if door == "kafka":
        producer = Producer({"bootstrap.servers": served.address})
        producer.produce(topic, value, key)
        assert producer.flush(SECONDS) == 0
    elif door == "flowmq":
        with FlowmqClient(served.doors["flowmq"]) as flowmq:
            flowmq.publish(topic, value)
    elif door == "flume":
        with Flume(served.doors["flume"]) as flume:
            assert flume.produce(topic, value, key).error == 0
    elif door == "luxun":
        with Luxun(served.doors["luxun"], generated) as luxun:
            luxun.produce(topic, value)
    elif door == "comet":
        with Comet(served.doors["comet"]) as comet:
            comet.produce(topic, value, key=key)
    elif door == "python":
        with millstream.sync.connect(served.address) as ms:
            ms.send(topic, value, key=key)
    else:
        with millstream.sync.open(served.store) as ms:
            ms.send(topic, value, key=key)
        with Flume(served.doors["flume"]) as flume:
            deadline = time.monotonic() + SECONDS
            while not flume.fetch(topic, 0, 0).records:  # news for the broker that is served
                assert time.monotonic() < deadline
                time.sleep(0.01)


def take(door: str, served: ServedBroker, generated: tuple[Any, Any], topic: str) -> tuple[bytes | None, bytes | None]:
    """The first record of the topic: value, and key where the door has keys."""
    if door == "kafka":
        consumer = Consumer({"bootstrap.servers": served.address, "group.id": "across", "log_level": 0})
        consumer.assign([TopicPartition(topic, 0, 0)])
        message = consumer.poll(SECONDS)
        assert message is not None and message.error() is None
        consumer.close()
        return message.value(), message.key()
    if door == "flowmq":
        with FlowmqClient(served.doors["flowmq"]) as flowmq:
            flowmq.subscribe(topic, f"across-{topic}")
            delivered = flowmq.next(SECONDS)
            flowmq.ack(delivered)
            return delivered.payload, None
    if door == "flume":
        with Flume(served.doors["flume"]) as flume:
            return flume.fetch(topic, 0, 0).records[0][1], None
    if door == "luxun":
        with Luxun(served.doors["luxun"], generated) as luxun:
            return bytes(luxun.consume(topic, fanout="across").itemList[0]), None
    if door == "comet":
        with Comet(served.doors["comet"]) as comet:
            member = comet.Subscribe(topic=topic, group=f"across-{topic}").member_id
            [message] = comet.Poll(topic=topic, group=f"across-{topic}", member_id=member).messages
            return message.value, message.key or None
    opened = millstream.sync.open(served.store) if door == "embedded" else millstream.sync.connect(served.address)
    with opened as ms:
        for record in ms.read(topic, partition=0, offset=0):
            return record.value, record.key
    raise AssertionError("nothing came out")


@pytest.mark.parametrize("out", DOORS)
@pytest.mark.parametrize("into", DOORS)
def test_what_goes_in_through_one_door_comes_out_through_another(
    request: pytest.FixtureRequest, generated: tuple[Any, Any], unique: Callable[[str], str], into: str, out: str
) -> None:
    served: ServedBroker = request.getfixturevalue("over_sqlite" if "embedded" in (into, out) else "over_files")
    topic = unique("across")
    create_topic(served.address, topic)
    value = f"from {into} to {out} ".encode() + bytes(range(256))
    key = f"key of {into}".encode() + bytes(range(256))
    put(into, served, generated, topic, value, key)
    assert take(out, served, generated, topic) == (value, key if into in KEYED_IN and out in KEYED_OUT else None)
