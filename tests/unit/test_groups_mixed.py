"""Groups with members of both protocols, and their conversion from one to the other (KIP-848)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.broker.groups.groups import GroupSettings
from millstream.broker.groups.stream import migration
from millstream.broker.groups.stream.plan import decode_assignment, encode_assignment
from millstream.broker.groups.stream.subscription import ITEMS_MAX, Subscription, decode_subscription
from millstream.core.errors import Code
from tests.unit.groups_kit import Bench, Client, code_of, start, subscription, turn
from tests.unit.mixed_kit import ClassicClient, classic_group, numbers_of, owning, run

both_assignors = pytest.mark.parametrize("cooperative", [False, True], ids=["eager", "cooperative"])


def kind_of(bench: Bench) -> str:
    [listed] = bench.groups.list()
    return listed.type


@both_assignors
async def test_members_are_upgraded_one_by_one_while_each_partition_has_one_owner(cooperative: bool) -> None:
    bench = Bench()
    classic = await classic_group(bench, 2, cooperative=cooperative)
    assert await classic[0].commit(5) == Code.NONE
    newer = [Client(bench, "a"), Client(bench, "b")]
    await run(newer[0], *classic)
    assert kind_of(bench) == "Consumer"
    assert numbers_of([newer[0], *classic]) == [0, 1, 2, 3]
    assert all(member.numbers for member in classic)
    await classic[0].leave()
    await run(*newer, classic[1])
    assert numbers_of([*newer, classic[1]]) == [0, 1, 2, 3]
    await classic[1].leave()
    await run(*newer)
    assert [len(member.numbers) for member in newer] == [2, 2]
    assert set(classic[1].errors) <= {Code.REBALANCE_IN_PROGRESS}
    assert bench.committed() == 5


@both_assignors
async def test_members_are_downgraded_one_by_one_while_each_partition_has_one_owner(cooperative: bool) -> None:
    bench = Bench()
    newer = [Client(bench, "a"), Client(bench, "b")]
    await run(*newer)
    await bench.commit(5, "a", newer[0].epoch)
    classic = [ClassicClient(bench, cooperative=cooperative) for _ in range(2)]
    await newer[0].leave()
    await run(newer[1], classic[0])
    assert kind_of(bench) == "Consumer"
    assert numbers_of([newer[1], classic[0]]) == [0, 1, 2, 3]
    epoch = bench.groups.consumer_describe("g").epoch
    await newer[1].leave()
    assert kind_of(bench) == "Classic"
    assert await classic[0].commit(6) == Code.NONE, "its epoch is its generation until it rejoins"
    await run(*classic)
    assert numbers_of(classic) == [0, 1, 2, 3]
    assert classic[0].generation == classic[1].generation > epoch
    assert set(classic[0].errors) == {Code.REBALANCE_IN_PROGRESS}
    assert bench.committed() == 6


async def test_a_silent_last_member_of_the_consumer_protocol_is_fenced_and_the_group_downgraded() -> None:
    bench = Bench()
    (classic,) = await classic_group(bench, 1)
    newer = Client(bench, "a")
    await run(classic, newer)
    for _ in range(9):
        bench.clock.advance(5)
        await classic.step()
    bench.clock.advance(1)
    assert kind_of(bench) == "Classic"
    await run(classic)
    assert classic.numbers == [0, 1, 2, 3]
    assert await newer.beat() == Code.UNKNOWN_MEMBER_ID, "it joins again, and upgrades the group again"
    await run(classic, newer)
    assert kind_of(bench) == "Consumer"
    assert numbers_of([classic, newer]) == [0, 1, 2, 3]


async def test_a_classic_member_has_the_session_timeout_that_it_asked_for() -> None:
    bench = Bench()
    (classic,) = await classic_group(bench, 1)
    newer = Client(bench, "a")
    await run(classic, newer)
    bench.clock.advance(9)
    await classic.step()
    await newer.beat()
    bench.clock.advance(9)
    assert await classic.commit(1) == Code.NONE, "a commit is a sign of life"
    await newer.beat()
    bench.clock.advance(11)
    await newer.beat()
    await run(newer)
    assert newer.numbers == [0, 1, 2, 3]
    await classic.step()
    assert classic.errors[-1] == Code.UNKNOWN_MEMBER_ID


async def test_a_classic_member_that_does_not_rejoin_in_its_rebalance_timeout_is_fenced() -> None:
    bench = Bench()
    (classic,) = await classic_group(bench, 1)
    newer = Client(bench, "a")
    await newer.beat()
    assert newer.numbers == []
    for _ in range(12):
        assert bench.heartbeat(classic.member_id, classic.generation) == Code.REBALANCE_IN_PROGRESS
        await newer.beat()
        bench.clock.advance(5)
    assert bench.heartbeat(classic.member_id, classic.generation) == Code.UNKNOWN_MEMBER_ID
    await run(newer)
    assert newer.numbers == [0, 1, 2, 3]


async def test_a_classic_member_that_joins_and_does_not_sync_is_fenced() -> None:
    bench = Bench()
    newer = Client(bench, "a")
    await run(newer)
    joined = await bench.join()
    for _ in range(12):
        bench.heartbeat(joined.member_id, joined.generation)
        await newer.beat()
        bench.clock.advance(5)
    assert bench.heartbeat(joined.member_id, joined.generation) == Code.UNKNOWN_MEMBER_ID
    await run(newer)
    assert newer.numbers == [0, 1, 2, 3]


async def test_a_join_that_waits_in_a_classic_group_continues_in_the_consumer_group() -> None:
    """aiokafka gives up for good when a JoinGroup is answered with an error that it does not expect there."""
    bench = Bench()
    first, second = await classic_group(bench, 2)
    waiting = bench.join(first.member_id, protocols=(("range", subscription("orders", "more")),))
    unknown = bench.join(instance_id="i")
    await turn()
    assert not waiting.done()
    assert not unknown.done()
    newer = Client(bench, "a")
    await newer.beat()
    await turn()
    assert waiting.result().error == Code.NONE
    assert waiting.result().generation == newer.epoch
    members = {member.id for member in bench.groups.consumer_describe("g").members}
    assert members == {first.member_id, second.member_id, unknown.result().member_id, "a"}


async def test_a_sync_that_waits_is_told_to_rejoin_when_the_group_is_upgraded() -> None:
    bench = Bench()
    first = await bench.join()
    second = bench.join()
    await turn()
    rejoined = bench.join(first.member_id)
    await turn()
    waiting = bench.sync(second.result().member_id, second.result().generation)
    await turn()
    assert not waiting.done(), "the leader has handed in no plan"
    newer = Client(bench, "a")
    await newer.beat()
    assert await code_of(waiting) == Code.REBALANCE_IN_PROGRESS
    assert await code_of(bench.sync(first.member_id, rejoined.result().generation)) == Code.REBALANCE_IN_PROGRESS


async def test_a_partition_that_a_cooperative_member_is_still_revoking_is_not_given_away() -> None:
    bench = Bench()
    first, second = [ClassicClient(bench, cooperative=True) for _ in range(2)]
    await run(first)
    await run(second, steps=2)
    while first.numbers == [0, 1, 2, 3]:
        for member in (second, first):
            await member.step()
    assert len(first.numbers) == 2, "it is told to give up two, and still at work on them"
    newer = Client(bench, "a")
    for _ in range(5):
        await newer.beat()
        assert newer.numbers == []
    await run(first, second, newer)
    assert numbers_of([first, second, newer]) == [0, 1, 2, 3]


async def test_commits_are_fenced_by_the_member_epoch() -> None:
    bench = Bench()
    (classic,) = await classic_group(bench, 1)
    newer = Client(bench, "a")
    await newer.beat()
    assert await classic.commit(7) == Code.NONE, "it has not been told of the new epoch"
    before = classic.generation
    await run(classic, newer)
    assert classic.generation == newer.epoch > before
    assert await code_of(bench.commit(8, classic.member_id, before)) == Code.ILLEGAL_GENERATION
    assert await code_of(bench.commit(8, "a", before)) == Code.STALE_MEMBER_EPOCH
    assert await classic.commit(9) == Code.NONE
    assert bench.heartbeat(classic.member_id, before) == Code.ILLEGAL_GENERATION
    assert bench.heartbeat("a", newer.epoch) == Code.UNKNOWN_MEMBER_ID, "it does not use the classic protocol"


async def downgraded_behind(bench: Bench) -> ClassicClient:
    """Two members of the consumer protocol leave between two heartbeats of a classic one."""
    (classic,) = await classic_group(bench, 1)
    newer = [Client(bench, "a"), Client(bench, "b")]
    await run(classic, *newer)
    for each in newer:
        await each.leave()
    assert kind_of(bench) == "Classic"
    assert classic.generation < bench.groups._groups["g"].epoch
    return classic


async def test_a_member_below_the_groups_epoch_is_not_fenced_by_a_downgrade() -> None:
    bench = Bench()
    classic = await downgraded_behind(bench)
    before = classic.generation
    assert await classic.commit(7) == Code.NONE
    assert bench.heartbeat(classic.member_id, before) == Code.REBALANCE_IN_PROGRESS
    assert bench.heartbeat(classic.member_id, before - 1) == Code.ILLEGAL_GENERATION
    await run(classic)
    assert Code.ILLEGAL_GENERATION not in classic.errors and classic.numbers == [0, 1, 2, 3]
    assert bench.heartbeat(classic.member_id, before) == Code.ILLEGAL_GENERATION
    assert bench.committed() == 7


async def test_a_member_below_the_groups_epoch_is_not_fenced_by_another_upgrade() -> None:
    bench = Bench()
    classic = await downgraded_behind(bench)
    back = Client(bench, "c")
    await back.beat()
    assert kind_of(bench) == "Consumer"
    assert await classic.commit(7) == Code.NONE
    assert bench.heartbeat(classic.member_id, classic.generation) == Code.REBALANCE_IN_PROGRESS
    await run(classic, back)
    assert Code.ILLEGAL_GENERATION not in classic.errors
    assert numbers_of([classic, back]) == [0, 1, 2, 3]


async def test_a_planned_member_in_a_downgraded_group_does_not_fence_the_members_that_have_not_rejoined() -> None:
    bench = Bench()
    classic = await downgraded_behind(bench)
    await bench.join(planned=True)
    assert bench.heartbeat(classic.member_id, classic.generation) == Code.REBALANCE_IN_PROGRESS
    assert await classic.commit(7) == Code.REBALANCE_IN_PROGRESS, "the plan may have given it to the other"


async def test_epochs_are_durable_before_classic_members_hear_of_them_and_go_on_after_a_restart() -> None:
    bench = Bench()
    (classic,) = await classic_group(bench, 1)
    newer = Client(bench, "a")
    bench.meta.holding = True
    joining = bench.join()
    await turn()
    assert not joining.done(), "the classic generation is not durable yet"
    bench.meta.land_all()
    await run(classic, newer)
    bench.meta.holding = True
    joining = bench.join()
    await turn()
    assert not joining.done(), "the epoch is not durable yet"
    assert bench.heartbeat(classic.member_id, classic.generation) == Code.NONE
    bench.meta.land_all()
    epoch = (await joining).generation
    await bench.restart()
    await run(classic, newer)
    assert classic.generation > epoch
    assert newer.epoch > epoch
    assert numbers_of([classic, newer]) == [0, 1, 2, 3]


@pytest.mark.parametrize("is_newer_first", [True, False])
async def test_a_member_that_names_too_much_is_refused_and_one_below_the_bound_is_not(is_newer_first: bool) -> None:
    bench = Bench()
    newer = Client(bench, "a")
    if is_newer_first:
        await run(newer)
    many = owning(["orders"], [("orders", number) for number in range(ITEMS_MAX)])
    joining = bench.join(protocols=(("range", many),))
    if is_newer_first:
        assert await code_of(joining) == Code.INCONSISTENT_GROUP_PROTOCOL
        fewer = owning(["orders"], [("orders", number) for number in range(ITEMS_MAX - 2)])
        assert (await bench.join(protocols=(("range", fewer),))).error == Code.NONE
    else:
        await turn()
        assert await code_of(bench.beat("a", 0)) == Code.GROUP_ID_NOT_FOUND


async def test_a_group_whose_members_name_too_much_together_is_not_upgraded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench()
    clients = await classic_group(bench, 2)
    monkeypatch.setattr(migration, "ITEMS_MAX", 5)
    caplog.set_level("INFO")
    assert await code_of(bench.beat("a", 0)) == Code.GROUP_ID_NOT_FOUND
    assert "its members name over 5 topics and partitions" in caplog.text
    monkeypatch.setattr(migration, "ITEMS_MAX", 6)
    assert (await bench.beat("a", 0)).epoch > clients[0].generation


async def test_a_slow_write_of_an_epoch_fences_no_member_that_waits_for_it() -> None:
    bench = Bench()
    (classic,) = await classic_group(bench, 1)
    newer = Client(bench, "a")
    await run(classic, newer)
    bench.meta.holding = True
    joining, beating = bench.join(), start(bench.beat("b", 0))
    await turn()
    for _ in range(12):
        bench.clock.advance(5)
        assert bench.heartbeat(classic.member_id, classic.generation) in (Code.NONE, Code.REBALANCE_IN_PROGRESS)
    bench.meta.land_all()
    joined, beaten = await joining, await beating
    assert bench.heartbeat(joined.member_id, joined.generation) == Code.NONE
    assert beaten.member_id == "b"
    bench.clock.advance(11)
    assert bench.heartbeat(joined.member_id, joined.generation) == Code.UNKNOWN_MEMBER_ID, "silent from then on"


async def test_a_failed_write_of_an_epoch_is_repeated_by_a_classic_members_heartbeat() -> None:
    bench = Bench(GroupSettings(consumer_migration_policy="upgrade"))
    (classic,) = await classic_group(bench, 1)
    newer = Client(bench, "a")
    await run(classic, newer)
    bench.meta.holding = True
    await newer.leave()
    bench.meta.lose()
    bench.meta.holding = False
    assert bench.heartbeat(classic.member_id, classic.generation) == Code.REBALANCE_IN_PROGRESS
    await run(classic)
    assert classic.numbers == [0, 1, 2, 3]


@both_assignors
async def test_a_static_member_keeps_its_partitions_across_protocols(cooperative: bool) -> None:
    bench = Bench()
    first = ClassicClient(bench, cooperative=cooperative, instance_id="one")
    second = ClassicClient(bench, cooperative=cooperative, instance_id="two")
    await run(first, second)
    upgraded = Client(bench, "a", instance_id="one")
    had = first.numbers
    await upgraded.beat()
    assert upgraded.numbers == had
    assert bench.heartbeat(first.member_id, first.generation, "one") == Code.FENCED_INSTANCE_ID
    assert await first.commit(1) == Code.FENCED_INSTANCE_ID
    await run(upgraded, second)
    assert upgraded.numbers == had
    back = ClassicClient(bench, cooperative=cooperative, instance_id="one")
    await back.step()
    await run(second, back)
    assert kind_of(bench) == "Classic"
    assert numbers_of([second, back]) == [0, 1, 2, 3]
    assert await code_of(bench.beat("a", upgraded.epoch, instance_id="one")) == Code.UNKNOWN_MEMBER_ID


async def test_an_administrator_removes_members_of_both_protocols_by_id_and_by_instance() -> None:
    bench = Bench()
    (classic,) = await classic_group(bench, 1)
    static = ClassicClient(bench, instance_id="i")
    newer = Client(bench, "a")
    await run(classic, static, newer)
    assert bench.groups.leave("g", [("ghost", "i"), ("", "i"), ("a", None), (classic.member_id, None)]) == [
        Code.FENCED_INSTANCE_ID,
        Code.NONE,
        Code.NONE,
        Code.NONE,
    ]
    [listed] = bench.groups.list()
    assert (listed.type, listed.state, listed.members) == ("Classic", "Empty", 0)


@pytest.mark.parametrize("policy", ["downgrade", "disabled"])
async def test_the_policy_forbids_the_upgrade(policy: str) -> None:
    bench = Bench(GroupSettings(consumer_migration_policy=policy))
    (classic,) = await classic_group(bench, 1)
    assert await code_of(bench.beat("a", 0)) == Code.GROUP_ID_NOT_FOUND
    assert bench.heartbeat(classic.member_id, classic.generation) == Code.NONE
    assert kind_of(bench) == "Classic"


@pytest.mark.parametrize("policy", ["upgrade", "disabled"])
async def test_the_policy_forbids_the_downgrade_and_classic_members_stay_in_the_consumer_group(policy: str) -> None:
    bench = Bench(GroupSettings(consumer_migration_policy=policy))
    newer, classic = Client(bench, "a"), ClassicClient(bench)
    await run(newer)
    await run(newer, classic)
    await newer.leave()
    await run(classic)
    assert kind_of(bench) == "Consumer"
    assert classic.numbers == [0, 1, 2, 3]
    bench.topics.set("orders", 5)
    await run(classic)
    assert classic.numbers == [0, 1, 2, 3, 4]


ASSIGNED = encode_assignment([("orders", 0)])
WITH_USER_DATA = ASSIGNED[:-4] + b"\x00\x00\x00\x01u"


@pytest.mark.parametrize(
    ("join", "assignment"),
    [
        ({"protocol_type": "connect"}, b""),
        ({"protocols": (("range", b"\x00\x00\x7f\xff\xff\xff"),)}, b""),
        ({"protocols": (("range", subscription("orders")[:-1]),)}, b""),
        ({"planned": True}, None),
        ({}, b"custom"),
        ({"protocols": (("stream", subscription("orders")),)}, WITH_USER_DATA),
    ],
    ids=["type", "count", "cut", "planned", "assignment", "user data"],
)
async def test_a_group_that_the_broker_cannot_assign_for_stays_classic(
    join: dict[str, Any], assignment: bytes | None
) -> None:
    bench = Bench()
    joined = await bench.join(**join)
    if assignment is not None:
        await bench.plan(joined.member_id, joined.generation, {joined.member_id: assignment})
    assert await code_of(bench.beat("a", 0)) == Code.GROUP_ID_NOT_FOUND
    assert kind_of(bench) == "Classic"
    assert bench.heartbeat(joined.member_id, joined.generation) == Code.NONE


async def test_user_data_that_a_standard_assignor_repeats_does_not_keep_a_group_classic() -> None:
    """librdkafka's leader writes the user data of a cooperative-sticky subscription into the assignment."""
    bench = Bench()
    joined = await bench.join(protocols=(("cooperative-sticky", subscription("orders")),))
    await bench.plan(joined.member_id, joined.generation, {joined.member_id: WITH_USER_DATA})
    assert (await bench.beat("a", 0)).epoch == joined.generation + 1


