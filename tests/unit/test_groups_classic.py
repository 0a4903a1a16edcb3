from __future__ import annotations

import pytest

from millstream.broker.groups.groups import GroupSettings, PartitionCommit, TopicCommit
from millstream.broker.groups.record import decode_group, group_key
from millstream.core.errors import Code, RequestError
from tests.unit.groups_kit import Bench, code_of, stable_group, start, subscription, turn


def generation_of(bench: Bench) -> int:
    return bench.groups._groups["g"].epoch


async def test_two_members_share_a_generation_and_only_the_leader_sees_the_members() -> None:
    bench = Bench()
    first = bench.join()
    await turn()
    leader = first.result()
    second = bench.join()
    await turn()
    assert not second.done()
    assert bench.heartbeat(leader.member_id, leader.generation) == Code.REBALANCE_IN_PROGRESS
    again = bench.join(leader.member_id)
    await turn()
    assert again.result().generation == second.result().generation == leader.generation + 1
    assert {member[0] for member in again.result().members} == {leader.member_id, second.result().member_id}
    assert second.result().members == ()
    assert second.result().leader == leader.member_id


async def test_a_follower_waits_for_the_leaders_plan() -> None:
    bench = Bench()
    leader, follower = await stable_group(bench)
    assert bench.groups.describe("g").state == "Stable"
    assert {each.id: each.assignment for each in bench.groups.describe("g").members} == {
        leader: leader.encode(),
        follower: follower.encode(),
    }


async def test_a_third_member_makes_the_other_two_join_again() -> None:
    bench = Bench()
    members = await stable_group(bench)
    third = bench.join()
    await turn()
    assert [bench.heartbeat(member, 2) for member in members] == [Code.REBALANCE_IN_PROGRESS] * 2
    joins = [bench.join(member) for member in members]
    await turn()
    assert third.result().generation == 3
    assert len(joins[0].result().members) == 3


async def test_new_clients_are_given_an_id_first_and_lose_it_when_they_do_not_use_it() -> None:
    bench = Bench()
    refused = bench.join(id_required=True)
    await turn()
    assert refused.result().error == Code.MEMBER_ID_REQUIRED
    member = refused.result().member_id
    joined = bench.join(member, id_required=True)
    await turn()
    assert joined.result().generation == 1
    late = bench.join(id_required=True)
    await turn()
    bench.clock.advance(11)
    assert await code_of(bench.join(late.result().member_id, id_required=True)) == Code.UNKNOWN_MEMBER_ID


async def test_a_silent_member_is_dropped_after_its_session_and_the_others_rebalance() -> None:
    bench = Bench()
    leader, follower = await stable_group(bench)
    bench.clock.advance(8)
    assert bench.heartbeat(leader, 2) == Code.NONE
    bench.clock.advance(3)
    assert bench.heartbeat(leader, 2) == Code.REBALANCE_IN_PROGRESS
    assert bench.heartbeat(follower, 2) == Code.UNKNOWN_MEMBER_ID
    joined = bench.join(leader)
    await turn()
    assert [member[0] for member in joined.result().members] == [leader]


async def test_heartbeats_keep_one_timer_armed_and_not_one_each() -> None:
    bench = Bench()
    (leader,) = await stable_group(bench, 1)
    before = len(bench.clock._timers)
    for _ in range(100):
        bench.clock.advance(0.05)
        bench.heartbeat(leader, 1)
    assert len(bench.clock._timers) <= before


async def test_who_does_not_rejoin_in_the_rebalance_timeout_is_left_behind() -> None:
    bench = Bench()
    leader, follower = await stable_group(bench)
    third = bench.join()
    await turn()
    for _ in range(7):
        bench.clock.advance(9)
        bench.heartbeat(leader, 2)
        bench.heartbeat(follower, 2)
    await turn()
    assert third.result().generation == 3
    assert [member[0] for member in third.result().members] == [third.result().member_id]
    assert bench.heartbeat(leader, 2) == Code.UNKNOWN_MEMBER_ID


