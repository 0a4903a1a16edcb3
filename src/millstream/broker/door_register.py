"""What each broker registers about its doors: an id and an address, for protocols whose brokers list each other.

    doors/DOOR/NODE_ID = {"id": "broker-1", "address": "10.0.0.1:6174"}

Kafka's node ids are numbers; Comet's broker ids are strings. The key keeps the string of a node id over restarts. Two
node ids never have the same string. An entry outlives its broker: the cluster knows which brokers are live.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple

from millstream.core.errors import StartupError
from millstream.stores.base import MetaStore, Put, Versioned

PREFIX = "doors/"


class Registered(NamedTuple):
    id: str
    address: str


class DoorRegister:
    def __init__(self, meta: MetaStore, node_id: int) -> None:
        self._meta = meta
        self._node_id = node_id
        self._doors: dict[str, dict[int, Registered]] = {}
        self._unwatch: Callable[[], None] | None = None

    async def start(self) -> None:
        self._unwatch = self._meta.watch(PREFIX, self._heard)
        for key, versioned in await self._meta.list(PREFIX):
            self._heard(key, versioned)

    def close(self) -> None:
        if self._unwatch is not None:
            self._unwatch()

    def of(self, door: str) -> dict[int, Registered]:
        """By node id."""
        return self._doors.get(door, {})

    async def register(self, door: str, broker_id: str, address: str) -> None:
        """Registers this broker's door. Without a broker id it keeps the last one, else takes its node id."""
        known = self.of(door)
        if not broker_id:
            broker_id = known[self._node_id].id if self._node_id in known else str(self._node_id)
        for node_id, other in known.items():
            if other.id == broker_id and node_id != self._node_id:
                raise StartupError(
                    f"the {door} broker id {broker_id} belongs to the broker with node id {node_id}; choose another "
                    f"id, or start this broker with --node-id {node_id} if it replaces that one"
                )
        registered = Registered(broker_id, address)
        if known.get(self._node_id) != registered:
            await self._meta.transact(Put(f"{PREFIX}{door}/{self._node_id}", json.dumps(registered._asdict()).encode()))
            self._doors.setdefault(door, {})[self._node_id] = registered

    def _heard(self, key: str, versioned: Versioned | None) -> None:
        door, _, node_id = key[len(PREFIX) :].partition("/")
        if versioned is None:
            self._doors.get(door, {}).pop(int(node_id), None)
        else:
            self._doors.setdefault(door, {})[int(node_id)] = Registered(**json.loads(versioned.value))
