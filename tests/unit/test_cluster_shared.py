"""Brokers that share a store: heartbeats, leases, and the coordinator of each group."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from millstream.cluster.base import Node, Owns
from millstream.cluster.shared import SHARDS, SharedCluster, shard_of
from millstream.core.errors import Code, RequestError, RevisionConflict, StartupError
from millstream.core.promise import Promise, promised
from millstream.stores.base import Check, Delete, Operation, Put, Versioned
from millstream.stores.keys import MemoryMeta
from millstream.testing.clock import VirtualClock

LEASE_MS = 6_000
GROUPS = [f"group-{number}" for number in range(200)]


class FlakyMeta(MemoryMeta):
    """A store that can be away, and can lose the answer to what it wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.is_away = False
        self.loses_answers = False

    def transact(self, *operations: Operation) -> Promise[int]:
        if self.is_away:
            return Promise.failed(RequestError(Code.KAFKA_STORAGE_ERROR, "away"))
        done = super().transact(*operations)
        if self.loses_answers:
            return Promise.failed(RequestError(Code.KAFKA_STORAGE_ERROR, "lost"))
        return done


class View:
    """One broker's way to the store: its own connection, which can break while the others' do not."""

    def __init__(self, meta: FlakyMeta) -> None:
        self.meta = meta
        self.is_away = False
        self.refuses = False
        """Takes nothing but what is refused anyway."""
        self.writes_left = -1
        """How many it takes before it is away."""
        self.gate: Promise[None] | None = None
        """Until it is settled, answers to lists are on their way."""
        self.lock: Promise[None] | None = None
        """Until it is settled, writes wait before they are carried out."""

    def transact(self, *operations: Operation) -> Promise[int]:
        return self._transact(*operations) if self.lock is None else promised(self._wait(self.lock, *operations))

    async def _wait(self, lock: Promise[None], *operations: Operation) -> int:
        await lock
        return await self._transact(*operations)

    def _transact(self, *operations: Operation) -> Promise[int]:
        if self.is_away or self.writes_left == 0:
            return Promise.failed(RequestError(Code.KAFKA_STORAGE_ERROR, "away"))
        if self.refuses and not any(isinstance(each, Check) for each in operations):
            return Promise.failed(RequestError(Code.KAFKA_STORAGE_ERROR, "refused"))
        self.writes_left -= 1
        return self.meta.transact(*operations)

    def list(self, prefix: str) -> Promise[Sequence[tuple[str, Versioned]]]:
        found = self.meta.list(prefix)
        if self.gate is None:
            return found
        answer: Promise[Sequence[tuple[str, Versioned]]] = Promise()
        self.gate.then(lambda _: answer.settle(found.value()))
        return answer

    def __getattr__(self, name: str) -> object:
        return getattr(self.meta, name)


class Member:
    def __init__(self, meta: FlakyMeta, clock: VirtualClock, node_id: int) -> None:
        self.view = View(meta)
        self.cluster = SharedCluster(self.view, clock, node_id, LEASE_MS)  # type: ignore[arg-type]
        self.adopted: set[str] = set()
        self.releases = 0
        self.gate: asyncio.Event | None = None
        """Until it is set, groups are being read."""
        self.failures_left = 0
        self.cluster.serve_groups(self._adopt, self._release)

    async def _adopt(self, owns: Owns) -> None:
        if self.gate is not None:
            await self.gate.wait()
        if self.failures_left:
            self.failures_left -= 1
            raise RequestError(Code.KAFKA_STORAGE_ERROR, "a read failed")
        self.adopted |= {group for group in GROUPS if owns(group)}

    def _release(self) -> None:
        self.adopted.clear()
        self.releases += 1

    async def join(self, port: int) -> Member:
        await self.cluster.start()
        await self.cluster.join("127.0.0.1", port)
        return self

    def stop(self) -> None:
        """As a kill does: it gives no more signs of life, and hears nothing."""
        self.view.is_away = True
        for unwatch in (self.cluster._unwatch, self.cluster._members._unwatch):
            assert unwatch is not None
            unwatch()

    def refusal(self, group: str) -> Code:
        try:
            self.cluster.check(group)
        except RequestError as error:
            return error.code
        return Code.NONE


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def meta() -> FlakyMeta:
    return FlakyMeta()


