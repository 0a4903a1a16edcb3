"""DescribeTopicPartitions (key 75), version 0.

Lists topics and partitions in pages of at most `response_partition_limit` partitions, with a cursor (KIP-966).
Gaps: none.
"""

from __future__ import annotations

from collections.abc import Awaitable

from millstream.broker.settings import check_name
from millstream.broker.topics import Topic
from millstream.cluster.base import Leadership
from millstream.core.errors import Code, RequestError
from millstream.doors.kafka.context import Context
from millstream.doors.kafka.turns import at_once, in_turns
from millstream.wire.kafka import operations
from millstream.wire.kafka.messages import NO_ID, Fields, Message
from millstream.wire.kafka.metadata import INTERNAL_TOPICS

KEY = 75
VERSIONS = (0, 0)

PARTITIONS_MAX = 2000


def handle(request: Message, context: Context) -> Fields | Awaitable[Fields]:
    return at_once(_answer(request, context))


async def _answer(request: Message, context: Context) -> Fields:
    broker = context.broker
    names = sorted({topic.name async for topic in in_turns(request.topics)} or set(broker.topics.names()))
    first = 0
    if request.cursor is not None:
        names = [name for name in names if name >= request.cursor.topic_name]
        first = request.cursor.partition_index if names and names[0] == request.cursor.topic_name else 0
    room = min(max(request.response_partition_limit, 1), PARTITIONS_MAX)
    topics: list[Fields] = []
    async for name in in_turns(names):
        if room <= 0:
            return {"throttle_time": 0, "topics": topics, "next_cursor": {"topic_name": name, "partition_index": 0}}
        topic = broker.topics.get(name)
        if topic is None:
            topics.append(_topic(name, None, range(0), context))
            continue
        shown = range(min(first, topic.partition_count), min(first + room, topic.partition_count))
        topics.append(_topic(name, topic, shown, context))
        room -= len(shown)
        if shown.stop < topic.partition_count:
            cursor = {"topic_name": name, "partition_index": shown.stop}
            return {"throttle_time": 0, "topics": topics, "next_cursor": cursor}
        first = 0
    return {"throttle_time": 0, "topics": topics, "next_cursor": None}


def _refusal(name: str) -> Code:
    try:
        check_name(name)
    except RequestError as error:
        return error.code
    return Code.UNKNOWN_TOPIC_OR_PARTITION


def _topic(name: str, topic: Topic | None, indexes: range, context: Context) -> Fields:
    leads = context.broker.cluster.leaderships(topic.id if topic is not None else NO_ID)
    return {
        "error_code": Code.NONE if topic is not None else _refusal(name),
        "name": name,
        "topic_id": topic.id if topic is not None else NO_ID,
        "is_internal": name in INTERNAL_TOPICS,
        "partitions": [_partition(index, leads[index % len(leads)]) for index in indexes],
        "topic_authorized_operations": operations.OF_TOPIC,
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
