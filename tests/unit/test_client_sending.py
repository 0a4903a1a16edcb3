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
from millstream.core.errors import BufferFull, Closed, MillstreamError, SendFailed
from millstream.core.promise import Promise
from millstream.records.compression import Codec
from millstream.testing.clock import VirtualClock


class Owner:
    def __init__(self, partitions: int = 1, *, answers_at_once: bool = False) -> None:
        self.clock = VirtualClock()
        self.partitions = partitions
        self.answers_at_once = answers_at_once
        self.handed: list[tuple[Batch, Promise[Sequence[int | BaseException]]]] = []

    def check_open(self) -> None:
        pass

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


async def test_a_heap_that_the_next_record_would_overfill_leaves_first() -> None:
    owner = Owner()
    out = sender(owner, bytes_max=1000)
    for size in (100, 100, 900, 100):
        await out.send(b"x" * size)
    assert [[len(value) for value in values] for values in owner.values()] == [[100, 100], [900]]


async def test_what_cannot_be_handed_over_is_counted_told_and_raised() -> None:
    class Broken(Owner):
        def append_each(self, batch: Batch, codec: Codec) -> Awaitable[Sequence[int | BaseException]]:
            raise AttributeError("a mistake of ours")

    told: list[Any] = []
    out = sender(Broken(), buffer_bytes_max=2 * RECORD_BYTES, on_sent=lambda message, sent: told.append(sent))
    for _ in range(3):  # the buffer is too small for two: each makes room for the next
        async with asyncio.timeout(20):
            await out.send(b"x" * RECORD_BYTES)
    with pytest.raises(SendFailed, match="3 records could not be sent: a mistake of ours"):
        await out.close()
    assert [type(each) for each in told] == [AttributeError] * 3 and out.buffered_bytes == 0


async def test_each_record_of_a_batch_is_answered_for_itself() -> None:
    owner = Owner()
    told: list[Any] = []
    out = sender(owner, on_sent=lambda message, sent: told.append((message.value, sent)))
    for number in range(3):
        await out.send(b"%d" % number)
    refused = MillstreamError("too large")
    owner.handed[0][1].settle([7, refused, 8])
    with pytest.raises(SendFailed, match="1 record could not be sent: too large") as raised:
        await out.flush()
    assert [message.value for message, _ in raised.value.failures] == [b"1"]  # type: ignore[attr-defined]
    assert told == [(b"0", Sent("clicks", 0, 7)), (b"1", refused), (b"2", Sent("clicks", 0, 8))]


async def test_a_callback_that_raises_hides_nothing(caplog: pytest.LogCaptureFixture) -> None:
    owner = Owner()
    told: list[Any] = []

    def note(message: Message, sent: Sent | BaseException) -> None:
        told.append(sent)
        raise ValueError("the callback's own")

    out = sender(owner, on_sent=note)
    for number in range(3):
        await out.send(b"%d" % number)
    owner.handed[0][1].fail(MillstreamError("the disk is full"))
    with pytest.raises(SendFailed, match="3 records could not be sent: the disk is full"):
        await out.flush()
    assert len(told) == 3 and "the callback's own" in caplog.text and "3 records of a batch of 3" in caplog.text


async def test_senders_that_look_for_their_topic_at_once_keep_the_bound() -> None:
    class Slow(Owner):
        async def partition_count(self, topic: str) -> int:
            await asyncio.sleep(0)
            return 1

    owner = Slow()
    out = sender(owner, buffer_bytes_max=2 * (RECORD_BYTES + 1), records_max=100)
    tasks = [asyncio.ensure_future(out.send(b"x")) for _ in range(5)]
    await settle()
    assert out.buffered_bytes == 2 * (RECORD_BYTES + 1) and sum(task.done() for task in tasks) == 2
    owner.answers_at_once = True
    owner.answer(0)
    await asyncio.gather(*tasks)
    await out.close()
    assert sum(map(len, owner.values())) == 5


async def test_a_flush_waits_for_what_was_taken_before_it_and_no_longer() -> None:
    owner = Owner()
    out = sender(owner, records_max=1)
    await out.send(b"before")
    flushing = asyncio.ensure_future(out.flush())
    await settle()
    await out.send(b"after")
    owner.answer(0)
    await settle()
    assert flushing.done()


async def test_an_exception_of_ones_own_comes_out_with_a_note_of_what_was_not_sent() -> None:
    owner = Owner()
    with pytest.raises(ZeroDivisionError) as raised:
        async with sender(owner, records_max=1) as out:
            await out.send(b"x")
            owner.handed[0][1].fail(MillstreamError("the disk is full"))
            1 / 0  # noqa: B018
    assert raised.value.__notes__ == ["closing failed, too: SendFailed: 1 record could not be sent: the disk is full"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"value": "text"}, "a value is bytes or None, not str: give an encoder"),
        ({"key": "user-1"}, "a key is bytes or None, not str"),
        ({"headers": ((b"trace", b"1"),)}, "a header's name is a str, not bytes"),
        ({"headers": (("trace", "1"),)}, "a header's value is bytes or None, not str"),
        ({"headers": (("\ud800", b"1"),)}, "encodable as UTF-8"),
        ({"headers": 7}, "headers are pairs"),
        ({"headers": ("abc",)}, "headers are pairs"),
        ({"partition": "0"}, "a partition is an int, not '0'"),
        ({"partition": True}, "a partition is an int, not True"),
        ({"timestamp": "now"}, "milliseconds since 1970, as an int, not 'now'"),
        ({"timestamp": -5}, "not -5"),
        ({"timestamp": 1 << 70}, "milliseconds since 1970"),
    ],
)
async def test_what_cannot_be_a_record_is_refused_at_once_and_costs_no_other(
    options: dict[str, Any], sentence: str
) -> None:
    owner = Owner(answers_at_once=True)
    out = sender(owner, records_max=100)
    await out.send(b"good")
    before = out.buffered_bytes
    with pytest.raises(MillstreamError, match=sentence):
        await out.send(**{"value": b"bad", **options})
    assert out.buffered_bytes == before
    await out.close()
    assert owner.values() == [[b"good"]]


async def test_what_is_taken_is_taken_as_it_is_then() -> None:
    owner = Owner(answers_at_once=True)
    out = sender(owner)
    value, key = bytearray(b"value"), bytearray(b"key")
    await out.send(value, key=key, headers=[("h", memoryview(value))])  # type: ignore[arg-type]
    value[:] = key[:] = b"other"
    await out.close()
    assert owner.handed[0][0].rows == [(0, None, b"key", b"value", (("h", b"value"),))]
