"""ElectLeaders (key 43), versions 0 to 2.

Answers ELECTION_NOT_NEEDED for each named partition: its one copy leads it. A request for all partitions gets no
results. Gaps: none.
"""

from __future__ import annotations

from millstream.core.errors import Code
from millstream.doors.kafka.context import Context
from millstream.wire.kafka.messages import Fields, Message

KEY = 43
VERSIONS = (0, 2)
IS_PURE = True

PREFERRED, UNCLEAN = 0, 1


def handle(request: Message, context: Context) -> Fields:
    is_known = request.election_type in (None, PREFERRED, UNCLEAN)
    results = [
        {
            "topic": each.topic,
            "partition_result": [_result(each.topic, index, is_known, context) for index in each.partitions],
        }
        for each in request.topic_partitions or ()
    ]
    code = Code.NONE if is_known else Code.INVALID_REQUEST
    return {"throttle_time": 0, "error_code": code, "replica_election_results": results}


def _result(name: str, index: int, is_known: bool, context: Context) -> Fields:
    topic = context.broker.topics.get(name)
    code = Code.ELECTION_NOT_NEEDED
    if not is_known:
        code = Code.INVALID_REQUEST
    elif topic is None or not 0 <= index < topic.partition_count:
        code = Code.UNKNOWN_TOPIC_OR_PARTITION
    return {"partition_id": index, "error_code": code, "error_message": code.text}
