"""Transitions of a partition's replication state: who may lead, and who leaves."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from millstream.cluster.partition_state import (
    NO_LEADER,
    PartitionState,
    cancel,
    complete,
    create,
    elect,
    expand,
    forget,
    is_clean,
    prefer,
    reassign,
    shrink,
    with_min_isr,
)

ALL = {1: 10, 2: 20, 3: 30}


def without(*gone: int) -> dict[int, int]:
    return {node_id: epoch for node_id, epoch in ALL.items() if node_id not in gone}


def test_a_new_partition_is_led_by_its_first_live_replica() -> None:
    state = create((1, 2, 3), 2, without(1))
    assert (state.leader, state.term, state.isr, state.leader_epoch) == (2, 20, (2, 3), 0)


def test_the_minimum_is_never_above_the_number_of_replicas() -> None:
    assert create((1,), 2, ALL).min_isr == 1
    assert with_min_isr(create((1, 2), 2, ALL), 5).min_isr == 2


def test_a_state_survives_its_encoding() -> None:
    state = replace(create((1, 2, 3), 2, ALL), elr=(3,), adding=(3,), removing=(1,))
    assert PartitionState.decode(state.encode()) == state


def test_a_dead_leader_is_replaced_from_the_isr() -> None:
    before = create((1, 2, 3), 2, ALL)
    after = elect(before, without(1))
    assert (after.leader, after.leader_epoch, after.term, after.isr, after.elr) == (2, 1, 20, (2, 3), ())
    assert is_clean(before, after)


def test_a_leader_that_restarted_is_elected_again_under_a_new_epoch() -> None:
    before = create((1, 2, 3), 2, ALL)
    after = elect(before, {**ALL, 1: 11})
    assert (after.leader_epoch, after.has_leader({**ALL, 1: 11})) == (1, True)


def test_replicas_that_leave_a_small_isr_stay_eligible() -> None:
    two = shrink(create((1, 2, 3), 2, ALL), [3])
    assert (two.isr, two.elr) == ((1, 2), ())
    one = shrink(two, [2])
    assert (one.isr, one.elr, one.can_commit) == ((1,), (2,), False)
    assert expand(one, 3).elr == ()


def test_an_eligible_replica_is_elected_when_the_isr_is_dead() -> None:
    one = shrink(shrink(create((1, 2, 3), 2, ALL), [3]), [2])
    after = elect(one, without(1))
    assert (after.leader, after.isr, after.elr) == (2, (2,), (1,))
    assert is_clean(one, after)


def test_without_an_eligible_replica_the_partition_waits() -> None:
    one = replace(create((1, 2, 3), 1, ALL), isr=(1,))
    after = elect(one, without(1))
    assert (after.leader, after.isr, after.elr) == (NO_LEADER, (), (1,))
    assert elect(after, ALL).leader == 1


def test_an_unclean_election_takes_any_live_replica_and_says_so() -> None:
    one = replace(create((1, 2, 3), 1, ALL), isr=(1,))
    after = elect(one, without(1), unclean=True)
    assert (after.leader, after.isr) == (2, (2,))
    assert not is_clean(one, after)


def test_a_replica_with_a_lost_disk_is_not_eligible() -> None:
    state = forget(create((1, 2, 3), 2, ALL), 1)
    assert (state.isr, state.elr) == ((2, 3), ())
    alone = forget(replace(create((1, 2), 1, ALL), isr=(1,)), 1)
    assert (alone.isr, alone.elr) == ((), ())
    back = elect(alone, {**ALL, 1: 11})
    assert (back.leader, is_clean(alone, back)) == (1, False)


def test_an_empty_disk_is_elected_by_an_unclean_election_only() -> None:
    alone = forget(replace(create((1, 2), 1, ALL), isr=(1,)), 1, is_empty=True)
    assert elect(alone, {**ALL, 1: 11}).leader == NO_LEADER
    assert elect(alone, without(1), unclean=True).leader == 2


def test_a_lower_minimum_ends_the_eligibility_of_others() -> None:
    one = shrink(create((1, 2), 2, ALL), [2])
    assert with_min_isr(one, 1).elr == ()


def test_the_first_replica_leads_again_when_it_is_in_sync() -> None:
    after = elect(create((1, 2, 3), 2, ALL), without(1))
    assert prefer(after, ALL) == after
    assert prefer(expand(after, 1), ALL).leader == 1


def test_a_reassignment_ends_when_the_new_replicas_are_in_sync() -> None:
    alive = {**ALL, 4: 40}
    moving = reassign(create((1, 2, 3), 2, ALL), (2, 3, 4))
    assert (moving.replicas, moving.adding, moving.removing) == ((2, 3, 4, 1), (4,), (1,))
    assert complete(moving, alive) == moving
    done = complete(expand(moving, 4), alive)
    assert (done.replicas, done.isr, done.leader, done.leader_epoch) == ((2, 3, 4), (2, 3, 4), 2, 1)
    assert cancel(moving).replicas == (2, 3, 1)


@given(st.data())
def test_whatever_happens_an_eligible_replica_has_every_committed_record(data: st.DataObject) -> None:
    """Records are numbers that count up; a commit needs every member of an ISR that is large enough."""
    state = create((1, 2, 3), data.draw(st.sampled_from([1, 2, 3])), ALL)
    alive, held, committed = dict(ALL), {1: 0, 2: 0, 3: 0}, 0
    for _ in range(data.draw(st.integers(1, 30))):
        match data.draw(st.sampled_from(["append", "die", "live", "lag", "join", "minimum"])):
            case "append" if state.has_leader(alive) and state.can_commit and set(state.isr) <= set(alive):
                committed += 1
                for member in state.isr:
                    held[member] = committed
            case "die" if alive:
                del alive[data.draw(st.sampled_from(sorted(alive)))]
            case "live":
                node_id = data.draw(st.sampled_from([1, 2, 3]))
                alive.setdefault(node_id, ALL[node_id] + 1)
            case "lag" if state.has_leader(alive):
                state = shrink(state, [data.draw(st.sampled_from([1, 2, 3]))]) if len(state.isr) > 1 else state
                state = state if state.leader in state.isr else elect(state, without(state.leader))
            case "join" if state.has_leader(alive):
                node_id = data.draw(st.sampled_from([1, 2, 3]))
                if node_id in alive:
                    held[node_id] = max(held[node_id], held[state.leader])
                    state = expand(state, node_id)
            case "minimum":
                state = with_min_isr(state, data.draw(st.sampled_from([1, 2, 3])))
        state = elect(state, alive)
        assert all(held[each] >= committed for each in (*state.isr, *state.elr))
        assert not state.is_led or held[state.leader] >= committed