async def turn() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


async def live(clock: VirtualClock, seconds: float) -> None:
    """Time passes, and everybody gets to do what falls due."""
    for _ in range(round(seconds * 2)):
        clock.advance(0.5)
        await turn()


async def both(meta: FlakyMeta, clock: VirtualClock) -> tuple[Member, Member]:
    return await Member(meta, clock, 1).join(9001), await Member(meta, clock, 2).join(9002)


async def test_everybody_is_listed_and_stays_listed(meta: FlakyMeta, clock: VirtualClock) -> None:
    one, two = await both(meta, clock)
    await live(clock, 60)
    assert one.cluster.others() == [Node(2, "127.0.0.1", 9002)]
    assert two.cluster.others() == [Node(1, "127.0.0.1", 9001)]


async def test_who_is_alone_looks_after_everything_and_keeps_it(meta: FlakyMeta, clock: VirtualClock) -> None:
    one, two = await both(meta, clock)
    assert one.adopted == set(GROUPS) and two.adopted == set()
    await live(clock, 30)
    assert (one.refusal("g"), two.refusal("g")) == (Code.NONE, Code.NOT_COORDINATOR)


async def test_a_group_has_one_coordinator_whoever_is_asked(meta: FlakyMeta, clock: VirtualClock) -> None:
    one, two = await both(meta, clock)
    assert await one.cluster.find_coordinator("g") is None
    assert await two.cluster.find_coordinator("g") == Node(1, "127.0.0.1", 9001)
    assert (one.refusal("g"), two.refusal("g")) == (Code.NONE, Code.NOT_COORDINATOR)


async def test_of_two_that_are_asked_at_once_one_is_the_coordinator(meta: FlakyMeta, clock: VirtualClock) -> None:
    one, two = await both(meta, clock)
    found = [await asyncio.gather(*(each.cluster.find_coordinator(g) for each in (one, two))) for g in GROUPS[:20]]
    assert all(pair.count(None) == 1 for pair in found)


async def test_nothing_is_taken_from_a_broker_that_lives_though_another_has_lost_sight_of_it(
    meta: FlakyMeta, clock: VirtualClock
) -> None:
    one, two = await both(meta, clock)
    two.cluster._members.look_at(1, None)  # what told of its next sign of life was lost
    await turn()
    assert await two.cluster.find_coordinator("g") == Node(1, "127.0.0.1", 9001)
    assert (one.refusal("g"), two.refusal("g"), two.adopted) == (Code.NONE, Code.NOT_COORDINATOR, set())


async def test_groups_of_a_silent_broker_move_when_its_lease_is_over(meta: FlakyMeta, clock: VirtualClock) -> None:
    one, two = await both(meta, clock)
    for group in GROUPS:
        assert await one.cluster.find_coordinator(group) is None
    one.view.is_away = True
    await live(clock, LEASE_MS / 1000 - 1)
    assert two.cluster.others() and await two.cluster.find_coordinator("group-1") == Node(1, "127.0.0.1", 9001)
    await live(clock, 5)
    assert two.cluster.others() == []
    assert two.adopted == set(GROUPS), "without anybody asking"
    assert await two.cluster.find_coordinator("group-1") is None


async def test_what_a_broker_that_was_taken_for_dead_writes_is_refused(meta: FlakyMeta, clock: VirtualClock) -> None:
    one, two = await both(meta, clock)
    await one.cluster.find_coordinator("g")
    guards = one.cluster.guards()
    await meta.transact(Put("groups/g", b"1"), *guards)
    one.view.is_away = True
    await live(clock, 12)
    assert await two.cluster.find_coordinator("g") is None
    with pytest.raises(RevisionConflict):
        await meta.transact(Put("groups/g", b"2"), *guards)


