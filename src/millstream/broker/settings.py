"""The settings of a topic, under Kafka's names.

One row per setting: its type, bounds and purpose. A topic stores only its own overrides; every other setting follows
the broker's configuration, and changes with it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from millstream.broker.inert_settings import INERT
from millstream.broker.setting import (
    BOOLEAN,
    DOUBLE,
    INT,
    INT_MAX,
    LIST,
    LONG,
    LONG_MAX,
    STRING,
    Setting,
    boolean,
    choice,
    integer,
    ratio,
)
from millstream.core.errors import Code, RequestError, StartupError
from millstream.log.config import FlushPolicy, LogConfig

DAY_MS = 86_400_000
RETAINED_SEGMENT_BYTES_MIN = 1 << 20
RETAINED_SEGMENT_MS_MIN = 60_000
"""Lower bounds for segments of a topic with short retention: each segment is a file."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,249}")


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


def check_name(name: str) -> None:
    if not _NAME.fullmatch(name) or name in (".", ".."):
        raise RequestError(
            Code.INVALID_TOPIC_EXCEPTION,
            f"{name[:60]!r} is not a valid topic name: use 1 to 249 letters, digits, '.', '_' and '-'",
        )


def _topic_name(text: str) -> str:
    try:
        check_name(text)
    except RequestError as error:
        raise ValueError(error.detail) from error
    return text


GROUP_SETTINGS: dict[str, Setting] = {
    "errors.deadletterqueue.topic.name": Setting(
        "__dlq__", STRING, _topic_name, "topic that holds the dead letters of a queue"
    ),
    "millstream.key.order": Setting(
        "false", BOOLEAN, boolean, "deliver a record only when the earlier records of its key are done or dead"
    ),
    "millstream.retry.backoff.max.ms": Setting("60000", LONG, integer(0, DAY_MS), "longest backoff of a queue"),
    "millstream.retry.backoff.ms": Setting(
        "0", LONG, integer(0, DAY_MS), "backoff after a record's first failed delivery; doubles with each failure"
    ),
    "share.auto.offset.reset": Setting(
        "latest", STRING, choice("latest", "earliest"), "where a new queue begins to read a topic"
    ),
    "share.delivery.count.limit": Setting("5", INT, integer(1, 25), "failed deliveries after which a record is dead"),
    "share.heartbeat.interval.ms": Setting("5000", INT, integer(100, 3_600_000), "interval of a member's heartbeats"),
    "share.isolation.level": Setting(
        "read_uncommitted",
        STRING,
        choice("read_uncommitted", "read_committed"),
        "no effect: there are no transactions",
    ),
    "share.partition.max.record.locks": Setting(
        "10000", INT, integer(1, 1_000_000), "records of one partition that may be leased at a time"
    ),
    "share.record.lock.duration.ms": Setting(
        "30000", INT, integer(100, 3_600_000), "how long a record is leased to a member"
    ),
    "share.session.timeout.ms": Setting("45000", INT, integer(1_000, 3_600_000), "silence before a member is removed"),
}
"""Settings of queues, under Kafka's names for share groups (KIP-932) where there is one. A topic may have them too,
prefixed with `group.`: for groups without their own.
"""