async def test_who_never_syncs_is_dropped_although_it_heartbeats() -> None:
    bench = Bench()
    joined = bench.join()
    await turn()
    member = joined.result().member_id
    for _ in range(7):
        bench.clock.advance(9)
        bench.heartbeat(member, 1)
    assert bench.heartbeat(member, 1) == Code.UNKNOWN_MEMBER_ID
    assert bench.groups.describe("g").state == "Empty"


async def test_waiting_followers_are_sent_back_when_the_leader_dies_before_its_plan() -> None:
    bench = Bench()
    leader, follower = await stable_group(bench)
    joins = [bench.join(leader), bench.join(follower)]
    await turn()
    assert joins[1].result().generation == 3
    sync = bench.sync(follower, 3)
    await turn()
    bench.clock.advance(11)
    assert await code_of(sync) == Code.REBALANCE_IN_PROGRESS
    assert bench.heartbeat(leader, 3) == Code.UNKNOWN_MEMBER_ID


async def test_a_stale_generation_is_refused() -> None:
    bench = Bench()
    leader, _ = await stable_group(bench)
    assert bench.heartbeat(leader, 1) == Code.ILLEGAL_GENERATION
    assert await code_of(bench.commit(5, leader, 1)) == Code.ILLEGAL_GENERATION
    assert await code_of(bench.sync(leader, 1)) == Code.ILLEGAL_GENERATION
    assert await bench.commit(5, leader, 2) == [[Code.NONE]]


async def test_commits_are_taken_while_members_join_and_not_before_they_have_the_plan() -> None:
    bench = Bench()
    leader, follower = await stable_group(bench)
    third = bench.join()
    await turn()
    assert await bench.commit(7, follower, 2) == [[Code.NONE]]
    joins = [bench.join(leader), bench.join(follower)]
    await turn()
    assert third.result().generation == joins[0].result().generation == 3
    assert await code_of(bench.commit(8, follower, 3)) == Code.REBALANCE_IN_PROGRESS
    assert await code_of(bench.commit(8, follower, 2)) == Code.ILLEGAL_GENERATION


async def test_a_static_member_returns_under_a_new_id_without_a_rebalance() -> None:
    bench = Bench()
    (old,) = await stable_group(bench, 1, instance_id="i")
    back = bench.join(instance_id="i", protocols=(("range", subscription("orders", owned=b"x")),))
    await turn()
    new = back.result()
    assert new.member_id != old
    assert new.generation == 1
    assert new.leader == old, "clients below version 9 must not assign: the response names another leader"
    assert bench.groups.describe("g").state == "Stable"
    sync = bench.sync(new.member_id, 1, "i")
    await turn()
    assert sync.result().assignment == old.encode()


async def test_a_static_leader_that_can_is_told_to_skip_its_plan() -> None:
    bench = Bench()
    await stable_group(bench, 1, instance_id="i")
    back = bench.join(instance_id="i", may_skip_assignment=True)
    await turn()
    assert back.result().skip_assignment
    assert back.result().leader == back.result().member_id
    assert len(back.result().members) == 1


async def test_the_old_incarnation_of_a_static_member_is_fenced() -> None:
    bench = Bench()
    (old,) = await stable_group(bench, 1, instance_id="i")
    bench.join(instance_id="i")
    await turn()
    assert bench.heartbeat(old, 1, "i") == Code.FENCED_INSTANCE_ID
    assert await code_of(bench.join(old, instance_id="i")) == Code.FENCED_INSTANCE_ID
    assert await code_of(bench.commit(1, old, 1)) == Code.UNKNOWN_MEMBER_ID
    assert bench.groups.leave("g", [(old, "i")]) == [Code.FENCED_INSTANCE_ID]


async def test_a_static_member_that_wants_something_else_makes_a_rebalance() -> None:
    bench = Bench()
    await stable_group(bench, 1, instance_id="i")
    back = bench.join(instance_id="i", protocols=(("range", subscription("orders", "bills")),))
    await turn()
    assert back.result().generation == 2


