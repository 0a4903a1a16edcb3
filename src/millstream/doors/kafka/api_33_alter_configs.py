"""AlterConfigs (key 33), versions 0 to 2.

Replaces all settings of a topic, a group or a broker: unnamed settings return to their defaults. Broker settings can be
altered if they are defaults of topic settings. Durable when answered.
Gaps: loggers are set with IncrementalAlterConfigs only, as in Kafka; more than 1,000 settings of one resource are
refused with INVALID_REQUEST.
"""

from __future__ import annotations

from millstream.core.errors import Code, RequestError
from millstream.doors.kafka import config_relay, config_resources
from millstream.doors.kafka.context import Context
from millstream.wire.kafka.messages import Fields, Message

KEY = 33
VERSIONS = (0, 2)


async def handle(request: Message, context: Context) -> Fields:
    return await config_resources.alter_each(request, _alter, context)


async def _alter(resource: Message, validate_only: bool, context: Context) -> None:
    configs = {"configs": [config.fields() for config in resource.configs]}
    more = {"validate_only": validate_only}
    if await config_relay.ask(KEY, VERSIONS[1], resource, configs, more, context) is None:
        overrides = {config.name: config.value for config in resource.configs}
        if missing := [name for name, value in overrides.items() if value is None]:
            raise RequestError(Code.INVALID_REQUEST, f"null value not supported for: {','.join(missing)}")
        kind, name = resource.resource_type, resource.resource_name
        await context.session.configs.change(kind, name, lambda _: overrides, validate_only)
