"""The topics of a broker: created, deleted, grown and configured through the metadata store.

A topic is the key `topics/NAME`: its id, its number of partitions and its settings, as JSON. The key is the truth: a
topic exists from the moment its key is durable, and is gone from the moment the deletion is. Logs follow: they are
opened with the topic, and removed behind a deleted one.

Changes of one topic go one after the other, by compare-and-set on the key's revision.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping

from millstream.broker.partition import Partition
from millstream.broker.settings import TopicSettings, check_name, check_overrides
from millstream.errors import Code, RequestError, RevisionConflict
from millstream.stores.base import Delete, LogStore, MetaStore, Put

PREFIX = "topics/"


class Topic:
    __slots__ = ("id", "name", "partitions", "revision", "settings")

    def __init__(
        self, name: str, topic_id: uuid.UUID, partitions: list[Partition], settings: TopicSettings, revision: int
    ) -> None:
        self.name = name
        self.id = topic_id
        self.partitions = partitions
        self.settings = settings
        self.revision = revision

    @property
    def partition_count(self) -> int:
        return len(self.partitions)

    def encode(self, partition_count: int, overrides: Mapping[str, str]) -> bytes:
        return json.dumps({"id": str(self.id), "partitions": partition_count, "settings": overrides}).encode()


class Topics:
    def __init__(
        self,
        meta: MetaStore,
        logs: LogStore,
        defaults: Mapping[str, str],
        partitions_max: int,
        default_partitions: int,
        auto_create: bool,
    ) -> None:
        self._meta = meta
        self._logs = logs
        self._defaults = defaults
        self._partitions_max = partitions_max
        self.default_partitions = default_partitions
        self.auto_create = auto_create
        self._by_name: dict[str, Topic] = {}
        self._by_id: dict[uuid.UUID, Topic] = {}
        self._partitions_coming = 0
        self._watchers: dict[int, Callable[[], None]] = {}
        self._next_watcher = 0
        self.changes = 0
        """Counts changes to the set of topics: whoever remembers a partition remembers this with it."""

    async def start(self) -> None:
        for key, (value, revision) in await self._meta.list(PREFIX):
            stored = json.loads(value)
            name = key[len(PREFIX) :]
            settings = TopicSettings(stored["settings"], self._defaults)
            topic = Topic(name, uuid.UUID(stored["id"]), [], settings, revision)
            self._open_partitions(topic, stored["partitions"])
            self._add(topic)
        self._logs.opened_all()

    # -- looking -----------------------------------------------------------------------------------------------------

    def get(self, name: str) -> Topic | None:
        return self._by_name.get(name)

    def by_id(self, topic_id: uuid.UUID) -> Topic | None:
        return self._by_id.get(topic_id)

    def find(self, key: str | uuid.UUID) -> Topic | None:
        return self._by_name.get(key) if isinstance(key, str) else self._by_id.get(key)

    def names(self) -> Iterable[str]:
        return self._by_name.keys()

    def __iter__(self) -> Iterator[Topic]:
        return iter(list(self._by_name.values()))

    def watch(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Calls back after any topic was created, deleted or grown; the answer ends it."""
        number = self._next_watcher
        self._next_watcher += 1
        self._watchers[number] = callback
        return lambda: self._watchers.pop(number, None) and None

    @property
    def partition_count(self) -> int:
        return sum(topic.partition_count for topic in self._by_name.values())

    # -- changing ----------------------------------------------------------------------------------------------------

    async def create(
        self, name: str, partition_count: int, overrides: Mapping[str, str], validate_only: bool = False
    ) -> Topic:
        check_name(name)
        check_overrides(overrides)
        if partition_count < 1:
            raise RequestError(Code.INVALID_PARTITIONS, f"a topic needs at least one partition, not {partition_count}")
        self._check_room(partition_count)
        if name in self._by_name:
            raise RequestError(Code.TOPIC_ALREADY_EXISTS, f"topic {name} exists already")
        topic = Topic(name, uuid.uuid4(), [], TopicSettings(overrides, self._defaults), 0)
        if validate_only:
            return topic
        with self._coming(partition_count):
            try:
                put = Put(PREFIX + name, topic.encode(partition_count, overrides), if_revision=0)
                topic.revision = await self._meta.transact(put)
            except RevisionConflict:
                raise RequestError(Code.TOPIC_ALREADY_EXISTS, f"topic {name} exists already") from None
        self._open_partitions(topic, partition_count)
        self._add(topic)
        self._notify()
        return topic

    async def ensure(self, name: str, partition_count: int | None = None) -> Topic:
        """The topic, created if it is missing and that is allowed, with so many partitions or the broker's default."""
        topic = self._by_name.get(name)
        if topic is not None:
            return topic
        if not self.auto_create:
            raise RequestError(Code.UNKNOWN_TOPIC_OR_PARTITION, f"there is no topic {name}")
        try:
            return await self.create(name, partition_count or self.default_partitions, {})
        except RequestError as error:
            if error.code != Code.TOPIC_ALREADY_EXISTS:
                raise
        # Somebody else was faster; their promise settled before ours failed, so the topic is in the books.
        return self._require(name)

    async def delete(self, name: str) -> Awaitable[None]:
        """Gone when this returns; what is answered is the removal of its files, which may take longer."""
        topic = self._require(name)
        try:
            await self._meta.transact(Delete(PREFIX + name, topic.revision))
        except RevisionConflict:
            raise RequestError(Code.UNKNOWN_TOPIC_OR_PARTITION, f"topic {name} was changed meanwhile") from None
        self._by_name.pop(name, None)
        self._by_id.pop(topic.id, None)
        removal = self._logs.discard(name, topic.id.hex)
        self._notify()
        return removal

    async def grow(self, name: str, partition_count: int, validate_only: bool = False) -> None:
        topic = self._require(name)
        if partition_count <= topic.partition_count:
            raise RequestError(
                Code.INVALID_PARTITIONS,
                f"topic {name} has {topic.partition_count} partitions; it can only grow, not to {partition_count}",
            )
        more = partition_count - topic.partition_count
        self._check_room(more)
        if validate_only:
            return
        with self._coming(more):
            await self._store(topic, partition_count, topic.settings.overrides)
        self._open_partitions(topic, partition_count)
        self._notify()

    async def configure(self, name: str, overrides: Mapping[str, str], validate_only: bool = False) -> None:
        """Replaces all of a topic's own settings."""
        topic = self._require(name)
        check_overrides(overrides)
        if validate_only:
            return
        await self._store(topic, topic.partition_count, overrides)
        topic.settings = TopicSettings(overrides, self._defaults)
        for partition in topic.partitions:
            partition.settings = topic.settings
            partition.log.config = topic.settings.log

    async def _store(self, topic: Topic, partition_count: int, overrides: Mapping[str, str]) -> None:
        put = Put(PREFIX + topic.name, topic.encode(partition_count, overrides), topic.revision)
        try:
            topic.revision = await self._meta.transact(put)
        except RevisionConflict:
            raise RequestError(Code.INVALID_REQUEST, f"topic {topic.name} was changed meanwhile; try again") from None

    def _require(self, name: str) -> Topic:
        topic = self._by_name.get(name)
        if topic is None:
            raise RequestError(Code.UNKNOWN_TOPIC_OR_PARTITION, f"there is no topic {name}")
        return topic

    @contextlib.contextmanager
    def _coming(self, more: int) -> Iterator[None]:
        """Counts partitions whose topic is on its way to the store, so that several at once do not overrun the
        bound.
        """
        self._partitions_coming += more
        try:
            yield
        finally:
            self._partitions_coming -= more

    def _check_room(self, more: int) -> None:
        if self.partition_count + self._partitions_coming + more > self._partitions_max:
            raise RequestError(
                Code.POLICY_VIOLATION,
                f"the broker holds {self.partition_count} of at most {self._partitions_max} partitions, "
                f"{more} more do not fit; raise partitions_max",
            )

    def _open_partitions(self, topic: Topic, partition_count: int) -> None:
        for index in range(topic.partition_count, partition_count):
            log = self._logs.open(topic.name, topic.id.hex, index, topic.settings.log)
            topic.partitions.append(Partition(index, log, topic.settings))

    def _add(self, topic: Topic) -> None:
        self._by_name[topic.name] = topic
        self._by_id[topic.id] = topic

    def _notify(self) -> None:
        self.changes += 1
        for watcher in list(self._watchers.values()):
            watcher()
