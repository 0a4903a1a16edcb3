"""Queues over a log that cannot be read for a moment: nothing is taken for gone, and nothing is forgotten."""

from __future__ import annotations

from typing import Any

import pytest

from millstream.broker.groups.queue.partition import QueuePartition
from millstream.broker.groups.queue.verbs import Verb
from millstream.core.errors import Code, RequestError
from millstream.core.promise import Promise, begin
from millstream.log.slice import Slice
from millstream.stores.memory import MemoryLog
from tests.unit.queue_kit import Kit, accept, say, settle, take, values


class Reads:
    """Those of all logs; some of them fail, or wait."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failing = 0
        self.gate: Promise[None] | None = None
        self.before_gate = 0
        """How many do not wait."""
        read = MemoryLog.read

        def patched(log: MemoryLog, offset: int, bytes_max: int) -> Promise[Slice]:
            if self.failing:
                self.failing -= 1
                return Promise.failed(RequestError(Code.KAFKA_STORAGE_ERROR, "the store cannot be reached"))
            found = read(log, offset, bytes_max)
            if self.gate is None or self.before_gate:
                self.before_gate = max(self.before_gate - 1, 0)
                return found
            answer: Promise[Slice] = Promise()
            self.gate.then(lambda _: answer.settle(found.value()))
            return answer

        monkeypatch.setattr(MemoryLog, "read", patched)

    def open(self) -> None:
        gate, self.gate = self.gate, None
        assert gate is not None
        gate.settle(None)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(monkeypatch)


async def put_one_by_one(kit: Kit, count: int, key: bytes | None = None) -> None:
    for number in range(count):
        await kit.put(b"%d" % number, key=key)  # a batch each


async def restart(kit: Kit) -> tuple[Any, QueuePartition]:
    await kit.restart()
    return await kit.queue()


async def test_a_rejected_record_that_cannot_be_read_now_gets_its_dead_letter_later(kit: Kit, reads: Reads) -> None:
    await kit.topic()
    await put_one_by_one(kit, 3)
    queue, partition = await kit.queue()
    member = queue.join("one")
    _, second, _ = await take(partition, member)
    partition.reading._kept = []  # as when others were read meanwhile
    reads.failing = 1
    say(partition, member, Verb.REJECT, second)
    assert await kit.dead() == [] and partition.dead_records(), "it is not done before its dead letter is there"
    kit.clock.advance(1.1)
    assert [letter.value for letter in await kit.dead()] == [b"1"]
    assert (partition.dead, partition.dead_records()) == (1, [])


async def test_a_rejected_record_that_retention_took_has_no_dead_letter(kit: Kit, reads: Reads) -> None:
    await kit.topic()
    await put_one_by_one(kit, 3)
    queue, partition = await kit.queue()
    member = queue.join("one")
    first, _, third = await take(partition, member)
    await partition.log.trim(2)
    partition.reading._kept = []
    say(partition, member, Verb.REJECT, first)
    assert await kit.dead() == []
    await settle()
    assert partition.dead_records() == [] and third.record.offset == 2


async def test_a_failed_read_is_told_and_loses_nothing(kit: Kit, reads: Reads) -> None:
    await kit.topic()
    await put_one_by_one(kit, 2)
    queue, partition = await kit.queue()
    member = queue.join("one")
    reads.failing = 2
    with pytest.raises(RequestError, match="cannot be reached"):
        await take(partition, member)
    with pytest.raises(RequestError, match="cannot be reached"):
        await partition.acquire(member, 10, 1 << 20)
    assert values(await take(partition, member)) == [b"0", b"1"]


@pytest.mark.parametrize("as_batches", [True, False])
async def test_what_was_leased_before_a_read_failed_is_handed_over(
    kit: Kit, reads: Reads, monkeypatch: pytest.MonkeyPatch, as_batches: bool
) -> None:
    monkeypatch.setattr("millstream.broker.groups.queue.reading.READ_BYTES_MAX", 1)  # a batch with each read
    await kit.topic()
    await put_one_by_one(kit, 2)
    queue, partition = await kit.queue()
    member = queue.join("one")
    lease = partition._lease

    def lease_and_fail(*arguments: Any) -> Any:
        reads.failing = 1
        return lease(*arguments)

    monkeypatch.setattr(partition, "_lease", lease_and_fail)
    if as_batches:
        taken = (await partition.acquire(member, 10, 1 << 20)).runs
        assert [(run.first, run.last) for run in taken] == [(0, 0)]
    else:
        assert values(await take(partition, member)) == [b"0"]
    assert member.leases == 1


ORDERED = {"millstream__key__order": "true"}


async def test_order_by_key_outlives_a_read_that_fails_after_a_restart(kit: Kit, reads: Reads) -> None:
    await kit.topic()
    await put_one_by_one(kit, 6, key=b"k")
    queue, partition = await kit.queue(**ORDERED)
    assert values(await take(partition, queue.join("one"))) == [b"0"]
    await partition.save()
    queue, partition = await restart(kit)
    member = queue.join("one")
    reads.failing = 1
    with pytest.raises(RequestError, match="cannot be reached"):
        await take(partition, member)
    done: list[bytes | None] = []
    while taken := await take(partition, member):
        assert len(taken) == 1, "one of a key at a time"
        done += values(taken)
        accept(partition, member, *taken)
    assert done == [b"%d" % number for number in range(6)]


async def test_a_record_that_is_done_while_keys_are_read_holds_nobody_up(
    kit: Kit, reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millstream.broker.groups.queue.reading.READ_BYTES_MAX", 1)
    await kit.topic()
    await put_one_by_one(kit, 2, key=b"k")
    queue, partition = await kit.queue()
    member = queue.join("one")
    first, second = await take(partition, member)
    say(partition, member, Verb.RELEASE, second)
    await kit.broker.queues.configure("workers", {"millstream.key.order": "true"})
    partition.reading._kept = []
    reads.gate, reads.before_gate = Promise(), 1
    takings = [begin(take(partition, queue.join(name))) for name in ("two", "three")]
    accept(partition, member, first)  # whose key is known by now
    reads.open()
    await settle()
    taken = [each for taking in takings for each in taking.value()] + await take(partition, member)
    assert values(taken) == [b"1"]


async def test_key_order_begins_where_the_log_does(kit: Kit, reads: Reads) -> None:
    """A block of which retention took the first records."""
    await kit.topic()
    await put_one_by_one(kit, 4, key=b"k")
    queue, partition = await kit.queue(**ORDERED)
    assert values(await take(partition, queue.join("one"))) == [b"0"]
    await partition.save()
    queue, partition = await restart(kit)
    await partition.log.trim(2)
    member = queue.join("one")
    assert values(await take(partition, member)) == [b"2"]


async def test_letters_that_another_broker_wrote_are_looked_for_in_the_log_as_it_is_now(
    kit: Kit, reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    await kit.topic()
    await put_one_by_one(kit, 1)
    queue, partition = await kit.queue()
    refreshed: list[str] = []
    refresh = MemoryLog.refresh

    def noted(log: MemoryLog) -> Promise[None]:
        refreshed.append("dead letters" if log is not partition.log else "jobs")
        return refresh(log)

    monkeypatch.setattr(MemoryLog, "refresh", noted)
    member = queue.join("one")
    say(partition, member, Verb.REJECT, *await take(partition, member))
    assert len(await kit.dead()) == 1
    assert "dead letters" in refreshed
