"""The `exclusive` discipline: who is active, when a standby takes over, and whose commits count."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from millstream.broker.broker import Broker
from millstream.broker.groups.exclusive import ExclusiveMember, ExclusiveSettings, State, state_key
from millstream.broker.topics import Topic
from millstream.config import Config
from millstream.core.errors import MillstreamError, NotActive, UnknownTopic
from millstream.core.metrics import Metrics
from millstream.core.promise import Promise
from millstream.stores.base import Operation
from millstream.stores.memory import MemoryLogStore
from millstream.testing.clock import VirtualClock
from tests.unit.groups_kit import HeldMeta, turn

KEY = state_key("projector", "ledger")
DEFAULTS = ExclusiveSettings()


@dataclass
class Kit:
    """One store; every member may have a broker of its own, as processes do."""

    clock: VirtualClock = field(default_factory=VirtualClock)
    meta: HeldMeta = field(default_factory=HeldMeta)
    brokers: list[Broker] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.logs = MemoryLogStore(self.clock)

    async def broker(self) -> Broker:
        broker = Broker(Config(), self.logs, self.meta, self.clock, Metrics())
        await broker.start()
        self.brokers.append(broker)
        return broker

    async def join(self, settings: ExclusiveSettings = DEFAULTS) -> ExclusiveMember:
        member = (await self.broker()).exclusive("projector", self.topic(-1), settings)
        await member.open()
        return member

    def topic(self, at: int = 0) -> Topic:
        topic = self.brokers[at].topics.get("ledger")
        assert topic is not None
        return topic

    async def put(self, count: int = 1) -> None:
        for _ in range(count):
            await self.brokers[0].inlet(self.topic().partitions[0]).put(b"entry")

    def state(self) -> State:
        found = self.meta.get(KEY).value()
        assert found is not None
        return State.decode(found.value)

    async def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        await turn()


@pytest.fixture
async def kit() -> AsyncIterator[Kit]:
    kit = Kit()
    await (await kit.broker()).topics.create("ledger", 1, {})
    yield kit
    for broker in kit.brokers:
        await broker.close()


async def test_the_first_member_is_active_and_the_second_stands_by(kit: Kit) -> None:
    first, second = await kit.join(), await kit.join()
    assert first.is_active and not second.is_active
    assert kit.state().active == first.id


async def test_a_commit_is_where_the_next_active_member_goes_on(kit: Kit) -> None:
    await kit.put(5)
    first, second = await kit.join(), await kit.join()
    await first.commit({0: 3})
    await first.leave()
    assert second.is_active and second.position(0) == 3


async def test_a_clean_leave_hands_over_at_once_although_there_is_nothing_to_consume(kit: Kit) -> None:
    first, second, third = await kit.join(), await kit.join(), await kit.join()
    await first.leave()
    assert [second.is_active, third.is_active].count(True) == 1


async def test_a_standby_takes_over_60_seconds_after_the_last_change_and_not_before(kit: Kit) -> None:
    await kit.put(2)
    first, second = await kit.join(), await kit.join()
    await kit.advance(10)
    await first.commit({0: 1})
    first.abandon()
    await kit.advance(59.9)
    assert not second.is_active
    await kit.advance(0.2)
    assert second.is_active and second.position(0) == 1


async def test_nobody_takes_over_while_there_is_nothing_to_consume(kit: Kit) -> None:
    await kit.put()
    first, second = await kit.join(), await kit.join()
    await first.commit({0: 1})
    revision = first.revision
    first.abandon()
    await kit.advance(10_000)
    assert not second.is_active
    await kit.put()
    await kit.advance(59)
    assert not second.is_active  # the active one has its 28 seconds, however long it was idle
    await kit.advance(2)
    assert second.is_active and second.revision > revision


async def test_an_active_member_that_processes_for_long_repeats_its_claim_after_28_seconds(kit: Kit) -> None:
    await kit.put()
    first, second = await kit.join(), await kit.join()
    before = kit.state().changed_ms
    await kit.advance(27.9)
    assert kit.state().changed_ms == before
    await kit.advance(0.2)
    assert kit.state().changed_ms == before + 28_000
    for _ in range(20):
        await kit.advance(28)
    assert first.is_active and not second.is_active
    await first.commit({0: 1})


async def test_an_idle_group_writes_nothing(kit: Kit) -> None:
    await kit.put()
    first = await kit.join()
    await kit.join()
    await first.commit({0: 1})
    revision = kit.meta.revision
    for _ in range(100):
        await kit.advance(30)
    assert kit.meta.revision == revision


async def test_the_commit_of_a_standby_is_an_error_of_its_own(kit: Kit) -> None:
    await kit.put()
    await kit.join()
    standby = await kit.join()
    with pytest.raises(NotActive, match="only the active member may commit"):
        await standby.commit({0: 1})
    assert kit.state().positions == {}


async def test_the_commit_of_a_zombie_fails_and_forces_it_to_standby(kit: Kit) -> None:
    """The zombie is one that news do not reach, as a process that was stopped and goes on."""
    await kit.put(3)
    zombie, second = await kit.join(), await kit.join()
    zombie._unwatch[0]()
    zombie._heartbeat.stop()
    await kit.advance(61)
    assert second.is_active and zombie.is_active  # it does not know yet
    await second.commit({0: 2})
    changes: list[bool] = []
    zombie.watch(lambda: changes.append(zombie.is_active))
    with pytest.raises(NotActive):
        await zombie.commit({0: 3})
    assert not zombie.is_active and changes == [False]
    assert kit.state().positions == {0: 2} and kit.state().active == second.id


async def test_a_zombie_learns_its_place_from_the_store_without_a_commit(kit: Kit) -> None:
    await kit.put()
    zombie, second = await kit.join(), await kit.join()
    zombie._heartbeat.stop()
    await kit.advance(61)
    assert second.is_active and not zombie.is_active


async def test_of_two_standbys_one_wins(kit: Kit) -> None:
    await kit.put()
    first = await kit.join()
    others = [await kit.join() for _ in range(5)]
    first.abandon()
    kit.meta.holding = True
    await kit.advance(61)
    assert len(kit.meta.held) == 5  # all try, with the same revision
    kit.meta.holding = False
    for operations, promise in kit.meta.held:
        outcome = kit.meta.transact(*operations)
        promise.settle(outcome.value()) if outcome.error is None else promise.fail(outcome.error)
    assert [member.is_active for member in others].count(True) == 1


async def test_commits_never_go_back(kit: Kit) -> None:
    await kit.put(5)
    member = await kit.join()
    await member.commit({0: 4})
    await member.commit({0: 2})
    assert kit.state().positions == {0: 4}


async def test_commits_made_while_one_is_on_its_way_leave_together(kit: Kit) -> None:
    await kit.put(9)
    member = await kit.join()
    kit.meta.holding = True
    commits = [member.commit({0: offset}) for offset in range(1, 10)]
    assert len(kit.meta.held) == 1
    kit.meta.land()
    assert commits[0].done and not commits[1].done and len(kit.meta.held) == 1
    kit.meta.land()
    assert all(commit.done and commit.error is None for commit in commits)
    assert kit.state().positions == {0: 9}


async def test_a_commit_whose_caller_was_cancelled_leaves_the_member_sound(kit: Kit) -> None:
    await kit.put(3)
    member = await kit.join()
    kit.meta.holding = True
    waiting = asyncio.ensure_future(_wait(member.commit({0: 1})))
    await turn()
    waiting.cancel()
    await turn()
    kit.meta.land()
    kit.meta.holding = False
    await member.commit({0: 2})
    assert kit.state().positions == {0: 2}


async def _wait(promise: Promise[None]) -> None:
    await promise


async def test_leaving_waits_for_the_commits_before_it(kit: Kit) -> None:
    await kit.put(3)
    first, second = await kit.join(), await kit.join()
    kit.meta.holding = True
    commits = [first.commit({0: 1}), first.commit({0: 2})]
    left = first.leave()
    while kit.meta.held:
        kit.meta.land()
    await left
    assert all(commit.done and commit.error is None for commit in commits)
    assert second.is_active and second.position(0) == 2


async def test_a_member_that_leaves_while_its_takeover_is_on_its_way_hands_over_all_the_same(kit: Kit) -> None:
    first, second, third = await kit.join(), await kit.join(), await kit.join()
    kit.meta.holding = True
    first.leave()
    kit.meta.land()  # both standbys try
    second_left = second.leave()
    assert not second_left.done
    kit.meta.land()
    kit.meta.holding = False
    for operations, promise in kit.meta.held:
        outcome = kit.meta.transact(*operations)
        promise.settle(outcome.value()) if outcome.error is None else promise.fail(outcome.error)
    await second_left
    assert third.is_active


async def test_a_group_that_was_busy_when_its_member_died_goes_on_at_once_an_hour_later(kit: Kit) -> None:
    await kit.put(3)
    first = await kit.join()
    await first.commit({0: 1})
    first.abandon()
    await kit.advance(3600)
    second = await kit.join()
    assert second.is_active and second.position(0) == 1


async def test_a_newcomer_does_not_push_out_a_member_that_was_idle_until_a_moment_ago(kit: Kit) -> None:
    first = await kit.join()
    await kit.advance(3600)
    await kit.put()
    newcomer = await kit.join()
    assert not newcomer.is_active
    await kit.advance(59)
    assert first.is_active and not newcomer.is_active


async def test_a_store_that_fails_fails_the_commit_and_the_member_stays_active(kit: Kit) -> None:
    await kit.put(2)
    member = await kit.join()
    kit.meta.holding = True
    commit = member.commit({0: 1})
    kit.meta.lose()
    assert isinstance(commit.error, OSError) and member.is_active
    kit.meta.holding = False
    await kit.advance(2)
    await member.commit({0: 2})
    assert kit.state().positions == {0: 2}


async def test_a_group_that_cannot_be_begun_is_tried_once_a_second(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk, say: it must not be tried, and logged, as fast as the machine can."""
    tries = 0

    def refuse(*operations: object) -> Promise[int]:
        nonlocal tries
        tries += 1
        promise: Promise[int] = Promise()
        asyncio.get_running_loop().call_soon(promise.fail, OSError("the disk is full"))
        return promise

    await kit.put()
    with monkeypatch.context() as patched:
        patched.setattr(kit.meta, "transact", refuse)
        member = kit.brokers[0].exclusive("projector", kit.topic(), DEFAULTS)
        await member.open()
        for _ in range(3):
            await kit.advance(1)
        assert not member.is_active and tries <= 4
    await kit.advance(1)
    assert member.is_active