async def test_leaving_makes_the_others_rebalance_and_an_administrator_may_name_the_instance() -> None:
    bench = Bench()
    (static,) = await stable_group(bench, 1, instance_id="i")
    assert bench.groups.leave("g", [("", "i"), ("nobody", None)]) == [Code.NONE, Code.UNKNOWN_MEMBER_ID]
    assert bench.heartbeat(static, 1, "i") == Code.UNKNOWN_MEMBER_ID
    assert bench.groups.describe("g").state == "Empty"
    leader, follower = await stable_group(bench)
    assert bench.groups.leave("g", [(follower, None)]) == [Code.NONE]
    assert bench.heartbeat(leader, generation_of(bench)) == Code.REBALANCE_IN_PROGRESS


async def test_members_vote_for_a_protocol_that_all_have() -> None:
    bench = Bench()
    one = bench.join(protocols=(("range", b"1"), ("sticky", b"1")))
    await turn()
    two = bench.join(protocols=(("roundrobin", b"2"), ("sticky", b"2")))
    await turn()
    again = bench.join(one.result().member_id, protocols=(("range", b"1"), ("sticky", b"1")))
    await turn()
    assert two.result().protocol_name == "sticky"
    assert again.result().members[0][2] == b"1"
    assert await code_of(bench.join(protocols=(("range", b""),))) == Code.INCONSISTENT_GROUP_PROTOCOL
    assert await code_of(bench.join(protocol_type="connect")) == Code.INCONSISTENT_GROUP_PROTOCOL


async def test_a_lost_join_answer_is_given_again_without_a_rebalance() -> None:
    bench = Bench()
    _, follower = await stable_group(bench)
    again = bench.join(follower)
    await turn()
    assert again.result().generation == 2
    assert bench.groups.describe("g").state == "Stable"


async def test_a_second_join_of_the_same_member_answers_the_first() -> None:
    bench = Bench()
    _, follower = await stable_group(bench)
    bench.join()
    await turn()
    first = bench.join(follower)
    await turn()
    second = bench.join(follower)
    assert await code_of(first) == Code.REBALANCE_IN_PROGRESS
    assert not second.done()
    bench.groups.close()
    assert await code_of(second) == Code.NOT_COORDINATOR


async def test_a_generation_is_durable_before_anybody_hears_of_it() -> None:
    bench = Bench()
    bench.meta.holding = True
    joined = bench.join()
    await turn()
    assert not joined.done()
    bench.meta.land()
    await turn()
    assert joined.result().generation == 1


async def test_members_that_join_while_the_generation_is_written_are_in_it() -> None:
    bench = Bench()
    bench.meta.holding = True
    first, second = bench.join(), bench.join()
    await turn()
    bench.meta.land()
    await turn()
    assert first.result().generation == second.result().generation == 1
    assert len(first.result().members) == 2


async def test_a_generation_is_told_only_if_nothing_written_later_takes_it_back() -> None:
    """The only member leaves while its generation is being written: that the group is empty is written behind it."""
    bench = Bench()
    bench.meta.holding = True
    bench.join()
    await turn()
    (member,) = bench.groups._groups["g"].members
    bench.groups.leave("g", [(member, None)])
    joined = bench.join()
    await turn()
    while bench.meta.held:
        bench.meta.land()
        await turn()
    stored = await bench.meta.get(group_key("g"))
    assert stored is not None
    record = decode_group(stored.value)
    assert (record.epoch, record.emptied_ms) == (joined.result().generation, None)


async def test_a_generation_that_cannot_be_stored_is_not_given_and_the_members_may_try_again() -> None:
    bench = Bench()
    (leader,) = await stable_group(bench, 1)
    bench.meta.holding = True
    joined = bench.join(leader)
    await turn()
    bench.meta.lose()
    assert await code_of(joined) == Code.COORDINATOR_NOT_AVAILABLE
    bench.meta.holding = False
    again = bench.join(leader)
    await turn()
    assert again.result().generation == 2