async def test_it_drops_its_groups_when_it_finds_out_and_begins_anew(meta: FlakyMeta, clock: VirtualClock) -> None:
    one, two = await both(meta, clock)
    for group in GROUPS[:5]:
        await one.cluster.find_coordinator(group)
    one.view.is_away = True
    await live(clock, 12)
    one.view.is_away = False
    await live(clock, 3)
    assert one.releases == 1 and one.refusal("group-1") == Code.NOT_COORDINATOR
    assert [node.node_id for node in two.cluster.others()] == [1], "it is listed again"
    assert await one.cluster.find_coordinator("group-1") == Node(2, "127.0.0.1", 9002)
    await two.cluster.leave()
    await turn()
    assert await one.cluster.find_coordinator("group-1") is None, "it may coordinate groups again"


async def test_a_refused_write_makes_it_find_out_at_once(meta: FlakyMeta, clock: VirtualClock) -> None:
    one, _ = await both(meta, clock)
    await one.cluster.find_coordinator("g")
    one.view.is_away = True
    await live(clock, 12)
    one.view.is_away = False
    one.cluster.fenced()
    await turn()
    assert one.releases == 1


async def test_a_broker_that_is_cut_off_says_that_it_is_no_coordinator(meta: FlakyMeta, clock: VirtualClock) -> None:
    one = await Member(meta, clock, 1).join(9001)
    await one.cluster.find_coordinator("g")
    one.view.is_away = True
    await live(clock, LEASE_MS / 1000 + 1)
    assert one.refusal("g") == Code.COORDINATOR_NOT_AVAILABLE
    with pytest.raises(RequestError) as caught:
        await one.cluster.find_coordinator("h")
    assert caught.value.code == Code.COORDINATOR_NOT_AVAILABLE
    one.view.is_away = False
    await live(clock, 3)
    assert one.refusal("g") == Code.NONE and one.releases == 0, "no broker took over: it keeps its groups"


async def test_after_an_outage_for_all_nobody_is_taken_for_dead(meta: FlakyMeta, clock: VirtualClock) -> None:
    one, two = await both(meta, clock)
    await one.cluster.find_coordinator("g")
    meta.is_away = True
    await live(clock, 60)
    meta.is_away = False
    await live(clock, 20)
    assert (one.releases, two.releases) == (0, 0)
    assert await two.cluster.find_coordinator("g") == Node(1, "127.0.0.1", 9001)


async def test_after_the_database_stood_still_nobody_is_taken_for_dead(meta: FlakyMeta, clock: VirtualClock) -> None:
    one, two = await both(meta, clock)
    await one.cluster.find_coordinator("g")
    locks: dict[Member, Promise[None]] = {two: Promise(), one: Promise()}
    for member, lock in locks.items():
        member.view.lock = lock
    await live(clock, 10)  # their signs of life are on their way all the time
    for member, lock in locks.items():  # the broker without groups is answered first
        member.view.lock = None
        lock.settle(None)
        await turn()
    await live(clock, 20)
    assert (one.releases, two.releases) == (0, 0)
    assert await two.cluster.find_coordinator("g") == Node(1, "127.0.0.1", 9001)


async def test_who_comes_back_without_a_lease_gives_the_others_a_whole_one(
    meta: FlakyMeta, clock: VirtualClock
) -> None:
    one, two = await both(meta, clock)
    await one.cluster.find_coordinator("g")
    two.view.is_away = True
    await live(clock, 10)  # it is taken for dead
    two.view.is_away, two.view.refuses = False, True
    await live(clock, 3)  # it finds out, and then the database is away before it is a member again; for all
    assert two.releases == 1
    one.view.is_away = True
    await live(clock, 10)
    two.view.refuses = False
    await live(clock, 4)
    one.view.is_away = False  # its connection is back a little later
    await live(clock, 20)
    assert one.releases == 0
    assert await two.cluster.find_coordinator("g") == Node(1, "127.0.0.1", 9001)


async def test_who_comes_back_without_a_lease_does_not_replace_the_newer_of_its_number(
    meta: FlakyMeta, clock: VirtualClock
) -> None:
    _, two = await both(meta, clock)
    two.view.is_away = True
    await live(clock, 10)  # it is taken for dead
    two.view.is_away, two.view.refuses = False, True
    await live(clock, 3)  # it finds out, and then the database is away before it is a member again
    assert two.releases == 1
    newer = await Member(meta, clock, 2).join(9003)
    two.view.refuses = False
    await live(clock, 10)
    assert newer.releases == 0
    assert two.cluster._members._is_replaced and not newer.cluster._members._is_replaced


