"""kafka-python 3."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterable
from typing import Any

from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, OffsetAndMetadata, TopicPartition
from kafka.admin import NewTopic
from kafka.coordinator.assignors.cooperative_sticky import CooperativeStickyAssignor
from kafka.coordinator.assignors.range import RangePartitionAssignor
from kafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor
from kafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor
from kafka.errors import KafkaError

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
    wait_for,
)

ASSIGNORS = {
    "range": RangePartitionAssignor,
    "roundrobin": RoundRobinPartitionAssignor,
    "sticky": StickyPartitionAssignor,
    "cooperative-sticky": CooperativeStickyAssignor,
}


class KafkaPython(Client):
    name = "kafka-python"
    assignors = tuple(ASSIGNORS)

    def create_topic(self, topic: str, partitions: int) -> None:
        with KafkaAdminClient(bootstrap_servers=self.address) as admin:
            admin.create_topics([NewTopic(topic, partitions, 1)])

    def produce(
        self, topic: str, records: Iterable[Sent], *, codec: str | None = None, idempotent: bool = False
    ) -> None:
        producer = KafkaProducer(
            bootstrap_servers=self.address, compression_type=codec, enable_idempotence=idempotent, acks="all"
        )
        try:
            waiting = [
                producer.send(
                    topic,
                    value=record.value,
                    key=record.key,
                    headers=record.headers,
                    partition=record.partition,
                    timestamp_ms=record.timestamp_ms,
                )
                for record in records
            ]
            for future in waiting:
                future.get(REQUEST_MS / 1000)
        finally:
            producer.close(timeout=5)

    def reader(self, topic: str, partitions: Iterable[int], start: Start) -> Reader:
        consumer = KafkaConsumer(bootstrap_servers=self.address, enable_auto_commit=False)
        places = [TopicPartition(topic, each) for each in partitions]
        consumer.assign(places)
        if start == FROM_START:
            consumer.seek_to_beginning(*places)
        elif start.offset is not None:
            for place in places:
                consumer.seek(place, start.offset)
        elif start.timestamp_ms is not None:
            found = consumer.offsets_for_times(dict.fromkeys(places, start.timestamp_ms))
            for place, at in found.items():
                consumer.seek(place, at.offset)
        else:
            consumer.seek_to_end(*places)
            for place in places:
                consumer.position(place)
        return _Reader(consumer)

    def member(self, group: str, topic: str, *, assignor: str = "range", instance: str | None = None) -> Member:
        consumer = KafkaConsumer(
            topic,
            bootstrap_servers=self.address,
            group_id=group,
            group_instance_id=instance,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            partition_assignment_strategy=(ASSIGNORS[assignor],),
            session_timeout_ms=SESSION_MS,
            heartbeat_interval_ms=HEARTBEAT_MS,
            max_poll_interval_ms=REQUEST_MS,
            reconnect_backoff_max_ms=200,
        )
        # It must know the topic before it joins. A leader that learns of it afterwards joins a second time, and if a
        # `poll` times out during that join, 3.0.12 forgets to take over its result: the member then waits for ever.
        wait_for(lambda: consumer.partitions_for_topic(topic), f"metadata of {topic}", pause=0.05)
        return _Member(consumer)


class _Reader(Reader):
    def __init__(self, consumer: Any) -> None:
        super().__init__()
        self.consumer = consumer

    def _poll(self, seconds: float) -> list[Seen]:
        return [
            Seen(one.partition, one.offset, one.key, one.value, list(one.headers), one.timestamp)
            for records in self.consumer.poll(round(seconds * 1000)).values()
            for one in records
        ]

    def close(self) -> None:
        self.consumer.close(autocommit=False)


class _Member(_Reader, Member):
    """Polled by a thread of its own: members that are polled in turn, for a moment each, can keep each other from ever
    joining, because none is there to answer when the others are.
    """

    def __init__(self, consumer: Any) -> None:
        super().__init__(consumer)
        self._records: queue.Queue[Seen] = queue.Queue()
        self._one_at_a_time = threading.Lock()
        self._closing = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._keep_polling, daemon=True, name="kafka-python")
        self._thread.start()

    def _keep_polling(self) -> None:
        try:
            while not self._closing.is_set():
                with self._one_at_a_time, contextlib.suppress(KafkaError):  # `poll` raises when a broker goes away
                    for record in super()._poll(0.5):
                        self._records.put(record)
                self._closing.wait(0.001)  # or the lock would never be free for anyone else
        except Exception as error:
            self._failure = error

    def _poll(self, seconds: float) -> list[Seen]:
        if self._failure is not None:
            raise self._failure
        found = []
        try:
            found.append(self._records.get(timeout=seconds))
            while True:
                found.append(self._records.get_nowait())
        except queue.Empty:
            return found

    @property
    def assignment(self) -> set[int]:
        return {each.partition for each in self.consumer.assignment()}

    def commit(self) -> None:
        """What the test has seen, not what the thread has fetched."""
        ends = {record.partition: record.offset + 1 for record in self.seen}
        with self._one_at_a_time:
            owned = {each.partition: each for each in self.consumer.assignment()}
            offsets = {owned[number]: OffsetAndMetadata(end, "", -1) for number, end in ends.items() if number in owned}
            self.consumer.commit(offsets, timeout_ms=REQUEST_MS)

    def close(self) -> None:
        self._closing.set()
        self._thread.join(REQUEST_MS / 1000)
        super().close()
