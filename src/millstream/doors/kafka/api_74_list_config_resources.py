"""ListConfigResources (key 74), versions 0 to 1.

Lists config resources (KIP-1142): topics, brokers, their loggers, and groups with settings of their own. Version 0
lists client metrics only, of which there are none. Gaps: no client metrics.
"""

from __future__ import annotations

from millstream.broker.configs import BROKER, CLIENT_METRICS, GROUP, LOGGER, TOPIC
from millstream.core.errors import Code
from millstream.doors.kafka.context import Context
from millstream.security.rights import Operation
from millstream.wire.kafka.messages import Fields, Message

KEY = 74
VERSIONS = (0, 1)

KINDS = (TOPIC, BROKER, LOGGER, CLIENT_METRICS, GROUP)


def handle(request: Message, context: Context) -> Fields:
    kinds = [CLIENT_METRICS] if context.version == 0 else request.resource_types or KINDS
    if code := context.session.cluster_code(Operation.DESCRIBE_CONFIGS):
        return {"throttle_time": 0, "error_code": code, "config_resources": []}
    if not set(kinds) <= set(KINDS):
        return {"throttle_time": 0, "error_code": Code.UNSUPPORTED_VERSION, "config_resources": []}
    named = ((kind, name) for kind in dict.fromkeys(kinds) for name in _names(kind, context))
    listed = [{"resource_type": kind, "resource_name": name} for kind, name in named]
    return {"throttle_time": 0, "error_code": Code.NONE, "config_resources": listed}


def _names(kind: int, context: Context) -> list[str]:
    session = context.session
    if kind in (BROKER, LOGGER):
        return [str(node.node_id) for node in session.nodes(context.local_host, context.local_port)]
    return session.configs.names(kind)
