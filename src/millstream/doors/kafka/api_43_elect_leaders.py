"""ElectLeaders (key 43), versions 0 to 2.

Answers ELECTION_NOT_NEEDED for each named partition: its one copy leads it. A request for all partitions gets no
results. Gaps: none.
"""

from __future__ import annotations

from millstream.core.errors import Code
from millstream.doors.kafka.context import Context
from millstream.security.rights import Operation
from millstream.wire.kafka.messages import Fields, Message

KEY = 43
VERSIONS = (0, 2)
IS_PURE = True

PREFERRED, UNCLEAN = 0, 1


def handle(request: Message, context: Context) -> Fields:
    code = context.session.cluster_code(Operation.ALTER)
    if not code and request.election_type not in (None, PREFERRED, UNCLEAN):
        code = Code.INVALID_REQUEST
    results = [
        {
            "topic": each.topic,
            "partition_result": [_result(each.topic, index, code, context) for index in each.partitions],
        }
        for each in request.topic_partitions or ()
    ]
    return {"throttle_time": 0, "error_code": code, "replica_election_results": results}


def _result(name: str, index: int, code: Code, context: Context) -> Fields:
    if not code:
        is_known = context.session.admin.leadership(name, index) is not None
        code = Code.ELECTION_NOT_NEEDED if is_known else Code.UNKNOWN_TOPIC_OR_PARTITION
    return {"partition_id": index, "error_code": code, "error_message": code.text}