async def test_a_sign_of_life_whose_answer_was_lost_does_no_harm(meta: FlakyMeta, clock: VirtualClock) -> None:
    one = await Member(meta, clock, 1).join(9001)
    await one.cluster.find_coordinator("g")
    meta.loses_answers = True
    await live(clock, 2)
    meta.loses_answers = False
    await live(clock, 6)
    assert one.releases == 0 and one.refusal("g") == Code.NONE


async def test_who_leaves_is_gone_at_once(meta: FlakyMeta, clock: VirtualClock) -> None:
    one, two = await both(meta, clock)
    await one.cluster.find_coordinator("group-3")
    await one.cluster.leave()
    await turn()
    assert two.cluster.others() == [] and "group-3" in two.adopted


async def test_who_leaves_while_another_starts_is_gone_for_it_too(meta: FlakyMeta, clock: VirtualClock) -> None:
    one, two = await Member(meta, clock, 1).join(9001), Member(meta, clock, 2)
    two.view.gate = Promise()
    starting = asyncio.ensure_future(two.cluster.start())
    await turn()  # it has listed who is there, and not been answered
    await one.cluster.leave()
    two.view.gate.settle(None)
    await starting
    assert two.cluster.others() == []


async def test_a_restart_after_a_kill_takes_its_groups_back_at_once(meta: FlakyMeta, clock: VirtualClock) -> None:
    one = await Member(meta, clock, 1).join(9001)
    for group in GROUPS:
        await one.cluster.find_coordinator(group)
    again = await Member(meta, clock, 1).join(9001)
    assert again.adopted == set(GROUPS) and again.refusal("group-1") == Code.NONE
    with pytest.raises(RevisionConflict):
        await meta.transact(Put("groups/g", b""), *one.cluster.guards())


async def test_a_number_that_another_live_broker_has_is_refused(meta: FlakyMeta, clock: VirtualClock) -> None:
    await Member(meta, clock, 1).join(9001)
    joining = asyncio.ensure_future(Member(meta, clock, 1).join(9077))
    await turn()
    await live(clock, 4)
    with pytest.raises(StartupError, match=r"127\.0\.0\.1:9001, has node id 1; give this one another"):
        await joining


async def test_a_number_whose_broker_died_elsewhere_is_free_after_half_a_lease(
    meta: FlakyMeta, clock: VirtualClock
) -> None:
    dead = await Member(meta, clock, 1).join(9001)
    dead.view.is_away = True
    joining = asyncio.ensure_future(Member(meta, clock, 1).join(9077))
    await turn()
    await live(clock, 4)
    assert (await joining).refusal("g") == Code.NONE
    dead.view.is_away = False
    await live(clock, 3)
    assert dead.releases == 1
    await live(clock, 30)
    assert await (await joining).cluster.find_coordinator("g") is None, "the two do not fight over it"


async def test_who_has_left_writes_nothing_more(meta: FlakyMeta, clock: VirtualClock) -> None:
    one = await Member(meta, clock, 1).join(9001)
    await one.cluster.leave()
    assert await meta.list("leases/") == []
    with pytest.raises(RevisionConflict):
        await meta.transact(Put("groups/g", b""), *one.cluster.guards())


async def test_who_lost_its_lease_and_has_no_new_one_writes_nothing(meta: FlakyMeta, clock: VirtualClock) -> None:
    one, _ = await both(meta, clock)
    one.view.is_away = True
    await live(clock, 12)
    one.cluster.fenced()
    await meta.transact(Delete("brokers/1"), Delete("leases/1"))
    one.view.refuses = True  # it detects that, and cannot join again
    one.view.is_away = False
    await live(clock, 3)
    assert one.releases == 1 and await meta.get("leases/1") is None
    with pytest.raises(RevisionConflict):
        await meta.transact(Put("groups/g", b""), *one.cluster.guards())


async def test_a_sign_of_life_on_its_way_when_the_broker_leaves_does_not_bring_it_back(
    meta: FlakyMeta, clock: VirtualClock
) -> None:
    one = await Member(meta, clock, 1).join(9001)
    one.cluster.fenced()  # looks at once whether it still has its lease
    await one.cluster.leave()
    await live(clock, 10)
    assert await meta.list("brokers/") == [] and await meta.list("leases/") == []


