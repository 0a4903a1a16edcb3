"""A queue's verbs from Python: embedded, over a Millstream server, and over a cluster that has only what Kafka has."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import pytest

import millstream as package
from millstream import Job, LeaseLost, Millstream, Queue, Unsupported
from millstream.client.embedded import Embedded
from millstream.client.remote_queue import RemoteQueue
from millstream.testing.broker_thread import BrokerThread
from millstream.testing.moved_clock import MovedClock

SECONDS = 20.0
DEAD = "errors.deadletterqueue.topic.name"
Unique = Callable[[str], str]
Moved = tuple[Millstream, Callable[[float], None]]


@pytest.fixture(params=["embedded", "server"])
async def ms(request: pytest.FixtureRequest) -> AsyncIterator[Millstream]:
    if request.param == "embedded":
        async with package.open("memory:") as opened:
            yield opened
    else:
        async with package.connect(request.getfixturevalue("server").bootstrap, timeout=10) as connected:
            yield connected


@pytest.fixture(params=["embedded", "server"])
async def moved(request: pytest.FixtureRequest) -> AsyncIterator[Moved]:
    """With what moves the broker's clock."""
    if request.param == "embedded":
        clock = MovedClock()
        async with Embedded("memory:", clock=clock) as opened:
            yield opened, clock.advance
    else:
        server = request.getfixturevalue("server")
        async with package.connect(server.bootstrap, timeout=10) as connected:
            yield connected, server.clock.advance


@pytest.fixture
async def kafka(server: BrokerThread, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Millstream]:
    """As a cluster is spoken to that is not a Millstream."""
    monkeypatch.setattr(RemoteQueue, "_is_ours", lambda self: False)
    async with package.connect(server.bootstrap, timeout=10) as connected:
        yield connected


async def take(jobs: Queue[bytes | None]) -> Job[bytes | None]:
    job = await jobs.receive(SECONDS)
    assert job is not None
    return job


async def test_a_release_with_a_delay_keeps_the_job_back(ms: Millstream, unique: Unique) -> None:
    topic, group = unique("jobs"), unique("workers")
    await ms.send(topic, b"x")
    async with ms.queue(topic, group=group) as jobs:
        released_at = time.monotonic()
        await (await take(jobs)).release(delay=0.7)
        job = await take(jobs)
        assert time.monotonic() - released_at >= 0.7 and job.attempt == 2
        await job.accept()


async def test_a_dead_letter_has_the_reason_that_was_given(ms: Millstream, unique: Unique) -> None:
    topic, group, dead = unique("jobs"), unique("workers"), unique("dead")
    await ms.send_many([(topic, b"rejected"), (topic, b"released")])
    settings = {DEAD: dead, "share.delivery.count.limit": "2"}
    async with ms.queue(topic, group=group, settings=settings) as jobs:
        for _ in range(3):
            job = await take(jobs)
            if job.value == b"rejected":
                await job.reject("größer als erlaubt")
            else:
                await job.release(reason="busy")
    async with asyncio.timeout(SECONDS):
        while dead not in await ms.topics():  # noqa: ASYNC110  (there is no event for it)
            await asyncio.sleep(0.02)
        reasons = {}
        async for letter in ms.read(dead):
            reasons[letter.value] = (letter.header("millstream-dead-reason") or b"").decode()
            if len(reasons) == 2:
                break
    assert reasons == {b"rejected": "größer als erlaubt", b"released": "busy"}


async def keeps_its_settings(ms: Millstream, topic: str, group: str) -> bool:
    await ms.send(topic, b"x")
    async with ms.queue(topic, group=group, settings={"share.delivery.count.limit": "5"}) as jobs:
        await (await take(jobs)).release()
    async with ms.queue(topic, group=group, settings={"share.delivery.count.limit": "1"}) as jobs:
        await (await take(jobs)).release()
        again = await jobs.receive(5)
        return again is not None and again.attempt == 3


async def test_a_group_that_is_there_keeps_its_settings(ms: Millstream, unique: Unique) -> None:
    assert await keeps_its_settings(ms, unique("jobs"), unique("workers"))


async def test_a_group_that_is_there_keeps_its_settings_over_another_cluster(kafka: Millstream, unique: Unique) -> None:
    assert await keeps_its_settings(kafka, unique("jobs"), unique("workers"))


async def test_a_lease_that_is_renewed_outlasts_its_time(moved: Moved, unique: Unique) -> None:
    ms, advance = moved
    topic, group = unique("jobs"), unique("workers")
    await ms.send(topic, b"x")
    settings = {"share.record.lock.duration.ms": "15000"}
    async with ms.queue(topic, group=group, settings=settings) as jobs, ms.queue(topic, group=group) as others:
        job = await take(jobs)
        for _ in range(4):
            advance(5)
            await job.renew()
            assert await others.receive(0.3) is None
        await job.accept()


async def test_one_worker_can_have_several_jobs_out_and_answers_them_in_any_order(
    ms: Millstream, unique: Unique
) -> None:
    topic, group = unique("jobs"), unique("workers")
    await ms.create_topic(topic, partitions=2)
    await ms.send_many([(topic, b"%d" % number) for number in range(6)])
    async with ms.queue(topic, group=group) as jobs:
        out = [await take(jobs) for _ in range(6)]
        await asyncio.gather(*(job.accept() for job in reversed(out)))
        assert {job.value for job in out} == {b"%d" % number for number in range(6)}
        assert await jobs.receive(0.2) is None


