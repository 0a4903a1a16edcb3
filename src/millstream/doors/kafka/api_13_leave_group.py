"""LeaveGroup (key 13), versions 0 to 5.

Removes one member (from version 3 several, KIP-345); the group rebalances at once. An administrator may name a static
member by its instance id alone. Gaps: the reason (version 5) is ignored.
"""

from __future__ import annotations

from collections.abc import Awaitable

from millstream.core.errors import Code, RequestError
from millstream.doors.kafka.context import Context
from millstream.doors.kafka.turns import at_once, in_turns
from millstream.wire.kafka.messages import Fields, Message

KEY = 13
VERSIONS = (0, 5)


def handle(request: Message, context: Context) -> Fields | Awaitable[Fields]:
    return at_once(_answer(request, context))


async def _answer(request: Message, context: Context) -> Fields:
    session, group_id = context.session, request.group_id
    try:
        session.leave(group_id, [])  # raises if this broker is not the coordinator
        if context.version < 3:
            (code,) = session.leave(group_id, [(request.member_id, None)])
            return {"throttle_time": 0, "error_code": code}
        left = [
            {
                "member_id": each.member_id,
                "group_instance_id": each.group_instance_id,
                "error_code": session.leave(group_id, [(each.member_id, each.group_instance_id)])[0],
            }
            async for each in in_turns(request.members)
        ]
    except RequestError as error:
        return {"throttle_time": 0, "error_code": error.code, "members": []}
    return {"throttle_time": 0, "error_code": Code.NONE, "members": left}
