"""Settings of groups of the consumer protocol (KIP-848): `consumer.*`. Queues have their own.

    group-configs/<group>   the overrides of the group

A group may have settings before its first member joins, and keeps them after its last one leaves. Every broker over the
store watches the keys, so settings survive a change of the coordinator.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from urllib.parse import quote, unquote

from millstream.broker.setting import INT, Setting, integer
from millstream.broker.settings import check_overrides
from millstream.core.errors import Code, RequestError
from millstream.stores.base import Delete, MetaStore, Put, Versioned

PREFIX = "group-configs/"
GROUPS_MAX = 10_000
SESSION, HEARTBEAT = "consumer.session.timeout.ms", "consumer.heartbeat.interval.ms"

CONSUMER_SETTINGS: dict[str, Setting] = {
    HEARTBEAT: Setting("5000", INT, integer(100, 3_600_000), "interval of a member's heartbeats"),
    SESSION: Setting("45000", INT, integer(1_000, 3_600_000), "silence before a member is removed"),
}


class GroupConfigs:
    def __init__(self, meta: MetaStore) -> None:
        self._meta = meta
        self.by_group: dict[str, dict[str, str]] = {}
        self._unwatch: Callable[[], None] | None = None

    async def start(self) -> None:
        self._unwatch = self._meta.watch(PREFIX, self._take)
        for key, versioned in await self._meta.list(PREFIX):
            self._take(key, versioned)

    def close(self) -> None:
        if self._unwatch is not None:
            self._unwatch()

    def check(self, group_id: str, overrides: Mapping[str, str]) -> None:
        check_overrides(overrides, CONSUMER_SETTINGS, "group")
        session, heartbeat = (value(overrides, name) for name in (SESSION, HEARTBEAT))
        if heartbeat >= session:
            raise RequestError(Code.INVALID_CONFIG, f"{HEARTBEAT}={heartbeat} is not smaller than {SESSION}={session}")
        if overrides and group_id not in self.by_group and len(self.by_group) >= GROUPS_MAX:
            raise RequestError(Code.POLICY_VIOLATION, f"{GROUPS_MAX} groups have settings, the limit; delete some")

    async def configure(self, group_id: str, overrides: Mapping[str, str]) -> None:
        """Replaces all of a group's settings. Durable, and applied by the watch, on return."""
        self.check(group_id, overrides)
        key = PREFIX + quote(group_id, safe="")
        if overrides:
            await self._meta.transact(Put(key, json.dumps(dict(overrides)).encode()))
        elif group_id in self.by_group:
            await self._meta.transact(Delete(key))

    def _take(self, key: str, versioned: Versioned | None) -> None:
        group_id = unquote(key[len(PREFIX) :])
        if versioned is None:
            self.by_group.pop(group_id, None)
        else:
            self.by_group[group_id] = dict(json.loads(versioned.value))


def value(overrides: Mapping[str, str], name: str) -> int:
    return int(overrides.get(name, CONSUMER_SETTINGS[name].default))