async def test_assignments_that_overlap_are_a_custom_assignors_and_keep_the_group_classic() -> None:
    bench = Bench()
    first = await bench.join()
    second = bench.join()
    await turn()
    rejoined = await bench.join(first.member_id)
    plan = {first.member_id: ASSIGNED, second.result().member_id: ASSIGNED}
    await bench.plan(first.member_id, rejoined.generation, plan)
    assert await code_of(bench.beat("a", 0)) == Code.GROUP_ID_NOT_FOUND


@pytest.mark.parametrize(
    "fields", [{"assignor": "astrology"}, {"assignor": "exclusive"}, {"pattern": "("}, {"topics": None}]
)
async def test_a_heartbeat_that_is_refused_converts_nothing(fields: dict[str, Any]) -> None:
    bench = Bench()
    await classic_group(bench, 1)
    assert await code_of(bench.beat("a", 0, **fields)) != Code.NONE
    assert kind_of(bench) == "Classic"


@pytest.mark.parametrize(
    "join",
    [
        {"protocol_type": "connect"},
        {"protocols": (("range", b"\x00\x03\x00\x00"),)},
        {"protocols": (("sticky", subscription("orders")),)},
        {"planned": True},
    ],
    ids=["type", "malformed", "nothing in common", "planned"],
)
async def test_a_classic_member_that_does_not_fit_is_refused_by_a_consumer_group(join: dict[str, Any]) -> None:
    bench = Bench()
    (classic,) = await classic_group(bench, 1)
    newer = Client(bench, "a")
    await run(classic, newer)
    assert await code_of(bench.join(**join)) == Code.INCONSISTENT_GROUP_PROTOCOL
    assert len(bench.groups.consumer_describe("g").members) == 2


