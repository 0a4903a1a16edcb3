"""Histograms of latency, per API: what is counted, and from when, with a clock that the test moves."""

from __future__ import annotations

import re
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from millstream.core.disk import Disk, OpenFile
from millstream.doors.kafka import api_01_fetch, protocol
from millstream.server import Server
from tests.compat import raw
from tests.compat.clients import wait_for
from tests.compat.raw import Raw
from tests.in_thread import BrokerInThread

API_VERSIONS = raw.request(18, 0, {})


class Now:
    """What the door takes for the time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        monkeypatch.setattr(protocol, "monotonic", lambda: self.seconds)
        monkeypatch.setattr(api_01_fetch, "monotonic", lambda: self.seconds)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Now:
    return Now(monkeypatch)


@pytest.fixture(params=["os", "always"])
def broker(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[BrokerInThread]:
    with BrokerInThread(tmp_path, http="127.0.0.1:0", flush=request.param) as started:
        raw.create_topic(started.address("kafka"), "orders")
        yield started


def seen(broker: BrokerInThread, name: str) -> tuple[int, float]:
    """How many the histogram on the page counts, and the sum of their seconds."""
    with urllib.request.urlopen(f"http://{broker.address('http')}/metrics", timeout=20) as answer:
        text = answer.read().decode()
    figures = dict(re.findall(rf"^millstream_{name}_seconds_(count|sum) (\S+)$", text, re.MULTILINE))
    return int(float(figures["count"])), float(figures["sum"])


def test_every_produce_request_is_counted(broker: BrokerInThread) -> None:
    one = raw.produce("orders", raw.batch(b"one"))
    several = raw.produce("orders", raw.batch(*[b"x" * 1000] * 10))
    with Raw(broker.address("kafka")) as client:
        for expected, request in enumerate([one, one, several], 1):  # of a shape that is new, one that is known, larger
            assert client.ask(request).responses[0].partition_responses[0].error_code == 0
            assert seen(broker, "produce")[0] == expected
        client.send(one * 5)
        for _ in range(5):
            assert client.answer(0, 9).responses[0].partition_responses[0].error_code == 0
        count, seconds = seen(broker, "produce")
        assert count == 8 and 0 < seconds < 60
        client.send(raw.produce("orders", raw.batch(b"no answer"), acks=0))
        assert client.ask(API_VERSIONS).error_code == 0
    assert seen(broker, "produce")[0] == 8, "no answer, no latency"


@pytest.mark.parametrize("broker", ["always"], indirect=True)
@pytest.mark.parametrize("count", [1, 3])
def test_a_produce_request_counts_until_its_records_are_synced(
    broker: BrokerInThread, now: Now, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    may_go_on, sync = threading.Event(), Disk.sync

    def held(disk: Disk, file: OpenFile) -> None:
        assert may_go_on.wait(60)
        sync(disk, file)

    with Raw(broker.address("kafka")) as client:
        client.ask(raw.produce("orders", raw.batch(b"known from now on")))
        monkeypatch.setattr(Disk, "sync", held)
        client.send(raw.produce("orders", raw.batch(b"one")) * count)
        wait_for(lambda: broker.ask(in_line), "requests that wait")
        now.seconds += 2
        may_go_on.set()
        for _ in range(count):
            assert client.answer(0, 9).responses[0].partition_responses[0].error_code == 0
    assert seen(broker, "produce") == (1 + count, 2 * count)


def in_line(server: Server) -> bool:
    assert server._kafka is not None
    protocols: list[Any] = [each.protocol for each in server._kafka._connections]
    return any(each._in_line for each in protocols)


def log_of(topic: str) -> Callable[[Server], int]:
    """How many readers wait for records of the topic."""

    def count(server: Server) -> int:
        found = server.broker.topics.find(topic)
        assert found is not None
        log: Any = found.partitions[0].log
        return len(log._wakers or ())

    return count


def test_a_fetch_counts_without_its_wait_for_records(broker: BrokerInThread, now: Now) -> None:
    with Raw(broker.address("kafka")) as consumer, Raw(broker.address("kafka")) as producer:
        producer.ask(raw.produce("orders", raw.batch(b"one")))
        assert consumer.ask(raw.fetch("orders", 0)).responses[0].partitions[0].records
        assert seen(broker, "fetch") == (1, 0)
        consumer.send(raw.fetch("orders", 1, wait_ms=60_000))
        wait_for(lambda: broker.ask(log_of("orders")) == 1, "a fetch that waits")
        assert seen(broker, "fetch") == (1, 0)
        now.seconds += 5
        producer.ask(raw.produce("orders", raw.batch(b"two")))
        assert consumer.answer(1, 11).responses[0].partitions[0].records
        assert seen(broker, "fetch") == (2, 0)


def test_a_commit_counts_until_it_is_durable(broker: BrokerInThread) -> None:
    partition = {"partition_index": 0, "committed_offset": 0, "committed_leader_epoch": -1, "committed_metadata": ""}
    fields = {
        "group_id": "readers",
        "generation_id_or_member_epoch": -1,
        "member_id": "",
        "group_instance_id": None,
        "topics": [{"name": "orders", "partitions": [partition]}],
    }
    with Raw(broker.address("kafka")) as client:
        for expected in (1, 2):
            assert client.ask(raw.request(8, 8, fields)).topics[0].partitions[0].error_code == 0
            count, seconds = seen(broker, "commit")
            assert count == expected and 0 < seconds < 60
        assert seen(broker, "produce")[0] == seen(broker, "fetch")[0] == 0
