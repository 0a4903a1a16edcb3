"""Dead letters in bad moments: written when giving up is durable, by the broker that has the queue, and once."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import pytest
from crc32c import crc32c

from millstream.broker.broker import Broker
from millstream.broker.groups.queue.dead_letters import HEADER
from millstream.broker.groups.queue.partition import QueuePartition
from millstream.broker.groups.queue.verbs import Answer, Member, Verb
from millstream.config import Config
from millstream.core.metrics import Metrics
from millstream.core.promise import Promise
from millstream.records import codec
from millstream.records.batch import CRC_START, HEADER_BYTES
from millstream.stores.keys import MemoryMeta
from millstream.stores.memory import MemoryLog, MemoryLogStore
from millstream.testing.clock import VirtualClock
from tests.batches import append, batch
from tests.unit.queue_kit import EARLIEST, Losing, settle, take
from tests.unit.share_kit import Kit
from tests.unit.share_kit import shares as kit

__all__ = ["kit"]

DEAD = "__dlq__"


def letters(broker: Broker) -> list[bytes | None]:
    topic = broker.topics.get(DEAD)
    assert topic is not None
    slices = [partition.log.read(0, 1 << 24).value() for partition in topic.partitions]
    return [record.value for each in slices for record in codec.iterate(each.to_bytes())]


async def give_up_the_first(kit: Kit, partition: QueuePartition, member: Member) -> None:
    """Its letter is there; what says so is held."""
    await take(partition, member)
    kit.meta.holding = True
    partition.answer(member, [Answer(0, 0, Verb.REJECT)])
    kit.meta.land()
    await settle()
    assert letters(kit.broker) == [b"one"]


async def test_no_letter_is_written_before_it_is_durable_that_the_record_is_given_up(kit: Kit) -> None:
    """One record is given up while what says that another is letters_written is on its way."""
    await kit.broker.topics.create(DEAD, 1, {})
    await kit.put(b"one", b"two")
    partition = await kit.partition()
    member = kit.broker.queues.open("g").join("m")
    await give_up_the_first(kit, partition, member)
    while not any(each.key.endswith("/d0") for each in kit.meta.held[0][0]):
        kit.meta.land()
    partition.answer(member, [Answer(1, 1, Verb.REJECT)])
    kit.meta.land()
    await settle()
    assert any(each.key.endswith("/d1") for each in kit.meta.held[0][0]), "it is on its way"
    assert letters(kit.broker) == [b"one"], "after a crash now the other would be delivered again"
    kit.meta.land_all()
    await settle()
    assert letters(kit.broker) == [b"one", b"two"]


async def test_the_letter_of_a_batch_that_cannot_be_decoded_names_its_own_offsets(kit: Kit) -> None:
    """Its checksum matches: the producer wrote nonsense. The batch is one letter, and the group goes on behind it."""
    await kit.broker.topics.create(DEAD, 1, {})
    await kit.put(b"zero", b"one")
    nonsense = batch(b"two", b"three", b"four")
    nonsense[HEADER_BYTES:] = b"\xff" * (len(nonsense) - HEADER_BYTES)
    struct.pack_into(">I", nonsense, CRC_START - 4, crc32c(memoryview(nonsense)[CRC_START:]))
    partition = await kit.partition()
    await append(partition.log, nonsense)
    await kit.put(b"five")
    member = kit.broker.queues.open("g").join("m")
    taken = [each.record.offset for _ in range(3) for each in await take(partition, member)]
    assert taken == [0, 1, 5]
    await settle()
    topic = kit.broker.topics.get(DEAD)
    assert topic is not None
    (letter,) = codec.iterate(topic.partitions[0].log.read(0, 1 << 24).value().to_bytes())
    headers = dict(letter.headers)
    assert letter.value is None
    assert headers[HEADER + "offset"] == b"2" and headers[HEADER + "unreadable"] == b"5"
    assert b"the batch of offsets 2 to 4 cannot be decoded" in (headers[HEADER + "reason"] or b"")


async def test_a_letter_is_found_again_when_the_dead_letter_topic_has_grown_since(kit: Kit) -> None:
    await kit.broker.topics.create(DEAD, 1, {})
    topic = kit.broker.topics.get("jobs")
    assert topic is not None
    queue = kit.broker.queues.open("g")
    await kit.broker.inlet(topic.partitions[1]).put(b"one")
    partition = await queue.partition(topic, 1)
    member = queue.join("m")
    await give_up_the_first(kit, partition, member)
    kit.meta.held.clear()  # a crash, before it is noted that the letter is there
    kit.meta.holding = False
    await kit.broker.topics.grow(DEAD, 2)
    await kit.restart()
    await settle()
    assert letters(kit.broker) == [b"one"]


async def test_a_broker_whose_lease_ran_out_while_it_stood_still_writes_no_letter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, cluster = VirtualClock(), Losing(0)
    broker = Broker(Config(), MemoryLogStore(clock), MemoryMeta(), clock, Metrics(), cluster)
    await broker.start()
    topic = await broker.topics.create("jobs", 1, {})
    await broker.topics.create(DEAD, 1, {})
    await broker.inlet(topic.partitions[0]).put(b"one")
    queue = broker.queues.open("workers", settings=EARLIEST)
    partition = await queue.partition(topic, 0)
    member = queue.join("m")
    await take(partition, member)
    refreshed: Promise[None] = Promise()
    monkeypatch.setattr(MemoryLog, "refresh", lambda log: refreshed)
    partition.answer(member, [Answer(0, 0, Verb.REJECT)])
    await settle()  # it looks whether the letter is there already
    cluster.has_lost = True  # by its own clock, before the queue learns of it
    refreshed.settle(None)
    await settle()
    assert letters(broker) == [], "the broker that has the queue now writes it"
    await broker.close()


async def test_a_reason_that_utf_8_cannot_say_does_not_hold_up_the_letters(kit: Kit) -> None:
    """However it came to be stored: it would be tried again and again, and every letter of the partition with it."""
    await kit.broker.topics.create(DEAD, 1, {})
    await kit.put(b"one", b"two")
    partition = await kit.partition()
    member = kit.broker.queues.open("g").join("m")
    await take(partition, member)
    partition.answer(member, [Answer(0, 0, Verb.REJECT, reason="\udcff"), Answer(1, 1, Verb.REJECT)])
    await settle()
    assert letters(kit.broker) == [b"one", b"two"]


async def test_a_dead_letter_topic_that_is_just_being_made_is_waited_for(
    kit: Kit, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By the letters of another partition: it is stored, and not known yet, since a store takes its time with it."""
    topic = kit.broker.topics.get("jobs")
    assert topic is not None
    queue = kit.broker.queues.open("g")
    member = queue.join("m")
    may_go_on, prepare = asyncio.Event(), kit.broker.topics._prepare

    async def held(*arguments: Any) -> Any:
        await may_go_on.wait()
        return await prepare(*arguments)

    monkeypatch.setattr(kit.broker.topics, "_prepare", held)
    for index in range(2):
        await kit.broker.inlet(topic.partitions[index]).put(b"%d" % index)
        partition = await queue.partition(topic, index)
        await take(partition, member)
        partition.answer(member, [Answer(0, 0, Verb.REJECT)])
    await settle()
    assert kit.broker.topics.get(DEAD) is None
    may_go_on.set()
    await settle()
    assert sorted(filter(None, letters(kit.broker))) == [b"0", b"1"] and not caplog.records


