"""The settings of a queue for one topic: the group's own, else the topic's, else the door's, else the defaults.

FlowMQ's 30 seconds and Kafka's lock duration are one setting here, `share.record.lock.duration.ms`: no door has a
default of its own for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from millstream.broker.settings import GROUP_SETTINGS, TopicSettings, check_overrides

LEASES_MEMBER_MAX = 200_000
LEASES_GROUP_MAX = 1_000_000
OPEN_MAX = 1_000_000
"""Records of one partition with a state: leased, released, delayed. At this limit the queue reads no further."""

PREFIX = "group."


@dataclass(frozen=True, slots=True)
class QueueSettings:
    lease_ms: int
    attempts_max: int
    leases_max: int
    reset: str
    dead_topic: str
    key_order: bool
    backoff_ms: int
    backoff_max_ms: int
    delay_ms: int

    @classmethod
    def of(cls, group: Mapping[str, str], topic: TopicSettings, door: Mapping[str, str]) -> QueueSettings:
        def value(name: str) -> Any:
            for texts, key in ((group, name), (topic.overrides, PREFIX + name), (door, name)):
                if key in texts:
                    return GROUP_SETTINGS[name].check(texts[key])
            return GROUP_SETTINGS[name].check(topic.default(PREFIX + name))

        return cls(
            lease_ms=value("share.record.lock.duration.ms"),
            attempts_max=value("share.delivery.count.limit"),
            leases_max=value("share.partition.max.record.locks"),
            reset=value("share.auto.offset.reset"),
            dead_topic=value("errors.deadletterqueue.topic.name"),
            key_order=value("millstream.key.order"),
            backoff_ms=value("millstream.retry.backoff.ms"),
            backoff_max_ms=value("millstream.retry.backoff.max.ms"),
            delay_ms=topic.delay_ms,
        )

    def rest_ms(self, attempts: int) -> int:
        """The backoff after this number of failed attempts."""
        return min(self.backoff_ms << min(attempts - 1, 40), self.backoff_max_ms) if self.backoff_ms else 0


def group_value(overrides: Mapping[str, str], name: str) -> Any:
    """A setting that topics cannot override."""
    setting = GROUP_SETTINGS[name]
    return setting.check(overrides.get(name, setting.default))


def lease_ms(overrides: Mapping[str, str], topics: Iterable[TopicSettings]) -> int:
    """The shortest lease of a record of these topics."""
    name = "share.record.lock.duration.ms"
    if name in overrides:
        return int(overrides[name])
    return min((int(topic.value(PREFIX + name)) for topic in topics), default=int(GROUP_SETTINGS[name].default))


def clean(overrides: Mapping[str, str]) -> dict[str, str]:
    """Checks settings and returns them under Kafka's group names. It also accepts broker names, with `group.`."""
    named = {name.removeprefix(PREFIX): text for name, text in overrides.items()}
    check_overrides(named, GROUP_SETTINGS, "group")
    return named
