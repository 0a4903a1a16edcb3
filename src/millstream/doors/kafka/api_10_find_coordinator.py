"""FindCoordinator (key 10), versions 0 to 6.

Who looks after a group (key type 0), a transactional id (1) or a share partition (2): this broker, at the address by
which the client reached it. Several keys at once from version 4. Gaps: none.
"""

from __future__ import annotations

from millstream.doors.kafka.context import Context
from millstream.errors import Code
from millstream.wire.kafka.messages import Fields, Message

KEY = 10
VERSIONS = (0, 6)
_KEY_TYPES = (0, 1, 2)


def handle(request: Message, context: Context) -> Fields:
    coordinator = _coordinator(request.key_type or 0, context)
    if context.version < 4:
        return {"throttle_time": 0, **coordinator}
    return {"throttle_time": 0, "coordinators": [{"key": key, **coordinator} for key in request.coordinator_keys]}


def _coordinator(key_type: int, context: Context) -> Fields:
    if key_type not in _KEY_TYPES:
        text = f"there is no coordinator for keys of type {key_type}"
        return {"error_code": Code.INVALID_REQUEST, "error_message": text, "node_id": -1, "host": "", "port": -1}
    host, port = context.broker.advertised(context.local_host, context.local_port)
    node_id = context.broker.node_id
    return {"error_code": Code.NONE, "error_message": None, "node_id": node_id, "host": host, "port": port}
