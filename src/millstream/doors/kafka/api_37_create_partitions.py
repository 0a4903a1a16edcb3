"""CreatePartitions (key 37), versions 0 to 3.

Adds partitions to a topic. Durable when answered.
Gaps: only the number of assignments is checked, as each partition has one copy.
"""

from __future__ import annotations

from millstream.core.errors import Code, RequestError
from millstream.doors.kafka.context import Context
from millstream.doors.kafka.turns import in_turns
from millstream.wire.kafka.messages import Fields, Message

KEY = 37
VERSIONS = (0, 3)


async def handle(request: Message, context: Context) -> Fields:
    results = []
    async for wanted in in_turns(request.topics):
        code, detail = Code.NONE, None
        assignments = None if wanted.assignments is None else len(wanted.assignments)
        try:
            await context.session.admin.grow_topic(wanted.name, wanted.count, assignments, request.validate_only)
        except RequestError as error:
            code, detail = error.code, error.detail
        results.append({"name": wanted.name, "error_code": code, "error_message": detail})
    return {"throttle_time": 0, "results": results}
