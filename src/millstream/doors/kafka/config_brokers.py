"""The broker as a config resource, under Kafka's setting names and under Millstream's own.

The resource "" means every broker over the store. As in Kafka, its description lists altered settings only.
"""

from __future__ import annotations

import dataclasses

from millstream.broker.broker_settings import DEFAULT, DYNAMIC_DEFAULT, FIXED, STATIC, TOPIC_DEFAULTS
from millstream.broker.setting import STRING
from millstream.broker.settings import SETTINGS
from millstream.core.errors import Code, RequestError
from millstream.doors.kafka.config_entries import Synonym, entry
from millstream.doors.kafka.context import Context
from millstream.wire.kafka.messages import Fields

SETTABLE = {name: SETTINGS[topic] for name, topic in TOPIC_DEFAULTS.items()}


def node_of(name: str, context: Context) -> int | None:
    """None: every broker."""
    node_id = context.broker.node_id
    if name in ("", str(node_id)):
        return node_id if name else None
    if not name.removeprefix("-").isdigit():
        raise RequestError(Code.INVALID_REQUEST, f"a broker's name is its number, not {name}")
    raise RequestError(Code.INVALID_REQUEST, f"this is broker {node_id}, not {name}")


def describe(name: str, context: Context) -> list[Fields]:
    settings = context.broker.settings
    if node_of(name, context) is None:
        return [
            entry(name, [Synonym(name, text, DYNAMIC_DEFAULT)], SETTABLE[name].type, SETTABLE[name].text)
            for name, text in sorted(settings.altered(None).items())
        ]
    entries = [
        entry(name, [Synonym(name, *layer) for layer in settings.layers(name)], setting.type, setting.text)
        for name, setting in SETTABLE.items()
    ]
    fixed = [
        entry(name, [Synonym(name, *settings.fixed(name))], setting.type, None, read_only=True)
        for name, setting in FIXED.items()
    ]
    return entries + fixed + _places(context) + _own(context)


def _places(context: Context) -> list[Fields]:
    broker = context.broker
    host, port = broker.advertised(context.local_host, context.local_port)
    values = {
        "advertised.listeners": (
            f"PLAINTEXT://{_bracketed(host)}:{port}",
            STATIC if broker.config.advertise else DEFAULT,
        ),
        "listeners": (f"PLAINTEXT://{broker.config.kafka_address}", STATIC),
        "log.dirs": (broker.storage()[0], STATIC),
    }
    return [entry(name, [Synonym(name, *value)], STRING, None, read_only=True) for name, value in values.items()]


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _own(context: Context) -> list[Fields]:
    config = context.broker.config
    return [
        entry(
            field.name,
            [Synonym(field.name, None if field.metadata["secret"] else str(getattr(config, field.name)), STATIC)],
            STRING,
            field.metadata.get("doc"),
            read_only=True,
            is_sensitive=field.metadata["secret"],
        )
        for field in dataclasses.fields(config)
        if field.name not in ("store", "meta")  # may hold a password
    ]
