"""The broker's settings under Kafka's names, fixed and dynamic (KIP-226).

    broker-configs/default     overrides for every broker over this store
    broker-configs/<node id>   overrides for one broker

A setting has up to four layers: this broker's override, that of all brokers, the configuration at start, the default.
The first with a value wins. Only defaults of topic settings can be altered, as in Kafka. A change is durable before the
response; every broker over the store watches the keys and applies it to its topics.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

from millstream.broker.setting import BOOLEAN, INT, LIST, STRING
from millstream.broker.settings import SETTINGS
from millstream.config import FIELDS, Config
from millstream.core.errors import Code, RequestError
from millstream.stores.base import Delete, MetaStore, Put, Versioned

logger = logging.getLogger(__name__)

PREFIX = "broker-configs/"
DYNAMIC_BROKER, DYNAMIC_DEFAULT, STATIC, DEFAULT = 2, 3, 4, 5
"""Kafka's numbers for the source of a value."""

TOPIC_DEFAULTS: dict[str, str] = {
    "log.cleaner.delete.retention.ms": "delete.retention.ms",
    "log.cleaner.max.compaction.lag.ms": "max.compaction.lag.ms",
    "log.cleaner.min.cleanable.ratio": "min.cleanable.dirty.ratio",
    "log.cleaner.min.compaction.lag.ms": "min.compaction.lag.ms",
    "log.cleanup.policy": "cleanup.policy",
    "log.flush.interval.messages": "flush.messages",
    "log.flush.interval.ms": "flush.ms",
    "log.index.interval.bytes": "index.interval.bytes",
    "log.index.size.max.bytes": "segment.index.bytes",
    "log.local.retention.bytes": "local.retention.bytes",
    "log.local.retention.ms": "local.retention.ms",
    "log.message.timestamp.after.max.ms": "message.timestamp.after.max.ms",
    "log.message.timestamp.before.max.ms": "message.timestamp.before.max.ms",
    "log.message.timestamp.type": "message.timestamp.type",
    "log.preallocate": "preallocate",
    "log.retention.bytes": "retention.bytes",
    "log.retention.ms": "retention.ms",
    "log.roll.jitter.ms": "segment.jitter.ms",
    "log.roll.ms": "segment.ms",
    "log.segment.bytes": "segment.bytes",
    "log.segment.delete.delay.ms": "file.delete.delay.ms",
    "message.max.bytes": "max.message.bytes",
    **{
        name: name
        for name in (
            "compression.gzip.level",
            "compression.lz4.level",
            "compression.type",
            "compression.zstd.level",
            "min.insync.replicas",
            "unclean.leader.election.enable",
        )
    },
}
"""The topic setting for which each broker setting is the default."""

_FIELDS = {
    "max.message.bytes": "message_bytes_max",
    "retention.bytes": "retention_bytes",
    "retention.ms": "retention_ms",
    "segment.bytes": "segment_bytes",
    "segment.ms": "segment_ms",
}


class Layer(NamedTuple):
    value: str
    source: int


class Fixed(NamedTuple):
    """A setting that is fixed when the broker starts."""

    type: int
    field: str | None
    """The configuration field; None for a constant."""
    value: Callable[[Config], str]


