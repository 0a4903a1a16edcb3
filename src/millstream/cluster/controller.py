"""The controller: elects leaders, and takes dead brokers out of the ISRs. One live broker has the job.

    controller    node and registration of the broker that has it

Any broker takes the job when its holder's lease is gone, by compare-and-set. The job is not fenced: two brokers that
both believe to have it change the same states by compare-and-set, and every change is a valid one
(`partition_state.py`). A stale view of the live brokers costs an election, never a record.

The controller reviews all partitions when brokers come or go, and single ones when their state changes.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from uuid import UUID

from millstream.cluster import partition_state
from millstream.cluster.base import PartitionKey
from millstream.cluster.membership import LEASES, Membership, note
from millstream.cluster.partition_state import PartitionState
from millstream.cluster.partitions import Known, Partitions
from millstream.core.clock import Clock
from millstream.core.errors import RevisionConflict
from millstream.core.promise import Promise, promised
from millstream.stores.base import Check, MetaStore, Put, Versioned

logger = logging.getLogger(__name__)

KEY = "controller"
RETRY_SECONDS = 0.5
REVIEWED_A_TURN = 1_000


class Controller:
    def __init__(
        self,
        meta: MetaStore,
        members: Membership,
        partitions: Partitions,
        clock: Clock,
        may_be_unclean: Callable[[UUID], bool] = lambda topic_id: False,
    ) -> None:
        """`may_be_unclean`: the topic's `unclean.leader.election.enable`."""
        self.elections = 0
        self.unclean_elections = 0
        self.elr_elections = 0
        self.restarted_leaders = 0
        self._meta = meta
        self._members = members
        self._partitions = partitions
        self._clock = clock
        self._may_be_unclean = may_be_unclean
        self._owner: tuple[int, int] = (-1, 0)
        self._revision = 0
        self._is_claiming = False
        self._in_flight: set[PartitionKey] = set()
        self._unwatch: Callable[[], None] | None = None
        partitions.watch(self._changed)

    async def start(self) -> None:
        self._unwatch = self._meta.watch(KEY, self._heard)
        self._heard(KEY, await self._meta.get(KEY))

    def close(self) -> None:
        if self._unwatch is not None:
            self._unwatch()
        self._unwatch = None

    @property
    def node_id(self) -> int:
        """The broker that has the job; -1: none."""
        return self._owner[0] if self._members.alive.get(self._owner[0]) == self._owner[1] else -1

    @property
    def is_ours(self) -> bool:
        members = self._members
        return self._owner == (members.node_id, members.epoch) and members.holds_lease

    # The job

    def _heard(self, key: str, stored: Versioned | None) -> None:
        if key == KEY and stored is not None and stored.revision > self._revision:
            node_id, epoch = json.loads(stored.value)
            self._owner, self._revision = (node_id, epoch), stored.revision
            if self.is_ours:
                self.review()

    def look(self) -> None:
        """Brokers came or went, or a heartbeat was sent."""
        if self._unwatch is None or not self._members.epoch:
            return
        if self.is_ours:
            self.review()
        elif self.node_id < 0 and not self._is_claiming:
            self._is_claiming = True
            promised(self._claim()).then(note)

    async def _claim(self) -> None:
        try:
            members = self._members
            value = json.dumps([members.node_id, members.epoch]).encode()
            put = Put(KEY, value, self._revision)
            revision = await self._meta.transact(put, Check(f"{LEASES}{members.node_id}", members.epoch))
            self._heard(KEY, Versioned(value, revision))
        except RevisionConflict:
            self._heard(KEY, await self._meta.get(KEY))
        finally:
            self._is_claiming = False

    # Elections

    def review(self) -> None:
        for key, known in self._partitions:
            self._review(key, known)

    def _changed(self, key: PartitionKey, known: Known | None) -> None:
        if known is not None and self.is_ours:
            self._review(key, known)

    def _review(self, key: PartitionKey, known: Known) -> None:
        if key in self._in_flight:
            return
        before, alive = known.state, self._members.alive
        after = partition_state.complete(before, alive)
        after = partition_state.elect(after, alive, unclean=self._may_be_unclean(key.topic_id))
        if after != before:
            self._write(key, known, after)

    def _write(self, key: PartitionKey, known: Known, after: PartitionState) -> None:
        self._in_flight.add(key)
        before = known.state

        def landed(done: Promise[Known]) -> None:
            self._in_flight.discard(key)
            if done.error is None:
                self._count(key, before, after)
                if (latest := self._partitions.get(key)) is not None and self.is_ours:
                    self._review(key, latest)
                return
            # The watch will report the change that was faster; a lost answer, or a slow watch, is settled here.
            self._clock.call_later(RETRY_SECONDS, lambda: promised(self._reread([key])).then(note))

        self._partitions.change(key, known, after).then(landed)

    async def _reread(self, keys: Iterable[PartitionKey]) -> None:
        for key in keys:
            await self._partitions.reread(key)
            known = self._partitions.get(key)
            if known is not None and self.is_ours:
                self._review(key, known)

    def _count(self, key: PartitionKey, before: PartitionState, after: PartitionState) -> None:
        if after.leader_epoch == before.leader_epoch:
            return
        self.elections += 1
        self.restarted_leaders += after.leader == before.last_leader
        if not partition_state.is_clean(before, after):
            self.unclean_elections += 1
            logger.error(
                "partition %d of topic %s: broker %d was elected without being in sync; committed records may be lost",
                key.partition, key.topic_id, after.leader,
            )  # fmt: skip
        elif after.leader not in before.isr:
            self.elr_elections += 1

    # Asked for

    def move(self, key: PartitionKey, change: Callable[[PartitionState], PartitionState]) -> Promise[Known]:
        """Changes a partition's state on request: a preferred leader, a reassignment."""
        known = self._partitions.get(key)
        if known is None:
            return Promise.failed(LookupError(f"there is no partition {key.partition} of topic {key.topic_id}"))
        after = change(known.state)
        return Promise.of(known) if after == known.state else self._partitions.change(key, known, after)
