"""ListGroups (key 16), versions 0 to 5.

Lists this broker's groups, filtered by state (from version 4) and by type (from version 5). Gaps: none.
"""

from __future__ import annotations

from millstream.core.errors import Code
from millstream.doors.kafka.context import Context
from millstream.wire.kafka.messages import Fields, Message

KEY = 16
VERSIONS = (0, 5)


def handle(request: Message, context: Context) -> Fields:
    listed = context.session.list_groups(request.states_filter or (), request.types_filter or ())
    return {
        "throttle_time": 0,
        "error_code": Code.NONE,
        "groups": [
            {
                "group_id": group.group_id,
                "protocol_type": group.protocol_type,
                "group_state": group.state,
                "group_type": group.type.lower(),
            }
            for group in listed
        ],
    }
