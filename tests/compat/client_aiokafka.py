"""aiokafka, driven from a thread that runs its event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.coordinator.assignors.range import RangePartitionAssignor
from aiokafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor
from aiokafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor

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

T = TypeVar("T")
ASSIGNORS = {
    "range": RangePartitionAssignor,
    "roundrobin": RoundRobinPartitionAssignor,
    "sticky": StickyPartitionAssignor,
}


class _Loop:
    """Started with the first call, ends with the process."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, daemon=True, name="aiokafka").start()
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(REQUEST_MS / 1000 + 10)


run = _Loop().run


class AioKafka(Client):
    name = "aiokafka"
    assignors = tuple(ASSIGNORS)

    def create_topic(self, topic: str, partitions: int) -> None:
        run(self._create_topic(topic, partitions))

    async def _create_topic(self, topic: str, partitions: int) -> None:
        admin = AIOKafkaAdminClient(bootstrap_servers=self.address)
        await admin.start()
        try:
            answer = await admin.create_topics([NewTopic(topic, partitions, 1)])
            assert [error[1] for error in answer.topic_errors] == [0], answer
        finally:
            await admin.close()

    def produce(
        self, topic: str, records: Iterable[Sent], *, codec: str | None = None, idempotent: bool = False
    ) -> None:
        run(self._produce(topic, list(records), codec, idempotent))

    async def _produce(self, topic: str, records: list[Sent], codec: str | None, idempotent: bool) -> None:
        producer = AIOKafkaProducer(
            bootstrap_servers=self.address,
            compression_type=codec,
            enable_idempotence=idempotent,
            acks="all",
            linger_ms=1,
            request_timeout_ms=REQUEST_MS,
        )
        await producer.start()
        try:
            waiting = [
                await producer.send(
                    topic,
                    value=record.value,
                    key=record.key,
                    headers=record.headers,
                    partition=record.partition,
                    timestamp_ms=record.timestamp_ms,
                )
                for record in records
            ]
            await asyncio.gather(*waiting)
        finally:
            await producer.stop()

    def reader(self, topic: str, partitions: Iterable[int], start: Start) -> Reader:
        return run(self._reader(topic, list(partitions), start))

    async def _reader(self, topic: str, partitions: list[int], start: Start) -> Reader:
        consumer = AIOKafkaConsumer(bootstrap_servers=self.address, enable_auto_commit=False)
        await consumer.start()
        places = [TopicPartition(topic, each) for each in partitions]
        consumer.assign(places)
        if start == FROM_START:
            await consumer.seek_to_beginning(*places)
        elif start.offset is not None:
            for place in places:
                consumer.seek(place, start.offset)
        elif start.timestamp_ms is not None:
            found = await consumer.offsets_for_times(dict.fromkeys(places, start.timestamp_ms))
            for place, at in found.items():
                consumer.seek(place, at.offset)
        else:
            await consumer.seek_to_end(*places)
            for place in places:
                await consumer.position(place)
        return _Reader(consumer)

    def member(self, group: str, topic: str, *, assignor: str = "range", instance: str | None = None) -> Member:
        return run(self._member(group, topic, assignor, instance))

    async def _member(self, group: str, topic: str, assignor: str, instance: str | None) -> Member:
        consumer = AIOKafkaConsumer(
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
        )
        await consumer.start()
        return _Member(consumer)


def _found(fetched: dict[TopicPartition, list[Any]]) -> list[Seen]:
    return [
        Seen(one.partition, one.offset, one.key, one.value, list(one.headers), one.timestamp)
        for records in fetched.values()
        for one in records
    ]


class _Reader(Reader):
    def __init__(self, consumer: AIOKafkaConsumer) -> None:
        super().__init__()
        self.consumer = consumer

    def _poll(self, seconds: float) -> list[Seen]:
        return _found(run(self.consumer.getmany(timeout_ms=round(seconds * 1000))))

    def close(self) -> None:
        run(self.consumer.stop())


class _Member(_Reader, Member):
    @property
    def assignment(self) -> set[int]:
        return {each.partition for each in self.consumer.assignment()}

    def commit(self) -> None:
        run(self.consumer.commit())
