"""The `queue` discipline: leases, answers, redelivery, dead letters, delays, order by key, and what a crash leaves."""

from __future__ import annotations

import asyncio
import random

import pytest

from millstream.broker.groups.exclusive import ExclusiveSettings
from millstream.broker.groups.queue.verbs import Answer, Member, TakenRecord, Verb
from millstream.core.errors import Code, RequestError
from millstream.core.promise import Promise
from millstream.records import codec
from millstream.records.compression import Codec
from millstream.records.record import Record
from millstream.stores.base import Operation
from tests.unit.queue_kit import Kit, accept, say, settle, take, values

DAY_MS = 24 * 3_600_000


async def test_two_members_never_hold_the_same_record(kit: Kit) -> None:
    await kit.topic()
    await kit.put(*(b"%d" % number for number in range(300)))
    queue, partition = await kit.queue()
    one, two = queue.join("one"), queue.join("two")
    first, second = await take(partition, one, 140), await take(partition, two, 1000)
    assert values(first + second) == [b"%d" % number for number in range(300)]
    assert await take(partition, one) == []


async def test_what_is_accepted_is_done_and_costs_nothing(kit: Kit) -> None:
    await kit.topic()
    await kit.put(*(b"x" for _ in range(1000)))
    queue, partition = await kit.queue()
    member = queue.join("one")
    accept(partition, member, *await take(partition, member))
    assert partition.low == partition.next == 1000
    figures = partition.figures()
    assert (figures.available, figures.leased, figures.done, member.leases) == (0, 0, 1000, 0)
    kept = [key for key, _ in await kit.meta.list("queues/")]
    assert kept == ["queues/workers/jobs/0/head", "queues/workers/settings"]


async def test_a_lease_that_runs_out_gives_the_record_to_somebody_else(kit: Kit) -> None:
    await kit.topic()
    await kit.put(b"a", b"b")
    queue, partition = await kit.queue()
    slow, fast = queue.join("slow"), queue.join("fast")
    (held, other) = await take(partition, slow)
    accept(partition, slow, other)
    kit.clock.advance(29.9)
    assert await take(partition, fast) == []
    kit.clock.advance(0.2)
    (again,) = await take(partition, fast)
    assert (again.record.value, again.attempt) == (b"a", 2)
    with pytest.raises(RequestError) as refused:
        accept(partition, slow, held)
    assert refused.value.code == Code.INVALID_RECORD_STATE
    assert slow.leases == 0


async def test_renewing_keeps_a_lease(kit: Kit) -> None:
    await kit.topic()
    await kit.put(b"a")
    queue, partition = await kit.queue()
    member = queue.join("one")
    taken = await take(partition, member)
    for _ in range(5):
        kit.clock.advance(25)
        say(partition, member, Verb.RENEW, *taken)
    accept(partition, member, *taken)
    assert partition.low == 1


async def test_a_released_record_comes_back_first_and_holds_up_nothing(kit: Kit) -> None:
    await kit.topic()
    await kit.put(b"a", b"b", b"c", b"d")
    queue, partition = await kit.queue()
    member = queue.join("one")
    first, second = await take(partition, member, 2)
    say(partition, member, Verb.RELEASE, first)
    again = await take(partition, member)
    assert [(each.record.value, each.attempt) for each in again] == [(b"a", 2), (b"c", 1), (b"d", 1)]
    accept(partition, member, second, *again)
    assert partition.low == 4


async def test_released_with_a_delay_it_rests_and_the_others_go_on(kit: Kit) -> None:
    await kit.topic()
    await kit.put(b"a", b"b")
    queue, partition = await kit.queue()
    member = queue.join("one")
    (first,) = await take(partition, member, 1)
    say(partition, member, Verb.RELEASE, first, delay_ms=10_000)
    assert values(await take(partition, member)) == [b"b"]
    kit.clock.advance(9.9)
    assert await take(partition, member) == []
    kit.clock.advance(0.2)
    assert values(await take(partition, member)) == [b"a"]


async def test_backoff_doubles_up_to_its_bound(kit: Kit) -> None:
    await kit.topic()
    await kit.put(b"a")
    queue, partition = await kit.queue(
        millstream__retry__backoff__ms="1000",
        millstream__retry__backoff__max__ms="3000",
        share__delivery__count__limit="10",
    )
    member = queue.join("one")
    for rest in (1, 2, 3, 3):
        (taken,) = await take(partition, member)
        say(partition, member, Verb.RELEASE, taken)
        kit.clock.advance(rest - 0.01)
        assert await take(partition, member) == []
        kit.clock.advance(0.02)


