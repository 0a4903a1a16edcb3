"""The partitions that this broker holds a copy of: which ones it leads, which ones it follows, and from whom.

    state names us, with our registration      leader: takes appends, serves followers, keeps the ISR
    state names another live broker            follower: copies from it
    no leader                                  neither: the copy waits

Rules
-----
1. The state of a partition decides, and only it (`cluster/partition_state.py`). A broker leads under the registration
   that was elected: after it lost its lease it leads nothing until it is elected again.
2. A change of role takes effect at once. Batches that wait for followers then fail with NOT_LEADER_OR_FOLLOWER: the
   producer asks the new leader, which has them or not.
3. The leader proposes changes of the ISR, one at a time, by compare-and-set. A write without an answer counts as in
   flight until the key has a new revision.
4. A leader whose log failed takes itself out of the ISR, so that another replica is elected.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from millstream.broker.replication.calls import CopyRequest, PeerCalls
from millstream.broker.replication.follower import Follower
from millstream.broker.replication.leader import Leader
from millstream.broker.replication.serving import Serving
from millstream.cluster import partition_state
from millstream.cluster.base import Node, PartitionKey
from millstream.cluster.membership import LEASES, Membership
from millstream.cluster.partition_state import NO_LEADER, PartitionState
from millstream.cluster.partitions import Known, Partitions
from millstream.core.clock import Clock, Timer
from millstream.core.errors import Code, RequestError, RevisionConflict
from millstream.core.logs import Damped
from millstream.core.promise import Promise, promised
from millstream.stores.base import Check, ReplicatedLog

logger = logging.getLogger(__name__)
retries = Damped(__name__)

TICK_SECONDS = 0.5
SETTLE_SECONDS = 0.5
LAG_MS_MAX = 10_000


class Counts:
    """What happened since the start: for metrics, and for tests that must have seen it."""

    def __init__(self) -> None:
        self.isr_shrinks = 0
        self.isr_expansions = 0
        self.cuts = 0
        """Truncations of a follower's log."""
        self.committed_cuts = 0
        """Truncations below the high watermark: after an unclean election only."""


