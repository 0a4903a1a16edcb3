"""Topic patterns of many groups: what is matched when, and how much of it before the event loop runs again."""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest

from millstream.broker.groups import turns
from millstream.broker.groups.groups import Beat
from millstream.broker.groups.stream.pattern import Pattern
from millstream.broker.groups.turns import STEPS_A_TURN
from millstream.core.errors import Code, RequestError
from tests.unit.groups_kit import Bench, Client, code_of, start, turn
from tests.unit.mixed_kit import classic_group, numbers_of, run

NAMES = ["".join(random.Random(seed).choices("abcd", k=249)) for seed in range(50)]
COSTLY = ".*a.{20}z"
"""Takes a step for each character of those names: it meets other states with each."""
TOPICS, PATTERNS, GROUPS = 300, 50, 20


_numbers = itertools.count()


def costly(*names: str) -> str:
    """A pattern that matches some names, and that no other test has: patterns remember the steps that they took."""
    return "|".join((COSTLY, *names, f"never-{next(_numbers)}"))


class Meter:
    """Counts names and steps of matching: all, and at most between two runs of the event loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[tuple[str, str]] = []
        self.steps = self.most = self._now = 0
        matches = Pattern.matches

        def counted(pattern: Pattern, name: str) -> bool:
            before = pattern.spent
            found = matches(pattern, name)
            self.names.append((pattern.text, name))
            self._now += pattern.spent - before
            return found

        monkeypatch.setattr(Pattern, "matches", counted)

    def tick(self) -> None:
        self.steps += self._now
        self.most, self._now = max(self.most, self._now), 0

    async def watch(self) -> None:
        while True:
            self.tick()
            await asyncio.sleep(0)


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> Meter:
    return Meter(monkeypatch)


async def subscribe(bench: Bench, group: str, member: str, pattern: str) -> int:
    beat = Beat(group, member, 0, rebalance_ms=60_000, pattern=pattern)
    return (await bench.groups.consumer_heartbeat(beat)).epoch


async def test_a_new_topic_is_matched_with_a_thousand_patterns_some_steps_at_a_time(meter: Meter) -> None:
    bench = Bench(**{f"t-{number}": 1 for number in range(TOPICS)})
    for group in range(GROUPS):
        for number in range(PATTERNS):
            await subscribe(bench, f"g-{group}", f"m-{number}", costly(f"t-{number}"))
    watching = start(meter.watch())
    await turn()
    meter.names.clear()
    meter.steps = meter.most = 0
    bench.topics.set(NAMES[0], 1)
    for _ in range(40):
        await turn()
    watching.cancel()
    assert {name for _, name in meter.names} == {NAMES[0]} and len(meter.names) == GROUPS * PATTERNS, (
        "once, and no other"
    )
    assert meter.steps > 50 * STEPS_A_TURN, "all at once they would hold up the loop for a second"
    assert meter.most <= 2 * STEPS_A_TURN


async def test_many_clients_with_costly_patterns_share_a_turn(meter: Meter) -> None:
    bench = Bench(**dict.fromkeys(NAMES, 1))
    joining = [start(subscribe(bench, f"g-{number}", "m", costly())) for number in range(20)]
    watching = start(meter.watch())
    assert await asyncio.gather(*joining) == [1] * 20
    watching.cancel()
    assert meter.steps > 20 * STEPS_A_TURN
    assert meter.most <= 2 * STEPS_A_TURN


async def test_groups_that_a_topic_changes_are_given_targets_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "STEPS_A_TURN", 400)
    bench = Bench(**{f"t-{number}": 1 for number in range(TOPICS)})
    for group in range(GROUPS):
        for number in range(10):
            await subscribe(bench, f"g-{group}", f"m-{number}", f".*|{number}")
    bench.meta.holding = True
    bench.topics.set("new", 1)
    sizes = []
    await turn()
    while bench.meta.held:
        sizes.append(len(bench.meta.held[0][0]))
        bench.meta.land()
        await turn()
    assert sum(sizes) == GROUPS and max(sizes) <= 3, "each takes some 190 steps"


async def test_a_pattern_follows_topics_that_come_and_go_without_matching_any_twice(meter: Meter) -> None:
    bench = Bench(orders=1, bills=1)
    client = Client(bench, "a", topics=None, pattern="ord.*")
    await client.beat()
    other = Client(bench, "b", topics=None, pattern="ord.*")
    await other.beat()
    assert len(meter.names) == 2
    bench.topics.set("orders", 3)
    bench.topics.set("ordinary", 1)
    bench.topics.set("orders", 0)
    bench.topics.set("orders", 1)
    await turn()
    assert meter.names[2:] == [("ord.*", "ordinary"), ("ord.*", "orders")]
    for _ in range(4):
        await client.beat()
        await other.beat()
    topic = bench.topics.get("ordinary")
    assert topic is not None and (topic.id, 0) in client.owned | other.owned
    assert len(client.owned | other.owned) == 2 and len(meter.names) == 4


async def test_topics_that_come_while_a_pattern_is_matched_are_not_missed() -> None:
    bench = Bench(**dict.fromkeys(NAMES, 1))
    client = Client(bench, "a", topics=None, pattern=costly("new.*"))
    joining = start(client.beat())
    await asyncio.sleep(0)
    assert not joining.done()
    bench.topics.set("new-1", 1)
    await joining
    assert len(client.owned) == 1
    bench.topics.set("new-2", 1)
    await client.beat()
    assert len(client.owned) == 2


# -- A heartbeat that waits for its pattern ----------------------------------------------------------------------------


def slow() -> Bench:
    return Bench(orders=4, **dict.fromkeys(NAMES, 1))


async def test_a_group_that_is_dropped_while_a_pattern_is_matched_takes_no_member() -> None:
    bench = slow()
    waiting = Client(bench, "a", topics=None, pattern=costly("orders"))
    joining = start(waiting.beat())
    await asyncio.sleep(0)
    assert not joining.done()
    bench.groups._drop_never_used()
    other = Client(bench, "b")
    await other.beat()
    await joining
    assert {each.id for each in bench.groups.consumer_describe("g").members} == {"a", "b"}
    assert waiting.epoch != other.epoch, "no epoch is given twice"
    await run(waiting, other)
    assert numbers_of([waiting, other]) == [0, 1, 2, 3]


async def test_a_classic_group_whose_member_rejoins_while_a_pattern_is_matched_is_upgraded_afterwards() -> None:
    bench = slow()
    (classic,) = await classic_group(bench, 1)
    newer = Client(bench, "a", topics=None, pattern=costly("orders"))
    joining = start(newer.beat())
    await asyncio.sleep(0)
    assert not joining.done()
    assert bench.heartbeat(classic.member_id, classic.generation) == Code.NONE, "nothing has changed yet"
    again = bench.join(classic.member_id)
    await joining
    await again
    assert bench.groups.consumer_describe("g").state != "Empty"
    await run(classic, newer)
    assert numbers_of([classic, newer]) == [0, 1, 2, 3]


async def test_a_closed_group_takes_no_member_and_writes_nothing() -> None:
    bench = Bench()
    bench.meta.holding = True
    committing = bench.commit(1, group="another")
    joining = start(bench.beat("a", 0))
    await turn()
    group = bench.groups._groups["g"]
    bench.groups._forget(group)
    bench.meta.land_all()
    assert await committing == [[Code.NONE]]
    assert await code_of(joining) == Code.UNKNOWN_MEMBER_ID
    with pytest.raises(RequestError):
        await group.beat(Beat("g", "b", 0, rebalance_ms=1, topics=frozenset({"orders"})), None)  # type: ignore[union-attr,call-arg,arg-type]
    await turn()
    assert not [key for key in bench.meta.values if key == "groups/g"]


async def test_a_classic_generation_that_waits_to_be_written_is_not_when_its_group_is_closed() -> None:
    bench = Bench()
    bench.meta.holding = True
    committing = bench.commit(1, group="another")
    joining = bench.join()
    await turn()
    bench.groups._forget(bench.groups._groups["g"])
    bench.meta.land_all()
    assert await committing == [[Code.NONE]]
    assert await code_of(joining) == Code.GROUP_ID_NOT_FOUND
    assert not [key for key in bench.meta.values if key == "groups/g"]
