"""ConsumerGroupHeartbeat (key 68), versions 0 and 1.

Implements the consumer protocol (KIP-848): join (epoch 0), heartbeat, confirm revoked partitions, leave (-1, or -2 for
a static member that will return). The answer has the assignment if it changed or if the member sent all its fields.
Patterns have RE2's syntax, at most 500 states, and at most 50 patterns per group. The first member that joins a classic
group converts it to a consumer group and keeps its members (`group.consumer.migration.policy`).
Gaps: racks are stored but not used.
"""

from __future__ import annotations

from millstream.broker.groups.stream.consumer_member import Beat
from millstream.doors.kafka import group_answers
from millstream.doors.kafka.context import Context
from millstream.doors.kafka.turns import in_turns
from millstream.wire.kafka.messages import Fields, Message

KEY = 68
VERSIONS = (0, 1)


async def handle(request: Message, context: Context) -> Fields:
    beat = await _beat(request, context)
    return await group_answers.heartbeat(context.session.consumer_heartbeat(beat))


async def _beat(request: Message, context: Context) -> Beat:
    topics, owned = request.subscribed_topic_names, None
    if request.topic_partitions is not None:
        listed = in_turns(request.topic_partitions)
        owned = frozenset([(each.topic_id, n) async for each in listed async for n in in_turns(each.partitions)])
    return Beat(
        group_id=request.group_id,
        member_id=request.member_id,
        epoch=request.member_epoch,
        instance_id=request.instance_id,
        rack_id=request.rack_id,
        rebalance_ms=None if request.rebalance_timeout == -1 else request.rebalance_timeout,
        topics=None if topics is None else frozenset(topics),
        pattern=request.subscribed_topic_regex,
        assignor=request.server_assignor,
        owned=owned,
        id_required=context.version >= 1,
    )
