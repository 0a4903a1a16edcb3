"""DescribeAcls (key 29), versions 1 to 3.

Answers SECURITY_DISABLED, as Kafka does without an authorizer. Gaps: no access control.
"""

from __future__ import annotations

from millstream.core.errors import Code
from millstream.doors.kafka.context import Context
from millstream.security.rights import Operation
from millstream.wire.kafka.messages import Fields, Message

KEY = 29
VERSIONS = (1, 3)


def handle(request: Message, context: Context) -> Fields:
    code = context.session.cluster_code(Operation.DESCRIBE) or Code.SECURITY_DISABLED
    return {"throttle_time": 0, "error_code": code, "error_message": code.text, "resources": []}
