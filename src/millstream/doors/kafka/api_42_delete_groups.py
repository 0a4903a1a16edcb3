"""DeleteGroups (key 42), versions 0 to 2.

Deletes groups without members, with their committed offsets; share groups with the state of their records.
Gaps: none.
"""

from __future__ import annotations

from millstream.core.errors import Code, RequestError
from millstream.doors.kafka.context import Context
from millstream.doors.kafka.turns import in_turns
from millstream.wire.kafka.messages import Fields, Message

KEY = 42
VERSIONS = (0, 2)


async def handle(request: Message, context: Context) -> Fields:
    results = []
    async for group_id in in_turns(request.groups_names):
        code = Code.NONE
        try:
            await context.session.delete_group(group_id)
        except RequestError as error:
            code = error.code
        results.append({"group_id": group_id, "error_code": code})
    return {"throttle_time": 0, "results": results}
