"""Topics and the broker as "config resources": what the three config APIs have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from millstream.broker.settings import SETTINGS
from millstream.broker.topics import Topic
from millstream.doors.kafka.context import Context
from millstream.errors import Code, RequestError
from millstream.wire.kafka.messages import Fields, Message

TOPIC, BROKER = 2, 4
FROM_TOPIC, FROM_STATIC_BROKER, FROM_DEFAULT = 1, 4, 5
"""Kafka's numbers for where a value comes from."""
STRING = 2


def find_topic(resource: Message, context: Context) -> Topic:
    if resource.resource_type != TOPIC:
        raise RequestError(
            Code.INVALID_REQUEST, "only topics can be altered; the broker's own settings are set where it is started"
        )
    topic = context.broker.topics.get(resource.resource_name)
    if topic is None:
        raise RequestError(Code.UNKNOWN_TOPIC_OR_PARTITION, f"there is no topic {resource.resource_name}")
    return topic


def describe(resource: Message, context: Context) -> list[Fields]:
    if resource.resource_type == BROKER:
        if resource.resource_name not in ("", str(context.broker.node_id)):
            raise RequestError(Code.INVALID_REQUEST, f"this is broker {context.broker.node_id}")
        return _broker_entries(context)
    topic = find_topic(resource, context)
    return [_topic_entry(topic, name) for name in SETTINGS]


def _topic_entry(topic: Topic, name: str) -> Fields:
    setting, settings = SETTINGS[name], topic.settings
    source = (
        FROM_TOPIC if name in settings.overrides else FROM_STATIC_BROKER if name in settings.defaults else FROM_DEFAULT
    )
    synonyms = [{"name": name, "value": settings.default(name), "source": FROM_DEFAULT}]
    if source == FROM_TOPIC:
        synonyms.insert(0, {"name": name, "value": settings.value(name), "source": FROM_TOPIC})
    return {
        "name": name,
        "value": settings.value(name),
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
            "value": None if field.metadata["secret"] else str(getattr(config, field.name)),
            "read_only": True,
            "config_source": FROM_STATIC_BROKER,
            "is_sensitive": field.metadata["secret"],
            "synonyms": [],
            "config_type": STRING,
            "documentation": field.metadata.get("doc"),
        }
        for field in dataclasses.fields(config)
        if field.name != "store"  # may hold a password
    ]


async def apply(resource: Message, overrides: Mapping[str, str], validate_only: bool, context: Context) -> None:
    await context.broker.topics.configure(find_topic(resource, context).name, overrides, validate_only)


def result(resource: Message, error: RequestError | None = None) -> Fields:
    return {
        "error_code": error.code if error is not None else Code.NONE,
        "error_message": error.detail if error is not None else None,
        "resource_type": resource.resource_type,
        "resource_name": resource.resource_name,
    }
