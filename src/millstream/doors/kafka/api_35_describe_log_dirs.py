"""DescribeLogDirs (key 35), versions 1 to 5.

Describes the log directory, partition sizes, and total and free space.
Gaps: one directory.
"""

from __future__ import annotations

from collections.abc import Awaitable

from millstream.core.errors import Code, RequestError
from millstream.doors.kafka.context import Context
from millstream.doors.kafka.turns import at_once, in_turns
from millstream.wire.kafka.messages import Fields, Message

KEY = 35
VERSIONS = (1, 5)


def handle(request: Message, context: Context) -> Fields | Awaitable[Fields]:
    return at_once(_answer(request, context))


async def _answer(request: Message, context: Context) -> Fields:
    try:
        storage = context.session.admin.storage()
    except RequestError as error:
        return {"throttle_time": 0, "error_code": error.code, "results": []}
    wanted = None
    if request.topics is not None:
        wanted = {topic.topic: set(topic.partitions) async for topic in in_turns(request.topics)}
    topics = []
    async for topic in in_turns(storage.topics):
        if wanted is not None and topic.name not in wanted:
            continue
        partitions = [
            {
                "partition_index": partition.index,
                "partition_size": partition.log.size_bytes(),
                "offset_lag": 0,
                "is_future_key": False,
            }
            async for partition in in_turns(list(topic.partitions))
            if wanted is None or partition.index in wanted[topic.name]
        ]
        topics.append({"name": topic.name, "partitions": partitions})
    result = {
        "error_code": Code.NONE,
        "log_dir": storage.location,
        "topics": topics,
        "total_bytes": storage.bytes,
        "usable_bytes": storage.bytes_free,
        "is_cordoned": False,
    }
    return {"throttle_time": 0, "error_code": Code.NONE, "results": [result]}