@pytest.mark.parametrize("how", ["released", "expired", "left"])
async def test_after_five_failed_deliveries_a_record_is_a_dead_letter(kit: Kit, how: str) -> None:
    await kit.topic()
    await kit.put(b"poison", key=b"k", headers={"trace": "1"})
    await kit.put(b"good")
    queue, partition = await kit.queue()
    for attempt in (1, 2, 3, 4, 5):
        member = queue.join("one")
        taken = await take(partition, member)
        assert taken[0].attempt == attempt
        accept(partition, member, *taken[1:])
        if how == "released":
            say(partition, member, Verb.RELEASE, taken[0], reason="it is poison")
        elif how == "expired":
            kit.clock.advance(30.1)
        else:
            queue.leave(member)
    (letter,) = await kit.dead()
    reason = {"released": "it is poison", "expired": "its lease expired", "left": "its consumer disconnected"}[how]
    assert (letter.key, letter.value) == (b"k", b"poison")
    headers = dict(letter.headers)
    assert headers.pop("millstream-dead-at")
    assert headers == {
        "trace": b"1",
        "millstream-dead-topic": b"jobs",
        "millstream-dead-partition": b"0",
        "millstream-dead-offset": b"0",
        "millstream-dead-group": b"workers",
        "millstream-dead-attempts": b"5",
        "millstream-dead-reason": reason.encode(),
    }
    assert (partition.figures().dead, partition.figures().done, partition.low) == (1, 1, 2)


async def test_a_rejected_record_is_dead_at_once(kit: Kit) -> None:
    await kit.topic()
    await kit.put(b"a")
    queue, partition = await kit.queue()
    member = queue.join("one")
    say(partition, member, Verb.REJECT, *await take(partition, member))
    (letter,) = await kit.dead()
    assert dict(letter.headers)["millstream-dead-reason"] == b"rejected"


async def test_a_topic_may_name_another_dead_letter_topic_and_the_group_has_the_last_word(kit: Kit) -> None:
    await kit.topic(**{"group.errors.deadletterqueue.topic.name": "of-topic"})
    await kit.put(b"a", b"b")
    queue, partition = await kit.queue()
    member = queue.join("one")
    first, second = await take(partition, member)
    say(partition, member, Verb.REJECT, first)
    await settle()
    await kit.broker.queues.configure("workers", {"group.errors.deadletterqueue.topic.name": "of-group"})
    say(partition, member, Verb.REJECT, second)
    await settle()
    assert {"of-topic", "of-group"} <= set(kit.broker.topics.names())


async def test_a_record_with_a_time_is_not_delivered_before_it_and_holds_up_nothing(kit: Kit) -> None:
    await kit.topic()
    await kit.put(b"later", headers={"millstream-deliver-at": str(kit.clock.now_ms() + 60_000)})
    await kit.put(b"nonsense", headers={"millstream-deliver-at": "soon"})
    await kit.put(b"now")
    queue, partition = await kit.queue()
    member = queue.join("one")
    taken = await take(partition, member)
    assert values(taken) == [b"nonsense", b"now"]
    accept(partition, member, *taken)
    await kit.restart()
    queue, partition = await kit.queue()
    member = queue.join("two")
    kit.clock.advance(59)
    assert await take(partition, member) == []
    kit.clock.advance(1.1)
    assert values(await take(partition, member)) == [b"later"]


async def test_a_delay_is_seen_in_a_compressed_batch(kit: Kit) -> None:
    await kit.topic()
    topic = kit.broker.topics.get("jobs")
    assert topic is not None
    at = str(kit.clock.now_ms() + 1000).encode()
    rows = [Record(0, 0, None, b"x" * 200, ()), Record(0, 0, None, b"y", (("millstream-deliver-at", at),))]
    await topic.partitions[0].append(memoryview(codec.encode(rows, codec=Codec.ZSTD)), kit.clock)[1]
    queue, partition = await kit.queue()
    member = queue.join("one")
    assert len(await take(partition, member)) == 1
    kit.clock.advance(1.1)
    assert values(await take(partition, member)) == [b"y"]


