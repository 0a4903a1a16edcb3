"""The client of a server where its threads and the event loop meet."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import ConfigResource, ResourceType

import millstream as package
from millstream.broker.groups.queue.partition import QueuePartition
from millstream.broker.groups.queue.queue import Queue
from millstream.client import remote_reading
from millstream.client.iterators import QueueOptions, StreamOptions
from millstream.client.records import Job
from millstream.client.remote import Remote
from millstream.client.remote_jobs import LeasedJobs
from millstream.client.remote_share import SharedJobs
from millstream.client.remote_stream import RemoteStream
from millstream.client.remote_worker import Worker
from millstream.core.errors import Closed, Code, LeaseLost, MillstreamError, RequestError, UnknownTopic, Unreachable
from millstream.testing.broker_thread import BrokerThread

SECONDS = 20.0


def leased_jobs(queue: Any) -> LeasedJobs[bytes]:
    assert isinstance(queue._jobs, LeasedJobs)
    return queue._jobs


async def renew_and_accept(job: Job[Any], leased: LeasedJobs[bytes]) -> list[asyncio.Task[None]]:
    said = [asyncio.ensure_future(job.renew()), asyncio.ensure_future(job.accept())]
    await asyncio.sleep(0)
    assert len(leased._sayings) == 2
    return said


async def test_a_job_that_is_renewed_and_accepted_at_once_is_both(millstream: BrokerThread) -> None:
    async with package.connect(millstream.bootstrap) as ms:
        await ms.send_many([("jobs", b"0"), ("jobs", b"1")])
        async with ms.queue("jobs", group="workers") as jobs:
            job = await jobs.receive(SECONDS)
            assert job is not None and job.offset == 0
            with leased_jobs(jobs)._told:  # so that the member's thread hears both at once
                said = await renew_and_accept(job, leased_jobs(jobs))
            await asyncio.gather(*said)
        async with ms.queue("jobs", group="workers") as jobs:
            following = await jobs.receive(SECONDS)
            assert following is not None and following.offset == 1


async def test_all_that_was_said_of_a_job_before_the_end_is_heard(millstream: BrokerThread) -> None:
    async with package.connect(millstream.bootstrap) as ms:
        await ms.send("jobs", b"0")
        jobs = await ms.queue("jobs", group="workers").__aenter__()
        job = await jobs.receive(SECONDS)
        assert job is not None
        leased = leased_jobs(jobs)
        with leased._told:
            said = await renew_and_accept(job, leased)
            closing = asyncio.ensure_future(jobs.close())
            while not leased._is_stopping:  # noqa: ASYNC110  (there is no event for it)
                await asyncio.sleep(0)
        await asyncio.gather(closing, *said)


async def test_who_asks_a_worker_again_that_failed_is_told_again(
    millstream: BrokerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop handles the failure and a retry before the reporting thread continues."""
    may_get_on = threading.Event()
    call = LeasedJobs._call

    def call_and_wait(self: LeasedJobs[bytes], function: object, *arguments: object) -> None:
        call(self, function, *arguments)
        if function == self._fail:
            may_get_on.wait(SECONDS)

    def fail(self: LeasedJobs[bytes]) -> None:
        raise ValueError("damaged")

    monkeypatch.setattr(LeasedJobs, "_call", call_and_wait)
    monkeypatch.setattr(LeasedJobs, "_open", fail)
    async with package.connect(millstream.bootstrap) as ms, ms.queue("jobs", group="workers") as jobs:
        try:
            for _ in range(2):
                with pytest.raises(MillstreamError, match="the worker failed: ValueError: damaged"):
                    await jobs.receive(5)
        finally:
            may_get_on.set()


