"""Committed offsets of all groups, mirrored in memory from the metadata store.

Rules
-----
1. A commit is acknowledged, and visible to fetches, when it is durable. One request is one transaction.
2. The fence of a commit is checked twice: on arrival, and again when the write starts. A member that was fenced while
   its commit waited is refused. So a commit of many partitions can be validated and encoded in slices of
   `PARTITIONS_A_TURN`, with other requests in between. It is then written and applied as a whole.
3. An offset belongs to a topic's id, not to its name: a topic that was deleted and created again has no offsets.
4. Many offsets are deleted in parts of `REMOVED_A_TURN`, each a transaction that checks them again. A crash in between
   leaves the other parts.
5. Flume's clients may commit to a topic that does not exist, and read that offset. It has no topic id, so it is dropped
   when the topic is created. At most `MISSING_MAX` are kept.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple
from uuid import UUID

from millstream.broker.groups.journal import Entry, Journal
from millstream.broker.groups.record import offset_key, offset_of
from millstream.broker.groups.view import TopicLike, TopicsView
from millstream.core.clock import Clock
from millstream.core.errors import Code
from millstream.core.promise import Promise
from millstream.stores.base import Delete, Put

NO_TOPIC = UUID(int=0)
MISSING_MAX = 1000
PARTITIONS_A_TURN = 1_000
"""Each takes some 3 microseconds to check and 10 to encode."""
REMOVED_A_TURN = 2_000
"""Each takes some 10 microseconds to delete, on a busy machine."""
IsDue = Callable[[str, str, "Committed"], bool]
"""Whether an offset of a group and a topic is to be deleted."""


class Committed(NamedTuple):
    offset: int
    leader_epoch: int
    metadata: str
    committed_ms: int
    topic_id: UUID


class PartitionCommit(NamedTuple):
    partition: int
    offset: int
    leader_epoch: int = -1
    metadata: str = ""


class TopicCommit(NamedTuple):
    topic: str | UUID
    """Newer clients send the id."""
    partitions: Sequence[PartitionCommit]


class Fetched(NamedTuple):
    """Committed offsets of one topic."""

    topic: str
    topic_id: UUID
    partitions: list[tuple[int, Committed | None, Code]]


GroupTopicPartition = tuple[str, str, int]
"""Group, topic name, partition."""


class Offsets:
    def __init__(self, journal: Journal, clock: Clock, topics: TopicsView, metadata_bytes_max: int) -> None:
        self._journal = journal
        self._clock = clock
        self._topics = topics
        self._metadata_bytes_max = metadata_bytes_max
        self._groups: dict[str, dict[str, dict[int, Committed]]] = {}
        self._seen: dict[str, UUID] = {}
        self._gone: set[UUID] = set()
        """Deleted topics whose offsets may still be here."""
        self._missing: set[GroupTopicPartition] = set()
        """Without a topic."""

    def load(self, key: str, value: bytes) -> str:
        """Loads one stored offset; returns its group."""
        group, topic, partition = offset_of(key)
        self._keep((group, topic, partition), decode(value))
        return group

    def of(self, group: str) -> Mapping[str, Mapping[int, Committed]]:
        return self._groups.get(group, {})

    def places(self, group: str) -> Iterator[tuple[GroupTopicPartition, Committed]]:
        for topic, partitions in self.of(group).items():
            for partition, committed in partitions.items():
                yield (group, topic, partition), committed

    def fetch(self, group: str, topics: Sequence[tuple[str | UUID, Sequence[int]]] | None) -> list[Fetched]:
        """Committed offsets of some partitions, or of all (`topics` is None)."""
        if topics is None:
            every = [(name, sorted(partitions)) for name, partitions in self.of(group).items()]
            return [each for each in (self._fetch(group, *topic) for topic in every) if each.topic_id.int]
        return [self._fetch(group, *topic) for topic in topics]

    def _fetch(self, group: str, asked: str | UUID, partitions: Sequence[int]) -> Fetched:
        topic = self._topics.by_id(asked) if isinstance(asked, UUID) else self._topics.get(asked)
        if topic is None:
            code = Code.UNKNOWN_TOPIC_ID if isinstance(asked, UUID) else Code.NONE
            name, topic_id = ("", asked) if isinstance(asked, UUID) else (asked, NO_TOPIC)
            kept = self.of(group).get(name, {})
            found = ((partition, kept.get(partition)) for partition in partitions)
            return Fetched(
                name,
                topic_id,
                [(number, each if each and each.topic_id == NO_TOPIC else None, code) for number, each in found],
            )
        known = self.of(group).get(topic.name, {})
        found = ((partition, known.get(partition)) for partition in partitions)
        return Fetched(
            topic.name,
            topic.id,
            [(number, each if each and each.topic_id == topic.id else None, Code.NONE) for number, each in found],
        )

    def __iter__(self) -> Iterator[tuple[GroupTopicPartition, Committed]]:
        """Offsets may change between two steps."""
        for group, topics in list(self._groups.items()):
            for topic, partitions in list(topics.items()):
                for partition, committed in list(partitions.items()):
                    yield (group, topic, partition), committed

    async def commit(
        self, group: str, fence: Callable[[], None], commits: Sequence[TopicCommit], *, may_be_missing: bool = False
    ) -> list[list[Code]]:
        """Stores valid offsets; returns a code per partition, in request order. Raises what `fence` raises."""
        fence()
        accepted: dict[GroupTopicPartition, Committed] = {}
        codes: list[list[Code]] = []
        room = PARTITIONS_A_TURN
        for each in commits:
            codes.append([])
            for start in range(0, max(len(each.partitions), 1), PARTITIONS_A_TURN):
                part = TopicCommit(each.topic, each.partitions[start : start + PARTITIONS_A_TURN])
                codes[-1] += self._check(group, part, accepted, may_be_missing)
                room -= 1 + len(part.partitions)
                if room <= 0:
                    await asyncio.sleep(0)
                    room = PARTITIONS_A_TURN
        if accepted:
            puts = await self._encoded(accepted)
            await self._journal.submit(Entry(lambda: self._write(fence, puts), lambda: self._keep_all(accepted)))
        return codes

    async def _encoded(self, accepted: Mapping[GroupTopicPartition, Committed]) -> list[Put]:
        puts: list[Put] = []
        for place, committed in accepted.items():
            if puts and len(puts) % PARTITIONS_A_TURN == 0:
                await asyncio.sleep(0)
            puts.append(Put(offset_key(*place), encode(committed)))
        return puts

    async def remove_due(self, groups: Iterable[str], is_due: IsDue) -> None:
        """Deletes many offsets in parts; other requests run in between."""
        await self.remove(tuple)  # the writes before it are applied by then
        room, due = REMOVED_A_TURN, list[GroupTopicPartition]()
        for group in list(groups):
            for topic in list(self.of(group)):
                partitions = list(self.of(group).get(topic, {}).items())
                for start in range(0, len(partitions), REMOVED_A_TURN):
                    part = partitions[start : start + REMOVED_A_TURN]
                    due += [(group, topic, number) for number, each in part if is_due(group, topic, each)]
                    room -= 1 + len(part)
                    if len(due) >= REMOVED_A_TURN:
                        await self.remove(partial(self._still_due, due[:REMOVED_A_TURN], is_due))
                        due = due[REMOVED_A_TURN:]
                    if room <= 0:
                        await asyncio.sleep(0)
                        room = REMOVED_A_TURN
        if due:
            await self.remove(partial(self._still_due, due, is_due))

    def _still_due(self, places: Iterable[GroupTopicPartition], is_due: IsDue) -> Iterator[GroupTopicPartition]:
        for place in places:
            group, topic, partition = place
            committed = self.of(group).get(topic, {}).get(partition)
            if committed is not None and is_due(group, topic, committed):
                yield place

    def remove(self, choose: Callable[[], Iterable[GroupTopicPartition]]) -> Promise[None]:
        """Deletes the offsets that `choose` returns when the write starts."""
        chosen: list[GroupTopicPartition] = []

        def prepare() -> Iterable[Delete]:
            chosen.extend(choose())
            return [Delete(offset_key(*place)) for place in chosen]

        def apply() -> None:
            for place in chosen:
                self.forget(place)

        return self._journal.submit(Entry(prepare, apply, settled=True))

    def lost_a_topic(self) -> bool:
        """Whether a topic with committed offsets was deleted: cheaper than a scan of all offsets."""
        gone = [name for name, topic_id in self._seen.items() if self._live_id(name) != topic_id]
        for name in gone:
            self._gone.add(self._seen.pop(name))
        return bool(gone)

    def orphans(self) -> list[GroupTopicPartition]:
        """Offsets of topics that no longer exist, or exist under another id."""
        live = {name: self._live_id(name) for name in self._topics.names()}
        return [place for place, committed in self if live.get(place[1], NO_TOPIC) != committed.topic_id]

    async def remove_left_behind(self) -> None:
        """Only certain orphans: another broker may have created a topic that is not known here yet."""
        gone, self._gone = self._gone, set()

        def is_due(_: str, topic: str, committed: Committed) -> bool:
            return committed.topic_id in gone or (self._live_id(topic) or committed.topic_id) != committed.topic_id

        await self.remove_due(self._groups, is_due)

    def clear(self) -> None:
        self._groups.clear()
        self._seen.clear()
        self._gone.clear()
        self._missing.clear()

    def forget(self, place: GroupTopicPartition) -> None:
        group, topic, partition = place
        self._missing.discard(place)
        topics = self._groups.get(group, {})
        partitions = topics.get(topic, {})
        partitions.pop(partition, None)
        if not partitions:
            topics.pop(topic, None)
        if not topics:
            self._groups.pop(group, None)

    def _check(
        self, group: str, commit: TopicCommit, accepted: dict[GroupTopicPartition, Committed], may_be_missing: bool
    ) -> list[Code]:
        if isinstance(commit.topic, UUID):
            topic, missing = self._topics.by_id(commit.topic), Code.UNKNOWN_TOPIC_ID
        else:
            topic, missing = self._topics.get(commit.topic), Code.UNKNOWN_TOPIC_OR_PARTITION
        if topic is None and may_be_missing and isinstance(commit.topic, str):
            return [
                self._check_missing((group, commit.topic, each.partition), each, accepted) for each in commit.partitions
            ]
        if topic is None:
            return [missing] * len(commit.partitions)
        return [self._check_partition(group, topic, partition, accepted) for partition in commit.partitions]

    def _check_missing(
        self, place: GroupTopicPartition, commit: PartitionCommit, accepted: dict[GroupTopicPartition, Committed]
    ) -> Code:
        if len(self._missing) >= MISSING_MAX and place not in self._missing:
            return Code.POLICY_VIOLATION
        accepted[place] = Committed(commit.offset, commit.leader_epoch, commit.metadata, self._clock.now_ms(), NO_TOPIC)
        return Code.NONE

    def _check_partition(
        self, group: str, topic: TopicLike, commit: PartitionCommit, accepted: dict[GroupTopicPartition, Committed]
    ) -> Code:
        if not 0 <= commit.partition < topic.partition_count:
            return Code.UNKNOWN_TOPIC_OR_PARTITION
        if len(commit.metadata.encode()) > self._metadata_bytes_max:
            return Code.OFFSET_METADATA_TOO_LARGE
        accepted[group, topic.name, commit.partition] = Committed(
            commit.offset, commit.leader_epoch, commit.metadata, self._clock.now_ms(), topic.id
        )
        return Code.NONE

    def _write(self, fence: Callable[[], None], puts: list[Put]) -> list[Put]:
        fence()
        return puts

    def _keep_all(self, accepted: Mapping[GroupTopicPartition, Committed]) -> None:
        for place, committed in accepted.items():
            self._keep(place, committed)

    def _live_id(self, name: str) -> UUID | None:
        topic = self._topics.get(name)
        return None if topic is None else topic.id

    def _keep(self, place: GroupTopicPartition, committed: Committed) -> None:
        group, topic, partition = place
        if self._live_id(topic) == committed.topic_id:
            self._seen[topic] = committed.topic_id
        if committed.topic_id == NO_TOPIC:
            self._missing.add(place)
        else:
            self._missing.discard(place)
        self._groups.setdefault(group, {}).setdefault(topic, {})[partition] = committed


def encode(committed: Committed) -> bytes:
    return json.dumps({**committed._asdict(), "topic_id": committed.topic_id.hex}, separators=(",", ":")).encode()


def decode(value: bytes) -> Committed:
    fields = json.loads(value)
    return Committed(**{**fields, "topic_id": UUID(hex=fields["topic_id"])})
