"""DescribeCluster (key 60), versions 0 to 2.

Describes the cluster id and the brokers. On request, lists authorized operations (KIP-430).
Gaps: none.
"""

from __future__ import annotations

from millstream.core.errors import Code
from millstream.doors.kafka.context import Context
from millstream.security.rights import Kind, Operation
from millstream.wire.kafka import operations
from millstream.wire.kafka.messages import Fields, Message

KEY = 60
VERSIONS = (0, 2)

BROKERS = 1


def handle(request: Message, context: Context) -> Fields:
    session = context.session
    nodes = session.nodes(context.local_host, context.local_port)
    return {
        "throttle_time": 0,
        "error_code": Code.NONE,
        "error_message": None,
        "endpoint_type": request.endpoint_type or BROKERS,
        "cluster_id": session.cluster_id,
        "controller_id": nodes[0].node_id,
        "brokers": [
            {"broker_id": node.node_id, "host": node.host, "port": node.port, "rack": None, "is_fenced": False}
            for node in nodes
        ],
        "cluster_authorized_operations": cluster_operations(
            bool(request.include_cluster_authorized_operations), context
        ),
    }


def cluster_operations(is_asked: bool, context: Context) -> int:
    """As in Kafka, a principal that may not describe the cluster learns of no operation."""
    if not is_asked:
        return operations.NOT_ASKED
    session = context.session
    return 0 if session.cluster_code(Operation.DESCRIBE) else session.operations(Kind.CLUSTER)
