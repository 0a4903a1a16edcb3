"""Classic groups whose members cannot plan: the broker assigns for them."""

from __future__ import annotations

from typing import Any

from millstream.broker.groups.groups import Joined
from millstream.broker.groups.plan import encode_assignment, encode_subscription
from millstream.errors import Code
from tests.unit.test_groups_kit import Bench, code_of, subscription, turn


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
    rest = [join(bench) for _ in range(2)]
    await turn()
    assert bench.heartbeat(first.member_id, 1) == Code.REBALANCE_IN_PROGRESS
    everybody = [await join(bench, first.member_id), *[await task for task in rest]]
    names = sorted(joined.member_id for joined in everybody)
    for joined in everybody:
        assert (joined.generation, joined.leader, ids(joined)) == (2, names[0], names)
    expected = [[0, 1], [2], [3]]
    assert assignments(bench) == {
        name: encode_assignment([("orders", number) for number in numbers])
        for name, numbers in zip(names, expected, strict=True)
    }


async def test_a_silent_member_goes_and_the_survivor_gets_its_partitions() -> None:
    bench = Bench(orders=2)
    first = await join(bench, rebalance_ms=10_000)
    second = join(bench, rebalance_ms=10_000)
    await turn()
    await join(bench, first.member_id, rebalance_ms=10_000)
    gone = (await second).member_id
    for _ in range(3):
        bench.clock.advance(4)
        await turn()
        code = bench.heartbeat(first.member_id, 2)
    assert code == Code.REBALANCE_IN_PROGRESS
    alone = await join(bench, first.member_id)
    assert alone.generation == 3 and ids(alone) == [first.member_id]
    assert assignments(bench) == {first.member_id: encode_assignment([("orders", 0), ("orders", 1)])}
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
