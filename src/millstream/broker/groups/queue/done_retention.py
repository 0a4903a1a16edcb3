"""Retention of records that every group is done with: `millstream.retention.done.ms` of a topic.

Every `CHECK_MS` the broker notes up to which offset each partition is done. It trims records below expired notes. Other
retention applies as well.

Rules
-----
1. A reader is done up to its lowest open record (queues), its committed offset (streams, exclusive groups) or its
   position (cursors). The partition is done up to the lowest of its readers.
2. A private queue says nothing about records below its first offset. They are done only if another reader is done with
   them.
3. A note outlives its readers. A removed private queue leaves its note, which ages as if the queue still existed.
   Records that the queue left open, and later records, wait for another reader.
4. A reader below a note removes it: a new group, or a group that was moved back, still needs these records.
5. Notes belong to a topic's id, not to its name: a recreated topic starts without notes.
6. The done offset of a partition is stored. After a restart no reader knows it if only private queues were done. It is
   written when a private queue is removed, at each check that changes it, and at shutdown. After a restart it ages from
   the first check on. It is never above the end of the log: with `flush=os` new records may get these offsets.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from millstream.broker.groups.deadline import Deadline
from millstream.broker.groups.exclusive import PREFIX, State
from millstream.broker.groups.queue.partition import QueuePartition
from millstream.broker.topics import Topic, Topics
from millstream.core.clock import Clock
from millstream.core.errors import RequestError
from millstream.core.logs import Damped
from millstream.core.promise import Promise
from millstream.stores.base import Delete, MetaStore, Put, Versioned

refusals = Damped(__name__)

CHECK_MS = 5_000
DONE_PREFIX = "done/"
"""Keys are `done/TOPIC-ID/PARTITION`. The value is the offset, in decimal."""
TopicIdPartition = tuple[uuid.UUID, int]
"""Topic id, partition."""


class Reader(NamedTuple):
    first: int
    """Its first offset: it says nothing about records below."""
    low: int
    """All records from `first` up to this offset are done."""


class Progress:
    """The done offset of one partition, and its notes."""

    __slots__ = ("done", "notes")

    def __init__(self, start: int) -> None:
        self.done = start
        self.notes: deque[tuple[int, int]] = deque()
        """Time and offset, oldest first."""

    def leave(self, reader: Reader, start: int) -> None:
        """Removes a reader. The next check asks the remaining readers."""
        done = max(self.done, start)
        if reader.first <= done:
            self.done = max(done, reader.low)

    def note(self, readers: Sequence[Reader], start: int, now_ms: int) -> None:
        self.done = max(self.done, start)
        if any(reader.first <= self.done for reader in readers):
            self.done = min(reader.low for reader in readers)
        notes = self.notes
        while notes and notes[-1][1] > self.done:
            notes.pop()
        if self.done > (notes[-1][1] if notes else start):
            notes.append((now_ms, self.done))

    def take_expired(self, noted_ms: int) -> int:
        """The done offset at that time; 0 if no note is that old."""
        reached = 0
        while self.notes and self.notes[0][0] <= noted_ms:
            reached = self.notes.popleft()[1]
        return reached


class DoneRetention:
    def __init__(
        self,
        meta: MetaStore,
        topics: Topics,
        clock: Clock,
        partitions: Callable[[], Iterator[QueuePartition]],
        committed: Callable[[], Iterable[tuple[str, str, int, int]]],
    ) -> None:
        self._meta = meta
        self._topics = topics
        self._clock = clock
        self._partitions = partitions
        self._committed = committed
        self._progress: dict[TopicIdPartition, Progress] = {}
        self._stored: dict[TopicIdPartition, int] = {}
        self._is_saving = False
        self._is_running = False
        self._exclusive: dict[str, bytes] = {}
        """The stored states of exclusive groups: their members may be in any process."""
        self._unwatch: Callable[[], None] = lambda: None
        self._alarm = Deadline(clock, self._check)

    async def start(self) -> None:
        self._unwatch = self._meta.watch(PREFIX, self._heard)
        for key, stored in await self._meta.list(PREFIX):
            self._exclusive.setdefault(key, stored.value)
        for key, stored in await self._meta.list(DONE_PREFIX):
            topic_id, _, index = key[len(DONE_PREFIX) :].partition("/")
            self._restore((uuid.UUID(topic_id), int(index)), int(stored.value))
        self._is_running = True
        self._alarm.push(CHECK_MS)

    def _restore(self, place: TopicIdPartition, done: int) -> None:
        self._stored[place] = done
        topic = self._topics.by_id(place[0])
        if topic is not None and place[1] < topic.partition_count:
            log = topic.partitions[place[1]].log
            progress = self._progress[place] = Progress(log.start)
            progress.done = max(log.start, min(done, log.end))

    async def stop(self) -> None:
        self._is_running = False
        self._unwatch()
        self._alarm.stop()
        done = self._done()
        if operations := self._changes(done):
            try:
                await self._meta.transact(*operations)
            except RequestError as error:
                _warn(error)

    def _heard(self, key: str, versioned: Versioned | None) -> None:
        if versioned is None:
            self._exclusive.pop(key, None)
        else:
            self._exclusive[key] = versioned.value

    def leave(self, partition: QueuePartition) -> None:
        """Removes a private queue: a client may subscribe, acknowledge and disconnect between two checks."""
        topic, log = partition.topic, partition.log
        if not self._is_running or topic.settings.done_retention_ms < 0 or self._topics.get(topic.name) is not topic:
            return
        progress = self._progress.setdefault((topic.id, partition.index), Progress(log.start))
        progress.leave(Reader(partition.first, partition.low), log.start)
        self._save()

    def _check(self) -> None:
        self._alarm.push(CHECK_MS)
        topics = {topic.id: topic for topic in self._topics if topic.settings.done_retention_ms >= 0}
        readers: dict[TopicIdPartition, list[Reader]] = {place: [] for place in self._progress}
        for topic, index, reader in self._readers() if topics else ():
            readers.setdefault((topic.id, index), []).append(reader)
        now_ms = self._clock.now_ms()
        before, self._progress = self._progress, {}
        for place, reading in readers.items():
            found = topics.get(place[0])
            if found is None or place[1] >= found.partition_count:
                continue
            log = found.partitions[place[1]].log
            progress = before.get(place) or Progress(log.start)
            progress.note(reading, log.start, now_ms)
            reached = progress.take_expired(now_ms - found.settings.done_retention_ms)
            if reached > log.start and log.damage.lost is None:
                log.trim(min(reached, log.high_watermark))
            if progress.notes:
                self._progress[place] = progress
        self._save()

    # -- storing -----------------------------------------------------------------------------------------------------

    def _done(self) -> dict[TopicIdPartition, int]:
        """The done offsets of partitions that still hold done records, for a restart."""
        done = {}
        for place, progress in self._progress.items():
            topic = self._topics.by_id(place[0])
            if topic is not None and progress.done > topic.partitions[place[1]].log.start:
                done[place] = progress.done
        return done

    def _changes(self, done: dict[TopicIdPartition, int]) -> list[Put | Delete]:
        puts = [Put(_key(place), b"%d" % offset) for place, offset in done.items() if self._stored.get(place) != offset]
        return [*puts, *(Delete(_key(place)) for place in self._stored if place not in done)]

    def _save(self) -> None:
        done = self._done()
        if self._is_saving or not self._is_running or not (operations := self._changes(done)):
            return
        self._is_saving = True

        def saved(promise: Promise[int]) -> None:
            self._is_saving = False
            if promise.error is not None:  # the next check retries
                _warn(promise.error)
                return
            self._stored = done
            self._save()  # changes made during the write

        self._meta.transact(*operations).then(saved)

    def _readers(self) -> Iterator[tuple[Topic, int, Reader]]:
        for each in self._partitions():
            if self._topics.get(each.topic.name) is each.topic:
                yield each.topic, each.index, Reader(each.first, each.low)
        for _, name, index, offset in self._committed():
            if (topic := self._topics.get(name)) is not None:
                yield topic, index, Reader(0, offset)
        by_id = {topic.id.hex: topic for topic in self._topics}
        for state in map(State.decode, self._exclusive.values()):
            if (reads := by_id.get(state.topic_id)) is not None:
                for index in range(len(reads.partitions)):
                    yield reads, index, Reader(0, state.positions.get(index, 0))


def _key(place: TopicIdPartition) -> str:
    return f"{DONE_PREFIX}{place[0].hex}/{place[1]}"


def _warn(error: BaseException) -> None:
    refusals.warning("cannot store the progress of done retention; done records may stay after a restart: %s", error)
