"""DeleteTopics (key 20), versions 1 to 6.

Deletes topics by name or, from version 6, by id (KIP-516). The topic is gone when answered, its files later.
Gaps: none.
"""

from __future__ import annotations

from uuid import UUID

from millstream.core.errors import Code, RequestError
from millstream.doors.kafka.context import Context
from millstream.doors.kafka.turns import in_turns
from millstream.wire.kafka.messages import NO_ID, Fields, Message

KEY = 20
VERSIONS = (1, 6)


async def handle(request: Message, context: Context) -> Fields:
    if request.topics is not None:
        topics = in_turns(request.topics)
        responses = [await _delete(topic.name, topic.topic_id or NO_ID, context) async for topic in topics]
    else:
        responses = [await _delete(name, NO_ID, context) async for name in in_turns(request.topic_names)]
    return {"throttle_time": 0, "responses": responses}


async def _delete(name: str | None, topic_id: UUID, context: Context) -> Fields:
    answer: Fields = {"name": name, "topic_id": topic_id, "error_code": Code.NONE, "error_message": None}
    try:
        topic = await context.session.admin.delete_topic(topic_id if name is None else name)
    except RequestError as error:
        return {**answer, "error_code": error.code, "error_message": error.detail}
    return {**answer, "name": topic.name, "topic_id": topic.id}
