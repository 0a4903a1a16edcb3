"""Buffered sending where some of it cannot be stored, embedded and remote: what is said of a record is true of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from millstream import Message, Millstream, MillstreamError, SendFailed, Sent, TooLarge, UnknownTopic
from millstream.client.embedded import Embedded
from tests.compat.python_api import SECONDS, everything

BAD: list[dict[str, Any]] = [
    {"key": "user-1"},
    {"headers": ((b"trace", b"1"),)},
    {"headers": (("trace", "1"),)},
    {"partition": "0"},
    {"timestamp": "now"},
]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: "-".join(bad))
async def test_what_cannot_be_a_record_costs_none_of_its_neighbours(
    ms: Millstream, unique: Callable[[str], str], bad: dict[str, Any]
) -> None:
    topic = unique("clicks")
    async with ms.sender(topic) as out:
        for number in range(5):
            await out.send(b"%d" % number)
        with pytest.raises(MillstreamError):
            await out.send(b"bad", **bad)
        await out.send(b"5")
    assert out.buffered_bytes == 0
    given = await asyncio.gather(
        ms.send(topic, b"6"),
        ms.send(topic, b"bad", **bad),
        ms.send_many([Message(topic, b"bad", **bad)]),
        return_exceptions=True,
    )
    assert [isinstance(each, MillstreamError) for each in given] == [False, True, True]
    assert [record.value for record in await everything(ms, topic)] == [b"%d" % number for number in range(7)]


async def test_records_that_fit_one_by_one_are_stored_whatever_they_left_with(
    ms: Millstream, unique: Callable[[str], str]
) -> None:
    topic = unique("clicks")
    async with ms.sender(topic) as out:
        for _ in range(200):
            await out.send(b"x" * 1000)
        await out.send(b"y" * 900_000)
    sizes = [len(record.value or b"") for record in await everything(ms, topic)]
    assert sizes == [1000] * 200 + [900_000]


async def test_a_record_that_is_too_large_fails_alone_and_the_others_are_told_where_they_went(
    ms: Millstream, unique: Callable[[str], str]
) -> None:
    topic = unique("clicks")
    told: list[tuple[Any, Any]] = []
    out = ms.sender(topic, linger=60, bytes_max=1 << 30, on_sent=lambda message, sent: told.append((message, sent)))
    values = [b"%d" % number for number in range(20)]
    values.insert(10, b"y" * 3_000_000)
    for value in values:
        await out.send(value)
    with pytest.raises(SendFailed, match=r"^1 record could not be sent") as raised:
        await out.close()
    [(message, error)] = raised.value.failures
    assert isinstance(message, Message) and message.value == values[10] and isinstance(error, TooLarge)
    assert [message.value for message, _ in told] == values and told[10][1] is error
    stored = [record.value for record in await everything(ms, topic)]
    assert stored == values[:10] + values[11:]
    assert [sent for _, sent in told if sent is not error] == [Sent(topic, 0, offset) for offset in range(20)]
    assert out.buffered_bytes == 0


@pytest.mark.parametrize("ms", ["memory", "sqlite"], indirect=True)
async def test_a_batch_is_divided_where_its_topic_takes_less(ms: Millstream, unique: Callable[[str], str]) -> None:
    """A server's topics have such limits too; Kafka's client knows one for all of them, and does not divide."""
    topic = unique("clicks")
    await ms.create_topic(topic, settings={"max.message.bytes": "2000"})
    async with ms.sender(topic) as out:
        for number in range(100):
            await out.send(b"%3d" % number * 50)
    assert [record.value for record in await everything(ms, topic)] == [b"%3d" % number * 50 for number in range(100)]


@pytest.mark.parametrize("ms", ["memory", "sqlite"], indirect=True)
async def test_a_record_that_its_topic_refuses_costs_none_of_its_neighbours(
    ms: Millstream, unique: Callable[[str], str]
) -> None:
    topic = unique("clicks")
    await ms.create_topic(topic, settings={"cleanup.policy": "compact"})
    out = ms.sender(topic)
    for number in range(7):
        await out.send(b"%d" % number, key=None if number == 3 else b"%d" % number)
    with pytest.raises(SendFailed, match=r"^1 record could not be sent: a record without a key"):
        await out.close()
    assert [record.value for record in await everything(ms, topic)] == [b"%d" % n for n in range(7) if n != 3]


async def test_a_callback_that_raises_hides_no_failure(
    ms: Millstream, unique: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    topic = unique("clicks")
    await ms.create_topic(topic)
    told: list[Any] = []

    def note(message: Message, sent: Any) -> None:
        told.append(sent)
        raise ValueError("the callback's own")

    out = ms.sender(topic, on_sent=note)
    for _ in range(5):
        await out.send(b"x", partition=77)
    with pytest.raises(SendFailed, match=r"^5 records could not be sent"):
        await out.close()
    assert len(told) == 5 and all(isinstance(sent, UnknownTopic) for sent in told)
    assert "the callback's own" in caplog.text


async def test_a_topic_is_made_for_records_that_name_their_partition(
    ms: Millstream, unique: Callable[[str], str]
) -> None:
    buffered, many = unique("clicks"), unique("clicks")
    async with asyncio.timeout(SECONDS), ms.sender(buffered) as out:
        await out.send(b"x", partition=0)
    await ms.send_many([Message(many, b"x", partition=0)])
    assert len(await everything(ms, buffered)) == len(await everything(ms, many)) == 1


async def test_many_senders_at_once_keep_the_bound(ms: Millstream, unique: Callable[[str], str]) -> None:
    topic = unique("clicks")
    out = ms.sender(topic, buffer_bytes_max=1 << 20)
    peak = 0

    async def send() -> None:
        nonlocal peak
        await out.send(bytes(100_000))
        peak = max(peak, out.buffered_bytes)

    async with asyncio.timeout(SECONDS):
        await asyncio.gather(*(send() for _ in range(50)))
        await out.close()
    assert peak <= 1 << 20 and len(await everything(ms, topic)) == 50


async def test_one_call_for_many_says_what_was_wrong_with_it(ms: Millstream, unique: Callable[[str], str]) -> None:
    topic = unique("clicks")
    with pytest.raises(TooLarge):
        await ms.send_many([(topic, b"a"), (topic, b"y" * 3_000_000), (topic, b"b")])
    stored = [record.value for record in await everything(ms, topic)]
    assert stored == ([] if isinstance(ms, Embedded) else [b"a"])  # a cluster can be left with a part, in order
