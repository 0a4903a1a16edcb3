"""AlterShareGroupOffsets (key 91), version 0.

A share group without members forgets what it knows of a partition and begins at an offset. Durable when answered.
Gaps: none.
"""

from __future__ import annotations

from millstream.broker.groups.queue.queue import Queue
from millstream.broker.topics import Topic
from millstream.core.errors import Code, RequestError
from millstream.doors.kafka.context import Context
from millstream.doors.kafka.turns import in_turns
from millstream.wire.kafka.messages import Fields, Message

KEY = 91
VERSIONS = (0, 0)


async def handle(request: Message, context: Context) -> Fields:
    try:
        group = context.broker.groups.share(request.group_id)
        queue = group.queue()
        if group.members or queue.members:
            raise RequestError(Code.NON_EMPTY_GROUP)
    except RequestError as error:
        return {"throttle_time": 0, "error_code": error.code, "error_message": error.detail, "responses": []}
    responses = [await _alter(each, queue, context) async for each in in_turns(request.topics)]
    return {"throttle_time": 0, "error_code": Code.NONE, "responses": responses}


async def _alter(asked: Message, queue: Queue, context: Context) -> Fields:
    topic = context.broker.topics.get(asked.topic_name)
    partitions = []
    async for each in in_turns(asked.partitions):
        refusal = None
        try:
            await _seek(queue, topic, each.partition_index, each.start_offset)
        except RequestError as error:
            refusal = error
        partitions.append(
            {
                "partition_index": each.partition_index,
                "error_code": Code.NONE if refusal is None else refusal.code,
                "error_message": None if refusal is None else refusal.detail,
            }
        )
    return {
        "topic_name": asked.topic_name,
        "topic_id": None if topic is None else topic.id,
        "partitions": partitions,
    }


async def _seek(queue: Queue, topic: Topic | None, index: int, offset: int) -> None:
    if topic is None or not 0 <= index < topic.partition_count:
        raise RequestError(Code.UNKNOWN_TOPIC_OR_PARTITION)
    log = topic.partitions[index].log
    if not log.start <= offset <= log.durable:
        raise RequestError(
            Code.OFFSET_OUT_OF_RANGE, f"the partition holds offsets {log.start} to {log.durable}, not {offset}"
        )
    await (await queue.partition(topic, index)).seek(offset)
