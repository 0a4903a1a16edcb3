from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.broker.groups.groups import BeatAnswer, GroupSettings
from millstream.core.errors import Code, RequestError
from tests.unit.groups_kit import Bench, Client, code_of, stable_group, start, turn


def owned_once(clients: list[Client]) -> bool:
    everything = [partition for client in clients for partition in client.owned]
    return len(everything) == len(set(everything))


async def converge(*clients: Client, beats: int = 8) -> None:
    for _ in range(beats):
        for client in clients:
            await client.beat()
            assert owned_once(list(clients))


async def test_the_first_member_gets_everything_in_its_first_answer() -> None:
    bench = Bench()
    answer = await bench.beat("m", 0)
    topic = bench.topics.get("orders")
    assert topic is not None
    assert answer.assignment == {topic.id: [0, 1, 2, 3]}
    assert (answer.epoch, answer.heartbeat_interval_ms) == (1, 5_000)
    assert (await bench.beat("m", 1)).assignment is None, "nothing changed, so nothing is listed"
    assert bench.groups.consumer_describe("g").state == "Stable"


async def test_one_two_and_three_members_converge_and_as_little_moves_as_can() -> None:
    bench = Bench(orders=6)
    one, two, three = (Client(bench, name) for name in ("a", "b", "c"))
    await converge(one)
    assert len(one.owned) == 6
    kept = one.owned
    await converge(one, two)
    assert (len(one.owned), len(two.owned)) == (3, 3)
    assert one.owned <= kept
    kept, kept_two = one.owned, two.owned
    await converge(one, two, three)
    assert [len(client.owned) for client in (one, two, three)] == [2, 2, 2]
    assert one.owned <= kept
    assert two.owned <= kept_two
    assert len({client.epoch for client in (one, two, three)}) == 1
    assert bench.groups.consumer_describe("g").state == "Stable"


async def test_a_newcomer_waits_until_the_owner_says_that_it_stopped() -> None:
    bench = Bench(orders=2)
    old, new = Client(bench, "old"), Client(bench, "new")
    await converge(old)
    waits = await new.beat()
    assert isinstance(waits, BeatAnswer)
    assert (new.epoch, new.numbers, waits.heartbeat_interval_ms) == (2, [], 500)
    told = await bench.beat("old", 1)
    assert told.assignment is not None
    assert (told.epoch, sum(map(len, told.assignment.values()))) == (1, 1)
    await bench.beat("old", 1)
    await new.beat()
    assert new.numbers == [], "a beat that lists nothing confirms nothing"
    assert bench.groups.consumer_describe("g").state == "Reconciling"
    remaining = frozenset((topic, n) for topic, numbers in told.assignment.items() for n in numbers)
    assert (await bench.beat("old", 1, owned=remaining)).epoch == 2
    await new.beat()
    assert len(new.numbers) == 1


async def test_who_does_not_give_up_in_its_rebalance_timeout_is_fenced() -> None:
    bench = Bench(orders=2)
    old, new = Client(bench, "old", rebalance_ms=20_000), Client(bench, "new")
    await converge(old)
    await new.beat()
    for _ in range(3):
        await bench.beat("old", 1)
        bench.clock.advance(9)
        await new.beat()
    assert await code_of(bench.beat("old", 1)) == Code.UNKNOWN_MEMBER_ID
    await new.beat()
    assert new.numbers == [0, 1]


async def test_a_silent_member_is_dropped_after_its_session() -> None:
    bench = Bench()
    one, two = Client(bench, "a"), Client(bench, "b")
    await converge(one, two)
    bench.clock.advance(40)
    await one.beat()
    bench.clock.advance(6)
    await one.beat()
    assert one.numbers == [0, 1, 2, 3]
    assert await two.beat() == Code.UNKNOWN_MEMBER_ID
    await converge(one, two)
    assert (len(one.owned), len(two.owned)) == (2, 2)


async def test_a_member_that_leaves_hands_over_at_once() -> None:
    bench = Bench()
    one, two = Client(bench, "a"), Client(bench, "b")
    await converge(one, two)
    await two.leave()
    await one.beat()
    assert one.numbers == [0, 1, 2, 3]
    await one.leave()
    assert bench.groups.consumer_describe("g").state == "Empty"


async def test_new_partitions_and_new_topics_are_picked_up() -> None:
    bench = Bench(orders=1)
    client = Client(bench, "a", topics=frozenset({"orders", "bills"}))
    await converge(client)
    assert len(client.owned) == 1
    bench.topics.set("orders", 3)
    await client.beat()
    assert len(client.owned) == 3
    bench.topics.set("bills", 2)
    await client.beat()
    assert len(client.owned) == 5
    epoch = client.epoch
    bench.topics.set("unrelated", 2)
    await client.beat()
    assert client.epoch == epoch
    bench.topics.set("orders", 0)
    await converge(client)
    assert client.numbers == [0, 1]


