"""The `cursor` discipline: one position per fanout id and topic, which the broker moves on every read.

    read --> waiting --> a round: each reader in turn takes the next records --position durable--> all are answered
                            \\-- cannot be stored: all are refused, the position stays

Rules
-----
1. Every record goes to exactly one reader of each fanout id. Readers that come while a round of their fanout id is in
   flight wait for the next. A round is one write, so that many readers share a sync.
2. A position is durable before the records below it are returned: delivery is at most once, also across a crash. So
   records in flight when the broker dies count as read. A client that cannot accept that reads by index and stores the
   index itself.
3. A fanout id starts at the oldest record. It skips records that retention deletes before they are read. It moves back
   only if the log lost its tail (`flush=os` and a machine crash), to the log's end.
4. A position is written only while this broker is the cursor's coordinator: another broker may have taken over, and
   moved on, while a round read its records.
5. One reader gets the error of a batch that is damaged or cannot be decoded; the position then moves past the batch.
   Otherwise the fanout id would be stuck.
6. A position belongs to a topic's id, not its name: a topic that was deleted and created again is read from its start.

Only partition 0 is read: topics of this discipline have one partition.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple
from uuid import UUID

from millstream.broker.groups.founders import Founders
from millstream.broker.groups.journal import Entry, Journal
from millstream.broker.groups.record import CURSORS_PREFIX, cursor_key, cursor_of
from millstream.broker.outlet import RECORD_BYTES, Outlet, Taken
from millstream.broker.topics import Topic, Topics
from millstream.cluster.base import Cluster, Owns, Solo
from millstream.core.clock import Clock, wait
from millstream.core.errors import Code, RequestError
from millstream.core.promise import Promise
from millstream.log.damage import UnreadableOffset
from millstream.records.record import Record
from millstream.stores.base import Delete, MetaStore, PartitionLog, Put

CURSORS_MAX = 100_000
FANOUT_ID_BYTES_MAX = 512
"""Escaped it has at most three times as many, which fits the keys of every store."""
WRITES_WAITING_MAX = 100_000
WAITING_MAX = 10_000
"""Readers of one cursor."""
ROUND_BYTES_MAX = 64 << 20


class _Reader(NamedTuple):
    bytes_max: int
    count_max: int | None
    answer: Promise[list[Record]]


class _Cursor:
    __slots__ = ("fanout_id", "is_reading", "position", "topic_id", "waiting")

    def __init__(self, fanout_id: str, topic_id: UUID, position: int) -> None:
        self.fanout_id = fanout_id
        self.topic_id = topic_id
        self.position = position
        """Durable after the cursor's first read."""
        self.waiting: deque[_Reader] = deque()
        self.is_reading = False


