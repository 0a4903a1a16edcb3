"""Many brokers over one database: which of them coordinates each shard of groups. `membership.py` tracks live brokers.

    coordinators/SHARD  node and epoch of the shard's coordinator

Rules
-----
1. A shard belongs to a registration of a broker, and is free once its lease is deleted. Then any broker may claim it,
   by compare-and-set, when a client asks for a coordinator or when the owner goes. A single broker claims all shards.
2. Every write of group state checks the writer's lease, at its epoch, in the same transaction. So a broker that lost
   its lease cannot write, however late it notices. Then it drops all groups and registers again. Without an epoch it
   writes no group state. A new lease would admit stale writes for groups that other brokers own by now, so a delayed
   write calls `check` again before it is sent.
3. A broker whose lease has expired by its own clock answers COORDINATOR_NOT_AVAILABLE, even if no other broker took
   over. If its next heartbeat is accepted, none did, and it continues with its groups.
4. A failed claim (the database failed while the groups were read) is retried after the next heartbeat. Groups that
   were read while the lease was lost are dropped: other brokers may have changed them.

Any broker serves any produce or fetch. This module is about groups.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from uuid import UUID

from millstream.cluster.base import Leadership, Node, Owns
from millstream.cluster.membership import BROKERS, LEASES, Membership, note
from millstream.core.clock import Clock
from millstream.core.errors import Code, RequestError, RevisionConflict
from millstream.core.promise import Promise, promised
from millstream.stores.base import Check, MetaStore, Operation, Put, Versioned

COORDINATORS = "coordinators/"
SHARDS = 64
"""The number of shards; the same for every broker of a database, for ever."""


@dataclass(frozen=True)
class Owner:
    node_id: int
    epoch: int
    revision: int
    """Of the shard's key."""


