"""Damaged data behind a real broker: bits flipped in its files, read through every door."""

from __future__ import annotations

import json
import sqlite3
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

import millstream.sync
from millstream.core.errors import Code, RequestError
from tests import confluent
from tests.command_line import Cli
from tests.compat import raw, share_frames
from tests.compat.client_flowmq import FlowmqClient
from tests.compat.client_flume import UNKNOWN, Flume
from tests.compat.client_luxun import Luxun
from tests.serving import ServedBroker

FLAGS = [part for door in ("flowmq", "flume", "luxun") for part in (f"--{door}", "127.0.0.1:0")]
SECONDS = 20.0
VALUES = [b"balance=1000", b"balance=2000", b"balance=3000"]
VICTIM = 1
FIRST_MS = time.time_ns() // 1_000_000 - 60_000
"""Not so old that retention takes the records away."""
TOPICS = ("fetched", "flume", "luxun", "fanout", "flowmq", "redriven", "shared", "read", "streamed", "timed", "mixed")
OF_ONE_PARTITION = ("luxun", "fanout")


def fill(address: str, topics: tuple[str, ...] = TOPICS) -> None:
    """A batch for each record."""
    raw.create_topic(address, "__dlq__")
    for topic in topics:
        raw.create_topic(address, topic, 1 if topic in OF_ONE_PARTITION else 2)
    producer = Producer({"bootstrap.servers": address, "linger.ms": 0})
    for number, value in enumerate(VALUES):
        for topic in topics:
            for partition in (0,) if topic in OF_ONE_PARTITION else (0, 1):
                producer.produce(topic, value, partition=partition, timestamp=FIRST_MS + number)
        assert producer.flush(SECONDS) == 0


def flip_in_files(directory: Path, topics: tuple[str, ...] = TOPICS) -> None:
    """`balance=2000` becomes `balance=3000` in partition 0 of every topic: one bit."""
    for topic in topics:
        [segment] = directory.glob(f"logs/{topic}-*/0/*.log")
        data = segment.read_bytes()
        assert data.count(b"balance=2000") == 1
        segment.write_bytes(data.replace(b"balance=2000", b"balance=3000"))


def flip_in_database(path: Path) -> None:
    """The same, where the values of both partitions are in one file."""
    database = sqlite3.connect(path)
    of_partition_0 = "SELECT rowid, data FROM arrivals WHERE log_id IN (SELECT id FROM logs WHERE partition = 0)"
    for rowid, data in database.execute(of_partition_0).fetchall():
        damaged = data.replace(b"balance=2000", b"balance=3000")
        database.execute("UPDATE arrivals SET data = ? WHERE rowid = ?", (damaged, rowid))
    database.commit()
    database.close()


