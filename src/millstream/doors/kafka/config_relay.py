"""Settings of a group that another broker looks after: asked for, and changed, there.

Kafka's admin clients ask the controller, or whomever they like, whoever has the group. So whoever is asked asks the
group's coordinator, on a connection for this one question, and gives the answer as its own.

Nothing is passed on twice: who is asked for another broker, and does not have the group either, refuses it.
"""

from __future__ import annotations

from millstream.core.errors import Code, RequestError, code_of
from millstream.doors.kafka.config_resources import GROUP
from millstream.doors.kafka.context import Context
from millstream.doors.kafka.share_relay import Relay
from millstream.wire.kafka import messages, requests
from millstream.wire.kafka.messages import Fields, Message
from millstream.wire.kafka.primitives import Reader

NO_TAGS = b"\0"


async def ask(
    key: int, version: int, resource: Message, about: Fields, more: Fields, context: Context
) -> Fields | None:
    """What another broker says of one group; None where this one is to say it. `version` is a flexible one.

    `about` is what the request says of the group besides its name. Raises what the other refuses it with.
    """
    group_id = resource.resource_name
    if resource.resource_type != GROUP or not group_id or context.via or not _is_elsewhere(group_id, context):
        return None
    node = await context.broker.cluster.find_coordinator(group_id)
    if node is None:  # it has come here meanwhile
        return None
    named = {"resource_type": GROUP, "resource_name": group_id, **about}
    body = messages.encode_request(key, version, {"resources": [named], **more})
    config = context.broker.config
    relay = Relay(node, config.node_id, config.frame_bytes_max)
    try:
        answer = await relay.ask(requests.header(key, version, 1, "millstream") + NO_TAGS + body, 0)
    except OSError as reason:
        detail = f"the broker that looks after the group does not answer ({reason}); try again"
        raise RequestError(Code.COORDINATOR_NOT_AVAILABLE, detail) from reason
    finally:
        relay.close()
    said = messages.decode_response(key, version, Reader(memoryview(NO_TAGS + answer)))
    (result,) = said.get("responses") or said.results
    if result.error_code:
        raise RequestError(code_of(result.error_code) or Code.UNKNOWN_SERVER_ERROR, result.error_message)
    fields: Fields = result.fields()
    return fields


def _is_elsewhere(group_id: str, context: Context) -> bool:
    try:
        context.broker.cluster.check(group_id)
    except RequestError as error:
        return error.code == Code.NOT_COORDINATOR
    return False
