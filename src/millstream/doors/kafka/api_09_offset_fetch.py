"""OffsetFetch (key 9), versions 1 to 10.

What a group (from version 8: several) has committed; -1 where nothing is. Null topics mean all. From version 9 members
of the consumer protocol say their epoch and are refused if it is stale. Gaps: `require_stable` changes nothing, because
there are no transactions whose offsets could be undecided.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from millstream.broker.groups.groups import Fetched
from millstream.doors.kafka.context import Context
from millstream.errors import Code, RequestError
from millstream.wire.kafka.messages import Fields, Message

KEY = 9
VERSIONS = (1, 10)


def handle(request: Message, context: Context) -> Fields:
    if context.version >= 8:
        groups = {group.group_id: group for group in request.groups}
        return {"throttle_time": 0, "groups": [_group(group, context) for group in groups.values()]}
    return {"throttle_time": 0, **_group(request, context)}


def _group(group: Message, context: Context) -> Fields:
    asked = None
    if group.topics is not None:
        asked = [(_topic(topic, context.version), topic.partition_indexes) for topic in group.topics]
    code = Code.NONE
    try:
        epoch = -1 if group.member_epoch is None else group.member_epoch
        fetched = context.broker.groups.fetch(group.group_id, asked, group.member_id, epoch)
    except RequestError as error:
        # Up to version 1 there is no place for it but the partitions.
        code, fetched = error.code, _refused(asked, error.code) if context.version < 2 else []
    return {"group_id": group.group_id, "topics": [_fields(topic) for topic in fetched], "error_code": code}


def _topic(topic: Message, version: int) -> str | UUID:
    found: str | UUID = topic.topic_id if version >= 10 else topic.name
    return found


def _refused(asked: Sequence[tuple[str | UUID, Sequence[int]]] | None, code: Code) -> list[Fetched]:
    return [Fetched(str(topic), UUID(int=0), [(each, None, code) for each in parts]) for topic, parts in asked or ()]


def _fields(topic: Fetched) -> Fields:
    return {
        "name": topic.topic,
        "topic_id": topic.topic_id,
        "partitions": [
            {
                "partition_index": partition,
                "committed_offset": -1 if committed is None else committed.offset,
                "committed_leader_epoch": -1 if committed is None else committed.leader_epoch,
                "metadata": "" if committed is None else committed.metadata,
                "error_code": code,
            }
            for partition, committed, code in topic.partitions
        ],
    }
