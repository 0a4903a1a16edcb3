"""InitProducerId (key 22), versions 0 to 6.

Gives every idempotent producer a new, unique id. The id in a request belongs to a transactional id: without one the
broker ignores it, because some clients send zeros.
Gaps: no transactions: a transactional id is refused with TRANSACTIONAL_ID_AUTHORIZATION_FAILED.
"""

from __future__ import annotations

from millstream.core.errors import Code, RequestError
from millstream.doors.kafka.context import Context
from millstream.wire.kafka.messages import Fields, Message

KEY = 22
VERSIONS = (0, 6)


async def handle(request: Message, context: Context) -> Fields:
    answer: Fields = {
        "throttle_time": 0,
        "error_code": Code.NONE,
        "producer_id": -1,
        "producer_epoch": -1,
        "ongoing_txn_producer_id": -1,
        "ongoing_txn_producer_epoch": -1,
    }
    if request.transactional_id is not None:
        # librdkafka retries any error that it does not treat as fatal for two minutes. This one is fatal.
        return {**answer, "error_code": Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED}
    if (request.producer_id in (None, -1)) != (request.producer_epoch in (None, -1)):
        return {**answer, "error_code": Code.INVALID_REQUEST}
    try:
        return {**answer, "producer_id": await context.session.producer_id(), "producer_epoch": 0}
    except RequestError as error:
        if error.code == Code.CLUSTER_AUTHORIZATION_FAILED:
            return {**answer, "error_code": error.code}
        return {**answer, "error_code": Code.COORDINATOR_NOT_AVAILABLE}  # clients retry this one
