"""What the tests of groups share: topics that are only names, a store whose writes land by hand, a bench."""

from __future__ import annotations

import asyncio
import struct
import uuid
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest

from millstream.broker.groups.groups import Beat, BeatAnswer, Groups, GroupSettings, Join, PartitionCommit, TopicCommit
from millstream.broker.groups.stream.assignors import Partition
from millstream.core.errors import Code, RequestError
from millstream.core.promise import Promise
from millstream.stores.base import Operation
from millstream.stores.keys import MemoryMeta
from millstream.testing.clock import VirtualClock

T = TypeVar("T")


@dataclass
class FakeTopic:
    name: str
    partition_count: int
    id: uuid.UUID = field(default_factory=uuid.uuid4)


class FakeTopics:
    def __init__(self, **counts: int) -> None:
        self._topics = {name: FakeTopic(name, count) for name, count in counts.items()}
        self._watchers: list[Callable[[], None]] = []

    def get(self, name: str) -> FakeTopic | None:
        return self._topics.get(name)

    def by_id(self, topic_id: uuid.UUID) -> FakeTopic | None:
        return next((topic for topic in self._topics.values() if topic.id == topic_id), None)

    def names(self) -> Iterable[str]:
        return self._topics.keys()

    def watch(self, callback: Callable[[], None]) -> Callable[[], None]:
        self._watchers.append(callback)
        return lambda: self._watchers.remove(callback) if callback in self._watchers else None

    def set(self, name: str, count: int) -> None:
        """Creates, grows, or (0) deletes."""
        if count == 0:
            del self._topics[name]
        elif name in self._topics:
            self._topics[name].partition_count = count
        else:
            self._topics[name] = FakeTopic(name, count)
        for watcher in list(self._watchers):
            watcher()