async def test_a_delay_of_the_topic_goes_for_every_record(kit: Kit) -> None:
    await kit.topic(**{"millstream.delay.ms": "5000"})
    await kit.put(b"a")
    queue, partition = await kit.queue()
    member = queue.join("one")
    woken = asyncio.Event()
    partition.wake(woken.set)
    assert await take(partition, member) == []
    kit.clock.advance(5.1)
    assert woken.is_set()
    assert values(await take(partition, member)) == [b"a"]


async def test_in_order_by_key_a_record_waits_for_earlier_ones_of_its_key(kit: Kit) -> None:
    await kit.topic()
    for value, key in ((b"a1", b"a"), (b"a2", b"a"), (b"b1", b"b"), (b"n", None), (b"a3", b"a")):
        await kit.put(value, key=key)
    queue, partition = await kit.queue(millstream__key__order="true")
    member = queue.join("one")
    first = await take(partition, member)
    assert values(first) == [b"a1", b"b1", b"n"]
    say(partition, member, Verb.RELEASE, first[0])
    assert values(await take(partition, member)) == [b"a1"]
    await kit.restart()
    queue, partition = await kit.queue()
    member = queue.join("two")
    again = await take(partition, member)
    assert values(again) == [b"a1", b"b1", b"n"]
    accept(partition, member, again[0])
    (second,) = await take(partition, member)
    assert second.record.value == b"a2"
    say(partition, member, Verb.REJECT, second)
    await settle()
    assert values(await take(partition, member)) == [b"a3"]


async def test_a_delayed_record_takes_its_place_among_its_key_when_its_time_has_come(kit: Kit) -> None:
    await kit.topic()
    later = {"millstream-deliver-at": str(kit.clock.now_ms() + 5_000)}
    await kit.put(b"late", key=b"a", headers=later)
    await kit.put(b"first", key=b"a")
    queue, partition = await kit.queue(millstream__key__order="true")
    member = queue.join("one")
    (first,) = await take(partition, member)
    assert first.record.value == b"first"
    kit.clock.advance(5.1)
    assert await take(partition, member) == []
    accept(partition, member, first)
    assert values(await take(partition, member)) == [b"late"]


async def test_order_by_key_survives_a_restart_over_large_records_and_a_rest(kit: Kit) -> None:
    await kit.topic(**{"max.message.bytes": "10000000"})
    for number in range(100):
        await kit.put(b"%d" % number + bytes(2_000), key=b"even" if number % 2 == 0 else b"odd")
    queue, partition = await kit.queue(millstream__key__order="true")
    member = queue.join("one")
    even, odd = await take(partition, member)
    say(partition, member, Verb.RELEASE, even, delay_ms=60_000)
    say(partition, member, Verb.RELEASE, odd)
    await settle()
    await kit.restart()
    queue, partition = await kit.queue()
    member = queue.join("two")
    seen = []
    while taken := await take(partition, member):
        assert len(taken) == 1, "the even ones wait for the one that rests, the odd ones for each other"
        seen.append(taken[0].record.offset)
        accept(partition, member, *taken)
    assert seen == list(range(1, 100, 2))


async def test_answers_and_attempts_survive_a_crash_and_leases_do_not(kit: Kit) -> None:
    await kit.topic()
    await kit.put(*(b"%d" % number for number in range(400)))
    queue, partition = await kit.queue()
    member = queue.join("one")
    taken = await take(partition, member, 300)
    await partition.answer(member, [Answer(0, 9, Verb.ACCEPT), Answer(20, 279, Verb.ACCEPT)])
    say(partition, member, Verb.RELEASE, taken[290])
    await settle()
    await kit.restart()
    queue, partition = await kit.queue()
    again = await take(partition, queue.join("two"), 1000)
    expected = [*range(10, 20), *range(280, 400)]
    assert [each.record.offset for each in again] == expected
    attempts = {each.record.offset: each.attempt for each in again}
    assert {attempts[offset] for offset in range(280, 300)} == {2} and {attempts[o] for o in range(300, 400)} == {1}


async def test_a_delivery_that_a_restart_cut_short_is_never_the_last_one(kit: Kit) -> None:
    await kit.topic()
    await kit.put(b"a")
    for _ in range(8):
        queue, partition = await kit.queue()
        assert len(await take(partition, queue.join("one"))) == 1
        kit.clock.advance(0.1)  # the delivery is written down
        await settle()
        await kit.restart()
    queue, partition = await kit.queue()
    (taken,) = await take(partition, queue.join("one"))
    assert taken.attempt == 5
    assert await kit.dead() == []


