"""Relays config requests for a group to its coordinator on another broker.

Kafka's admin clients send these requests to the controller or to any broker, not to the group's coordinator. The
receiving broker relays the request over a one-off connection and returns the answer.

A request is relayed once: a broker that gets a relayed request for a group that it does not own refuses it.
"""

from __future__ import annotations

from millstream.broker.configs import GROUP
from millstream.core.errors import Code, RequestError, code_of
from millstream.doors.kafka import peer_connection
from millstream.doors.kafka.context import Context
from millstream.wire.kafka import messages, requests
from millstream.wire.kafka.messages import Fields, Message
from millstream.wire.kafka.primitives import Reader

NO_TAGS = b"\0"


async def ask(
    key: int, version: int, resource: Message, about: Fields, more: Fields, context: Context
) -> Fields | None:
    """The coordinator's answer for one group; None if this broker answers itself. `version` must be flexible.

    `about` has the request's fields for the group, except its name. Raises the coordinator's error.
    """
    group_id = resource.resource_name
    session = context.session
    if resource.resource_type != GROUP or not group_id or context.via or not session.peers.is_elsewhere(group_id):
        return None
    node = await session.peers.coordinator(group_id)
    if node is None:  # the group moved to this broker during the lookup
        return None
    named = {"resource_type": GROUP, "resource_name": group_id, **about}
    body = messages.encode_request(key, version, {"resources": [named], **more})
    relay = peer_connection.for_client(node, session)
    try:
        answer = await relay.ask(requests.header(key, version, 1, session.client_id) + NO_TAGS + body, 0)
    except OSError as reason:
        detail = f"the coordinator of group {group_id} does not answer ({reason}); try again"
        raise RequestError(Code.COORDINATOR_NOT_AVAILABLE, detail) from reason
    finally:
        relay.close()
    said = messages.decode_response(key, version, Reader(memoryview(NO_TAGS + bytes(answer))))
    (result,) = said.get("responses") or said.results
    if result.error_code:
        raise RequestError(code_of(result.error_code) or Code.UNKNOWN_SERVER_ERROR, result.error_message)
    fields: Fields = result.fields()
    return fields
