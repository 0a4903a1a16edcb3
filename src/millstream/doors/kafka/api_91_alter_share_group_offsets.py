"""AlterShareGroupOffsets (key 91), version 0.

Seeks a share group without members to an offset, and drops the partition's state. Durable when answered.
Gaps: none.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from millstream.core.errors import Code, RequestError
from millstream.doors.kafka.context import Context
from millstream.doors.kafka.turns import in_turns
from millstream.security.rights import Operation
from millstream.wire.kafka.messages import Fields, Message

if TYPE_CHECKING:
    from millstream.broker.session import Queue, Topic

KEY = 91
VERSIONS = (0, 0)


async def handle(request: Message, context: Context) -> Fields:
    try:
        queue = context.session.idle_share(request.group_id, Operation.READ).queue()
        if queue.members:
            raise RequestError(Code.NON_EMPTY_GROUP)
    except RequestError as error:
        refused = [await _refused(each, error, context) async for each in in_turns(request.topics)]
        return {"throttle_time": 0, "error_code": error.code, "error_message": error.detail, "responses": refused}
    responses = [await _alter(each, queue, context) async for each in in_turns(request.topics)]
    return {"throttle_time": 0, "error_code": Code.NONE, "responses": responses}


async def _alter(asked: Message, queue: Queue, context: Context) -> Fields:
    try:
        topic = context.session.topic(asked.topic_name, Operation.READ)
    except RequestError as error:
        return await _refused(asked, error, context)
    partitions = []
    async for each in in_turns(asked.partitions):
        refusal = None
        try:
            await _seek(queue, topic, each.partition_index, each.start_offset)
        except RequestError as error:
            refusal = error
        partitions.append(_partition(each, refusal))
    return _answered(asked, topic, partitions)


async def _refused(asked: Message, error: RequestError, context: Context) -> Fields:
    """Kafka's Java client (4.1) reads the partitions' error codes only: without them a refusal looks like success."""
    topic = None
    with suppress(RequestError):
        topic = context.session.topic(asked.topic_name, Operation.DESCRIBE)
    return _answered(asked, topic, [_partition(each, error) async for each in in_turns(asked.partitions)])


def _answered(asked: Message, topic: Topic | None, partitions: list[Fields]) -> Fields:
    topic_id = None if topic is None else topic.id
    return {"topic_name": asked.topic_name, "topic_id": topic_id, "partitions": partitions}


def _partition(asked: Message, refusal: RequestError | None) -> Fields:
    return {
        "partition_index": asked.partition_index,
        "error_code": Code.NONE if refusal is None else refusal.code,
        "error_message": None if refusal is None else refusal.detail,
    }


async def _seek(queue: Queue, topic: Topic, index: int, offset: int) -> None:
    if not 0 <= index < topic.partition_count:
        raise RequestError(Code.UNKNOWN_TOPIC_OR_PARTITION)
    log = topic.partitions[index].log
    if not log.start <= offset <= log.high_watermark:
        raise RequestError(
            Code.OFFSET_OUT_OF_RANGE, f"the partition holds offsets {log.start} to {log.high_watermark}, not {offset}"
        )
    await (await queue.partition(topic, index)).seek(offset)
