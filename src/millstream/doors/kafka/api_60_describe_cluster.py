"""DescribeCluster (key 60), versions 0 to 2.

The cluster's id and its brokers.
Gaps: authorized operations are never listed.
"""

from __future__ import annotations

from millstream.doors.kafka.context import Context
from millstream.errors import Code
from millstream.wire.kafka.messages import Fields, Message
from millstream.wire.kafka.metadata import NO_OPERATIONS

KEY = 60
VERSIONS = (0, 2)

BROKERS = 1


def handle(request: Message, context: Context) -> Fields:
    broker = context.broker
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
        "cluster_authorized_operations": NO_OPERATIONS,
    }
