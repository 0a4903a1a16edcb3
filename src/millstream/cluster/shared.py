"""Many brokers over one database: which are alive, and which of them coordinates each shard of groups.

    leases/NODE         created by every start of a broker; its revision is the broker's epoch
    brokers/NODE        epoch and address; created with the lease, rewritten every third of it: the heartbeat
    coordinators/SHARD  node and epoch of the shard's coordinator
    cluster/secret      made once: the brokers prove with it that they are of this cluster (`security/peers.py`)

Rules
-----
1. A broker holds its lease for `lease_ms` from the start of its last successful heartbeat write. The other brokers
   count the same time from the last heartbeat that they saw, by their own clocks; wall clocks are never compared.
2. A broker that sees no heartbeat for that long deletes the silent broker's `leases` and `brokers` keys, by
   compare-and-set. If that broker is alive, either the deletion or its next heartbeat is refused.
3. A shard belongs to an epoch, and is free once that epoch's lease is deleted. Then any broker may claim it, by
   compare-and-set, when a client asks for a coordinator or when the owner goes. A single broker claims all shards.
4. Every write of group state checks the writer's lease, at its epoch, in the same transaction. So a broker that lost
   its lease cannot write, however late it notices. Then it drops all groups and registers again. Without an epoch it
   writes no group state. A new lease would admit stale writes for groups that other brokers own by now, so a delayed
   write calls `check` again before it is sent.
5. A broker whose lease has expired by its own clock answers COORDINATOR_NOT_AVAILABLE, even if no other broker took
   over. If its next heartbeat is accepted, none did, and it continues with its groups.
6. A failed claim (the database failed while the groups were read) is retried after the next heartbeat. Groups that
   were read while the lease was lost are dropped: other brokers may have changed them.
7. After an outage of its own database connection, a broker gives every other broker a whole lease again.
8. Two brokers with one node id: the newer wins if the older sends no heartbeat or had the same address (a restart);
   otherwise the newer is refused. A token distinguishes brokers without an address.

Any broker serves any produce or fetch. This module is about groups, and about the list of brokers.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import zlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from uuid import UUID

from millstream.cluster.base import Leadership, Node, Owns
from millstream.core.clock import Clock, Timer
from millstream.core.errors import Code, RequestError, RevisionConflict, StartupError
from millstream.core.logs import Damped
from millstream.core.promise import Promise, promised
from millstream.stores.base import Check, Delete, MetaStore, Operation, Put, Versioned

logger = logging.getLogger(__name__)
retries = Damped(__name__)

LEASES, BROKERS, COORDINATORS = "leases/", "brokers/", "coordinators/"
SECRET, SECRET_BYTES = "cluster/secret", 32
SHARDS = 64
"""The number of shards; the same for every broker of a database, for ever."""
LEAVE_SECONDS_MAX = 5.0
EPOCH_OF_KEY = 0
"""Stands for an epoch equal to the key's own revision, which is unknown before the write."""
NEVER = -1
"""A revision that no key has, not even a missing one."""


