"""What the tests of share groups have in common: a broker in memory, a clock that stands still, writes that wait."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from millstream.broker.broker import Broker
from millstream.broker.groups.groups import ShareBeat
from millstream.broker.groups.queue.partition import QueuePartition
from millstream.broker.groups.queue.share import ShareGroup
from millstream.broker.groups.queue.share_fetch import Leased, ShareFetch
from millstream.broker.groups.queue.verbs import Run
from millstream.broker.groups.stream.consumer_member import BeatAnswer
from millstream.config import Config
from millstream.core.metrics import Metrics
from millstream.stores.memory import MemoryLogStore
from millstream.testing.clock import VirtualClock
from tests.unit.groups_kit import HeldMeta

SESSION_SECONDS = 45
LEASE_SECONDS = 30


class Kit:
    """A broker in memory, whose writes to the metadata store can be held back."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.logs = MemoryLogStore(self.clock)
        self.meta = HeldMeta()
        self.broker = self._make()

    def _make(self) -> Broker:
        return Broker(Config(), self.logs, self.meta, self.clock, Metrics())

    async def restart(self) -> None:
        self.broker.groups.close()
        for partition in self.broker.queues.partitions():
            partition.close()
        self.broker = self._make()
        await self.broker.start()

    @property
    def group(self) -> ShareGroup:
        return self.broker.groups.share("g")

    async def beat(self, member_id: str, epoch: int, *topics: str, **more: Any) -> BeatAnswer:
        names = frozenset(topics) if topics else frozenset({"jobs"}) if epoch == 0 else None
        return await self.broker.groups.share_heartbeat(ShareBeat("g", member_id, epoch, topics=names, **more))

    def listed(self) -> dict[str, tuple[str, str, int]]:
        return {each.group_id: (each.type, each.state, each.members) for each in self.broker.groups.list()}

    async def put(self, *values: bytes) -> None:
        topic = self.broker.topics.get("jobs")
        assert topic is not None
        for value in values:
            await self.broker.inlet(topic.partitions[0]).put(value)

    async def partition(self) -> QueuePartition:
        topic = self.broker.topics.get("jobs")
        assert topic is not None
        return await self.broker.queues.open("g").partition(topic, 0)

    def fetch(self, member_id: str, records_max: int = 500, indexes: Sequence[int] = (0, 1)) -> ShareFetch:
        topic = self.broker.topics.get("jobs")
        assert topic is not None
        seat = self.group.take_seat(member_id)
        queue = self.broker.queues.open("g")
        places = [(topic.id, index) for index in indexes]
        return ShareFetch(queue, seat, self.group.lines, self.broker.topics, places, records_max, 1 << 20)

    async def lease(self, member_id: str, records_max: int = 500) -> list[Run]:
        return runs_of(await self.fetch(member_id, records_max).run(self.clock, 0, False, lambda: None))


@pytest.fixture
async def shares() -> AsyncIterator[Kit]:
    kit = Kit()
    await kit.broker.start()
    await kit.broker.topics.create("jobs", 2, {})
    await kit.broker.queues.configure("g", {"share.auto.offset.reset": "earliest"})
    yield kit
    kit.meta.land_all()  # of a test that failed
    await kit.broker.close()


def runs_of(leased: list[Leased]) -> list[Run]:
    return [run for each in leased for run in each.taken.runs]
