"""Share groups: who is in one, which epoch it was told, its seat in the queue, and what else may have its name."""

from __future__ import annotations

import pytest

from millstream.broker.groups.groups import Beat, Join, PartitionCommit, ShareBeat, TopicCommit
from millstream.broker.groups.queue.verbs import Run
from millstream.broker.groups.stream.consumer_member import BeatAnswer
from millstream.core.errors import Code, RequestError
from tests.unit.groups_kit import code_of, start, subscription, turn
from tests.unit.share_kit import SESSION_SECONDS, Kit


def partitions(shares: Kit, answer: BeatAnswer) -> dict[str, list[int]] | None:
    if answer.assignment is None:
        return None
    return {shares.broker.groups.topic_name(topic) or "": numbers for topic, numbers in answer.assignment.items()}


async def test_every_member_is_given_every_partition(shares: Kit) -> None:
    for member in ("a", "b", "c"):
        assert partitions(shares, await shares.beat(member, 0)) == {"jobs": [0, 1]}
    assert {member.id for member in shares.group.describe().members} == {"a", "b", "c"}


async def test_epochs_rise_with_every_change_and_members_follow_by_their_heartbeats(shares: Kit) -> None:
    first = await shares.beat("a", 0)
    second = await shares.beat("b", 0)
    assert (first.epoch, second.epoch) == (1, 2)
    followed = await shares.beat("a", 1)
    assert followed.epoch == 2 and followed.assignment is None, "nothing changed for it"
    assert (await shares.beat("a", 1)).epoch == 2, "an answer that got lost is asked for again"
    assert await code_of(shares.beat("a", 0x7FFF)) == Code.FENCED_MEMBER_EPOCH
    await shares.beat("b", -1)
    assert (await shares.beat("a", 2)).epoch == 3
    assert await code_of(shares.beat("a", 1)) == Code.FENCED_MEMBER_EPOCH


async def test_an_epoch_is_durable_before_anybody_is_told(shares: Kit) -> None:
    await shares.beat("a", 0)
    shares.meta.holding = True
    joining = start(shares.beat("b", 0))
    await turn()
    assert not joining.done()
    assert (await shares.beat("a", 1)).epoch == 1
    shares.meta.land()
    assert (await joining).epoch == 2
    assert (await shares.beat("a", 1)).epoch == 2
    lost = start(shares.beat("c", 0))
    await turn()
    shares.meta.lose()
    assert await code_of(lost) == Code.COORDINATOR_NOT_AVAILABLE
    shares.meta.holding = False
    assert (await shares.beat("c", 0)).epoch == 4


async def test_a_slow_write_of_an_epoch_fences_no_member_that_waits_for_it(shares: Kit) -> None:
    shares.meta.holding = True
    joining = start(shares.beat("a", 0))
    await turn()
    shares.clock.advance(2 * SESSION_SECONDS)
    shares.meta.land_all()
    assert (await joining).epoch == 1
    assert [member.id for member in shares.group.describe().members] == ["a"]
    shares.meta.land_all()
    shares.clock.advance(SESSION_SECONDS + 1)
    assert shares.group.describe().members == [], "silent from then on"


async def test_no_epoch_is_given_twice_across_a_restart(shares: Kit) -> None:
    before = await shares.beat("a", 0)
    await shares.restart()
    assert shares.listed() == {"g": ("Share", "Empty", 0)}
    assert await code_of(shares.beat("a", before.epoch)) == Code.UNKNOWN_MEMBER_ID
    assert (await shares.beat("a", 0)).epoch > before.epoch


@pytest.mark.parametrize(
    "beat",
    [
        ShareBeat("g", "", 0, topics=frozenset({"jobs"})),
        ShareBeat("g", "x" * 600, 0, topics=frozenset({"jobs"})),
        ShareBeat("g", "a", -2),
        ShareBeat("g", "a", 0),
        ShareBeat("g", "a", 0, topics=frozenset()),
        ShareBeat("g", "a", 0, topics=frozenset(f"t{number}" for number in range(10_001))),
    ],
)
async def test_heartbeats_that_make_no_sense_are_refused(shares: Kit, beat: ShareBeat) -> None:
    assert await code_of(shares.broker.groups.share_heartbeat(beat)) == Code.INVALID_REQUEST
    assert shares.listed() == {"g": ("Share", "Empty", 0)}