async def test_groups_that_were_read_while_the_lease_was_lost_are_dropped(meta: FlakyMeta, clock: VirtualClock) -> None:
    one = Member(meta, clock, 1)
    one.gate = asyncio.Event()
    joining = asyncio.ensure_future(one.join(9001))
    await turn()
    two = await Member(meta, clock, 2).join(9002)
    one.view.is_away = True
    await live(clock, 14)
    assert two.adopted == set(GROUPS)
    one.view.is_away = False
    await live(clock, 4)
    one.gate.set()
    await joining
    assert one.adopted == set() and one.refusal("group-1") == Code.NOT_COORDINATOR


async def test_reading_groups_for_long_costs_no_lease(meta: FlakyMeta, clock: VirtualClock) -> None:
    one = await Member(meta, clock, 1).join(9001)
    one.gate = asyncio.Event()
    await meta.transact(Delete("brokers/1"), Delete("leases/1"))
    await live(clock, 30)
    assert one.releases == 1 and one.adopted == set(), "it joined again, and reads"
    one.gate.set()
    await turn()
    assert one.releases == 1 and one.adopted == set(GROUPS) and one.refusal("group-1") == Code.NONE


async def test_a_restart_that_dies_as_it_joins_is_taken_for_dead_in_time(meta: FlakyMeta, clock: VirtualClock) -> None:
    one, two = await both(meta, clock)
    await one.cluster.find_coordinator("group-1")
    one.stop()
    again = Member(meta, clock, 1)
    again.view.writes_left = 1
    joining = asyncio.ensure_future(again.join(9001))
    await turn()
    again.stop()
    await live(clock, 20)
    assert joining.done() and two.cluster.others() == []
    assert await two.cluster.find_coordinator("group-1") is None and two.adopted == set(GROUPS)


async def test_a_claim_whose_groups_could_not_be_read_is_made_again(meta: FlakyMeta, clock: VirtualClock) -> None:
    one, two = await both(meta, clock)
    await one.cluster.find_coordinator("group-1")
    two.failures_left = 1
    await one.cluster.leave()
    await turn()
    assert two.adopted == set()
    await live(clock, LEASE_MS / 1000)
    assert two.adopted == set(GROUPS) and two.refusal("group-1") == Code.NONE


async def test_an_embedded_broker_repeats_the_claims_that_it_made(meta: FlakyMeta, clock: VirtualClock) -> None:
    one = Member(meta, clock, 1)
    await one.cluster.start()
    await one.cluster.join("", 0)
    one.failures_left = 1
    with pytest.raises(RequestError):
        await one.cluster.find_coordinator("group-1")
    await live(clock, LEASE_MS / 1000)
    assert "group-1" in one.adopted and one.refusal("group-1") == Code.NONE


async def test_two_embedded_brokers_with_one_number_do_not_take_turns(meta: FlakyMeta, clock: VirtualClock) -> None:
    one, two = Member(meta, clock, 1), Member(meta, clock, 1)
    await one.cluster.start()
    await one.cluster.join("", 0)
    await two.cluster.start()
    joining = asyncio.ensure_future(two.cluster.join("", 0))
    await turn()
    await live(clock, 4)
    with pytest.raises(StartupError, match="embedded in another process, has node id 1"):
        await joining
    await live(clock, 10)
    assert one.releases == 0


async def test_clients_are_told_of_a_coordinator_that_they_cannot_reach(meta: FlakyMeta, clock: VirtualClock) -> None:
    embedded = Member(meta, clock, 1)
    await embedded.cluster.start()
    await embedded.cluster.join("", 0)
    assert await embedded.cluster.find_coordinator("g") is None
    served = await Member(meta, clock, 2).join(9002)
    with pytest.raises(RequestError, match="a process with an embedded broker") as caught:
        await served.cluster.find_coordinator("g")
    assert caught.value.code == Code.COORDINATOR_NOT_AVAILABLE


def test_every_group_has_a_shard_for_ever() -> None:
    assert {shard_of(group) for group in GROUPS} <= set(range(SHARDS))
    assert shard_of("payments") == 50
