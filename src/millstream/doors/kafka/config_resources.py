"""Topics, groups, the broker and its loggers as config resources, as the config APIs describe them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from millstream.broker.broker_settings import TOPIC_DEFAULTS
from millstream.broker.configs import BROKER, CLIENT_METRICS, GROUP, LOGGER, TOPIC, Configured
from millstream.broker.groups.queue.settings import PREFIX
from millstream.broker.settings import SETTINGS, TopicSettings, is_kafkas
from millstream.core.errors import Code, RequestError
from millstream.doors.kafka import config_brokers, config_loggers
from millstream.doors.kafka.config_entries import FROM_DEFAULT, FROM_GROUP, FROM_TOPIC, Synonym, entry
from millstream.doors.kafka.context import Context
from millstream.doors.kafka.turns import in_turns
from millstream.security.rights import Operation
from millstream.wire.kafka.messages import Fields, Message

SETTINGS_MAX = 1_000
"""Per resource and request. Kafka has some sixty for a topic."""
_BROKERS_NAMES = {topic: name for name, topic in TOPIC_DEFAULTS.items()}


def check_count(configs: Sequence[Message]) -> None:
    """Settings are validated and stored in one step; too many of them would block the event loop."""
    if len(configs) > SETTINGS_MAX:
        raise RequestError(
            Code.INVALID_REQUEST, f"{len(configs)} settings of one resource: at most {SETTINGS_MAX} are allowed"
        )


def check_names(configs: Sequence[Message]) -> None:
    """As in Kafka, a request that alters settings names each of them once."""
    check_count(configs)
    if len({config.name for config in configs}) < len(configs):
        raise RequestError(Code.INVALID_REQUEST, "a setting is named twice for one resource; name each setting once")


async def alter_each(
    request: Message, alter: Callable[[Message, bool, Context], Awaitable[None]], context: Context
) -> Fields:
    responses = []
    async for resource in in_turns(request.resources):
        try:
            check_names(resource.configs)
            await alter(resource, request.validate_only, context)
            responses.append(result(resource))
        except RequestError as error:
            responses.append(result(resource, error))
    return {"throttle_time": 0, "responses": responses}


def name_of(resource: Message, name: str) -> str:
    """Group settings are also accepted under the broker's name."""
    return name.removeprefix(PREFIX) if resource.resource_type == GROUP else name


def describe(resource: Message, context: Context) -> list[Fields]:
    """Lists settings that Kafka does not have only if they are set or if the client names them.

    Null and an empty list of names both mean all settings (Kafka's `ConfigHelper`).
    """
    name, keys = resource.resource_name, frozenset(resource.configuration_keys or ())
    configs = context.session.configs
    if resource.resource_type == BROKER:
        entries = config_brokers.describe(name, context)
    elif resource.resource_type == LOGGER:
        entries = config_loggers.describe(name, context)
    elif resource.resource_type == TOPIC:
        entries = topic_entries(configs.describe(TOPIC, name), context, keys)
    elif resource.resource_type == CLIENT_METRICS:
        configs.check(Operation.DESCRIBE_CONFIGS, CLIENT_METRICS, name)
        entries = []
    else:
        configured = configs.describe(resource.resource_type, name)
        entries = [_group_entry(configured, name) for name in configured.table]
    return [entry for entry in entries if entry["name"] in keys] if keys else entries


def topic_entries(
    settings: Configured | TopicSettings, context: Context, named: frozenset[str] = frozenset()
) -> list[Fields]:
    shown = (name for name in SETTINGS if is_kafkas(name) or name in settings.overrides or name in named)
    return [_topic_entry(name, settings, context) for name in shown]


def _topic_entry(name: str, settings: Configured | TopicSettings, context: Context) -> Fields:
    if name in _BROKERS_NAMES:
        behind = _BROKERS_NAMES[name]
        synonyms = [Synonym(behind, *layer) for layer in context.session.configs.layers(behind)]
    else:
        synonyms = [Synonym(name, settings.default(name), FROM_DEFAULT)]
    if name in settings.overrides:
        synonyms.insert(0, Synonym(name, settings.overrides[name], FROM_TOPIC))
    return entry(name, synonyms, SETTINGS[name].type, SETTINGS[name].text)


def _group_entry(configured: Configured, name: str) -> Fields:
    synonyms = [Synonym(name, configured.default(name), FROM_DEFAULT)]
    if name in configured.overrides:
        synonyms.insert(0, Synonym(name, configured.overrides[name], FROM_GROUP))
    return entry(name, synonyms, configured.table[name].type, configured.table[name].text)


def result(resource: Message, error: RequestError | None = None) -> Fields:
    return {
        "error_code": error.code if error is not None else Code.NONE,
        "error_message": error.detail if error is not None else None,
        "resource_type": resource.resource_type,
        "resource_name": resource.resource_name,
    }