@pytest.fixture(scope="module", params=["file", "sqlite"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedBroker]:
    directory = tmp_path_factory.mktemp("damaged")
    store = None if request.param == "file" else f"sqlite:{directory / 'store.db'}"
    with ServedBroker(directory, *FLAGS, store=store) as broker:
        fill(broker.address)
        broker.stop()
        if request.param == "file":
            flip_in_files(directory)
        else:
            flip_in_database(directory / "store.db")
        broker.start()
        yield broker


def page(served: ServedBroker, path: str) -> Any:
    with urllib.request.urlopen(f"http://{served.http}{path}", timeout=SECONDS) as answer:
        body = answer.read().decode()
    return body if path == "/metrics" else json.loads(body)


def consume(served: ServedBroker, topic: str, count: int, *partitions: int, start: int = 0) -> list[Any]:
    """Values, and codes of errors, as librdkafka with its defaults gives them."""
    consumer = Consumer({"bootstrap.servers": served.address, "group.id": "g", "enable.auto.commit": False})
    consumer.assign([TopicPartition(topic, partition, start) for partition in partitions])
    got: list[Any] = []
    while len(got) < count:
        message = consumer.poll(SECONDS)
        assert message is not None, got
        got.append(message.value() if message.error() is None else confluent.error_code(message))
    consumer.close()
    return got


def test_librdkafka_with_its_defaults_gets_an_error_and_no_other_value(served: ServedBroker) -> None:
    assert consume(served, "fetched", 2, 0) == [VALUES[0], KafkaError.INVALID_MSG]
    assert consume(served, "fetched", 1, 0, start=2) == [VALUES[2]]


def test_a_consumer_of_a_good_and_a_damaged_partition_gets_all_of_the_good_one(served: ServedBroker) -> None:
    got = consume(served, "mixed", 5, 0, 1)
    assert KafkaError.INVALID_MSG in got
    assert sorted(value for value in got if isinstance(value, bytes)) == sorted([VALUES[0], *VALUES])


def test_flume_answers_error_1(served: ServedBroker) -> None:
    with Flume(served.doors["flume"]) as flume:
        assert flume.fetch("flume", 0, 0) == (0, [(0, VALUES[0])])
        assert flume.fetch("flume", 0, VICTIM) == (UNKNOWN, [])
        assert flume.fetch("flume", 0, 2) == (0, [(2, VALUES[2])])


def test_luxun_answers_an_internal_error_by_index(served: ServedBroker, generated: tuple[Any, Any]) -> None:
    with Luxun(served.doors["luxun"], generated) as luxun:
        refused = luxun.consume("luxun", index=VICTIM)
        assert refused.result.errorCode == luxun.types.ErrorCode.INTERNAL_ERROR
        assert "the next offset to read is 2" in refused.result.errorMessage
        assert luxun.consume("luxun", index=2).itemList == [VALUES[2]]


def test_a_fanout_id_is_told_once_and_goes_on_behind_the_damage(
    served: ServedBroker, generated: tuple[Any, Any]
) -> None:
    with Luxun(served.doors["luxun"], generated) as luxun:
        assert luxun.consume("fanout", fanout="f").itemList == [VALUES[0]]
        assert "are damaged" in luxun.consume("fanout", fanout="f").result.errorMessage
        assert luxun.consume("fanout", fanout="f").itemList == [VALUES[2]]


def check_letter(served: ServedBroker, topic: str) -> None:
    """Waits for the dead letter of a topic."""
    with millstream.sync.connect(served.address) as ms:
        for letter in ms.read("__dlq__"):
            headers = dict(letter.headers)
            if headers["millstream-dead-topic"] == topic.encode():
                break
    assert letter.value is None and headers["millstream-dead-offset"] == b"1"
    assert headers["millstream-dead-unreadable"] == b"2"
    assert b"offsets 1 to 1 are damaged (checksum mismatch)" in (headers["millstream-dead-reason"] or b"")


def work(served: ServedBroker, topic: str) -> None:
    """A FlowMQ worker does what can be read of a topic."""
    with FlowmqClient(served.doors["flowmq"]) as flowmq:
        flowmq.subscribe(topic, "workers")
        messages = flowmq.take(5)
        assert sorted(message.payload for message in messages) == sorted([VALUES[0], VALUES[2], *VALUES])
        for message in messages:
            flowmq.ack(message)
        assert flowmq.has_nothing()
    check_letter(served, topic)


def test_flowmq_delivers_the_others_and_the_damaged_one_is_a_dead_letter(served: ServedBroker) -> None:
    work(served, "flowmq")


def test_a_share_fetch_is_told_once_and_the_group_goes_on_behind_the_damage(served: ServedBroker) -> None:
    topic = share_frames.topic_id(served.address, "shared")
    Cli(served.address)("queue", "create", "sharers", "--from", "start")
    with share_frames.Bare(served.address, "sharers", "shared") as member:
        got: list[bytes | None] = []
        codes, epoch = [], 0
        while len(got) < 2:
            answer = member.fetch(epoch, {(topic, 0): []} if not epoch else None, wait_ms=5000)
            got += share_frames.records(answer)
            codes += [int(one.error_code) for each in answer.responses for one in each.partitions]
            epoch += 1
    assert got == [VALUES[0], VALUES[2]]
    assert codes.count(Code.CORRUPT_MESSAGE) == 1
    check_letter(served, "shared")


@pytest.mark.parametrize("is_remote", [True, False], ids=["connected", "embedded"])
def test_the_python_api_raises_at_the_offset_and_reads_on_behind_it(served: ServedBroker, is_remote: bool) -> None:
    if not is_remote and served.store.startswith("file:"):
        pytest.skip("the directory is the broker's")
    opened = millstream.sync.connect(served.address) if is_remote else millstream.sync.open(served.store)
    with opened as ms:
        reading = iter(ms.read("read", follow=False))
        assert next(reading).value == VALUES[0]
        with pytest.raises(RequestError) as refused:
            next(reading)
        assert refused.value.code is Code.CORRUPT_MESSAGE
        assert [record.value for record in ms.read("read", offset=2, follow=False)] == [VALUES[2]]


def test_a_time_that_only_the_damaged_batch_could_tell_is_refused(served: ServedBroker) -> None:
    consumer = Consumer({"bootstrap.servers": served.address, "group.id": "g"})
    [found] = consumer.offsets_for_times([TopicPartition("timed", 0, FIRST_MS + 2)], timeout=SECONDS)
    assert found.offset == 2
    with pytest.raises(KafkaException) as refused:
        consumer.offsets_for_times([TopicPartition("timed", 0, FIRST_MS + 1)], timeout=SECONDS)
    assert refused.value.args[0].code() == KafkaError.INVALID_MSG
    consumer.close()


def test_damage_is_named_once_counted_and_shown(served: ServedBroker) -> None:
    for _ in range(3):
        consume(served, "streamed", 2, 0)
    lines = [line for line in served.errors().splitlines() if "streamed-0: offsets 1 to 1 are damaged" in line]
    assert len(lines) == 1 and "ERROR" in lines[0]
    metrics = page(served, "/metrics")
    assert 'millstream_damaged_ranges{partition="0",topic="streamed"} 1.0' in metrics
    assert "millstream_damage_found_total" in metrics
    health = page(served, "/healthz")
    assert health["status"] == "damaged"
    assert any("streamed-0: offsets 1 to 1 are damaged (checksum mismatch" in reason for reason in health["reasons"])
    shown = Cli(served.address)("topic", "describe", "streamed")
    assert "checksum mismatch" in shown
    [place] = Cli(served.address).json("topic", "describe", "streamed")["damage"]
    assert (place["partition"], place["first"], place["end"]) == (0, 1, 2)


def test_a_redrive_sends_back_no_letter_without_a_record(served: ServedBroker) -> None:
    work(served, "redriven")
    report = Cli(served.address).json("queue", "redrive", "--topic", "redriven")
    assert report["skipped"]["of damaged records"] == 1
    with Flume(served.doors["flume"]) as flume:
        assert flume.fetch("redriven", 0, 3) == (0, [])
