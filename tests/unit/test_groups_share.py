"""Share groups: who is in one, which epoch it was told, its seat in the queue, and what else may have its name."""

from __future__ import annotations

import pytest

from millstream.broker.groups.groups import Beat, Join, PartitionCommit, ShareBeat, TopicCommit
from millstream.broker.groups.queue.verbs import Run
from millstream.broker.groups.stream.consumer_member import BeatAnswer
from millstream.core.errors import Code, RequestError
from tests.unit.share_kit import SESSION_SECONDS, Kit, kit
from tests.unit.test_groups_kit import code_of, start, subscription, turn

__all__ = ["kit"]


def partitions(kit: Kit, answer: BeatAnswer) -> dict[str, list[int]] | None:
    if answer.assignment is None:
        return None
    return {kit.broker.groups.topic_name(topic) or "": numbers for topic, numbers in answer.assignment.items()}


async def test_every_member_is_given_every_partition(kit: Kit) -> None:
    for member in ("a", "b", "c"):
        assert partitions(kit, await kit.beat(member, 0)) == {"jobs": [0, 1]}
    assert {member.id for member in kit.group.describe().members} == {"a", "b", "c"}


async def test_epochs_rise_with_every_change_and_members_follow_by_their_heartbeats(kit: Kit) -> None:
    first = await kit.beat("a", 0)
    second = await kit.beat("b", 0)
    assert (first.epoch, second.epoch) == (1, 2)
    followed = await kit.beat("a", 1)
    assert followed.epoch == 2 and followed.assignment is None, "nothing changed for it"
    assert (await kit.beat("a", 1)).epoch == 2, "an answer that got lost is asked for again"
    assert await code_of(kit.beat("a", 0x7FFF)) == Code.FENCED_MEMBER_EPOCH
    await kit.beat("b", -1)
    assert (await kit.beat("a", 2)).epoch == 3
    assert await code_of(kit.beat("a", 1)) == Code.FENCED_MEMBER_EPOCH


async def test_an_epoch_is_durable_before_anybody_is_told(kit: Kit) -> None:
    await kit.beat("a", 0)
    kit.meta.holding = True
    joining = start(kit.beat("b", 0))
    await turn()
    assert not joining.done()
    assert (await kit.beat("a", 1)).epoch == 1
    kit.meta.land()
    assert (await joining).epoch == 2
    assert (await kit.beat("a", 1)).epoch == 2
    lost = start(kit.beat("c", 0))
    await turn()
    kit.meta.lose()
    assert await code_of(lost) == Code.COORDINATOR_NOT_AVAILABLE
    kit.meta.holding = False
    assert (await kit.beat("c", 0)).epoch == 4


async def test_a_slow_write_of_an_epoch_fences_no_member_that_waits_for_it(kit: Kit) -> None:
    kit.meta.holding = True
    joining = start(kit.beat("a", 0))
    await turn()
    kit.clock.advance(2 * SESSION_SECONDS)
    kit.meta.land_all()
    assert (await joining).epoch == 1
    assert [member.id for member in kit.group.describe().members] == ["a"]
    kit.meta.land_all()
    kit.clock.advance(SESSION_SECONDS + 1)
    assert kit.group.describe().members == [], "silent from then on"


async def test_no_epoch_is_given_twice_across_a_restart(kit: Kit) -> None:
    before = await kit.beat("a", 0)
    await kit.restart()
    assert kit.listed() == {"g": ("Share", "Empty", 0)}
    assert await code_of(kit.beat("a", before.epoch)) == Code.UNKNOWN_MEMBER_ID
    assert (await kit.beat("a", 0)).epoch > before.epoch


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
async def test_heartbeats_that_make_no_sense_are_refused(kit: Kit, beat: ShareBeat) -> None:
    assert await code_of(kit.broker.groups.share_heartbeat(beat)) == Code.INVALID_REQUEST
    assert kit.listed() == {"g": ("Share", "Empty", 0)}


