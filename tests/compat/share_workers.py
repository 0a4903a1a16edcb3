"""Workers of a share group, as `confluent_kafka.ShareConsumer` makes them, and what the tests of share groups do around
them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from confluent_kafka import (
    OFFSET_BEGINNING,
    AcknowledgeType,
    Consumer,
    KafkaError,
    Message,
    Producer,
    ShareConsumer,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, NewTopic, ResourceType

from tests import confluent

DEADLINE_SECONDS = 30.0
ACCEPT, RELEASE, REJECT = AcknowledgeType.ACCEPT, AcknowledgeType.RELEASE, AcknowledgeType.REJECT

quiet = logging.getLogger("share-workers")
quiet.addHandler(logging.NullHandler())
quiet.propagate = False


def admin(address: str) -> AdminClient:
    return AdminClient({"bootstrap.servers": address}, logger=quiet)


def create_topic(address: str, name: str, partitions: int = 1, **settings: str) -> None:
    config = {key.replace("__", "."): value for key, value in settings.items()}
    client = admin(address)
    client.create_topics([NewTopic(name, partitions, 1, config=config)])[name].result(20)


def configure(address: str, group: str, **settings: str) -> None:
    """Of the group; it reads topics from their start unless told otherwise. Names with `__` for dots."""
    wanted = {"share.auto.offset.reset": "earliest"} | {key.replace("__", "."): each for key, each in settings.items()}
    entries = [ConfigEntry(key, each, incremental_operation=AlterConfigOpType.SET) for key, each in wanted.items()]
    resource = ConfigResource(ResourceType.GROUP, group, incremental_configs=entries)
    client = admin(address)
    client.incremental_alter_configs([resource])[resource].result(20)


def produce(address: str, topic: str, values: Iterable[bytes], partitions: int = 1, **config: Any) -> None:
    producer = Producer({"bootstrap.servers": address, "linger.ms": 20, **config}, logger=quiet)
    for number, value in enumerate(values):
        producer.produce(topic, value, key=b"key-%d" % number, partition=number % partitions)
        producer.poll(0)
    assert producer.flush(DEADLINE_SECONDS) == 0


class Worker:
    """One share consumer. What it has seen stays in `seen`."""

    def __init__(self, address: str, group: str, *topics: str, **config: Any) -> None:
        settings = {"bootstrap.servers": address, "group.id": group, "reconnect.backoff.max.ms": 200, **config}
        self.consumer = self._make({key.replace("__", "."): each for key, each in settings.items()})
        self.consumer.subscribe(list(topics))
        self.seen: list[Message] = []

    def _make(self, config: dict[str, Any]) -> ShareConsumer:
        return ShareConsumer(config, logger=quiet)

    def poll(self, seconds: float = 0.5) -> list[Message]:
        messages = list(self.consumer.poll(seconds))
        for message in messages:
            assert message.error() is None, message.error()
        self.seen += messages
        return messages

    def take(self, count: int) -> list[Message]:
        """Polls until so many more were seen, and not a poll further: what they brought is not acknowledged yet."""
        taken: list[Message] = []
        deadline = time.monotonic() + DEADLINE_SECONDS
        while len(taken) < count:
            assert time.monotonic() < deadline, f"{len(taken)} of {count} records came"
            taken += self.poll()
        return taken

    def answer(self, messages: Iterable[Message], verb: AcknowledgeType) -> None:
        for message in messages:
            self.consumer.acknowledge(message, verb)

    def commit(self) -> None:
        for where, error in self.consumer.commit_sync(DEADLINE_SECONDS).items():
            assert error is None, (where, error)

    def close(self) -> None:
        self.consumer.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def explicit(address: str, group: str, *topics: str, **config: Any) -> Worker:
    return Worker(address, group, *topics, share__acknowledgement__mode="explicit", **config)


def values(messages: Iterable[Message]) -> list[bytes]:
    return sorted(confluent.value(message) for message in messages)


def counts(messages: Iterable[Message]) -> set[int | None]:
    return {message.delivery_count() for message in messages}


def all_of(address: str, topic: str, count: int) -> list[Message]:
    """The first so many records of a topic with one partition."""
    consumer = Consumer({"bootstrap.servers": address, "group.id": "reader", "enable.auto.commit": False}, logger=quiet)
    found: list[Message] = []

    def enough() -> bool:
        found.extend(message for message in consumer.consume(100, 0.2) if message.error() is None)
        return len(found) >= count

    try:
        wait_for(lambda: topic in consumer.list_topics(timeout=10).topics, f"topic {topic}")
        consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
        wait_for(enough, f"{count} records in {topic}")
        return found
    finally:
        consumer.close()


def whole(address: str, topic: str) -> list[Message]:
    """All there is now in a topic with one partition."""
    consumer = Consumer({"bootstrap.servers": address, "group.id": "reader"}, logger=quiet)
    try:
        count = consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=10)[1]
    finally:
        consumer.close()
    return all_of(address, topic, count) if count else []


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.02)


def wait_until_compacted(address: str, topic: str) -> list[int]:
    """The offsets that are left, once they no longer change."""
    found: list[int] = []

    def is_settled() -> bool:
        nonlocal found
        before, found = found, offsets_of(address, topic)
        return len(found) < 400 and before == found

    wait_for(is_settled, "compaction")
    return found


def offsets_of(address: str, topic: str) -> list[int]:
    config = {"bootstrap.servers": address, "group.id": "r", "enable.partition.eof": True, "enable.auto.commit": False}
    consumer = Consumer(config, logger=quiet)
    consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
    found: list[int] = []
    try:
        while True:
            message = consumer.poll(0.5)
            if message is None:
                continue
            error = message.error()
            if error is not None:
                assert error.code() == KafkaError._PARTITION_EOF, error
                return found
            found.append(confluent.offset(message))
    finally:
        consumer.close()
