"""Classic groups whose members cannot plan: the broker assigns for them."""

from __future__ import annotations

from typing import Any

from millstream.broker.groups.groups import Joined, PartitionCommit, TopicCommit
from millstream.broker.groups.stream.plan import encode_assignment, encode_subscription
from millstream.core.errors import Code
from tests.unit.groups_kit import Bench, code_of, subscription, turn


def join(bench: Bench, member_id: str = "", *topics: str, **changes: Any) -> Any:
    protocols = (("range", encode_subscription(topics or ("orders",))),)
    return bench.join(member_id, protocols=protocols, planned=True, client_id="m", **changes)


def assignments(bench: Bench) -> dict[str, bytes]:
    return {member.id: member.assignment for member in bench.groups.describe("g").members}


def ids(joined: Joined) -> list[str]:
    return sorted(member for member, _, _ in joined.members)


def test_a_subscription_is_the_consumer_protocols() -> None:
    assert encode_subscription(["b", "a", "b"])[:-4] == subscription("a", "b")[:-4]


async def test_a_member_alone_has_everything_and_needs_no_sync() -> None:
    bench = Bench(orders=3)
    joined = await join(bench)
    assert joined.leader == joined.member_id and ids(joined) == [joined.member_id]
    view = bench.groups.describe("g")
    assert (view.state, view.protocol_name) == ("Stable", "range")
    assert assignments(bench) == {joined.member_id: encode_assignment([("orders", n) for n in range(3)])}
    assert bench.heartbeat(joined.member_id, 1) == Code.NONE
    assert await bench.commit(5, joined.member_id, 1) == [[Code.NONE]]


async def test_members_share_by_range_in_alphabetical_order_and_the_first_leads() -> None:
    bench = Bench(orders=4)
    first = await join(bench)
    second, third = await join(bench), await join(bench)
    assert bench.heartbeat(first.member_id, 1) == Code.REBALANCE_IN_PROGRESS
    names = [first.member_id, second.member_id, third.member_id]
    assert names == sorted(names), "in the order of their joins"
    for joined in (third, await join(bench, first.member_id), await join(bench, second.member_id)):
        assert (joined.generation, joined.leader, ids(joined)) == (3, names[0], names)
    expected = [[0, 1], [2], [3]]
    assert assignments(bench) == {
        name: encode_assignment([("orders", number) for number in numbers])
        for name, numbers in zip(names, expected, strict=True)
    }


async def test_a_silent_member_goes_and_the_survivor_gets_its_partitions() -> None:
    bench = Bench(orders=2)
    first = await join(bench, rebalance_ms=10_000)
    gone = (await join(bench, rebalance_ms=10_000)).member_id
    await join(bench, first.member_id, rebalance_ms=10_000)
    for _ in range(3):
        bench.clock.advance(4)
        await turn()
        code = bench.heartbeat(first.member_id, 2)
    assert code == Code.REBALANCE_IN_PROGRESS
    assert assignments(bench) == {first.member_id: encode_assignment([("orders", 0), ("orders", 1)])}, "at once"
    alone = await join(bench, first.member_id)
    assert alone.generation == 3 and ids(alone) == [first.member_id]
    assert bench.heartbeat(gone, 2) == Code.UNKNOWN_MEMBER_ID
    assert await code_of(bench.commit(1, gone, 2)) == Code.UNKNOWN_MEMBER_ID
    assert await code_of(bench.commit(1, first.member_id, 2)) == Code.ILLEGAL_GENERATION


async def test_who_joins_again_and_wants_the_same_changes_nothing() -> None:
    bench = Bench()
    joined = await join(bench)
    again = await join(bench, joined.member_id)
    assert again.generation == joined.generation and bench.heartbeat(joined.member_id, 1) == Code.NONE


async def test_topics_that_come_grow_or_go_make_the_members_join_again() -> None:
    bench = Bench(orders=2)
    member = (await join(bench, "", "orders", "later")).member_id
    generation = 1
    for name, count, expected in (
        ("later", 1, [("later", 0), ("orders", 0), ("orders", 1)]),
        ("orders", 3, [("later", 0), ("orders", 0), ("orders", 1), ("orders", 2)]),
        ("later", 0, [("orders", 0), ("orders", 1), ("orders", 2)]),
    ):
        bench.topics.set(name, count)
        assert bench.heartbeat(member, generation) == Code.REBALANCE_IN_PROGRESS
        generation += 1
        assert (await join(bench, member, "orders", "later")).generation == generation
        assert assignments(bench) == {member: encode_assignment(expected)}
    bench.topics.set("unrelated", 5)
    assert bench.heartbeat(member, generation) == Code.NONE


