"""The replication state of one partition, and its transitions.

    replicas      the brokers that hold a copy, in order of preference
    leader        the broker that takes appends; none while no eligible replica is alive
    leader_epoch  grows with every election
    term          the registration of the leader that won: after a restart it must be elected again
    isr           in-sync replicas: each holds every committed record
    elr           eligible leader replicas (KIP-966): out of sync, but they hold every committed record too
    min_isr       `min.insync.replicas`: the high watermark stands still while the ISR is smaller
    last_leader   the last broker that led, for a partition that lost all eligible replicas

The state is one key of the metadata store. Every change is a compare-and-set on the revision of that key, which serves
as the partition epoch.

Rules
-----
1. A record is committed when every member of an ISR of at least `min_isr` members holds it. So every member of such an
   ISR may become the leader.
2. A replica that leaves the ISR joins the ELR if the ISR is too small from then on: nothing is committed without it.
   The ELR ends when the ISR has `min_isr` members again.
3. A new leader comes from the ISR; if none of its members is alive, from the ELR. Otherwise the partition has no leader
   until one returns. `unclean` elects any live replica and may lose committed records.
4. A replica whose disk may have lost records (new, restored from a backup, stopped uncleanly with `flush=os`) leaves
   ISR and ELR before it may be elected. If no eligible replica is left, the last leader is elected when it is back,
   because it has the most records; unless its disk is a new one. Then the partition waits for an unclean election.
5. `min_isr` is part of the state, because rules 1 and 2 must use the same number. A lower number clears the ELR.

This module decides; it reads no clock and writes no key.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

NO_LEADER = -1

Registrations = Mapping[int, int]
"""The live brokers: the epoch of each one's registration, by node id."""


@dataclass(frozen=True, slots=True)
class PartitionState:
    replicas: tuple[int, ...]
    leader: int
    leader_epoch: int
    term: int
    isr: tuple[int, ...]
    elr: tuple[int, ...] = ()
    min_isr: int = 1
    last_leader: int = NO_LEADER
    adding: tuple[int, ...] = ()
    """Replicas that a reassignment adds."""
    removing: tuple[int, ...] = ()
    """Replicas that it removes when the added ones are in sync."""

    def encode(self) -> bytes:
        fields = (getattr(self, name) for name in self.__slots__)
        return json.dumps(list(fields), separators=(",", ":")).encode()

    @classmethod
    def decode(cls, value: bytes) -> PartitionState:
        fields = [tuple(each) if isinstance(each, list) else each for each in json.loads(value)]
        return cls(*fields)  # type: ignore[arg-type]  # as `encode` wrote them

    @property
    def can_commit(self) -> bool:
        return len(self.isr) >= self.min_isr

    @property
    def is_led(self) -> bool:
        return self.leader != NO_LEADER

    def leads(self, node_id: int, registration: int) -> bool:
        """Whether this registration of a broker is the leader."""
        return self.leader == node_id and self.term == registration

    def has_leader(self, alive: Registrations) -> bool:
        return self.is_led and alive.get(self.leader) == self.term


def create(replicas: tuple[int, ...], min_isr: int, alive: Registrations) -> PartitionState:
    """The state of a new partition: all its live replicas are in sync, because it is empty."""
    isr = tuple(each for each in replicas if each in alive) or replicas
    leader = isr[0] if isr[0] in alive else NO_LEADER
    term = alive.get(leader, 0)
    return PartitionState(replicas, leader, 0, term, isr, min_isr=min(min_isr, len(replicas)), last_leader=leader)


def shrink(state: PartitionState, gone: Collection[int]) -> PartitionState:
    """Takes replicas out of the ISR (rule 2). The leader stays: `elect` follows if it is gone."""
    left = tuple(each for each in state.isr if each not in gone)
    if left == state.isr:
        return state
    elr: tuple[int, ...] = ()
    if len(left) < state.min_isr:
        elr = tuple(each for each in state.replicas if each in state.elr or (each in state.isr and each in gone))
    return replace(state, isr=left, elr=elr)


def expand(state: PartitionState, node_id: int) -> PartitionState:
    """Takes a caught-up replica into the ISR."""
    if node_id in state.isr or node_id not in state.replicas:
        return state
    isr = tuple(each for each in state.replicas if each in state.isr or each == node_id)
    elr = () if len(isr) >= state.min_isr else tuple(each for each in state.elr if each != node_id)
    return replace(state, isr=isr, elr=elr)


