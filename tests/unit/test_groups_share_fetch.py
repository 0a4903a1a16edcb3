"""Fetches of share groups: parked, woken one by one, cancelled; no orphaned lease remains."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from millstream.broker.groups.queue.partition import QueuePartition
from millstream.broker.groups.queue.share_fetch import Leased, ShareFetch
from millstream.broker.groups.queue.verbs import Run
from millstream.core.errors import Code
from tests.unit.groups_kit import start, turn
from tests.unit.share_kit import LEASE_SECONDS, Kit, runs_of


async def test_a_parked_fetch_waits_for_the_record_of_a_lease_that_runs_out(shares: Kit) -> None:
    await shares.put(b"1")
    await shares.beat("a", 0)
    assert await shares.lease("a") == [Run(0, 0, 1)]
    waits: list[None] = []
    parked = start(shares.fetch("b").run(shares.clock, 60_000, True, lambda: waits.append(None)))
    await turn()
    shares.clock.advance(LEASE_SECONDS - 0.1)
    await turn()
    assert waits == [None] and not parked.done()
    shares.clock.advance(0.2)
    leased = await asyncio.wait_for(parked, 20)
    assert runs_of(leased) == [Run(0, 0, 2)] and leased[0].lease_ms == LEASE_SECONDS * 1000


async def test_a_fetch_that_nobody_waits_for_leaves_no_lease(shares: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    await shares.put(b"1")
    partition, fetch = await shares.partition(), shares.fetch("a")
    acquire = partition.acquire

    async def acquire_and_lose_the_client(*arguments: Any, **more: Any) -> Any:
        taken = await acquire(*arguments, **more)
        fetch.cancel()
        return taken

    monkeypatch.setattr(partition, "acquire", acquire_and_lose_the_client)
    assert await fetch.run(shares.clock, 60_000, True, lambda: None) == []
    monkeypatch.undo()
    assert partition.figures().leased == 0
    assert await shares.lease("b") == [Run(0, 0, 2)]


async def test_a_parked_fetch_ends_when_it_is_cancelled(shares: Kit) -> None:
    fetch = shares.fetch("a")
    parked = start(fetch.run(shares.clock, 60_000, True, lambda: None))
    await turn()
    assert not parked.done()
    fetch.cancel()
    assert await asyncio.wait_for(parked, 20) == []
    await shares.put(b"1")
    assert (await shares.partition()).figures().leased == 0


async def test_a_place_that_cannot_be_written_down_has_an_error_that_clients_know_of_a_partition(shares: Kit) -> None:
    """COORDINATOR_NOT_AVAILABLE, the journal's word for it, is one that Kafka's share consumers end with."""
    fetch = shares.fetch("a")
    shares.meta.holding = True
    fetching = start(fetch.run(shares.clock, 0, False, lambda: None))
    await turn()
    while shares.meta.held:
        shares.meta.lose()
        await turn()
    errors = [each.error for each in await asyncio.wait_for(fetching, 20)]
    assert [error and error.code for error in errors] == [Code.KAFKA_STORAGE_ERROR] * 2


def park(shares: Kit, count: int, records_max: int = 1) -> tuple[list[asyncio.Task[list[Leased]]], list[str]]:
    """Fetches in the order in which they wait, and a list of who looked for records."""
    looks: list[str] = []

    class Looking(ShareFetch):
        async def _lease(self, whole_batches: bool) -> list[Leased]:
            looks.append(self._member.name)
            return await super()._lease(whole_batches)

    parked = []
    for number in range(count):
        fetch = shares.fetch(f"m{number}", records_max)
        fetch.__class__ = Looking
        parked.append(start(fetch.run(shares.clock, 1000, False, lambda: None)))
    return parked, looks


async def test_of_many_parked_fetches_one_gets_the_record_and_the_others_wait_on(shares: Kit) -> None:
    parked, looks = park(shares, 20)
    await turn()
    looks.clear()
    await shares.put(b"1")
    await turn()
    assert [fetch.done() for fetch in parked] == [True] + [False] * 19
    assert runs_of(parked[0].result()) == [Run(0, 0, 1)]
    assert looks == ["m0", "m1"], "a fetch with records wakes the next; a fetch without wakes none"
    shares.clock.advance(1.01)
    rest = await asyncio.wait_for(asyncio.gather(*parked), 20)
    assert sum(bool(runs_of(leased)) for leased in rest) == 1
    assert not len(shares.group.lines)


async def test_every_record_finds_one_that_waits(shares: Kit) -> None:
    parked, _ = park(shares, 10)
    await turn()
    await asyncio.gather(*(shares.put(b"%d" % number) for number in range(7)))  # some of them in one batch
    await turn()
    found = [run.first for fetch in parked if fetch.done() for run in runs_of(fetch.result())]
    assert sorted(found) == list(range(7))
    shares.clock.advance(1.01)
    await asyncio.wait_for(asyncio.gather(*parked), 20)


async def test_who_has_enough_passes_on_what_it_was_called_for(shares: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = shares.broker.topics.get("jobs")
    assert topic is not None
    both = start(shares.fetch("both", 1).run(shares.clock, 1000, False, lambda: None))
    await turn()
    other = start(shares.fetch("other", 1, indexes=[1]).run(shares.clock, 1000, False, lambda: None))
    await turn()
    acquire = QueuePartition.acquire

    async def acquire_while_more_comes(partition: QueuePartition, *arguments: Any, **more: Any) -> Any:
        taken = await acquire(partition, *arguments, **more)
        if partition.index == 0 and taken.runs:
            await shares.broker.inlet(topic.partitions[1]).put(b"2")
        return taken

    monkeypatch.setattr(QueuePartition, "acquire", acquire_while_more_comes)
    await shares.put(b"1")
    assert [bool(each.taken.runs) for each in await asyncio.wait_for(both, 20)] == [True, False]
    assert [bool(each.taken.runs) for each in await asyncio.wait_for(other, 20)] == [True]


@pytest.mark.parametrize("seed", range(20))
async def test_no_call_is_lost_whoever_goes_away(shares: Kit, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No fetch waits beside an available record: in any order of fetches, cancels and produces, on slow disks."""
    pick = random.Random(seed)
    acquire = QueuePartition.acquire

    async def slowly(*arguments: Any, **more: Any) -> Any:
        for _ in range(pick.randrange(4)):
            await asyncio.sleep(0)
        taken = await acquire(*arguments, **more)
        for _ in range(pick.randrange(4)):
            await asyncio.sleep(0)
        return taken

    monkeypatch.setattr(QueuePartition, "acquire", slowly)
    topic = shares.broker.topics.get("jobs")
    assert topic is not None
    waiting: dict[ShareFetch, asyncio.Task[list[Leased]]] = {}
    produced = taken = 0
    for step in range(150):
        action = pick.random()
        if action < 0.4:
            fetch = shares.fetch(f"member-{step}", pick.choice((1, 1, 3)))
            waiting[fetch] = start(fetch.run(shares.clock, 1_000_000, False, lambda: None))
        elif action < 0.75:
            for _ in range(pick.choice((1, 1, 4))):
                start(shares.broker.inlet(pick.choice(topic.partitions)).put(b"x"))  # type: ignore[arg-type]
                produced += 1
        elif waiting:
            pick.choice(list(waiting)).cancel()
        for _ in range(pick.choice((0, 0, 1, 3))):
            await asyncio.sleep(0)
    for _ in range(30):
        await turn()
    for task in waiting.values():
        if task.done():
            taken += sum(run.last - run.first + 1 for run in runs_of(task.result()))
    queue = shares.broker.queues.open("g")
    figures = [partition.figures() for partition in queue.partitions()]
    available = sum(each.available for each in figures)
    still_waiting = [fetch for fetch, task in waiting.items() if not task.done()]
    assert taken + available + sum(each.dead + each.dying for each in figures) == produced
    assert not (available and still_waiting), "a fetch waits beside an available record"
    for fetch in still_waiting:
        fetch.cancel()
    await asyncio.gather(*waiting.values())
    assert not len(shares.group.lines)
