"""The types of groups, and their constructors."""

from __future__ import annotations

from collections.abc import Callable

from millstream.broker.groups.context import GroupContext
from millstream.broker.groups.queue.share import ShareGroup
from millstream.broker.groups.record import GroupRecord
from millstream.broker.groups.stream.classic import ClassicGroup
from millstream.broker.groups.stream.mixed import MixedGroup

Group = ClassicGroup | MixedGroup | ShareGroup


class Kinds:
    def __init__(self, context: GroupContext, downgrade: Callable[[MixedGroup], bool]) -> None:
        self._context = context
        self._downgrade = downgrade

    def classic(self, group_id: str, record: GroupRecord | None) -> ClassicGroup:
        return ClassicGroup(group_id, self._context, record)

    def consumer(self, group_id: str, record: GroupRecord | None) -> MixedGroup:
        return MixedGroup(group_id, self._context, record, self._downgrade)

    def share(self, group_id: str, record: GroupRecord | None) -> ShareGroup:
        return ShareGroup(group_id, self._context, record)

    def restore(self, group_id: str, record: GroupRecord) -> Group:
        """Restores a stored group. Members are not stored, so a group that had some is empty now."""
        if record.protocol_type and record.emptied_ms is None:
            record = record._replace(emptied_ms=self._context.clock.now_ms())
        if record.type == ShareGroup.type:
            return self.share(group_id, record)
        return self.consumer(group_id, record) if record.type == MixedGroup.type else self.classic(group_id, record)
