"""DescribeCluster (key 60), versions 0 to 2.

Describes the cluster id and the brokers. On request, lists authorized operations: all are allowed (KIP-430).
Gaps: none.
"""

from __future__ import annotations

from millstream.core.errors import Code
from millstream.doors.kafka.context import Context
from millstream.wire.kafka import operations
from millstream.wire.kafka.messages import Fields, Message

KEY = 60
VERSIONS = (0, 2)

BROKERS = 1


def handle(request: Message, context: Context) -> Fields:
    broker = context.broker
    asked = request.include_cluster_authorized_operations
    nodes = broker.nodes(context.local_host, context.local_port)
    return {
        "throttle_time": 0,
        "error_code": Code.NONE,
        "error_message": None,
        "endpoint_type": request.endpoint_type or BROKERS,
        "cluster_id": broker.cluster_id,
        "controller_id": nodes[0].node_id,
        "brokers": [
            {"broker_id": node.node_id, "host": node.host, "port": node.port, "rack": None, "is_fenced": False}
            for node in nodes
        ],
        "cluster_authorized_operations": operations.OF_CLUSTER if asked else operations.NOT_ASKED,
    }