class Cursors:
    def __init__(self, meta: MetaStore, clock: Clock, topics: Topics, outlet: Outlet, cluster: Cluster) -> None:
        self._meta = meta
        self._clock = clock
        self._cluster = cluster
        self._topics = topics
        self._outlet = outlet
        self._journal = Journal(meta, WRITES_WAITING_MAX, cluster)
        self._cursors: dict[tuple[str, str], _Cursor] = {}
        """By fanout id and topic name."""
        self._founders = Founders[tuple[str, str]](
            "cursors", 0, CURSORS_MAX, lambda place: place in self._cursors, "use fewer fanout ids"
        )
        self._rounds: set[asyncio.Task[None]] = set()
        self._unwatch = topics.watch(self._drop_orphans)

    async def adopt(self, owns: Owns) -> None:
        """Loads the stored positions of some fanout ids. A broker alone drops the cursors of deleted topics."""
        for key, stored in await self._meta.list(CURSORS_PREFIX):
            fanout_id, topic = cursor_of(key)
            if owns(fanout_id):
                value = json.loads(stored.value)
                self._cursors[fanout_id, topic] = _Cursor(fanout_id, UUID(hex=value["topic_id"]), value["position"])
        if isinstance(self._cluster, Solo):
            self._drop_orphans()
            await self._fall_back()

    async def _fall_back(self) -> None:
        """If a machine crash lost the log's tail (`flush=os`), moves positions back to its end: new records will reuse
        the lost offsets.
        """
        for (_, name), cursor in list(self._cursors.items()):
            topic = self._topics.get(name)
            if topic is None or topic.partitions[0].log.damage.lost is not None:
                continue
            if cursor.position > topic.partitions[0].log.end:
                await self._store(cursor, topic, topic.partitions[0].log.end)

    def release(self) -> None:
        """Another broker is the coordinator now: drops all cursors."""
        error = RequestError(Code.NOT_COORDINATOR, "another broker coordinates the fanout id")
        self._journal.drop_waiting(error)
        self._refuse_waiting(error)
        self._cursors.clear()

    async def close(self) -> None:
        """Fails waiting reads."""
        self._unwatch()
        self._refuse_waiting(RequestError(Code.NOT_COORDINATOR, "the broker is stopping"))
        if self._rounds:
            await wait(self._clock, self._rounds, seconds=10)

    def _refuse_waiting(self, error: RequestError) -> None:
        for cursor in self._cursors.values():
            waiting, cursor.waiting = cursor.waiting, deque()
            for reader in waiting:
                reader.answer.fail(error)

    def position(self, fanout_id: str, topic: Topic) -> int:
        """The next offset for this fanout id. Raises `RequestError` if another broker coordinates it."""
        self._cluster.check(fanout_id)
        cursor = self._cursors.get((fanout_id, topic.name))
        start = topic.partitions[0].log.start
        return start if cursor is None or cursor.topic_id != topic.id else max(cursor.position, start)

    def positions(self) -> Iterator[tuple[str, str, int, int]]:
        """Fanout id, topic, partition and position of all cursors, for `millstream.retention.done.ms`."""
        for (fanout_id, name), cursor in list(self._cursors.items()):
            if self._topics.by_id(cursor.topic_id) is not None:
                yield fanout_id, name, 0, cursor.position

    def read(
        self, fanout_id: str, topic: Topic, bytes_max: int, count_max: int | None = None, client_host: str = ""
    ) -> Promise[list[Record]]:
        """The next records, as many as fit but at least one; none at the end of the log."""
        try:
            topic.partitions[0].log.damage.check_lost()
            cursor = self._find(fanout_id, topic, client_host)
        except RequestError as error:
            return Promise.failed(error)
        answer: Promise[list[Record]] = Promise()
        if not cursor.is_reading and self.position(fanout_id, topic) >= topic.partitions[0].log.high_watermark:
            answer.settle([])
            return answer
        if len(cursor.waiting) >= WAITING_MAX:
            detail = f"{fanout_id} has {WAITING_MAX} waiting readers, the limit"
            return Promise.failed(RequestError(Code.COORDINATOR_NOT_AVAILABLE, detail))
        cursor.waiting.append(_Reader(min(bytes_max, ROUND_BYTES_MAX), count_max, answer))
        if not cursor.is_reading:
            cursor.is_reading = True
            task = asyncio.ensure_future(self._read_rounds(cursor, topic))
            self._rounds.add(task)
            task.add_done_callback(self._rounds.discard)
        return answer

    def _find(self, fanout_id: str, topic: Topic, client_host: str) -> _Cursor:
        if not fanout_id or len(fanout_id.encode()) > FANOUT_ID_BYTES_MAX:
            raise RequestError(Code.INVALID_GROUP_ID, f"a fanout id has 1 to {FANOUT_ID_BYTES_MAX} bytes")
        self._cluster.check(fanout_id)
        if self._topics.by_id(topic.id) is not topic:  # it would replace the cursor of its successor
            raise _deleted(topic)
        place = fanout_id, topic.name
        cursor = self._cursors.get(place)
        if cursor is None or cursor.topic_id != topic.id:
            if cursor is None and len(self._cursors) >= CURSORS_MAX:
                raise RequestError(Code.POLICY_VIOLATION, f"the broker has {CURSORS_MAX} cursors, the limit")
            if cursor is None:
                self._founders.check(client_host)
                self._founders.add(place, client_host)
            cursor = self._cursors[place] = _Cursor(fanout_id, topic.id, topic.partitions[0].log.start)
        return cursor

    async def _read_rounds(self, cursor: _Cursor, topic: Topic) -> None:
        try:
            while cursor.waiting:
                await self._read_round(cursor, topic)
        finally:
            cursor.is_reading = False

    async def _read_round(self, cursor: _Cursor, topic: Topic) -> None:
        log = topic.partitions[0].log
        position = cursor.position
        answers: list[tuple[Promise[list[Record]], list[Record]]] = []
        left = ROUND_BYTES_MAX
        unreadable: UnreadableOffset | None = None
        try:
            while cursor.waiting and (left > 0 or not answers):
                reader = cursor.waiting.popleft()
                answers.append((reader.answer, []))
                if self._topics.by_id(topic.id) is not topic:
                    raise _deleted(topic)
                try:
                    taken = await self._take(log, position, reader)
                except UnreadableOffset as error:
                    unreadable, position = error, error.next_offset
                    break
                answers[-1][1].extend(taken.records)
                position = taken.next_offset
                left -= sum(len(record.value or b"") + RECORD_BYTES for record in taken.records)
            if position > cursor.position:
                await self._store(cursor, topic, position)
        except Exception as error:
            is_gone = self._topics.by_id(topic.id) is not topic  # perhaps its files, too: an expected error
            for answer, _ in answers:
                answer.fail(_deleted(topic) if is_gone else error)
            return
        if unreadable is not None:
            answers.pop()[0].fail(unreadable)
        for answer, records in answers:
            answer.settle(records)

    async def _take(self, log: PartitionLog, position: int, reader: _Reader) -> Taken:
        """Reads from the position, or from the log's start, which retention may move during the read."""
        while True:
            first = max(position, log.start)
            try:
                return await self._outlet.take(log, first, reader.bytes_max, count_max=reader.count_max)
            except RequestError as error:
                if error.code != Code.OFFSET_OUT_OF_RANGE or first >= log.start:
                    raise

    async def _store(self, cursor: _Cursor, topic: Topic, position: int) -> None:
        def prepare() -> list[Put]:
            if self._topics.by_id(topic.id) is None:
                raise _deleted(topic)
            if self._cursors.get((cursor.fanout_id, topic.name)) is not cursor:
                raise RequestError(Code.NOT_COORDINATOR, "another broker took over the cursor")
            self._cluster.check(cursor.fanout_id)
            value = {"position": position, "topic_id": topic.id.hex}
            return [Put(cursor_key(cursor.fanout_id, topic.name), json.dumps(value, separators=(",", ":")).encode())]

        def apply() -> None:
            cursor.position = position

        await self._journal.submit(Entry(prepare, apply))

    def _drop_orphans(self) -> None:
        orphans = [
            place
            for place, cursor in self._cursors.items()
            if (topic := self._topics.get(place[1])) is None or topic.id != cursor.topic_id
        ]
        for place in orphans:
            del self._cursors[place]
        if orphans:
            # Skips cursors that a client created again before the write.
            self._journal.submit(
                Entry(lambda: [Delete(cursor_key(*place)) for place in orphans if place not in self._cursors])
            )


def _deleted(topic: Topic) -> RequestError:
    return RequestError(Code.UNKNOWN_TOPIC_OR_PARTITION, f"topic {topic.name} was deleted")
