"""ConsumerGroupDescribe (key 69), versions 0 and 1.

Describes state, epochs and members of consumer groups: each member's assignment, target, and (from version 1) whether
it uses the classic protocol. Gaps: none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from millstream.broker.groups.stream.consumer_member import by_topic
from millstream.core.errors import Code, RequestError
from millstream.doors.kafka.context import Context
from millstream.doors.kafka.turns import in_turns
from millstream.security.rights import Kind
from millstream.wire.kafka import operations
from millstream.wire.kafka.messages import Fields, Message

if TYPE_CHECKING:
    from millstream.broker.groups.described import ConsumerMemberView
    from millstream.broker.groups.stream.assignors import Partition

KEY = 69
VERSIONS = (0, 1)
_CLASSIC, _CONSUMER = 0, 1
"""Member types (from version 1)."""


async def handle(request: Message, context: Context) -> Fields:
    asked = bool(request.include_authorized_operations)
    groups = [_describe(group_id, asked, context) async for group_id in in_turns(dict.fromkeys(request.group_ids))]
    return {"throttle_time": 0, "groups": groups}


def _describe(group_id: str, operations_asked: bool, context: Context) -> Fields:
    try:
        if not group_id:
            raise RequestError(Code.INVALID_GROUP_ID)
        group = context.session.describe_consumer(group_id)
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
        "assignment": _assignment(member.assigned, context),
        "target_assignment": _assignment(member.target, context),
        "member_type": _CLASSIC if member.classic else _CONSUMER,
    }


def _assignment(partitions: frozenset[Partition], context: Context) -> Fields:
    listed = []
    for topic_id, numbers in by_topic(partitions).items():
        name = context.session.topic_name(topic_id)
        if name is not None:  # skips deleted topics
            listed.append({"topic_id": topic_id, "topic_name": name, "partitions": numbers})
    return {"topic_partitions": listed}
