"""Topics, groups, the broker and its loggers as config resources, shared by the config APIs.

A group has the settings of its queue and of the consumer protocol. To set a queue setting before the group exists
creates the queue.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from millstream.broker.broker_settings import TOPIC_DEFAULTS
from millstream.broker.groups.group_configs import CONSUMER_SETTINGS
from millstream.broker.groups.queue.settings import PREFIX, clean
from millstream.broker.setting import Setting
from millstream.broker.settings import GROUP_SETTINGS, SETTINGS, TopicSettings, check_name, is_kafkas
from millstream.core.errors import Code, RequestError
from millstream.doors.kafka import config_brokers, config_loggers
from millstream.doors.kafka.config_entries import FROM_DEFAULT, FROM_GROUP, FROM_TOPIC, Synonym, entry
from millstream.doors.kafka.context import Context
from millstream.wire.kafka.messages import Fields, Message

TOPIC, BROKER, LOGGER, CLIENT_METRICS, GROUP = 2, 4, 8, 16, 32

SETTINGS_MAX = 1_000
"""Per resource and request. Kafka has some sixty for a topic."""
_OF_GROUPS = {**CONSUMER_SETTINGS, **GROUP_SETTINGS}
_BROKERS_NAMES = {topic: name for name, topic in TOPIC_DEFAULTS.items()}


@dataclass(frozen=True, slots=True)
class Configured:
    """Settable names and set values."""

    table: Mapping[str, Setting]
    overrides: Mapping[str, str]
    default: Callable[[str], str]


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


def name_of(resource: Message, name: str) -> str:
    """Group settings are also accepted under the broker's name."""
    return name.removeprefix(PREFIX) if resource.resource_type == GROUP else name


def find(resource: Message, context: Context) -> Configured:
    name, broker = resource.resource_name, context.broker
    if resource.resource_type == GROUP:
        if not name:
            raise RequestError(Code.INVALID_REQUEST, "a group's name is missing")
        overrides = {**broker.group_configs.by_group.get(name, {}), **broker.queues.overrides(name)}
        queue = broker.queues.get(name)
        door = queue.door_defaults if queue is not None else {}
        return Configured(_OF_GROUPS, overrides, lambda name: door.get(name, _OF_GROUPS[name].default))
    if resource.resource_type == BROKER:
        altered = broker.settings.altered(config_brokers.node_of(name, context))
        return Configured(config_brokers.SETTABLE, altered, lambda name: broker.settings.layers(name)[0].value)
    if resource.resource_type == TOPIC:
        settings = _topic(name, context)
        return Configured(SETTINGS, settings.overrides, settings.default)
    raise RequestError(Code.INVALID_REQUEST, f"resources of type {resource.resource_type} have no settings here")


def _topic(name: str, context: Context) -> TopicSettings:
    topic = context.broker.topics.get(name)
    if topic is None:
        check_name(name)
        raise RequestError(Code.UNKNOWN_TOPIC_OR_PARTITION, f"there is no topic {name}")
    return topic.settings


def describe(resource: Message, context: Context) -> list[Fields]:
    """Lists settings that Kafka does not have only if they are set or if the client names them.

    Null and an empty list of names both mean all settings (Kafka's `ConfigHelper`).
    """
    name, keys = resource.resource_name, frozenset(resource.configuration_keys or ())
    if resource.resource_type == BROKER:
        entries = config_brokers.describe(name, context)
    elif resource.resource_type == LOGGER:
        entries = config_loggers.describe(name, context)
    elif resource.resource_type == TOPIC:
        settings = _topic(name, context)
        entries = topic_entries(settings, context, keys)
    elif resource.resource_type == CLIENT_METRICS:
        entries = []
    else:
        configured = find(resource, context)
        entries = [_group_entry(configured, name) for name in configured.table]
    return [entry for entry in entries if entry["name"] in keys] if keys else entries


def topic_entries(settings: TopicSettings, context: Context, named: frozenset[str] = frozenset()) -> list[Fields]:
    shown = (name for name in SETTINGS if is_kafkas(name) or name in settings.overrides or name in named)
    return [_topic_entry(name, settings, context) for name in shown]


def _topic_entry(name: str, settings: TopicSettings, context: Context) -> Fields:
    if name in _BROKERS_NAMES:
        behind = _BROKERS_NAMES[name]
        synonyms = [Synonym(behind, *layer) for layer in context.broker.settings.layers(behind)]
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


async def apply(resource: Message, overrides: Mapping[str, str], validate_only: bool, context: Context) -> None:
    find(resource, context)
    name, broker = resource.resource_name, context.broker
    if resource.resource_type == TOPIC:
        await broker.topics.configure(name, overrides, validate_only)
    elif resource.resource_type == BROKER:
        broker.settings.check(overrides)
        if not validate_only:
            await broker.settings.configure(config_brokers.node_of(name, context), overrides)
    else:
        await _configure_group(name, overrides, validate_only, context)


async def _configure_group(name: str, overrides: Mapping[str, str], validate_only: bool, context: Context) -> None:
    configs, queues = context.broker.group_configs, context.broker.queues
    of_consumers = {key: text for key, text in overrides.items() if key.startswith("consumer.")}
    of_queue = clean({key: text for key, text in overrides.items() if key not in of_consumers})
    configs.check(name, of_consumers)
    if validate_only:
        return
    if of_consumers != configs.by_group.get(name, {}):
        await configs.configure(name, of_consumers)
    if of_queue != queues.overrides(name):
        await queues.configure(name, of_queue)


def result(resource: Message, error: RequestError | None = None) -> Fields:
    return {
        "error_code": error.code if error is not None else Code.NONE,
        "error_message": error.detail if error is not None else None,
        "resource_type": resource.resource_type,
        "resource_name": resource.resource_name,
    }
