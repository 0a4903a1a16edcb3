"""AlterConfigs (key 33), versions 0 to 2.

Replaces all settings of a topic or a share group: what is not named goes back to its default. Durable when answered.
Gaps: the broker's settings are fixed while it runs.
"""

from __future__ import annotations

from millstream.doors.kafka import config_resources
from millstream.doors.kafka.context import Context
from millstream.errors import RequestError
from millstream.wire.kafka.messages import Fields, Message

KEY = 33
VERSIONS = (0, 2)


async def handle(request: Message, context: Context) -> Fields:
    responses = []
    for resource in request.resources:
        overrides = {config.name: config.value for config in resource.configs if config.value is not None}
        try:
            async with context.broker.changing:
                await config_resources.apply(resource, overrides, request.validate_only, context)
            responses.append(config_resources.result(resource))
        except RequestError as error:
            responses.append(config_resources.result(resource, error))
    return {"throttle_time": 0, "responses": responses}