async def test_a_member_learns_of_topics_that_come_grow_and_go(kit: Kit) -> None:
    answer = await kit.beat("a", 0, "jobs", "later")
    assert partitions(kit, answer) == {"jobs": [0, 1]}
    assert (await kit.beat("a", answer.epoch)).assignment is None
    await kit.broker.topics.create("later", 1, {})
    answer = await kit.beat("a", answer.epoch)
    assert partitions(kit, answer) == {"jobs": [0, 1], "later": [0]}
    await kit.broker.topics.grow("later", 3)
    grown = await kit.beat("a", answer.epoch)
    assert partitions(kit, grown) == {"jobs": [0, 1], "later": [0, 1, 2]} and grown.epoch > answer.epoch
    await kit.broker.delete_topic("later")
    assert partitions(kit, await kit.beat("a", grown.epoch)) == {"jobs": [0, 1]}
    await kit.broker.topics.create("unrelated", 1, {})
    assert (await kit.beat("a", grown.epoch + 1)).epoch == grown.epoch + 1


async def test_a_member_changes_what_it_reads(kit: Kit) -> None:
    await kit.broker.topics.create("other", 1, {})
    answer = await kit.beat("a", 0)
    changed = await kit.beat("a", answer.epoch, "other")
    assert partitions(kit, changed) == {"other": [0]} and changed.epoch > answer.epoch
    assert partitions(kit, await kit.beat("a", changed.epoch, "other")) == {"other": [0]}, "it said what it reads"


async def test_a_silent_member_goes_and_what_it_had_leased_is_available(kit: Kit) -> None:
    settings = {"share.record.lock.duration.ms": "3600000", "share.auto.offset.reset": "earliest"}
    await kit.broker.queues.configure("g", settings)
    await kit.put(b"1")
    silent, living = await kit.beat("silent", 0), await kit.beat("living", 0)
    assert await kit.lease("silent") == [Run(0, 0, 1)]
    assert silent.heartbeat_interval_ms == 5000
    for _ in range(SESSION_SECONDS - 5):
        kit.clock.advance(1)
        await kit.beat("living", living.epoch)
    assert await kit.lease("living") == []
    kit.clock.advance(5.01)
    await turn()
    assert kit.listed() == {"g": ("Share", "Stable", 1)}
    assert await kit.lease("living") == [Run(0, 0, 2)]


async def test_settings_of_the_group_decide_how_long_silence_may_last(kit: Kit) -> None:
    settings = {"share.session.timeout.ms": "2000", "share.heartbeat.interval.ms": "300"}
    await kit.broker.queues.configure("g", settings)
    assert (await kit.beat("a", 0)).heartbeat_interval_ms == 300
    kit.clock.advance(1.9)
    assert kit.group.members
    kit.clock.advance(0.2)
    assert not kit.group.members


async def test_who_leaves_keeps_its_seat_until_its_session_ends(kit: Kit) -> None:
    await kit.put(b"1")
    await kit.beat("a", 0)
    assert await kit.lease("a") == [Run(0, 0, 1)]
    await kit.beat("a", -1)
    partition = await kit.partition()
    assert partition.figures().leased == 1
    kit.group.leave_seat("a")
    assert partition.figures().leased == 0 and partition.figures().available == 1


async def test_a_fresh_seat_gives_up_what_the_old_one_had(kit: Kit) -> None:
    await kit.put(b"1")
    await kit.beat("a", 0)
    old = kit.group.take_seat("a")
    new = kit.group.take_seat("a")
    assert kit.group.has_seat("a", new) and not kit.group.has_seat("a", old)
    kit.group.leave_seat("a", old)
    assert kit.group.has_seat("a", new), "only its own seat is left"


# One id, one kind


def join(group_id: str) -> Join:
    protocols = (("range", subscription("jobs")),)
    return Join(group_id, "", None, "client", "localhost", 10_000, 60_000, "consumer", protocols)