class SharedCluster:
    """Implements `cluster.base.Cluster`."""

    has_leaders = False

    def __init__(self, meta: MetaStore, clock: Clock, node_id: int, lease_ms: int) -> None:
        self.node_id = node_id
        self._meta = meta
        self._members = members = Membership(meta, clock, node_id, lease_ms)
        members.on_leave = members.on_beat = self._claim_soon
        members.on_lost = self._lost
        self._owners: dict[int, Owner] = {}
        self._own: set[int] = set()
        self._claiming = asyncio.Lock()
        self._is_claim_waiting = False
        self._unwatch: Callable[[], None] | None = None
        self._adopt: Callable[[Owns], Awaitable[None]] | None = None
        self._release: Callable[[], None] = lambda: None

    # -- queries -----------------------------------------------------------------------------------------------------

    @property
    def secret(self) -> bytes:
        return self._members.secret

    def others(self) -> Sequence[Node]:
        return self._members.others

    def leaderships(self, topic_id: UUID) -> Sequence[Leadership]:
        """Any broker may append to any partition, so leaders are assigned round-robin from a topic's own first."""
        brokers = sorted([self.node_id, *(node.node_id for node in self.others())])
        first = topic_id.int % len(brokers)
        return [Leadership.alone(node_id) for node_id in brokers[first:] + brokers[:first]]

    def serve_groups(self, adopt: Callable[[Owns], Awaitable[None]], release: Callable[[], None]) -> None:
        self._adopt, self._release = adopt, release

    def check(self, group_id: str) -> None:
        if shard_of(group_id) not in self._own:
            raise RequestError(Code.NOT_COORDINATOR, "another broker coordinates the group")
        if not self._members.holds_lease:
            raise RequestError(Code.COORDINATOR_NOT_AVAILABLE, "the broker cannot reach its database")

    def guards(self) -> Sequence[Check]:
        return self._members.guards()

    def fenced(self) -> None:
        if self._members.epoch:
            self._members.renew()

    async def find_coordinator(self, group_id: str) -> Node | None:
        shard = shard_of(group_id)
        if not self._members.holds_lease:
            raise RequestError(Code.COORDINATOR_NOT_AVAILABLE, "the broker cannot reach its database")
        if shard not in self._own and self._living_owner(shard) is None:
            try:
                await self._claim([shard])
            except RequestError as error:
                raise RequestError(Code.COORDINATOR_NOT_AVAILABLE, error.detail) from error
        if shard in self._own:
            return None
        owner = self._living_owner(shard)
        if owner is None:
            raise RequestError(Code.COORDINATOR_NOT_AVAILABLE, "the group is moving to another coordinator")
        if not owner.host:
            detail = "a process with an embedded broker coordinates the group's shard until it ends"
            raise RequestError(Code.COORDINATOR_NOT_AVAILABLE, detail)
        return owner

    def _living_owner(self, shard: int) -> Node | None:
        owner = self._owners.get(shard)
        seen = self._members.seen.get(owner.node_id) if owner is not None else None
        return seen.node if owner is not None and seen is not None and seen.epoch == owner.epoch else None

    # -- joining and leaving -----------------------------------------------------------------------------------------

    async def start(self) -> None:
        self._unwatch = self._meta.watch(COORDINATORS, self._coordinator_changed)
        await self._members.start()
        for key, stored in await self._meta.list(COORDINATORS):
            self._coordinator_changed(key, stored)

    async def join(self, host: str, port: int) -> None:
        await self._members.join(host, port)
        await self._claim()

    async def leave(self) -> None:
        """Leaves at once, so that no broker waits for the lease to expire."""
        if self._unwatch is not None:
            self._unwatch()
        self._own.clear()
        await self._members.leave()

    def _lost(self) -> None:
        self._own.clear()
        self._release()

    def _coordinator_changed(self, key: str, stored: Versioned | None) -> None:
        shard = int(key.removeprefix(COORDINATORS))
        if stored is None:
            self._owners.pop(shard, None)
            return
        known = self._owners.get(shard)
        if known is None or known.revision < stored.revision:
            node_id, epoch = json.loads(stored.value)
            self._owners[shard] = Owner(node_id, epoch, stored.revision)

    # -- groups ------------------------------------------------------------------------------------------------------

    def _free(self) -> list[int]:
        """Shards whose owner is gone, and shards claimed here but not loaded. Without other brokers, all shards not
        owned here: clients that never ask for a coordinator (other protocols) then find their groups here. A broker
        without an address (embedded) claims only the shards that it is asked for: no client could be sent to it.
        """
        if not self._members.node.host:
            mine = self.node_id, self._members.epoch
            return [
                shard
                for shard, owner in self._owners.items()
                if shard not in self._own and (owner.node_id, owner.epoch) == mine
            ]
        shards = self._owners if self._members.seen else range(SHARDS)
        return [shard for shard in shards if shard not in self._own and self._living_owner(shard) is None]

    def _claim_soon(self) -> None:
        """In the background: heartbeats must not wait until groups are loaded."""
        if self._members.epoch and not self._is_claim_waiting and self._free():
            self._is_claim_waiting = True
            promised(self._claim()).then(note)

    async def _claim(self, shards: Sequence[int] | None = None) -> None:
        """Claims free shards, of `shards` or of all, and loads their groups before it serves them."""
        async with self._claiming:
            if shards is None:
                self._is_claim_waiting = False
                shards = self._free()
            epoch = self._members.epoch
            if not epoch:
                return
            wanted = [shard for shard in shards if shard not in self._own and self._living_owner(shard) is None]
            attempts = [(shard, self._take(shard, epoch)) for shard in wanted]
            taken = set()
            for shard, attempt in attempts:
                try:
                    self._owners[shard] = Owner(self.node_id, epoch, await attempt)
                    taken.add(shard)
                except RevisionConflict:
                    await self._look_at(shard)
            try:
                if taken and self._adopt is not None:
                    await self._adopt(lambda group_id: shard_of(group_id) in taken)
            finally:
                if self._members.epoch != epoch:
                    self._release()  # the loaded groups were lost meanwhile, and no other is ours yet
            if self._members.epoch == epoch:
                self._own |= taken

    def _take(self, shard: int, epoch: int) -> Promise[int]:
        known = self._owners.get(shard)
        value = json.dumps([self.node_id, epoch]).encode()
        operations: list[Operation] = [
            Put(f"{COORDINATORS}{shard}", value, known.revision if known is not None else 0),
            Check(f"{LEASES}{self.node_id}", epoch),
        ]
        if known is not None and known.node_id != self.node_id:  # rule 1: its lease is gone, or of another epoch
            seen = self._members.seen.get(known.node_id)
            operations.append(Check(f"{LEASES}{known.node_id}", seen.epoch if seen is not None else 0))
        return self._meta.transact(*operations)

    async def _look_at(self, shard: int) -> None:
        """After a failed claim: reads the shard's owner, and whether that broker is alive."""
        key = f"{COORDINATORS}{shard}"
        self._coordinator_changed(key, await self._meta.get(key))
        owner = self._owners.get(shard)
        if owner is None or owner.node_id == self.node_id:
            return
        seen = self._members.seen.get(owner.node_id)
        stored = await self._meta.get(f"{BROKERS}{owner.node_id}")
        if stored is not None and self._members.seen.get(owner.node_id) is seen:  # else the watch has reported it
            self._members.look_at(owner.node_id, stored)


def shard_of(group_id: str) -> int:
    return zlib.crc32(group_id.encode()) % SHARDS
