"""IncrementalAlterConfigs (key 44), versions 0 to 1.

Sets or deletes single settings of a topic, a group or a broker; appends to and subtracts from lists (`cleanup.policy`).
Broker settings can be altered if they are defaults of topic settings. Durable when answered. Sets logger levels until
the broker stops.
Gaps: no client metrics; more than 1,000 settings of one resource are refused with INVALID_REQUEST.
"""

from __future__ import annotations

from functools import partial

from millstream.broker.configs import LOGGER, Configured
from millstream.broker.setting import LIST
from millstream.core.errors import Code, RequestError
from millstream.doors.kafka import config_loggers, config_relay, config_resources
from millstream.doors.kafka.context import Context
from millstream.wire.kafka.messages import Fields, Message

KEY = 44
VERSIONS = (0, 1)

SET, DELETE, APPEND, SUBTRACT = range(4)


async def handle(request: Message, context: Context) -> Fields:
    return await config_resources.alter_each(request, _alter, context)


async def _alter(resource: Message, validate_only: bool, context: Context) -> None:
    if resource.resource_type == LOGGER:
        config_loggers.alter(resource, validate_only, context)
        return
    configs = {"configs": [config.fields() for config in resource.configs]}
    more = {"validate_only": validate_only}
    if await config_relay.ask(KEY, VERSIONS[1], resource, configs, more, context) is None:
        kind, name = resource.resource_type, resource.resource_name
        await context.session.configs.change(kind, name, partial(_changed, resource), validate_only)


def _changed(resource: Message, configured: Configured) -> dict[str, str]:
    overrides = dict(configured.overrides)
    for config in resource.configs:
        name, operation = config_resources.name_of(resource, config.name), config.config_operation
        if operation == DELETE:
            overrides.pop(name, None)
            continue
        if config.value is None:
            raise RequestError(Code.INVALID_REQUEST, f"null value not supported for: {name}")
        if operation == SET:
            overrides[name] = config.value
            continue
        setting = configured.table.get(name)
        if operation not in (APPEND, SUBTRACT) or setting is None or setting.type != LIST:
            raise RequestError(Code.INVALID_CONFIG, f"operation {operation} needs a list, which {name} is not")
        items = _items(overrides[name] if name in overrides else configured.default(name))
        named = _items(config.value)
        if operation == SUBTRACT:
            items = [item for item in items if item not in named]
        else:
            items = list(dict.fromkeys(items + named))
        overrides[name] = ",".join(items)
    return overrides


def _items(text: str) -> list[str]:
    """Splits a list setting or an operation's value; commas may have blanks behind them."""
    return [item.strip() for item in text.split(",") if item.strip()]
