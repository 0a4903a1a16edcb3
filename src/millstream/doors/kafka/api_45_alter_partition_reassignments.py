"""AlterPartitionReassignments (key 45), versions 0 to 1.

Accepts an assignment of a partition to its current broker, which changes nothing. Refuses any other assignment; there
is none to cancel. Gaps: partitions do not move: every broker over a store serves every partition.
"""

from __future__ import annotations

from millstream.core.errors import Code
from millstream.doors.kafka.context import Context
from millstream.security.rights import Operation
from millstream.wire.kafka.messages import Fields, Message

KEY = 45
VERSIONS = (0, 1)
IS_PURE = True


def handle(request: Message, context: Context) -> Fields:
    code = context.session.cluster_code(Operation.ALTER)
    return {
        "throttle_time": 0,
        "allow_replication_factor_change": request.allow_replication_factor_change is not False,
        "error_code": code,
        "error_message": code.text if code else None,
        "responses": [
            {
                "name": topic.name,
                "partitions": [_answer(topic.name, each, context) for each in topic.partitions],
            }
            for topic in (() if code else request.topics)
        ],
    }


def _answer(name: str, wanted: Message, context: Context) -> Fields:
    code = _code(name, wanted, context)
    message = None if code == Code.NONE else code.text
    return {"partition_index": wanted.partition_index, "error_code": code, "error_message": message}


def _code(name: str, wanted: Message, context: Context) -> Code:
    leads = context.session.admin.leadership(name, wanted.partition_index)
    if leads is None:
        return Code.UNKNOWN_TOPIC_OR_PARTITION
    if wanted.replicas is None:
        return Code.NO_REASSIGNMENT_IN_PROGRESS
    return Code.NONE if tuple(wanted.replicas) == leads.replicas else Code.INVALID_REPLICA_ASSIGNMENT
