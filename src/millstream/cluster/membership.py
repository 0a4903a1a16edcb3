"""Tracks the live brokers of a cluster: each holds a lease, by heartbeats through the metadata store.

    leases/NODE      created by every start of a broker; its revision is the broker's registration, or epoch
    brokers/NODE     epoch, address and rack; created with the lease, rewritten every third of it: the heartbeat
    cluster/secret   made once: the brokers prove with it that they are of this cluster (`security/peers.py`)

Rules
-----
1. A broker holds its lease for `lease_ms` from the start of its last successful heartbeat write. The other brokers
   count the same time from the last heartbeat that they saw, by their own clocks; wall clocks are never compared.
2. A broker that sees no heartbeat for that long deletes the silent broker's `leases` and `brokers` keys, by
   compare-and-set. If that broker is alive, either the deletion or its next heartbeat is refused.
3. A write that carries a `Check` of a lease at its epoch is refused once that lease is gone, however late the writer
   notices. A new registration has a new epoch, so it admits no stale writes.
4. After an outage of its own metadata connection, a broker gives every other broker a whole lease again.
5. Two brokers with one node id: the newer wins if the older sends no heartbeat or had the same address (a restart);
   otherwise the newer is refused. A token distinguishes brokers without an address.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from millstream.cluster.base import Node
from millstream.core.clock import Clock, Timer
from millstream.core.errors import RequestError, RevisionConflict, StartupError
from millstream.core.logs import Damped
from millstream.core.promise import Promise, promised
from millstream.stores.base import Check, Delete, MetaStore, Put, Versioned

logger = logging.getLogger(__name__)
retries = Damped(__name__)

LEASES, BROKERS = "leases/", "brokers/"
SECRET, SECRET_BYTES = "cluster/secret", 32
LEAVE_SECONDS_MAX = 5.0
EPOCH_OF_KEY = 0
"""Stands for an epoch equal to the key's own revision, which is unknown before the write."""
NEVER = -1
"""A revision that no key has, not even a missing one."""


@dataclass(slots=True)
class Seen:
    """Another broker, by its last heartbeat."""

    node: Node
    epoch: int
    revision: int
    at: float
    """By our clock."""
    rack: str = ""


def _nothing() -> None: ...


