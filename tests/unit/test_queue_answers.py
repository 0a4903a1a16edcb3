"""Answers that cannot be written: the lease is as it was, and the member may repeat them."""

from __future__ import annotations

import pytest

from millstream.broker.groups.queue.partition import QueuePartition
from millstream.broker.groups.queue.verbs import Answer, Member, Verb
from millstream.core.errors import Code, RequestError
from millstream.core.promise import Promise
from tests.unit import share_kit
from tests.unit.groups_kit import turn
from tests.unit.queue_kit import take
from tests.unit.share_kit import LEASE_SECONDS

ANSWERS = {
    "accept": Answer(0, 0, Verb.ACCEPT),
    "gap": Answer(0, 0, Verb.GAP),
    "release": Answer(0, 0, Verb.RELEASE, reason="busy"),
    "delay": Answer(0, 0, Verb.RELEASE, delay_ms=5_000, reason="later"),
    "reject": Answer(0, 0, Verb.REJECT, reason="bad"),
}


async def leased(shares: share_kit.Kit, *values: bytes) -> tuple[QueuePartition, Member]:
    await shares.put(*values)
    partition = await shares.partition()
    member = shares.broker.queues.open("g").join("one")
    assert len(await take(partition, member)) == len(values)
    await partition.save()
    shares.meta.holding = True
    return partition, member


def lose(shares: share_kit.Kit, answered: Promise[None]) -> None:
    """The disk is full: what is being written is not."""
    assert not answered.done
    shares.meta.lose()
    assert isinstance(answered.error, RequestError) and answered.error.code == Code.COORDINATOR_NOT_AVAILABLE


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=list(ANSWERS))
async def test_a_refused_answer_leaves_the_lease_as_it_was_and_may_be_repeated(
    shares: share_kit.Kit, answer: Answer
) -> None:
    partition, member = await leased(shares, b"1", b"2")
    before = partition.figures()
    for _ in range(3):
        lose(shares, partition.answer(member, [answer]))
        assert partition.figures() == before and partition.has_leased(member, 0, 1)
        assert not partition.dead_records() and not partition.has_some and (partition.low, member.leases) == (0, 2)
    again = partition.answer(member, [answer])
    shares.meta.land_all()
    assert again.done and again.error is None and member.leases == 1
    assert not partition.has_leased(member, 0, 1)


async def test_a_refused_answer_is_refused_after_a_crash_as_well(shares: share_kit.Kit) -> None:
    partition, member = await leased(shares, b"1", b"2")
    lose(shares, partition.answer(member, [Answer(0, 0, Verb.ACCEPT)]))
    shares.meta.holding = False
    await partition.answer(member, [Answer(1, 1, Verb.ACCEPT)])  # whose write takes along what has changed
    assert partition.figures().done == 1
    await shares.restart()
    again = (await shares.partition()).figures()
    assert (again.available, again.done, again.low) == (1, 1, 0)


async def last_delivery(shares: share_kit.Kit) -> tuple[QueuePartition, Member]:
    """Of record 0: one more failure gives it up."""
    await shares.put(b"1", b"2")
    partition = await shares.partition()
    member = shares.broker.queues.open("g").join("one")
    for _ in range(partition.settings.attempts_max - 1):
        await take(partition, member)
        await partition.answer(member, [Answer(0, 0, Verb.RELEASE)])
    await take(partition, member)
    await partition.save()
    shares.meta.holding = True
    return partition, member


def dead_records(shares: share_kit.Kit) -> list[str]:
    return [key for key in shares.meta.values if key.startswith("queues/g/jobs/0/d")]


@pytest.mark.parametrize("verb", [Verb.REJECT, Verb.RELEASE])
async def test_a_refused_rejection_that_reached_the_store_leaves_no_dead_letter_of_an_accepted_record(
    shares: share_kit.Kit, verb: Verb
) -> None:
    partition, member = await last_delivery(shares)
    answered = partition.answer(member, [Answer(0, 0, verb)])
    shares.meta.break_at_commit()
    assert isinstance(answered.error, RequestError) and len(dead_records(shares)) == 1
    shares.meta.holding = False
    await partition.answer(member, [Answer(0, 1, Verb.ACCEPT)])
    assert dead_records(shares) == []
    await shares.restart()
    await turn()
    figures = (await shares.partition()).figures()
    assert (figures.done, figures.dead, figures.low) == (2, 0, 2)
    assert shares.broker.topics.get("__dlq__") is None


async def test_a_rejection_that_is_repeated_after_its_write_failed_gives_the_record_up(shares: share_kit.Kit) -> None:
    partition, member = await last_delivery(shares)
    partition.answer(member, [Answer(0, 0, Verb.REJECT)])
    shares.meta.break_at_commit()
    again = partition.answer(member, [Answer(0, 0, Verb.REJECT)])
    shares.meta.land()
    assert again.done and again.error is None
    assert len(dead_records(shares)) == 1, "its deletion comes before it, in the same write"


