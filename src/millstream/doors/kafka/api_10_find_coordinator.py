"""FindCoordinator (key 10), versions 0 to 6.

Finds the coordinator of a group (key type 0), a transactional id (1) or a share partition (2): this broker, at the
address that the client reached, or for groups another broker over the store. Several keys from version 4 (KIP-699).
Gaps: none.
"""

from __future__ import annotations

from millstream.cluster.base import Node
from millstream.core.errors import Code, RequestError
from millstream.doors.kafka.context import Context
from millstream.doors.kafka.turns import in_turns
from millstream.security.rights import Kind
from millstream.wire.kafka.messages import Fields, Message

KEY = 10
VERSIONS = (0, 6)
_KEY_TYPES = (Kind.GROUP, Kind.TRANSACTIONAL_ID, Kind.CLUSTER)
"""The resources of key types 0, 1 and 2. Only brokers ask for a share partition's coordinator."""


async def handle(request: Message, context: Context) -> Fields:
    key_type = request.key_type or 0
    if context.version < 4:
        return {"throttle_time": 0, **await _coordinator(key_type, request.key, context)}
    keys = in_turns(request.coordinator_keys)
    found = [{"key": key, **await _coordinator(key_type, key, context)} async for key in keys]
    return {"throttle_time": 0, "coordinators": found}


async def _coordinator(key_type: int, key: str, context: Context) -> Fields:
    if not 0 <= key_type < len(_KEY_TYPES):
        return _nobody(Code.INVALID_REQUEST, f"there is no coordinator for keys of type {key_type}")
    session = context.session
    try:
        node = await session.find_coordinator(_KEY_TYPES[key_type], key)
    except RequestError as error:
        return _nobody(error.code, error.detail)
    if node is None:
        node = Node(session.node_id, *session.advertised(context.local_host, context.local_port))
    no_message = "" if context.version >= 4 else "NONE"  # as Kafka, which never sends null here
    return {"error_code": Code.NONE, "error_message": no_message, **node._asdict()}


def _nobody(code: Code, text: str) -> Fields:
    return {"error_code": code, "error_message": text, "node_id": -1, "host": "", "port": -1}
