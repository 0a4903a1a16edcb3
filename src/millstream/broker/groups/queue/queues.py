"""The registry of queues: finds or creates the group of a request, and owns the parts that all queues share."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from functools import partial

from millstream.broker.groups.founders import Founders
from millstream.broker.groups.journal import Entry, Journal
from millstream.broker.groups.queue.dead_letters import DeadLetters
from millstream.broker.groups.queue.done_retention import DoneRetention
from millstream.broker.groups.queue.partition import QueuePartition
from millstream.broker.groups.queue.queue import Queue
from millstream.broker.groups.queue.settings import clean
from millstream.broker.groups.queue.storage import (
    QUEUES_PREFIX,
    Stored,
    StoredSettings,
    group_prefix,
    read_settings,
    settings_put,
    split_key,
)
from millstream.broker.groups.settings import GroupSettings
from millstream.broker.topics import Topics
from millstream.cluster.base import Cluster, Owns, Solo
from millstream.core.clock import Clock
from millstream.core.errors import Code, RequestError
from millstream.core.promise import Promise, promised
from millstream.stores.base import Delete, MetaStore, Put, Versioned

logger = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
Committed = Callable[[], Iterable[tuple[str, str, int, int]]]
"""Group, topic, partition and offset of each commit of a stream group."""
GroupTopicPartition = tuple[str, str, int]
"""Group, topic name, partition."""


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
        self._founders = Founders[str](
            "queues", settings.groups_per_peer_max, settings.groups_max, lambda name: name in self._queues
        )
        self._queues: dict[str, Queue] = {}
        self._deleting: set[str] = set()
        self._era = 0
        """Incremented when the broker loses all queues; loads of an earlier era are dropped."""
        self._is_closed = False
        self._dead_letters = DeadLetters(topics, clock, in_background, self._cluster.check)
        self._retention = DoneRetention(meta, topics, clock, self.partitions, committed)
        self._unwatch = topics.watch(self._topics_changed)
        self.is_taken: Callable[[str], bool] = lambda group_id: False
        """Whether a group id belongs to a group of another discipline."""

    async def start(self) -> None:
        """A single broker opens every queue. In a cluster a broker opens the queues of its shards."""
        if isinstance(self._cluster, Solo):
            await self.adopt(lambda group_id: True)
            for partition in self.partitions():
                await partition.flush()  # stores a position that fell back before the log grows past the old one
            await self._retention.start()  # in a cluster a broker does not see the progress of every group

    async def adopt(self, owns: Owns) -> None:
        """Opens the stored queues that `owns` selects, of an earlier process or another broker. Drops the state of
        deleted topics.
        """
        self._open_stored(await self._meta.list(QUEUES_PREFIX), owns)

    def _open_stored(self, listed: Iterable[tuple[str, Versioned]], owns: Owns) -> None:
        found: dict[GroupTopicPartition, Stored] = {}
        settings: dict[str, StoredSettings] = {}
        for key, stored in listed:
            group_id, rest = split_key(key)
            if not owns(group_id):
                continue
            settings.setdefault(group_id, StoredSettings())
            if rest is None:
                settings[group_id] = read_settings(stored.value)
            else:
                name, index, part = rest
                found.setdefault((group_id, name, index), Stored()).take(key, part, stored.value)
        for group_id, kept_settings in settings.items():
            self._make(group_id, kept_settings, durable=True)
        orphans: dict[GroupTopicPartition, Callable[[], list[str]]] = {}
        for (group_id, name, index), kept in found.items():
            topic = self._topics.get(name)
            if topic is None or kept.head is None or kept.head.topic_id != topic.id.hex:
                orphans[group_id, name, index] = partial(list, kept.keys)
            else:
                self._queues[group_id].restore(topic, index, kept, isinstance(self._cluster, Solo))
        self._sweep(orphans)

    def _sweep(self, orphans: Mapping[GroupTopicPartition, Callable[[], Iterable[str]]]) -> None:
        """Deletes the state of deleted topics, and retries until it succeeds: a new topic of that name must not inherit
        it.
        """
        era = self._era

        def prepare() -> Iterator[Delete]:
            for (group_id, name, index), keys in orphans.items() if era == self._era else ():
                if group_id in self._deleting:  # a failed delete may restore it, with this partition
                    raise RequestError(Code.COORDINATOR_LOAD_IN_PROGRESS, f"queue {group_id} is being deleted")
                queue = self._queues.get(group_id)
                successor = queue.place(name, index) if queue is not None else None
                held = {each.key for each in successor.removal()} if successor is not None else set()
                yield from (Delete(key) for key in keys() if key not in held)

        def swept(done: Promise[None]) -> None:
            if done.error is not None:
                self._clock.call_later(RETRY_SECONDS, again)

        def again() -> None:
            if era == self._era and not self._is_closed:
                self._sweep(orphans)

        self._journal.submit(Entry(prepare)).then(swept)

    def release(self) -> None:
        """Another broker coordinates the queues now: drops their state here and writes nothing."""
        self._era += 1
        self._journal.drop_waiting(RequestError(Code.NOT_COORDINATOR, "another broker coordinates the queue"))
        queues = [queue for queue in self._queues.values() if queue.is_durable]
        for queue in queues:
            del self._queues[queue.id]
            queue.close()

    def open(
        self,
        group_id: str,
        *,
        durable: bool = True,
        settings: Mapping[str, str] | None = None,
        door_defaults: Mapping[str, str] | None = None,
        client_host: str = "",
    ) -> Queue:
        """Finds or creates the group. `settings` apply to a new group, `door_defaults` are its door's values for
        missing settings, `client_host` is its client's host.
        """
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
            detail = f"the broker has {self._settings.groups_max} queues, the limit; delete some, or raise groups_max"
            raise RequestError(Code.POLICY_VIOLATION, detail)
        self._founders.check(client_host)
        self._founders.add(group_id, client_host)
        queue = self._make(group_id, StoredSettings(settings or {}, door_defaults or {}), durable=durable)
        if durable:
            self._keep_settings(queue)
        return queue

    def _keep_settings(self, queue: Queue) -> None:
        """Stores a new queue's settings, with retries: without them a restart may begin at another offset."""

        def prepare() -> list[Put]:
            is_there = self._queues.get(queue.id) is queue
            return [settings_put(queue.id, StoredSettings(queue.overrides, queue.door_defaults))] if is_there else []

        def kept(done: Promise[None]) -> None:
            if done.error is not None and self._queues.get(queue.id) is queue and not self._is_closed:
                self._clock.call_later(RETRY_SECONDS, lambda: self._keep_settings(queue))

        self._journal.submit(Entry(prepare)).then(kept)

    def _make(self, group_id: str, settings: StoredSettings, *, durable: bool) -> Queue:
        old = self._queues.get(group_id)
        if old is not None:  # an earlier load failed half-way and is repeated
            old.close()
        queue = self._queues[group_id] = Queue(
            group_id,
            self._journal,
            self._clock,
            self._dead_letters,
            settings.overrides,
            durable=durable,
            door_defaults=settings.defaults,
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
        queue, era = self._queues.get(group_id), self._era
        if queue is None:
            raise RequestError(Code.GROUP_ID_NOT_FOUND, f"there is no queue {group_id}")
        if queue.members:
            raise RequestError(Code.NON_EMPTY_GROUP, f"queue {group_id} has members; stop them first")
        queue.close(RequestError(Code.GROUP_ID_NOT_FOUND, f"queue {group_id} was deleted"))
        del self._queues[group_id]
        self._deleting.add(group_id)  # the deletion would also hit a queue created during it
        try:
            stored = await self._meta.list(group_prefix(group_id))
            await self._remove(group_id, [key for key, _ in stored], list(queue.partitions()))
        except BaseException:
            self._take_back(group_id, era)
            raise
        self._deleting.discard(group_id)

    async def forget(self, group_id: str, topic: str) -> None:
        """Drops a queue's state of a topic. If the queue reads the topic again, it starts over."""
        queue, era = self._queues.get(group_id), self._era
        if queue is None:
            raise RequestError(Code.GROUP_ID_NOT_FOUND, f"there is no queue {group_id}")
        if queue.members:
            raise RequestError(Code.NON_EMPTY_GROUP, f"queue {group_id} has members; stop them first")
        stored = await self._meta.list(f"{group_prefix(group_id)}{topic}/")
        # No await until the removal is in the journal: the writes of a new start must follow it.
        self._cluster.check(group_id)
        if self._queues.get(group_id) is not queue:
            raise RequestError(Code.COORDINATOR_LOAD_IN_PROGRESS, f"queue {group_id} has just changed; try again")
        if queue.members:
            raise RequestError(Code.NON_EMPTY_GROUP, f"queue {group_id} has members; stop them first")
        places = [partition for partition in queue.partitions() if partition.topic.name == topic]
        for partition in places:
            queue.forget(partition)
        try:
            await self._remove(group_id, [key for key, _ in stored], places)
        except BaseException:
            self._deleting.add(group_id)
            if self._queues.get(group_id) is queue:
                del self._queues[group_id]
                queue.close()
            self._take_back(group_id, era)
            raise

    def _remove(self, group_id: str, keys: list[str], places: list[QueuePartition]) -> Promise[None]:
        """Deletes the listed keys, and keys that these partitions wrote since."""

        def prepare() -> list[Delete]:
            self._cluster.check(group_id)
            later = (each.key for place in places for each in place.removal())
            return [Delete(key) for key in dict.fromkeys((*keys, *later))]

        return self._journal.submit(Entry(prepare))

    def _take_back(self, group_id: str, era: int) -> None:
        """Reloads a queue whose deletion failed: a new queue would not know the stored state."""
        promised(self._load(group_id, era)).then(partial(self._taken_back, group_id, era))

    async def _load(self, group_id: str, era: int) -> None:
        stored = await self._meta.list(group_prefix(group_id))
        if era == self._era and not self._is_closed:
            self._open_stored(stored, lambda each: each == group_id)

    def _taken_back(self, group_id: str, era: int, done: Promise[None]) -> None:
        if done.error is not None and era == self._era and not self._is_closed:
            self._clock.call_later(RETRY_SECONDS, lambda: self._take_back(group_id, era))
        else:
            self._deleting.discard(group_id)

    async def configure(self, group_id: str, overrides: Mapping[str, str]) -> None:
        """Replaces all of a group's own settings; creates the group if it is new."""
        cleaned = clean(overrides)
        queue = self.open(group_id, settings=cleaned)
        put = settings_put(group_id, StoredSettings(cleaned, queue.door_defaults))
        await self._journal.submit(Entry(lambda: [put], lambda: queue.configured(cleaned)))

    def overrides(self, group_id: str) -> Mapping[str, str]:
        queue = self._queues.get(group_id)
        return queue.overrides if queue is not None else {}

    def _drop_if_empty(self, queue: Queue) -> None:
        """Drops a private queue with its last member; its dead records still reach the dead-letter topic."""
        if not queue.members:
            del self._queues[queue.id]
            for partition in queue.partitions():
                self._retention.leave(partition)
                partition.stop()

    def _topics_changed(self) -> None:
        gone = [each for each in self.partitions() if self._topics.get(each.topic.name) is not each.topic]
        for partition in gone:
            queue = self._queues[partition.group_id]
            queue.forget(partition)
            place = partition.group_id, partition.topic.name, partition.index
            self._sweep({place: partial(_keys, partition)})

    def prepare_to_close(self) -> None:
        """The doors are about to close. An interrupted delivery is never the last attempt, as after a crash."""
        for queue in self._queues.values():
            queue.is_stopping = queue.is_durable

    async def close(self) -> None:
        self._unwatch()
        await self._retention.stop()
        self._is_closed = True
        for partition in self.partitions():
            try:
                await partition.flush()
            except RequestError as error:  # costs redeliveries; the other partitions still close
                logger.warning("cannot store queue %s: %s", partition.group_id, error)
        for queue in list(self._queues.values()):
            queue.close()


def _keys(partition: QueuePartition) -> list[str]:
    return [each.key for each in partition.removal()]
