"""DeleteShareGroupOffsets (key 92), version 0.

Deletes a share group's state of topics; it then reads them as a new group does. The group must have no members.
Durable when answered. Gaps: none.
"""

from __future__ import annotations

from millstream.core.errors import Code, RequestError
from millstream.doors.kafka.context import Context
from millstream.doors.kafka.turns import in_turns
from millstream.security.rights import Operation
from millstream.wire.kafka.messages import Fields, Message

KEY = 92
VERSIONS = (0, 0)


async def handle(request: Message, context: Context) -> Fields:
    try:
        context.session.idle_share(request.group_id, Operation.DELETE).queue()
    except RequestError as error:
        return {"throttle_time": 0, "error_code": error.code, "error_message": error.detail, "responses": []}
    names = dict.fromkeys([each.topic_name async for each in in_turns(request.topics)])
    responses = [await _delete(request.group_id, name, context) async for name in in_turns(names)]
    return {"throttle_time": 0, "error_code": Code.NONE, "responses": responses}


async def _delete(group_id: str, name: str, context: Context) -> Fields:
    topic = refusal = None
    try:
        topic = context.session.topic(name, Operation.READ)
        await context.session.forget_share(group_id, name)
    except RequestError as error:
        refusal = error
    return {
        "topic_name": name,
        "topic_id": None if topic is None else topic.id,
        "error_code": Code.NONE if refusal is None else refusal.code,
        "error_message": None if refusal is None else refusal.detail,
    }