def forget(state: PartitionState, node_id: int, *, is_empty: bool = False) -> PartitionState:
    """Rule 4: the replica's copy is no longer trusted, or `is_empty`."""
    if is_empty and state.last_leader == node_id:
        state = replace(state, last_leader=NO_LEADER)
    isr, elr = _without(state.isr, node_id), _without(state.elr, node_id)
    if (isr, elr) == (state.isr, state.elr):
        return state
    if len(isr) < state.min_isr:  # the others stay eligible: nothing is committed without them
        return replace(state, isr=isr, elr=elr)
    return replace(state, isr=isr, elr=())


def with_min_isr(state: PartitionState, min_isr: int) -> PartitionState:
    """Rule 5."""
    wanted = max(min(min_isr, len(state.replicas)), 1)
    if wanted == state.min_isr:
        return state
    return replace(state, min_isr=wanted, elr=() if len(state.isr) >= wanted else state.elr)


def elect(state: PartitionState, alive: Registrations, *, unclean: bool = False) -> PartitionState:
    """The state after dead replicas left the ISR and, if the leader is gone, another one was elected."""
    settled = shrink(state, [each for each in state.isr if each not in alive])
    if settled.has_leader(alive):
        return settled
    leader = _candidate(settled, alive, unclean)
    if leader is None:
        return without_leader(settled)
    return lead(settled, leader, alive[leader])


def without_leader(state: PartitionState) -> PartitionState:
    return replace(state, leader=NO_LEADER, term=0) if state.is_led else state


def lead(state: PartitionState, leader: int, registration: int) -> PartitionState:
    """The state under a new leader. One that was not eligible becomes the only in-sync replica."""
    epoch = state.leader_epoch + 1
    elected = replace(state, leader=leader, leader_epoch=epoch, term=registration, last_leader=leader)
    if leader in state.isr:
        return elected
    if leader in state.elr:
        return expand(elected, leader)
    return replace(elected, isr=(leader,), elr=())


def prefer(state: PartitionState, alive: Registrations) -> PartitionState:
    """Moves the leadership to the first replica, if it is in sync and alive."""
    first = state.replicas[0]
    if state.leader == first or first not in state.isr or first not in alive or not state.has_leader(alive):
        return state
    return lead(state, first, alive[first])


def is_clean(before: PartitionState, after: PartitionState) -> bool:
    """Whether the new leader holds every committed record for sure."""
    return not after.is_led or after.leader_epoch == before.leader_epoch or after.leader in (*before.isr, *before.elr)


# Reassignment


def reassign(state: PartitionState, target: tuple[int, ...]) -> PartitionState:
    """Begins to move a partition to other replicas: first the new ones copy, then the old ones go (KIP-455)."""
    keep = settle_replicas(state)
    adding = tuple(each for each in target if each not in keep)
    removing = tuple(each for each in keep if each not in target)
    return replace(state, replicas=(*target, *removing), adding=adding, removing=removing)


def cancel(state: PartitionState) -> PartitionState:
    """Gives up a reassignment that has not finished."""
    back = settle_replicas(state)
    if not any(each in state.isr for each in back):
        return state
    isr = tuple(each for each in state.isr if each in back)
    elr = tuple(each for each in state.elr if each in back)
    return replace(state, replicas=back, adding=(), removing=(), isr=isr, elr=elr)


def settle_replicas(state: PartitionState) -> tuple[int, ...]:
    """The replicas without a reassignment."""
    return tuple(each for each in state.replicas if each not in state.adding)


def complete(state: PartitionState, alive: Registrations) -> PartitionState:
    """Ends a reassignment whose target replicas are in sync, in enough number to commit."""
    if not state.adding and not state.removing:
        return state
    target = tuple(each for each in state.replicas if each not in state.removing)
    if not all(each in state.isr for each in target):
        return state
    done = replace(state, replicas=target, adding=(), removing=(), isr=target, elr=())
    if done.leader in target:
        return done
    leader = next((each for each in target if each in alive), None)
    return state if leader is None else lead(done, leader, alive[leader])


def _candidate(state: PartitionState, alive: Registrations, unclean: bool) -> int | None:
    for eligible in (state.isr, state.elr):
        for each in state.replicas:
            if each in eligible and each in alive:
                return each
    if not state.isr and not state.elr and state.last_leader in alive and state.last_leader in state.replicas:
        return state.last_leader
    if unclean:
        return next((each for each in state.replicas if each in alive), None)
    return None


def _without(members: tuple[int, ...], node_id: int) -> tuple[int, ...]:
    return tuple(each for each in members if each != node_id)
