"""DescribeProducers (key 61), version 0.

Lists the idempotent producers of a partition (KIP-664), once however often the request names it.
Gaps: no transactions, so none is ongoing.
"""

from __future__ import annotations

from millstream.core.errors import Code, RequestError
from millstream.doors.kafka.context import Context
from millstream.doors.kafka.turns import in_turns
from millstream.security.rights import Operation
from millstream.wire.kafka.messages import Fields, Message

KEY = 61
VERSIONS = (0, 0)


async def handle(request: Message, context: Context) -> Fields:
    asked: dict[str, dict[int, None]] = {}  # each once, however often it is named
    async for topic in in_turns(request.topics):
        asked.setdefault(topic.name, {}).update(dict.fromkeys(topic.partition_indexes))
    topics = [
        {"name": name, "partitions": [await _describe(name, index, context) async for index in in_turns(indexes)]}
        async for name, indexes in in_turns(asked.items())
    ]
    return {"throttle_time": 0, "topics": topics}


async def _describe(name: str, index: int, context: Context) -> Fields:
    try:
        partition = context.session.partition(name, index, Operation.READ)
        producers = await partition.log.known_producers()
    except RequestError as error:
        return {
            "partition_index": index,
            "error_code": error.code,
            "error_message": error.detail,
            "active_producers": [],
        }
    return {
        "partition_index": index,
        "error_code": Code.NONE,
        "error_message": None,
        "active_producers": [
            {
                "producer_id": producer_id,
                "producer_epoch": producer.epoch,
                "last_sequence": producer.batches[-1][1],
                "last_timestamp": producer.seen_ms,
                "coordinator_epoch": -1,
                "current_txn_start_offset": -1,
            }
            for producer_id, producer in producers.by_id.items()
        ],
    }
