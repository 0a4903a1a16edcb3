"""A group with the `queue` discipline: its members, its settings, and its state in every partition it reads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

from millstream.broker.groups.journal import Journal
from millstream.broker.groups.queue.answers import LEFT
from millstream.broker.groups.queue.partition import ELSEWHERE, QueuePartition
from millstream.broker.groups.queue.settings import QueueSettings, clean
from millstream.broker.groups.queue.storage import QueueStorage, Stored
from millstream.broker.groups.queue.verbs import Member
from millstream.broker.settings import TopicSettings
from millstream.broker.topics import Topic
from millstream.core.clock import Clock
from millstream.core.errors import Code, RequestError
from millstream.core.promise import Promise

if TYPE_CHECKING:
    from millstream.broker.groups.queue.dead_letters import DeadLetters

MEMBERS_MAX = 10_000


class Queue:
    def __init__(
        self,
        group_id: str,
        journal: Journal,
        clock: Clock,
        dead_letters: DeadLetters,
        overrides: Mapping[str, str],
        *,
        durable: bool,
        door_defaults: Mapping[str, str] | None = None,
        on_member_left: Callable[[Queue], None] | None = None,
    ) -> None:
        self.id = group_id
        self.journal = journal
        self.clock = clock
        self.dead_letters = dead_letters
        self.is_durable = durable
        self.is_stopping = False
        """Whether the broker stops: an interrupted delivery is then never the last attempt."""
        self.overrides = clean(overrides)
        self.door_defaults = clean(door_defaults or {})
        """Defaults of the door that created this group, for settings that neither the group nor the topic has. They
        stay when other doors use the group.
        """
        self.leases = 0
        self.members: dict[int, Member] = {}
        self._numbers = itertools.count(1)
        self._partitions: dict[tuple[str, int], QueuePartition] = {}
        self._opening: dict[QueuePartition, Promise[None]] = {}
        """Partitions whose first write is not durable yet."""
        self._ended: RequestError | None = None
        self._settings: dict[str, tuple[TopicSettings, QueueSettings]] = {}
        self._on_member_left = on_member_left

    def join(self, name: str) -> Member:
        if len(self.members) >= MEMBERS_MAX:
            raise RequestError(Code.GROUP_MAX_SIZE_REACHED)
        member = Member(next(self._numbers), name)
        self.members[member.id] = member
        return member

    def leave(self, member: Member, reason: str = LEFT) -> None:
        """Ends the member's leases at once, as failed deliveries."""
        if self.members.pop(member.id, None) is None:
            return
        if member.leases:
            for partition in self.partitions():
                partition.release(member, reason)
        if self._on_member_left is not None:
            self._on_member_left(self)

    def give_back(self, member: Member) -> None:
        """A member closes cleanly: its unacknowledged leases do not count as attempts."""
        if member.leases and self.members.get(member.id) is member:
            for partition in self.partitions():
                partition.give_back(member)

    def owner(self, number: int) -> Member | None:
        return self.members.get(number)

    async def partition(self, topic: Topic, index: int) -> QueuePartition:
        """The queue's state in a partition. Its first offset is durable before the first lease."""
        found = self.opened(topic, index)
        if found is not None:
            return found
        if self._ended is not None:
            raise RequestError(self._ended.code, self._ended.detail)
        if not 0 <= index < topic.partition_count:
            raise RequestError(Code.UNKNOWN_TOPIC_OR_PARTITION, f"topic {topic.name} has no partition {index}")
        made = self._partitions.get((topic.name, index))
        if made is None or made.topic is not topic:
            made = self.restore(topic, index, None)
            self._opening[made] = saved = made.save()
            saved.then(partial(self._saved, made))
        else:
            saved = self._opening[made]
        await saved
        made.check()
        return made

    def _saved(self, made: QueuePartition, saved: Promise[None]) -> None:
        del self._opening[made]
        if saved.error is not None and self._partitions.get((made.topic.name, made.index)) is made:
            self.forget(made)

    def opened(self, topic: Topic, index: int) -> QueuePartition | None:
        """The same, or None if it is not open yet."""
        found = self._partitions.get((topic.name, index))
        return found if found is not None and found.topic is topic and found not in self._opening else None

    def restore(self, topic: Topic, index: int, stored: Stored | None, is_alone: bool = False) -> QueuePartition:
        """`is_alone`: no other broker appends, so this broker knows the end of the log."""
        storage = QueueStorage(self.id, topic.name, index) if self.is_durable else None
        old = self._partitions.get((topic.name, index))
        if old is not None:
            old.close()
        partition = self._partitions[topic.name, index] = QueuePartition(self, topic, index, storage, stored, is_alone)
        return partition

    def place(self, topic: str, index: int) -> QueuePartition | None:
        """The partition's state, even if it is still opening."""
        return self._partitions.get((topic, index))

    def partitions(self) -> Iterator[QueuePartition]:
        return iter(list(self._partitions.values()))

    def forget(self, partition: QueuePartition) -> None:
        partition.close(RequestError(Code.UNKNOWN_TOPIC_OR_PARTITION, "the queue no longer reads this partition"))
        self._partitions.pop((partition.topic.name, partition.index), None)

    def settings_for(self, topic: Topic) -> QueueSettings:
        found = self._settings.get(topic.name)
        if found is None or found[0] is not topic.settings:
            found = self._settings[topic.name] = (
                topic.settings,
                QueueSettings.of(self.overrides, topic.settings, self.door_defaults),
            )
        return found[1]

    def configured(self, overrides: dict[str, str]) -> None:
        self.overrides = overrides
        self._settings.clear()

    def close(self, reason: RequestError = ELSEWHERE) -> None:
        """Ends all partitions before it wakes a waiter: another partition must not serve that waiter."""
        self._ended = reason
        for partition in self.partitions():
            partition.end(reason)
        for partition in self.partitions():
            partition.close(reason)
