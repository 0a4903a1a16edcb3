"""What the answers for consumer groups (KIP-848) and for share groups (KIP-932) have in common."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any
from uuid import UUID

from millstream.core.errors import Code, RequestError
from millstream.doors.kafka.context import Context
from millstream.doors.kafka.turns import in_turns
from millstream.security.rights import Kind
from millstream.wire.kafka import operations
from millstream.wire.kafka.messages import Fields, Message

if TYPE_CHECKING:
    from millstream.broker.groups.described import ConsumerView, ShareView
    from millstream.broker.groups.stream.consumer_member import BeatAnswer


async def heartbeat(beat: Awaitable[BeatAnswer]) -> Fields:
    try:
        answer = await beat
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


async def describe(
    request: Message,
    context: Context,
    find: Callable[[str], ConsumerView | ShareView],
    member: Callable[[Any, Context], Fields],
) -> Fields:
    asked = bool(request.include_authorized_operations)
    named = in_turns(dict.fromkeys(request.group_ids))
    return {"throttle_time": 0, "groups": [_describe(name, asked, context, find, member) async for name in named]}


def _describe(
    group_id: str,
    operations_asked: bool,
    context: Context,
    find: Callable[[str], ConsumerView | ShareView],
    member: Callable[[Any, Context], Fields],
) -> Fields:
    try:
        group = find(group_id)
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
        "members": [member(each, context) for each in group.members],
        "authorized_operations": allowed,
    }


def assignment(partitions: Mapping[UUID, Iterable[int]], context: Context) -> Fields:
    """By topic id; deleted topics are left out."""
    named = (
        (topic_id, context.session.topic_name(topic_id), list(numbers)) for topic_id, numbers in partitions.items()
    )
    return {
        "topic_partitions": [
            {"topic_id": topic_id, "topic_name": name, "partitions": numbers}
            for topic_id, name, numbers in named
            if name is not None
        ]
    }
