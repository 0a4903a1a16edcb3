"""The broker as a config resource, under Kafka's setting names and under Millstream's own.

The resource "" means every broker over the store. As in Kafka, its description lists altered settings only.
"""

from __future__ import annotations

import dataclasses

from millstream.broker.broker_settings import DEFAULT, DYNAMIC_DEFAULT, FIXED, STATIC
from millstream.broker.configs import OF_BROKERS
from millstream.broker.setting import STRING
from millstream.doors.kafka.config_entries import Synonym, entry
from millstream.doors.kafka.context import Context
from millstream.wire.kafka.messages import Fields


def describe(name: str, context: Context) -> list[Fields]:
    node_id, settings = context.session.configs.broker(name)
    if node_id is None:
        return [
            entry(name, [Synonym(name, text, DYNAMIC_DEFAULT)], OF_BROKERS[name].type, OF_BROKERS[name].text)
            for name, text in sorted(settings.altered(None).items())
        ]
    entries = [
        entry(name, [Synonym(name, *layer) for layer in settings.layers(name)], setting.type, setting.text)
        for name, setting in OF_BROKERS.items()
    ]
    fixed = [
        entry(name, [Synonym(name, *settings.fixed(name))], setting.type, None, read_only=True)
        for name, setting in FIXED.items()
    ]
    return entries + fixed + _places(context) + _own(context)


def _places(context: Context) -> list[Fields]:
    session = context.session
    host, port = session.advertised(context.local_host, context.local_port)
    values = {
        "advertised.listeners": (
            f"PLAINTEXT://{_bracketed(host)}:{port}",
            STATIC if session.config.advertise else DEFAULT,
        ),
        "listeners": (f"PLAINTEXT://{session.config.kafka_address}", STATIC),
        "log.dirs": (session.configs.location, STATIC),
    }
    return [entry(name, [Synonym(name, *value)], STRING, None, read_only=True) for name, value in values.items()]


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _own(context: Context) -> list[Fields]:
    config = context.session.config
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
