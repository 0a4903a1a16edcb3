"""The settings of a topic, under Kafka's names.

One row per setting: its type, its bounds, what it is for. A topic stores only what was set for it; everything else
follows the broker's configuration, and changes with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from millstream.errors import Code, RequestError, StartupError
from millstream.log.config import FlushPolicy, LogConfig

INT_MAX = (1 << 31) - 1
LONG_MAX = (1 << 63) - 1

BOOLEAN, STRING, INT, LONG, DOUBLE, LIST = 1, 2, 3, 5, 6, 7
"""Kafka's numbers for the types of settings."""

Check = Callable[[str], Any]


def _integer(low: int, high: int) -> Check:
    def check(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise ValueError(f"must be between {low} and {high}")
        return value

    return check


def _ratio(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise ValueError("must be between 0 and 1")
    return value


def _choice(*choices: str) -> Check:
    def check(text: str) -> str:
        if text not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return text

    return check


def _policy(text: str) -> frozenset[str]:
    chosen = frozenset(part.strip() for part in text.split(",") if part.strip())
    if not chosen or chosen - {"delete", "compact"}:
        raise ValueError("must be delete, compact, or both with a comma")
    return chosen


def _flush(text: str) -> FlushPolicy:
    try:
        return FlushPolicy.parse(text)
    except StartupError as error:
        raise ValueError(str(error)) from error


@dataclass(frozen=True, slots=True)
class Setting:
    default: str
    type: int
    check: Check
    text: str


SETTINGS: dict[str, Setting] = {
    "cleanup.policy": Setting("delete", LIST, _policy, "delete old segments, compact by key, or both"),
    "compression.type": Setting(
        "producer", STRING, _choice("producer"), "batches keep the compression that their producer chose"
    ),
    "delete.retention.ms": Setting(
        "86400000", LONG, _integer(0, LONG_MAX), "how long compaction keeps the marker of a deleted key"
    ),
    "flush": Setting("always", STRING, _flush, "when an append is synced: always, os, every=N, every=Tms, every=N,Tms"),
    "index.interval.bytes": Setting(
        "4096", INT, _integer(64, INT_MAX), "about how many bytes lie between two entries of a segment's index"
    ),
    "max.message.bytes": Setting("1048588", INT, _integer(0, INT_MAX), "largest record batch that is taken"),
    "message.timestamp.type": Setting(
        "CreateTime", STRING, _choice("CreateTime", "LogAppendTime"), "whose clock stamps a record: producer or broker"
    ),
    "min.cleanable.dirty.ratio": Setting(
        "0.5", DOUBLE, _ratio, "which part of the closed segments must be new before compaction runs"
    ),
    "min.compaction.lag.ms": Setting("0", LONG, _integer(0, LONG_MAX), "how long a record stays out of compaction"),
    "min.insync.replicas": Setting("1", INT, _integer(1, 1), "this broker keeps one copy"),
    "retention.bytes": Setting("-1", LONG, _integer(-1, LONG_MAX), "size of a partition above which segments go"),
    "retention.ms": Setting("604800000", LONG, _integer(-1, LONG_MAX), "age above which segments go; -1 keeps them"),
    "segment.bytes": Setting("1073741824", INT, _integer(1024, INT_MAX), "size at which a new segment begins"),
    "segment.ms": Setting("86400000", LONG, _integer(1, LONG_MAX), "age at which a new segment begins"),
}


class TopicSettings:
    """What was set for one topic, over the broker's defaults; parsed once, read often."""

    __slots__ = ("defaults", "log", "log_append_time", "message_bytes_max", "needs_more_checks", "overrides")

    def __init__(self, overrides: Mapping[str, str], defaults: Mapping[str, str]) -> None:
        self.overrides = dict(overrides)
        self.defaults = defaults
        values = {name: self._parse(name) for name in SETTINGS}
        policy = values["cleanup.policy"]
        self.message_bytes_max: int = values["max.message.bytes"]
        self.log_append_time = values["message.timestamp.type"] == "LogAppendTime"
        self.log = LogConfig(
            segment_bytes=values["segment.bytes"],
            segment_ms=values["segment.ms"],
            retention_ms=values["retention.ms"],
            retention_bytes=values["retention.bytes"],
            index_interval_bytes=values["index.interval.bytes"],
            delete="delete" in policy,
            compact="compact" in policy,
            delete_retention_ms=values["delete.retention.ms"],
            min_cleanable_dirty_ratio=values["min.cleanable.dirty.ratio"],
            min_compaction_lag_ms=values["min.compaction.lag.ms"],
            flush=values["flush"],
        )
        self.needs_more_checks = (
            self.log.compact or self.log_append_time or self.message_bytes_max > self.log.segment_bytes
        )
        """Whether batches of this topic need more than their header checked; most do not."""

    def value(self, name: str) -> str:
        return self.overrides.get(name, self.default(name))

    def default(self, name: str) -> str:
        return self.defaults.get(name, SETTINGS[name].default)

    def _parse(self, name: str) -> Any:
        return SETTINGS[name].check(self.value(name))


def check_overrides(overrides: Mapping[str, str | None]) -> None:
    """Raises INVALID_CONFIG for the first setting that is not known or has a value it cannot have."""
    for name, text in overrides.items():
        setting = SETTINGS.get(name)
        if setting is None:
            known = ", ".join(SETTINGS)
            raise RequestError(Code.INVALID_CONFIG, f"{name} is not a topic setting; known are {known}")
        try:
            setting.check(text if text is not None else "")
        except ValueError as error:
            raise RequestError(Code.INVALID_CONFIG, f"{name}={text} is not valid: {error}") from error
