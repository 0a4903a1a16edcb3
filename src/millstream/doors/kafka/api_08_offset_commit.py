"""OffsetCommit (key 8), versions 2 to 10.

Stores a group's committed offsets. Durable when answered; a stale member is refused. Topics are identified by name up
to version 9 and by id from version 10. Gaps: `retention_time` (up to version 4) is ignored, as in Kafka since 2.1.
"""

from __future__ import annotations

from millstream.broker.groups.stream.offsets import PartitionCommit, TopicCommit
from millstream.core.errors import RequestError
from millstream.doors.kafka.context import Context
from millstream.doors.kafka.turns import in_turns
from millstream.wire.kafka.messages import Fields, Message

KEY = 8
VERSIONS = (2, 10)


async def handle(request: Message, context: Context) -> Fields:
    if not request.topics:  # as in Kafka, no group is looked up or created
        return {"throttle_time": 0, "topics": []}
    commits = [await _commit(topic, context.version) async for topic in in_turns(request.topics)]
    try:
        codes = await context.session.commit(
            request.group_id,
            request.member_id,
            request.group_instance_id,
            request.generation_id_or_member_epoch,
            commits,
        )
    except RequestError as error:
        codes = [[error.code] * len(commit.partitions) for commit in commits]
    return {
        "throttle_time": 0,
        "topics": [
            {
                "name": commit.topic,
                "topic_id": commit.topic,
                "partitions": [
                    {"partition_index": partition.partition, "error_code": code}
                    async for partition, code in in_turns(zip(commit.partitions, answers, strict=True))
                ],
            }
            async for commit, answers in in_turns(zip(commits, codes, strict=True))
        ],
    }


async def _commit(topic: Message, version: int) -> TopicCommit:
    partitions = [
        PartitionCommit(
            each.partition_index,
            each.committed_offset,
            -1 if each.committed_leader_epoch is None else each.committed_leader_epoch,
            each.committed_metadata or "",
        )
        async for each in in_turns(topic.partitions)
    ]
    return TopicCommit(topic.topic_id if version >= 10 else topic.name, partitions)