@pytest.mark.parametrize("written", [True, False])
async def test_a_crash_between_giving_up_and_the_dead_letter_leaves_exactly_one(kit: Kit, written: bool) -> None:
    await kit.topic()
    await kit.put(b"a", b"b")
    queue, partition = await kit.queue()
    member = queue.join("one")
    first, second = await take(partition, member)
    say(partition, member, Verb.REJECT, first)
    await settle()  # so that the dead-letter topic exists and holds something
    dead_records = [(key, value.value) for key, value in await kit.meta.list("queues/workers/jobs/0/d")]
    assert dead_records == []
    letters_written = type(partition).letters_written
    try:
        if written:  # the dead letter is durable, the queue's word that it is not
            type(partition).letters_written = lambda self, dead_records: asyncio.get_running_loop().create_future()  # type: ignore[method-assign,assignment,return-value]
        else:
            kit.broker.queues._dead_letters.write_letters = lambda partition: None  # type: ignore[method-assign]
        say(partition, member, Verb.REJECT, second)
        await settle()
    finally:
        type(partition).letters_written = letters_written  # type: ignore[method-assign]
    assert len(await kit.dead()) == (2 if written else 1)
    await kit.restart()
    letters = await kit.dead()
    assert [letter.value for letter in letters] == [b"a", b"b"]
    queue, partition = await kit.queue()
    assert (partition.figures().dead, partition.low) == (2, 2)
    for task in list(kit.broker._tasks):
        task.cancel()


async def test_records_that_retention_took_are_passed_over(kit: Kit) -> None:
    await kit.topic()
    for number in range(10):
        await kit.put(b"%d" % number)
    queue, partition = await kit.queue()
    member = queue.join("one")
    taken = await take(partition, member, 3)
    say(partition, member, Verb.RELEASE, *taken)
    await partition.log.trim(7)
    assert values(await take(partition, member)) == [b"7", b"8", b"9"]
    assert member.leases == 3


async def test_batches_are_given_out_with_what_is_leased_in_them(kit: Kit) -> None:
    await kit.topic()
    await kit.put(*(b"%d" % number for number in range(200)))
    await kit.put(*(b"%d" % number for number in range(200, 240)))
    await kit.put(b"last")
    queue, partition = await kit.queue()
    member = queue.join("one")
    strict = await partition.acquire(member, 50, 1 << 20)
    assert [(run.first, run.last, run.attempt) for run in strict.runs] == [(0, 49, 1)]
    shared = await partition.acquire(member, 100, 1 << 20, whole_batches=True)
    assert [(run.first, run.last) for run in shared.runs] == [(50, 149)], "the batch alone has more than that"
    assert [record.offset for record in codec.iterate(shared.data)] == list(range(200))
    whole = await partition.acquire(member, 60, 1 << 20, whole_batches=True)
    assert [(run.first, run.last) for run in whole.runs] == [(150, 199), (200, 239)], "to the end of a small batch"
    rest = await partition.acquire(member, 50, 1 << 20)
    assert [record.value for record in codec.iterate(rest.data)] == [b"last"]


async def test_leases_are_bounded_and_room_is_made_by_answers(kit: Kit) -> None:
    await kit.topic()
    await kit.put(*(b"x" for _ in range(50)))
    queue, partition = await kit.queue(share__partition__max__record__locks="20")
    one, two = queue.join("one"), queue.join("two")
    taken = await take(partition, one)
    assert len(taken) == 20
    assert await take(partition, two) == []
    accept(partition, one, *taken[:5])
    assert len(await take(partition, two)) == 5


async def test_ten_million_done_records_behind_one_that_is_stuck_cost_one_block(kit: Kit) -> None:
    await kit.topic()
    await kit.put(*(b"x" for _ in range(5000)))
    queue, partition = await kit.queue()
    member = queue.join("one")
    taken = await take(partition, member, 5000)
    accept(partition, member, *taken[1:])
    assert partition.low == 0
    assert len(partition._blocks) <= 2
    assert len([key for key, _ in await kit.meta.list("queues/workers/jobs/0/b")]) <= 2


