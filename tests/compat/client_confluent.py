"""confluent-kafka (librdkafka)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from tests import confluent
from tests.compat.clients import (
    FROM_START,
    HEARTBEAT_MS,
    REQUEST_MS,
    SESSION_MS,
    Client,
    Member,
    Reader,
    Seen,
    Sent,
    Start,
)


class Confluent(Client):
    name = "confluent-kafka"
    assignors = ("range", "roundrobin", "cooperative-sticky")

    def create_topic(self, topic: str, partitions: int) -> None:
        admin = AdminClient({"bootstrap.servers": self.address})
        admin.create_topics([NewTopic(topic, partitions, 1)])[topic].result(REQUEST_MS / 1000)

    def produce(
        self, topic: str, records: Iterable[Sent], *, codec: str | None = None, idempotent: bool = False
    ) -> None:
        producer = Producer(
            {
                "bootstrap.servers": self.address,
                "compression.type": codec or "none",
                "enable.idempotence": idempotent,
                "acks": "all",
                "linger.ms": 1,
            }
        )
        errors: list[KafkaError] = []
        for record in records:
            places: dict[str, Any] = {}
            if record.partition is not None:
                places["partition"] = record.partition
            if record.timestamp_ms is not None:
                places["timestamp"] = record.timestamp_ms
            producer.produce(
                topic,
                value=record.value,
                key=record.key,
                headers=list(record.headers) if record.headers else None,
                on_delivery=lambda error, message: errors.append(error) if error else None,
                **places,
            )
        assert producer.flush(REQUEST_MS / 1000) == 0
        if errors:
            raise KafkaException(errors[0])

    def reader(self, topic: str, partitions: Iterable[int], start: Start) -> Reader:
        return _Reader(self.address, topic, partitions, start)

    def member(self, group: str, topic: str, *, assignor: str = "range", instance: str | None = None) -> Member:
        config: dict[str, Any] = {
            "partition.assignment.strategy": assignor,
            "session.timeout.ms": SESSION_MS,
            "heartbeat.interval.ms": HEARTBEAT_MS,
        }
        if instance is not None:
            config["group.instance.id"] = instance
        return ConfluentMember(self.address, group, topic, config)


def _seen(message: Message) -> Seen:
    error = message.error()
    if error is not None:
        raise KafkaException(error)
    return Seen(
        *confluent.place(message),
        message.key(),
        message.value(),
        confluent.headers(message),
        message.timestamp()[1],
    )


class _Reader(Reader):
    def __init__(self, address: str, topic: str, partitions: Iterable[int], start: Start) -> None:
        super().__init__()
        self._consumer = Consumer({"bootstrap.servers": address, "group.id": "nobody", "enable.auto.commit": False})
        self._consumer.assign([TopicPartition(topic, each, self._offset(topic, each, start)) for each in partitions])

    def _offset(self, topic: str, partition: int, start: Start) -> int:
        if start == FROM_START:
            return OFFSET_BEGINNING
        if start.offset is not None:
            return start.offset
        if start.timestamp_ms is not None:
            asked = [TopicPartition(topic, partition, start.timestamp_ms)]
            return self._consumer.offsets_for_times(asked, timeout=REQUEST_MS / 1000)[0].offset
        return self._consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=REQUEST_MS / 1000)[1]

    def _poll(self, seconds: float) -> list[Seen]:
        first = self._consumer.poll(seconds)
        rest = [] if first is None else [first, *self._consumer.consume(500, 0)]
        return [_seen(message) for message in rest]

    def close(self) -> None:
        self._consumer.close()


class ConfluentMember(Member):
    """`config` goes over the defaults: the classic protocol's settings, or `group.protocol=consumer`."""

    def __init__(self, address: str, group: str, topic: str, config: dict[str, Any]) -> None:
        super().__init__()
        self.group = group
        self.rebalances = 0
        """How often partitions came, whatever the protocol."""
        self.lost = 0
        self.errors: list[KafkaError] = []
        """What the client was told about itself and its broker, in order; it goes on after most of it."""
        self.consumer = Consumer(
            {
                "bootstrap.servers": address,
                "group.id": group,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "reconnect.backoff.ms": 50,
                "reconnect.backoff.max.ms": 200,
                "error_cb": self.errors.append,
                **config,
            }
        )
        self.consumer.subscribe([topic], on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost)

    def _on_assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self.rebalances += 1

    def _on_revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        pass

    def _on_lost(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self.lost += 1

    @property
    def assignment(self) -> set[int]:
        return {each.partition for each in self.consumer.assignment()}

    def _poll(self, seconds: float) -> list[Seen]:
        # One by one: `consume` drops what it has collected when a rebalance callback comes in between.
        found = []
        message = self.consumer.poll(seconds)
        while message is not None:
            error = message.error()
            if error is None:
                found.append(_seen(message))
            else:
                self.errors.append(error)
            message = self.consumer.poll(0)
        return found

    def commit(self) -> None:
        for each in self.consumer.commit(asynchronous=False) or []:
            assert each.error is None, each.error

    def close(self) -> None:
        self.consumer.close()
