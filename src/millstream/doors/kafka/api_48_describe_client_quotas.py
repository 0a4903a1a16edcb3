"""DescribeClientQuotas (key 48), versions 0 to 1.

Lists no quotas. Refuses entity types that Kafka does not have. Gaps: no quotas.
"""

from __future__ import annotations

from millstream.core.errors import Code
from millstream.doors.kafka.context import Context
from millstream.security.rights import Operation
from millstream.wire.kafka.messages import Fields, Message

KEY = 48
VERSIONS = (0, 1)
IS_PURE = True

ENTITIES = frozenset({"user", "client-id", "ip"})


def handle(request: Message, context: Context) -> Fields:
    if code := context.session.cluster_code(Operation.DESCRIBE_CONFIGS):
        return {"throttle_time": 0, "error_code": code, "error_message": code.text, "entries": None}
    unknown = [each.entity_type for each in request.components if each.entity_type not in ENTITIES]
    if unknown:
        text = f"quotas are not set for entities of type {unknown[0]}"
        return {"throttle_time": 0, "error_code": Code.UNSUPPORTED_VERSION, "error_message": text, "entries": None}
    return {"throttle_time": 0, "error_code": Code.NONE, "error_message": "", "entries": []}