@dataclass
class Seen:
    """Another broker, by its last heartbeat."""

    node: Node
    epoch: int
    revision: int
    at: float
    """By our clock."""


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
        self.secret = b""
        self._meta = meta
        self._clock = clock
        self._lease = lease_ms / 1000
        self._node = Node(node_id, "", 0)
        self._epoch = 0
        """0: this broker is not a member."""
        self._revision = 0
        self._beat = 0
        self._renewed = 0.0
        self._seen: dict[int, Seen] = {}
        self._owners: dict[int, Owner] = {}
        self._own: set[int] = set()
        self._claiming = asyncio.Lock()
        self._is_claim_waiting = False
        self._timer: Timer | None = None
        self._renewing = False
        self._is_replaced = False
        """Another broker has our node id; this one no longer takes part."""
        self._has_left = False
        self._unwatch: list[Callable[[], None]] = []
        self._adopt: Callable[[Owns], Awaitable[None]] | None = None
        self._release: Callable[[], None] = lambda: None

    # -- queries -----------------------------------------------------------------------------------------------------

    def others(self) -> Sequence[Node]:
        # A copy: a separate thread answers large requests.
        return [seen.node for _, seen in sorted(self._seen.items()) if seen.node.host]

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
        if not self._holds_lease:
            raise RequestError(Code.COORDINATOR_NOT_AVAILABLE, "the broker cannot reach its database")

    def guards(self) -> Sequence[Check]:
        return (Check(f"{LEASES}{self.node_id}", self._epoch or NEVER),)

    def fenced(self) -> None:
        if self._epoch:
            promised(self._renew()).then(_note)

    @property
    def _holds_lease(self) -> bool:
        return bool(self._epoch) and self._clock.monotonic() - self._renewed < self._lease

    async def find_coordinator(self, group_id: str) -> Node | None:
        shard = shard_of(group_id)
        if not self._holds_lease:
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
        seen = self._seen.get(owner.node_id) if owner is not None else None
        return seen.node if owner is not None and seen is not None and seen.epoch == owner.epoch else None

    # -- joining and leaving -----------------------------------------------------------------------------------------

    async def start(self) -> None:
        heard: set[str] = set()

        def changed(key: str, stored: Versioned | None) -> None:
            heard.add(key)
            self._broker_changed(key, stored)

        self._unwatch = [
            self._meta.watch(BROKERS, changed),
            self._meta.watch(COORDINATORS, self._coordinator_changed),
        ]
        for key, stored in await self._meta.list(BROKERS):
            if key not in heard:  # the watch is newer: the broker may have left since the list
                self._broker_changed(key, stored)
        for key, stored in await self._meta.list(COORDINATORS):
            self._coordinator_changed(key, stored)
        self.secret = await self._load_secret()

    async def _load_secret(self) -> bytes:
        fresh = secrets.token_bytes(SECRET_BYTES)
        try:
            await self._meta.transact(Put(SECRET, fresh, if_revision=0))
            return fresh
        except RevisionConflict:
            found = await self._meta.get(SECRET)
            assert found is not None
            return found.value

    async def join(self, host: str, port: int) -> None:
        self._node = Node(self.node_id, host, port if host else secrets.randbits(31))
        await self._make_sure_nobody_has_our_number()
        await self._register()
        self._schedule()
        await self._claim()

    async def _make_sure_nobody_has_our_number(self) -> None:
        found = await self._meta.get(self._key)
        if found is None or _decode(found)[0] == self._node:
            return
        await self._pause(self._lease / 2)
        again = await self._meta.get(self._key)
        if again is not None and again.revision != found.revision:
            there = _decode(again)[0]
            place = f"at {there.host}:{there.port}" if there.host else "embedded in another process"
            raise StartupError(
                f"another broker of this store, {place}, has node id {self.node_id}; give this one another with "
                "--node-id"
            )

    async def _register(self) -> None:
        """Writes lease and heartbeat in one transaction: one alone could never be cleaned up."""
        started = self._clock.monotonic()
        epoch = await self._meta.transact(
            Put(f"{LEASES}{self.node_id}", str(self._node.port).encode()), Put(self._key, self._encode(EPOCH_OF_KEY))
        )
        if self._has_left:
            await self._deregister(epoch)
            return
        self._epoch, self._revision, self._renewed = epoch, epoch, started
        self._seen.pop(self.node_id, None)

    def _deregister(self, epoch: int) -> Promise[int]:
        return self._meta.transact(Delete(f"{LEASES}{self.node_id}", epoch), Delete(self._key))

    async def leave(self) -> None:
        """Leaves at once, so that no broker waits for the lease to expire."""
        self._has_left = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for unwatch in self._unwatch:
            unwatch()
        epoch, self._epoch = self._epoch, 0
        self._own.clear()
        if epoch:
            try:
                async with asyncio.timeout(LEAVE_SECONDS_MAX):
                    await self._deregister(epoch)
            except (RequestError, RevisionConflict, TimeoutError) as error:
                logger.warning("cannot announce the shutdown to the other brokers: %s", error)

    @property
    def _key(self) -> str:
        return f"{BROKERS}{self.node_id}"

    def _encode(self, epoch: int) -> bytes:
        self._beat += 1
        return json.dumps([epoch, self.node_id, self._node.host, self._node.port, self._beat]).encode()

    def _pause(self, seconds: float) -> Promise[None]:
        over: Promise[None] = Promise()
        self._clock.call_later(seconds, lambda: over.settle(None))
        return over

    # -- heartbeats --------------------------------------------------------------------------------------------------

    def _schedule(self) -> None:
        self._timer = self._clock.call_later(self._lease / 3, self._tick)

    def _tick(self) -> None:
        self._schedule()
        promised(self._renew()).then(_note)

    async def _renew(self) -> None:
        if self._renewing or self._is_replaced or self._has_left:
            return
        self._renewing = True
        try:
            started = self._clock.monotonic()
            before = self._renewed
            try:
                if self._epoch:
                    put = Put(self._key, self._encode(self._epoch), self._revision)
                    self._revision = await self._meta.transact(put, *self.guards())
                    self._renewed = started
                else:
                    await self._register_again(await self._meta.get(self._key))
            except RevisionConflict:
                await self._begin_anew()
            now = self._clock.monotonic()  # after the answer: a stalled database counts as an outage
            if now - before > self._lease * 2 / 3:
                for seen in self._seen.values():  # rule 7
                    seen.at = now
        finally:
            self._renewing = False
        self._claim_soon()
        await self._bury_the_dead()

    async def _begin_anew(self) -> None:
        """Rule 4: a broker deleted our lease or has our id."""
        if self._has_left:
            return
        found = await self._meta.get(self._key)
        if found is not None and _decode(found)[1] == self._epoch and _decode(found)[0] == self._node:
            # Our own heartbeat, whose answer was lost. The lease decides.
            lease = await self._meta.get(f"{LEASES}{self.node_id}")
            if lease is not None and lease.revision == self._epoch:
                self._revision = found.revision
                return
        logger.warning("broker %d lost its lease; other brokers coordinate its groups", self.node_id)
        self._epoch = 0
        self._own.clear()
        self._release()
        await self._register_again(found)

    async def _register_again(self, found: Versioned | None) -> None:
        """Rule 8: never over a broker with our node id."""
        if found is not None and _decode(found)[0] != self._node:
            self._is_replaced = True
            node = _decode(found)[0]
            logger.critical(
                "a broker at %s:%d has taken node id %d; this broker coordinates no groups until it is restarted with "
                "another --node-id",
                node.host, node.port, self.node_id,
            )  # fmt: skip
            return
        await self._register()

    async def _bury_the_dead(self) -> None:
        now = self._clock.monotonic()
        for node_id, seen in list(self._seen.items()):
            if now - seen.at <= self._lease:
                continue
            lease = Delete(f"{LEASES}{node_id}", seen.epoch)
            try:
                await self._meta.transact(Delete(f"{BROKERS}{node_id}", seen.revision), lease)
                logger.warning("broker %d sent no heartbeat for %.1f s", node_id, now - seen.at)
            except RevisionConflict:
                found = await self._meta.get(f"{BROKERS}{node_id}")
                if self._seen.get(node_id) is not seen:
                    continue  # the watch has reported it
                if found is None:  # it left before we saw it: no watch reports that
                    self._broker_changed(f"{BROKERS}{node_id}", None)
                else:
                    seen.at = self._clock.monotonic()  # alive: the watch will report it

    # -- news --------------------------------------------------------------------------------------------------------

    def _broker_changed(self, key: str, stored: Versioned | None) -> None:
        node_id = int(key.removeprefix(BROKERS))
        if node_id == self.node_id and stored is not None:
            return
        if stored is None:
            self._seen.pop(node_id, None)
            self._claim_soon()
            return
        node, epoch = _decode(stored)
        self._seen[node_id] = Seen(node, epoch, stored.revision, self._clock.monotonic())

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
        if not self._node.host:
            mine = self.node_id, self._epoch
            return [
                shard
                for shard, owner in self._owners.items()
                if shard not in self._own and (owner.node_id, owner.epoch) == mine
            ]
        shards = self._owners if self._seen else range(SHARDS)
        return [shard for shard in shards if shard not in self._own and self._living_owner(shard) is None]

    def _claim_soon(self) -> None:
        """In the background: heartbeats must not wait until groups are loaded."""
        if self._epoch and not self._is_claim_waiting and self._free():
            self._is_claim_waiting = True
            promised(self._claim()).then(_note)

    async def _claim(self, shards: Sequence[int] | None = None) -> None:
        """Claims free shards, of `shards` or of all, and loads their groups before it serves them."""
        async with self._claiming:
            if shards is None:
                self._is_claim_waiting = False
                shards = self._free()
            epoch = self._epoch
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
                if self._epoch != epoch:
                    self._release()  # the loaded groups were lost meanwhile, and no other is ours yet
            if self._epoch == epoch:
                self._own |= taken

    def _take(self, shard: int, epoch: int) -> Promise[int]:
        known = self._owners.get(shard)
        value = json.dumps([self.node_id, epoch]).encode()
        operations: list[Operation] = [
            Put(f"{COORDINATORS}{shard}", value, known.revision if known is not None else 0),
            Check(f"{LEASES}{self.node_id}", epoch),
        ]
        if known is not None and known.node_id != self.node_id:  # rule 3: its lease is gone, or of another epoch
            seen = self._seen.get(known.node_id)
            operations.append(Check(f"{LEASES}{known.node_id}", seen.epoch if seen is not None else 0))
        return self._meta.transact(*operations)

    async def _look_at(self, shard: int) -> None:
        """After a failed claim: reads the shard's owner, and whether that broker is alive."""
        key = f"{COORDINATORS}{shard}"
        self._coordinator_changed(key, await self._meta.get(key))
        owner = self._owners.get(shard)
        if owner is None or owner.node_id == self.node_id:
            return
        seen = self._seen.get(owner.node_id)
        stored = await self._meta.get(f"{BROKERS}{owner.node_id}")
        if stored is not None and self._seen.get(owner.node_id) is seen:  # else the watch has reported it
            self._broker_changed(f"{BROKERS}{owner.node_id}", stored)


def shard_of(group_id: str) -> int:
    return zlib.crc32(group_id.encode()) % SHARDS


def _decode(stored: Versioned) -> tuple[Node, int]:
    """A broker and its epoch."""
    epoch, node_id, host, port, _ = json.loads(stored.value)
    return Node(node_id, host, port), stored.revision if epoch == EPOCH_OF_KEY else epoch


def _note(done: Promise[None]) -> None:
    if done.error is not None:
        retries.warning("cluster metadata I/O failed; retrying: %s", done.error)