async def test_an_exclusive_group_takes_no_classic_members() -> None:
    bench = Bench()
    await bench.beat("a", 0, assignor="exclusive")
    assert await code_of(bench.join()) == Code.INCONSISTENT_GROUP_PROTOCOL


async def test_members_of_both_protocols_have_one_bound() -> None:
    bench = Bench(GroupSettings(members_max=2))
    first, second = await classic_group(bench, 2)
    assert await code_of(bench.beat("a", 0)) == Code.GROUP_MAX_SIZE_REACHED
    assert kind_of(bench) == "Classic"
    await second.leave()
    await run(first, Client(bench, "a"))
    assert await code_of(bench.join()) == Code.GROUP_MAX_SIZE_REACHED
    assert await code_of(bench.join("x" * 513)) == Code.UNKNOWN_MEMBER_ID


async def test_a_new_classic_member_is_given_its_id_first() -> None:
    bench = Bench()
    await run(Client(bench, "a"))
    answer = await bench.join(id_required=True)
    assert answer.error == Code.MEMBER_ID_REQUIRED
    assert len(bench.groups.consumer_describe("g").members) == 1
    joined = await bench.join(answer.member_id, id_required=True)
    assert joined.member_id == answer.member_id
    assert (joined.leader, joined.members, joined.protocol_name) == ("", (), "range")
    sync = bench.groups.sync("g", joined.member_id, None, joined.generation, ("consumer", "sticky"), {})
    assert await code_of(sync) == Code.INCONSISTENT_GROUP_PROTOCOL


