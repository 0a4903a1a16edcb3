"""The types of groups, and their constructors."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from millstream.broker.groups.journal import Journal
from millstream.broker.groups.queue.share import ShareGroup
from millstream.broker.groups.record import GroupRecord
from millstream.broker.groups.settings import GroupSettings
from millstream.broker.groups.stream.assignors import Assignor
from millstream.broker.groups.stream.classic import ClassicGroup
from millstream.broker.groups.stream.mixed import MixedGroup
from millstream.broker.groups.stream.plan import plan
from millstream.broker.groups.stream.topic_matches import TopicMatches
from millstream.broker.groups.view import QueuesView, TopicsView
from millstream.core.clock import Clock

Group = ClassicGroup | MixedGroup | ShareGroup


class Kinds:
    def __init__(
        self,
        journal: Journal,
        clock: Clock,
        topics: TopicsView,
        matches: TopicMatches,
        settings: GroupSettings,
        assignors: Mapping[str, Assignor],
        queues: QueuesView,
        downgrade: Callable[[MixedGroup], bool],
    ) -> None:
        self._journal = journal
        self._clock = clock
        self._topics = topics
        self._matches = matches
        self._settings = settings
        self._assignors = assignors
        self._queues = queues
        self._downgrade = downgrade

    def classic(self, group_id: str, record: GroupRecord | None) -> ClassicGroup:
        return ClassicGroup(
            group_id,
            self._journal,
            self._clock,
            self._settings,
            record,
            lambda members: plan(members, self._topics),
        )

    def consumer(self, group_id: str, record: GroupRecord | None) -> MixedGroup:
        return MixedGroup(
            group_id,
            self._journal,
            self._clock,
            self._topics,
            self._matches,
            self._settings,
            self._assignors,
            record,
            self._downgrade,
        )

    def share(self, group_id: str, record: GroupRecord | None) -> ShareGroup:
        return ShareGroup(group_id, self._journal, self._clock, self._topics, self._settings, self._queues, record)

    def restore(self, group_id: str, record: GroupRecord) -> Group:
        """Restores a stored group. Members are not stored, so a group that had some is empty now."""
        if record.protocol_type and record.emptied_ms is None:
            record = record._replace(emptied_ms=self._clock.now_ms())
        if record.type == ShareGroup.type:
            return self.share(group_id, record)
        return self.consumer(group_id, record) if record.type == MixedGroup.type else self.classic(group_id, record)