async def test_a_pattern_follows_topics_as_they_come() -> None:
    bench = Bench(orders=1, bills=1)
    client = Client(bench, "a", topics=None, pattern="^ord.*")
    await converge(client)
    assert len(client.owned) == 1
    bench.topics.set("ordinary", 2)
    await client.beat()
    assert len(client.owned) == 3
    await client.beat(pattern="", topics=frozenset({"bills"}))
    await converge(client)
    assert len(client.owned) == 1
    assert await code_of(bench.beat("b", 0, pattern="(")) == Code.INVALID_REGULAR_EXPRESSION
    assert len(bench.groups.consumer_describe("g").members) == 1


async def test_epochs_fence() -> None:
    bench = Bench()
    client = Client(bench, "a")
    await converge(client)
    assert await code_of(bench.beat("a", client.epoch + 1)) == Code.FENCED_MEMBER_EPOCH
    assert await code_of(bench.beat("nobody", 1)) == Code.UNKNOWN_MEMBER_ID
    bench.topics.set("orders", 5)
    await client.beat()
    assert client.epoch == 2
    assert await code_of(bench.beat("a", 1)) == Code.FENCED_MEMBER_EPOCH


async def test_a_member_that_missed_an_answer_may_ask_again_with_the_epoch_before() -> None:
    bench = Bench()
    client = Client(bench, "a")
    await converge(client)
    bench.topics.set("orders", 5)
    missed = await bench.beat("a", 1)
    assert missed.epoch == 2
    again = await bench.beat("a", 1, owned=client.owned, topics=frozenset({"orders"}), rebalance_ms=60_000)
    assert (again.epoch, again.assignment) == (2, missed.assignment)
    foreign = frozenset((topic, 99) for topic, _ in client.owned)
    assert await code_of(bench.beat("a", 1, owned=foreign)) == Code.FENCED_MEMBER_EPOCH


async def test_commits_need_the_current_epoch() -> None:
    bench = Bench()
    client = Client(bench, "a")
    await converge(client)
    assert await bench.commit(1, "a", 1) == [[Code.NONE]]
    bench.topics.set("orders", 5)
    await client.beat()
    assert await code_of(bench.commit(2, "a", 1)) == Code.STALE_MEMBER_EPOCH
    assert await code_of(bench.commit(2, "b", 2)) == Code.UNKNOWN_MEMBER_ID
    assert await code_of(bench.commit(2)) == Code.UNKNOWN_MEMBER_ID
    assert await bench.commit(2, "a", 2) == [[Code.NONE]]
    with pytest.raises(RequestError, match="stale"):
        bench.groups.fetch("g", None, "a", 1)
    assert len(bench.groups.fetch("g", None, "a", 2)) == 1


async def test_an_epoch_is_durable_before_it_is_told() -> None:
    bench = Bench()
    bench.meta.holding = True
    first, second = start(bench.beat("a", 0)), start(bench.beat("b", 0))
    await turn()
    assert not first.done()
    bench.meta.land()
    await turn()
    assert first.result().epoch == 1
    assert not second.done(), "it came after the first epoch was on its way"
    bench.meta.land()
    assert (await second).epoch == 2


async def test_an_epoch_that_could_not_be_stored_is_tried_again_with_the_next_beat() -> None:
    bench = Bench()
    bench.meta.holding = True
    first = start(bench.beat("a", 0))
    await turn()
    bench.meta.lose()
    assert await code_of(first) == Code.COORDINATOR_NOT_AVAILABLE
    bench.meta.holding = False
    assert (await bench.beat("a", 0)).epoch == 2


async def test_epochs_go_on_after_a_restart_and_old_members_join_again() -> None:
    bench = Bench()
    client = Client(bench, "a")
    await converge(client)
    before = client.epoch
    await bench.restart()
    assert await code_of(bench.commit(1, "a", before)) == Code.UNKNOWN_MEMBER_ID
    assert await client.beat() == Code.UNKNOWN_MEMBER_ID
    await client.beat()
    assert client.epoch > before
    assert client.numbers == [0, 1, 2, 3]


async def test_a_static_member_comes_back_to_its_partitions() -> None:
    bench = Bench()
    old, other = Client(bench, "old", instance_id="i"), Client(bench, "other")
    await converge(old, other)
    had, epoch = old.owned, old.epoch
    assert await code_of(bench.beat("new", 0, instance_id="i")) == Code.UNRELEASED_INSTANCE_ID
    await old.leave(-2, instance_id="i")
    await other.beat()
    assert len(other.owned) == 2, "its partitions wait for it"
    new = Client(bench, "new", instance_id="i")
    await new.beat()
    assert (new.owned, new.epoch) == (had, epoch)
    assert await code_of(bench.beat("old", epoch, instance_id="i")) == Code.FENCED_INSTANCE_ID


async def test_a_static_member_that_stays_away_loses_its_partitions_after_its_session() -> None:
    bench = Bench()
    old, other = Client(bench, "old", instance_id="i"), Client(bench, "other")
    await converge(old, other)
    await old.leave(-2, instance_id="i")
    for _ in range(5):
        bench.clock.advance(10)
        await other.beat()
    assert len(other.owned) == 4