def test_subscriptions_of_every_version_are_read_and_cut_ones_refused() -> None:
    newest = owning(["orders"], [("orders", 1), ("orders", 2)])
    for version in (1, 2, 3, 9):
        decoded = decode_subscription(version.to_bytes(2, "big") + newest[2:])
        assert decoded is not None
        assert decoded == Subscription(frozenset({"orders"}), frozenset({("orders", 1), ("orders", 2)}), None)
    assert decode_subscription(subscription("orders")) == Subscription(frozenset({"orders"}), frozenset(), None)
    assert all(decode_subscription(newest[:end]) is None for end in range(len(newest)))


@given(st.binary(max_size=64))
def test_embedded_bytes_are_read_or_refused(data: bytes) -> None:
    decode_subscription(data)
    decode_assignment(data)


@settings(max_examples=40, deadline=None)
@given(st.data())
async def test_whatever_joins_and_leaves_in_whatever_order_a_partition_has_one_owner(data: st.DataObject) -> None:
    bench = Bench()
    members: list[ClassicClient | Client] = []
    cooperative = data.draw(st.booleans(), "cooperative")
    for number in range(data.draw(st.integers(1, 60), "steps")):
        act = data.draw(st.sampled_from(["step", "step", "step", "step", "classic", "newer", "leave"]), "act")
        if act == "classic" and len(members) < 4:
            members.append(ClassicClient(bench, cooperative=cooperative))
        elif act == "newer" and len(members) < 4:
            members.append(Client(bench, f"m{number}"))
        elif act == "leave" and members:
            member = members.pop(data.draw(st.integers(0, len(members) - 1), "who"))
            if isinstance(member, ClassicClient):
                member.vanish()
            elif member.epoch:
                await member.leave()
        elif members:
            await run(data.draw(st.sampled_from(members), "who"), steps=1)
        owned = numbers_of(members)
        assert len(owned) == len(set(owned))
    for _ in range(40):  # until the sessions of members that left without a word are over
        await run(*members, steps=1)
        bench.clock.advance(3)
    if members:
        assert numbers_of(members) == [0, 1, 2, 3]
