"""DescribeTopicPartitions (key 75), version 0.

Lists topics and partitions in pages of at most `response_partition_limit` partitions, with a cursor (KIP-966).
Gaps: none.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING

from millstream.broker.settings import check_name
from millstream.cluster.base import Leadership
from millstream.core.errors import Code, RequestError
from millstream.doors.kafka.context import Context
from millstream.doors.kafka.turns import at_once, in_turns
from millstream.security.rights import Kind, Operation
from millstream.wire.kafka import operations
from millstream.wire.kafka.messages import NO_ID, Fields, Message
from millstream.wire.kafka.metadata import INTERNAL_TOPICS

if TYPE_CHECKING:
    from millstream.broker.session import Topic

KEY = 75
VERSIONS = (0, 0)

PARTITIONS_MAX = 2000


def handle(request: Message, context: Context) -> Fields | Awaitable[Fields]:
    return at_once(_answer(request, context))


async def _answer(request: Message, context: Context) -> Fields:
    named = {topic.name async for topic in in_turns(request.topics)}
    names = sorted(named or {topic.name for topic in context.session.topics()})
    first = 0
    if request.cursor is not None:
        names = [name for name in names if name >= request.cursor.topic_name]
        first = request.cursor.partition_index if names and names[0] == request.cursor.topic_name else 0
    room = min(max(request.response_partition_limit, 1), PARTITIONS_MAX)
    topics: list[Fields] = []
    async for name in in_turns(names):
        if room <= 0:
            return {"throttle_time": 0, "topics": topics, "next_cursor": {"topic_name": name, "partition_index": 0}}
        try:
            topic = context.session.topic(name, Operation.DESCRIBE)
        except RequestError as error:
            topics.append(_topic(name, None, range(0), _code(name, error), context))
            continue
        shown = range(min(first, topic.partition_count), min(first + room, topic.partition_count))
        topics.append(_topic(name, topic, shown, Code.NONE, context))
        room -= len(shown)
        if shown.stop < topic.partition_count:
            cursor = {"topic_name": name, "partition_index": shown.stop}
            return {"throttle_time": 0, "topics": topics, "next_cursor": cursor}
        first = 0
    return {"throttle_time": 0, "topics": topics, "next_cursor": None}


def _code(name: str, error: RequestError) -> Code:
    if error.code == Code.UNKNOWN_TOPIC_OR_PARTITION:
        try:
            check_name(name)
        except RequestError as invalid:
            return invalid.code
    return error.code


def _topic(name: str, topic: Topic | None, indexes: range, code: Code, context: Context) -> Fields:
    session = context.session
    leads = session.leaderships(topic.id) if topic is not None else ()
    is_hidden = code == Kind.TOPIC.refusal
    return {
        "error_code": code,
        "name": name,
        "topic_id": topic.id if topic is not None else NO_ID,
        "is_internal": name in INTERNAL_TOPICS,
        "partitions": [_partition(index, leads[index % len(leads)]) for index in indexes],
        "topic_authorized_operations": operations.NOT_ASKED if is_hidden else session.operations(Kind.TOPIC, name),
    }


def _partition(index: int, leads: Leadership) -> Fields:
    return {
        "error_code": Code.NONE,
        "partition_index": index,
        "leader_id": leads.leader,
        "leader_epoch": leads.epoch,
        "replica_nodes": list(leads.replicas),
        "isr_nodes": list(leads.in_sync),
        "eligible_leader_replicas": [],
        "last_known_elr": [],
        "offline_replicas": [],
    }
