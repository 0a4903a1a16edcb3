"""InitProducerId (key 22), versions 0 to 6.

Gives an idempotent producer its id. A producer that lost its place asks again with its old id and gets a new epoch.
Gaps: no transactions: a transactional id is refused with TRANSACTIONAL_ID_AUTHORIZATION_FAILED.
"""

from __future__ import annotations

from millstream.doors.kafka.context import Context
from millstream.errors import Code, RequestError
from millstream.wire.kafka.messages import Fields, Message

KEY = 22
VERSIONS = (0, 6)

EPOCH_MAX = 0x7FFE


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
        # librdkafka tries again for two minutes after any error that it does not take for final; this one it does.
        return {**answer, "error_code": Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED}
    known, epoch = request.producer_id, request.producer_epoch
    if known is not None and known >= 0 and epoch is not None and 0 <= epoch < EPOCH_MAX:
        return {**answer, "producer_id": known, "producer_epoch": epoch + 1}
    try:
        return {**answer, "producer_id": await context.broker.producer_ids.take(), "producer_epoch": 0}
    except RequestError:
        return {**answer, "error_code": Code.COORDINATOR_NOT_AVAILABLE}  # what clients know to be worth a retry here
