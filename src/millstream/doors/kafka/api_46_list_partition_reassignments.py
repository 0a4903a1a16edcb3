"""ListPartitionReassignments (key 46), version 0.

Lists none: partitions do not move between brokers. Gaps: none.
"""

from __future__ import annotations

from millstream.doors.kafka.context import Context
from millstream.security.rights import Operation
from millstream.wire.kafka.messages import Fields, Message

KEY = 46
VERSIONS = (0, 0)


def handle(request: Message, context: Context) -> Fields:
    code = context.session.cluster_code(Operation.DESCRIBE)
    return {"throttle_time": 0, "error_code": code, "error_message": code.text if code else None, "topics": []}
