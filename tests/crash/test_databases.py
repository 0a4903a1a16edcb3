"""Brokers over databases, and what dies under load: the broker, PostgreSQL, one broker of two.

Whatever dies, every record that an idempotent producer was told of is there, once, at its offset, in order.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
from confluent_kafka import Consumer, KafkaError, TopicPartition
from confluent_kafka.admin import AdminClient, ClusterMetadata

from tests import confluent
from tests.compat import raw
from tests.crash.load import PARTITIONS, TOPIC, Load, consume_all, count, create_topic
from tests.postgres import KILLABLE, PrivatePostgres
from tests.serving import ServedBroker

ROUNDS = [pytest.param(2), pytest.param(20, marks=pytest.mark.slow)]
LEASE_MS = "4000"
"""Short, so that a takeover is soon; long enough for brokers that share two cores with all the load to renew it."""


@pytest.fixture(scope="module")
def server() -> Iterator[PrivatePostgres]:
    """Has written what it acknowledged when it is killed."""
    with PrivatePostgres(**KILLABLE) as server:
        yield server


@pytest.fixture
def killable(server: PrivatePostgres) -> PrivatePostgres:
    """For this test alone as long as it runs, whatever the one before left of it."""
    if not server.is_running:
        server.restart()
    return server


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
@pytest.mark.timeout(400)
def test_kill_9_of_the_broker_loses_nothing_and_repeats_nothing(
    kind: str, rounds: int, tmp_path: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    random = Random(rounds)
    url = f"sqlite:{tmp_path}/store.db"
    if kind == "postgresql":
        url = request.getfixturevalue("killable").new_database()
    with ServedBroker(tmp_path, store=url) as broker:
        create_topic(broker.address)
        load = Load(broker.address)
        load.start()
        try:
            for _ in range(rounds):
                load.wait_for_more(50)
                time.sleep(random.uniform(0, 0.2))  # the random moment: there is no event for it
                broker.kill()
                broker.start()
            load.wait_for_more(50)
        finally:
            load.stop()
        found = consume_all(broker.address)
        assert "Traceback" not in broker.errors()
    with capsys.disabled():
        print(count(load, found, f"kill -9 of the broker over {kind}: {rounds} rounds"))


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.timeout(400)
def test_kill_9_of_postgresql_loses_nothing_and_repeats_nothing(
    rounds: int, tmp_path: Path, killable: PrivatePostgres, capsys: pytest.CaptureFixture[str]
) -> None:
    random = Random(rounds)
    with ServedBroker(tmp_path, store=killable.new_database()) as broker:
        create_topic(broker.address)
        load = Load(broker.address)
        load.start()
        try:
            for _ in range(rounds):
                load.wait_for_more(50)
                time.sleep(random.uniform(0, 0.2))
                killable.kill()
                killable.restart()
            load.wait_for_more(50)
        finally:
            load.stop()
        found = consume_all(broker.address)
        errors = broker.errors()
    assert "Traceback" not in errors and killable.password not in errors
    with capsys.disabled():
        print(count(load, found, f"kill -9 of PostgreSQL: {rounds} rounds"))


class Members:
    """Consumers of one group, each with a thread of its own, that commit what they have processed."""

    def __init__(self, addresses: list[str]) -> None:
        self.seen: dict[tuple[int, int], bytes] = {}
        self.moved = threading.Condition()
        self._stopping = False
        self._threads = [threading.Thread(target=self._consume, args=(address,)) for address in addresses]
        for thread in self._threads:
            thread.start()

    def _consume(self, address: str) -> None:
        consumer = Consumer(
            {
                "bootstrap.servers": address,
                "group.id": "members",
                "auto.offset.reset": "earliest",
                "session.timeout.ms": 6000,
                "heartbeat.interval.ms": 500,
                "auto.commit.interval.ms": 200,
                "reconnect.backoff.max.ms": 200,
                "log_level": 0,
            }
        )
        consumer.subscribe([TOPIC])
        while not self._stopping:
            for message in consumer.consume(500, timeout=0.2):
                if message.error() is None:
                    with self.moved:
                        place, value = confluent.place(message), confluent.value(message)
                        assert self.seen.setdefault(place, value) == value, "an offset has one value for ever"
                        self.moved.notify_all()
        consumer.close()

    def wait_for(self, count: int, seconds: float = 60) -> None:
        with self.moved:
            assert self.moved.wait_for(lambda: len(self.seen) >= count, seconds), f"{len(self.seen)} of {count} seen"

    def stop(self) -> None:
        self._stopping = True
        for thread in self._threads:
            thread.join()


def coordinator(address: str, group: str) -> int:
    admin = AdminClient({"bootstrap.servers": address})
    described = admin.describe_consumer_groups([group])[group].result(10)
    return int(described.coordinator.id)


def committed_at_the_end(address: str, seconds: float = 60) -> list[int]:
    """What the members have committed of each partition, once that is all there is."""
    deadline = time.monotonic() + seconds
    with contextlib.closing(Consumer({"bootstrap.servers": address, "group.id": "members"})) as asking:
        parts = [TopicPartition(TOPIC, number) for number in range(PARTITIONS)]
        while True:
            places = [each.offset for each in asking.committed(parts, timeout=10)]
            ends = [asking.get_watermark_offsets(part, timeout=10)[1] for part in parts]
            if places == ends:
                return places
            assert time.monotonic() < deadline, f"committed {places} of {ends}"
            time.sleep(0.1)


def listing(address: str) -> ClusterMetadata:
    """What a broker says of the cluster, when it has heard of the topic that another one made."""
    admin, deadline = AdminClient({"bootstrap.servers": address}), time.monotonic() + 20
    while TOPIC not in (listed := admin.list_topics(timeout=10)).topics:
        assert time.monotonic() < deadline, "the topic does not get about"
        time.sleep(0.05)
    return listed


@pytest.mark.timeout(200)
def test_two_brokers_over_one_postgresql_of_which_one_is_killed(
    tmp_path: Path, killable: PrivatePostgres, capsys: pytest.CaptureFixture[str]
) -> None:
    url = killable.new_database()
    config = tmp_path / "brokers.toml"
    config.write_text(f"lease_ms = {LEASE_MS}\n")
    flags = "--config", str(config)
    with (
        ServedBroker(tmp_path / "1", *flags, "--node-id", "1", store=url) as one,
        ServedBroker(tmp_path / "2", *flags, "--node-id", "2", store=url) as two,
    ):
        both = f"{one.address},{two.address}"
        create_topic(one.address)
        listed = listing(two.address)
        assert {f"{node.host}:{node.port}" for node in listed.brokers.values()} == {one.address, two.address}
        assert {part.leader for part in listed.topics[TOPIC].partitions.values()} == {1, 2}
        loads = [Load(both, first=0), Load(both, first=1_000_000_000)]
        members = Members([one.address, two.address])
        for load in loads:
            load.start()
        try:
            for load in loads:
                load.wait_for_more(2000)
            members.wait_for(1000)
            victim, survivor = (one, two) if coordinator(both, "members") == 1 else (two, one)
            victim.kill()
            for load in loads:
                load.wait_for_more(2000)
            for load in loads:
                load.stop()
            total = sum(load.attempted for load in loads)
            members.wait_for(total)
            # Who lost its partitions with the coordinator may still be at its second reading of what was not committed.
            places = committed_at_the_end(survivor.address)
        finally:
            for load in loads:
                load.stop()
            members.stop()
        found = consume_all(survivor.address)
        assert coordinator(survivor.address, "members") == (2 if victim is one else 1)
        assert "Traceback" not in survivor.errors()
    everything = {(partition, offset): value for partition, records in found.items() for offset, value in records}
    for load in loads:
        assert load.errors == [] and load.acknowledged_twice == []
        assert all(everything[place] == value for place, value in load.acknowledged.items())
    assert len(everything) == len(set(everything.values())) == total == sum(map(len, found.values()))
    assert members.seen == everything
    for number, records in found.items():
        assert [offset for offset, _ in records] == list(range(len(records)))
        for first in (0, 1_000_000_000):
            mine = [int(value.split(b":")[0]) for _, value in records]
            mine = [each for each in mine if first <= each < first + 1_000_000_000]
            assert mine == sorted(mine), "the order of each producer is kept"
        assert places[number] == len(records)
    with capsys.disabled():
        print(f"\ntwo brokers, one PostgreSQL: {total:,} records, lost 0, duplicated 0")


def test_requests_get_a_retriable_error_while_the_database_is_away(tmp_path: Path, killable: PrivatePostgres) -> None:
    with ServedBroker(tmp_path, store=killable.new_database()) as broker:
        create_topic(broker.address)
        with raw.Raw(broker.address) as wire:
            wire.ask(raw.produce(TOPIC, raw.batch(b"before")))
            killable.kill()
            produced = wire.ask(raw.produce(TOPIC, raw.batch(b"meanwhile")))
            assert produced.responses[0].partition_responses[0].error_code == KafkaError.KAFKA_STORAGE_ERROR
            fetched = wire.ask(raw.fetch(TOPIC, 0))
            assert fetched.responses[0].partitions[0].error_code == KafkaError.KAFKA_STORAGE_ERROR
            assert commit(wire, 1) == KafkaError.COORDINATOR_NOT_AVAILABLE
            given = wire.ask(raw.request(22, 2, {"transactional_id": None, "transaction_timeout": 1000}))
            assert given.error_code == KafkaError.COORDINATOR_NOT_AVAILABLE
            killable.restart()
            deadline = time.monotonic() + 20
            while wire.ask(raw.produce(TOPIC, raw.batch(b"after"))).responses[0].partition_responses[0].error_code:
                assert time.monotonic() < deadline, "the broker did not find its database again"
                time.sleep(0.05)
            while commit(wire, 1):
                assert time.monotonic() < deadline, "the broker is no coordinator again"
                time.sleep(0.05)
        while "connected to postgresql://" not in broker.errors():
            assert time.monotonic() < deadline, "the broker does not listen again"
            time.sleep(0.05)
        errors = broker.errors()
    assert "Traceback" not in errors and "lost; reconnecting: " in errors


def commit(wire: raw.Raw, offset: int) -> int:
    """The code that is answered."""
    wire.send(commit_request(offset))
    return commit_answer(wire)


def commit_answer(wire: raw.Raw) -> int:
    return int(wire.answer(8, 7).topics[0].partitions[0].error_code)


def commit_request(offset: int) -> bytes:
    """Of a consumer without a group protocol, for partition 0."""
    partition = {
        "partition_index": 0,
        "committed_offset": offset,
        "committed_leader_epoch": -1,
        "committed_metadata": "",
    }
    fields = {
        "group_id": "readers",
        "generation_id_or_member_epoch": -1,
        "member_id": "",
        "group_instance_id": None,
        "topics": [{"name": TOPIC, "partitions": [partition]}],
    }
    return raw.request(8, 7, fields)


def is_coordinator(wire: raw.Raw, other: raw.Raw) -> bool:
    """Of the two, as far as commits show."""
    return commit(wire, 5) == 0 and commit(other, 6) == KafkaError.NOT_COORDINATOR


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


@pytest.mark.timeout(200)
def test_a_coordinator_that_slept_past_its_lease_commits_nothing_more(
    tmp_path: Path, killable: PrivatePostgres
) -> None:
    url = killable.new_database()
    config = tmp_path / "brokers.toml"
    config.write_text(f"lease_ms = {LEASE_MS}\n")
    flags = "--config", str(config)
    ask = raw.request(10, 3, {"key": "readers", "key_type": 0})
    with (
        ServedBroker(tmp_path / "1", *flags, "--node-id", "1", store=url) as one,
        ServedBroker(tmp_path / "2", *flags, "--node-id", "2", store=url) as two,
    ):
        create_topic(one.address)
        with raw.Raw(one.address) as to_one, raw.Raw(two.address) as to_two:
            # The first is the coordinator: it was alone when it came. Unless it was held up for longer than its lease.
            roles = [(one, to_one, to_two), (two, to_two, to_one)]
            until(lambda: any(is_coordinator(*wires) for _, *wires in roles), "no broker coordinates the group")
            sleeper, asleep, awake = roles[to_one.ask(ask).node_id != 1]
            os.kill(sleeper.pid, signal.SIGSTOP)
            try:
                until(lambda: commit(awake, 7) == 0, "no broker took over")
                asleep.send(commit_request(4))  # it finds this when it wakes up, before it can find out anything
            finally:
                os.kill(sleeper.pid, signal.SIGCONT)
            assert commit_answer(asleep) in (KafkaError.NOT_COORDINATOR, KafkaError.COORDINATOR_NOT_AVAILABLE)
            until(lambda: asleep.ask(ask).node_id == awake.ask(ask).node_id > 0, "they do not agree who took over")
        consumer = Consumer({"bootstrap.servers": one.address, "group.id": "readers"})
        [place] = consumer.committed([TopicPartition(TOPIC, 0)], timeout=10)
        consumer.close()
        assert place.offset == 7