class Membership:
    """This broker's lease, and the other brokers'."""

    def __init__(self, meta: MetaStore, clock: Clock, node_id: int, lease_ms: int, rack: str = "") -> None:
        self.node_id = node_id
        self.rack = rack
        self.lease = lease_ms / 1000
        self.secret = b""
        self.epoch = 0
        """Of this broker's registration; 0: it is not a member."""
        self.seen: dict[int, Seen] = {}
        self.on_join: Callable[[], None] = _nothing
        """Called when another broker joined, or came back under a new epoch."""
        self.on_leave: Callable[[], None] = _nothing
        """Called when another broker left."""
        self.on_lost: Callable[[], None] = _nothing
        """Called when this broker lost its lease, before it registers again."""
        self.on_beat: Callable[[], None] = _nothing
        """Called after each heartbeat round."""
        self.on_register: Callable[[], None] = _nothing
        self._meta = meta
        self._clock = clock
        self.node = Node(node_id, "", 0)
        self._revision = 0
        self._beat = 0
        self._renewed = 0.0
        self._timer: Timer | None = None
        self._renewing = False
        self._is_replaced = False
        """Another broker has our node id; this one no longer takes part."""
        self._has_left = False
        self._unwatch: Callable[[], None] = _nothing

    @property
    def holds_lease(self) -> bool:
        return bool(self.epoch) and self._clock.monotonic() - self._renewed < self.lease

    @property
    def others(self) -> Sequence[Node]:
        # A copy: a separate thread answers large requests.
        return [seen.node for _, seen in sorted(self.seen.items()) if seen.node.host]

    @property
    def alive(self) -> Mapping[int, int]:
        """The registration of each live broker with an address, by node id."""
        alive = {node_id: seen.epoch for node_id, seen in self.seen.items() if seen.node.host}
        if self.epoch:
            alive[self.node_id] = self.epoch
        return alive

    def guards(self) -> Sequence[Check]:
        return (Check(f"{LEASES}{self.node_id}", self.epoch or NEVER),)

    # Joining and leaving

    async def start(self) -> None:
        heard: set[str] = set()

        def changed(key: str, stored: Versioned | None) -> None:
            heard.add(key)
            self._broker_changed(key, stored)

        self._unwatch = self._meta.watch(BROKERS, changed)
        for key, stored in await self._meta.list(BROKERS):
            if key not in heard:  # the watch is newer: the broker may have left since the list
                self._broker_changed(key, stored)
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
        self.node = Node(self.node_id, host, port if host else secrets.randbits(31))
        await self._make_sure_that_the_number_is_free()
        await self._register()
        self._schedule()

    async def _make_sure_that_the_number_is_free(self) -> None:
        found = await self._meta.get(self._key)
        if found is None or _decode(found).node == self.node:
            return
        await self._pause(self.lease / 2)
        again = await self._meta.get(self._key)
        if again is not None and again.revision != found.revision:
            there = _decode(again).node
            place = f"at {there.host}:{there.port}" if there.host else "embedded in another process"
            raise StartupError(
                f"another broker of this store, {place}, has node id {self.node_id}; give this one another with "
                "--node-id"
            )

    async def _register(self) -> None:
        """Writes lease and heartbeat in one transaction: one alone could never be cleaned up."""
        started = self._clock.monotonic()
        epoch = await self._meta.transact(
            Put(f"{LEASES}{self.node_id}", str(self.node.port).encode()), Put(self._key, self._encode(EPOCH_OF_KEY))
        )
        if self._has_left:
            await self._deregister(epoch)
            return
        self.epoch, self._revision, self._renewed = epoch, epoch, started
        self.seen.pop(self.node_id, None)
        self.on_register()

    def _deregister(self, epoch: int) -> Promise[int]:
        return self._meta.transact(Delete(f"{LEASES}{self.node_id}", epoch), Delete(self._key))

    async def leave(self) -> None:
        """Leaves at once, so that no broker waits for the lease to expire."""
        self._has_left = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._unwatch()
        epoch, self.epoch = self.epoch, 0
        if not epoch:
            return
        left: Promise[int] = Promise()
        self._deregister(epoch).then(lambda done: None if left.done else left.follow(done))
        timer = self._clock.call_later(
            LEAVE_SECONDS_MAX, lambda: None if left.done else left.fail(TimeoutError("no answer from the store"))
        )
        try:
            await left
        except (RequestError, RevisionConflict, TimeoutError) as error:
            logger.warning("cannot announce the shutdown to the other brokers: %s", error)
        finally:
            timer.cancel()

    @property
    def _key(self) -> str:
        return f"{BROKERS}{self.node_id}"

    def _encode(self, epoch: int) -> bytes:
        self._beat += 1
        fields = [epoch, self.node_id, self.node.host, self.node.port, self._beat]
        return json.dumps([*fields, self.rack] if self.rack else fields).encode()

    def _pause(self, seconds: float) -> Promise[None]:
        over: Promise[None] = Promise()
        self._clock.call_later(seconds, lambda: over.settle(None))
        return over

    # Heartbeats

    def _schedule(self) -> None:
        self._timer = self._clock.call_later(self.lease / 3, self._tick)

    def _tick(self) -> None:
        self._schedule()
        self.renew()

    def renew(self) -> None:
        """Sends a heartbeat, or registers again after the lease is lost."""
        promised(self._renew()).then(note)

    async def _renew(self) -> None:
        if self._renewing or self._is_replaced or self._has_left:
            return
        self._renewing = True
        try:
            started = self._clock.monotonic()
            before = self._renewed
            try:
                if self.epoch:
                    put = Put(self._key, self._encode(self.epoch), self._revision)
                    self._revision = await self._meta.transact(put, *self.guards())
                    self._renewed = started
                else:
                    await self._register_again(await self._meta.get(self._key))
            except RevisionConflict:
                await self._recover_lease()
            now = self._clock.monotonic()  # after the answer: a stalled store counts as an outage
            if now - before > self.lease * 2 / 3:
                for seen in self.seen.values():  # rule 4
                    seen.at = now
        finally:
            self._renewing = False
        self.on_beat()
        await self._expire_silent_brokers()

    async def _recover_lease(self) -> None:
        """Rules 2 and 5: a broker deleted our lease or has our id."""
        if self._has_left:
            return
        found = await self._meta.get(self._key)
        if found is not None:
            there = _decode(found)
            if there.epoch == self.epoch and there.node == self.node:
                # Our own heartbeat, whose answer was lost. The lease decides.
                lease = await self._meta.get(f"{LEASES}{self.node_id}")
                if lease is not None and lease.revision == self.epoch:
                    self._revision = found.revision
                    return
        logger.warning("broker %d lost its lease; other brokers take over its work", self.node_id)
        self.epoch = 0
        self.on_lost()
        await self._register_again(found)

    async def _register_again(self, found: Versioned | None) -> None:
        """Rule 5: never over a broker with our node id."""
        node = _decode(found).node if found is not None else self.node
        if node != self.node:
            self._is_replaced = True
            logger.critical(
                "a broker at %s:%d has taken node id %d; this broker coordinates nothing until it is restarted with "
                "another --node-id",
                node.host, node.port, self.node_id,
            )  # fmt: skip
            return
        await self._register()

    async def _expire_silent_brokers(self) -> None:
        now = self._clock.monotonic()
        for node_id, seen in list(self.seen.items()):
            if now - seen.at <= self.lease:
                continue
            lease = Delete(f"{LEASES}{node_id}", seen.epoch)
            try:
                await self._meta.transact(Delete(f"{BROKERS}{node_id}", seen.revision), lease)
                logger.warning("broker %d sent no heartbeat for %.1f s", node_id, now - seen.at)
            except RevisionConflict:
                found = await self._meta.get(f"{BROKERS}{node_id}")
                if self.seen.get(node_id) is not seen:
                    continue  # the watch has reported it
                if found is None:  # it left before we saw it: no watch reports that
                    self._broker_changed(f"{BROKERS}{node_id}", None)
                else:
                    seen.at = self._clock.monotonic()  # alive: the watch will report it

    # News

    def look_at(self, node_id: int, stored: Versioned | None) -> None:
        """Takes a broker's key as it was read."""
        self._broker_changed(f"{BROKERS}{node_id}", stored)

    def _broker_changed(self, key: str, stored: Versioned | None) -> None:
        node_id = int(key.removeprefix(BROKERS))
        if node_id == self.node_id and stored is not None:
            return
        if stored is None:
            self.seen.pop(node_id, None)
            self.on_leave()
            return
        found = _decode(stored)
        known = self.seen.get(node_id)
        self.seen[node_id] = found
        found.at = self._clock.monotonic()
        if known is None or known.epoch != found.epoch:
            self.on_join()


def _decode(stored: Versioned) -> Seen:
    epoch, node_id, host, port, _, *rack = json.loads(stored.value)
    node = Node(node_id, host, port)
    return Seen(node, stored.revision if epoch == EPOCH_OF_KEY else epoch, stored.revision, 0.0, *rack)


def note(done: Promise[None]) -> None:
    if done.error is not None:
        retries.warning("cluster metadata I/O failed; retrying: %s", done.error)