async def test_what_is_committed_while_a_change_fails_does_not_wait_for_the_next(kit: Kit) -> None:
    await kit.put(3)
    member = await kit.join()
    kit.meta.holding = True
    first, second = member.commit({0: 1}), member.commit({0: 2})
    kit.meta.lose()
    kit.meta.holding = False
    assert isinstance(first.error, OSError) and not second.done
    await kit.advance(1.1)
    assert second.done and second.error is None
    assert kit.state().positions == {0: 2}


async def test_a_commit_that_landed_although_its_answer_was_lost_does_not_end_the_membership(kit: Kit) -> None:
    await kit.put(3)
    member = await kit.join()
    member._unwatch[0]()
    real = kit.meta.transact

    def lossy(*operations: Operation) -> Promise[int]:
        real(*operations)
        return Promise.failed(OSError("the connection broke"))

    kit.meta.transact = lossy  # type: ignore[method-assign]
    get, kit.meta.get = kit.meta.get, lambda key: Promise.failed(OSError("still broken"))  # type: ignore[method-assign]
    with pytest.raises(OSError):
        await member.commit({0: 1})
    kit.meta.transact, kit.meta.get = real, get  # type: ignore[method-assign]
    await member.commit({0: 2})
    assert member.is_active and kit.state().positions == {0: 2}