class HeldMeta(MemoryMeta):
    """A store whose transactions become durable when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[tuple[tuple[Operation, ...], Promise[int]]] = []
        self.holding = False

    def transact(self, *operations: Operation) -> Promise[int]:
        if not self.holding:
            return super().transact(*operations)
        promise: Promise[int] = Promise()
        self.held.append((operations, promise))
        return promise

    def land(self) -> None:
        operations, promise = self.held.pop(0)
        done = super().transact(*operations)
        if done.error is not None:
            promise.fail(done.error)
        else:
            promise.settle(done.value())

    def land_all(self) -> None:
        """And nothing waits any more."""
        self.holding = False
        while self.held:
            self.land()

    def lose(self) -> None:
        self.held.pop(0)[1].fail(OSError("disk full"))

    def break_at_commit(self) -> None:
        """The write lands and fails: the connection to the database broke before its answer came."""
        operations, promise = self.held.pop(0)
        assert super().transact(*operations).error is None
        promise.fail(OSError("connection lost"))


class Bench:
    def __init__(self, settings: GroupSettings | None = None, /, **topics: int) -> None:
        self.clock = VirtualClock()
        self.meta = HeldMeta()
        self.topics = FakeTopics(**(topics or {"orders": 4}))
        self.settings = settings or GroupSettings()
        self.groups = Groups(self.meta, self.clock, self.topics, self.settings)

    async def restart(self) -> None:
        self.groups.close()
        self.groups = Groups(self.meta, self.clock, self.topics, self.settings)
        await self.groups.start()

    def join(self, member_id: str = "", **changes: Any) -> asyncio.Task[Any]:
        request = Join(
            group_id="g",
            member_id=member_id,
            instance_id=None,
            client_id="client",
            client_host="localhost",
            session_ms=10_000,
            rebalance_ms=60_000,
            protocol_type="consumer",
            protocols=(("range", subscription("orders")),),
        )
        return start(self.groups.join(request._replace(**changes)))

    def sync(
        self, member_id: str, generation: int, instance_id: str | None = None, **assignments: bytes
    ) -> asyncio.Task[Any]:
        assigned = {name.replace("__", "-"): value for name, value in assignments.items()}
        return start(self.groups.sync("g", member_id, instance_id, generation, (None, None), assigned))

    def plan(self, leader: str, generation: int, assignments: dict[str, bytes]) -> asyncio.Task[Any]:
        return start(self.groups.sync("g", leader, None, generation, (None, None), assignments))

    def heartbeat(self, member_id: str, generation: int, instance_id: str | None = None) -> Code:
        try:
            self.groups.heartbeat("g", member_id, instance_id, generation)
        except RequestError as error:
            return error.code
        return Code.NONE

    def commit(
        self,
        offset: int,
        member_id: str = "",
        epoch: int = -1,
        *,
        group: str = "g",
        topic: Any = "orders",
        instance_id: str | None = None,
    ) -> asyncio.Task[list[list[Code]]]:
        commits = [TopicCommit(topic, [PartitionCommit(0, offset)])]
        return start(self.groups.commit(group, member_id, instance_id, epoch, commits))

    def committed(self, group: str = "g", topic: str = "orders") -> int | None:
        [fetched] = self.groups.fetch(group, [(topic, [0])])
        found = fetched.partitions[0][1]
        return None if found is None else found.offset

    async def beat(self, member_id: str, epoch: int, **fields: Any) -> BeatAnswer:
        if epoch == 0:
            fields = {"rebalance_ms": 60_000, "topics": frozenset({"orders"}), **fields}
        return await self.groups.consumer_heartbeat(Beat("g", member_id, epoch, **fields))


class Client:
    """A consumer as real ones behave: it takes what it is given, and says what it owns when that changed."""

    def __init__(self, bench: Bench, name: str, **subscription: Any) -> None:
        self.bench = bench
        self.name = name
        self.subscription = subscription
        self.epoch = 0
        self.owned: frozenset[Partition] = frozenset()
        self.unsaid = False

    async def beat(self, **fields: Any) -> BeatAnswer | Code:
        if self.epoch == 0:
            fields = {**self.subscription, **fields}
        elif self.unsaid:
            fields = {"owned": self.owned, **fields}
        try:
            answer = await self.bench.beat(self.name, self.epoch, **fields)
        except RequestError as error:
            self.epoch, self.owned = 0, frozenset()
            return error.code
        self.epoch, self.unsaid = answer.epoch, False
        if answer.assignment is not None:
            self.owned = frozenset((topic, n) for topic, numbers in answer.assignment.items() for n in numbers)
            self.unsaid = True
        return answer

    async def leave(self, epoch: int = -1, **fields: Any) -> None:
        await self.bench.beat(self.name, epoch, **fields)
        self.epoch, self.owned = 0, frozenset()

    @property
    def numbers(self) -> list[int]:
        return sorted(number for _, number in self.owned)


async def stable_group(bench: Bench, count: int = 2, **changes: Any) -> list[str]:
    """Members by id, leader first, in a stable group."""
    tasks = [bench.join(**changes)]
    await turn()
    leader = tasks[0].result().member_id
    if count > 1:
        tasks += [bench.join(**changes) for _ in range(count - 1)]
        await turn()
        tasks[0] = bench.join(leader, **changes)
        await turn()
    members = [task.result().member_id for task in tasks]
    generation = tasks[0].result().generation
    syncs = [bench.sync(member, generation) for member in members[1:]]
    plan = bench.plan(leader, generation, {member: member.encode() for member in members})
    await turn()
    assert plan.result().assignment == leader.encode()
    assert [sync.result().assignment for sync in syncs] == [member.encode() for member in members[1:]]
    return members


def start(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    return asyncio.ensure_future(work)


async def turn() -> None:
    """Lets everything that can go on go on."""
    for _ in range(10):
        await asyncio.sleep(0)


async def code_of(work: Any) -> Code:
    with pytest.raises(RequestError) as raised:
        await work
    return raised.value.code


def subscription(*topics: str, owned: bytes = b"") -> bytes:
    names = b"".join(struct.pack(">h", len(topic)) + topic.encode() for topic in topics)
    return struct.pack(">hi", 0, len(topics)) + names + struct.pack(">i", len(owned)) + owned
