"""IncrementalAlterConfigs (key 44), versions 0 to 1.

Sets or deletes single settings of a topic; appends to and subtracts from lists (`cleanup.policy`). Durable when
answered.
Gaps: only topics; the broker's settings are fixed while it runs.
"""

from __future__ import annotations

from millstream.broker.settings import LIST, SETTINGS
from millstream.broker.topics import Topic
from millstream.doors.kafka import config_resources
from millstream.doors.kafka.context import Context
from millstream.errors import Code, RequestError
from millstream.wire.kafka.messages import Fields, Message

KEY = 44
VERSIONS = (0, 1)

SET, DELETE, APPEND, SUBTRACT = range(4)


async def handle(request: Message, context: Context) -> Fields:
    responses = []
    for resource in request.resources:
        try:
            overrides = _changed(config_resources.find_topic(resource, context), resource.configs)
            await config_resources.apply(resource, overrides, request.validate_only, context)
            responses.append(config_resources.result(resource))
        except RequestError as error:
            responses.append(config_resources.result(resource, error))
    return {"throttle_time": 0, "responses": responses}


def _changed(topic: Topic, configs: list[Message]) -> dict[str, str]:
    overrides = dict(topic.settings.overrides)
    for config in configs:
        name, operation = config.name, config.config_operation
        if operation == DELETE:
            overrides.pop(name, None)
            continue
        if config.value is None:
            raise RequestError(Code.INVALID_CONFIG, f"{name} needs a value")
        if operation == SET:
            overrides[name] = config.value
            continue
        if operation not in (APPEND, SUBTRACT) or name not in SETTINGS or SETTINGS[name].type != LIST:
            raise RequestError(Code.INVALID_CONFIG, f"operation {operation} does not fit {name}, which is no list")
        items = [item for item in topic.settings.value(name).split(",") if item]
        if operation == SUBTRACT:
            items = [item for item in items if item != config.value]
        elif config.value not in items:
            items.append(config.value)
        overrides[name] = ",".join(items)
    return overrides
