"""The registry of queues: finds or makes the group that a request is about, and looks after what all of them need."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping

from millstream.broker.groups.dead_letters import DeadLetters
from millstream.broker.groups.done_retention import DoneRetention
from millstream.broker.groups.journal import Entry, Journal
from millstream.broker.groups.queue import Queue
from millstream.broker.groups.queue_partition import QueuePartition
from millstream.broker.groups.queue_settings import clean
from millstream.broker.groups.queue_shelf import (
    QUEUES_PREFIX,
    Stored,
    group_prefix,
    read_settings,
    settings_put,
    split_key,
)
from millstream.broker.groups.settings import GroupSettings
from millstream.broker.topics import Topics
from millstream.clock import Clock
from millstream.cluster.base import Cluster, Owns, Solo
from millstream.errors import Code, RequestError
from millstream.stores.base import Delete, MetaStore

Committed = Callable[[], Iterable[tuple[str, str, int, int]]]
"""Group, topic, partition and offset of what stream groups have committed."""


class Queues:
    def __init__(
        self,
        meta: MetaStore,
        clock: Clock,
        topics: Topics,
        settings: GroupSettings,
        in_background: Callable[[Awaitable[None]], None],
        committed: Committed,
        cluster: Cluster | None = None,
    ) -> None:
        self._cluster = cluster or Solo(0)
        self._meta = meta
        self._clock = clock
        self._topics = topics
        self._settings = settings
        self._journal = Journal(meta, settings.writes_waiting_max, self._cluster)
        self._queues: dict[str, Queue] = {}
        self._deleting: set[str] = set()
        self._dead_letters = DeadLetters(topics, clock, in_background)
        self._retention = DoneRetention(topics, clock, self.partitions, committed)
        self._unwatch = topics.watch(self._topics_changed)
        self.is_taken: Callable[[str], bool] = lambda group_id: False
        """Whether a group id belongs to a group of another discipline."""

    async def start(self) -> None:
        """A broker alone opens every queue there is; one of several those that the cluster gives it."""
        if isinstance(self._cluster, Solo):
            await self.adopt(lambda group_id: True)
            self._retention.start()  # one of several does not see how far the others' groups are

    async def adopt(self, owns: Owns) -> None:
        """Opens some of the queues that an earlier broker kept, or another one. What belongs to topics that are gone is
        dropped.
        """
        found: dict[tuple[str, str, int], Stored] = {}
        settings: dict[str, dict[str, str]] = {}
        for key, stored in await self._meta.list(QUEUES_PREFIX):
            group_id, rest = split_key(key)
            if not owns(group_id):
                continue
            settings.setdefault(group_id, {})
            if rest is None:
                settings[group_id] = read_settings(stored.value)
            else:
                name, index, part = rest
                found.setdefault((group_id, name, index), Stored()).take(key, part, stored.value)
        for group_id, overrides in settings.items():
            self._make(group_id, overrides, durable=True)
        orphans: list[str] = []
        for (group_id, name, index), kept in found.items():
            topic = self._topics.get(name)
            if topic is None or kept.head is None or kept.head.topic_id != topic.id.hex:
                orphans += kept.keys
            else:
                self._queues[group_id].restore(topic, index, kept)
        self._journal.submit(Entry(lambda: [Delete(key) for key in orphans]))

    def release(self) -> None:
        """Another broker looks after them now: nothing that is known here counts any more, and nothing is written."""
        self._journal.drop_waiting(RequestError(Code.NOT_COORDINATOR, "another broker looks after the queue"))
        queues = [queue for queue in self._queues.values() if queue.is_durable]
        for queue in queues:
            del self._queues[queue.id]
            queue.close()

    def open(self, group_id: str, *, durable: bool = True, settings: Mapping[str, str] | None = None) -> Queue:
        """The group, made if it is new; `settings` are those of a new one."""
        if durable:
            self._cluster.check(group_id)
        queue = self._queues.get(group_id)
        if queue is not None:
            return queue
        if group_id in self._deleting:
            raise RequestError(Code.COORDINATOR_LOAD_IN_PROGRESS, f"queue {group_id} is being deleted; try again")
        if not group_id or len(group_id.encode()) > self._settings.group_id_bytes_max:
            detail = f"a group id has 1 to {self._settings.group_id_bytes_max} bytes"
            raise RequestError(Code.INVALID_GROUP_ID, detail)
        if durable and self.is_taken(group_id):
            raise RequestError(
                Code.INCONSISTENT_GROUP_PROTOCOL, f"group {group_id} is not a queue; choose another name, or delete it"
            )
        if len(self._queues) >= self._settings.groups_max:
            detail = f"the broker keeps {self._settings.groups_max} queues already; delete some, or raise groups_max"
            raise RequestError(Code.POLICY_VIOLATION, detail)
        queue = self._make(group_id, clean(settings or {}), durable=durable)
        if durable:
            self._journal.submit(Entry(lambda: [settings_put(group_id, queue.overrides)]))
        return queue

    def _make(self, group_id: str, overrides: Mapping[str, str], *, durable: bool) -> Queue:
        old = self._queues.get(group_id)
        if old is not None:  # what loaded it before failed half-way, and began again
            old.close()
        queue = self._queues[group_id] = Queue(
            group_id,
            self._journal,
            self._clock,
            self._dead_letters,
            overrides,
            durable=durable,
            on_member_left=None if durable else self._drop_if_empty,
        )
        return queue

    def get(self, group_id: str) -> Queue | None:
        return self._queues.get(group_id)

    def names(self) -> Iterable[str]:
        return [group_id for group_id, queue in self._queues.items() if queue.is_durable]

    def partitions(self) -> Iterator[QueuePartition]:
        for queue in list(self._queues.values()):
            yield from queue.partitions()

    async def delete(self, group_id: str) -> None:
        queue = self._queues.get(group_id)
        if queue is None:
            raise RequestError(Code.GROUP_ID_NOT_FOUND, f"there is no queue {group_id}")
        if queue.members:
            raise RequestError(Code.NON_EMPTY_GROUP, f"queue {group_id} has members; stop them first")
        queue.close(RequestError(Code.GROUP_ID_NOT_FOUND, f"queue {group_id} was deleted"))
        del self._queues[group_id]
        self._deleting.add(group_id)  # one that is made anew meanwhile would be deleted with it
        try:
            await self._remove(group_id, group_prefix(group_id))
        finally:
            self._deleting.discard(group_id)

    async def forget(self, group_id: str, topic: str) -> None:
        """A queue's place in a topic goes; should it come back, it begins anew."""
        queue = self._queues.get(group_id)
        if queue is None:
            raise RequestError(Code.GROUP_ID_NOT_FOUND, f"there is no queue {group_id}")
        if queue.members:
            raise RequestError(Code.NON_EMPTY_GROUP, f"queue {group_id} has members; stop them first")
        for partition in queue.partitions():
            if partition.topic.name == topic:
                queue.forget(partition)
        await self._remove(group_id, f"{group_prefix(group_id)}{topic}/")

    async def _remove(self, group_id: str, prefix: str) -> None:
        stored = await self._meta.list(prefix)

        def prepare() -> list[Delete]:
            self._cluster.check(group_id)  # it may have been lost while the keys were listed
            return [Delete(key) for key, _ in stored]

        await self._journal.submit(Entry(prepare))

    async def configure(self, group_id: str, overrides: Mapping[str, str]) -> None:
        """Replaces all of a group's own settings; the group is made if it is new."""
        cleaned = clean(overrides)
        queue = self.open(group_id, settings=cleaned)
        await self._journal.submit(Entry(lambda: [settings_put(group_id, cleaned)], lambda: queue.configured(cleaned)))

    def overrides(self, group_id: str) -> Mapping[str, str]:
        queue = self._queues.get(group_id)
        return queue.overrides if queue is not None else {}

    def _drop_if_empty(self, queue: Queue) -> None:
        """A private queue goes with its last member; what it has given up still reaches the dead-letter topic."""
        if not queue.members:
            del self._queues[queue.id]
            for partition in queue.partitions():
                partition.stop()

    def _topics_changed(self) -> None:
        gone = [each for each in self.partitions() if self._topics.get(each.topic.name) is not each.topic]
        for partition in gone:
            queue = self._queues[partition.group_id]
            queue.forget(partition)
            self._journal.submit(Entry(partition.removal))

    async def close(self) -> None:
        self._unwatch()
        self._retention.stop()
        for partition in self.partitions():
            await partition.flush()
        for queue in list(self._queues.values()):
            queue.close()
