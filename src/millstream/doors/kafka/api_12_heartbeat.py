"""Heartbeat (key 12), versions 0 to 4.

Keeps a member alive; the answer says whether it must rejoin. Gaps: none.
"""

from __future__ import annotations

from millstream.core.errors import Code, RequestError
from millstream.doors.kafka.context import Context
from millstream.wire.kafka.messages import Fields, Message

KEY = 12
VERSIONS = (0, 4)


def handle(request: Message, context: Context) -> Fields:
    code = Code.NONE
    try:
        context.session.heartbeat(request.group_id, request.member_id, request.group_instance_id, request.generation_id)
    except RequestError as error:
        code = error.code
    return {"throttle_time": 0, "error_code": code}