async def test_a_share_group_is_no_place_for_other_members_or_offsets(kit: Kit) -> None:
    groups = kit.broker.groups
    for _ in range(2):
        assert await code_of(groups.join(join("g"))) == Code.INCONSISTENT_GROUP_PROTOCOL
        beat = Beat("g", "m", 0, rebalance_ms=1000, topics=frozenset({"jobs"}))
        assert await code_of(groups.consumer_heartbeat(beat)) == Code.GROUP_ID_NOT_FOUND
        commits = [TopicCommit("jobs", [PartitionCommit(0, 1)])]
        assert await code_of(groups.commit("g", "", None, -1, commits)) == Code.GROUP_ID_NOT_FOUND
        assert await code_of(groups.delete_offsets("g", [("jobs", [0])])) == Code.GROUP_ID_NOT_FOUND
        with pytest.raises(RequestError):
            groups.fetch("g", None)
        await kit.beat("a", 0)
    assert kit.listed() == {"g": ("Share", "Stable", 1)}


async def test_a_group_with_offsets_or_members_does_not_become_a_share_group(kit: Kit) -> None:
    groups = kit.broker.groups
    await groups.commit("readers", "", None, -1, [TopicCommit("jobs", [PartitionCommit(0, 1)])])
    beat = ShareBeat("readers", "a", 0, topics=frozenset({"jobs"}))
    assert await code_of(groups.share_heartbeat(beat)) == Code.GROUP_ID_NOT_FOUND
    assert await code_of(kit.broker.queues.configure("readers", {})) == Code.INCONSISTENT_GROUP_PROTOCOL
    await groups.delete_offsets("readers", [("jobs", [0])])
    assert (await groups.share_heartbeat(beat)).epoch > 0
    assert kit.listed()["readers"] == ("Share", "Stable", 1)


async def test_a_queue_of_another_door_is_listed_described_and_deleted_as_a_share_group(kit: Kit) -> None:
    queue = kit.broker.queues.open("flow")
    worker = queue.join("subscriber")
    kit.broker.queues.open("private", durable=False)
    assert kit.listed() == {"g": ("Share", "Empty", 0), "flow": ("Share", "Empty", 0)}
    assert kit.broker.groups.share("flow").describe().members == []
    assert await code_of(kit.broker.groups.delete("flow")) == Code.NON_EMPTY_GROUP
    queue.leave(worker)
    await kit.broker.groups.delete("flow")
    assert "flow" not in kit.listed() and kit.broker.queues.get("flow") is None


async def test_deleting_a_group_deletes_what_its_queue_knew(kit: Kit) -> None:
    await kit.put(b"1")
    await kit.beat("a", 0)
    assert await code_of(kit.broker.groups.delete("g")) == Code.NON_EMPTY_GROUP
    assert await kit.lease("a") == [Run(0, 0, 1)]
    await kit.beat("a", -1)
    assert await code_of(kit.broker.groups.delete("g")) == Code.NON_EMPTY_GROUP, "its session is still open"
    kit.group.leave_seat("a")
    await kit.broker.groups.delete("g")
    assert kit.listed() == {}
    await kit.restart()
    assert kit.listed() == {}
    await kit.broker.queues.configure("g", {"share.auto.offset.reset": "earliest"})
    await kit.beat("a", 0)
    assert await kit.lease("a") == [Run(0, 0, 1)], "it begins anew"


async def test_a_share_group_outlives_the_retention_of_offsets(kit: Kit) -> None:
    await kit.beat("a", 0)
    await kit.beat("a", -1)
    for _ in range(9 * 24):
        kit.clock.advance(3600)
        await turn()
    assert kit.listed() == {"g": ("Share", "Empty", 0)}
    await kit.restart()
    assert (await kit.beat("a", 0)).epoch == 3


async def test_listing_by_type_and_state(kit: Kit) -> None:
    await kit.broker.groups.commit("readers", "", None, -1, [TopicCommit("jobs", [PartitionCommit(0, 1)])])
    await kit.beat("a", 0)
    names = [each.group_id for each in kit.broker.groups.list(types=["share"])]
    assert names == ["g"] and [each.group_id for each in kit.broker.groups.list(states=["Stable"])] == ["g"]
