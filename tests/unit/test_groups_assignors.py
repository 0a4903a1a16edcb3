from __future__ import annotations

from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.broker.groups.stream.assignors import ASSIGNORS, Assignor, Target, Wants, exclusive, range_, uniform

TOPICS = [UUID(int=number) for number in range(1, 5)]
counts = st.dictionaries(st.sampled_from(TOPICS), st.integers(1, 12), min_size=1)
some_topics = st.frozensets(st.sampled_from(TOPICS))


@st.composite
def groups(draw: st.DrawFn, same: bool = False) -> tuple[dict[str, Wants], dict[UUID, int]]:
    topics = draw(counts)
    names = [f"m{number}" for number in range(draw(st.integers(1, 7)))]
    shared = draw(some_topics)
    members = {}
    for name in names:
        wanted = shared if same else draw(some_topics)
        held = draw(st.sets(st.tuples(st.sampled_from(TOPICS), st.integers(0, 15)), max_size=10))
        members[name] = Wants(wanted, held, name)
    return members, topics


def after(assignor: Assignor, members: dict[str, Wants], topics: dict[UUID, int]) -> Target:
    """The next target, from members that hold what `members` was given."""
    before = assignor(members, topics)
    return assignor({name: wants._replace(held=before[name]) for name, wants in members.items()}, topics)


@pytest.mark.parametrize("assignor", ASSIGNORS.values(), ids=ASSIGNORS)
@settings(max_examples=50)
@given(groups())
def test_every_wanted_partition_goes_to_exactly_one_member_that_wants_it(
    assignor: Assignor, group: tuple[dict[str, Wants], dict[UUID, int]]
) -> None:
    members, topics = group
    target = assignor(members, topics)
    given_out = [partition for name in members for partition in target[name]]
    wanted = {topic for wants in members.values() for topic in wants.topics}
    assert sorted(given_out) == sorted((topic, n) for topic in wanted & topics.keys() for n in range(topics[topic]))
    assert all(topic in members[name].topics for name, mine in target.items() for topic, _ in mine)


@settings(max_examples=50)
@given(groups(same=True))
def test_uniform_loads_differ_by_one_at_most_when_all_want_the_same(
    group: tuple[dict[str, Wants], dict[UUID, int]],
) -> None:
    loads = [len(mine) for mine in uniform(*group).values()]
    assert max(loads) - min(loads) <= 1


@pytest.mark.parametrize("assignor", ASSIGNORS.values(), ids=ASSIGNORS)
@settings(max_examples=50)
@given(groups())
def test_nothing_moves_when_nothing_changed(
    assignor: Assignor, group: tuple[dict[str, Wants], dict[UUID, int]]
) -> None:
    assert after(assignor, *group) == assignor(*group)


@given(st.integers(1, 8), st.integers(1, 40))
def test_uniform_moves_no_more_than_the_newcomer_gets(members_before: int, partitions: int) -> None:
    topics = {TOPICS[0]: partitions}
    empty = {f"m{n}": Wants(frozenset(TOPICS[:1]), set(), f"m{n}") for n in range(members_before)}
    before = uniform(empty, topics)
    members = {name: wants._replace(held=before[name]) for name, wants in empty.items()}
    members["new"] = Wants(frozenset(TOPICS[:1]), set(), "new")
    target = uniform(members, topics)
    moved = sum(len(before[name] - target[name]) for name in before)
    assert moved == len(target["new"])


@given(st.integers(2, 8), st.integers(1, 40))
def test_uniform_leaves_all_they_have_to_those_who_stay(members_before: int, partitions: int) -> None:
    topics = {TOPICS[0]: partitions}
    empty = {f"m{n}": Wants(frozenset(TOPICS[:1]), set(), f"m{n}") for n in range(members_before)}
    before = uniform(empty, topics)
    stay = {name: wants._replace(held=before[name]) for name, wants in empty.items() if name != "m0"}
    target = uniform(stay, topics)
    assert all(before[name] <= target[name] for name in stay)


def test_uniform_evens_out_members_that_want_different_topics() -> None:
    one, two = TOPICS[:2]
    members = {
        "both": Wants(frozenset({one, two}), {(one, n) for n in range(6)} | {(two, n) for n in range(2)}, "a"),
        "one": Wants(frozenset({one}), set(), "b"),
    }
    target = uniform(members, {one: 6, two: 2})
    assert {name: len(mine) for name, mine in target.items()} == {"both": 4, "one": 4}


def test_range_brings_equal_partitions_of_two_topics_together_in_order_of_instance() -> None:
    one, two = TOPICS[:2]
    members = {
        "z": Wants(frozenset({one, two}), set(), "1"),
        "a": Wants(frozenset({one, two}), set(), "2"),
    }
    target = range_(members, {one: 3, two: 3})
    assert target == {"z": {(one, 0), (one, 1), (two, 0), (two, 1)}, "a": {(one, 2), (two, 2)}}


def test_ten_thousand_partitions_are_assigned_to_a_thousand_members_with_different_wishes() -> None:
    topics = {UUID(int=number): 100 for number in range(1, 101)}
    everything = frozenset(topics)
    members = {f"m{n}": Wants(everything - {UUID(int=n % 100 + 1)}, set(), f"m{n}") for n in range(1_000)}
    loads = [len(mine) for mine in uniform(members, topics).values()]
    assert (min(loads), max(loads)) == (10, 10)


@settings(max_examples=50)
@given(groups(same=True))
def test_exclusive_gives_everything_to_one_member(group: tuple[dict[str, Wants], dict[UUID, int]]) -> None:
    members, topics = group
    members = {name: wants._replace(held=set()) for name, wants in members.items()}
    assert sum(bool(mine) for mine in exclusive(members, topics).values()) <= 1


def test_exclusive_stays_with_who_has_it_and_moves_as_a_whole() -> None:
    one = TOPICS[0]
    members = {name: Wants(frozenset({one}), set(), name) for name in "bcd"}
    before = exclusive(members, {one: 3})
    assert before == {"b": {(one, 0), (one, 1), (one, 2)}, "c": set(), "d": set()}
    members = {name: wants._replace(held=before[name]) for name, wants in members.items()}
    members["a"] = Wants(frozenset({one}), set(), "a")
    assert exclusive(members, {one: 4})["b"] == {(one, n) for n in range(4)}
    del members["b"]
    assert exclusive(members, {one: 4}) == {"a": {(one, n) for n in range(4)}, "c": set(), "d": set()}
