from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence

import pytest

from millstream.broker.groups import groups
from millstream.broker.groups.groups import Groups, GroupSettings, PartitionCommit, TopicCommit
from millstream.broker.groups.record import group_key, group_of, offset_key, offset_of
from millstream.broker.groups.stream import offsets
from millstream.broker.groups.stream.offsets import Committed, decode, encode
from millstream.cluster.base import Solo
from millstream.core import metrics
from millstream.core.errors import Code, RequestError
from millstream.stores.base import Check, Put
from millstream.testing.clock import VirtualClock
from tests.unit.groups_kit import Bench, FakeTopics, HeldMeta, code_of, stable_group, start, turn

DAY = 24 * 3600


async def test_a_commit_is_answered_and_seen_when_it_is_durable_and_not_before() -> None:
    bench = Bench()
    bench.meta.holding = True
    commit = bench.commit(42)
    await turn()
    assert not commit.done()
    assert bench.committed() is None
    bench.meta.land()
    assert await commit == [[Code.NONE]]
    assert bench.committed() == 42


async def test_a_commit_that_cannot_be_stored_is_refused_and_not_seen() -> None:
    bench = Bench()
    bench.meta.holding = True
    commit = bench.commit(42)
    await turn()
    bench.meta.lose()
    assert await code_of(commit) == Code.COORDINATOR_NOT_AVAILABLE
    assert bench.committed() is None


async def test_commits_that_wait_for_the_store_leave_together_and_the_last_one_counts() -> None:
    bench = Bench()
    bench.meta.holding = True
    commits = [bench.commit(offset) for offset in (1, 2, 3)]
    await turn()
    bench.meta.land()
    await turn()
    assert [commit.done() for commit in commits] == [True, False, False]
    [(operations, _)] = bench.meta.held
    assert len(operations) == 1
    bench.meta.land()
    await turn()
    assert bench.committed() == 3


async def test_a_member_that_loses_its_place_while_its_commit_waits_is_refused() -> None:
    bench = Bench()
    (leader,) = await stable_group(bench, 1)
    bench.meta.holding = True
    other = bench.commit(1, group="other")
    await turn()
    late = bench.commit(2, leader, 1)
    await turn()
    bench.groups.leave("g", [(leader, None)])
    bench.meta.holding = False
    bench.meta.land()
    assert await other == [[Code.NONE]]
    assert await code_of(late) == Code.UNKNOWN_MEMBER_ID
    assert bench.committed() is None


async def test_an_expiry_beside_a_commit_does_not_delete_it() -> None:
    bench = Bench()
    await bench.groups.start()
    await bench.commit(1)
    bench.clock.advance(7 * DAY - 300)
    bench.meta.holding = True
    first = bench.commit(1, group="other")
    await turn()
    second = bench.commit(2)
    await turn()
    bench.clock.advance(900)
    bench.meta.holding = False
    bench.meta.land()
    assert [await first, await second] == [[[Code.NONE]], [[Code.NONE]]]
    assert bench.committed() == 2
    await bench.restart()
    assert bench.committed() == 2


async def test_one_request_is_one_transaction_and_bad_partitions_do_not_spoil_good_ones() -> None:
    bench = Bench()
    bench.meta.holding = True
    commits = [
        TopicCommit("orders", [PartitionCommit(0, 1), PartitionCommit(3, 2, 5, "note"), PartitionCommit(4, 3)]),
        TopicCommit("nowhere", [PartitionCommit(0, 1)]),
        TopicCommit(uuid.uuid4(), [PartitionCommit(0, 1)]),
        TopicCommit("orders", [PartitionCommit(1, 1, -1, "x" * 4097)]),
    ]
    task = start(bench.groups.commit("g", "", None, -1, commits))
    await turn()
    assert len(bench.meta.held) == 1
    bench.meta.land()
    assert await task == [
        [Code.NONE, Code.NONE, Code.UNKNOWN_TOPIC_OR_PARTITION],
        [Code.UNKNOWN_TOPIC_OR_PARTITION],
        [Code.UNKNOWN_TOPIC_ID],
        [Code.OFFSET_METADATA_TOO_LARGE],
    ]
    [fetched] = bench.groups.fetch("g", None)
    assert [
        (number, each.offset, each.leader_epoch, each.metadata) for number, each, _ in fetched.partitions if each
    ] == [
        (0, 1, -1, ""),
        (3, 2, 5, "note"),
    ]


async def test_offsets_survive_a_restart_under_any_group_id() -> None:
    bench = Bench()
    names = ["g", "", "a/b", "a%2Fb", "ü \n", "groups/"]
    for offset, name in enumerate(names):
        assert await bench.commit(offset, group=name) == [[Code.NONE]]
    await bench.restart()
    assert [bench.committed(name) for name in names] == list(range(len(names)))
    assert sorted(bench.groups.committed()) == sorted((name, "orders", 0, at) for at, name in enumerate(names))


