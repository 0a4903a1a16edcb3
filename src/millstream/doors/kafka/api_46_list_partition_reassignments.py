"""ListPartitionReassignments (key 46), version 0.

Lists none: partitions do not move between brokers. Gaps: none.
"""

from __future__ import annotations

from millstream.core.errors import Code
from millstream.doors.kafka.context import Context
from millstream.wire.kafka.messages import Fields, Message

KEY = 46
VERSIONS = (0, 0)


def handle(request: Message, context: Context) -> Fields:
    return {"throttle_time": 0, "error_code": Code.NONE, "error_message": None, "topics": []}