async def test_bad_answers_change_nothing(kit: Kit) -> None:
    await kit.topic()
    await kit.put(b"a", b"b", b"c")
    queue, partition = await kit.queue()
    member, other = queue.join("one"), queue.join("two")
    await take(partition, member, 2)
    for answers, who in (
        ([Answer(0, 2, Verb.ACCEPT)], member),
        ([Answer(0, 0, Verb.ACCEPT), Answer(0, 0, Verb.ACCEPT)], member),
        ([Answer(1, 0, Verb.ACCEPT)], member),
        ([Answer(-5, 0, Verb.ACCEPT)], member),
        ([Answer(0, 1 << 60, Verb.ACCEPT)], member),
        ([Answer(0, 0, Verb.ACCEPT)], other),
    ):
        with pytest.raises(RequestError):
            partition.answer(who, answers)
    assert (member.leases, partition.figures().leased, partition.low) == (2, 2, 0)


async def test_a_private_queue_begins_at_the_end_and_leaves_nothing_behind(kit: Kit) -> None:
    await kit.topic()
    await kit.put(b"before")
    queue = kit.broker.queues.open("private", durable=False)
    topic = kit.broker.topics.get("jobs")
    assert topic is not None
    member = queue.join("one")
    partition = await queue.partition(topic, 0)
    await kit.put(b"after")
    assert values(await take(partition, member)) == [b"after"]
    queue.leave(member)
    assert kit.broker.queues.get("private") is None
    assert await kit.meta.list("queues/") == []


async def test_a_topic_made_anew_is_a_new_queue(kit: Kit) -> None:
    await kit.topic()
    await kit.put(b"a", b"b")
    queue, partition = await kit.queue()
    member = queue.join("one")
    accept(partition, member, *await take(partition, member))
    await kit.broker.delete_topic("jobs")
    await settle()
    assert [key for key, _ in await kit.meta.list("queues/")] == ["queues/workers/settings"]
    await kit.topic()
    await kit.put(b"c")
    queue, partition = await kit.queue()
    assert values(await take(partition, member)) == [b"c"]


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_nor_does_a_full_disk_leave_it_anything_of_the_old_one(
    kit: Kit, monkeypatch: pytest.MonkeyPatch, is_restarted: bool
) -> None:
    await kit.topic()
    await kit.put(*(b"old" for _ in range(900)))
    queue, partition = await kit.queue()
    member = queue.join("one")
    accept(partition, member, *(each for each in await take(partition, member) if each.record.offset not in (5, 800)))
    await settle()
    real = kit.meta.transact

    def full(*operations: Operation) -> Promise[int]:
        if any(operation.key.startswith("queues/") for operation in operations):
            return Promise.failed(RequestError(Code.KAFKA_STORAGE_ERROR, "the disk is full"))
        return real(*operations)

    monkeypatch.setattr(kit.meta, "transact", full)
    await kit.broker.delete_topic("jobs")
    if is_restarted:
        await kit.restart()
    await settle()
    monkeypatch.undo()
    await kit.topic()
    await kit.put(*(b"new" for _ in range(300)))
    queue, partition = await kit.queue()
    member = queue.join("two")
    accept(partition, member, *await take(partition, member))
    kit.clock.advance(1.1)
    await settle()
    await kit.restart()
    queue, partition = await kit.queue()
    await kit.put(b"newest")
    assert values(await take(partition, queue.join("three"))) == [b"newest"]


async def test_a_dead_letter_is_kept_for_its_time_however_old_its_record_was(kit: Kit) -> None:
    await kit.topic(**{"retention.ms": "-1"})
    queue, partition = await kit.queue()
    long_ago = kit.clock.now_ms() - 40 * DAY_MS
    await kit.broker.inlet(partition.topic.partitions[0]).put(b"old", None, (), long_ago)
    member = queue.join("one")
    say(partition, member, Verb.REJECT, *await take(partition, member))
    assert [letter.value for letter in await kit.dead()] == [b"old"]
    kit.clock.advance(29 * DAY_MS / 1000)
    await kit.logs.housekeep()
    dead = kit.broker.topics.get("__dlq__")
    assert dead is not None
    assert (dead.partitions[0].log.start, dead.partitions[0].log.end) == (0, 1)
    kit.clock.advance(2 * DAY_MS / 1000)
    await kit.logs.housekeep()
    assert dead.partitions[0].log.start == 1