SETTINGS: dict[str, Setting] = {
    "cleanup.policy": Setting("delete", LIST, _policy, "delete old segments, compact by key, or both"),
    "delete.retention.ms": Setting(
        "86400000", LONG, integer(0, LONG_MAX), "how long compaction keeps the marker of a deleted key"
    ),
    "flush": Setting("always", STRING, _flush, "when an append is synced: always, os, every=N, every=Tms, every=N,Tms"),
    "flush.messages": Setting(
        str(LONG_MAX), LONG, integer(1, LONG_MAX), "number of appended records that starts a sync; cannot loosen flush"
    ),
    "flush.ms": Setting(
        str(LONG_MAX), LONG, integer(0, LONG_MAX), "time after an append that starts a sync; cannot loosen flush"
    ),
    "index.interval.bytes": Setting(
        "4096", INT, integer(64, INT_MAX), "approximate bytes between two entries of a segment's index"
    ),
    "max.compaction.lag.ms": Setting(
        str(LONG_MAX), LONG, integer(1, LONG_MAX), "age at which a record is compacted, whatever the dirty ratio is"
    ),
    "max.message.bytes": Setting("1048588", INT, integer(0, INT_MAX), "largest record batch that the topic accepts"),
    "message.timestamp.after.max.ms": Setting(
        "3600000", LONG, integer(0, LONG_MAX), "how far ahead of the broker's clock a producer's timestamp may be"
    ),
    "message.timestamp.before.max.ms": Setting(
        str(LONG_MAX), LONG, integer(0, LONG_MAX), "how far behind the broker's clock a producer's timestamp may be"
    ),
    "message.timestamp.type": Setting(
        "CreateTime",
        STRING,
        choice("CreateTime", "LogAppendTime"),
        "clock of timestamps: the producer's or the broker's",
    ),
    "min.cleanable.dirty.ratio": Setting(
        "0.5", DOUBLE, ratio, "part of the closed segments' bytes that must be new before compaction runs"
    ),
    "min.compaction.lag.ms": Setting("0", LONG, integer(0, LONG_MAX), "minimum age of a record for compaction"),
    "millstream.delay.ms": Setting("0", LONG, integer(0, 366 * DAY_MS), "delay of every record in queues"),
    "millstream.retention.done.ms": Setting(
        "-1", LONG, integer(-1, LONG_MAX), "how long a record stays after every group is done with it; -1: as any other"
    ),
    "retention.bytes": Setting("-1", LONG, integer(-1, LONG_MAX), "maximum size of a partition; -1 sets no limit"),
    "retention.ms": Setting("604800000", LONG, integer(-1, LONG_MAX), "maximum age of segments; -1 keeps them"),
    "segment.bytes": Setting(
        "1073741824",
        INT,
        integer(1024, INT_MAX),
        "size at which a new segment begins; by default at most half of retention.bytes",
    ),
    "segment.ms": Setting(
        "86400000",
        LONG,
        integer(1, LONG_MAX),
        "age at which a new segment begins; by default at most half of retention.ms",
    ),
    **INERT,
    **{f"group.{name}": setting for name, setting in GROUP_SETTINGS.items()},
}


def is_kafkas(name: str) -> bool:
    """Whether Kafka has a topic setting of this name. Listings show the other settings only if they are set."""
    return name != "flush" and not name.startswith(("millstream.", "group."))


