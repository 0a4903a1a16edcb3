"""One Python API, embedded and remote: the same suite over both."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import pytest

import millstream as package
from millstream import (
    BufferFull,
    Closed,
    LeaseLost,
    Message,
    Millstream,
    MillstreamError,
    NotActive,
    OutOfRange,
    Record,
    RequestError,
    SendFailed,
    Sent,
    TooLarge,
    TopicExists,
    Undecodable,
    UnknownTopic,
    Unreachable,
)
from millstream.broker.broker import Broker
from millstream.client.partitioners import fnv1a_32, murmur2
from millstream.core.errors import Code
from millstream.records.batch import CODEC_MASK, read_header
from millstream.records.compression import Codec
from millstream.testing.broker_thread import BrokerThread
from tests.compat.python_api import SECONDS, everything, take

Behind = Callable[[Callable[[Broker], Awaitable[Any]]], Awaitable[Any]]


async def test_what_was_sent_is_read_with_all_that_it_has(ms: Millstream, unique: Callable[[str], str]) -> None:
    topic = unique("orders")
    headers = (("trace", b"1"), ("trace", b"2"), ("none", None))
    sent = await ms.send(topic, b"widget", key=b"user-1", headers=headers, timestamp=1_700_000_000_123)
    assert sent == Sent(topic, 0, 0)
    [record] = await everything(ms, topic)
    assert record == Record(topic, 0, 0, 1_700_000_000_123, b"user-1", b"widget", headers)
    assert record.time == datetime(2023, 11, 14, 22, 13, 20, 123000, UTC)
    assert record.header("trace") == b"2" and record.header("missing") is None


async def test_a_record_may_have_neither_key_nor_value(ms: Millstream, unique: Callable[[str], str]) -> None:
    topic = unique("orders")
    await ms.send(topic, None)
    [record] = await everything(ms, topic)
    assert record.key is None and record.value is None


async def test_a_record_gets_the_time_of_its_sending(ms: Millstream, unique: Callable[[str], str]) -> None:
    topic = unique("orders")
    before = datetime.now(UTC)
    await ms.send(topic, b"x")
    await ms.send_many([(topic, b"y")])
    for record in await everything(ms, topic):
        assert abs((record.time - before).total_seconds()) < 10


async def test_many_are_sent_in_order_over_topics(ms: Millstream, unique: Callable[[str], str]) -> None:
    orders, audit = unique("orders"), unique("audit")
    sent = await ms.send_many(
        [(orders, b"a"), (audit, b"b", b"key"), Message(orders, b"c", headers=(("h", b"1"),)), (orders, b"d")]
    )
    assert sent == [Sent(orders, 0, 0), Sent(audit, 0, 0), Sent(orders, 0, 1), Sent(orders, 0, 2)]
    assert [record.value for record in await everything(ms, orders)] == [b"a", b"c", b"d"]
    assert [record.key for record in await everything(ms, audit)] == [b"key"]


async def test_nothing_sent_is_nothing_done(ms: Millstream) -> None:
    assert await ms.send_many([]) == []


async def test_keys_choose_partitions_as_the_partitioner_says(ms: Millstream, unique: Callable[[str], str]) -> None:
    topic = unique("orders")
    await ms.create_topic(topic, partitions=5)
    keys = [b"user-%d" % number for number in range(20)]
    sent = await ms.send_many([(topic, b"x", key) for key in keys])
    assert [each.partition for each in sent] == [murmur2(key) % 5 for key in keys]
    async with ms.sender(topic, partitioner="fnv1a") as out:
        for key in keys:
            await out.send(b"y", key=key)
    found = {p: {r.key for r in await everything(ms, topic, p) if r.value == b"y"} for p in range(5)}
    assert found == {p: {key for key in keys if fnv1a_32(key) % 5 == p} for p in range(5)}


async def test_records_without_a_key_stay_together_in_one_call_and_spread_over_calls(
    ms: Millstream, unique: Callable[[str], str]
) -> None:
    topic = unique("orders")
    await ms.create_topic(topic, partitions=3)
    calls = [await ms.send_many([(topic, b"a"), (topic, b"b")]) for _ in range(3)]
    assert all(first.partition == second.partition for first, second in calls)
    assert {first.partition for first, _ in calls} == {0, 1, 2}


async def test_a_partitioner_may_be_anybodys_and_is_checked(ms: Millstream, unique: Callable[[str], str]) -> None:
    topic = unique("orders")
    await ms.create_topic(topic, partitions=3)
    async with ms.sender(topic, partitioner=lambda key, partitions: 2) as out:
        await out.send(b"x")
    assert len(await everything(ms, topic, 2)) == 1
    wrong = ms.sender(topic, partitioner=lambda key, partitions: 3)
    with pytest.raises(MillstreamError, match="the topic has partitions 0 to 2"):
        await wrong.send(b"x")
    with pytest.raises(MillstreamError, match="there is no partitioner 'md5'"):
        ms.sender(topic, partitioner="md5")


async def test_reading_begins_at_an_offset_at_a_time_or_at_the_end(
    ms: Millstream, unique: Callable[[str], str]
) -> None:
    topic = unique("orders")
    for number in range(5):
        await ms.send(topic, b"%d" % number, timestamp=1_700_000_000_000 + number * 1000)

    async def values(**where: Any) -> list[bytes | None]:
        async with asyncio.timeout(SECONDS):
            return [record.value async for record in ms.read(topic, follow=False, **where)]

    assert await values(offset=3) == [b"3", b"4"]
    assert await values(offset="end") == []
    assert await values(time=1_700_000_001_500) == [b"2", b"3", b"4"]
    assert await values(time=datetime(2023, 11, 14, 22, 13, 24, tzinfo=UTC)) == [b"4"]
    assert await values(time=1_800_000_000_000) == []


async def test_a_reader_follows_what_comes(ms: Millstream, unique: Callable[[str], str]) -> None:
    topic = unique("orders")
    await ms.send(topic, b"before")
    async with ms.read(topic, offset="end") as reading:
        assert await reading.receive(0.01) is None
        await ms.send(topic, b"after")
        record = await reading.receive(SECONDS)
        assert record is not None and record.value == b"after"


async def test_wrong_places_are_errors_of_their_own(ms: Millstream, unique: Callable[[str], str]) -> None:
    topic = unique("orders")
    await ms.create_topic(topic, partitions=2)
    with pytest.raises(UnknownTopic):
        await everything(ms, unique("missing"))
    with pytest.raises(UnknownTopic):
        await everything(ms, topic, 2)
    for partition in (2, -1):
        with pytest.raises(UnknownTopic):
            await ms.send(topic, b"x", partition=partition)
    with pytest.raises(RequestError, match=r"(?i)topic") as raised:
        await ms.send("not a name", b"x")
    assert raised.value.code == Code.INVALID_TOPIC_EXCEPTION
    with pytest.raises(OutOfRange, match="holds offsets 0 to 0, not 5"):
        [record async for record in ms.read(topic, offset=5)]


async def test_a_refused_record_costs_nothing_but_itself(ms: Millstream, unique: Callable[[str], str]) -> None:
    topic = unique("orders")
    await ms.create_topic(topic, settings={"max.message.bytes": "2000"})
    with pytest.raises(TooLarge):
        await ms.send(topic, b"x" * 3000)
    with pytest.raises(MillstreamError, match="a value is bytes or None, not str"):
        await ms.send(topic, "text")  # type: ignore[call-overload]
    await ms.send(topic, b"fits")
    assert [record.value for record in await everything(ms, topic)] == [b"fits"]


async def test_topics_are_made_listed_and_deleted(ms: Millstream, unique: Callable[[str], str]) -> None:
    topic = unique("orders")
    await ms.create_topic(topic, partitions=3, settings={"retention.ms": "1000"})
    assert (await ms.topics())[topic] == 3
    with pytest.raises(TopicExists):
        await ms.create_topic(topic)
    with pytest.raises(RequestError):
        await ms.create_topic(unique("orders"), settings={"retention.ms": "soon"})
    await ms.delete_topic(topic)
    assert topic not in await ms.topics()
    with pytest.raises(UnknownTopic):
        await ms.delete_topic(topic)


async def test_values_are_encoded_and_decoded_by_plain_callables(ms: Millstream, unique: Callable[[str], str]) -> None:
    topic = unique("orders")

    def encode(order: dict[str, int]) -> bytes:
        return json.dumps(order).encode()

    await ms.send(topic, {"n": 1}, encode=encode)
    await ms.send_many([(topic, {"n": 2})], encode=encode)
    async with ms.sender(topic, encode=encode) as out:
        await out.send({"n": 3})
        await out.send(None)
    async with asyncio.timeout(SECONDS):
        values = [record.value async for record in ms.read(topic, decode=json.loads, follow=False)]
    assert values == [{"n": 1}, {"n": 2}, {"n": 3}, None]


async def test_a_value_that_cannot_be_decoded_is_shown_as_it_is_and_can_be_passed_over(
    ms: Millstream, unique: Callable[[str], str]
) -> None:
    topic = unique("orders")
    await ms.send_many([(topic, b"{"), (topic, b"{}")])
    async with ms.read(topic, decode=json.loads) as reading:
        with pytest.raises(Undecodable) as raised:
            await reading.receive(SECONDS)
        assert isinstance(raised.value.record, Record) and raised.value.record.value == b"{"
        record = await reading.receive(SECONDS)
        assert record is not None and record.value == {}


@pytest.mark.parametrize("compression", ["none", "gzip", "snappy", "lz4", "zstd"])
async def test_compressed_records_are_stored_so_and_read_like_others(
    ms: Millstream, unique: Callable[[str], str], behind: Behind, compression: str
) -> None:
    topic = unique("orders")
    values = [b"%d " % number * 50 for number in range(100)]
    async with ms.sender(topic, compression=compression) as out:
        for value in values:
            await out.send(value)
    assert [record.value for record in await everything(ms, topic)] == values

    async def stored(broker: Broker) -> bytes:
        found = broker.topics.get(topic)
        assert found is not None
        return (await found.partitions[0].log.read(0, 1 << 20)).to_bytes()

    data = await behind(stored)
    assert read_header(memoryview(data)).attributes & CODEC_MASK == Codec.parse(compression)
    if compression == "none":
        assert len(data) > sum(map(len, values))
    else:
        assert len(data) < sum(map(len, values)) / 2


# Buffered sending


async def test_a_sender_loses_nothing_and_keeps_order(ms: Millstream, unique: Callable[[str], str]) -> None:
    topic = unique("clicks")
    told: list[tuple[Message, Any]] = []
    async with ms.sender(topic, records_max=7, on_sent=lambda *each: told.append(each)) as out:
        for number in range(1000):
            await out.send(b"%d" % number)
    assert [record.value for record in await everything(ms, topic)] == [b"%d" % n for n in range(1000)]
    assert [sent.offset for _, sent in told] == list(range(1000))
    assert out.buffered_bytes == 0
    with pytest.raises(Closed):
        await out.send(b"late")


async def test_a_sender_sends_after_a_while_by_itself(ms: Millstream, unique: Callable[[str], str]) -> None:
    topic = unique("clicks")
    await ms.create_topic(topic)
    out = ms.sender(topic, linger=0.01)
    async with ms.read(topic) as reading:
        await out.send(b"x")
        record = await reading.receive(SECONDS)
        assert record is not None and record.value == b"x"


async def test_a_full_buffer_waits_or_raises_as_asked(ms: Millstream, unique: Callable[[str], str]) -> None:
    topic = unique("clicks")
    await ms.create_topic(topic)
    async with ms.sender(topic, buffer_bytes_max=1000, when_full="raise", linger=10, records_max=10**6) as out:
        await out.send(b"x" * 500)
        with pytest.raises(BufferFull):
            await out.send(b"x" * 500)
        await out.flush()
        await out.send(b"y" * 500)
    async with ms.sender(topic, buffer_bytes_max=1000, linger=10, records_max=10**6) as out:
        async with asyncio.timeout(SECONDS):
            for _ in range(20):
                await out.send(b"z" * 500)
                assert out.buffered_bytes <= 1000
        await out.send(b"!" * 5000)  # larger than the buffer: alone
    assert len(await everything(ms, topic)) == 23


async def test_a_sender_says_what_it_could_not_send(ms: Millstream, unique: Callable[[str], str]) -> None:
    topic = unique("clicks")
    await ms.create_topic(topic, settings={"max.message.bytes": "2000"})
    out = ms.sender(topic, linger=10)
    await out.send(b"x" * 3000)
    with pytest.raises(SendFailed, match="1 record could not be sent") as raised:
        await out.flush()
    [(message, error)] = raised.value.failures
    assert isinstance(message, Message) and message.value == b"x" * 3000 and isinstance(error, TooLarge)
    await out.send(b"fits")
    await out.close()
    assert [record.value for record in await everything(ms, topic)] == [b"fits"]


async def test_closing_sends_what_senders_hold(ms: Millstream, unique: Callable[[str], str]) -> None:
    topic = unique("clicks")
    told: list[Any] = []
    out = ms.sender(topic, linger=10, on_sent=lambda message, sent: told.append(sent))
    await out.send(b"x")
    await ms.close()
    assert told == [Sent(topic, 0, 0)]
    with pytest.raises(Closed):
        await ms.send(topic, b"y")


# Streams


async def test_a_group_goes_on_where_it_stopped(ms: Millstream, unique: Callable[[str], str]) -> None:
    topic, group = unique("orders"), unique("group")
    await ms.send_many([(topic, b"%d" % number) for number in range(10)])
    async with ms.stream(topic, group=group) as stream:
        assert [record.offset for record in await take(stream, 4)] == [0, 1, 2, 3]
    async with ms.stream(topic, group=group) as stream:
        assert [record.offset for record in await take(stream, 6)] == [4, 5, 6, 7, 8, 9]


async def test_what_was_not_processed_comes_again(ms: Millstream, unique: Callable[[str], str]) -> None:
    topic, group = unique("orders"), unique("group")
    await ms.send_many([(topic, b"%d" % number) for number in range(5)])
    with pytest.raises(ZeroDivisionError):
        async with ms.stream(topic, group=group) as stream:
            await take(stream, 3)
            1 / 0  # noqa: B018
    async with ms.stream(topic, group=group) as stream:
        assert (await take(stream, 1))[0].offset == 2


async def test_a_loop_that_is_left_leaves_its_group(ms: Millstream, unique: Callable[[str], str]) -> None:
    topic, group = unique("orders"), unique("group")
    await ms.send_many([(topic, b"%d" % number) for number in range(5)])
    async with asyncio.timeout(SECONDS):
        async for record in ms.stream(topic, group=group):
            if record.offset == 2:
                break
        async for record in ms.stream(topic, group=group):
            assert record.offset == 2
            break


async def test_a_commit_counts_the_record_at_hand(ms: Millstream, unique: Callable[[str], str]) -> None:
    topic, group = unique("orders"), unique("group")
    await ms.send_many([(topic, b"%d" % number) for number in range(5)])
    with pytest.raises(ZeroDivisionError):
        async with ms.stream(topic, group=group, commit_every=3600) as stream:
            await take(stream, 3)
            await stream.commit()
            1 / 0  # noqa: B018
    async with ms.stream(topic, group=group) as stream:
        assert (await take(stream, 1))[0].offset == 3


async def test_a_group_may_begin_at_the_end(ms: Millstream, unique: Callable[[str], str]) -> None:
    topic, group = unique("orders"), unique("group")
    await ms.send(topic, b"old")
    async with ms.stream(topic, group=group, start="latest") as stream:
        async with asyncio.timeout(SECONDS):
            while not stream.assignment:
                assert await stream.receive(0.05) is None
        # A client looks for the end a moment after it was told what it has.
        for number in range(100):
            await ms.send(topic, b"new-%d" % number)
            record = await stream.receive(0.1)
            if record is not None:
                break
        assert record is not None and record.value is not None and record.value.startswith(b"new")


async def test_members_share_the_partitions_and_each_record_comes_once(
    ms: Millstream, unique: Callable[[str], str]
) -> None:
    topic, group = unique("clicks"), unique("group")
    await ms.create_topic(topic, partitions=4)
    seen: list[tuple[int, int]] = []
    by_stream: dict[package.Stream[bytes | None], int] = {}
    async with ms.streams({topic: 3}, group=group) as streams:

        async def work(stream: package.Stream[bytes | None]) -> None:
            async for record in stream:
                seen.append((record.partition, record.offset))
                by_stream[stream] = by_stream.get(stream, 0) + 1
                await asyncio.sleep(0)
                if len(seen) >= 400:
                    streams.stop()

        async def settled() -> None:
            while sorted(len(stream.assignment) for stream in streams) != [1, 1, 2]:  # noqa: ASYNC110  (there is no event for it)
                await asyncio.sleep(0.02)

        async with asyncio.timeout(SECONDS):
            working = asyncio.gather(*map(work, streams[topic]))
            await settled()  # nothing moves any more, so nothing has a reason to come twice
            await ms.send_many([Message(topic, b"%d" % number, partition=number % 4) for number in range(400)])
            await working
    assert sorted(seen) == [(partition, offset) for partition in range(4) for offset in range(100)]
    assert sorted(by_stream.values()) == [100, 100, 200]
    async with ms.stream(topic, group=group) as stream:
        assert await stream.receive(1.0) is None  # all of it was committed


async def test_a_stream_that_is_stopped_leaves_the_rest_to_the_next(
    ms: Millstream, unique: Callable[[str], str]
) -> None:
    topic, group = unique("clicks"), unique("group")
    for _ in range(4):
        await ms.send_many([(topic, b"x" * 1000) for _ in range(300)])  # more than is fetched at a time
    given: list[int] = []
    async with ms.streams({topic: 1}, group=group) as streams, asyncio.timeout(SECONDS):
        [stream] = streams[topic]
        async for record in stream:
            given.append(record.offset)
            if len(given) == 10:
                streams.stop()
        assert stream.is_closed
    assert 10 <= len(given) < 1200
    async with ms.stream(topic, group=group) as rest:
        given += [record.offset for record in await take(rest, 1200 - len(given))]
        assert given == list(range(1200))
        assert await rest.receive(0.2) is None


async def test_a_member_that_leaves_hands_its_partitions_to_the_others(
    ms: Millstream, unique: Callable[[str], str]
) -> None:
    topic, group = unique("clicks"), unique("group")
    await ms.create_topic(topic, partitions=2)
    first, second = ms.stream(topic, group=group), ms.stream(topic, group=group)

    async def until(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(SECONDS):
            while not condition():
                await asyncio.gather(*(each.receive(0.05) for each in (first, second) if not each.is_closed))

    await until(lambda: len(first.assignment) == 1 and len(second.assignment) == 1)
    assert sorted(first.assignment + second.assignment) == [(topic, 0), (topic, 1)]
    await first.close()
    await until(lambda: len(second.assignment) == 2)
    await second.close()


# Queues


async def test_each_job_is_done_once_by_one_of_the_workers(ms: Millstream, unique: Callable[[str], str]) -> None:
    topic, group = unique("jobs"), unique("workers")
    await ms.send_many([(topic, b"%d" % number) for number in range(30)])
    done: list[bytes | None] = []

    async def work() -> None:
        async with ms.queue(topic, group=group) as jobs:
            while len(done) < 30:
                job = await jobs.receive(0.2)
                if job is not None:
                    assert job.attempt == 1
                    await job.accept()
                    done.append(job.value)

    async with asyncio.timeout(SECONDS):
        await asyncio.gather(*(work() for _ in range(3)))
    assert sorted(done, key=str) == sorted((b"%d" % number for number in range(30)), key=str)


async def test_a_released_job_comes_again_and_a_rejected_one_is_dead(
    ms: Millstream, unique: Callable[[str], str]
) -> None:
    topic, group, dead = unique("jobs"), unique("workers"), unique("dead")
    await ms.send_many([(topic, b"again", b"k1"), (topic, b"never", b"k2")])
    settings = {"errors.deadletterqueue.topic.name": dead}
    async with ms.queue(topic, group=group, settings=settings) as jobs:
        [first] = await take(jobs, 1)
        await first.release()
        for _ in range(2):
            [job] = await take(jobs, 1)
            if job.value == b"again":
                assert job.attempt == 2
                await job.accept()
            else:
                await job.reject("nobody can do this")
        assert await jobs.receive(0.3) is None
    async with asyncio.timeout(SECONDS):
        while dead not in await ms.topics():  # noqa: ASYNC110  (there is no event for it)
            await asyncio.sleep(0.02)
        async for record in ms.read(dead):
            assert record.value == b"never" and record.key == b"k2"
            assert record.header("millstream-dead-topic") == topic.encode()
            break


async def test_an_answer_that_comes_too_late_is_an_error_of_its_own(
    ms: Millstream, unique: Callable[[str], str]
) -> None:
    topic, group = unique("jobs"), unique("workers")
    await ms.send(topic, b"x")
    async with ms.queue(topic, group=group) as jobs:
        [job] = await take(jobs, 1)
        await job.accept()
        with pytest.raises(LeaseLost):
            await job.accept()
    with pytest.raises(Closed):
        await job.accept()


async def test_a_worker_that_goes_gives_its_jobs_back(ms: Millstream, unique: Callable[[str], str]) -> None:
    topic, group = unique("jobs"), unique("workers")
    await ms.send(topic, b"x")
    async with ms.queue(topic, group=group) as jobs:
        await take(jobs, 1)
    async with ms.queue(topic, group=group) as jobs:
        [job] = await take(jobs, 1)
        assert job.value == b"x" and job.attempt == 2
        await job.accept()


async def test_jobs_are_decoded_too(ms: Millstream, unique: Callable[[str], str]) -> None:
    topic, group = unique("jobs"), unique("workers")
    await ms.send(topic, b"[1]")
    async with ms.queue(topic, group=group, decode=json.loads) as jobs:
        [job] = await take(jobs, 1)
        assert job.value == [1]
        await job.accept()


# Exclusive


async def test_one_member_is_active_and_the_next_goes_on_where_it_committed(
    ms: Millstream, unique: Callable[[str], str]
) -> None:
    topic, group = unique("ledger"), unique("projector")
    await ms.send_many([(topic, b"%d" % number) for number in range(6)])
    changes: list[bool] = []
    async with ms.exclusive(topic, group=group, on_change=changes.append) as first:
        events = await take(first, 3)
        assert [event.offset for event in events] == [0, 1, 2] and first.is_active and changes == [True]
        async with ms.exclusive(topic, group=group) as second:
            assert await second.receive(0.3) is None and not second.is_active
            await events[1].commit()
            await first.close()
            with pytest.raises(Closed):
                await events[2].commit()
            [event] = await take(second, 1)
            assert second.is_active and event.offset == 2


async def test_the_active_member_reads_all_partitions_each_in_order(
    ms: Millstream, unique: Callable[[str], str]
) -> None:
    topic, group = unique("ledger"), unique("projector")
    await ms.create_topic(topic, partitions=3)
    await ms.send_many([Message(topic, b"%d" % number, partition=number % 3) for number in range(30)])
    async with ms.exclusive(topic, group=group) as ledger:
        events = await take(ledger, 30)
        for partition in range(3):
            assert [event.offset for event in events if event.partition == partition] == list(range(10))
        for event in events:
            await event.commit()
    async with ms.exclusive(topic, group=group) as ledger:
        async with asyncio.timeout(SECONDS):
            while not ledger.is_active:
                assert await ledger.receive(0.05) is None
        assert await ledger.receive(1.0) is None and await ledger.changed(0.01)


async def test_receive_gives_control_back_at_the_end_of_the_topic(ms: Millstream, unique: Callable[[str], str]) -> None:
    topic, group = unique("ledger"), unique("projector")
    async with ms.exclusive(topic, group=group) as ledger:
        assert await ledger.receive(0.05) is None
        await ms.send(topic, b"x")
        [event] = await take(ledger, 1)
        await event.commit()
        assert event.value == b"x"


async def test_a_callback_that_raises_costs_the_active_member_nothing(
    ms: Millstream, unique: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    topic, group = unique("ledger"), unique("projector")
    await ms.send_many([(topic, b"0"), (topic, b"1")])

    def fail(is_active: bool) -> None:
        raise ValueError("the callback's own")

    async with ms.exclusive(topic, group=group, on_change=fail) as ledger:
        for event in await take(ledger, 2):
            await event.commit()
        assert ledger.is_active and "the callback's own" in caplog.text


# What is cancelled


async def test_a_receive_that_is_cancelled_loses_nothing(ms: Millstream, unique: Callable[[str], str]) -> None:
    topic, group = unique("orders"), unique("group")
    await ms.create_topic(topic)
    async with ms.stream(topic, group=group) as stream, ms.read(topic) as reading:
        for number in range(20):
            waiting = [asyncio.ensure_future(each.receive()) for each in (stream, reading)]
            await asyncio.sleep(0.005 * (number % 4))
            for task in waiting:
                task.cancel()
            given = await asyncio.gather(*waiting, return_exceptions=True)
            assert all(isinstance(each, asyncio.CancelledError) for each in given)
        await ms.send_many([(topic, b"%d" % number) for number in range(10)])
        for each in (stream, reading):
            assert [record.offset for record in await take(each, 10)] == list(range(10))


async def test_what_is_closed_says_so(ms: Millstream, unique: Callable[[str], str]) -> None:
    topic = unique("orders")
    await ms.send(topic, b"x")
    reading = ms.read(topic)
    await reading.close()
    with pytest.raises(Closed):
        await reading.receive(0)
    with pytest.raises(MillstreamError, match="name at least one topic"):
        ms.stream([], group="g")
    with pytest.raises(MillstreamError, match="start is earliest or latest, not 'newest'"):
        ms.stream(topic, group="g", start="newest")  # type: ignore[call-overload]


async def test_a_server_that_is_not_there_is_said_in_one_sentence() -> None:
    with pytest.raises(Unreachable, match=r"no broker answered in time: .* \(127\.0\.0\.1:1\)"):
        async with package.connect("127.0.0.1:1", timeout=0.5):
            pass


async def test_an_event_of_an_earlier_term_cannot_be_committed(
    server: BrokerThread, unique: Callable[[str], str]
) -> None:
    """A member that the group took for dead, as one that was stopped for longer than its session lasts."""
    topic, group = unique("ledger"), unique("projector")
    async with package.connect(server.bootstrap) as ms:
        await ms.send_many([(topic, b"0"), (topic, b"1")])
        async with ms.exclusive(topic, group=group) as ledger:
            [event] = await take(ledger, 1)
            server.run(lambda broker: _fence(broker, group))
            with pytest.raises(NotActive):
                await event.commit()
            assert not ledger.is_active


async def _fence(broker: Any, group: str) -> None:
    [member] = broker.groups.consumer_describe(group).members
    broker.groups.leave(group, [(member.id, None)])
