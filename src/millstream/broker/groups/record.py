"""The keys of groups in the metadata store.

    groups/<group>                        type, epoch (or generation), protocol type, time when it became empty
    offsets/<group>/<topic>/<partition>   a committed offset
    cursors/<fanout id>/<topic>           a position that the broker moves

Group ids may hold any character, so keys percent-encode them. Topic names cannot hold a slash. Members are not stored:
after a restart they are unknown, rejoin, and get a new epoch.
"""

from __future__ import annotations

import json
from typing import NamedTuple
from urllib.parse import quote, unquote

from millstream.stores.base import Put

GROUPS_PREFIX = "groups/"
OFFSETS_PREFIX = "offsets/"
CURSORS_PREFIX = "cursors/"


class GroupRecord(NamedTuple):
    type: str
    epoch: int
    protocol_type: str = ""
    emptied_ms: int | None = None

    def put(self, group_id: str) -> Put:
        return Put(group_key(group_id), json.dumps(self._asdict(), separators=(",", ":")).encode())


def decode_group(value: bytes) -> GroupRecord:
    return GroupRecord(**json.loads(value))


def group_key(group_id: str) -> str:
    return GROUPS_PREFIX + quote(group_id, safe="")


def group_of(key: str) -> str:
    return unquote(key.removeprefix(GROUPS_PREFIX))


def offset_key(group_id: str, topic: str, partition: int) -> str:
    return f"{OFFSETS_PREFIX}{quote(group_id, safe='')}/{topic}/{partition}"


def offset_of(key: str) -> tuple[str, str, int]:
    group, topic, partition = key.removeprefix(OFFSETS_PREFIX).split("/")
    return unquote(group), topic, int(partition)


def cursor_key(fanout_id: str, topic: str) -> str:
    return f"{CURSORS_PREFIX}{quote(fanout_id, safe='')}/{topic}"


def cursor_of(key: str) -> tuple[str, str]:
    fanout_id, topic = key.removeprefix(CURSORS_PREFIX).split("/")
    return unquote(fanout_id), topic
