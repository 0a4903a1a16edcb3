"""OffsetDelete (key 47), version 0.

Deletes committed offsets of topics that no member of the group subscribes to (KIP-496), in transactions of at most
1,000 partitions. Gaps: none.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from millstream.core.errors import Code, RequestError
from millstream.doors.kafka.context import Context
from millstream.doors.kafka.turns import ITEMS_A_STEP, in_turns
from millstream.wire.kafka.messages import Fields, Message

KEY = 47
VERSIONS = (0, 0)


Asked = tuple[str, list[int]]
"""A topic's name and its partitions."""


async def handle(request: Message, context: Context) -> Fields:
    topics: list[Fields] = []
    try:
        async for step in _steps(request):
            codes = await context.session.delete_offsets(request.group_id, step)
            for (name, partitions), answers in zip(step, codes, strict=True):
                if not topics or topics[-1]["name"] != name:
                    topics.append({"name": name, "partitions": []})
                topics[-1]["partitions"] += [
                    {"partition_index": partition, "error_code": code}
                    for partition, code in zip(partitions, answers, strict=True)
                ]
    except RequestError as error:
        return {"throttle_time": 0, "error_code": error.code, "topics": []}
    return {"throttle_time": 0, "error_code": Code.NONE, "topics": topics}


async def _steps(request: Message) -> AsyncIterator[list[Asked]]:
    """The request in parts of at most `ITEMS_A_STEP` topics and partitions; at least one part."""
    step: list[Asked] = []
    count = 0
    async for topic in in_turns(request.topics):
        step.append((topic.name, []))
        count += 1
        async for each in in_turns(topic.partitions):
            if count >= ITEMS_A_STEP:
                yield step
                step, count = [(topic.name, [])], 0
            step[-1][1].append(each.partition_index)
            count += 1
        if count >= ITEMS_A_STEP:
            yield step
            step, count = [], 0
    yield step
