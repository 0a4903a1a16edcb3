"""DescribeShareGroupOffsets (key 90), versions 0 to 1.

Describes a share group's progress: the first offset that is not done, and (version 1) the lag. Covers the named
partitions, or every partition that the group has read; -1 for a partition that it has not read. A group that does not
exist has read none. Gaps: none.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable
from typing import TYPE_CHECKING

from millstream.core.errors import Code, RequestError
from millstream.doors.kafka.context import Context
from millstream.doors.kafka.turns import at_once, in_turns
from millstream.security.rights import Kind, Operation
from millstream.wire.kafka.messages import Fields, Message

if TYPE_CHECKING:
    from millstream.broker.session import Queue, QueuePartition

KEY = 90
VERSIONS = (0, 1)


def handle(request: Message, context: Context) -> Fields | Awaitable[Fields]:
    return at_once(_answer(request, context))


async def _answer(request: Message, context: Context) -> Fields:
    groups = {each.group_id: each async for each in in_turns(request.groups)}
    described = [await _describe(each, context) async for each in in_turns(groups.values())]
    return {"throttle_time": 0, "groups": described}


async def _describe(asked: Message, context: Context) -> Fields:
    try:
        queue = context.session.share_progress(asked.group_id)
    except RequestError as error:
        return {"group_id": asked.group_id, "topics": [], "error_code": error.code, "error_message": error.detail}
    known = _known(queue)
    if asked.topics is None:
        described = [name for name in known if context.session.allows(Operation.DESCRIBE, Kind.TOPIC, name)]
        wanted: dict[str, Iterable[int]] = {name: sorted(known[name]) for name in described}
    else:
        wanted = {each.topic_name: dict.fromkeys(each.partitions) async for each in in_turns(asked.topics)}
    topics = [
        await _topic(name, partitions, known.get(name, {}), context)
        async for name, partitions in in_turns(wanted.items())
    ]
    return {"group_id": asked.group_id, "topics": topics, "error_code": Code.NONE}


def _known(queue: Queue | None) -> dict[str, dict[int, QueuePartition]]:
    known: dict[str, dict[int, QueuePartition]] = {}
    for partition in queue.partitions() if queue is not None else ():
        known.setdefault(partition.topic.name, {})[partition.index] = partition
    return known


async def _topic(name: str, partitions: Iterable[int], known: dict[int, QueuePartition], context: Context) -> Fields:
    topic, code = None, Code.UNKNOWN_TOPIC_OR_PARTITION
    try:
        topic = context.session.topic(name, Operation.DESCRIBE)
    except RequestError as error:
        code, known = error.code, {}
    described = []
    async for index in in_turns(partitions):
        exists = topic is not None and 0 <= index < topic.partition_count
        epoch = topic.partitions[index].log.epochs.latest if exists and topic is not None else 0
        start, lag = _progress(known[index]) if index in known else (-1, -1)
        described.append(
            {
                "partition_index": index,
                "start_offset": start,
                "leader_epoch": epoch,
                "lag": lag,
                "error_code": Code.NONE if exists else code,
                "error_message": None if exists else code.text,
            }
        )
    return {"topic_name": name, "topic_id": None if topic is None else topic.id, "partitions": described}


def _progress(partition: QueuePartition) -> tuple[int, int]:
    figures = partition.figures()
    return figures.low, figures.available + figures.leased + figures.waiting + figures.dying
