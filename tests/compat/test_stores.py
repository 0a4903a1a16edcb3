"""A representative part of the table of clients on the stores other than `file:`, which the others here use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient, NewPartitions

from tests import stores
from tests.compat.client_confluent import Confluent
from tests.compat.clients import FROM_START, Sent, Start, by_partition, settle, shared_evenly, wait_for
from tests.serving import ServedBroker

Unique = Callable[[str], str]
RECORDS = 200


@pytest.fixture(scope="module", params=[*stores.OTHERS, "pair", "etcd"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedBroker]:
    directory = tmp_path_factory.mktemp("store")
    flags, kind = [], request.param
    if kind in ("pair", "etcd"):
        meta = f"sqlite:{directory}.db" if kind == "pair" else request.getfixturevalue("etcd").new_prefix()
        flags, kind = ["--meta", meta], "file"
    with ServedBroker(directory, *flags, store=stores.store_url(kind, directory, request)) as broker:
        yield broker
        assert "Traceback" not in broker.errors()


def numbered(first: int = 0) -> list[Sent]:
    return [Sent(b"%d" % number, partition=number % 3) for number in range(first, first + RECORDS)]


def test_records_come_back_in_order_from_the_start_an_offset_and_a_time(served: ServedBroker, unique: Unique) -> None:
    client, topic = Confluent(served.address), unique("plain")
    client.create_topic(topic, 3)
    client.produce(topic, numbered(), idempotent=True, codec="lz4")
    with client.reader(topic, [0, 1, 2], FROM_START) as reader:
        found = by_partition(reader.read(RECORDS))
    for partition, records in found.items():
        assert [record.value for record in records] == [b"%d" % n for n in range(RECORDS) if n % 3 == partition]
        assert [record.offset for record in records] == list(range(len(records)))
    with client.reader(topic, [1], Start(offset=40)) as reader:
        assert reader.read(1)[0].offset == 40
    with client.reader(topic, [1], Start(timestamp_ms=found[1][30].timestamp_ms)) as reader:
        assert reader.read(1)[0].timestamp_ms == found[1][30].timestamp_ms


def test_members_share_a_topic_commit_and_go_on_there(served: ServedBroker, unique: Unique) -> None:
    client, topic, group = Confluent(served.address), unique("shared"), unique("members")
    client.create_topic(topic, 3)
    with client.member(group, topic) as one, client.member(group, topic) as two:
        settle([one, two], shared_evenly(3))
        client.produce(topic, numbered())  # not before: what is seen and not committed when shares move comes twice
        while len(one.seen) + len(two.seen) < RECORDS:
            one.poll(0.05)
            two.poll(0.05)
        one.commit()
        two.commit()
    client.produce(topic, numbered(first=RECORDS))
    with client.member(group, topic) as again:
        again.read(RECORDS)
        assert sorted(int(record.value or b"") for record in again.seen) == list(range(RECORDS, 2 * RECORDS))


def test_topics_are_made_grown_configured_and_deleted(served: ServedBroker, unique: Unique) -> None:
    client, topic = Confluent(served.address), unique("managed")
    admin = AdminClient({"bootstrap.servers": served.address})
    client.create_topic(topic, 1)
    admin.create_partitions([NewPartitions(topic, 3)])[topic].result(10)
    client.produce(topic, numbered())
    assert len(admin.list_topics(topic, timeout=10).topics[topic].partitions) == 3
    admin.delete_topics([topic])[topic].result(10)
    assert topic not in admin.list_topics(timeout=10).topics
    client.create_topic(topic, 1)
    with client.reader(topic, [0], FROM_START) as reader:
        client.produce(topic, [Sent(b"new", partition=0)])
        assert [record.value for record in reader.read(1)] == [b"new"]


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_what_goes_in_through_one_broker_comes_out_through_another(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = stores.store_url(kind, tmp_path, request)
    with (
        ServedBroker(tmp_path / "1", "--node-id", "1", store=url) as one,
        ServedBroker(tmp_path / "2", "--node-id", "2", store=url) as two,
    ):
        here, there = Confluent(one.address), Confluent(two.address)
        here.create_topic("orders", 3)
        wait_for(lambda: "orders" in AdminClient({"bootstrap.servers": two.address}).list_topics().topics, "the topic")
        with there.reader("orders", [0, 1, 2], FROM_START) as reader, there.member("readers", "orders") as member:
            here.produce("orders", numbered(), idempotent=True)
            there.produce("orders", numbered(first=RECORDS), idempotent=True)
            for found in (reader.read(2 * RECORDS), member.read(2 * RECORDS)):
                assert sorted(int(record.value or b"") for record in found) == list(range(2 * RECORDS))
                for records in by_partition(found).values():
                    assert [record.offset for record in records] == list(range(len(records)))
            member.commit()
        for client in (here, there):
            with client.member("readers", "orders") as again:
                settle([again], shared_evenly(3))
                assert again.poll(0.3) == []
        assert "Traceback" not in one.errors() + two.errors()
