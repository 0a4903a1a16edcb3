"""The buffered sender against an owner that answers by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any

import pytest

from millstream.client import partitioners
from millstream.client.api import Batch
from millstream.client.records import Message, Sent
from millstream.client.sending import RECORD_BYTES, Sender
from millstream.errors import BufferFull, Closed, MillstreamError, SendFailed
from millstream.promise import Promise
from millstream.records.compression import Codec
from millstream.testing.clock import VirtualClock


class Owner:
    def __init__(self, partitions: int = 1, *, answers_at_once: bool = False) -> None:
        self.clock = VirtualClock()
        self.partitions = partitions
        self.answers_at_once = answers_at_once
        self.handed: list[tuple[Batch, Promise[Sequence[int | BaseException]]]] = []

    async def partition_count(self, topic: str) -> int:
        return self.partitions

    def append_each(self, batch: Batch, codec: Codec) -> Awaitable[Sequence[int | BaseException]]:
        promise: Promise[Sequence[int | BaseException]] = Promise()
        self.handed.append((batch, promise))
        if self.answers_at_once:
            self.answer(-1)
        return promise

    def answer(self, at: int = 0, base: int = 0) -> None:
        batch, promise = self.handed[at]
        promise.settle(range(base, base + len(batch.rows)))

    def values(self) -> list[list[Any]]:
        return [[row[3] for row in batch.rows] for batch, _ in self.handed]


def sender(owner: Owner, **changes: Any) -> Sender:
    options: dict[str, Any] = {
        "records_max": 3,
        "bytes_max": 10_000,
        "linger": 0.5,
        "buffer_bytes_max": 100_000,
        "when_full": "wait",
        "partitioner": partitioners.make("murmur2"),
        "codec": Codec.NONE,
        "encode": None,
        "on_sent": None,
    }
    return Sender(owner, "clicks", **{**options, **changes})  # type: ignore[arg-type]  # what it uses of it


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_batch_leaves_by_count() -> None:
    owner = Owner()
    out = sender(owner)
    for number in range(7):
        await out.send(b"%d" % number)
    assert owner.values() == [[b"0", b"1", b"2"], [b"3", b"4", b"5"]]


async def test_a_batch_leaves_by_bytes() -> None:
    owner = Owner()
    out = sender(owner, bytes_max=2 * (RECORD_BYTES + 100))
    for _ in range(5):
        await out.send(b"x" * 100)
    assert [len(values) for values in owner.values()] == [2, 2]


async def test_a_batch_leaves_by_time() -> None:
    owner = Owner()
    out = sender(owner)
    await out.send(b"x")
    owner.clock.advance(0.49)
    assert owner.values() == []
    owner.clock.advance(0.02)
    assert owner.values() == [[b"x"]]
    await out.send(b"y")
    owner.clock.advance(0.51)
    assert owner.values() == [[b"x"], [b"y"]]


async def test_partitions_have_batches_of_their_own() -> None:
    owner = Owner(partitions=2)
    out = sender(owner)
    for number in range(6):
        await out.send(b"%d" % number, partition=number % 2)
    assert owner.values() == [[b"0", b"2", b"4"], [b"1", b"3", b"5"]]


async def test_a_full_buffer_makes_senders_wait_until_there_is_room() -> None:
    owner = Owner()
    out = sender(owner, buffer_bytes_max=2 * (RECORD_BYTES + 1), records_max=100)
    await out.send(b"a")
    await out.send(b"b")
    waiting = [asyncio.ensure_future(out.send(value)) for value in (b"c", b"d")]
    await settle()
    assert owner.values() == [[b"a", b"b"]] and not any(task.done() for task in waiting)
    owner.answer(0)
    await settle()
    assert all(task.done() for task in waiting) and out.buffered_bytes == 2 * (RECORD_BYTES + 1)


async def test_a_sender_that_waits_for_room_may_be_cancelled() -> None:
    owner = Owner()
    out = sender(owner, buffer_bytes_max=RECORD_BYTES + 1, records_max=100)
    await out.send(b"a")
    waiting = asyncio.ensure_future(out.send(b"b"))
    await settle()
    waiting.cancel()
    owner.answer(0)
    await settle()
    await out.send(b"c")
    owner.answers_at_once = True
    await out.close()
    assert owner.values() == [[b"a"], [b"c"]]


async def test_a_full_buffer_raises_where_that_is_asked_for() -> None:
    owner = Owner()
    out = sender(owner, buffer_bytes_max=2 * (RECORD_BYTES + 1), records_max=100, when_full="raise")
    await out.send(b"a")
    await out.send(b"b")
    with pytest.raises(BufferFull, match="130 of 130 bytes are buffered and 65 more do not fit"):
        await out.send(b"c")


async def test_closing_waits_for_what_is_on_its_way_and_can_be_cancelled_without_loss() -> None:
    owner = Owner()
    out = sender(owner)
    for number in range(4):
        await out.send(b"%d" % number)
    closing = asyncio.ensure_future(out.close())
    await settle()
    assert owner.values() == [[b"0", b"1", b"2"], [b"3"]] and not closing.done()
    closing.cancel()
    await settle()
    again = asyncio.ensure_future(out.close())
    await settle()
    assert not again.done()
    owner.answer(1, 3)
    await settle()
    assert not again.done()
    owner.answer(0, 0)
    await again
    with pytest.raises(Closed):
        await out.send(b"late")


async def test_who_waits_for_room_when_it_closes_is_told() -> None:
    owner = Owner()
    out = sender(owner, buffer_bytes_max=RECORD_BYTES + 1, records_max=100)
    await out.send(b"a")
    waiting = asyncio.ensure_future(out.send(b"b"))
    await settle()
    closing = asyncio.ensure_future(out.close())
    await settle()
    owner.answer(0)
    await closing
    with pytest.raises(Closed):
        await waiting
    assert owner.values() == [[b"a"]]


async def test_answers_are_told_in_order_of_sending() -> None:
    owner = Owner()
    told: list[int] = []

    def note(message: Message, sent: Sent | BaseException) -> None:
        assert isinstance(sent, Sent)
        told.append(sent.offset)

    out = sender(owner, on_sent=note)
    for number in range(6):
        await out.send(b"%d" % number)
    owner.answer(1, 3)
    await settle()
    assert told == []
    owner.answer(0, 0)
    await settle()
    assert told == [0, 1, 2, 3, 4, 5]


async def test_failures_are_raised_once_by_the_next_flush() -> None:
    owner = Owner()
    out = sender(owner)
    for number in range(3):
        await out.send(b"%d" % number)
    owner.handed[0][1].fail(MillstreamError("the disk is full"))
    with pytest.raises(SendFailed, match="3 records could not be sent: the disk is full") as raised:
        await out.flush()
    assert [message.value for message, _ in raised.value.failures] == [b"0", b"1", b"2"]  # type: ignore[attr-defined]
    assert out.buffered_bytes == 0
    await out.flush()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"when_full": "drop"}, "when_full is wait or raise, not 'drop'"),
        ({"records_max": 0}, "at least 1"),
        ({"linger": -1}, "not negative"),
    ],
)
async def test_bounds_that_make_no_sense_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(MillstreamError, match=sentence):
        sender(Owner(), **changes)
