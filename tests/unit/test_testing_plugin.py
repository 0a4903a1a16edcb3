"""The pytest plugin, used as its users use it: a test of a Kafka application, without Docker."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from millstream.core.errors import Code, StartupError
from millstream.doors.kafka.door import KafkaDoor
from millstream.testing.broker_thread import BrokerThread

QUIET = {"log_level": 0, "reconnect.backoff.ms": 20, "reconnect.backoff.max.ms": 100}


def produce(broker: BrokerThread, topic: str, *values: bytes, **settings: Any) -> list[KafkaError | None]:
    errors: list[KafkaError | None] = []
    producer = Producer({"bootstrap.servers": broker.bootstrap, "linger.ms": 0, **QUIET, **settings})
    for value in values:
        producer.produce(topic, value, on_delivery=lambda error, message: errors.append(error))
    producer.flush(20)
    return errors


def consumer(broker: BrokerThread, group: str = "g", **settings: Any) -> Consumer:
    return Consumer(
        {
            "bootstrap.servers": broker.bootstrap,
            "group.id": group,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            **QUIET,
            **settings,
        }
    )


def values(reader: Consumer, topic: str, count: int) -> list[bytes | None]:
    reader.assign([TopicPartition(topic, 0, 0)])
    found: list[bytes | None] = []
    deadline = time.monotonic() + 20
    while len(found) < count and time.monotonic() < deadline:
        found += [message.value() for message in reader.consume(count, 0.05) if message.error() is None]
    return found


def test_a_real_client_talks_to_it(millstream: BrokerThread) -> None:
    assert produce(millstream, "orders", b"one", b"two") == [None, None]
    reader = consumer(millstream)
    assert values(reader, "orders", 2) == [b"one", b"two"]
    reader.close()


def test_it_is_up_in_a_fifth_of_a_second() -> None:
    """By the CPU time that it takes, and it waits for nothing: other processes may take more of the clock."""
    with BrokerThread():
        pass  # what is imported once per session
    times, cpu_times = [], []
    for _ in range(10):
        start, cpu_start = time.perf_counter(), time.process_time()
        with BrokerThread():
            times.append(time.perf_counter() - start)
            cpu_times.append(time.process_time() - cpu_start)
    assert min(cpu_times) < 0.2 and min(times) < 0.2 + 4 * min(cpu_times)


def test_a_broker_that_could_not_start_lets_go_of_its_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise StartupError("cannot listen")

    broker = BrokerThread(f"file:{tmp_path}")
    with monkeypatch.context() as patch:
        patch.setattr(KafkaDoor, "start", refuse)
        with pytest.raises(StartupError, match="cannot listen"):
            broker.start()
    assert not broker.is_running
    with broker:
        assert produce(broker, "orders", b"x") == [None]


def test_what_was_acknowledged_outlives_a_kill(millstream: BrokerThread) -> None:
    assert produce(millstream, "orders", b"one") == [None]
    address = millstream.bootstrap
    millstream.kill()
    assert not millstream.is_running
    [error] = produce(millstream, "orders", b"lost", **{"message.timeout.ms": 200})
    assert error is not None
    millstream.restart()
    assert millstream.bootstrap == address
    assert produce(millstream, "orders", b"two") == [None]
    reader = consumer(millstream)
    assert values(reader, "orders", 2) == [b"one", b"two"]
    reader.close()


def test_a_client_survives_a_restart(millstream: BrokerThread) -> None:
    errors: list[KafkaError | None] = []
    producer = Producer({"bootstrap.servers": millstream.bootstrap, "enable.idempotence": True, **QUIET})
    for number in range(60):
        producer.produce("orders", b"%d" % number, on_delivery=lambda error, message: errors.append(error))
        if number == 20:
            millstream.kill()
        if number == 40:
            millstream.restart()
        producer.poll(0.005)
    assert producer.flush(20) == 0
    assert len(errors) == 60 and all(error is None for error in errors)
    reader = consumer(millstream)
    assert values(reader, "orders", 60) == [b"%d" % number for number in range(60)]
    reader.close()


def test_the_next_requests_fail_as_asked_and_the_one_after_does_not(millstream: BrokerThread) -> None:
    millstream.fail_next("Produce", "MESSAGE_TOO_LARGE")
    [error] = produce(millstream, "orders", b"refused")
    assert error is not None and error.code() == KafkaError.MSG_SIZE_TOO_LARGE
    assert produce(millstream, "orders", b"taken") == [None]
    millstream.fail_next("produce", Code.NOT_LEADER_OR_FOLLOWER, times=2)
    assert produce(millstream, "orders", b"retried", **{"retry.backoff.ms": 20}) == [None]
    assert millstream.faults.left == 0
    reader = consumer(millstream)
    assert values(reader, "orders", 2) == [b"taken", b"retried"]
    reader.close()


@pytest.mark.parametrize(("api", "code"), [("offset_commit", "INVALID_GROUP_ID"), ("OffsetCommit", "INVALID_REQUEST")])
def test_errors_reach_the_call_that_they_are_for(millstream: BrokerThread, api: str, code: str) -> None:
    produce(millstream, "orders", b"x")
    reader = consumer(millstream)
    millstream.fail_next(api, code)
    with pytest.raises(KafkaException) as raised:
        reader.commit(offsets=[TopicPartition("orders", 0, 1)], asynchronous=False)
    assert raised.value.args[0].code() == Code[code]
    reader.close()


def test_a_fault_that_cannot_be_is_refused(millstream: BrokerThread) -> None:
    with pytest.raises(ValueError, match="there is no API 'Prodcue'; there are"):
        millstream.fail_next("Prodcue", "MESSAGE_TOO_LARGE")
    with pytest.raises(ValueError, match="clients would find no broker"):
        millstream.fail_next("Metadata", "LEADER_NOT_AVAILABLE")
    with pytest.raises(ValueError, match="not the code of an error"):
        millstream.fail_next("Produce", 0)


def test_its_clock_can_be_moved(millstream: BrokerThread) -> None:
    produce(millstream, "orders", b"x")
    before = millstream.clock.now_ms()
    timeouts: dict[str, Any] = {"session.timeout.ms": 60_000, "heartbeat.interval.ms": 59_000}
    reader = consumer(millstream, **timeouts)
    reader.subscribe(["orders"])
    deadline = time.monotonic() + 20
    while (message := reader.poll(0.1)) is None and time.monotonic() < deadline:
        pass
    assert message is not None
    millstream.clock.advance(61)
    assert millstream.clock.now_ms() - before >= 61_000
    with pytest.raises(KafkaException) as raised:  # its session has ended, without a minute of waiting
        reader.commit(message=message, asynchronous=False)
    assert raised.value.args[0].code() in (Code.UNKNOWN_MEMBER_ID, Code.ILLEGAL_GENERATION)
    reader.close()


class TestSettings:
    @pytest.fixture
    def millstream_settings(self) -> dict[str, Any]:
        return {"default_partitions": 3}

    def test_a_project_configures_its_broker(self, millstream: BrokerThread) -> None:
        produce(millstream, "orders", b"x")
        reader = consumer(millstream)
        assert len(reader.list_topics("orders", 10).topics["orders"].partitions) == 3
        reader.close()


def test_the_plugin_costs_a_project_that_does_not_use_it_nothing() -> None:
    code = (
        "import sys, millstream.testing.plugin\n"
        "heavy = {'uvloop', 'confluent_kafka', 'kio', 'millstream.broker', 'millstream.doors', 'crc32c', 'cramjam'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
