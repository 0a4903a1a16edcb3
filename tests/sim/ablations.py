"""Safeguards of replication, each switched off: the simulation must then find a violation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from millstream.broker.replication import follower, serving
from millstream.broker.replication.calls import CopyWanted
from millstream.broker.replication.follower import Copy
from millstream.broker.replication.leader import Leader
from millstream.cluster.base import PartitionKey
from millstream.cluster.partition_state import PartitionState
from millstream.cluster.partitions import Known, Partitions, stored_key
from millstream.core.promise import Promise
from millstream.stores.base import Check, Put

Switch = Callable[[pytest.MonkeyPatch], None]


def no_truncation_by_epoch(patch: pytest.MonkeyPatch) -> None:
    """A follower continues at its own end, whatever its last epoch."""
    patch.setattr(serving, "_divergence", lambda leader, wanted: None)


def no_new_epoch_on_restart(patch: pytest.MonkeyPatch) -> None:
    """A leader that restarted goes on under its old epoch."""
    patch.setattr(PartitionState, "leads", lambda self, node_id, registration: self.leader == node_id)
    patch.setattr(PartitionState, "has_leader", lambda self, alive: self.leader in alive)


def no_sync_before_counting(patch: pytest.MonkeyPatch) -> None:
    """A follower acknowledges what it has appended."""

    def wanted(self: Copy) -> CopyWanted:
        log = self.log
        last = log.epochs.at(log.end - 1) if log.end > log.start else -1
        return CopyWanted(self.key, self.epoch, log.end, last, follower.PARTITION_BYTES_MAX)

    def at_once(promises: Any, callback: Callable[[], None]) -> None:
        callback()

    patch.setattr(Copy, "wanted", wanted)
    patch.setattr(follower, "_when_all", at_once)


def no_compare_of_the_isr(patch: pytest.MonkeyPatch) -> None:
    """States are written whatever is stored."""

    def change(
        self: Partitions, key: PartitionKey, before: Known, after: PartitionState, *checks: Check
    ) -> Promise[Known]:
        written: Promise[Known] = Promise()

        def landed(done: Promise[int]) -> None:
            if done.error is not None:
                written.fail(done.error)
                return
            known = Known(after, done.value())
            self._take(key, known)
            written.settle(known)

        self._meta.transact(Put(stored_key(key), after.encode()), *checks).then(landed)
        return written

    patch.setattr(Partitions, "change", change)


def no_minimum_of_the_isr(patch: pytest.MonkeyPatch) -> None:
    """The high watermark advances while the ISR is too small, although other replicas stay eligible."""
    patch.setattr(PartitionState, "can_commit", property(lambda self: True))


def no_wait_for_the_isr(patch: pytest.MonkeyPatch) -> None:
    """The leader commits what it holds itself."""
    patch.setattr(Leader, "members", property(lambda self: {self.node_id}))


def no_maximal_isr(patch: pytest.MonkeyPatch) -> None:
    """The leader counts the ISR that it has proposed as if it were stored."""

    def members(self: Leader) -> set[int]:
        return set(self.proposed[-1].isr if self.proposed else self.state.isr)

    patch.setattr(Leader, "members", property(members))


QUICK: list[Switch] = [
    no_truncation_by_epoch,
    no_new_epoch_on_restart,
    no_compare_of_the_isr,
    no_wait_for_the_isr,
    no_maximal_isr,
]
"""Found within a few histories."""
SLOW: list[Switch] = [no_minimum_of_the_isr, no_sync_before_counting]


@contextmanager
def switched_off(switch: Switch) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        switch(patch)
        yield