class Replicas:
    def __init__(
        self,
        members: Membership,
        partitions: Partitions,
        clock: Clock,
        peers: PeerCalls,
        lag_ms_max: int = LAG_MS_MAX,
    ) -> None:
        self.leaders: dict[PartitionKey, Leader] = {}
        self.counts = Counts()
        self._members = members
        self._partitions = partitions
        self._clock = clock
        self._peers = peers
        self._lag_ms_max = lag_ms_max
        self._logs: dict[PartitionKey, ReplicatedLog] = {}
        self._followers: dict[int, Follower] = {}
        self._following: dict[PartitionKey, int] = {}
        """The leader that each followed partition is copied from."""
        self._timer: Timer | None = None
        self._is_closed = False
        partitions.watch(self._changed)

    @property
    def node_id(self) -> int:
        return self._members.node_id

    @property
    def hosted(self) -> Mapping[PartitionKey, ReplicatedLog]:
        return self._logs

    def start(self) -> None:
        self._schedule()

    def host(self, key: PartitionKey, log: ReplicatedLog) -> None:
        """This broker holds a copy from now on."""
        log.join_replicas(_nothing)
        self._logs[key] = log
        self._review(key)

    def release(self, key: PartitionKey) -> None:
        """The copy is removed."""
        self._logs.pop(key, None)
        self._review(key)

    def registered(self) -> None:
        """This broker has a new registration, or none: nothing is led under the old one."""
        for key in list(self._logs):
            self._review(key)

    def close(self) -> None:
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        for key in list(self.leaders):
            self._resign(key, "the broker is stopping")
        for follower in self._followers.values():
            follower.close()
        self._followers.clear()

    # Roles

    def _changed(self, key: PartitionKey, known: Known | None) -> None:
        self._review(key)

    def _review(self, key: PartitionKey) -> None:
        """Takes the role that the partition's state gives this broker."""
        if self._is_closed:
            return
        log, known = self._logs.get(key), self._partitions.get(key)
        if log is None or known is None:
            self._resign(key, "the partition was moved or deleted")
            self._unfollow(key)
            return
        state, revision = known
        leader = self.leaders.get(key)
        if leader is not None:
            if state.leads(self.node_id, self._members.epoch) and leader.learn(state, revision):
                return
            self._resign(key, f"broker {state.leader} leads the partition" if state.is_led else "it has no leader")
        if state.leads(self.node_id, self._members.epoch):
            self._unfollow(key)
            self.leaders[key] = Leader(self.node_id, state, revision, log, self._clock)
        elif state.leader not in (NO_LEADER, self.node_id):
            self._follow(key, log, state)
        else:
            self._unfollow(key)

    def _resign(self, key: PartitionKey, why: str) -> None:
        leader = self.leaders.pop(key, None)
        if leader is not None:
            leader.resign(RequestError(Code.NOT_LEADER_OR_FOLLOWER, f"{leader.log.name}: {why}"))
            leader.log.join_replicas(_nothing)

    def _follow(self, key: PartitionKey, log: ReplicatedLog, state: PartitionState) -> None:
        if self._following.get(key) != state.leader:
            self._unfollow(key)
        self._following[key] = state.leader
        follower = self._followers.get(state.leader)
        if follower is None:
            follower = self._followers[state.leader] = Follower(
                state.leader, self._find, self._identity, self._peers, self._clock, self._note_cut
            )
        follower.follow(key, log, state.leader_epoch)

    def _unfollow(self, key: PartitionKey) -> None:
        follower = self._followers.get(self._following.pop(key, NO_LEADER))
        if follower is not None:
            follower.forget(key)

    def _find(self, node_id: int) -> Node | None:
        seen = self._members.seen.get(node_id)
        return seen.node if seen is not None else None

    def _identity(self) -> tuple[int, int]:
        return self.node_id, self._members.epoch

    def _note_cut(self, log: ReplicatedLog, offset: int) -> None:
        self.counts.cuts += 1
        if offset >= log.high_watermark:
            return
        self.counts.committed_cuts += 1
        logger.error(
            "%s: offsets %d to %d were committed, and the new leader does not have them: they are cut", log.name,
            offset, log.high_watermark - 1,
        )  # fmt: skip

    # Leading

    def leader(self, key: PartitionKey) -> Leader:
        leader = self.leaders.get(key)
        if leader is None:
            raise RequestError(Code.NOT_LEADER_OR_FOLLOWER, "another broker leads the partition")
        return leader

    def serve(self, request: CopyRequest) -> Serving:
        """Answers a follower's fetch."""
        serving = Serving(self.leaders, request, self._clock)
        serving.run()
        for wanted in request.wanted:
            leader = self.leaders.get(wanted.key)
            if leader is not None:
                self._admit(wanted.key, leader)
        return serving

    def _admit(self, key: PartitionKey, leader: Leader) -> None:
        node_id = leader.joins()
        seen = self._members.seen.get(node_id) if node_id is not None else None
        if node_id is None or seen is None or seen.epoch != leader.registration_of(node_id):
            return
        self.counts.isr_expansions += 1
        change = partition_state.expand(leader.state, node_id)
        self._propose(key, leader, change, Check(f"{LEASES}{node_id}", leader.registration_of(node_id)))

    def _schedule(self) -> None:
        self._timer = self._clock.call_later(TICK_SECONDS, self._tick)

    def _tick(self) -> None:
        if self._is_closed:
            return
        self._schedule()
        for key, leader in list(self.leaders.items()):
            self._watch_over(key, leader)

    def _watch_over(self, key: PartitionKey, leader: Leader) -> None:
        if leader.log.failure is not None and len(leader.state.isr) > 1 and not leader.proposed:
            self._propose(key, leader, _step_down(leader.state, self.node_id))  # rule 4
            return
        late = leader.laggards(self._lag_ms_max)
        if late:
            self.counts.isr_shrinks += 1
            logger.warning("%s: brokers %s lag behind and leave the ISR", leader.log.name, late)
            self._propose(key, leader, partition_state.shrink(leader.state, late))
            return
        self._admit(key, leader)

    def _propose(self, key: PartitionKey, leader: Leader, change: PartitionState, *checks: Check) -> None:
        leader.proposed.append(change)
        before = Known(leader.state, leader.revision)

        def landed(done: Promise[Known]) -> None:
            if done.error is None:
                return  # `_changed` has told the leader
            if isinstance(done.error, RevisionConflict) and change in leader.proposed:
                leader.proposed.remove(change)
            else:
                retries.warning("cannot change the ISR of %s: %s", leader.log.name, done.error)
            self._settle_later(key, leader)

        self._partitions.change(key, before, change, *checks).then(landed)

    def _settle_later(self, key: PartitionKey, leader: Leader) -> None:
        """Rule 3: finds out what became of a write."""

        def settle() -> None:
            if self.leaders.get(key) is leader:
                before = Known(leader.state, leader.revision)
                promised(self._partitions.settle(key, before)).then(settled)

        def settled(done: Promise[Known | None]) -> None:
            if done.error is not None:
                self._settle_later(key, leader)

        self._clock.call_later(SETTLE_SECONDS, settle)


def _step_down(state: PartitionState, node_id: int) -> PartitionState:
    """Without this broker, and without a leader until the controller elects one."""
    left = partition_state.forget(state, node_id)
    return partition_state.without_leader(left)


def _nothing() -> None: ...
