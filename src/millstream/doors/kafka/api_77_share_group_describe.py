"""ShareGroupDescribe (key 77), version 1.

Describes state, epochs and members of share groups (KIP-932), and queues created through another door. Workers of other
doors are not Kafka members and are not listed. Gaps: none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from millstream.core.errors import Code, RequestError
from millstream.doors.kafka.context import Context
from millstream.doors.kafka.turns import in_turns
from millstream.security.rights import Kind
from millstream.wire.kafka import operations
from millstream.wire.kafka.messages import Fields, Message

if TYPE_CHECKING:
    from millstream.broker.groups.described import ShareMemberView

KEY = 77
VERSIONS = (1, 1)


async def handle(request: Message, context: Context) -> Fields:
    asked = bool(request.include_authorized_operations)
    groups = [_describe(group_id, asked, context) async for group_id in in_turns(dict.fromkeys(request.group_ids))]
    return {"throttle_time": 0, "groups": groups}


def _describe(group_id: str, operations_asked: bool, context: Context) -> Fields:
    try:
        group = context.session.describe_share(group_id)
    except RequestError as error:
        return {
            "error_code": error.code,
            "error_message": error.detail,
            "group_id": group_id,
            "group_state": "",
            "group_epoch": 0,
            "assignment_epoch": 0,
            "assignor_name": "",
            "members": [],
        }
    allowed = context.session.operations(Kind.GROUP, group_id) if operations_asked else operations.NOT_ASKED
    return {
        "error_code": Code.NONE,
        "group_id": group_id,
        "group_state": group.state,
        "group_epoch": group.epoch,
        "assignment_epoch": group.target_epoch,
        "assignor_name": group.assignor,
        "members": [_member(member, context) for member in group.members],
        "authorized_operations": allowed,
    }


def _member(member: ShareMemberView, context: Context) -> Fields:
    assigned = []
    for topic_id, count in member.assigned.items():
        name = context.session.topic_name(topic_id)
        if name is not None:  # skips deleted topics
            assigned.append({"topic_id": topic_id, "topic_name": name, "partitions": list(range(count))})
    return {
        "member_id": member.id,
        "rack_id": member.rack_id,
        "member_epoch": member.epoch,
        "client_id": member.client_id,
        "client_host": f"/{member.client_host}",  # as Java prints an address
        "subscribed_topic_names": member.topics,
        "assignment": {"topic_partitions": assigned},
    }