async def test_generations_go_on_after_a_restart_and_old_members_are_refused() -> None:
    bench = Bench()
    leader, follower = await stable_group(bench)
    assert await bench.commit(5, leader, 2) == [[Code.NONE]]
    await bench.restart()
    assert bench.committed() == 5
    assert await code_of(bench.commit(6, leader, 2)) == Code.UNKNOWN_MEMBER_ID
    assert bench.heartbeat(follower, 2) == Code.UNKNOWN_MEMBER_ID
    joined = bench.join()
    await turn()
    assert joined.result().generation == 3


async def test_the_first_member_waits_for_company_when_told_to() -> None:
    bench = Bench(GroupSettings(initial_rebalance_delay_ms=3_000))
    first, second = bench.join(), bench.join()
    await turn()
    assert not first.done()
    bench.clock.advance(3)
    await turn()
    assert first.result().generation == second.result().generation == 1


@pytest.mark.parametrize("session_ms", [999, 1_800_001])
async def test_session_timeouts_have_bounds(session_ms: int) -> None:
    assert await code_of(Bench().join(session_ms=session_ms)) == Code.INVALID_SESSION_TIMEOUT


async def test_members_and_groups_have_bounds() -> None:
    bench = Bench(GroupSettings(members_max=1, groups_max=1))
    bench.join()
    await turn()
    assert await code_of(bench.join()) == Code.GROUP_MAX_SIZE_REACHED
    assert await code_of(bench.join(group_id="another")) == Code.POLICY_VIOLATION
    assert await code_of(bench.join(group_id="")) == Code.INVALID_GROUP_ID
    assert await code_of(bench.join(group_id="x" * 513)) == Code.INVALID_GROUP_ID


async def test_what_all_members_say_about_themselves_has_a_bound() -> None:
    """Each is kept for as long as its session, which its client chooses: a few small ones would not matter."""
    bench = Bench(GroupSettings(protocols_bytes_max=1000, all_protocols_bytes_max=2000, small_protocols_bytes=100))
    large = (("range", bytes(900)),)
    assert await code_of(bench.join(protocols=(("range", bytes(1000)),))) == Code.INVALID_REQUEST
    first = bench.join(group_id="first", protocols=large)
    await turn()
    bench.join(group_id="second", protocols=large)
    await turn()
    assert await code_of(bench.join(group_id="third", protocols=large)) == Code.GROUP_MAX_SIZE_REACHED
    assert await code_of(bench.beat("a", 0, topics=frozenset({"x" * 900}))) == Code.GROUP_MAX_SIZE_REACHED
    again = bench.join(first.result().member_id, group_id="first", protocols=large)
    small = bench.join(group_id="third")
    await turn()
    assert again.result().generation == 1 and small.result().generation == 1
    bench.groups.leave("first", [(first.result().member_id, None)])
    later = bench.join(group_id="fourth", protocols=large)
    await turn()
    assert later.result().generation == 1


async def test_an_unused_group_gives_its_place_to_a_new_one() -> None:
    bench = Bench(GroupSettings(groups_max=1))
    joined = bench.join()
    await turn()
    bench.groups.leave("g", [(joined.result().member_id, None)])
    other = bench.join(group_id="another")
    await turn()
    assert other.result().generation == 1
    assert [key for key in bench.meta.values if key.startswith("groups/")] == ["groups/another"]


async def test_one_address_makes_no_more_groups_than_its_share() -> None:
    bench = Bench(GroupSettings(groups_max=10, groups_per_peer_max=2))
    for number in range(2):
        joined = bench.join(group_id=f"taken-{number}", client_host="192.0.2.1")
        await turn()
        assert joined.result().generation == 1
    assert await code_of(bench.join(group_id="more", client_host="192.0.2.1")) == Code.POLICY_VIOLATION
    again = bench.join(joined.result().member_id, group_id="taken-1", client_host="192.0.2.1")
    other = bench.join(group_id="others", client_host="192.0.2.2")
    await turn()
    assert again.result().generation == other.result().generation == 1
    assert [each.group_id for each in bench.groups.list()] == ["taken-0", "taken-1", "others"]
    bench.groups.leave("taken-0", [(member, None) for member in bench.groups._groups["taken-0"].members])
    bench.clock.advance(1)
    later = bench.join(group_id="more", client_host="192.0.2.1")
    await turn()
    assert later.result().generation == 1, "an unused group gives its place away"