def test_keys_and_values_can_be_read_back() -> None:
    for group in ("g", "a/b", "%", "/"):
        assert offset_of(offset_key(group, "orders", 7)) == (group, "orders", 7)
        assert group_of(group_key(group)) == group
    committed = Committed(5, 2, "ü", 1_700_000_000_000, uuid.uuid4())
    assert decode(encode(committed)) == committed


async def test_without_a_member_id_only_an_empty_group_may_be_committed_to() -> None:
    bench = Bench()
    assert await bench.commit(1) == [[Code.NONE]]
    assert await code_of(bench.commit(1, "somebody", 3, group="unknown")) == Code.ILLEGAL_GENERATION
    (leader,) = await stable_group(bench, 1)
    assert await code_of(bench.commit(2)) == Code.UNKNOWN_MEMBER_ID
    bench.groups.leave("g", [(leader, None)])
    assert await bench.commit(2) == [[Code.NONE]]


async def test_whoever_assigns_partitions_to_itself_may_say_who_it_is() -> None:
    """librdkafka names its instance, and with `group.protocol=consumer` a member id, though it never joins."""
    bench = Bench()
    assert await bench.commit(1, "somebody", group="new") == [[Code.NONE]]
    assert await bench.commit(2, instance_id="i") == [[Code.NONE]]
    (leader,) = await stable_group(bench, 1)
    assert await code_of(bench.commit(3, "somebody")) == Code.UNKNOWN_MEMBER_ID
    assert await code_of(bench.commit(3, instance_id="i")) == Code.UNKNOWN_MEMBER_ID
    assert await code_of(bench.commit(3, leader)) == Code.ILLEGAL_GENERATION
    bench.groups.leave("g", [(leader, None)])
    assert await code_of(bench.commit(3, leader, 1)) == Code.UNKNOWN_MEMBER_ID
    assert await bench.commit(3, "somebody") == [[Code.NONE]]
    await bench.beat("a", 0)
    assert await code_of(bench.commit(4, "somebody", instance_id="i")) == Code.UNKNOWN_MEMBER_ID
    await bench.beat("a", -1)
    assert await bench.commit(4, "somebody", instance_id="i") == [[Code.NONE]]


async def test_offsets_go_with_their_topic_and_a_new_topic_of_that_name_starts_without() -> None:
    bench = Bench(orders=4, bills=1)
    await bench.commit(5)
    await bench.commit(6, topic="bills")
    bench.topics.set("orders", 0)
    assert [fetched.topic for fetched in bench.groups.fetch("g", None)] == ["bills"]
    bench.topics.set("orders", 1)
    assert bench.committed() is None
    assert [key for key in bench.meta.values if key.startswith("offsets/")] == ["offsets/g/bills/0"]


async def test_offsets_of_a_topic_that_went_while_the_broker_was_down_are_dropped_at_the_start() -> None:
    bench = Bench()
    await bench.commit(5)
    bench.groups.close()
    bench.topics.set("orders", 0)
    bench.topics.set("orders", 4)
    await bench.restart()
    assert bench.committed() is None


async def test_offsets_may_be_deleted_unless_a_member_subscribes_to_the_topic() -> None:
    bench = Bench(orders=4, bills=1)
    assert await code_of(bench.groups.delete_offsets("g", [("orders", [0])])) == Code.GROUP_ID_NOT_FOUND
    await bench.commit(1)
    await bench.commit(2, topic="bills")
    (leader,) = await stable_group(bench, 1)
    codes = await bench.groups.delete_offsets("g", [("orders", [0]), ("bills", [0]), ("nowhere", [0])])
    assert codes == [[Code.GROUP_SUBSCRIBED_TO_TOPIC], [Code.NONE], [Code.UNKNOWN_TOPIC_OR_PARTITION]]
    assert (bench.committed(), bench.committed(topic="bills")) == (1, None)
    bench.groups.leave("g", [(leader, None)])
    assert await bench.groups.delete_offsets("g", [("orders", [0, 1])]) == [[Code.NONE, Code.NONE]]
    assert bench.committed() is None


async def test_a_group_is_deleted_with_its_offsets_when_nobody_is_in_it() -> None:
    bench = Bench()
    assert await code_of(bench.groups.delete("g")) == Code.GROUP_ID_NOT_FOUND
    await bench.commit(1)
    (leader,) = await stable_group(bench, 1)
    assert await code_of(bench.groups.delete("g")) == Code.NON_EMPTY_GROUP
    bench.groups.leave("g", [(leader, None)])
    await bench.groups.delete("g")
    assert bench.groups.list() == []
    assert bench.meta.values == {}