class Consumer:
    """Brings one record; the poll after it loses the partition, to a member that commits 20 at once."""

    def __init__(self, stream: RemoteStream[bytes]) -> None:
        self.is_polling = threading.Event()
        self.may_lose_it = threading.Event()
        self.commits: list[int] = []
        self._stream = stream
        self._messages = [Message(topic="orders", partition=0, offset=9, value=b"x")]
        self._places = [TopicPartition("orders", 0)]

    def poll(self, seconds: float) -> Message | None:
        if self._messages:
            self._stream._assigned(self, self._places)  # type: ignore[arg-type]
            return self._messages.pop()
        self.is_polling.set()
        self.may_lose_it.wait(SECONDS)
        self._stream._revoked(self, self._places)  # type: ignore[arg-type]
        self.commits.append(20)
        return None

    def consume(self, count: int, seconds: float) -> list[Message]:
        return []

    def commit(self, offsets: list[TopicPartition], asynchronous: bool) -> list[TopicPartition]:
        self.commits += [place.offset for place in offsets]
        return []


async def test_a_commit_that_waits_behind_a_poll_leaves_out_what_the_poll_gave_up() -> None:
    stream: RemoteStream[bytes] = RemoteStream(Remote(), StreamOptions(("orders",), "g", "earliest", 1000.0, None))
    consumer = Consumer(stream)
    stream._consumer = consumer  # type: ignore[assignment]
    stream._is_open = True
    record = await stream.receive()
    assert record is not None and record.offset == 9
    waiting = asyncio.ensure_future(stream.receive())
    assert await asyncio.to_thread(consumer.is_polling.wait, SECONDS)
    waiting.cancel()
    await asyncio.wait([waiting])
    committing = asyncio.ensure_future(stream.commit())
    await asyncio.sleep(0)
    consumer.may_lose_it.set()
    await committing
    assert consumer.commits == [10, 20]
    await stream._worker.end()


class Answered(dict[Any, Any]):
    """Jobs of which the loop's thread takes the last one right after another thread has looked."""

    def __bool__(self) -> bool:
        found = len(self) > 0
        self.clear()
        return found

    def __iter__(self) -> Any:
        found = list(super().__iter__())
        self.clear()
        return iter(found)


async def test_leases_are_let_go_while_the_last_job_is_answered() -> None:
    committed: list[float] = []
    remote: Any = SimpleNamespace(timeout=1.0)
    jobs: SharedJobs[bytes] = SharedJobs(remote, QueueOptions(("jobs",), "g", 1, {}, None))
    jobs._consumer = SimpleNamespace(commit_sync=committed.append)  # type: ignore[assignment]
    jobs._unanswered = Answered({("jobs", 0, 0): Message(topic="jobs", partition=0, offset=0)})
    jobs._let_go()
    assert committed == [1.0]


async def test_a_count_of_partitions_that_was_found_while_the_topic_went_is_forgotten() -> None:
    remote = Remote()
    remote._is_open = True
    remote._worker = Worker("test")
    deleted = SimpleNamespace(result=lambda: remote._counts.update(orders=4))  # as a sender does
    admin: Any = SimpleNamespace(delete_topics=lambda names, request_timeout: {"orders": deleted})
    remote._admin = admin
    await remote.delete_topic("orders")
    assert "orders" not in remote._counts
    await remote.worker.end()


async def test_a_call_that_fails_after_its_caller_was_cancelled_is_nobodys_error() -> None:
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
    worker, may_fail = Worker("test"), threading.Event()

    def fail() -> None:
        may_fail.wait(SECONDS)
        raise MillstreamError("too late")

    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(worker.call(fail), 0.01)
    may_fail.set()
    await worker.end(lambda: None)
    gc.collect()
    assert not complaints


async def test_a_sender_of_one_that_is_closed_takes_nothing(millstream: BrokerThread) -> None:
    async with package.connect(millstream.bootstrap) as ms:
        await ms.send("orders", b"x")
    with pytest.raises(Closed):
        await ms.sender("orders").send(b"y")