async def test_a_store_that_is_away_at_a_takeover_is_tried_again(kit: Kit) -> None:
    await kit.put()
    first, second = await kit.join(), await kit.join()
    first.abandon()
    kit.meta.holding = True
    await kit.advance(61)
    kit.meta.lose()
    kit.meta.holding = False
    assert not second.is_active
    await kit.advance(1.1)
    assert second.is_active


async def test_a_group_may_begin_at_the_end(kit: Kit) -> None:
    await kit.put(3)
    member = await kit.join(ExclusiveSettings(from_end=True))
    await kit.put()
    assert member.position(0) == 3


async def test_a_deleted_topic_ends_membership_and_its_state_means_nothing_to_the_next_of_that_name(kit: Kit) -> None:
    await kit.put(3)
    member = await kit.join()
    await member.commit({0: 3})
    told: list[bool] = []
    member.watch(lambda: told.append(member.is_gone))
    broker = kit.brokers[-1]
    await broker.delete_topic("ledger")
    assert told == [True]
    with pytest.raises(UnknownTopic):
        await member.commit({0: 3})
    await broker.topics.create("ledger", 1, {})
    fresh = broker.exclusive("projector", kit.topic(-1), ExclusiveSettings())
    await fresh.open()
    assert fresh.is_active and fresh.position(0) == 0