async def test_a_clock_that_is_set_back_does_not_make_leases_longer_than_one_more(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    await kit.topic()
    await kit.put(b"a")
    queue, partition = await kit.queue()
    hung, other = queue.join("hung"), queue.join("other")
    await take(partition, hung)
    now_ms = kit.clock.now_ms
    monkeypatch.setattr(kit.clock, "now_ms", lambda: now_ms() - DAY_MS)
    kit.clock.advance(29)
    assert await take(partition, other) == []
    kit.clock.advance(32)
    assert values(await take(partition, other)) == [b"a"]


async def test_a_log_that_lost_its_end_gives_its_offsets_to_records_that_nobody_has_seen(kit: Kit) -> None:
    """With flush=os the machine may stop before the last records are on disk; what groups have said of them is."""
    await kit.topic()
    kept = [b"kept-%d" % number for number in range(5)]
    await kit.put(*kept)
    await kit.put(*(b"lost-%d" % number for number in range(595)))
    queue, partition = await kit.queue()
    member = queue.join("one")
    taken = await take(partition, member, 600)
    accept(partition, member, *taken[10:])
    say(partition, member, Verb.RELEASE, *taken[:10])
    fanned = await kit.broker.cursors.read("fanout", partition.topic, 1 << 20)
    slow = kit.broker.exclusive("projector", partition.topic, ExclusiveSettings())
    await slow.open()
    await slow.commit({0: 600})
    await slow.leave()
    assert len(taken) == len(fanned) == 600
    await settle()
    partition.log.truncate(5).value()
    await kit.restart()
    await kit.restart()  # it is durable before anything new is taken
    await kit.put(*(b"new-%d" % number for number in range(700)))
    new = [b"new-%d" % number for number in range(700)]
    queue, partition = await kit.queue()
    assert (partition.figures().available, partition.low) == (705, 0)
    again = await take(partition, queue.join("two"), 1000)
    assert values(again) == kept + new
    assert [each.attempt for each in again] == [2] * 5 + [1] * 700
    assert [record.value for record in await kit.broker.cursors.read("fanout", partition.topic, 1 << 20)] == new
    slow = kit.broker.exclusive("projector", partition.topic, ExclusiveSettings())
    await slow.open()
    assert slow.position(0) == 5
    slow.abandon()


async def test_what_every_group_is_done_with_goes_after_its_time(kit: Kit) -> None:
    await kit.topic(**{"millstream.retention.done.ms": "60000"})
    await kit.put(b"a", b"b", b"c")
    queue, partition = await kit.queue()
    member = queue.join("one")
    first, second, third = await take(partition, member)
    accept(partition, member, first, second)
    kit.clock.advance(20)
    say(partition, member, Verb.RENEW, third)
    kit.clock.advance(20)
    say(partition, member, Verb.RENEW, third)
    kit.clock.advance(15)
    assert partition.log.start == 0
    kit.clock.advance(11)
    assert partition.log.start == 2


async def test_what_an_exclusive_group_or_a_cursor_has_not_read_stays(kit: Kit) -> None:
    await kit.topic(**{"millstream.retention.done.ms": "0"})
    await kit.put(b"a", b"b", b"c", b"d")
    queue, partition = await kit.queue()
    topic = partition.topic
    slow = kit.broker.exclusive("projector", topic, ExclusiveSettings())
    await slow.open()
    await slow.commit({0: 1})
    assert [record.value for record in await kit.broker.cursors.read("fanout", topic, 1 << 20, 2)] == [b"a", b"b"]
    member = queue.join("one")
    accept(partition, member, *await take(partition, member))
    await settle()
    kit.clock.advance(11)
    assert partition.log.start == 1, "the exclusive group has only seen the first"
    slow.abandon()
    await kit.restart()
    kit.clock.advance(11)
    assert partition.log.start == 1, "also when none of its members is here"
    jobs = kit.broker.topics.get("jobs")
    assert jobs is not None
    again = kit.broker.exclusive("projector", jobs, ExclusiveSettings(takeover_ms=28_001))
    await again.open()
    kit.clock.advance(60)
    await settle()
    await again.commit({0: 4})
    kit.clock.advance(11)
    assert partition.log.start == 2, "the cursor is behind now"
    again.abandon()


async def test_deleting_a_queue_needs_it_empty_and_forgets_everything(kit: Kit) -> None:
    await kit.topic()
    await kit.put(b"a")
    queue, partition = await kit.queue()
    member = queue.join("one")
    await take(partition, member)
    with pytest.raises(RequestError) as refused:
        await kit.broker.queues.delete("workers")
    assert refused.value.code == Code.NON_EMPTY_GROUP
    queue.leave(member)
    await settle()
    await kit.broker.queues.delete("workers")
    assert await kit.meta.list("queues/") == []


async def test_settings_that_make_no_sense_are_refused(kit: Kit) -> None:
    for settings in ({"share.delivery.count.limit": "0"}, {"share.nothing": "1"}, {"share.auto.offset.reset": "x"}):
        with pytest.raises(RequestError) as refused:
            kit.broker.queues.open("other", settings=settings)
        assert refused.value.code == Code.INVALID_CONFIG
    assert kit.broker.queues.get("other") is None


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 12))])
async def test_whatever_happens_every_record_ends_done_or_dead_once(kit: Kit, seed: int) -> None:
    """Random members take, answer, hang, leave; time passes; the broker crashes. A model of what was said is kept."""
    rng = random.Random(seed)
    await kit.topic(**{"group.millstream.retry.backoff.ms": rng.choice(("0", "500"))})
    accepted: set[int] = set()
    rejected: set[int] = set()
    total = 0
    queue, partition = await kit.queue(millstream__key__order=rng.choice(("true", "false")))
    held: dict[Member, list[TakenRecord]] = {queue.join("first"): []}
    for _ in range(1500):
        match rng.randrange(12):
            case 0 | 1:
                count = rng.randrange(1, 40)
                at = str(kit.clock.now_ms() + rng.randrange(3000))
                await kit.put(
                    *(b"%d" % (total + n) for n in range(count)),
                    key=rng.choice((None, b"a", b"b")),
                    headers={"millstream-deliver-at": at} if rng.random() < 0.2 else None,
                )
                total += count
            case 2 | 3 | 4:
                member = rng.choice(list(held))
                held[member] += await take(partition, member, rng.randrange(1, 60))
            case 5 | 6 | 7 | 8:
                member = rng.choice(list(held))
                rng.shuffle(held[member])
                for _ in range(rng.randrange(10)):
                    if held[member]:
                        one = held[member].pop()
                        verb = rng.choice((Verb.ACCEPT, Verb.ACCEPT, Verb.ACCEPT, Verb.RELEASE, Verb.REJECT))
                        try:
                            say(partition, member, verb, one)
                        except RequestError:
                            continue  # its lease expired
                        assert one.record.offset not in accepted | rejected
                        (accepted if verb == Verb.ACCEPT else rejected if verb == Verb.REJECT else set()).add(
                            one.record.offset
                        )
            case 9:
                kit.clock.advance(rng.choice((0.1, 1, 10, 31)))
            case 10:
                if rng.random() < 0.5 or len(held) < 2:
                    held[queue.join("more")] = []
                else:
                    member = rng.choice(list(held))
                    queue.leave(member)
                    del held[member]
            case 11:
                if rng.random() < 0.2:
                    await settle()
                    await kit.restart()
                    queue, partition = await kit.queue()
                    held = {queue.join("again"): []}
    member = queue.join("last")
    for _ in range(400):
        kit.clock.advance(31)
        await settle()
        while taken := await take(partition, member):  # in order by key there is one of each at a time
            accept(partition, member, *taken)
            accepted.update(one.record.offset for one in taken)
        if partition.low == total:
            break
    letters = [int(letter.value or b"") for letter in await kit.dead()]
    assert len(letters) == len(set(letters)), "a dead letter was written twice"
    assert accepted.isdisjoint(letters), "a record is both done and dead"
    assert accepted | set(letters) == set(range(total)), "a record is neither done nor dead"
    assert rejected <= set(letters)
    figures = partition.figures()
    assert (figures.leased, figures.available, figures.waiting, figures.dying) == (0, 0, 0, 0)
    assert (figures.done, figures.dead) == (len(accepted), len(letters))
    assert queue.leases == partition.leases == 0


async def test_what_is_given_out_next_can_be_seen_without_leasing_it(kit: Kit) -> None:
    await kit.topic()
    await kit.put(*(b"%d" % number for number in range(8)))
    queue, partition = await kit.queue()
    assert partition.ahead(10) == [(0, 7)]
    member = queue.join("a")
    taken = await take(partition, member, 5)
    assert partition.ahead(10) == [(5, 7)]
    say(partition, member, Verb.RELEASE, taken[1])
    assert partition.ahead(10) == [(1, 1), (5, 7)]
    say(partition, member, Verb.RELEASE, taken[4])
    assert partition.ahead(10) == [(1, 1), (4, 7)]
    assert partition.ahead(1) == [(1, 1)]
    assert partition.figures().available == 5
