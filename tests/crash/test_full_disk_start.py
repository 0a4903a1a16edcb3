"""A broker over a file system that is really full: it starts, says so, and is emptied through its own commands."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaException, TopicPartition

from tests.compat import raw
from tests.serving import MILLSTREAM, ServedBroker

DISK_BYTES = 8 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(place)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this machine does not allow mounting a small file system")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(disk: Path) -> None:
    with open(disk / "another-program", "ab", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


def status(broker: ServedBroker, page: str) -> str:
    try:
        with urllib.request.urlopen(f"http://{broker.http}{page}", timeout=10) as answer:
            return str(json.load(answer)["status"])
    except urllib.error.HTTPError as error:
        return str(json.load(error)["status"])


def produce(broker: ServedBroker, topic: str, size: int) -> int:
    with raw.Raw(broker.address) as connection:
        return int(
            connection.ask(raw.produce(topic, raw.batch(bytes(size)))).responses[0].partition_responses[0].error_code
        )


@pytest.mark.parametrize("way", ["delete", "trim"])
@pytest.mark.parametrize("end", ["killed", "stopped"])
def test_a_broker_starts_on_a_full_disk_and_is_emptied_through_its_commands(disk: Path, way: str, end: str) -> None:
    broker = ServedBroker(disk / "data")
    with broker:
        raw.create_topic(broker.address, "old", 1, **{"segment.bytes": "1048576"})
        raw.create_topic(broker.address, "new", 1)
        assert [produce(broker, "old", 900_000) for _ in range(4)] == [0] * 4
        assert produce(broker, "new", 100) == 0
        fill(disk)
        assert produce(broker, "old", 900_000) == 56, "KAFKA_STORAGE_ERROR"
        assert (status(broker, "/healthz"), status(broker, "/readyz")) == ("degraded", "read-only")
        if end == "killed":
            broker.kill()
        else:
            broker.stop()
        fill(disk)  # what the end has freed
        broker.start()
        assert (status(broker, "/healthz"), status(broker, "/readyz")) == ("degraded", "read-only")
        command = ["topic", "delete", "old"] if way == "delete" else ["topic", "trim", "old", "--before", "end"]
        done = subprocess.run(
            [MILLSTREAM, *command, "--broker", broker.address], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        assert produce(broker, "new", 900_000) == 0, "without a restart"
        assert status(broker, "/readyz") == "ready"


def test_committed_offsets_leave_the_reserve_to_a_deletion(disk: Path) -> None:
    reserve = disk / "data" / "reserve"
    with ServedBroker(disk / "data") as broker:
        raw.create_topic(broker.address, "old", 1)
        assert produce(broker, "old", 900_000) == 0
        fill(disk)
        consumer = Consumer({"bootstrap.servers": broker.address, "group.id": "g"})
        place = TopicPartition("old", 0, 1, metadata="m" * 4000)
        with pytest.raises(KafkaException):
            for _ in range(2000):  # until the WAL has no room left
                consumer.commit(offsets=[place], asynchronous=False)
        consumer.close()
        assert reserve.stat().st_blocks
        done = subprocess.run(
            [MILLSTREAM, "topic", "delete", "old", "--broker", broker.address], timeout=60, check=False
        )
        assert done.returncode == 0
