"""ShareGroupHeartbeat (key 76), version 1.

Joins (epoch 0), stays in or leaves (-1) a share group (KIP-932). Every member is assigned every partition of its
topics: the group shares records, not partitions. The answer has the assignment if it changed or if the member named its
topics. Gaps: racks are stored but not used.
"""

from __future__ import annotations

from millstream.broker.groups.queue.share_member import ShareBeat
from millstream.core.errors import Code, RequestError
from millstream.doors.kafka.context import Context
from millstream.wire.kafka.messages import Fields, Message

KEY = 76
VERSIONS = (1, 1)


async def handle(request: Message, context: Context) -> Fields:
    topics = request.subscribed_topic_names
    beat = ShareBeat(
        group_id=request.group_id,
        member_id=request.member_id,
        epoch=request.member_epoch,
        rack_id=request.rack_id,
        topics=None if topics is None else frozenset(topics),
    )
    try:
        answer = await context.session.share_heartbeat(beat)
    except RequestError as error:
        return {
            "throttle_time": 0,
            "error_code": error.code,
            "error_message": error.detail,
            "member_epoch": 0,
            "heartbeat_interval": 0,
        }
    assignment = None
    if answer.assignment is not None:
        listed = [{"topic_id": topic, "partitions": numbers} for topic, numbers in answer.assignment.items()]
        assignment = {"topic_partitions": listed}
    return {
        "throttle_time": 0,
        "error_code": Code.NONE,
        "member_id": answer.member_id,
        "member_epoch": answer.epoch,
        "heartbeat_interval": answer.heartbeat_interval_ms if answer.epoch >= 0 else 0,
        "assignment": assignment,
    }