async def test_a_worker_of_several_topics_says_where_a_job_is_from(ms: Millstream, unique: Unique) -> None:
    one, two, group = unique("jobs"), unique("jobs"), unique("workers")
    await ms.send_many([(one, b"one"), (two, b"two")])
    async with ms.queue([one, two], group=group) as jobs:
        found = [await take(jobs) for _ in range(2)]
        for job in found:
            await job.accept()
    assert {(job.topic, job.value) for job in found} == {(one, b"one"), (two, b"two")}


async def test_a_wait_that_is_cancelled_costs_no_job(ms: Millstream, unique: Unique) -> None:
    topic, group = unique("jobs"), unique("workers")
    await ms.create_topic(topic)
    async with ms.queue(topic, group=group) as jobs:
        for round_ in range(5):
            waiting = asyncio.ensure_future(jobs.receive())
            await asyncio.sleep(0.01 * round_)
            waiting.cancel()
            with suppress(asyncio.CancelledError):
                await waiting
            await ms.send(topic, b"%d" % round_)
            async with asyncio.timeout(SECONDS):
                job = await take(jobs)
                assert (job.value, job.attempt) == (b"%d" % round_, 1)
                await job.accept()


async def test_a_worker_comes_back_by_itself_when_the_server_does(unique: Unique) -> None:
    topic, group = unique("jobs"), unique("workers")
    with BrokerThread() as server:
        async with package.connect(server.bootstrap, timeout=10) as ms:
            await ms.send_many([(topic, b"a"), (topic, b"b")])
            async with ms.queue(topic, group=group, prefetch=1) as jobs:
                job = await take(jobs)
                server.kill()
                with pytest.raises(LeaseLost):
                    await job.accept()
                server.restart()
                async with asyncio.timeout(SECONDS):
                    found: set[bytes | None] = set()
                    while len(found) < 2:
                        again = await take(jobs)
                        found.add(again.value)
                        await again.accept()


async def test_a_group_that_cannot_be_a_queue_is_refused_with_a_reason(ms: Millstream, unique: Unique) -> None:
    topic, group = unique("jobs"), unique("readers")
    await ms.send(topic, b"x")
    async with ms.stream(topic, group=group, start="earliest") as stream:
        assert await stream.receive(SECONDS) is not None
        with pytest.raises(package.MillstreamError, match=group):
            async with ms.queue(topic, group=group) as jobs:
                await jobs.receive(SECONDS)


async def test_where_only_kafka_is_spoken_its_verbs_work_and_the_others_say_that_they_do_not(
    kafka: Millstream, unique: Unique
) -> None:
    topic, group = unique("jobs"), unique("workers")
    await kafka.send_many([(topic, b"a"), (topic, b"b"), (topic, b"c")])
    async with kafka.queue(topic, group=group) as jobs:
        job = await take(jobs)
        with pytest.raises(Unsupported):
            await job.renew()
        with pytest.raises(Unsupported):
            await job.release(delay=1)
        await job.release()
        seen: list[Any] = []
        while len(seen) < 3:
            job = await take(jobs)
            seen.append((job.value, job.attempt))
            await job.accept()
        assert sorted(seen) == [(b"a", 2), (b"b", 1), (b"c", 1)]


async def test_where_only_kafka_is_spoken_a_cancelled_wait_does_not_stall_the_worker(
    kafka: Millstream, unique: Unique
) -> None:
    topic, group = unique("jobs"), unique("workers")
    await kafka.create_topic(topic)
    async with kafka.queue(topic, group=group) as jobs:
        waiting = asyncio.ensure_future(jobs.receive())
        await asyncio.sleep(0.05)
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting
        await kafka.send(topic, b"job")
        async with asyncio.timeout(10):
            job = await take(jobs)
            assert job.attempt == 1
            await job.accept()


async def test_who_stops_and_starts_makes_no_dead_letters_of_jobs_that_nobody_was_given(
    ms: Millstream, unique: Unique
) -> None:
    topic, group = unique("jobs"), unique("workers")
    await ms.send_many([(topic, b"%d" % number) for number in range(8)])
    seen = []
    for _ in range(4):
        async with ms.queue(topic, group=group, prefetch=8) as jobs:
            job = await jobs.receive(SECONDS)
            assert job is not None
            seen.append((job.value, job.attempt))
            await job.accept()
    assert seen == [(b"%d" % number, 1) for number in range(4)]


async def test_a_job_that_its_worker_left_unanswered_was_delivered(ms: Millstream, unique: Unique) -> None:
    topic, group = unique("jobs"), unique("workers")
    await ms.send_many([(topic, b"given"), (topic, b"fetched")])
    async with ms.queue(topic, group=group, prefetch=2) as jobs:
        assert await jobs.receive(SECONDS) is not None
    async with ms.queue(topic, group=group, prefetch=2) as jobs:
        attempts = [job.attempt for job in (await jobs.receive(SECONDS), await jobs.receive(SECONDS)) if job]
    assert attempts == [2, 1]


async def test_a_job_on_its_way_to_somebody_who_was_cancelled_was_not_delivered(ms: Millstream, unique: Unique) -> None:
    topic, group = unique("jobs"), unique("workers")
    await ms.send(topic, b"job")
    for _ in range(4):
        async with ms.queue(topic, group=group) as jobs:
            with suppress(TimeoutError):
                await asyncio.wait_for(jobs.receive(), 0)
    async with ms.queue(topic, group=group) as jobs:
        job = await jobs.receive(SECONDS)
        assert job is not None and job.attempt == 1
