"""What the tests of queues share: a broker in memory that restarts, the steps of a worker, a lost coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from millstream.broker.broker import Broker
from millstream.broker.groups.queue.partition import QueuePartition
from millstream.broker.groups.queue.queue import Queue
from millstream.broker.groups.queue.verbs import Answer, Member, TakenRecord, Verb
from millstream.cluster.base import Solo
from millstream.config import Config
from millstream.core.errors import Code, RequestError
from millstream.core.metrics import Metrics
from millstream.records import codec
from millstream.records.record import Record
from millstream.stores.keys import MemoryMeta
from millstream.stores.memory import MemoryLogStore
from millstream.testing.clock import VirtualClock

EARLIEST = {"share.auto.offset.reset": "earliest"}


@dataclass
class Kit:
    """A broker in memory. What it stored outlives it, as after `kill -9`: `restart` never closes the old one."""

    clock: VirtualClock
    logs: MemoryLogStore
    meta: MemoryMeta
    broker: Broker

    async def restart(self) -> None:
        for partition in self.broker.queues.partitions():
            partition.close()  # a dead broker's timers do not go off
        self.broker.queues._is_closed = True
        self.broker = Broker(Config(), self.logs, self.meta, self.clock, Metrics())
        await self.broker.start()

    async def topic(self, partitions: int = 1, /, **settings: str) -> None:
        await self.broker.topics.create("jobs", partitions, settings)

    async def put(self, *values: bytes, key: bytes | None = None, headers: dict[str, str] | None = None) -> None:
        topic = self.broker.topics.get("jobs")
        assert topic is not None
        pairs = tuple((name, value.encode()) for name, value in (headers or {}).items())
        puts = [self.broker.inlet(topic.partitions[0]).put(value, key, pairs) for value in values]
        for put in puts:
            await put

    async def queue(self, **settings: str) -> tuple[Queue, QueuePartition]:
        queue = self.broker.queues.open("workers", settings={**EARLIEST, **_dotted(settings)})
        topic = self.broker.topics.get("jobs")
        assert topic is not None
        return queue, await queue.partition(topic, 0)

    async def dead(self) -> list[Record]:
        await settle()
        topic = self.broker.topics.get("__dlq__")
        if topic is None:
            return []
        return [r for p in topic.partitions for r in codec.iterate(p.log.read(0, 1 << 30).value().to_bytes())]


def _dotted(settings: dict[str, str]) -> dict[str, str]:
    return {name.replace("__", "."): value for name, value in settings.items()}


async def settle() -> None:
    """Lets what runs in the background come to its end: everything is in memory, so a few turns are enough."""
    for _ in range(30):
        await asyncio.sleep(0)


@pytest.fixture
async def kit() -> AsyncIterator[Kit]:
    clock = VirtualClock()
    logs, meta = MemoryLogStore(clock), MemoryMeta()
    kit = Kit(clock, logs, meta, Broker(Config(), logs, meta, clock, Metrics()))
    await kit.broker.start()
    yield kit
    await kit.broker.close()


def accept(partition: QueuePartition, member: Member, *taken: TakenRecord) -> None:
    say(partition, member, Verb.ACCEPT, *taken)


def say(partition: QueuePartition, member: Member, verb: Verb, *taken: TakenRecord, **more: object) -> None:
    for each in taken:
        partition.answer(member, [Answer(each.record.offset, each.record.offset, verb, **more)])  # type: ignore[arg-type]


async def take(partition: QueuePartition, member: Member, count: int = 1000) -> list[TakenRecord]:
    return await partition.take(member, count, 1 << 20)


def values(taken: list[TakenRecord]) -> list[bytes | None]:
    return [each.record.value for each in taken]


class Losing(Solo):
    """Looks after all groups, until it is told otherwise."""

    has_lost = False

    def check(self, group_id: str) -> None:
        if self.has_lost:
            raise RequestError(Code.NOT_COORDINATOR, "another broker coordinates the group")
