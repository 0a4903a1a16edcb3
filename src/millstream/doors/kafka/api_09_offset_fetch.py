"""OffsetFetch (key 9), versions 1 to 10.

Returns committed offsets of a group (from version 8 of several, KIP-709), or -1. Null topics mean all topics. From
version 9 consumer-protocol members send their member epoch; a stale epoch is refused (KIP-848).
Gaps: `require_stable` has no effect, because there are no transactions with pending offsets.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from uuid import UUID

from millstream.broker.groups.stream.offsets import Committed, Fetched
from millstream.core.errors import Code, RequestError
from millstream.doors.kafka.context import Context
from millstream.doors.kafka.turns import at_once, in_steps, in_turns
from millstream.wire.kafka.messages import NO_ID, Fields, Message

KEY = 9
VERSIONS = (1, 10)


def handle(request: Message, context: Context) -> Fields | Awaitable[Fields]:
    return at_once(_answer(request, context))


async def _answer(request: Message, context: Context) -> Fields:
    if context.version >= 8:
        groups = {group.group_id: group async for group in in_turns(request.groups)}
        found = [await _group(group, context) async for group in in_turns(groups.values())]
        return {"throttle_time": 0, "groups": found}
    return {"throttle_time": 0, **await _group(request, context)}


async def _group(group: Message, context: Context) -> Fields:
    code = Code.NONE
    try:
        topics = await _topics(group, context)
    except RequestError as error:
        # Version 1 has an error field in its partitions only.
        code, topics = error.code, await _refused(group.topics, error.code) if context.version < 2 else []
    return {"group_id": group.group_id, "topics": topics, "error_code": code}


async def _topics(group: Message, context: Context) -> list[Fields]:
    """The member's epoch is checked again after every yield."""

    def fetch(asked: Sequence[tuple[str | UUID, Sequence[int]]] | None) -> list[Fetched]:
        epoch = -1 if group.member_epoch is None else group.member_epoch
        return context.session.committed(group.group_id, asked, group.member_id, epoch)

    if not group.topics:
        every = fetch(None if group.topics is None else [])
        return [await _fields(topic.topic, topic.topic_id, [topic]) async for topic in in_turns(every)]
    topics = []
    async for each in in_turns(group.topics):
        asked = _topic(each, context.version)
        parts = [fetch([(asked, part)])[0] async for part in in_turns(in_steps(each.partition_indexes))]
        topics.append(await _fields(parts[0].topic, parts[0].topic_id, parts))
    return topics


def _topic(topic: Message, version: int) -> str | UUID:
    found: str | UUID = topic.topic_id if version >= 10 else topic.name
    return found


async def _refused(asked: Sequence[Message] | None, code: Code) -> list[Fields]:
    refused = []
    async for topic in in_turns(asked or ()):
        partitions: list[tuple[int, Committed | None, Code]] = [
            (index, None, code) async for index in in_turns(topic.partition_indexes)
        ]
        refused.append(await _fields(topic.name, NO_ID, [Fetched(topic.name, NO_ID, partitions)]))
    return refused


async def _fields(name: str, topic_id: UUID, parts: Sequence[Fetched]) -> Fields:
    return {
        "name": name,
        "topic_id": topic_id,
        "partitions": [
            {
                "partition_index": partition,
                "committed_offset": -1 if committed is None else committed.offset,
                "committed_leader_epoch": -1 if committed is None else committed.leader_epoch,
                "metadata": "" if committed is None else committed.metadata,
                "error_code": code,
            }
            async for part in in_turns(parts)
            async for partition, committed, code in in_turns(part.partitions)
        ],
    }