async def test_metrics_collect_offsets_in_turns_while_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "COMMITTED_A_TURN", 4)
    bench = Bench(orders=10)
    for group in ("a", "b"):
        commits = [TopicCommit("orders", [PartitionCommit(number, 1) for number in range(10)])]
        await bench.groups.commit(group, "", None, -1, commits)
    scrape = metrics.Scrape(metrics.Metrics(), tuple, bench.groups.committed, tuple)
    gathering = start(scrape.gather())
    await asyncio.sleep(0)
    assert not gathering.done()
    await bench.groups.delete("b")
    await bench.commit(5, group="c")
    found = await gathering
    assert [each.group for each in found if each.group != "b"] == ["a"] * 10
    assert scrape.snapshot(found).committed == found


class TestManyOffsets:
    """Are deleted in parts, with other writes in between."""

    @pytest.fixture
    async def bench(self, monkeypatch: pytest.MonkeyPatch) -> Bench:
        """30 offsets of the topic `orders` in three groups, and one of `others` in each."""
        monkeypatch.setattr(offsets, "REMOVED_A_TURN", 4)
        monkeypatch.setattr(groups, "REMOVED_A_TURN", 4)
        bench = Bench(orders=10, others=1)
        await bench.groups.start()
        for group in ("a", "b", "c"):
            commits = [
                TopicCommit("orders", [PartitionCommit(number, 1) for number in range(10)]),
                TopicCommit("others", [PartitionCommit(0, 1)]),
            ]
            await bench.groups.commit(group, "", None, -1, commits)
        bench.meta.holding = True
        return bench

    async def parts(self, bench: Bench) -> list[int]:
        """The sizes of the transactions, each of which lands in a turn of its own."""
        sizes = []
        while bench.meta.held:
            sizes.append(len(bench.meta.held[0][0]))
            bench.meta.land()
            for _ in range(5):
                await turn()
        return sizes

    def left(self, bench: Bench) -> set[tuple[str, str]]:
        return {(group, topic) for group, topic, _, _ in bench.groups.committed()}

    async def test_of_a_deleted_topic(self, bench: Bench) -> None:
        in_flight = bench.commit(7, group="a")
        await turn()
        bench.topics.set("orders", 0)
        sizes = await self.parts(bench)
        assert (await in_flight) == [[Code.NONE]]
        assert max(sizes) <= 4 and sum(sizes) == 31
        assert self.left(bench) == {("a", "others"), ("b", "others"), ("c", "others")}

    async def test_not_those_of_a_new_topic_of_that_name(self, bench: Bench) -> None:
        bench.topics.set("orders", 0)
        await turn()
        bench.topics.set("orders", 10)
        fresh = bench.commit(7, group="c")
        sizes = await self.parts(bench)
        assert (await fresh) == [[Code.NONE]] and len(sizes) > 7
        assert [offset for group, topic, _, offset in bench.groups.committed() if topic == "orders"] == [7]

    async def test_of_a_deleted_group(self, bench: Bench) -> None:
        deleted = start(bench.groups.delete("a"))
        await turn()
        sizes = await self.parts(bench)
        await deleted
        assert max(sizes) <= 4 and sum(sizes) >= 11
        assert self.left(bench) == {(group, topic) for group in ("b", "c") for topic in ("orders", "others")}

    async def test_not_those_of_a_group_that_a_member_joins_meanwhile(self, bench: Bench) -> None:
        deleted = start(bench.groups.delete("a"))
        await turn()
        bench.join(group_id="a", id_required=False)
        await turn()
        await self.parts(bench)
        assert await code_of(deleted) == Code.NON_EMPTY_GROUP
        assert ("a", "orders") in self.left(bench)

    async def test_of_expired_ones(self, bench: Bench) -> None:
        bench.clock.advance(7 * DAY + 900)
        sizes = await self.parts(bench)
        assert max(sizes) <= 4 and sum(sizes) >= 33
        assert self.left(bench) == set() and bench.groups.list() == []


async def test_offsets_of_an_empty_group_expire_a_week_after_it_became_empty() -> None:
    bench = Bench()
    await bench.groups.start()
    (leader,) = await stable_group(bench, 1)
    await bench.commit(1, leader, 1)
    bench.groups.leave("g", [(leader, None)])
    bench.clock.advance(6 * DAY)
    assert bench.committed() == 1
    await bench.restart()
    bench.clock.advance(2 * DAY)
    assert bench.committed() is None
    assert bench.groups.list() == []
    assert bench.meta.values == {}


