"""The metadata keys of a queue.

    queues/<group>/settings                        the group's own settings, and the defaults of the door that made it
    queues/<group>/<topic>/<partition>/head        the next offset to read, and counters
    queues/<group>/<topic>/<partition>/b<number>   the states of 128 records, while one of them is not done
    queues/<group>/<topic>/<partition>/d<offset>   a dead record whose dead letter is not written yet

Records below the head and in no block are done, so ten million done records cost one head.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from millstream.broker.groups.queue.block import Block
from millstream.stores.base import Put

QUEUES_PREFIX = "queues/"
SETTINGS = "settings"
_DEFAULTS = "defaults"
"""A key among the settings, whose names all have dots."""


class Head(NamedTuple):
    topic_id: str
    next: int
    done: int = 0
    dead: int = 0
    redelivered: int = 0


class DeadRecord(NamedTuple):
    """A record that the queue gave up."""

    offset: int
    attempts: int
    reason: str
    at_ms: int
    to: str
    """The dead-letter topic."""
    after: int = 0
    """A written dead letter is at or behind this offset."""
    where: str = ""
    """Topic id and partition of `after`: the topic may have grown or been recreated since."""


class QueueStorage:
    __slots__ = ("prefix",)

    def __init__(self, group: str, topic: str, partition: int) -> None:
        self.prefix = f"{QUEUES_PREFIX}{quote(group, safe='')}/{topic}/{partition}/"

    def head(self, head: Head) -> Put:
        return Put(self.prefix + "head", _json(head._asdict()))

    def block_key(self, number: int) -> str:
        return f"{self.prefix}b{number}"

    def dead_record_key(self, offset: int) -> str:
        return f"{self.prefix}d{offset}"

    def put_dead(self, dead: DeadRecord) -> Put:
        return Put(self.dead_record_key(dead.offset), _json(dead._asdict()))


class Stored:
    """The stored state of one partition."""

    __slots__ = ("blocks", "dead_records", "head", "keys")

    def __init__(self) -> None:
        self.head: Head | None = None
        self.blocks: dict[int, Block] = {}
        self.dead_records: list[DeadRecord] = []
        self.keys: list[str] = []

    def take(self, key: str, part: str, value: bytes) -> None:
        self.keys.append(key)
        if part == "head":
            self.head = Head(**json.loads(value))
        elif part.startswith("b"):
            self.blocks[int(part[1:])] = Block.decode(value)
        else:
            self.dead_records.append(DeadRecord(**json.loads(value)))


class StoredSettings(NamedTuple):
    overrides: Mapping[str, str] = {}
    defaults: Mapping[str, str] = {}


def settings_put(group: str, settings: StoredSettings) -> Put:
    defaults = {_DEFAULTS: dict(settings.defaults)} if settings.defaults else {}
    return Put(f"{QUEUES_PREFIX}{quote(group, safe='')}/{SETTINGS}", _json({**settings.overrides, **defaults}))


def read_settings(value: bytes) -> StoredSettings:
    overrides = dict(json.loads(value))
    defaults = overrides.pop(_DEFAULTS, {})
    return StoredSettings(overrides, defaults)


def group_prefix(group: str) -> str:
    return f"{QUEUES_PREFIX}{quote(group, safe='')}/"


def split_key(key: str) -> tuple[str, tuple[str, int, str] | None]:
    """Group; topic, partition and part, or None for the group's settings."""
    group, *rest = key.removeprefix(QUEUES_PREFIX).split("/")
    if rest == [SETTINGS]:
        return unquote(group), None
    topic, partition, part = rest
    return unquote(group), (topic, int(partition), part)


def _json(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()