class TopicSettings:
    """One topic's overrides on the broker's defaults; parsed once, read often."""

    __slots__ = (
        "defaults",
        "delay_ms",
        "done_retention_ms",
        "log",
        "log_append_time",
        "message_bytes_max",
        "needs_more_checks",
        "overrides",
        "timestamp_after_max_ms",
        "timestamp_before_max_ms",
    )

    def __init__(self, overrides: Mapping[str, str], defaults: Mapping[str, str]) -> None:
        self.overrides = dict(overrides)
        self.defaults = defaults
        values = {name: self._parse(name) for name in SETTINGS}
        policy = values["cleanup.policy"]
        self.message_bytes_max: int = values["max.message.bytes"]
        self.log_append_time = values["message.timestamp.type"] == "LogAppendTime"
        # The broker's own timestamps need no bounds.
        after, before = values["message.timestamp.after.max.ms"], values["message.timestamp.before.max.ms"]
        self.timestamp_after_max_ms: int = LONG_MAX if self.log_append_time else after
        self.timestamp_before_max_ms: int = LONG_MAX if self.log_append_time else before
        self.delay_ms: int = values["millstream.delay.ms"]
        self.done_retention_ms: int = values["millstream.retention.done.ms"]
        self.log = LogConfig(
            segment_bytes=self._segment_bytes(values),
            segment_ms=self._segment_ms(values),
            retention_ms=values["retention.ms"],
            retention_bytes=values["retention.bytes"],
            index_interval_bytes=values["index.interval.bytes"],
            delete="delete" in policy,
            compact="compact" in policy,
            delete_retention_ms=values["delete.retention.ms"],
            min_cleanable_dirty_ratio=values["min.cleanable.dirty.ratio"],
            min_compaction_lag_ms=values["min.compaction.lag.ms"],
            max_compaction_lag_ms=values["max.compaction.lag.ms"],
            flush=values["flush"].tightened(values["flush.messages"], values["flush.ms"]),
        )
        self.needs_more_checks = (
            self.log.compact
            or self.log_append_time
            or self.message_bytes_max > self.log.segment_bytes
            or self.timestamp_before_max_ms < LONG_MAX
        )
        """Whether a batch needs checks beyond its header; most topics need none."""

    def _segment_bytes(self, values: Mapping[str, Any]) -> int:
        """Retention deletes whole segments, so a segment holds at most half of `retention.bytes`, within lower bounds,
        unless the topic sets `segment.bytes`.
        """
        segment: int = values["segment.bytes"]
        retention: int = values["retention.bytes"]
        batch: int = values["max.message.bytes"]
        if "segment.bytes" in self.overrides or retention < 0 or "delete" not in values["cleanup.policy"]:
            return segment
        return min(segment, max(retention // 2, RETAINED_SEGMENT_BYTES_MIN, batch))

    def _segment_ms(self, values: Mapping[str, Any]) -> int:
        """As with the size: a busy topic would keep expired records until their segment is closed."""
        segment: int = values["segment.ms"]
        if "compact" in values["cleanup.policy"]:  # the active segment is never compacted
            segment = min(segment, values["max.compaction.lag.ms"])
        retention: int = values["retention.ms"]
        if "segment.ms" in self.overrides or retention < 0 or "delete" not in values["cleanup.policy"]:
            return segment
        return min(segment, max(retention // 2, RETAINED_SEGMENT_MS_MIN))

    def time_bounds(self, now_ms: int) -> tuple[int, int]:
        """The earliest and the latest valid timestamp."""
        return max(now_ms - self.timestamp_before_max_ms, -LONG_MAX), min(
            now_ms + self.timestamp_after_max_ms, LONG_MAX
        )

    def value(self, name: str) -> str:
        return self.overrides.get(name, self.default(name))

    def default(self, name: str) -> str:
        return self.defaults.get(name, SETTINGS[name].default)

    def _parse(self, name: str) -> Any:
        return SETTINGS[name].check(self.value(name))


def check_overrides(
    overrides: Mapping[str, str | None], settings: Mapping[str, Setting] = SETTINGS, of: str = "topic"
) -> None:
    """Raises INVALID_CONFIG for the first setting that is unknown or has an invalid value."""
    for name, text in overrides.items():
        setting = settings.get(name)
        if setting is None:
            likely = difflib.get_close_matches(name, settings)  # first: clients show at most 512 bytes
            known = ", ".join([*likely, *(other for other in settings if other not in likely)])
            raise RequestError(Code.INVALID_CONFIG, f"{name} is not a {of} setting; known are {known}")
        try:
            setting.check(text if text is not None else "")
        except ValueError as error:
            raise RequestError(Code.INVALID_CONFIG, f"{name}={text} is not valid: {error}") from error


def check_topic(overrides: Mapping[str, str], defaults: Mapping[str, str]) -> None:
    """Raises INVALID_CONFIG also for settings that conflict."""
    check_overrides(overrides)
    settings = TopicSettings(overrides, defaults).log
    if settings.min_compaction_lag_ms > settings.max_compaction_lag_ms:
        raise RequestError(
            Code.INVALID_CONFIG,
            f"min.compaction.lag.ms={settings.min_compaction_lag_ms} is larger than "
            f"max.compaction.lag.ms={settings.max_compaction_lag_ms}",
        )