async def test_a_member_learns_of_topics_that_come_grow_and_go(shares: Kit) -> None:
    answer = await shares.beat("a", 0, "jobs", "later")
    assert partitions(shares, answer) == {"jobs": [0, 1]}
    assert (await shares.beat("a", answer.epoch)).assignment is None
    await shares.broker.topics.create("later", 1, {})
    answer = await shares.beat("a", answer.epoch)
    assert partitions(shares, answer) == {"jobs": [0, 1], "later": [0]}
    await shares.broker.topics.grow("later", 3)
    grown = await shares.beat("a", answer.epoch)
    assert partitions(shares, grown) == {"jobs": [0, 1], "later": [0, 1, 2]} and grown.epoch > answer.epoch
    await shares.broker.delete_topic("later")
    assert partitions(shares, await shares.beat("a", grown.epoch)) == {"jobs": [0, 1]}
    await shares.broker.topics.create("unrelated", 1, {})
    assert (await shares.beat("a", grown.epoch + 1)).epoch == grown.epoch + 1


async def test_a_member_changes_what_it_reads(shares: Kit) -> None:
    await shares.broker.topics.create("other", 1, {})
    answer = await shares.beat("a", 0)
    changed = await shares.beat("a", answer.epoch, "other")
    assert partitions(shares, changed) == {"other": [0]} and changed.epoch > answer.epoch
    assert partitions(shares, await shares.beat("a", changed.epoch, "other")) == {"other": [0]}, "it said what it reads"


async def test_a_silent_member_goes_and_what_it_had_leased_is_available(shares: Kit) -> None:
    settings = {"share.record.lock.duration.ms": "3600000", "share.auto.offset.reset": "earliest"}
    await shares.broker.queues.configure("g", settings)
    await shares.put(b"1")
    silent, living = await shares.beat("silent", 0), await shares.beat("living", 0)
    assert await shares.lease("silent") == [Run(0, 0, 1)]
    assert silent.heartbeat_interval_ms == 5000
    for _ in range(SESSION_SECONDS - 5):
        shares.clock.advance(1)
        await shares.beat("living", living.epoch)
    assert await shares.lease("living") == []
    shares.clock.advance(5.01)
    await turn()
    assert shares.listed() == {"g": ("Share", "Stable", 1)}
    assert await shares.lease("living") == [Run(0, 0, 2)]


async def test_settings_of_the_group_decide_how_long_silence_may_last(shares: Kit) -> None:
    settings = {"share.session.timeout.ms": "2000", "share.heartbeat.interval.ms": "300"}
    await shares.broker.queues.configure("g", settings)
    assert (await shares.beat("a", 0)).heartbeat_interval_ms == 300
    shares.clock.advance(1.9)
    assert shares.group.members
    shares.clock.advance(0.2)
    assert not shares.group.members


async def test_who_leaves_keeps_its_seat_until_its_session_ends(shares: Kit) -> None:
    await shares.put(b"1")
    await shares.beat("a", 0)
    assert await shares.lease("a") == [Run(0, 0, 1)]
    await shares.beat("a", -1)
    partition = await shares.partition()
    assert partition.figures().leased == 1
    shares.group.leave_seat("a")
    assert partition.figures().leased == 0 and partition.figures().available == 1


async def test_a_fresh_seat_gives_up_what_the_old_one_had(shares: Kit) -> None:
    await shares.put(b"1")
    await shares.beat("a", 0)
    old = shares.group.take_seat("a")
    new = shares.group.take_seat("a")
    assert shares.group.has_seat("a", new) and not shares.group.has_seat("a", old)
    shares.group.leave_seat("a", old)
    assert shares.group.has_seat("a", new), "only its own seat is left"


# One id, one kind


def join(group_id: str) -> Join:
    protocols = (("range", subscription("jobs")),)
    return Join(group_id, "", None, "client", "localhost", 10_000, 60_000, "consumer", protocols)