async def test_offsets_of_a_group_with_members_never_expire() -> None:
    bench = Bench(GroupSettings(offsets_retention_ms=60_000, offsets_check_ms=1_000))
    await bench.groups.start()
    (leader,) = await stable_group(bench, 1)
    await bench.commit(1, leader, 1)
    for _ in range(20):
        bench.clock.advance(9)
        bench.groups.heartbeat("g", leader, None, 1)
    assert bench.committed() == 1


async def test_offsets_that_were_committed_without_members_expire_a_week_after_their_commit() -> None:
    bench = Bench()
    await bench.groups.start()
    await bench.commit(1)
    bench.clock.advance(7 * DAY - 60)
    assert bench.committed() == 1
    bench.clock.advance(900)
    assert bench.committed() is None
    assert bench.meta.values == {}


@pytest.mark.parametrize(("states", "types", "found"), [((), (), 2), (("empty",), (), 1), ((), ("Consumer",), 0)])
async def test_groups_are_listed_by_state_and_type(states: tuple[str], types: tuple[str], found: int) -> None:
    bench = Bench()
    await bench.commit(1, group="simple")
    await stable_group(bench, 1)
    assert len(bench.groups.list(states, types)) == found


class Elsewhere(Solo):
    """A cluster in which another broker coordinates all groups except some."""

    def __init__(self, *own: str) -> None:
        super().__init__(1)
        self.own = set(own)
        self.fences = 0

    def check(self, group_id: str) -> None:
        if group_id not in self.own:
            raise RequestError(Code.NOT_COORDINATOR)

    def guards(self) -> Sequence[Check]:
        return (Check("leases/1", 0),)

    def fenced(self) -> None:
        self.fences += 1


class TestGroupsThatAreElsewhere:
    @pytest.fixture
    def cluster(self) -> Elsewhere:
        return Elsewhere("mine")

    @pytest.fixture
    def groups(self, cluster: Elsewhere) -> Groups:
        self.meta = HeldMeta()
        return Groups(self.meta, VirtualClock(), FakeTopics(orders=4), cluster=cluster)

    async def commit(self, groups: Groups, group: str, offset: int) -> Code:
        try:
            commits = [TopicCommit("orders", [PartitionCommit(0, offset)])]
            return (await groups.commit(group, "", None, -1, commits))[0][0]
        except RequestError as error:
            return error.code

    async def test_every_request_for_them_is_refused(self, groups: Groups) -> None:
        assert await self.commit(groups, "theirs", 1) == Code.NOT_COORDINATOR
        asked: list[Callable[[], object]] = [
            lambda: groups.fetch("theirs", None),
            lambda: groups.heartbeat("theirs", "m", None, 1),
            lambda: groups.leave("theirs", [("m", None)]),
            lambda: groups.describe("theirs"),
            lambda: groups.consumer_describe("theirs"),
        ]
        for ask in asked:
            with pytest.raises(RequestError) as caught:
                ask()
            assert caught.value.code == Code.NOT_COORDINATOR
        for work in (groups.delete("theirs"), groups.delete_offsets("theirs", [])):
            with pytest.raises(RequestError) as caught:
                await work
            assert caught.value.code == Code.NOT_COORDINATOR

    async def test_a_write_after_the_lease_is_lost_is_refused_and_told(
        self, groups: Groups, cluster: Elsewhere
    ) -> None:
        assert await self.commit(groups, "mine", 1) == Code.NONE
        await self.meta.transact(Put("leases/1", b"another's"))
        assert await self.commit(groups, "mine", 2) == Code.COORDINATOR_NOT_AVAILABLE
        assert cluster.fences == 1
        [fetched] = groups.fetch("mine", [("orders", [0])])
        assert fetched.partitions[0][1] is not None and fetched.partitions[0][1].offset == 1

    async def test_what_waits_when_they_are_lost_is_not_written_for_whoever_comes_next(self, groups: Groups) -> None:
        self.meta.holding = True
        first = asyncio.ensure_future(self.commit(groups, "mine", 1))
        await asyncio.sleep(0)
        second = asyncio.ensure_future(self.commit(groups, "mine", 2))
        await asyncio.sleep(0)
        groups.release()
        assert await second == Code.NOT_COORDINATOR
        self.meta.land()
        assert await first == Code.NONE
        assert self.meta.held == [] and groups.fetch("mine", None) == []

    async def test_only_what_is_ours_is_taken_up(self, groups: Groups, cluster: Elsewhere) -> None:
        for group in ("mine", "other"):
            cluster.own.add(group)
            assert await self.commit(groups, group, 3) == Code.NONE
        groups.release()
        await groups.adopt(lambda group_id: group_id == "other")
        assert [each.group_id for each in groups.list()] == ["other"]
