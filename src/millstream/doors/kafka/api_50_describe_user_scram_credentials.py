"""DescribeUserScramCredentials (key 50), version 0.

No user has credentials: answers RESOURCE_NOT_FOUND per user, DUPLICATE_RESOURCE for a user that is named twice.
Gaps: no authentication.
"""

from __future__ import annotations

from collections import Counter

from millstream.core.errors import Code
from millstream.doors.kafka.context import Context
from millstream.security.rights import Operation
from millstream.wire.kafka.messages import Fields, Message

KEY = 50
VERSIONS = (0, 0)
IS_PURE = True


def handle(request: Message, context: Context) -> Fields:
    if code := context.session.cluster_code(Operation.DESCRIBE):
        return {"throttle_time": 0, "error_code": code, "error_message": code.text, "results": []}
    named = Counter(each.name for each in request.users or ())
    results = [_result(name, count > 1) for name, count in named.items()]
    return {"throttle_time": 0, "error_code": Code.NONE, "error_message": "", "results": results}


def _result(name: str, is_repeated: bool) -> Fields:
    code = Code.DUPLICATE_RESOURCE if is_repeated else Code.RESOURCE_NOT_FOUND
    return {"user": name, "error_code": code, "error_message": code.text, "credential_infos": []}
