"""ListOffsets (key 2), versions 1 to 11.

Finds the offset for a timestamp: the first record at or after it, the earliest (-2), the latest (-1), the record with
the largest timestamp (-3, KIP-734), the earliest local (-4, the same as the earliest).
With isolation level read_committed, the log ends at its stable offset.
Gaps: no tiered storage, so -5 (last tiered) has no offset; no transactions, so both levels see the same end.
"""

from __future__ import annotations

from millstream.core.errors import Code, RequestError
from millstream.core.logs import Damped
from millstream.doors.kafka.context import Context
from millstream.doors.kafka.turns import in_turns
from millstream.security.rights import Operation
from millstream.stores.base import PartitionLog
from millstream.wire.kafka.fetch import READ_COMMITTED
from millstream.wire.kafka.messages import Fields, Message

unexpected = Damped(__name__)

KEY = 2
VERSIONS = (1, 11)

LATEST, EARLIEST, MAX_TIMESTAMP, EARLIEST_LOCAL = -1, -2, -3, -4


async def handle(request: Message, context: Context) -> Fields:
    committed = context.version >= 2 and request.isolation_level == READ_COMMITTED
    return {
        "throttle_time": 0,
        "topics": [
            {
                "name": topic.name,
                "partitions": [
                    await _find(topic.name, one, committed, context) async for one in in_turns(topic.partitions)
                ],
            }
            async for topic in in_turns(request.topics)
        ],
    }


async def _find(name: str, one: Message, committed: bool, context: Context) -> Fields:
    answer = {
        "partition_index": one.partition_index,
        "error_code": Code.NONE,
        "timestamp": -1,
        "offset": -1,
        "leader_epoch": -1,
    }
    try:
        log = context.session.partition(name, one.partition_index, Operation.DESCRIBE).log
    except RequestError as error:
        return {**answer, "error_code": error.code}
    code = log.epochs.check(-1 if one.current_leader_epoch is None else one.current_leader_epoch)
    if code != Code.NONE:
        return {**answer, "error_code": code}
    try:
        offset, timestamp = await _look_up(log, one.timestamp, committed)
    except RequestError as error:
        return {**answer, "error_code": error.code}
    except Exception as error:
        unexpected.error("list offsets of %s-%d failed: %r", name, one.partition_index, error)
        return {**answer, "error_code": Code.UNKNOWN_SERVER_ERROR}
    return {**answer, "offset": offset, "timestamp": timestamp, "leader_epoch": log.epochs.at(offset)}


async def _look_up(log: PartitionLog, timestamp: int, committed: bool) -> tuple[int, int]:
    await log.refresh()
    if timestamp == LATEST:
        return log.stable if committed else log.high_watermark, -1
    if timestamp in (EARLIEST, EARLIEST_LOCAL):
        return log.start, -1
    if timestamp < MAX_TIMESTAMP:
        return -1, -1
    found = await (log.find_max_time() if timestamp == MAX_TIMESTAMP else log.find_time(timestamp))
    if found is None or (committed and found.offset >= log.stable):
        return -1, -1
    return found