async def reject_all(kit: Kit, *values: bytes) -> None:
    """As rejected jobs of the group `g`."""
    await kit.put(*values)
    partition = await kit.partition()
    member = kit.broker.queues.open("g").join("m")
    await take(partition, member)
    partition.answer(member, [Answer(0, len(values) - 1, Verb.REJECT)])
    await settle()


async def test_a_letter_of_the_largest_record_makes_room_for_itself_in_its_topic(kit: Kit) -> None:
    topic = kit.broker.topics.get("jobs")
    assert topic is not None
    value = bytes(topic.settings.message_bytes_max - 100)
    await reject_all(kit, b"one", value, b"three")
    assert letters(kit.broker) == [b"one", value, b"three"]
    dead = kit.broker.topics.get(DEAD)
    assert dead is not None and dead.settings.message_bytes_max > topic.settings.message_bytes_max


async def test_letters_pass_the_gate_of_their_topic_and_wait_until_it_takes_them(
    kit: Kit, caplog: pytest.LogCaptureFixture
) -> None:
    """Its limit was set by an operator, so it is the operator who raises it."""
    await kit.broker.topics.create(DEAD, 1, {"max.message.bytes": "400"})
    await reject_all(kit, b"small", bytes(400))
    assert letters(kit.broker) == [b"small"]
    assert "cannot write dead letters of jobs-0; retrying in 1 s" in caplog.text
    assert "the topic's max.message.bytes is 400" in caplog.text
    await kit.broker.topics.configure(DEAD, {"max.message.bytes": "1000"})
    kit.clock.advance(1)
    await settle()
    assert letters(kit.broker) == [b"small", bytes(400)]


async def test_a_compacted_dead_letter_topic_refuses_letters_without_a_key(kit: Kit) -> None:
    await kit.broker.topics.create(DEAD, 1, {"cleanup.policy": "compact"})
    await reject_all(kit, b"one")
    assert letters(kit.broker) == []
    await kit.broker.topics.configure(DEAD, {"cleanup.policy": "delete"})
    kit.clock.advance(1)
    await settle()
    assert letters(kit.broker) == [b"one"]


async def test_a_dead_record_that_cannot_be_stored_gets_its_letter_when_it_can(kit: Kit) -> None:
    await kit.broker.topics.create(DEAD, 1, {})
    await kit.put(b"one", b"two")
    partition = await kit.partition()
    member = kit.broker.queues.open("g").join("m")
    for _ in range(partition.settings.attempts_max - 1):
        await take(partition, member)
        await partition.answer(member, [Answer(0, 1, Verb.RELEASE)])
    await take(partition, member)
    kit.meta.holding = True
    kit.broker.queues.open("g").leave(member)  # the last delivery of both has failed
    await settle()
    writes = kit.meta.revision
    while kit.meta.held:
        kit.meta.lose()
        await settle()
    assert letters(kit.broker) == [] and kit.meta.revision == writes
    kit.meta.holding = False
    kit.clock.advance(1)
    await settle()
    assert letters(kit.broker) == [b"one", b"two"] and partition.dead_records() == []