async def test_records_that_retention_took_are_passed_over(kit: Kit) -> None:
    await kit.put(5)
    member = await kit.join()
    await member.commit({0: 1})
    await kit.topic().partitions[0].log.trim(4)
    assert member.position(0) == 4


async def test_leaving_twice_and_leaving_unopened_do_no_harm(kit: Kit) -> None:
    member = await kit.join()
    await member.leave()
    await member.leave()
    await kit.brokers[0].exclusive("projector", kit.topic(), ExclusiveSettings()).leave()


def test_a_heartbeat_must_come_before_the_takeover() -> None:
    with pytest.raises(MillstreamError, match="must be shorter than the takeover"):
        ExclusiveSettings(heartbeat_ms=60_000, takeover_ms=60_000).check()


@pytest.mark.parametrize("seed", range(20))
async def test_whatever_happens_positions_only_grow_and_every_commit_is_of_the_active_member(
    kit: Kit, seed: int
) -> None:
    """Members come, go, die and stall in random order; what lands in the store is looked at, change by change."""
    rng = random.Random(seed)
    history: list[State] = []
    kit.meta.watch(KEY, lambda key, found: history.append(State.decode(found.value)) if found else None)
    members: list[ExclusiveMember] = []
    acknowledged = 0
    for _ in range(150):
        step = rng.random()
        if step < 0.15 and len(members) < 4:
            members.append(await kit.join())
        elif step < 0.25:
            await kit.put(rng.randint(1, 3))
        elif step < 0.32 and members:
            members.pop(rng.randrange(len(members))).abandon()
        elif step < 0.38 and members:
            await members.pop(rng.randrange(len(members))).leave()
        elif step < 0.45 and members:
            stalled = rng.choice(members)
            stalled._unwatch[0]()
            stalled._heartbeat.stop()
        elif step < 0.8 and members:
            member = rng.choice(members)
            end = kit.topic().partitions[0].log.high_watermark
            try:
                offset = min(member.position(0) + 1, end)
                await member.commit({0: offset})
                assert offset >= acknowledged
                acknowledged = offset
                assert history[-1].active == member.id
            except NotActive:
                assert not member.is_active
        else:
            await kit.advance(rng.choice([1, 20, 30, 61]))
        offsets = [state.positions.get(0, 0) for state in history]
        assert offsets == sorted(offsets) and (not offsets or offsets[-1] >= acknowledged)
