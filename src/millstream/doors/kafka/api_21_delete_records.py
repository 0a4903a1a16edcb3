"""DeleteRecords (key 21), versions 0 to 2.

Trims a partition to an offset; -1 means the high watermark. Durable when answered. A topic that is only compacted is
refused with POLICY_VIOLATION.
Gaps: none.
"""

from __future__ import annotations

from millstream.core.errors import Code, RequestError
from millstream.doors.kafka.context import Context
from millstream.doors.kafka.turns import in_turns
from millstream.security.rights import Operation
from millstream.wire.kafka.messages import Fields, Message

KEY = 21
VERSIONS = (0, 2)


async def handle(request: Message, context: Context) -> Fields:
    return {
        "throttle_time": 0,
        "topics": [
            {
                "name": topic.name,
                "partitions": [await _trim(topic.name, one, context) async for one in in_turns(topic.partitions)],
            }
            async for topic in in_turns(request.topics)
        ],
    }


async def _trim(name: str, one: Message, context: Context) -> Fields:
    answer: Fields = {"partition_index": one.partition_index, "low_watermark": -1, "error_code": Code.NONE}
    try:
        partition = context.session.partition(name, one.partition_index, Operation.DELETE)
        if not partition.settings.log.delete:
            return {**answer, "error_code": Code.POLICY_VIOLATION}
        log = partition.log
        start = await log.trim(log.high_watermark if one.offset == -1 else one.offset)
    except RequestError as error:
        return {**answer, "error_code": error.code}
    return {**answer, "low_watermark": start}
