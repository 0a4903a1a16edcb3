"""DescribeTransactions (key 65), version 0.

Answers TRANSACTIONAL_ID_NOT_FOUND for every id. Gaps: no transactions.
"""

from __future__ import annotations

from millstream.core.errors import Code
from millstream.doors.kafka.context import Context
from millstream.security.rights import Kind, Operation
from millstream.wire.kafka.messages import Fields, Message

KEY = 65
VERSIONS = (0, 0)
IS_PURE = True


def handle(request: Message, context: Context) -> Fields:
    return {"throttle_time": 0, "transaction_states": [_state(each, context) for each in request.transactional_ids]}


def _state(transactional_id: str, context: Context) -> Fields:
    code = Code.TRANSACTIONAL_ID_NOT_FOUND if transactional_id else Code.INVALID_REQUEST
    kind = Kind.TRANSACTIONAL_ID
    if not context.session.allows(Operation.DESCRIBE, kind, transactional_id):
        code = kind.refusal
    return {
        "error_code": code,
        "transactional_id": transactional_id,
        "transaction_state": "",
        "transaction_timeout": 0,
        "transaction_start_time": 0,
        "producer_id": 0,
        "producer_epoch": 0,
        "topics": [],
    }