async def test_what_a_cluster_alone_refuses_has_its_code(millstream: BrokerThread) -> None:
    async with package.connect(millstream.bootstrap) as ms:
        millstream.fail_next("Produce", "NOT_ENOUGH_REPLICAS")
        assert (await ms.send("orders", b"x")).offset == 0  # said again
        millstream.fail_next("Produce", "TOPIC_AUTHORIZATION_FAILED")
        with pytest.raises(RequestError) as refused:
            await ms.send("orders", b"y")
        assert refused.value.code == Code.TOPIC_AUTHORIZATION_FAILED and int(refused.value.code) == 29


@pytest.mark.parametrize("refusals", [1, 2, 4])
@pytest.mark.parametrize("asked", [{"offset": "start"}, {"time": 1_700_000_000_000}], ids=["by position", "by time"])
@pytest.mark.parametrize("code", ["OFFSET_NOT_AVAILABLE", "KAFKA_STORAGE_ERROR", "LEADER_NOT_AVAILABLE"])
async def test_a_read_begins_when_the_broker_can_tell_where(
    millstream: BrokerThread, asked: dict[str, Any], code: str, refusals: int
) -> None:
    async with package.connect(millstream.bootstrap) as ms:
        for value in (b"a", b"b"):
            await ms.send("orders", value)
        millstream.fail_next("ListOffsets", code, times=refusals)
        read = [record.value async for record in ms.read("orders", partition=0, follow=False, **asked)]
        assert read == [b"a", b"b"]


@pytest.mark.parametrize("asked", [{"offset": "start"}, {"time": 1_700_000_000_000}], ids=["by position", "by time"])
async def test_a_read_that_may_not_know_where_to_begin_says_so_and_does_not_begin_at_the_end(
    millstream: BrokerThread, asked: dict[str, Any]
) -> None:
    async with package.connect(millstream.bootstrap) as ms:
        await ms.send("orders", b"a")
        millstream.fail_next("ListOffsets", "TOPIC_AUTHORIZATION_FAILED")
        with pytest.raises(RequestError) as refused:
            assert [record.value async for record in ms.read("orders", partition=0, follow=False, **asked)] == [b"a"]
        assert refused.value.code == Code.TOPIC_AUTHORIZATION_FAILED


