"""Topics for tests of the source: made, filled, and read back by a client that is not ours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, NamedTuple

from confluent_kafka import (
    OFFSET_BEGINNING,
    TIMESTAMP_LOG_APPEND_TIME,
    Consumer,
    KafkaError,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    ResourceType,
)

from tests import confluent

SECONDS_MAX = 30
MESSAGE_BYTES_MAX = 1_048_000

Headers = list[tuple[str, bytes | None]]


class Sent(NamedTuple):
    """A record to produce; what is not given is the client's choice."""

    value: bytes | None
    key: bytes | None = None
    partition: int = 0
    timestamp_ms: int = 0
    headers: Headers | None = None


class Row(NamedTuple):
    """A record as it comes out, be it of Spark or of a consumer."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    timestamp_ms: int
    timestamp_type: int
    headers: Headers | None


class Topics:
    """A broker's topics, through confluent-kafka."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._admin = AdminClient({"bootstrap.servers": address, "log_level": 0})
        self._producers: dict[str, Producer] = {}

    def create(self, name: str, partitions: int = 1, **config: str) -> str:
        """Settings are given with `_` for `.`."""
        settings = {key.replace("_", "."): value for key, value in config.items()}
        self._admin.create_topics([NewTopic(name, partitions, 1, config=settings)])[name].result(SECONDS_MAX)
        return name

    def delete(self, name: str) -> None:
        self._admin.delete_topics([name])[name].result(SECONDS_MAX)
        self._producers.clear()

    def grow(self, name: str, partitions: int) -> None:
        self._admin.create_partitions([NewPartitions(name, partitions)])[name].result(SECONDS_MAX)
        self._producers.clear()  # they know the topic as it was

    def configure(self, name: str, **config: str) -> None:
        changes = [
            ConfigEntry(key.replace("_", "."), value, incremental_operation=AlterConfigOpType.SET)
            for key, value in config.items()
        ]
        resource = ConfigResource(ResourceType.TOPIC, name, incremental_configs=changes)
        self._admin.incremental_alter_configs([resource])[resource].result(SECONDS_MAX)

    def trim(self, name: str, starts: Mapping[int, int]) -> None:
        """As retention does: what lies before an offset is gone."""
        wanted = [TopicPartition(name, partition, offset) for partition, offset in starts.items()]
        for future in self._admin.delete_records(wanted).values():
            future.result(SECONDS_MAX)

    def produce(self, name: str, records: Iterable[Sent], codec: str = "none") -> None:
        """Returns when every record is acknowledged."""
        if codec not in self._producers:
            self._producers[codec] = Producer(
                {
                    "bootstrap.servers": self.address,
                    "compression.type": codec,
                    "message.max.bytes": MESSAGE_BYTES_MAX,
                    "batch.num.messages": 200,
                    "linger.ms": 1,
                    "log_level": 0,
                }
            )
        producer = self._producers[codec]
        refused: set[str] = set()
        for record in records:
            producer.produce(
                name,
                record.value,
                record.key,
                record.partition,
                timestamp=record.timestamp_ms,
                headers=list(record.headers) if record.headers else None,
                on_delivery=lambda error, _: refused.add(str(error)) if error is not None else None,
            )
        assert producer.flush(SECONDS_MAX) == 0 and not refused, refused

    def count(self, name: str, count: int, partition: int = 0) -> None:
        """So many records, numbered from 0."""
        self.produce(name, [Sent(b"%d" % number, partition=partition) for number in range(count)])

    def rows(self, *names: str) -> list[Row]:
        """Every record there is, read by a consumer; sorted by topic, partition and offset."""
        consumer = Consumer(
            {
                "bootstrap.servers": self.address,
                "group.id": "a-group-of-none",
                "enable.partition.eof": True,
                "check.crcs": True,
                "log_level": 0,
            }
        )
        places = self._places(names)
        consumer.assign(places)
        rows, open_ = [], len(places)
        while open_:
            message = consumer.poll(SECONDS_MAX)
            assert message is not None, "the consumer got nothing"
            if message.error() is None:
                rows.append(_row(message))
            else:
                assert confluent.error_code(message) == KafkaError._PARTITION_EOF, message.error()
                open_ -= 1
        consumer.close()
        return sorted(rows, key=lambda row: row[:3])

    def committed(self, group: str, *names: str) -> dict[tuple[str, int], int]:
        """How far the broker says a group has come."""
        consumer = Consumer({"bootstrap.servers": self.address, "group.id": group, "log_level": 0})
        found = consumer.committed(self._places(names), SECONDS_MAX)
        consumer.close()
        return {(place.topic, place.partition): place.offset for place in found if place.offset >= 0}

    def _places(self, names: Iterable[str]) -> list[TopicPartition]:
        known = self._admin.list_topics(timeout=SECONDS_MAX).topics
        return [TopicPartition(name, index, OFFSET_BEGINNING) for name in names for index in known[name].partitions]


def _row(message: Any) -> Row:
    kind, timestamp_ms = message.timestamp()
    return Row(
        message.topic(),
        message.partition(),
        message.offset(),
        message.key(),
        message.value(),
        timestamp_ms,
        1 if kind == TIMESTAMP_LOG_APPEND_TIME else 0,
        message.headers() or None,
    )


def from_spark(frame: Any) -> list[Row]:
    """The rows of a data frame of the source, sorted in the same way."""
    rows = [
        Row(
            row["topic"],
            row["partition"],
            row["offset"],
            row["key"],
            row["value"],
            _milliseconds(row["timestamp"]),
            row["timestampType"],
            [(header["key"], header["value"]) for header in row["headers"]] if row.get("headers") is not None else None,
        )
        for row in frame.toArrow().to_pylist()
    ]
    return sorted(rows, key=lambda row: row[:3])


def _milliseconds(time: datetime) -> int:
    return round(time.timestamp() * 1000)
