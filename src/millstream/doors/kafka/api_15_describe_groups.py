"""DescribeGroups (key 15), versions 0 to 6.

Describes the state and members of classic groups, with metadata and assignments while the group is stable. Any other
group is "Dead", and from version 6 an error (KIP-1043). Gaps: none.
"""

from __future__ import annotations

from millstream.core.errors import Code, RequestError
from millstream.doors.kafka.context import Context
from millstream.doors.kafka.turns import in_turns
from millstream.security.rights import Kind
from millstream.wire.kafka import operations
from millstream.wire.kafka.messages import Fields, Message

KEY = 15
VERSIONS = (0, 6)


async def handle(request: Message, context: Context) -> Fields:
    asked = bool(request.include_authorized_operations)
    groups = [_describe(group_id, asked, context) async for group_id in in_turns(dict.fromkeys(request.groups))]
    return {"throttle_time": 0, "groups": groups}


def _describe(group_id: str, operations_asked: bool, context: Context) -> Fields:
    allowed = context.session.operations(Kind.GROUP, group_id) if operations_asked else operations.NOT_ASKED
    try:
        group = context.session.describe_classic(group_id)
    except RequestError as error:
        told = context.version >= 6 or error.code != Code.GROUP_ID_NOT_FOUND
        return {
            "error_code": error.code if told else Code.NONE,
            "error_message": error.detail if told else None,
            "group_id": group_id,
            "group_state": "Dead",
            "protocol_type": "",
            "protocol_data": "",
            "members": [],
            "authorized_operations": operations.NOT_ASKED if told else allowed,
        }
    return {
        "error_code": Code.NONE,
        "group_id": group_id,
        "group_state": group.state,
        "protocol_type": group.protocol_type,
        "protocol_data": group.protocol_name,
        "members": [
            {
                "member_id": member.id,
                "group_instance_id": member.instance_id,
                "client_id": member.client_id,
                "client_host": f"/{member.client_host}",  # as Java prints an address
                "member_metadata": member.metadata,
                "member_assignment": member.assignment,
            }
            for member in group.members
        ],
        "authorized_operations": allowed,
    }
