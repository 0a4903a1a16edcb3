"""Retention of what every group is done with: `millstream.retention.done.ms` of a topic.

Every so often it is noted how far all groups are done with a partition. What they were done with that long ago goes. A
group is done up to its lowest open record (queues), its committed offset (streams, exclusive groups) or its position
(cursors). Nothing goes while no group reads the partition, and other retention goes on beside it. A private queue keeps
what it is not done with as well, but began somewhere: what lies before that waits for a group.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

from millstream.broker.groups.deadline import Deadline
from millstream.broker.groups.exclusive import PREFIX, State
from millstream.broker.groups.queue_partition import QueuePartition
from millstream.broker.topics import Topics
from millstream.clock import Clock
from millstream.stores.base import MetaStore, Versioned

CHECK_MS = 5_000


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
        self._notes: dict[tuple[str, int], deque[tuple[int, int]]] = {}
        """Time and offset, oldest first."""
        self._exclusive: dict[str, bytes] = {}
        """The states of exclusive groups, as they are stored: their members may be anybody's."""
        self._unwatch: Callable[[], None] = lambda: None
        self._alarm = Deadline(clock, self._check)

    async def start(self) -> None:
        self._unwatch = self._meta.watch(PREFIX, self._heard)
        for key, stored in await self._meta.list(PREFIX):
            self._exclusive.setdefault(key, stored.value)
        self._alarm.push(CHECK_MS)

    def stop(self) -> None:
        self._unwatch()
        self._alarm.stop()

    def _heard(self, key: str, versioned: Versioned | None) -> None:
        if versioned is None:
            self._exclusive.pop(key, None)
        else:
            self._exclusive[key] = versioned.value

    def _check(self) -> None:
        self._alarm.push(CHECK_MS)
        kept_ms = {topic.name: topic.settings.done_retention_ms for topic in self._topics}
        done: dict[tuple[str, int], int] = {}
        read_from_the_start: set[tuple[str, int]] = set()
        for topic, index, offset, is_from_start in (
            self._positions() if any(kept >= 0 for kept in kept_ms.values()) else ()
        ):
            if kept_ms.get(topic, -1) >= 0:
                done[topic, index] = min(done.get((topic, index), offset), offset)
                if is_from_start:
                    read_from_the_start.add((topic, index))
        done = {place: offset for place, offset in done.items() if place in read_from_the_start}
        now = self._clock.now_ms()
        self._notes = {place: notes for place, notes in self._notes.items() if place in done}
        for place, offset in done.items():
            self._note(place, offset, now, kept_ms[place[0]])

    def _positions(self) -> Iterator[tuple[str, int, int, bool]]:
        for each in self._partitions():
            yield each.topic.name, each.index, each.low, each.first <= each.log.start
        for _, topic, index, offset in self._committed():
            yield topic, index, offset, True
        by_id = {topic.id.hex: topic for topic in self._topics}
        for state in map(State.decode, self._exclusive.values()):
            if (reads := by_id.get(state.topic_id)) is not None:
                yield from (
                    (reads.name, index, state.positions.get(index, 0), True) for index in range(len(reads.partitions))
                )

    def _note(self, place: tuple[str, int], offset: int, now: int, kept_ms: int) -> None:
        notes = self._notes.setdefault(place, deque())
        while notes and notes[-1][1] > offset:  # a group was moved back
            notes.pop()
        if not notes or notes[-1][1] < offset:
            notes.append((now, offset))
        reached = 0
        while notes and notes[0][0] <= now - kept_ms:
            reached = notes.popleft()[1]
        topic = self._topics.get(place[0])
        if topic is not None and place[1] < topic.partition_count:
            log = topic.partitions[place[1]].log
            if reached > log.start:
                log.trim(min(reached, log.durable))