async def test_a_share_group_is_no_place_for_other_members_or_offsets(shares: Kit) -> None:
    groups = shares.broker.groups
    for _ in range(2):
        assert await code_of(groups.join(join("g"))) == Code.INCONSISTENT_GROUP_PROTOCOL
        beat = Beat("g", "m", 0, rebalance_ms=1000, topics=frozenset({"jobs"}))
        assert await code_of(groups.consumer_heartbeat(beat)) == Code.GROUP_ID_NOT_FOUND
        commits = [TopicCommit("jobs", [PartitionCommit(0, 1)])]
        assert await code_of(groups.commit("g", "", None, -1, commits)) == Code.GROUP_ID_NOT_FOUND
        assert await code_of(groups.delete_offsets("g", [("jobs", [0])])) == Code.GROUP_ID_NOT_FOUND
        with pytest.raises(RequestError):
            groups.fetch("g", None)
        await shares.beat("a", 0)
    assert shares.listed() == {"g": ("Share", "Stable", 1)}


async def test_a_group_with_offsets_or_members_does_not_become_a_share_group(shares: Kit) -> None:
    groups = shares.broker.groups
    await groups.commit("readers", "", None, -1, [TopicCommit("jobs", [PartitionCommit(0, 1)])])
    beat = ShareBeat("readers", "a", 0, topics=frozenset({"jobs"}))
    assert await code_of(groups.share_heartbeat(beat)) == Code.GROUP_ID_NOT_FOUND
    assert await code_of(shares.broker.queues.configure("readers", {})) == Code.INCONSISTENT_GROUP_PROTOCOL
    await groups.delete_offsets("readers", [("jobs", [0])])
    assert (await groups.share_heartbeat(beat)).epoch > 0
    assert shares.listed()["readers"] == ("Share", "Stable", 1)


async def test_a_queue_of_another_door_is_listed_described_and_deleted_as_a_share_group(shares: Kit) -> None:
    queue = shares.broker.queues.open("flow")
    worker = queue.join("subscriber")
    shares.broker.queues.open("private", durable=False)
    assert shares.listed() == {"g": ("Share", "Empty", 0), "flow": ("Share", "Empty", 0)}
    assert shares.broker.groups.share("flow").describe().members == []
    assert await code_of(shares.broker.groups.delete("flow")) == Code.NON_EMPTY_GROUP
    queue.leave(worker)
    await shares.broker.groups.delete("flow")
    assert "flow" not in shares.listed() and shares.broker.queues.get("flow") is None


async def test_deleting_a_group_deletes_what_its_queue_knew(shares: Kit) -> None:
    await shares.put(b"1")
    await shares.beat("a", 0)
    assert await code_of(shares.broker.groups.delete("g")) == Code.NON_EMPTY_GROUP
    assert await shares.lease("a") == [Run(0, 0, 1)]
    await shares.beat("a", -1)
    assert await code_of(shares.broker.groups.delete("g")) == Code.NON_EMPTY_GROUP, "its session is still open"
    shares.group.leave_seat("a")
    await shares.broker.groups.delete("g")
    assert shares.listed() == {}
    await shares.restart()
    assert shares.listed() == {}
    await shares.broker.queues.configure("g", {"share.auto.offset.reset": "earliest"})
    await shares.beat("a", 0)
    assert await shares.lease("a") == [Run(0, 0, 1)], "it starts over"


async def test_a_share_group_outlives_the_retention_of_offsets(shares: Kit) -> None:
    await shares.beat("a", 0)
    await shares.beat("a", -1)
    for _ in range(9 * 24):
        shares.clock.advance(3600)
        await turn()
    assert shares.listed() == {"g": ("Share", "Empty", 0)}
    await shares.restart()
    assert (await shares.beat("a", 0)).epoch == 3


async def test_listing_by_type_and_state(shares: Kit) -> None:
    await shares.broker.groups.commit("readers", "", None, -1, [TopicCommit("jobs", [PartitionCommit(0, 1)])])
    await shares.beat("a", 0)
    names = [each.group_id for each in shares.broker.groups.list(types=["share"])]
    assert names == ["g"] and [each.group_id for each in shares.broker.groups.list(states=["Stable"])] == ["g"]