async def test_a_kafka_consumer_in_the_group_follows_the_brokers_plan() -> None:
    bench = Bench(orders=4)
    planned = await join(bench)
    consumer = bench.join()
    await turn()
    await join(bench, planned.member_id)
    joined = await consumer
    assert joined.leader == planned.member_id and joined.members == ()
    synced = await bench.sync(joined.member_id, 2)
    both = assignments(bench)
    assert synced.assignment == both[joined.member_id]
    names = sorted(both)
    assert both[names[0]] == encode_assignment([("orders", 0), ("orders", 1)])
    assert both[names[1]] == encode_assignment([("orders", 2), ("orders", 3)])
    bench.clock.advance(5)
    assert bench.heartbeat(planned.member_id, 2) == Code.NONE


async def test_a_member_that_never_joins_again_stays_and_commits_what_the_plan_leaves_to_it() -> None:
    bench = Bench(orders=3)
    first = await join(bench)
    second = await join(bench)
    assert (second.generation, len(second.members)) == (2, 2), "no join waits for others"
    for _ in range(10):
        bench.clock.advance(4)
        assert bench.heartbeat(first.member_id, 1) == Code.REBALANCE_IN_PROGRESS
        assert bench.heartbeat(second.member_id, 2) == Code.NONE
    assert await commit(bench, first, 0) == await commit(bench, first, 1) == [[Code.NONE]]
    assert await code_of(commit(bench, first, 2)) == Code.REBALANCE_IN_PROGRESS, "the plan gives it to the second"
    assert await commit(bench, second, 2) == [[Code.NONE]]
    bench.clock.advance(6)
    bench.heartbeat(first.member_id, 1)
    bench.clock.advance(6)  # the second is gone
    await turn()
    assert await commit(bench, first, 2) == [[Code.NONE]], "without having joined again"
    assert await code_of(commit(bench, second, 2)) == Code.UNKNOWN_MEMBER_ID


async def test_a_generation_from_before_the_last_join_is_fenced() -> None:
    bench = Bench(orders=3)
    first = await join(bench)
    await join(bench)
    again = await join(bench, first.member_id)
    assert (first.generation, again.generation) == (1, 2)
    assert bench.heartbeat(first.member_id, 1) == Code.ILLEGAL_GENERATION
    assert await code_of(commit(bench, first, 0)) == Code.ILLEGAL_GENERATION
    assert await commit(bench, again, 0) == [[Code.NONE]]
    assert bench.heartbeat(first.member_id, 3) == Code.ILLEGAL_GENERATION


async def test_a_kafka_consumer_that_is_behind_is_told_to_join_and_dropped_if_it_does_not() -> None:
    bench = Bench(orders=4)
    consumer = bench.join(rebalance_ms=20_000)
    joined = await consumer
    await bench.sync(joined.member_id, 1)
    planned = await join(bench, rebalance_ms=20_000)
    assert planned.generation == 2 and len(planned.members) == 2, "no join waits for a Kafka consumer either"
    assert await code_of(bench.commit(1, joined.member_id, 1)) == Code.REBALANCE_IN_PROGRESS
    sync = bench.sync(joined.member_id, 1)
    assert await code_of(sync) == Code.REBALANCE_IN_PROGRESS, "the plan is another generation's"
    for _ in range(4):
        assert bench.heartbeat(joined.member_id, 1) == Code.REBALANCE_IN_PROGRESS
        bench.heartbeat(planned.member_id, 2)
        bench.clock.advance(6)
        await turn()
    assert bench.heartbeat(joined.member_id, 1) == Code.UNKNOWN_MEMBER_ID
    assert list(assignments(bench)) == [planned.member_id]


async def test_a_kafka_consumer_stays_behind_when_the_last_planned_member_leaves() -> None:
    """ILLEGAL_GENERATION would make a Java client give up its partitions as lost."""
    bench = Bench(orders=4)
    joined = await bench.join()
    await bench.sync(joined.member_id, 1)
    planned = await join(bench)
    bench.groups.leave("g", [(planned.member_id, None)])
    assert bench.heartbeat(joined.member_id, 1) == Code.REBALANCE_IN_PROGRESS
    assert await code_of(bench.commit(1, joined.member_id, 1)) == Code.REBALANCE_IN_PROGRESS
    again = await bench.join(joined.member_id)
    assert again.generation == 3 and again.leader == joined.member_id
    assert bench.heartbeat(joined.member_id, 2) == Code.ILLEGAL_GENERATION


async def test_a_planned_member_that_is_current_commits_nothing_that_is_another_members() -> None:
    bench = Bench(orders=3)
    first = await join(bench)
    second = await join(bench)
    current = await join(bench, first.member_id)
    assert current.generation == second.generation == 2
    assert await commit(bench, current, 1) == await commit(bench, second, 2) == [[Code.NONE]]
    assert await code_of(commit(bench, current, 2)) == Code.REBALANCE_IN_PROGRESS
    assert await code_of(commit(bench, second, 0)) == Code.REBALANCE_IN_PROGRESS
    assert bench.heartbeat(second.member_id, 2) == Code.NONE


def commit(bench: Bench, member: Joined, partition: int) -> Any:
    commits = [TopicCommit("orders", [PartitionCommit(partition, 1)])]
    return bench.groups.commit("g", member.member_id, None, member.generation, commits)
