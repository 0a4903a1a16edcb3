"""CreateAcls (key 30), versions 1 to 3.

Answers SECURITY_DISABLED per ACL, as Kafka does without an authorizer. Gaps: no access control.
"""

from __future__ import annotations

from millstream.core.errors import Code
from millstream.doors.kafka.context import Context
from millstream.security.rights import Operation
from millstream.wire.kafka.messages import Fields, Message

KEY = 30
VERSIONS = (1, 3)
IS_PURE = True


def handle(request: Message, context: Context) -> Fields:
    code = context.session.cluster_code(Operation.ALTER) or Code.SECURITY_DISABLED
    results = [{"error_code": code, "error_message": code.text} for _ in request.creations]
    return {"throttle_time": 0, "results": results}
