"""Retention of what every group is done with: `millstream.retention.done.ms` of a topic.

Every so often it is noted how far all groups are done with a partition. What they were done with that long ago goes. A
group is done up to its lowest open record (queues) or its committed offset (streams). Nothing goes while no group reads
the partition, and other retention goes on beside it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

from millstream.broker.groups.deadline import Deadline
from millstream.broker.groups.queue_partition import QueuePartition
from millstream.broker.topics import Topics
from millstream.clock import Clock

CHECK_MS = 5_000


class DoneRetention:
    def __init__(
        self,
        topics: Topics,
        clock: Clock,
        partitions: Callable[[], Iterator[QueuePartition]],
        committed: Callable[[], Iterable[tuple[str, str, int, int]]],
    ) -> None:
        self._topics = topics
        self._clock = clock
        self._partitions = partitions
        self._committed = committed
        self._notes: dict[tuple[str, int], deque[tuple[int, int]]] = {}
        """Time and offset, oldest first."""
        self._alarm = Deadline(clock, self._check)

    def start(self) -> None:
        self._alarm.push(CHECK_MS)

    def stop(self) -> None:
        self._alarm.stop()

    def _check(self) -> None:
        self._alarm.push(CHECK_MS)
        kept_ms = {topic.name: topic.settings.done_retention_ms for topic in self._topics}
        done: dict[tuple[str, int], int] = {}
        for topic, index, offset in self._positions():
            if kept_ms.get(topic, -1) >= 0:
                done[topic, index] = min(done.get((topic, index), offset), offset)
        now = self._clock.now_ms()
        self._notes = {place: notes for place, notes in self._notes.items() if place in done}
        for place, offset in done.items():
            self._note(place, offset, now, kept_ms[place[0]])

    def _positions(self) -> Iterator[tuple[str, int, int]]:
        for each in self._partitions():
            yield each.topic.name, each.index, each.low
        for _, topic, index, offset in self._committed():
            yield topic, index, offset

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