@pytest.fixture
def before_lookups(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """What happens before each time that a read asks for an offset."""
    waiting: list[Callable[[], None]] = []

    class Disturbed(confluent_kafka.Consumer):
        def offsets_for_times(self, *arguments: Any) -> Any:
            if waiting:
                waiting.pop(0)()
            return super().offsets_for_times(*arguments)

    monkeypatch.setattr(remote_reading, "Consumer", Disturbed)
    return waiting


def nothing() -> None:
    return


def is_away(code: str) -> None:
    raise KafkaException(KafkaError(getattr(KafkaError, code)))


@pytest.mark.parametrize("lookup", range(3))
@pytest.mark.parametrize("code", ["_UNKNOWN_PARTITION", "_DESTROY_BROKER", "_TRANSPORT"])
async def test_a_read_outlives_a_broker_that_is_away_for_a_moment(
    millstream: BrokerThread, before_lookups: list[Callable[[], None]], code: str, lookup: int
) -> None:
    """librdkafka says these at once, whatever the timeout: that it knows no such partition, too."""

    async with package.connect(millstream.bootstrap) as ms:
        await ms.send("orders", b"a")
        before_lookups += [nothing] * lookup + [partial(is_away, code)] * 2
        read = ms.read("orders", partition=0, time=0, follow=False)
        assert [record.value async for record in read] == [b"a"]


async def test_a_broker_that_stays_away_is_unreachable_and_its_topics_are_not_unknown(
    millstream: BrokerThread, before_lookups: list[Callable[[], None]]
) -> None:
    async with package.connect(millstream.bootstrap) as ms:
        await ms.send("orders", b"a")
    async with package.connect(millstream.bootstrap, timeout=0.5) as ms:
        before_lookups += [partial(is_away, "_UNKNOWN_PARTITION")] * 100
        with pytest.raises(Unreachable):
            assert [record.value async for record in ms.read("orders", partition=0, follow=False)] == [b"a"]


async def test_a_topic_that_goes_while_a_read_begins_is_told_at_once(
    millstream: BrokerThread, before_lookups: list[Callable[[], None]]
) -> None:
    async with package.connect(millstream.bootstrap) as ms:
        await ms.send("orders", b"a")
        before_lookups.append(lambda: millstream.run(lambda broker: broker.delete_topic("orders")))
        async with asyncio.timeout(SECONDS):  # and not after the 30 that a call may take
            with pytest.raises(UnknownTopic):
                assert [record.value async for record in ms.read("orders", partition=0, follow=False)] == [b"a"]


@pytest.mark.parametrize("follow", [True, False])
async def test_a_read_by_time_may_begin_at_a_record_that_came_meanwhile(
    millstream: BrokerThread, before_lookups: list[Callable[[], None]], follow: bool
) -> None:
    async with package.connect(millstream.bootstrap) as ms:
        await ms.send("orders", b"a", timestamp=1000)
        loop = asyncio.get_running_loop()

        def send() -> None:
            for value, timestamp in ((b"b", 2000), (b"c", 3000)):
                asyncio.run_coroutine_threadsafe(ms.send("orders", value, timestamp=timestamp), loop).result(SECONDS)

        before_lookups += [nothing, nothing, send]
        async with ms.read("orders", partition=0, time=3000, follow=follow) as read:
            record = await read.receive(SECONDS)
            assert (record.value if record is not None else None) == (b"c" if follow else None)


async def test_jobs_of_other_topics_do_not_fail_with_one_that_cannot_be_read(
    millstream: BrokerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were leased, thrown away and leased again, until they were dead letters that no worker had seen."""
    acquire = QueuePartition.acquire

    async def refuse_some(self: QueuePartition, *arguments: Any, **keywords: Any) -> Any:
        if self.topic.name == "broken":
            raise RequestError(Code.KAFKA_STORAGE_ERROR)
        return await acquire(self, *arguments, **keywords)

    monkeypatch.setattr(QueuePartition, "acquire", refuse_some)
    async with package.connect(millstream.bootstrap) as ms:
        await ms.send_many([("jobs", b"0"), ("jobs", b"1"), ("broken", b"x")])
        async with ms.queue(["jobs", "broken"], group="workers", prefetch=10) as jobs:
            first, second = await jobs.receive(SECONDS), await jobs.receive(SECONDS)
            assert first is not None and second is not None
            assert [(job.topic, job.value, job.attempt) for job in (first, second)] == [
                ("jobs", b"0", 1),
                ("jobs", b"1", 1),
            ]
            await first.accept()
            assert await jobs.receive(0.3) is None  # it asks, and hears only of the one that is broken
            await second.accept()
        monkeypatch.undo()
        async with ms.queue(["jobs", "broken"], group="workers") as jobs:
            job = await jobs.receive(SECONDS)
            assert job is not None and (job.topic, job.attempt) == ("broken", 1)


async def test_a_partition_that_cannot_be_opened_costs_a_worker_no_job_of_another(
    millstream: BrokerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where its beginning could not be written, or its topic went meanwhile."""
    opened = Queue.partition

    async def refuse_some(self: Queue, topic: Any, index: int) -> Any:
        if topic.name == "broken":
            raise RequestError(Code.KAFKA_STORAGE_ERROR)
        return await opened(self, topic, index)

    monkeypatch.setattr(Queue, "partition", refuse_some)
    async with package.connect(millstream.bootstrap) as ms:
        await ms.send_many([("jobs", b"0"), ("broken", b"x")])
        async with ms.queue(["jobs", "broken"], group="workers") as jobs:
            job = await jobs.receive(SECONDS)
            assert job is not None and (job.topic, job.attempt) == ("jobs", 1)
            assert await jobs.receive(0.3) is None
            await job.accept()
            monkeypatch.undo()
            job = await jobs.receive(SECONDS)
            assert job is not None and (job.topic, job.attempt) == ("broken", 1)


async def test_a_topic_that_is_deleted_costs_a_worker_no_job_of_another(millstream: BrokerThread) -> None:
    async with package.connect(millstream.bootstrap) as ms:
        await ms.send_many([("jobs", b"0"), ("gone", b"x")])
        async with ms.queue(["jobs", "gone"], group="workers", prefetch=2) as jobs:
            taken = [await jobs.receive(SECONDS), await jobs.receive(SECONDS)]
            job, lost = sorted((each for each in taken if each is not None), key=lambda each: each.topic, reverse=True)
            await ms.delete_topic("gone")
            assert await jobs.receive(0.3) is None
            with pytest.raises(LeaseLost):
                await lost.accept()
            await job.accept()
            member = leased_jobs(jobs)._member
            assert member is not None
            member._next_beat = 0.0  # so that it hears now of what it has left
            async with asyncio.timeout(SECONDS):
                while len(member._named) > 1:
                    assert await jobs.receive(0.1) is None
            assert leased_jobs(jobs)._member is member


@pytest.mark.parametrize("where", ["embedded", "remote"])
async def test_a_job_of_a_deleted_topic_answers_for_none_of_the_one_that_was_made_anew(
    millstream: BrokerThread, where: str
) -> None:
    async with package.open("memory:") if where == "embedded" else package.connect(millstream.bootstrap) as ms:
        await ms.create_topic("jobs", partitions=1)
        await ms.send("jobs", b"old")
        async with ms.queue("jobs", group="workers", settings={"share.heartbeat.interval.ms": "1000"}) as jobs:
            old = await jobs.receive(SECONDS)
            await ms.delete_topic("jobs")
            await ms.create_topic("jobs", partitions=1)
            await ms.send("jobs", b"new")
            new = await jobs.receive(SECONDS)
            assert old is not None and new is not None and (old.offset, new.offset, new.value) == (0, 0, b"new")
            with pytest.raises(LeaseLost):
                await old.accept()
        async with ms.queue("jobs", group="workers") as jobs:  # the worker went before it had done the new one
            again = await jobs.receive(SECONDS)
            assert again is not None and (again.value, again.attempt) == (b"new", 2)


async def test_a_group_keeps_its_settings_though_the_broker_could_not_list_it_at_first(
    millstream: BrokerThread,
) -> None:
    limit = "share.delivery.count.limit"
    async with package.connect(millstream.bootstrap) as ms:
        async with ms.queue("jobs", group="workers", settings={limit: "9"}):
            pass
        millstream.fail_next("ListGroups", "COORDINATOR_LOAD_IN_PROGRESS", times=3)
        async with ms.queue("jobs", group="workers", settings={limit: "3"}):
            pass
        resource = ConfigResource(ResourceType.GROUP, "workers")
        assert ms.admin.describe_configs([resource])[resource].result(SECONDS)[limit].value == "9"


async def test_a_server_that_cannot_say_now_that_it_is_ours_gets_no_lesser_worker(millstream: BrokerThread) -> None:
    async with package.connect(millstream.bootstrap) as ms:
        millstream.fail_next("DescribeConfigs", "REQUEST_TIMED_OUT")
        with pytest.raises(RequestError) as refused:
            await ms.queue("jobs", group="workers").receive(0.1)
        assert refused.value.code == Code.REQUEST_TIMED_OUT


async def test_a_worker_whose_thread_cannot_be_started_is_shut_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a process has as many threads as it may have."""
    owner: Any = SimpleNamespace(bootstrap="127.0.0.1:1")
    jobs: LeasedJobs[bytes] = LeasedJobs(owner, QueueOptions(("jobs",), "workers", 1, {}, None))

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            await jobs.start()
    await asyncio.wait_for(jobs.shut(), SECONDS)
