"""ListTransactions (key 66), versions 0 to 2.

Lists none. Gaps: no transactions.
"""

from __future__ import annotations

from millstream.core.errors import Code
from millstream.doors.kafka.context import Context
from millstream.wire.kafka.messages import Fields, Message

KEY = 66
VERSIONS = (0, 2)
IS_PURE = True

STATES = frozenset(
    {"Empty", "Ongoing", "PrepareCommit", "PrepareAbort", "CompleteCommit", "CompleteAbort", "PrepareEpochFence"}
)


def handle(request: Message, context: Context) -> Fields:
    unknown = [state for state in request.state_filters if state not in STATES]
    return {"throttle_time": 0, "error_code": Code.NONE, "unknown_state_filters": unknown, "transaction_states": []}
