"""DescribeQuorum (key 55), versions 0 to 2.

Describes a quorum of one voter, the broker that Metadata names as controller. The other brokers over the store are
observers. The store orders all metadata writes.
Gaps: metadata is not a log: its offsets and times are -1.
"""

from __future__ import annotations

from millstream.core.errors import Code
from millstream.doors.kafka.context import Context
from millstream.security.rights import Operation
from millstream.wire.kafka.messages import Fields, Message

KEY = 55
VERSIONS = (0, 2)
IS_PURE = True

METADATA_TOPIC = "__cluster_metadata"


def handle(request: Message, context: Context) -> Fields:
    if code := context.session.cluster_code(Operation.DESCRIBE):
        return {"error_code": code, "error_message": code.text, "topics": [], "nodes": []}
    nodes = context.session.nodes(context.local_host, context.local_port)
    listeners = [
        {"node_id": node.node_id, "listeners": [{"name": "PLAINTEXT", "host": node.host, "port": node.port}]}
        for node in nodes
    ]
    brokers = [node.node_id for node in nodes]
    topics = [
        {
            "topic_name": topic.topic_name,
            "partitions": [_partition(topic.topic_name, each.partition_index, brokers) for each in topic.partitions],
        }
        for topic in request.topics
    ]
    return {"error_code": Code.NONE, "error_message": "", "topics": topics, "nodes": listeners}


def _partition(topic: str, index: int, brokers: list[int]) -> Fields:
    code = Code.NONE if (topic, index) == (METADATA_TOPIC, 0) else Code.UNKNOWN_TOPIC_OR_PARTITION
    voters = [_replica(brokers[0])] if code == Code.NONE else []
    return {
        "partition_index": index,
        "error_code": code,
        "error_message": "" if code == Code.NONE else code.text,
        "leader_id": brokers[0] if voters else 0,
        "leader_epoch": 0,
        "high_watermark": -1 if voters else 0,
        "current_voters": voters,
        "observers": [_replica(node) for node in brokers[1:]] if voters else [],
    }


def _replica(node: int) -> Fields:
    return {
        "replica_id": node,
        "replica_directory_id": None,
        "log_end_offset": -1,
        "last_fetch_timestamp": -1,
        "last_caught_up_timestamp": -1,
    }
