"""LeaveGroup (key 13), versions 0 to 5.

One member (from version 3: several) goes, and the others rebalance at once. An administrator may name a static member
by its instance alone. Gaps: the reason (version 5) is not kept.
"""

from __future__ import annotations

from millstream.doors.kafka.context import Context
from millstream.errors import Code, RequestError
from millstream.wire.kafka.messages import Fields, Message

KEY = 13
VERSIONS = (0, 5)


def handle(request: Message, context: Context) -> Fields:
    if context.version < 3:
        members = [(request.member_id, None)]
    else:
        members = [(member.member_id, member.group_instance_id) for member in request.members]
    try:
        codes = context.broker.groups.leave(request.group_id, members)
    except RequestError as error:
        return {"throttle_time": 0, "error_code": error.code, "members": []}
    return {
        "throttle_time": 0,
        "error_code": codes[0] if context.version < 3 else Code.NONE,
        "members": [
            {"member_id": member_id, "group_instance_id": instance_id, "error_code": code}
            for (member_id, instance_id), code in zip(members, codes, strict=True)
        ],
    }
