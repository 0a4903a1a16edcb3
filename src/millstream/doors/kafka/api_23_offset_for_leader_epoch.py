"""OffsetForLeaderEpoch (key 23), versions 2 to 4.

Returns the end offset of a leader epoch (KIP-101). A partition with one copy has one epoch, up to the high watermark.
Gaps: none.
"""

from __future__ import annotations

from millstream.core.errors import Code, RequestError
from millstream.doors.kafka.context import Context
from millstream.doors.kafka.turns import in_turns
from millstream.security.rights import Operation
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
    try:
        log = context.session.partition(name, one.partition, Operation.DESCRIBE).log
    except RequestError as error:
        return {**answer, "error_code": error.code}
    if log.damage.lost is not None:
        return {**answer, "error_code": log.damage.lost.code}
    code = log.epochs.check(-1 if one.current_leader_epoch is None else one.current_leader_epoch)
    if code != Code.NONE:
        return {**answer, "error_code": code}
    epoch, end = log.epochs.end_of(one.leader_epoch, log.high_watermark)
    return {**answer, "leader_epoch": epoch, "end_offset": end}
