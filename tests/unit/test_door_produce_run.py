"""What the Kafka door does with requests that arrived together: the same, for the producer, as with each alone."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from millstream.broker.partition import Partition
from millstream.broker.session import Session
from millstream.config import Config
from millstream.core.errors import Code
from millstream.core.promise import Promise
from millstream.doors.kafka.context import Context
from millstream.doors.kafka.known_produce import KnownProduce, KnownProduces
from millstream.doors.kafka.produce_run import ProduceRun
from millstream.doors.kafka.sessions import FetchSessions
from millstream.log.answers import Appended
from millstream.log.log import Log
from millstream.server import Server
from millstream.stores.base import PartitionLog
from millstream.wire.kafka import produce
from millstream.wire.kafka.produce import PartitionAnswer, PartitionData
from millstream.wire.kafka.runs import Request
from tests.batches import append, batch, read_all
from tests.compat import raw
from tests.compat.random_messages import read_response

VERSIONS = range(3, 14)
NAMED = [version for version in VERSIONS if version < produce.TOPIC_IDS_FROM]


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    server = Server(Config(store=f"file:{tmp_path}", kafka="127.0.0.1:0", http="off", flush="os"))
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def context(server: Server) -> Context:
    await server.broker.topics.create("orders", 3, {})
    return Context(Session(server.broker, "kafka", "127.0.0.1"), FetchSessions(), "127.0.0.1", 9092)


def partition_of(context: Context, index: int) -> Partition:
    topic = context.session._broker.topics.get("orders")
    assert topic is not None
    return topic.partitions[index]


def taught(context: Context, version: int = 9) -> KnownProduces:
    """What a door knows after one request for each partition."""
    known = KnownProduces(
        context.session._broker.topics, context.session._broker.clock, context.session._broker.authorizer
    )
    context.version = version
    for index in range(3):
        records = raw.batch(b"first")
        frame = memoryview(raw.produce("orders", records, partition=index, version=version))[4:]
        known.learn(frame, PartitionData("orders", index, memoryview(records)), context)
    return known


def run_of(known: KnownProduces, indexes: list[int], version: int = 9) -> ProduceRun:
    data = b"".join(
        raw.produce("orders", raw.batch(b"%d" % at), partition=index, version=version)
        for at, index in enumerate(indexes)
    )
    return run_from(known, bytearray(data))


def run_from(known: KnownProduces, data: bytearray) -> ProduceRun:
    """Of a receive buffer, all of which is taken."""
    requests: list[Request[KnownProduce]] = []
    assert known.take(memoryview(data), 0, requests) == len(data)
    return ProduceRun(requests)


def read_answers(run: ProduceRun, version: int = 9) -> list[tuple[int, int, int]]:
    """Partition, error and base offset of each."""
    data = b"".join(chunk for chunk in run.answers() if isinstance(chunk, bytes))
    found = []
    while data:
        size = int.from_bytes(data[:4])
        body = data[8 + (version >= 9) : 4 + size]
        one = read_response(0, version, body).responses[0].partition_responses[0]
        found.append((one.index, one.error_code, one.base_offset))
        data = data[4 + size :]
    return found


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("error", [None, OSError("no space")], ids=["well", "badly"])
def test_an_answer_from_a_template_is_the_one_that_is_encoded(version: int, error: OSError | None) -> None:
    topic = "orders" if version < produce.TOPIC_IDS_FROM else uuid.uuid4()
    known = KnownProduce(b"prefix", PartitionData(topic, 7, None), object(), version)  # type: ignore[arg-type]
    promise: Promise[Appended] = Promise.of(Appended(5, 2)) if error is None else Promise.failed(error)
    expected = (
        PartitionAnswer(topic, 7, 0, 5, -1, 2)
        if error is None
        else PartitionAnswer(topic, 7, int(Code.UNKNOWN_SERVER_ERROR), message=str(error))
    )
    body = (b"\0" if version >= produce.FLEXIBLE_FROM else b"") + produce.encode([expected], version)
    assert known.settled(99, -1, promise) == (4 + len(body)).to_bytes(4) + (99).to_bytes(4) + body


@pytest.mark.parametrize("version", NAMED)
async def test_what_is_learnt_from_a_request_finds_the_batch_of_the_next(context: Context, version: int) -> None:
    known = taught(context, version)
    records = raw.batch(b"another" * 50)
    found = known.find(memoryview(raw.produce("orders", records, partition=2, version=version))[4:], version)
    assert found is not None
    assert found[0].partition is partition_of(context, 2) and bytes(found[1]) == records


@pytest.mark.parametrize("version", NAMED)
async def test_partitions_in_turn_are_answered_in_the_order_of_the_requests(context: Context, version: int) -> None:
    run = run_of(taught(context, version), [0, 1, 0, 2, 1, 0], version)
    assert run.append(context).done
    assert read_answers(run, version) == [(0, 0, 0), (1, 0, 0), (0, 0, 1), (2, 0, 0), (1, 0, 1), (0, 0, 2)]
    values = [[record.value for record in read_all(partition_of(context, index).log)] for index in range(3)]
    assert values == [[b"0", b"2", b"5"], [b"1", b"4"], [b"3"]]
    assert context.session._broker.metrics.batches_in == context.session._broker.metrics.records_in == 6


async def test_an_append_that_wakes_a_reader_which_appends_elsewhere_does_not_disturb_the_run(context: Context) -> None:
    """A woken fetch answers its connection, and that may go on with a produce request that it had put aside."""

    def put_in_between(log: PartitionLog) -> None:
        append(log, batch(b"in between"))

    run = run_of(taught(context), [0, 1, 1])
    second = partition_of(context, 1).log
    partition_of(context, 0).log.wake(lambda: put_in_between(second))
    run.append(context)
    assert read_answers(run) == [(0, 0, 0), (1, 0, 1), (1, 0, 2)]
    assert [(record.offset, record.value) for record in read_all(second)] == [(0, b"in between"), (1, b"1"), (2, b"2")]


async def test_one_partition_that_fails_costs_its_own_requests_only(context: Context) -> None:
    run = run_of(taught(context), [0, 1, 0, 1])
    log = partition_of(context, 1).log
    assert isinstance(log, Log)
    log.fail(OSError(5, "no disk"))
    assert run.append(context).done
    failed = int(Code.KAFKA_STORAGE_ERROR)
    assert read_answers(run) == [(0, 0, 0), (1, failed, -1), (0, 0, 1), (1, failed, -1)]


async def test_answers_wait_for_every_sync_while_the_buffer_is_used_again(context: Context) -> None:
    safe = await context.session._broker.topics.create("safe", 1, {"flush": "always"})
    known = taught(context)
    records = raw.batch(b"x")
    frame = raw.produce("safe", records)
    known.learn(memoryview(frame)[4:], PartitionData("safe", 0, memoryview(records)), context)
    data = bytearray(frame + raw.produce("orders", records) + frame)
    run = run_from(known, data)
    promise = run.append(context)
    assert not promise.done
    data[:] = bytes(len(data))
    await asyncio.wait_for(promise, 10)
    assert read_answers(run) == [(0, 0, 0), (0, 0, 0), (0, 0, 1)]
    assert [record.value for record in read_all(safe.partitions[0].log)] == [b"x", b"x"]


@pytest.mark.parametrize(
    "settings",
    [{"message.timestamp.type": "LogAppendTime"}, {"cleanup.policy": "compact"}],
    ids=["stamped by the broker", "compacted"],
)
async def test_topics_that_look_into_batches_take_no_runs(context: Context, settings: dict[str, str]) -> None:
    await context.session._broker.topics.create("careful", 1, settings)
    known = KnownProduces(
        context.session._broker.topics, context.session._broker.clock, context.session._broker.authorizer
    )
    records = raw.batch(b"x", key=b"k")
    frame = raw.produce("careful", records)
    context.version = 9
    known.learn(memoryview(frame)[4:], PartitionData("careful", 0, memoryview(records)), context)
    assert known.find(memoryview(frame)[4:], 9) is not None
    assert known.take(memoryview(bytearray(frame * 3)), 0, []) == 0


async def test_all_is_forgotten_when_topics_change(context: Context) -> None:
    known = taught(context)
    frame = raw.produce("orders", raw.batch(b"x"))
    assert known.find(memoryview(frame)[4:], 9) is not None
    await context.session._broker.topics.create("another", 1, {})
    assert known.find(memoryview(frame)[4:], 9) is None
    assert known.take(memoryview(bytearray(frame)), 0, []) == 0
