"""ShareGroupHeartbeat (key 76), version 1.

Joins (epoch 0), stays in or leaves (-1) a share group (KIP-932). Every member is assigned every partition of its
topics: the group shares records, not partitions. The answer has the assignment if it changed or if the member named its
topics. Gaps: racks are stored but not used.
"""

from __future__ import annotations

from millstream.broker.groups.queue.share_member import ShareBeat
from millstream.doors.kafka import group_answers
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
    return await group_answers.heartbeat(context.session.share_heartbeat(beat))