async def test_members_vote_for_the_assignor() -> None:
    bench = Bench(orders=3)
    assert await code_of(bench.beat("a", 0, assignor="nonsense")) == Code.UNSUPPORTED_ASSIGNOR
    clients = [Client(bench, name, assignor="range") for name in "ab"]
    await converge(*clients)
    assert [client.numbers for client in clients] == [[0, 1], [2]]
    assert bench.groups.consumer_describe("g").assignor == "range"


@pytest.mark.parametrize(
    "fields",
    [
        {"member_id": "", "epoch": 0, "id_required": True},
        {"member_id": "", "epoch": 1},
        {"member_id": "a", "epoch": -3},
        {"member_id": "a", "epoch": -2},
        {"member_id": "a", "epoch": 0, "rebalance_ms": None},
        {"member_id": "a", "epoch": 0, "topics": None},
        {"member_id": "a", "epoch": 0, "instance_id": ""},
    ],
)
async def test_what_contradicts_itself_is_refused(fields: dict[str, Any]) -> None:
    assert await code_of(Bench().beat(**fields)) == Code.INVALID_REQUEST


async def test_the_first_version_of_the_protocol_gets_its_member_id_from_the_broker() -> None:
    answer = await Bench().beat("", 0)
    assert answer.member_id


async def test_an_empty_classic_group_becomes_a_consumer_group_with_its_offsets_and_back() -> None:
    bench = Bench()
    (leader,) = await stable_group(bench, 1)
    await bench.commit(5, leader, 1)
    bench.groups.leave("g", [(leader, None)])
    answer = await bench.beat("a", 0)
    assert answer.epoch == 2
    assert bench.committed() == 5
    assert [group.type for group in bench.groups.list()] == ["Consumer"]
    await bench.beat("a", -1)
    joined = bench.join()
    await turn()
    assert joined.result().generation > 2
    assert bench.committed() == 5


async def test_members_have_a_bound() -> None:
    bench = Bench(GroupSettings(members_max=1))
    await bench.beat("a", 0)
    assert await code_of(bench.beat("b", 0)) == Code.GROUP_MAX_SIZE_REACHED


async def test_offsets_of_subscribed_topics_cannot_be_deleted() -> None:
    bench = Bench()
    await bench.beat("a", 0)
    assert await bench.groups.delete_offsets("g", [("orders", [0])]) == [[Code.GROUP_SUBSCRIBED_TO_TOPIC]]


Step = tuple[str, int]
steps = st.lists(
    st.tuples(
        st.sampled_from(["beat", "beat", "beat", "beat", "leave", "lose", "grow", "delete", "tick", "slow", "wish"]),
        st.integers(0, 3),
    ),
    max_size=60,
)


@settings(max_examples=100)
@given(steps, st.booleans())
def test_no_partition_ever_has_two_owners_and_all_find_one_in_the_end(walk: list[Step], by_range: bool) -> None:
    asyncio.run(_walk(walk, "range" if by_range else "uniform"))


async def _walk(walk: list[Step], assignor: str) -> None:
    bench = Bench(orders=3, bills=2)
    both = frozenset({"orders", "bills"})
    clients = [Client(bench, f"m{n}", topics=both, assignor=assignor) for n in range(4)]
    epochs: dict[str, int] = {}
    for step, which in walk:
        client = clients[which]
        await _step(step, bench, client)
        _stop_expired(bench, clients)
        assert owned_once(clients)
        if client.epoch:
            assert client.epoch >= epochs.get(client.name, 0), "an epoch went back"
            epochs[client.name] = client.epoch
    wish = {"topics": both}
    for client in clients:
        await client.beat(**wish)
    await converge(*clients, beats=10)
    counts = [topic.partition_count for topic in map(bench.topics.get, both) if topic is not None]
    assert sum(len(client.owned) for client in clients) == sum(counts)
    assert bench.groups.consumer_describe("g").state == "Stable"


async def _step(step: str, bench: Bench, client: Client) -> None:
    if step == "beat":
        await client.beat()
    elif step == "leave" and client.epoch:
        await client.leave()
    elif step == "lose" and client.epoch:  # the answer is lost; the client says everything the next time
        known = (client.epoch, client.owned)
        await client.beat()
        if client.epoch:
            client.epoch, client.owned = known
            await client.beat(owned=client.owned, topics=frozenset({"orders", "bills"}), rebalance_ms=60_000)
    elif step == "grow":
        topic = bench.topics.get("orders")
        bench.topics.set("orders", topic.partition_count + 1 if topic else 2)
    elif step == "delete" and bench.topics.get("bills") is not None:
        bench.topics.set("bills", 0)
    elif step == "delete":
        bench.topics.set("bills", 2)
    elif step == "tick":
        bench.clock.advance(10)
    elif step == "slow":
        bench.clock.advance(46)
    elif step == "wish" and client.epoch:
        await client.beat(topics=frozenset({"orders"}))


def _stop_expired(bench: Bench, clients: list[Client]) -> None:
    """A client counts its session too, and stops by itself when it is over."""
    with contextlib.suppress(RequestError):
        alive = {member.id for member in bench.groups.consumer_describe("g").members}
        for client in clients:
            if client.name not in alive:
                client.epoch, client.owned = 0, frozenset()
