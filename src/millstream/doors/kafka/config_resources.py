"""Topics, groups and the broker as "config resources": what the three config APIs have in common.

A group's settings are those of its queue. They may be set before the group exists, which makes it one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from millstream.broker.groups.queue_settings import PREFIX, clean
from millstream.broker.settings import GROUP_SETTINGS, SETTINGS, Setting
from millstream.doors.kafka.context import Context
from millstream.errors import Code, RequestError
from millstream.wire.kafka.messages import Fields, Message

TOPIC, BROKER, GROUP = 2, 4, 32
FROM_TOPIC, FROM_STATIC_BROKER, FROM_DEFAULT, FROM_GROUP = 1, 4, 5, 8
"""Kafka's numbers for where a value comes from."""
STRING = 2


@dataclass(frozen=True, slots=True)
class Configured:
    """What can be set here, and what is."""

    table: Mapping[str, Setting]
    overrides: Mapping[str, str]
    default: Callable[[str], str]
    defaults: Mapping[str, str]
    """Those that the broker's configuration decides."""
    own_source: int

    def value(self, name: str) -> str:
        return self.overrides[name] if name in self.overrides else self.default(name)


def name_of(resource: Message, name: str) -> str:
    """A setting of a group has the broker's name for it as well."""
    return name.removeprefix(PREFIX) if resource.resource_type == GROUP else name


def find(resource: Message, context: Context) -> Configured:
    name = resource.resource_name
    if resource.resource_type == GROUP:
        if not name:
            raise RequestError(Code.INVALID_GROUP_ID)
        overrides = context.broker.queues.overrides(name)
        return Configured(GROUP_SETTINGS, overrides, lambda name: GROUP_SETTINGS[name].default, {}, FROM_GROUP)
    if resource.resource_type != TOPIC:
        raise RequestError(
            Code.INVALID_REQUEST,
            "only topics and groups can be altered; the broker's own settings are set where it is started",
        )
    topic = context.broker.topics.get(name)
    if topic is None:
        raise RequestError(Code.UNKNOWN_TOPIC_OR_PARTITION, f"there is no topic {name}")
    settings = topic.settings
    return Configured(SETTINGS, settings.overrides, settings.default, settings.defaults, FROM_TOPIC)


def describe(resource: Message, context: Context) -> list[Fields]:
    if resource.resource_type == BROKER:
        if resource.resource_name not in ("", str(context.broker.node_id)):
            raise RequestError(Code.INVALID_REQUEST, f"this is broker {context.broker.node_id}")
        return _broker_entries(context)
    configured = find(resource, context)
    return [_entry(configured, name) for name in configured.table]


def _entry(configured: Configured, name: str) -> Fields:
    setting = configured.table[name]
    source = FROM_STATIC_BROKER if name in configured.defaults else FROM_DEFAULT
    synonyms = [{"name": name, "value": configured.default(name), "source": FROM_DEFAULT}]
    if name in configured.overrides:
        source = configured.own_source
        synonyms.insert(0, {"name": name, "value": configured.value(name), "source": source})
    return {
        "name": name,
        "value": configured.value(name),
        "read_only": False,
        "config_source": source,
        "is_sensitive": False,
        "synonyms": synonyms,
        "config_type": setting.type,
        "documentation": setting.text,
    }


def _broker_entries(context: Context) -> list[Fields]:
    config = context.broker.config
    return [
        {
            "name": field.name,
            "value": str(getattr(config, field.name)),
            "read_only": True,
            "config_source": FROM_STATIC_BROKER,
            "is_sensitive": False,
            "synonyms": [],
            "config_type": STRING,
            "documentation": field.metadata.get("doc"),
        }
        for field in dataclasses.fields(config)
        if field.name != "store"  # may hold a password
    ]


async def apply(resource: Message, overrides: Mapping[str, str], validate_only: bool, context: Context) -> None:
    find(resource, context)
    if resource.resource_type == TOPIC:
        await context.broker.topics.configure(resource.resource_name, overrides, validate_only)
        return
    clean(overrides)
    if not validate_only:
        await context.broker.queues.configure(resource.resource_name, overrides)


def result(resource: Message, error: RequestError | None = None) -> Fields:
    return {
        "error_code": error.code if error is not None else Code.NONE,
        "error_message": error.detail if error is not None else None,
        "resource_type": resource.resource_type,
        "resource_name": resource.resource_name,
    }
