"""OffsetForLeaderEpoch (key 23), versions 2 to 4.

Where an epoch ends: with one copy of each partition there is one epoch, which ends where the partition does.
Gaps: none.
"""

from __future__ import annotations

from millstream.broker.fetch import LEADER_EPOCH
from millstream.core.errors import Code
from millstream.doors.kafka.context import Context
from millstream.doors.kafka.turns import in_turns
from millstream.wire.kafka.messages import Fields, Message

KEY = 23
VERSIONS = (2, 4)


async def handle(request: Message, context: Context) -> Fields:
    topics = []
    async for topic in in_turns(request.topics):
        found = [_find(topic.topic, one, context) async for one in in_turns(topic.partitions)]
        topics.append({"topic": topic.topic, "partitions": found})
    return {"throttle_time": 0, "topics": topics}


def _find(name: str, one: Message, context: Context) -> Fields:
    answer: Fields = {"error_code": Code.NONE, "partition": one.partition, "leader_epoch": -1, "end_offset": -1}
    topic = context.broker.topics.get(name)
    if topic is None or not 0 <= one.partition < topic.partition_count:
        return {**answer, "error_code": Code.UNKNOWN_TOPIC_OR_PARTITION}
    if (one.current_leader_epoch or 0) > LEADER_EPOCH:
        return {**answer, "error_code": Code.UNKNOWN_LEADER_EPOCH}
    if one.leader_epoch > LEADER_EPOCH:
        return answer
    return {**answer, "leader_epoch": LEADER_EPOCH, "end_offset": topic.partitions[one.partition].log.durable}
