"""OffsetDelete (key 47), version 0.

Removes committed offsets of topics that no member of the group subscribes to. Gaps: none.
"""

from __future__ import annotations

from millstream.doors.kafka.context import Context
from millstream.errors import Code, RequestError
from millstream.wire.kafka.messages import Fields, Message

KEY = 47
VERSIONS = (0, 0)


async def handle(request: Message, context: Context) -> Fields:
    topics = [(topic.name, [each.partition_index for each in topic.partitions]) for topic in request.topics]
    try:
        codes = await context.broker.groups.delete_offsets(request.group_id, topics)
    except RequestError as error:
        return {"throttle_time": 0, "error_code": error.code, "topics": []}
    return {
        "throttle_time": 0,
        "error_code": Code.NONE,
        "topics": [
            {
                "name": name,
                "partitions": [
                    {"partition_index": partition, "error_code": code}
                    for partition, code in zip(partitions, answers, strict=True)
                ],
            }
            for (name, partitions), answers in zip(topics, codes, strict=True)
        ],
    }