async def test_of_several_answers_of_one_request_none_stands(shares: share_kit.Kit) -> None:
    partition, member = await leased(shares, b"1", b"2", b"3")
    shares.clock.advance(LEASE_SECONDS - 1)
    both = [Answer(0, 0, Verb.ACCEPT), Answer(1, 1, Verb.RENEW), Answer(2, 2, Verb.REJECT)]
    lose(shares, partition.answer(member, both))
    assert partition.figures().leased == 3
    shares.meta.holding = False
    shares.clock.advance(1)
    assert partition.figures().leased == 0, "the lease of none was renewed"


async def test_what_is_being_answered_is_nobody_elses(shares: share_kit.Kit) -> None:
    """Neither a second answer, nor the end of the lease, nor a fetch gets at a record while its answer is written."""
    partition, member = await leased(shares, b"1")
    other = shares.broker.queues.open("g").join("two")
    released = partition.answer(member, [Answer(0, 0, Verb.RELEASE)])
    with pytest.raises(RequestError) as refused:
        partition.answer(member, [Answer(0, 0, Verb.ACCEPT)])
    assert refused.value.code == Code.INVALID_RECORD_STATE
    shares.clock.advance(LEASE_SECONDS + 1)
    assert await take(partition, other) == [] and partition.figures().leased == 1
    shares.meta.land_all()
    assert released.done and released.error is None
    assert [each.attempt for each in await take(partition, other)] == [2], "released once, not expired as well"


async def test_a_lease_that_ended_while_its_answer_was_refused_ends_now(shares: share_kit.Kit) -> None:
    partition, member = await leased(shares, b"1")
    answered = partition.answer(member, [Answer(0, 0, Verb.ACCEPT)])
    shares.clock.advance(LEASE_SECONDS + 1)
    lose(shares, answered)
    shares.meta.holding = False
    shares.clock.advance(0)
    assert (partition.figures().available, partition.figures().leased, member.leases) == (1, 0, 0)


async def test_a_member_that_leaves_while_its_answer_is_refused_keeps_nothing(shares: share_kit.Kit) -> None:
    partition, member = await leased(shares, b"1")
    queue = shares.broker.queues.open("g")
    answered = partition.answer(member, [Answer(0, 0, Verb.ACCEPT)])
    queue.leave(member)
    lose(shares, answered)
    shares.meta.land_all()
    assert (partition.figures().available, partition.figures().leased, queue.leases) == (1, 0, 0)


async def test_retention_may_take_a_record_whose_answer_is_being_written(shares: share_kit.Kit) -> None:
    partition, member = await leased(shares, b"1", b"2", b"3")
    answered = partition.answer(member, [Answer(0, 1, Verb.ACCEPT)])
    await partition.log.trim(1)
    partition._pass_over(1)
    shares.meta.land_all()
    assert answered.done and answered.error is None
    assert (partition.figures().leased, member.leases, partition.low) == (1, 1, 2)
    refused = partition.answer(member, [Answer(2, 2, Verb.ACCEPT)])
    await refused
    assert (member.leases, partition.low) == (0, 3)


async def test_an_answer_that_came_while_another_was_written_is_settled_with_its_own_write(
    shares: share_kit.Kit,
) -> None:
    partition, member = await leased(shares, b"1", b"2")
    first = partition.answer(member, [Answer(0, 0, Verb.ACCEPT)])
    second = partition.answer(member, [Answer(1, 1, Verb.ACCEPT)])
    lose(shares, first)
    assert not second.done and partition.has_leased(member, 0, 1) and not partition.has_leased(member, 1, 1)
    shares.meta.land_all()
    assert second.error is None and second.done
    assert partition.has_leased(member, 0, 1) and (partition.low, partition.figures().done) == (0, 1)


async def test_the_next_record_of_a_key_waits_until_the_answer_is_durable(shares: share_kit.Kit) -> None:
    await shares.broker.queues.configure("g", {"millstream.key.order": "true", "share.auto.offset.reset": "earliest"})
    topic = shares.broker.topics.get("jobs")
    assert topic is not None
    for value in (b"1", b"2"):
        await shares.broker.inlet(topic.partitions[0]).put(value, b"key")
    partition = await shares.partition()
    queue = shares.broker.queues.open("g")
    member = queue.join("one")
    assert [each.record.value for each in await take(partition, member)] == [b"1"]
    shares.meta.holding = True
    lose(shares, partition.answer(member, [Answer(0, 0, Verb.ACCEPT)]))
    await turn()
    assert await take(partition, member) == []
    again = partition.answer(member, [Answer(0, 0, Verb.ACCEPT)])
    assert await take(partition, member) == []
    shares.meta.land_all()
    assert again.done and [each.record.value for each in await take(partition, member)] == [b"2"]