async def used_and_left(bench: Bench, group_id: str, client_host: str) -> None:
    joined = await bench.join(group_id=group_id, client_host=client_host)
    bench.groups.leave(group_id, [(joined.member_id, None)])


def names(bench: Bench) -> list[str]:
    return [each.group_id for each in bench.groups.list()]


async def test_an_address_at_its_share_drops_no_groups_of_others() -> None:
    bench = Bench(GroupSettings(groups_max=10, groups_per_peer_max=2))
    await used_and_left(bench, "others", "192.0.2.2")
    await used_and_left(bench, "mine", "192.0.2.1")
    for number in range(2):
        await bench.join(group_id=f"taken-{number}", client_host="192.0.2.1")
    assert names(bench) == ["others", "taken-0", "taken-1"]
    assert await code_of(bench.join(group_id="more", client_host="192.0.2.1")) == Code.POLICY_VIOLATION
    assert names(bench) == ["others", "taken-0", "taken-1"]
    assert "groups/others" in bench.meta.values


async def test_a_group_that_another_address_makes_again_counts_for_that_one() -> None:
    bench = Bench(GroupSettings(groups_max=10, groups_per_peer_max=2))
    await used_and_left(bench, "moved", "192.0.2.1")
    await bench.groups.delete("moved")
    await bench.join(group_id="moved", client_host="192.0.2.2")
    for number in range(2):
        await bench.join(group_id=f"taken-{number}", client_host="192.0.2.1")
    await bench.join(group_id="second", client_host="192.0.2.2")
    assert await code_of(bench.join(group_id="third", client_host="192.0.2.2")) == Code.POLICY_VIOLATION


async def test_clients_of_loopback_share_the_whole_bound_unless_a_share_is_set() -> None:
    bench = Bench(GroupSettings(groups_max=4))
    for number in range(4):
        await bench.join(group_id=f"g-{number}", client_host="127.0.0.1" if number % 2 else "::1")
    with pytest.raises(RequestError, match="the broker has 4 groups, the limit"):
        await bench.join(group_id="more", client_host="127.0.0.1")
    bench = Bench(GroupSettings(groups_max=4))
    for number in range(2):
        await bench.join(group_id=f"g-{number}", client_host="192.0.2.1")
    with pytest.raises(RequestError, match="has created 2 groups, the limit per address"):
        await bench.join(group_id="more", client_host="192.0.2.1")


async def test_offsets_of_groups_count_for_the_address_that_made_them() -> None:
    bench = Bench(GroupSettings(groups_per_peer_max=2))
    commits = [TopicCommit("orders", [PartitionCommit(0, 5)])]
    for number in range(2):
        assert await bench.groups.commit(f"g-{number}", "", None, -1, commits, "2001:db8::1") == [[Code.NONE]]
    again = await bench.groups.commit("g-1", "", None, -1, commits, "2001:db8::1")
    assert again == [[Code.NONE]]
    assert await code_of(start(bench.groups.commit("g-2", "", None, -1, commits, "2001:db8::2"))) == (
        Code.POLICY_VIOLATION
    ), "a host has all of its /64"
    assert await bench.groups.commit("g-2", "", None, -1, commits, "2001:db8:0:1::1") == [[Code.NONE]]


async def test_a_group_that_never_had_a_member_or_an_offset_goes_within_two_minutes() -> None:
    """A client asks for a member id and does not come back; its session would last half an hour."""
    bench = Bench()
    await bench.groups.start()
    asked = bench.join(id_required=True, session_ms=1_800_000)
    used = bench.join(group_id="used")
    await turn()
    assert asked.result().error == Code.MEMBER_ID_REQUIRED and len(bench.groups.list()) == 2
    bench.groups.leave("used", [(used.result().member_id, None)])
    for _ in range(12):
        bench.clock.advance(10)
        await turn()
    assert [each.group_id for each in bench.groups.list()] == ["used"]
