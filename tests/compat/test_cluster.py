"""Our own client's side of the protocol, against the broker and against librdkafka's mock cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from confluent_kafka import Producer

from millstream.client.cluster import ClusterError, KafkaCluster
from millstream.client.link import Link
from millstream.core.errors import Code
from millstream.records import codec
from millstream.wire.kafka import requests
from tests.serving import ServedBroker

NOW = 1_700_000_000_000


@pytest.fixture
def cluster(broker: ServedBroker) -> Iterator[KafkaCluster]:
    made = KafkaCluster(broker.address, timeout_seconds=10)
    yield made
    made.close()


def batch(count: int, **producer: Any) -> bytearray:
    return codec.encode([(0, NOW + number, b"k", b"v%d" % number, ()) for number in range(count)], **producer)


def test_what_is_produced_is_fetched_from_any_offset(
    cluster: KafkaCluster, broker: ServedBroker, unique: Callable[[str], str]
) -> None:
    topic = unique("cluster")
    Producer({"bootstrap.servers": broker.address}).list_topics(topic, timeout=10)
    assert cluster.partitions([topic, "no-such-topic"]) == {topic: [0]}
    assert topic in cluster.topics()
    place = (topic, 0)
    assert [cluster.produce(place, batch(100)), cluster.produce(place, batch(50))] == [0, 100]
    fetched = cluster.fetch(place, 100, 1 << 20, 100)
    assert [record.offset for record in codec.iterate(fetched.records)] == list(range(100, 150))
    assert fetched.high_watermark == 150
    assert cluster.earliest([place]) == {place: 0}
    assert cluster.latest([place]) == {place: 150}
    assert cluster.offsets({place: NOW + 10}) == {place: 10}
    assert cluster.offsets({place: NOW + 10_000}) == {place: 150}
    assert cluster.fetch(place, 1000, 1024, 0).error == Code.OFFSET_OUT_OF_RANGE


def test_ends_are_asked_for_as_records_are_read_without_transactions_under_way(
    cluster: KafkaCluster, broker: ServedBroker, unique: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = (unique("cluster"), 0)
    Producer({"bootstrap.servers": broker.address}).list_topics(place[0], timeout=10)
    asked: list[tuple[int, bytes]] = []
    call = Link.call

    def noted(self: Link, key: int, body: bytes, *payload: bytes, version: int) -> Any:
        if key == requests.LIST_OFFSETS:
            asked.append((version, body))
        return call(self, key, body, *payload, version=version)

    monkeypatch.setattr(Link, "call", noted)
    assert cluster.latest([place]) == {place: 0}
    ((version, body),) = asked
    assert version >= 2
    assert body[4] == 1  # behind the replica's number: read_committed


def test_a_repeated_idempotent_batch_is_stored_once(
    cluster: KafkaCluster, broker: ServedBroker, unique: Callable[[str], str]
) -> None:
    place = (unique("cluster"), 0)
    Producer({"bootstrap.servers": broker.address}).list_topics(place[0], timeout=10)
    producer_id, epoch = cluster.init_producer()
    sent = batch(10, producer_id=producer_id, producer_epoch=epoch, base_sequence=0)
    assert [cluster.produce(place, sent), cluster.produce(place, sent)] == [0, 0]
    assert cluster.latest([place]) == {place: 10}


def test_it_speaks_to_a_broker_that_is_not_ours() -> None:
    mock = Producer({"bootstrap.servers": "mock", "test.mock.num.brokers": 3})
    brokers = mock.list_topics("mocked", timeout=10).brokers.values()
    cluster = KafkaCluster(",".join(f"{node.host}:{node.port}" for node in brokers), timeout_seconds=10)
    places = [("mocked", index) for index in cluster.partitions(["mocked"])["mocked"]]
    for place in places:
        assert cluster.produce(place, batch(20)) == 0
        fetched = cluster.fetch(place, 0, 1 << 20, 500)
        assert [record.value for record in codec.iterate(fetched.records)] == [b"v%d" % n for n in range(20)]
    assert cluster.latest(places) == dict.fromkeys(places, 20)
    cluster.commit("readers", dict.fromkeys(places, 7))
    cluster.close()


def test_an_unreachable_broker_is_one_clear_error_in_time() -> None:
    began = time.monotonic()
    with pytest.raises(
        ClusterError, match=r"cannot list the topics within 0\.5 s: no broker answers at 127\.0\.0\.1:1:"
    ):
        KafkaCluster("127.0.0.1:1", timeout_seconds=0.5).topics()
    assert time.monotonic() - began < 5
    with pytest.raises(ClusterError, match="is not HOST:PORT"):
        KafkaCluster("nonsense")
