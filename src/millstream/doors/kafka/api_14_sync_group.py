"""SyncGroup (key 14), versions 0 to 5.

The group's leader sends the assignments; each member's answer waits for them and carries its own. In a consumer group
(KIP-848) the broker assigns. Gaps: none.
"""

from __future__ import annotations

from collections.abc import Awaitable

from millstream.core.errors import Code, RequestError
from millstream.doors.kafka.context import Context, Wait
from millstream.doors.kafka.turns import in_turns
from millstream.wire.kafka.messages import Fields, Message

KEY = 14
VERSIONS = (0, 5)


def handle(request: Message, context: Context) -> Awaitable[Fields]:
    context.wait = Wait()
    return _answer(request, context)


async def _answer(request: Message, context: Context) -> Fields:
    try:
        synced = await context.session.sync(
            request.group_id,
            request.member_id,
            request.group_instance_id,
            request.generation_id,
            (request.protocol_type, request.protocol_name),
            {each.member_id: bytes(each.assignment) async for each in in_turns(request.assignments)},
        )
    except RequestError as error:
        return {"throttle_time": 0, "error_code": error.code, "assignment": b""}
    return {
        "throttle_time": 0,
        "error_code": Code.NONE,
        "protocol_type": synced.protocol_type,
        "protocol_name": synced.protocol_name,
        "assignment": synced.assignment,
    }
