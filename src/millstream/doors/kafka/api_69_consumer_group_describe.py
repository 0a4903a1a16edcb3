"""ConsumerGroupDescribe (key 69), versions 0 and 1.

Describes state, epochs and members of consumer groups: each member's assignment, target, and (from version 1) whether
it uses the classic protocol. Gaps: none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from millstream.broker.groups.stream.consumer_member import by_topic
from millstream.core.errors import Code, RequestError
from millstream.doors.kafka import group_answers
from millstream.doors.kafka.context import Context
from millstream.wire.kafka.messages import Fields, Message

if TYPE_CHECKING:
    from millstream.broker.groups.described import ConsumerMemberView, ConsumerView

KEY = 69
VERSIONS = (0, 1)
_CLASSIC, _CONSUMER = 0, 1
"""Member types (from version 1)."""


async def handle(request: Message, context: Context) -> Fields:
    def find(group_id: str) -> ConsumerView:
        if not group_id:
            raise RequestError(Code.INVALID_GROUP_ID)
        return context.session.describe_consumer(group_id)

    return await group_answers.describe(request, context, find, _member)


def _member(member: ConsumerMemberView, context: Context) -> Fields:
    return {
        "member_id": member.id,
        "instance_id": member.instance_id,
        "rack_id": member.rack_id,
        "member_epoch": member.epoch,
        "client_id": member.client_id,
        "client_host": f"/{member.client_host}",  # as Java prints an address
        "subscribed_topic_names": member.topics,
        "subscribed_topic_regex": member.pattern or "",
        "assignment": group_answers.assignment(by_topic(member.assigned), context),
        "target_assignment": group_answers.assignment(by_topic(member.target), context),
        "member_type": _CLASSIC if member.classic else _CONSUMER,
    }
