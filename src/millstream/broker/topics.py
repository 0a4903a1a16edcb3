"""The topics of a broker: created, deleted, grown and configured through the metadata store.

A topic is the key `topics/NAME`: its id, its number of partitions and its settings, as JSON. The key is the source of
truth: a topic exists when its key is durable, and is deleted when the deletion is durable. The broker opens logs with
their topic, and removes them after its deletion.

If the store can tell a lost log from an empty one (`tells_loss`), the broker creates logs before it writes the key, and
the key holds their number: `created`, at most `partitions`. If one of these logs is missing at start, it is lost. Keys
of earlier versions have no such number. At start the broker creates the logs of their topics and rewrites the keys.

Changes of one topic are serialised by compare-and-set on the key's revision. Other brokers over the same store change
topics too: `start` watches the keys, and the topics in memory follow them. A change is applied once, by its revision,
whichever broker made it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from functools import partial

from millstream.broker.partition import Partition
from millstream.broker.settings import TopicSettings, check_name, check_topic
from millstream.core.clock import Clock, sleep
from millstream.core.errors import Code, RequestError, RevisionConflict
from millstream.core.promise import Promise, promised
from millstream.stores.base import Delete, LogStore, MetaStore, Put, Versioned

logger = logging.getLogger(__name__)

PREFIX = "topics/"
RETRY_SECONDS = 1.0
MARKS_MAX = 500
"""Keys per transaction."""
OPENED_A_TURN = 200
"""Logs opened in one turn of the event loop: 5 to 10 ms."""


class Topic:
    __slots__ = ("created", "id", "name", "partitions", "revision", "settings")

    def __init__(
        self,
        name: str,
        topic_id: uuid.UUID,
        partitions: list[Partition],
        settings: TopicSettings,
        revision: int,
        created: int = 0,
    ) -> None:
        self.name = name
        self.id = topic_id
        self.partitions = partitions
        self.settings = settings
        self.revision = revision
        self.created = created
        """How many partitions, from the first, had their logs created before the key."""

    @property
    def partition_count(self) -> int:
        return len(self.partitions)

    def encode(self, partition_count: int, overrides: Mapping[str, str], created: int) -> bytes:
        stored = {"id": str(self.id), "partitions": partition_count, "settings": overrides}
        return json.dumps({**stored, "created": created} if created else stored).encode()


class Topics:
    def __init__(
        self,
        meta: MetaStore,
        logs: LogStore,
        clock: Clock,
        defaults: Mapping[str, str],
        partitions_max: int,
        default_partitions: int,
        auto_create: bool,
    ) -> None:
        self._meta = meta
        self._logs = logs
        self._clock = clock
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
        """Counts changes to the set of topics: a cached partition is stale when it has grown."""
        self._to_follow: dict[str, None] = {}
        """Topics whose keys changed."""
        self._news = 0
        """Counts changes that the watch reported: a read is stale if this grew meanwhile."""
        self._following = False
        self._is_closed = False
        self._unwatch: Callable[[], None] | None = None

    async def start(self) -> None:
        self._unwatch = self._meta.watch(PREFIX, self._heard)
        news = self._news
        for key, versioned in await self._meta.list(PREFIX):
            try:
                await self._take_over(key[len(PREFIX) :], versioned, news)
            except RequestError as error:
                if error.code != Code.UNKNOWN_TOPIC_OR_PARTITION:  # deleted by another broker since it was listed
                    raise
        self._logs.opened_all()
        if self._logs.tells_loss:
            await self._create_unmarked()

    async def _create_unmarked(self) -> None:
        """Creates the logs of topics from earlier versions. On a failure their keys stay as they were."""
        unmarked = [topic for topic in self if topic.created < topic.partition_count]
        try:
            for topic in unmarked:
                new = range(topic.created, topic.partition_count)
                await self._logs.create(topic.name, topic.id.hex, new)
            for first in range(0, len(unmarked), MARKS_MAX):
                marked = unmarked[first : first + MARKS_MAX]
                revision = await self._meta.transact(*(self._mark(topic) for topic in marked))
                for topic in marked:
                    topic.created, topic.revision = topic.partition_count, revision
        except (RequestError, RevisionConflict) as error:
            logger.warning("cannot record which partition directories exist; the next start tries again: %s", error)

    def _mark(self, topic: Topic) -> Put:
        count = topic.partition_count
        return Put(PREFIX + topic.name, topic.encode(count, topic.settings.overrides, count), topic.revision)

    def close(self) -> None:
        self._is_closed = True
        self._to_follow.clear()
        if self._unwatch is not None:
            self._unwatch()

    # -- following ---------------------------------------------------------------------------------------------------

    def _heard(self, key: str, versioned: Versioned | None) -> None:
        """A key changed. If this broker changed it, `_follow` finds nothing to do."""
        name = key[len(PREFIX) :]
        if versioned is not None and self._knows(name, versioned):
            return
        self._news += 1
        self._look_at(name)

    def _look_at(self, name: str) -> None:
        """Schedules a comparison of a topic with the store."""
        self._to_follow[name] = None
        self._follow_soon()

    def _follow_soon(self) -> None:
        if self._to_follow and not self._following and not self._is_closed:
            self._following = True
            promised(self._follow_all()).then(self._followed)

    async def _follow_all(self) -> None:
        while self._to_follow:
            name = next(iter(self._to_follow))
            del self._to_follow[name]
            try:
                await self._follow(name)
            except Exception as error:  # a refusal, or a log that cannot be opened
                if self._is_closed:
                    return
                if isinstance(error, RequestError) and error.code == Code.UNKNOWN_TOPIC_OR_PARTITION:
                    # Another broker is deleting it. Retry later; other topics do not wait for that.
                    self._clock.call_later(RETRY_SECONDS, partial(self._look_at, name))
                    continue
                logger.warning("cannot apply a change of topic %s; retrying: %s", name, error)
                self._to_follow[name] = None
                await sleep(self._clock, RETRY_SECONDS)

    def _followed(self, done: Promise[None]) -> None:
        self._following = False
        if done.error is not None:
            logger.warning("cannot apply changes of topics: %s", done.error)
        self._follow_soon()  # the watch may have reported a change in the last turn of the loop

    async def follow(self, name: str) -> Topic | None:
        """Loads an unknown topic from the store: another broker may have just created it."""
        await self._follow(name)
        return self._by_name.get(name)

    async def refresh(self) -> None:
        """Loads every topic as it is in the store now, ahead of pending changes."""
        stored = {key[len(PREFIX) :]: versioned.revision for key, versioned in await self._meta.list(PREFIX)}
        behind = [name for name, topic in self._by_name.items() if stored.get(name, 0) != topic.revision]
        for name in [*behind, *(name for name in stored if name not in self._by_name)]:
            await self._follow(name)

    async def _follow(self, name: str) -> None:
        while True:
            known, news = self._by_name.get(name), self._news
            versioned = await self._meta.get(PREFIX + name)
            if versioned is not None:
                try:
                    if await self._take_over(name, versioned, news):
                        self._notify()
                    return
                except RequestError as error:
                    if (
                        error.code != Code.UNKNOWN_TOPIC_OR_PARTITION
                        or await self._meta.get(PREFIX + name) == versioned
                    ):
                        raise
                    continue  # another broker has deleted it since the read
            if self._by_name.get(name) is known:
                break
            # Another task has created or loaded it since the read.
        if known is not None:
            self._drop_behind(known)
            self._notify()

    async def _take_over(self, name: str, versioned: Versioned, news: int) -> bool:
        """Applies a key that was read when `_news` was `news`; returns whether that changed the topic."""
        if self._knows(name, versioned):
            return False
        stored = json.loads(versioned.value)
        topic_id, count = uuid.UUID(stored["id"]), stored["partitions"]
        await self._prepare(name, topic_id, count, news)
        if self._knows(name, versioned):
            return False
        topic = self._by_name.get(name)
        if topic is not None and topic.id != topic_id:
            self._drop_behind(topic)
            topic = None
        settings = TopicSettings(stored["settings"], self._defaults)
        created = stored.get("created", 0)
        if topic is None:
            topic = Topic(name, topic_id, [], settings, versioned.revision, created)
            await self._open_partitions(topic, count, created)
            if self._knows(name, versioned):
                return False
            self._add(topic)
        else:
            await self._open_partitions(topic, count, created)
            if self._knows(name, versioned):
                return False
            self._configure(topic, settings)
            topic.created = created
            topic.revision = versioned.revision
        return True

    def _knows(self, name: str, versioned: Versioned) -> bool:
        topic = self._by_name.get(name)
        return topic is not None and topic.revision >= versioned.revision

    async def _prepare(self, name: str, topic_id: uuid.UUID, partition_count: int, news: int) -> None:
        """Prepares the logs of a topic. If `_news` has grown since the store was read, another broker may have deleted
        the topic, so this schedules another look.
        """
        await self._logs.prepare(topic_id.hex, partition_count)
        if self._news != news:
            self._look_at(name)

    def _drop_behind(self, topic: Topic) -> None:
        """Does not wait for the removal, which may take minutes. If it fails, housekeeping continues it."""
        promised(_awaited(self._drop(topic)))

    def _drop(self, topic: Topic) -> Awaitable[None]:
        self._by_name.pop(topic.name, None)
        self._by_id.pop(topic.id, None)
        return self._logs.discard(topic.name, topic.id.hex)

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
        """Calls back after a topic was created, deleted or grown; the result stops it."""
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
        check_topic(overrides, self._defaults)
        if partition_count < 1:
            raise RequestError(Code.INVALID_PARTITIONS, f"a topic needs at least one partition, not {partition_count}")
        self._check_room(partition_count)
        if name in self._by_name:
            raise RequestError(Code.TOPIC_ALREADY_EXISTS, f"topic {name} exists already")
        topic = Topic(name, uuid.uuid4(), [], TopicSettings(overrides, self._defaults), 0)
        if validate_only:
            return topic
        with self._coming(partition_count):
            topic.created = await self._create_logs(topic, range(partition_count))
            news = self._news
            try:
                put = Put(PREFIX + name, topic.encode(partition_count, overrides, topic.created), if_revision=0)
                topic.revision = await self._meta.transact(put)
            except RevisionConflict:
                # After any other error the key may be durable. The next start removes empty directories.
                await self._logs.discard(name, topic.id.hex)
                raise RequestError(Code.TOPIC_ALREADY_EXISTS, f"topic {name} exists already") from None
            await self._prepare(name, topic.id, partition_count, news)
            await self._open_partitions(topic, partition_count, topic.created)
        known = self._by_name.get(name)
        if known is not None and known.revision >= topic.revision:  # the watch was faster
            return known
        if self._news != news:
            self._look_at(name)
        self._add(topic)
        self._notify()
        return topic

    async def ensure(
        self, name: str, partition_count: int | None = None, overrides: Mapping[str, str] | None = None
    ) -> Topic:
        """Returns the topic; creates it if missing and allowed, with `partition_count` or the default."""
        topic = self._by_name.get(name)
        if topic is not None:
            return topic
        if not self.auto_create:
            raise RequestError(Code.UNKNOWN_TOPIC_OR_PARTITION, f"there is no topic {name}")
        try:
            return await self.create(name, partition_count or self.default_partitions, overrides or {})
        except RequestError as error:
            if error.code != Code.TOPIC_ALREADY_EXISTS:
                raise
        # Another request created it first: here, or at another broker, and the watch may be behind.
        if name not in self._by_name:
            await self.follow(name)
        return self._require(name)

    async def delete(self, name: str) -> Awaitable[None]:
        """The topic is deleted on return. The result removes its files, which may take longer."""
        topic = self._require(name)
        while True:
            try:
                await self._meta.transact(Delete(PREFIX + name, topic.revision))
                break
            except RevisionConflict:
                await self._follow(name)  # it changed, here or at another broker; does it still exist?
            if self._require(name) is not topic:
                raise RequestError(Code.UNKNOWN_TOPIC_OR_PARTITION, f"topic {name} was deleted and created again")
        if self._by_name.get(name) is not topic:  # the watch was faster
            return _nothing()
        removal = self._drop(topic)
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
            created = await self._create_logs(topic, range(topic.partition_count, partition_count))
            news = self._news
            revision = await self._store(topic, partition_count, topic.settings.overrides, created)
            # The topic keeps its old revision until its logs are ready. With the new one, a concurrent change would
            # store the old partition count; and if the logs fail, the watch must still apply the growth.
            await self._prepare(name, topic.id, partition_count, news)
            await self._open_partitions(topic, partition_count, created)
        if topic.revision < revision:  # or the watch was faster
            topic.created = created
            topic.revision = revision
            self._notify()

    async def configure(self, name: str, overrides: Mapping[str, str], validate_only: bool = False) -> None:
        """Replaces all overrides of a topic."""
        topic = self._require(name)
        check_topic(overrides, self._defaults)
        if validate_only:
            return
        revision = await self._store(topic, topic.partition_count, overrides, topic.created)
        if topic.revision < revision:  # or the watch was faster, or is newer
            topic.revision = revision
            self._configure(topic, TopicSettings(overrides, self._defaults))

    def set_defaults(self, defaults: Mapping[str, str]) -> None:
        """Sets the defaults under all topics' overrides."""
        self._defaults = defaults
        shared: dict[frozenset[tuple[str, str]], TopicSettings] = {}  # most topics have the same overrides: none
        for topic in self._by_name.values():
            overrides = topic.settings.overrides
            key = frozenset(overrides.items())
            if key not in shared:
                shared[key] = TopicSettings(overrides, defaults)
            self._configure(topic, shared[key])

    def _configure(self, topic: Topic, settings: TopicSettings) -> None:
        topic.settings = settings
        for partition in topic.partitions:
            partition.settings = settings
            partition.log.config = settings.log

    async def _create_logs(self, topic: Topic, new: range) -> int:
        """Creates the logs of new partitions; returns the key's new `created`."""
        await self._logs.create(topic.name, topic.id.hex, new)
        return new.stop if self._logs.tells_loss and topic.created == new.start else topic.created

    async def _store(self, topic: Topic, partition_count: int, overrides: Mapping[str, str], created: int) -> int:
        """Returns the new revision. The caller applies it to the topic, together with the change."""
        put = Put(PREFIX + topic.name, topic.encode(partition_count, overrides, created), topic.revision)
        try:
            return await self._meta.transact(put)
        except RevisionConflict:
            raise RequestError(Code.INVALID_REQUEST, f"topic {topic.name} changed concurrently; try again") from None

    def _require(self, name: str) -> Topic:
        topic = self._by_name.get(name)
        if topic is None:
            raise RequestError(Code.UNKNOWN_TOPIC_OR_PARTITION, f"there is no topic {name}")
        return topic

    @contextlib.contextmanager
    def _coming(self, more: int) -> Iterator[None]:
        """Counts partitions whose write is in flight, so that concurrent creations do not exceed the
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

    async def _open_partitions(self, topic: Topic, partition_count: int, created: int) -> None:
        """Opens new partitions in slices: to open thousands takes longer than other clients should wait. The topic gets
        them together, unless another task was faster.
        """
        first = topic.partition_count
        opened = []
        for index in range(first, partition_count):
            log = self._logs.open(topic.name, topic.id.hex, index, topic.settings.log, index < created)
            opened.append(Partition(index, log, topic.settings))
            if len(opened) % OPENED_A_TURN == 0:
                await asyncio.sleep(0)
        for partition in opened[topic.partition_count - first :]:
            partition.settings = topic.settings  # they may have changed meanwhile
            partition.log.config = topic.settings.log
            topic.partitions.append(partition)

    def _add(self, topic: Topic) -> None:
        self._by_name[topic.name] = topic
        self._by_id[topic.id] = topic

    def _notify(self) -> None:
        self.changes += 1
        for watcher in list(self._watchers.values()):
            watcher()


async def _awaited(work: Awaitable[None]) -> None:
    await work


async def _nothing() -> None:
    return None
