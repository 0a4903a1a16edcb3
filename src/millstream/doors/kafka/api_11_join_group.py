"""JoinGroup (key 11), versions 0 to 9.

A classic-protocol member joins the next generation; the broker answers when all members have joined. A dynamic member
first gets a member id (from version 4, KIP-394). A static leader that returns to a stable group skips its assignment
(from version 9, KIP-814). In a consumer group (KIP-848) the broker answers at once, with the member epoch as the
generation and no leader. Gaps: a member with more than 1,000 protocols is refused with INVALID_REQUEST; in a consumer
group, one whose subscription names more than 50,000 topics and partitions with INCONSISTENT_GROUP_PROTOCOL.
"""

from __future__ import annotations

from collections.abc import Awaitable

from millstream.broker.groups.stream.classic_member import Join, Joined
from millstream.core.errors import Code, RequestError
from millstream.doors.kafka.context import Context, Wait
from millstream.wire.kafka.messages import Fields, Message

KEY = 11
VERSIONS = (0, 9)
PROTOCOLS_MAX = 1_000
"""The vote runs in one step when the last member joins. Clients have two or three."""


def handle(request: Message, context: Context) -> Awaitable[Fields]:
    context.wait = Wait()  # as in Kafka, a disconnected member stays until its session timeout
    return _answer(request, context)


async def _answer(request: Message, context: Context) -> Fields:
    try:
        if len(request.protocols) > PROTOCOLS_MAX:
            raise RequestError(Code.INVALID_REQUEST, f"a member names {PROTOCOLS_MAX} protocols at most")
        joined = await context.session.join(_join(request, context))
    except RequestError as error:
        joined = Joined(request.member_id, error=error.code)
    nothing = None if context.version >= 7 else ""
    return {
        "throttle_time": 0,
        "error_code": joined.error,
        "generation_id": joined.generation,
        "protocol_type": joined.protocol_type,
        "protocol_name": nothing if joined.protocol_name is None else joined.protocol_name,
        "leader": joined.leader,
        "skip_assignment": joined.skip_assignment,
        "member_id": joined.member_id,
        "members": [
            {"member_id": member_id, "group_instance_id": instance_id, "metadata": metadata}
            for member_id, instance_id, metadata in joined.members
        ],
    }


def _join(request: Message, context: Context) -> Join:
    rebalance_ms = request.rebalance_timeout
    return Join(
        group_id=request.group_id,
        member_id=request.member_id,
        instance_id=request.group_instance_id,
        client_id=context.session.client_id,
        client_host=context.session.host,
        session_ms=request.session_timeout,
        rebalance_ms=request.session_timeout if rebalance_ms is None or rebalance_ms < 0 else rebalance_ms,
        protocol_type=request.protocol_type,
        protocols=tuple((each.name, bytes(each.metadata)) for each in request.protocols),
        id_required=context.version >= 4,
        may_skip_assignment=context.version >= 9,
    )
