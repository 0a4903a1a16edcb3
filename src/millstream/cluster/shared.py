"""Many brokers over one database: who is alive, and which of them looks after which groups.

    leases/NODE         made anew by every start of a broker; its revision is that broker's epoch
    brokers/NODE        epoch and address, made with the lease, written again every third of one: the sign of life
    coordinators/SHARD  node and epoch of whoever looks after the groups of a shard

Rules
-----
1. A broker holds its lease for `lease_ms` after the beginning of its last sign of life that was written. Others count
   the same time from when they last saw one, by their own clocks; nobody compares wall clocks.
2. Who sees no sign of life for that long deletes the other's `leases` and `brokers` keys, at the revisions it knows. If
   the other was alive after all one of the two is refused: the deletion, or the other's next sign of life.
3. A shard belongs to an epoch, and to nobody once that epoch's lease is gone. Then any broker may take it, by
   compare-and-set, when a client asks for a coordinator or when it sees the other go. Who is alone takes all.
4. Every write of groups' state checks the writer's lease at its epoch in the same transaction. So a broker that was
   taken for dead writes nothing more, however late it finds out. When it does it drops all groups and begins anew.
   While it has no epoch nothing of its groups is written at all. Under its next one the lease alone would let through
   what was meant for groups that others have by now: who waits before writing asks `check` again when the write leaves.
5. A broker whose lease has run out by its own clock says that it is no coordinator, though nobody may have taken over:
   if its next sign of life is accepted, nobody has, and it goes on with what it has.
6. A claim that could not be carried through (the database failed while the groups were read) is made again after the
   next sign of life. Groups that were read while the lease was lost are dropped: others may have changed them since.
7. After being cut off from the database itself, a broker gives the others a whole lease again.
8. Two brokers with one number: the newer wins if the older gives no sign of life or had the same address (a restart);
   else the newer is refused. Brokers without an address are told apart by a token.

Any broker takes any produce or fetch. This is about groups, and about who is listed.
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
SHARDS = 64
"""How finely groups are shared out; the same for every broker of a database, for ever."""
LEAVE_SECONDS_MAX = 5.0
EPOCH_OF_KEY = 0
"""Written for an epoch that is the revision of the very key: when it is written nobody knows it yet."""
NEVER = -1
"""A revision that no key is ever at, not even one that does not exist."""


@dataclass
class Seen:
    """Another broker, as its last sign of life said."""

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

    def __init__(self, meta: MetaStore, clock: Clock, node_id: int, lease_ms: int) -> None:
        self.node_id = node_id
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
        """Another broker has our number: this one takes no further part."""
        self._has_left = False
        self._unwatch: list[Callable[[], None]] = []
        self._adopt: Callable[[Owns], Awaitable[None]] | None = None
        self._release: Callable[[], None] = lambda: None

    # -- what is asked -----------------------------------------------------------------------------------------------

    def others(self) -> Sequence[Node]:
        # A copy: large requests are answered in a thread of their own.
        return [seen.node for _, seen in sorted(self._seen.items()) if seen.node.host]

    def leaderships(self, topic_id: UUID) -> Sequence[Leadership]:
        """Any broker may append to any partition, so they are shared out in turn, each topic from another one on."""
        brokers = sorted([self.node_id, *(node.node_id for node in self.others())])
        first = topic_id.int % len(brokers)
        return [Leadership.alone(node_id) for node_id in brokers[first:] + brokers[:first]]

    def serve_groups(self, adopt: Callable[[Owns], Awaitable[None]], release: Callable[[], None]) -> None:
        self._adopt, self._release = adopt, release

    def check(self, group_id: str) -> None:
        if shard_of(group_id) not in self._own:
            raise RequestError(Code.NOT_COORDINATOR, "another broker looks after the group")
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
            raise RequestError(Code.COORDINATOR_NOT_AVAILABLE, "the group is between two coordinators")
        if not owner.host:
            detail = "a process with an embedded broker looks after the group, or one of its part, until it ends"
            raise RequestError(Code.COORDINATOR_NOT_AVAILABLE, detail)
        return owner

    def _living_owner(self, shard: int) -> Node | None:
        owner = self._owners.get(shard)
        seen = self._seen.get(owner.node_id) if owner is not None else None
        return seen.node if owner is not None and seen is not None and seen.epoch == owner.epoch else None

    # -- coming and going --------------------------------------------------------------------------------------------

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
            if key not in heard:  # what was heard is newer: it may have gone since it was listed
                self._broker_changed(key, stored)
        for key, stored in await self._meta.list(COORDINATORS):
            self._coordinator_changed(key, stored)

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
                f"another broker of this store, {place}, has the number {self.node_id}; "
                "give this one another with --node-id"
            )

    async def _register(self) -> None:
        """Lease and sign of life in one transaction: one without the other could never be buried."""
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
        """Goes at once, so that others need not wait for the lease to run out."""
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
                logger.warning("could not tell the others that this broker goes: %s", error)

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

    # -- signs of life -----------------------------------------------------------------------------------------------

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
            now = self._clock.monotonic()  # a database that stands still answers late: that counts as well
            if now - before > self._lease * 2 / 3:
                for seen in self._seen.values():  # rule 7
                    seen.at = now
        finally:
            self._renewing = False
        self._claim_soon()
        await self._bury_the_dead()

    async def _begin_anew(self) -> None:
        """Rule 4: somebody took us for dead, or took our number."""
        if self._has_left:
            return
        found = await self._meta.get(self._key)
        if found is not None and _decode(found)[1] == self._epoch and _decode(found)[0] == self._node:
            # Our own sign of life, whose answer was lost. The lease decides.
            lease = await self._meta.get(f"{LEASES}{self.node_id}")
            if lease is not None and lease.revision == self._epoch:
                self._revision = found.revision
                return
        logger.warning("broker %d lost its lease: its groups are looked after elsewhere", self.node_id)
        self._epoch = 0
        self._own.clear()
        self._release()
        await self._register_again(found)

    async def _register_again(self, found: Versioned | None) -> None:
        """Rule 8: not over whoever has our number by now."""
        if found is not None and _decode(found)[0] != self._node:
            self._is_replaced = True
            node = _decode(found)[0]
            logger.critical(
                "a broker at %s:%d has taken the number %d; this one looks after no groups until it is restarted "
                "with another --node-id", node.host, node.port, self.node_id,
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
                logger.warning("broker %d gave no sign of life for %.1f s", node_id, now - seen.at)
            except RevisionConflict:
                found = await self._meta.get(f"{BROKERS}{node_id}")
                if self._seen.get(node_id) is not seen:
                    continue  # the watch has told meanwhile
                if found is None:  # it was gone before we heard of it: nobody will tell
                    self._broker_changed(f"{BROKERS}{node_id}", None)
                else:
                    seen.at = self._clock.monotonic()  # it did: the watch will tell

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
        """Shards that somebody looked after, and nobody does now: also those that were taken for us and not loaded.
        Where there is nobody else, all that are not ours: then also who never asks for a coordinator (a door of another
        protocol) finds its groups here. A broker without an address (embedded) takes only the groups that it is asked
        for: no client could be sent to it.
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
        """Beside the signs of life, which must not wait for groups to be loaded."""
        if self._epoch and not self._is_claim_waiting and self._free():
            self._is_claim_waiting = True
            promised(self._claim()).then(_note)

    async def _claim(self, shards: Sequence[int] | None = None) -> None:
        """Takes what is free, of some shards or of all, and has their groups loaded before anybody hears of it."""
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
                    self._release()  # what was loaded was lost meanwhile, and nothing else is ours yet
            if self._epoch == epoch:
                self._own |= taken

    def _take(self, shard: int, epoch: int) -> Promise[int]:
        known = self._owners.get(shard)
        value = json.dumps([self.node_id, epoch]).encode()
        operations: list[Operation] = [
            Put(f"{COORDINATORS}{shard}", value, known.revision if known is not None else 0),
            Check(f"{LEASES}{self.node_id}", epoch),
        ]
        if known is not None and known.node_id != self.node_id:  # rule 3: that epoch's lease is gone, or another's
            seen = self._seen.get(known.node_id)
            operations.append(Check(f"{LEASES}{known.node_id}", seen.epoch if seen is not None else 0))
        return self._meta.transact(*operations)

    async def _look_at(self, shard: int) -> None:
        """It is not free after all: who has it, and whether that broker is there, is asked for."""
        key = f"{COORDINATORS}{shard}"
        self._coordinator_changed(key, await self._meta.get(key))
        owner = self._owners.get(shard)
        if owner is None or owner.node_id == self.node_id:
            return
        seen = self._seen.get(owner.node_id)
        stored = await self._meta.get(f"{BROKERS}{owner.node_id}")
        if stored is not None and self._seen.get(owner.node_id) is seen:  # else the watch has told meanwhile
            self._broker_changed(f"{BROKERS}{owner.node_id}", stored)


def shard_of(group_id: str) -> int:
    return zlib.crc32(group_id.encode()) % SHARDS


def _decode(stored: Versioned) -> tuple[Node, int]:
    """A broker, and its epoch."""
    epoch, node_id, host, port, _ = json.loads(stored.value)
    return Node(node_id, host, port), stored.revision if epoch == EPOCH_OF_KEY else epoch


def _note(done: Promise[None]) -> None:
    if done.error is not None:
        retries.warning("cluster metadata I/O failed; retrying: %s", done.error)