def _of(field: str, type_: int = INT, unit: int = 1) -> Fixed:
    def value(config: Config) -> str:
        chosen = getattr(config, field)
        if isinstance(chosen, bool):
            return str(chosen).lower()
        return str(chosen // unit if chosen >= 0 else chosen) if isinstance(chosen, int) else str(chosen)

    return Fixed(type_, field, value)


def _always(value: str, type_: int = STRING) -> Fixed:
    return Fixed(type_, None, lambda config: value)


FIXED: dict[str, Fixed] = {
    "authorizer.class.name": _always(""),
    "auto.create.topics.enable": _of("auto_create_topics", BOOLEAN),
    "broker.id": _of("node_id"),
    "default.replication.factor": _always("1", INT),
    "delete.topic.enable": _always("true", BOOLEAN),
    "group.consumer.assignors": _always("uniform,range", LIST),
    "group.consumer.heartbeat.interval.ms": _always("5000", INT),
    "group.consumer.session.timeout.ms": _always("45000", INT),
    "group.coordinator.rebalance.protocols": _always("classic,consumer,share", LIST),
    "group.initial.rebalance.delay.ms": _of("initial_rebalance_delay_ms"),
    "group.max.session.timeout.ms": _of("session_timeout_max_ms"),
    "group.min.session.timeout.ms": _of("session_timeout_min_ms"),
    "log.cleaner.enable": _always("true", BOOLEAN),
    "log.retention.check.interval.ms": _of("housekeeping_interval_ms"),
    "log.retention.hours": _of("retention_ms", unit=3_600_000),
    "max.connections": _of("connections_max"),
    "node.id": _of("node_id"),
    "num.partitions": _of("default_partitions"),
    "offsets.retention.minutes": _of("offsets_retention_ms", unit=60_000),
    "process.roles": _always("broker,controller", LIST),
    "socket.request.max.bytes": _of("frame_bytes_max"),
    **{
        f"group.{name}": _always(SETTINGS[f"group.{name}"].default, SETTINGS[f"group.{name}"].type)
        for name in (
            "share.delivery.count.limit",
            "share.heartbeat.interval.ms",
            "share.partition.max.record.locks",
            "share.record.lock.duration.ms",
            "share.session.timeout.ms",
        )
    },
}


PLACES = frozenset({"advertised.listeners", "listeners", "log.dirs"})
"""Also fixed. Only a door knows the address that a client reached."""


class BrokerSettings:
    def __init__(self, config: Config, meta: MetaStore) -> None:
        self._config = config
        self._meta = meta
        self._apply: Callable[[Mapping[str, str]], None] = lambda defaults: None
        self._altered: dict[str, dict[str, str]] = {"default": {}, str(config.node_id): {}}
        self._at_start = {topic: str(getattr(config, field)) for topic, field in _FIELDS.items()}
        self._unwatch: Callable[[], None] | None = None

    async def start(self, apply: Callable[[Mapping[str, str]], None]) -> None:
        """Calls `apply` with the defaults of topic settings, now and after every change."""
        self._apply = apply
        self._unwatch = self._meta.watch(PREFIX, self._heard)
        for key, versioned in await self._meta.list(PREFIX):
            self._take(key, versioned)
        self._apply(self.topic_defaults())

    def close(self) -> None:
        if self._unwatch is not None:
            self._unwatch()

    # -- looking -----------------------------------------------------------------------------------------------------

    def altered(self, node: int | None) -> Mapping[str, str]:
        """The overrides of this broker, or with None of all."""
        return self._altered["default" if node is None else str(node)]

    def layers(self, name: str) -> list[Layer]:
        """The layers of a setting that can be altered; the first wins."""
        topic = TOPIC_DEFAULTS[name]
        dynamic = ((self.altered(self._config.node_id), DYNAMIC_BROKER), (self.altered(None), DYNAMIC_DEFAULT))
        found = [Layer(altered[name], source) for altered, source in dynamic if name in altered]
        default = str(FIELDS[_FIELDS[topic]].default) if topic in _FIELDS else SETTINGS[topic].default
        if self._at_start.get(topic, default) != default:
            found.append(Layer(self._at_start[topic], STATIC))
        return [*found, Layer(default, DEFAULT)]

    def fixed(self, name: str) -> Layer:
        setting, field = FIXED[name], FIXED[name].field
        chosen = field == "node_id" or (field is not None and getattr(self._config, field) != FIELDS[field].default)
        return Layer(setting.value(self._config), STATIC if chosen else DEFAULT)

    def topic_defaults(self) -> dict[str, str]:
        """Defaults from the configuration, overlaid with overrides."""
        altered = {**self.altered(None), **self.altered(self._config.node_id)}
        renamed = {TOPIC_DEFAULTS[name]: text for name, text in altered.items()}
        return {"flush": self._config.flush, **self._at_start, **renamed}

    # -- changing ----------------------------------------------------------------------------------------------------

    def check(self, overrides: Mapping[str, str]) -> None:
        """Like Kafka, raises INVALID_REQUEST for a fixed setting and for an invalid value."""
        for name, text in overrides.items():
            if name in FIXED or name in PLACES or name in FIELDS:
                raise RequestError(
                    Code.INVALID_REQUEST, f"{name} cannot change at run time; configure it and restart the broker"
                )
            if name not in TOPIC_DEFAULTS:
                raise RequestError(Code.INVALID_CONFIG, f"{name} is not a broker setting")
            try:
                SETTINGS[TOPIC_DEFAULTS[name]].check(text)
            except ValueError as error:
                raise RequestError(Code.INVALID_REQUEST, f"{name}={text} is not valid: {error}") from error

    async def configure(self, node: int | None, overrides: Mapping[str, str]) -> None:
        """Replaces all overrides of this broker, or with None of all brokers. Durable on return."""
        self.check(overrides)
        key = PREFIX + ("default" if node is None else str(node))
        # The watch applies it before this returns.
        await self._meta.transact(Put(key, json.dumps(dict(overrides)).encode()) if overrides else Delete(key))

    def _heard(self, key: str, versioned: Versioned | None) -> None:
        self._take(key, versioned)
        self._apply(self.topic_defaults())

    def _take(self, key: str, versioned: Versioned | None) -> None:
        place = key[len(PREFIX) :]
        if place in self._altered:  # not another broker's
            self._altered[place] = {} if versioned is None else _readable(key, json.loads(versioned.value))


def _readable(key: str, stored: Mapping[str, str]) -> dict[str, str]:
    """Drops settings that this version does not know: a newer broker may have stored them."""
    known = {}
    for name, text in stored.items():
        with contextlib.suppress(KeyError, ValueError):
            SETTINGS[TOPIC_DEFAULTS[name]].check(text)
            known[name] = text
        if name not in known:
            logger.warning("%s: ignored %s=%s: this version does not know the setting", key, name, text)
    return known
