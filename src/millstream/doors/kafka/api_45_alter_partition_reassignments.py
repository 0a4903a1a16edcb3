"""AlterPartitionReassignments (key 45), versions 0 to 1.

Accepts an assignment of a partition to its current broker, which changes nothing. Refuses any other assignment; there
is none to cancel. Gaps: partitions do not move: every broker over a store serves every partition.
"""

from __future__ import annotations

from millstream.core.errors import Code
from millstream.doors.kafka.context import Context
from millstream.wire.kafka.messages import Fields, Message

KEY = 45
VERSIONS = (0, 1)
IS_PURE = True


def handle(request: Message, context: Context) -> Fields:
    return {
        "throttle_time": 0,
        "allow_replication_factor_change": request.allow_replication_factor_change is not False,
        "error_code": Code.NONE,
        "error_message": None,
        "responses": [
            {
                "name": topic.name,
                "partitions": [_answer(topic.name, each, context) for each in topic.partitions],
            }
            for topic in request.topics
        ],
    }


def _answer(name: str, wanted: Message, context: Context) -> Fields:
    code = _code(name, wanted, context)
    message = None if code == Code.NONE else code.text
    return {"partition_index": wanted.partition_index, "error_code": code, "error_message": message}


def _code(name: str, wanted: Message, context: Context) -> Code:
    topic = context.broker.topics.get(name)
    if topic is None or not 0 <= wanted.partition_index < topic.partition_count:
        return Code.UNKNOWN_TOPIC_OR_PARTITION
    if wanted.replicas is None:
        return Code.NO_REASSIGNMENT_IN_PROGRESS
    leads = context.broker.cluster.leaderships(topic.id)
    if tuple(wanted.replicas) == leads[wanted.partition_index % len(leads)].replicas:
        return Code.NONE
    return Code.INVALID_REPLICA_ASSIGNMENT
