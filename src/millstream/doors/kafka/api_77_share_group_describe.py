"""ShareGroupDescribe (key 77), version 1.

Describes state, epochs and members of share groups (KIP-932), and queues created through another door. Workers of other
doors are not Kafka members and are not listed. Gaps: none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from millstream.doors.kafka import group_answers
from millstream.doors.kafka.context import Context
from millstream.wire.kafka.messages import Fields, Message

if TYPE_CHECKING:
    from millstream.broker.groups.described import ShareMemberView

KEY = 77
VERSIONS = (1, 1)


async def handle(request: Message, context: Context) -> Fields:
    return await group_answers.describe(request, context, context.session.describe_share, _member)


def _member(member: ShareMemberView, context: Context) -> Fields:
    assigned = {topic_id: range(count) for topic_id, count in member.assigned.items()}
    return {
        "member_id": member.id,
        "rack_id": member.rack_id,
        "member_epoch": member.epoch,
        "client_id": member.client_id,
        "client_host": f"/{member.client_host}",  # as Java prints an address
        "subscribed_topic_names": member.topics,
        "assignment": group_answers.assignment(assigned, context),
    }
