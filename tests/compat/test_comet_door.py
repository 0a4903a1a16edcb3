"""The Comet door over real sockets: all ten calls with a generated client, groups as time passes, and across doors."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer as KafkaConsumer
from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition
from confluent_kafka import Producer as KafkaProducer
from confluent_kafka.admin import AdminClient

from millstream.core.errors import Code, RequestError, StartupError
from millstream.core.promise import Promise
from millstream.server import Server
from tests.compat.client_comet import Comet, Consumer, Producer
from tests.compat.raw import create_topic
from tests.in_thread import BrokerInThread
from tests.serving import MILLSTREAM, ServedBroker

Unique = Callable[[str], str]
MESSAGE_BYTES_MAX = 4 << 20


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerInThread]:
    with BrokerInThread(tmp_path_factory.mktemp("comet"), comet="127.0.0.1:0") as started:
        yield started


@pytest.fixture
def client(broker: BrokerInThread) -> Iterator[Comet]:
    with Comet(broker.address("comet")) as channel:
        yield channel


@pytest.fixture
def topic(client: Comet, unique: Unique) -> str:
    """With three partitions."""
    name = unique("comet")
    assert client.CreateTopic(name=name, partitions=3).success
    return name


def batches_in(broker: BrokerInThread) -> int:
    return broker.ask(lambda server: server.metrics.batches_in)


# -- topics ----------------------------------------------------------------------------------------------------------


def test_topics_are_created_listed_and_deleted(client: Comet, unique: Unique) -> None:
    name = unique("topic")
    answer = client.CreateTopic(name=name, partitions=2, replication_factor=1)
    assert (answer.success, answer.error) == (True, "")
    answer = client.CreateTopic(name=name, partitions=5, replication_factor=7)
    assert (answer.success, answer.error) == (False, f"topic already exists: {name}"), "its client checks these words"
    [listed] = [each for each in client.ListTopics().topics if each.name == name]
    assert (listed.partitions, listed.replication_factor) == (2, 1)
    assert client.DeleteTopic(name=name).success
    answer = client.DeleteTopic(name=name)
    assert (answer.success, answer.error) == (False, f"topic not found: {name}")
    assert name not in [each.name for each in client.ListTopics().topics]


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"partitions": 1, "replication_factor": 2}, "replication factor 2 exceeds broker count 1"),
        ({"partitions": 0}, "a topic needs at least one partition, not 0"),
        ({"partitions": -3}, "a topic needs at least one partition, not -3"),
        ({"partitions": 1 << 30}, "raise partitions_max"),
        ({"partitions": 1, "name": "no spaces"}, "not a valid topic name"),
        ({"partitions": 1, "name": ""}, "not a valid topic name"),
    ],
)
def test_a_topic_that_cannot_be_created_gets_the_reason(
    client: Comet, unique: Unique, fields: dict[str, Any], error: str
) -> None:
    before = len(client.ListTopics().topics)
    answer = client.CreateTopic(**{"name": unique("refused"), **fields})
    assert not answer.success and error in answer.error
    assert len(client.ListTopics().topics) == before


def test_metadata_names_brokers_and_leaders_and_omits_unknown_topics(
    broker: BrokerInThread, client: Comet, topic: str
) -> None:
    answer = client.GetMetadata()
    assert [(each.id, each.address) for each in answer.brokers] == [("1", broker.address("comet"))]
    [found] = [each for each in answer.topics if each.name == topic]
    assert found.replication_factor == 1
    assert [(each.id, each.leader_broker_id, list(each.replica_broker_ids)) for each in found.partitions] == [
        (number, "1", ["1"]) for number in range(3)
    ]
    asked = client.GetMetadata(topics=[topic, "missing", topic])
    assert [each.name for each in asked.topics] == [topic]
    assert len(client.GetMetadata(topics=["missing"]).topics) == 0


# -- records ---------------------------------------------------------------------------------------------------------


def test_a_key_selects_its_partition_by_crc_32(client: Comet, topic: str) -> None:
    keys = [b"user-%d" % number for number in range(50)]
    answer = client.Produce(topic=topic, records=[{"partition": -1, "key": key, "value": key} for key in keys])
    assert [each.partition for each in answer.results] == [zlib.crc32(key) % 3 for key in keys]
    for partition in range(3):
        mine = [key for key in keys if zlib.crc32(key) % 3 == partition]
        assert client.consume(topic, partition) == list(enumerate(mine))
    assert zlib.crc32(b"123456789") == 0xCBF43926, "the published check value of CRC-32 (IEEE)"


def test_records_without_a_key_go_round_robin_over_calls(client: Comet, topic: str) -> None:
    assert [each[0] for each in client.produce(topic, *[b"x"] * 4, partition=-1)] == [0, 1, 2, 0]
    assert [each[0] for each in client.produce(topic, *[b"x"] * 4, partition=-7)] == [1, 2, 0, 1]


def test_the_records_of_a_call_are_one_batch_for_each_partition(
    broker: BrokerInThread, client: Comet, topic: str
) -> None:
    before = batches_in(broker)
    records = [{"partition": number % 2, "value": b"%d" % number} for number in range(100)]
    answer = client.Produce(topic=topic, records=records)
    assert [(each.partition, each.offset) for each in answer.results] == [(n % 2, n // 2) for n in range(100)]
    assert batches_in(broker) == before + 2
    for _ in range(2):
        client.produce(topic, *[bytes(100_000)] * 30, partition=2)
    assert batches_in(broker) == before + 4
    assert len(client.consume(topic, 2, max_records=1000)) == 41, "as many as a client with default limits takes"


def test_a_call_that_is_refused_stores_nothing(client: Comet, topic: str) -> None:
    records = [{"partition": 0, "value": b"x"}, {"partition": 3, "value": b"x"}]
    answer = client.Produce(topic=topic, records=records)
    assert (answer.error, len(answer.results)) == (f"invalid partition 3: topic {topic} has 3", 0)
    assert client.Produce(topic="missing", records=records).error == "topic not found: missing"
    assert client.consume(topic) == []


def test_a_batch_that_is_too_large_for_its_topic_is_refused_with_all_records_of_the_call(
    broker: BrokerInThread, client: Comet, unique: Unique
) -> None:
    name = unique("small")
    create_topic(broker.address("kafka"), name, 2, **{"max.message.bytes": "1000"})
    records = [{"partition": 0, "value": b"x"}, {"partition": 1, "value": bytes(1000)}]
    assert "max.message.bytes is 1000" in client.Produce(topic=name, records=records).error
    assert client.consume(name) == []
    assert len(client.produce(name, *[bytes(300)] * 10)) == 10, "more than a batch, in several"
    assert [offset for offset, _ in client.consume(name)] == list(range(10))


def test_an_empty_call_is_answered(client: Comet, topic: str) -> None:
    answer = client.Produce(topic=topic)
    assert (answer.error, len(answer.results)) == ("", 0)


def test_the_largest_record_of_a_grpc_message_comes_back_to_a_client_with_default_limits(
    broker: BrokerInThread, client: Comet, topic: str
) -> None:
    largest = bytes(MESSAGE_BYTES_MAX - 2048)
    assert client.produce(topic, largest) == [(0, 0)]
    client.produce(topic, b"small", largest[:1000], partition=1)
    assert client.consume(topic) == [(0, largest)]
    consumer = Consumer(broker.address("comet"), topic, "largest")
    assert sorted(consumer.poll() + consumer.poll()) == [(0, 0, largest), (1, 0, b"small"), (1, 1, largest[:1000])]
    consumer.close()


def test_consume_reads_a_partition_and_is_empty_at_its_end(client: Comet, topic: str) -> None:
    before_ns = time.time_ns() - 3_600_000_000_000
    client.produce(topic, *[b"%d" % number for number in range(250)], key=b"k")
    assert [offset for offset, _ in client.consume(topic)] == list(range(100)), "100 unless the client says"
    assert [offset for offset, _ in client.consume(topic, offset=7, max_records=3)] == [7, 8, 9]
    assert client.consume(topic, offset=249, max_records=1 << 30) == [(249, b"249")]
    assert client.consume(topic, offset=250) == []
    [message] = client.Consume(topic=topic, offset=0, max_records=1).messages
    assert (message.key, message.value, message.topic, message.partition) == (b"k", b"0", topic, 0)
    assert before_ns < message.timestamp and message.timestamp % 1_000_000 == 0, "milliseconds as nanoseconds"


@pytest.mark.parametrize("offset", [1, -1, 1 << 60])
def test_consume_outside_the_partition_gets_its_range(client: Comet, topic: str, offset: int) -> None:
    answer = client.Consume(topic=topic, offset=offset)
    assert answer.error == f"offset {offset} is out of range: {topic}-0 begins at 0 and ends at 0"


def test_consume_without_its_topic_or_partition_gets_an_error(client: Comet, topic: str) -> None:
    assert client.Consume(topic="missing").error == "topic not found: missing"
    for partition in (-1, 3):
        assert client.Consume(topic=topic, partition=partition).error == (
            f"invalid partition {partition}: topic {topic} has 3"
        )


def test_a_broker_that_does_not_lead_names_the_leader(broker: BrokerInThread, client: Comet, topic: str) -> None:
    """What the append gate says for a partition that another broker leads."""

    class Elsewhere:
        def __init__(self, log: Any) -> None:
            self._log = log

        def __getattr__(self, name: str) -> Any:
            return getattr(self._log, name)

        def append(self, batch: memoryview, header: object) -> Promise[object]:
            return Promise.failed(RequestError(Code.NOT_LEADER_OR_FOLLOWER))

    def lead_elsewhere(server: Server) -> None:
        found = server.broker.topics.get(topic)
        assert found is not None
        found.partitions[1].log = Elsewhere(found.partitions[1].log)  # type: ignore[assignment]

    broker.ask(lead_elsewhere)
    records = [{"partition": number, "value": b"x"} for number in (0, 1)]
    answer = client.Produce(topic=topic, records=records)
    assert (answer.error, answer.leader_broker_id) == ("not leader for partition 1, leader is 1", "1")
    assert len(answer.results) == 0


# -- groups ----------------------------------------------------------------------------------------------------------


def fill(client: Comet, topic: str, each: int = 10) -> None:
    for partition in range(3):
        client.produce(topic, *[b"%d-%d" % (partition, number) for number in range(each)], partition=partition)


def committed(broker: BrokerInThread, group: str, topic: str) -> dict[int, int]:
    admin = AdminClient({"bootstrap.servers": broker.address("kafka")})
    asked = ConsumerGroupTopicPartitions(group, [TopicPartition(topic, each) for each in range(3)])
    [future] = admin.list_consumer_group_offsets([asked]).values()
    return {each.partition: each.offset for each in future.result(20).topic_partitions if each.offset >= 0}


def await_rebalance(reader: Consumer) -> None:
    """Polls until the group has a new generation, which is durable a moment after the change."""
    before, deadline = reader.rebalances, time.monotonic() + 20
    while reader.rebalances == before:
        assert time.monotonic() < deadline
        assert reader.poll() == [] or reader.rebalances == before
    assert reader.rebalances == before + 1


@pytest.fixture
def join(broker: BrokerInThread, topic: str) -> Iterator[Callable[..., Consumer]]:
    """Subscribes consumers to the topic."""
    opened: list[Consumer] = []

    def subscribed(group: str, max_records: int = 100, to: str = topic) -> Consumer:
        opened.append(Consumer(broker.address("comet"), to, group, max_records))
        opened[-1].subscribe()
        return opened[-1]

    yield subscribed
    for consumer in opened:
        consumer.close()


Joining = Callable[..., Consumer]


def test_a_new_group_reads_from_the_start_all_partitions_in_one_answer(
    client: Comet, topic: str, join: Joining
) -> None:
    fill(client, topic)
    reader = join("all")
    assert reader.partitions == [0, 1, 2]
    assert sorted(reader.poll()) == [(p, n, b"%d-%d" % (p, n)) for p in range(3) for n in range(10)]
    assert reader.poll() == [] and reader.rebalances == 0


def test_records_count_as_consumed_when_the_next_poll_comes(
    broker: BrokerInThread, client: Comet, topic: str, join: Joining
) -> None:
    fill(client, topic)
    reader = join("counted")
    assert len(reader.poll()) == 30
    assert committed(broker, "counted", topic) == {}
    assert reader.poll() == []
    assert committed(broker, "counted", topic) == {0: 10, 1: 10, 2: 10}


def test_a_consumer_that_dies_loses_no_records(
    broker: BrokerInThread, client: Comet, topic: str, join: Joining
) -> None:
    fill(client, topic)
    dying = join("dying")
    assert len(dying.poll()) == 30, "and it never polls again"
    dying.close()
    broker.advance(11)
    successor = join("dying")
    assert len(successor.poll()) == 30
    assert successor.poll() == []


@pytest.mark.parametrize(("max_records", "each"), [(0, 33), (-5, 33), (9, 3), (10, 3), (1, 1), (3000, 50)])
def test_a_poll_shares_its_records_out_over_the_partitions(
    client: Comet, topic: str, join: Joining, max_records: int, each: int
) -> None:
    fill(client, topic, 50)
    seen = join(f"share-{max_records}", max_records).poll()
    assert [[p for p, _, _ in seen].count(partition) for partition in range(3)] == [each] * 3


def test_subscribe_answers_at_once_with_the_final_partitions_and_others_hear_of_it_once(
    client: Comet, topic: str, join: Joining
) -> None:
    fill(client, topic)
    first = join("two")
    second = join("two")
    assert sorted([first.member, second.member]) == [first.member, second.member]
    assert second.partitions == [1], "partition p belongs to the member at p mod 2"
    answer = first.client.Poll(topic=topic, group="two", member_id=first.member)
    assert answer.rebalance and not answer.messages and answer.error == ""
    assert answer.generation == 2
    assert {partition for partition, _, _ in first.poll()} == {0, 2} and first.rebalances == 0
    assert {partition for partition, _, _ in second.poll()} == {1} and second.rebalances == 0
    third, fourth = join("two"), join("two")
    assert (third.partitions, fourth.partitions) == ([2], []), "the fourth of three"
    for reader, rebalances in ((first, 1), (second, 1), (third, 1), (fourth, 0)):
        for _ in range(4):
            reader.poll()
        assert reader.poll() == [] and reader.rebalances == rebalances, "once for both"
    for partition, reader in enumerate((first, second, third)):
        client.produce(topic, b"x", partition=partition)
        assert [each[0] for each in reader.poll()] == [partition]


def test_a_stale_commit_is_refused(broker: BrokerInThread, client: Comet, topic: str, join: Joining) -> None:
    """The first member read partition 1 before it lost it: its next poll does not commit that partition."""
    fill(client, topic)
    first = join("stale")
    assert len(first.poll()) == 30
    second = join("stale")
    assert second.partitions == [1]
    assert first.poll() == [] and first.rebalances == 1
    assert committed(broker, "stale", topic) == {0: 10, 2: 10}
    assert len(second.poll()) == 10
    assert second.poll() == []
    assert committed(broker, "stale", topic) == {0: 10, 1: 10, 2: 10}


def test_a_member_is_evicted_ten_seconds_after_its_last_poll(
    broker: BrokerInThread, client: Comet, topic: str, join: Joining
) -> None:
    fill(client, topic)
    silent, lively = join("evicted"), join("evicted")
    assert silent.poll() == [] and silent.rebalances == 1
    for _ in range(3):
        broker.advance(3.2)
        lively.poll()
    assert lively.rebalances == 0, "after 9.6 s both are members"
    broker.advance(1)
    await_rebalance(lively)
    assert {partition for partition, _, _ in lively.poll()} == {0, 2}
    answer = silent.client.Poll(topic=topic, group="evicted", member_id=silent.member)
    assert answer.error == f"member {silent.member} not found in group {topic}/evicted"
    before = silent.member
    assert silent.poll() == [] and silent.member == ""
    silent.poll()
    assert silent.member not in ("", before), "Comet's client subscribes again under a new id"


def test_unsubscribe_hands_the_partitions_over_at_once(client: Comet, topic: str, join: Joining) -> None:
    first, second = join("leaves"), join("leaves")
    fields = {"topic": topic, "group": "leaves", "member_id": first.member}
    assert client.Unsubscribe(**{**fields, "topic": "another"}).error != ""
    assert client.Unsubscribe(**fields).success
    answer = client.Unsubscribe(**fields)
    assert (answer.success, answer.error) == (False, f"member {first.member} not found in group {topic}/leaves")
    await_rebalance(second)
    fill(client, topic)
    assert len(second.poll()) == 30


def test_a_member_of_another_topic_changes_nothing(client: Comet, topic: str, unique: Unique, join: Joining) -> None:
    other = unique("other")
    client.CreateTopic(name=other, partitions=2)
    fill(client, topic)
    reader, another = join("shared"), join("shared", to=other)
    assert another.partitions == [0, 1] and reader.partitions == [0, 1, 2]
    assert len(reader.poll()) == 30 and reader.rebalances == 0
    answer = client.Poll(topic=other, group="shared", member_id=reader.member)
    assert answer.error == f"member {reader.member} not found in group {other}/shared"


def test_new_partitions_are_assigned(broker: BrokerInThread, client: Comet, topic: str, join: Joining) -> None:
    reader = join("grows")
    broker.ask(lambda server: server.broker.in_background(server.broker.topics.grow(topic, 5)))
    await_rebalance(reader)
    client.produce(topic, b"new", partition=4)
    assert reader.poll() == [(4, 0, b"new")] and reader.rebalances == 1


def test_a_group_whose_records_retention_deleted_goes_on_at_the_start(
    broker: BrokerInThread, client: Comet, topic: str, join: Joining
) -> None:
    fill(client, topic)
    reader = join("trimmed", max_records=6)
    reader.poll()

    async def trim(server: Server) -> None:
        found = server.broker.topics.get(topic)
        assert found is not None
        await found.partitions[0].log.trim(7)

    broker.ask(lambda server: server.broker.in_background(trim(server)))
    assert sorted(reader.poll())[:3] == [(0, 7, b"0-7"), (0, 8, b"0-8"), (1, 2, b"1-2")]


def test_the_calls_of_a_group_refuse_what_is_missing_and_create_nothing(
    broker: BrokerInThread, client: Comet, topic: str, join: Joining
) -> None:
    groups = broker.ask(lambda server: len(server.broker.groups.list()))
    assert client.Subscribe().error == "topic not found: ", "Comet's reconnect needs status OK"
    assert client.Subscribe(topic="missing", group="g").error == "topic not found: missing"
    assert "group id" in client.Subscribe(topic=topic).error
    assert client.Poll(topic="missing", group="g", member_id="m").error == "topic not found: missing"
    assert client.Poll(topic=topic, group="g", member_id="m").error == f"member m not found in group {topic}/g"
    assert broker.ask(lambda server: len(server.broker.groups.list())) == groups
    reader = join("deleted")
    assert client.DeleteTopic(name=topic).success
    answer = client.Poll(topic=topic, group="deleted", member_id=reader.member)
    assert answer.error == f"topic not found: {topic}"


def test_kafkas_tools_see_the_group(broker: BrokerInThread, client: Comet, topic: str, join: Joining) -> None:
    fill(client, topic)
    first, second = join("seen"), join("seen")
    first.poll()
    admin = AdminClient({"bootstrap.servers": broker.address("kafka")})
    assert "seen" in [each.group_id for each in admin.list_consumer_groups().result(20).valid]
    described = admin.describe_consumer_groups(["seen"])["seen"].result(20)
    assert (described.state.name, described.partition_assignor) == ("STABLE", "roundrobin")
    assert {
        member.member_id: sorted(each.partition for each in member.assignment.topic_partitions)
        for member in described.members
    } == {first.member: [0, 2], second.member: [1]}


def test_a_kafka_consumer_goes_on_where_a_comet_group_stopped_and_back(
    broker: BrokerInThread, client: Comet, topic: str, join: Joining
) -> None:
    fill(client, topic)
    reader = join("moves", max_records=9)
    assert len(reader.poll()) == 9 and len(reader.poll()) == 9
    client.Unsubscribe(topic=topic, group="moves", member_id=reader.member)
    settings = {"bootstrap.servers": broker.address("kafka"), "group.id": "moves", "enable.auto.commit": False}
    consumer = KafkaConsumer({**settings, "auto.offset.reset": "error"})
    consumer.subscribe([topic])
    values: list[bytes] = []
    while len(values) < 21:
        message = consumer.poll(20)
        assert message is not None and message.error() is None
        values.append(message.value() or b"")
    assert sorted(values) == sorted(b"%d-%d" % (p, n) for p in range(3) for n in range(3, 10))
    consumer.commit(asynchronous=False)
    consumer.close()
    client.produce(topic, b"last")
    assert join("moves").poll() == [(0, 10, b"last")]


def test_polls_of_one_member_that_overlap_are_answered_one_after_the_other(
    client: Comet, topic: str, join: Joining
) -> None:
    fill(client, topic)
    reader = join("overlap", max_records=3)
    request = client.messages.PollRequest(topic=topic, group="overlap", member_id=reader.member, max_records=3)
    polls = [reader.client.stub.Poll.future(request, timeout=20) for _ in range(20)]
    seen = sorted((each.partition, each.offset) for poll in polls for each in poll.result().messages)
    assert seen == [(partition, offset) for partition in range(3) for offset in range(10)]


# -- replication -----------------------------------------------------------------------------------------------------

NS = 1_700_000_000_000_000_000


def wal(*offsets: int, value: bytes = b"v", key: bytes = b"k") -> list[dict[str, Any]]:
    return [{"offset": each, "key": key, "value": value + b"%d" % each, "timestamp": NS + each} for each in offsets]


def test_replicate_creates_storage_and_keeps_offsets(broker: BrokerInThread, client: Comet, unique: Unique) -> None:
    name = unique("copy")
    answer = client.Replicate(topic=name, partition=1, records=wal(5, 6, 9))
    assert (answer.success, answer.error) == (True, "")
    assert client.consume(name, 1, 0) == [(5, b"v5"), (6, b"v6"), (9, b"v9")]
    assert client.Replicate(topic=name, partition=1, records=wal(12)).success
    [message] = client.Consume(topic=name, partition=1, offset=10).messages
    assert (message.offset, message.key, message.timestamp) == (12, b"k", NS)
    assert [(each.name, each.partitions) for each in client.ListTopics().topics if each.name == name] == [(name, 2)]
    assert client.Replicate(topic=name, partition=3).success, "no records: only the storage"
    assert client.consume(name, 3) == []
    assert client.produce(name, b"own", partition=1) == [(1, 13)]
    consumer = KafkaConsumer({"bootstrap.servers": broker.address("kafka"), "group.id": "copy", "log_level": 0})
    consumer.assign([TopicPartition(name, 1, 0)])
    found = [consumer.poll(20) for _ in range(5)]
    consumer.close()
    assert [each.offset() for each in found if each is not None] == [5, 6, 9, 12, 13]


def test_a_repeated_replicate_changes_nothing_and_a_different_record_is_refused(
    broker: BrokerInThread, client: Comet, unique: Unique
) -> None:
    name = unique("repeat")
    assert client.Replicate(topic=name, records=wal(*range(5))).success
    before = batches_in(broker)
    assert client.Replicate(topic=name, records=wal(*range(5))).success
    assert client.Replicate(topic=name, records=wal(2, 3)).success
    assert batches_in(broker) == before
    assert client.Replicate(topic=name, records=wal(*range(3, 8))).success, "the new ones are added"
    assert [offset for offset, _ in client.consume(name)] == list(range(8))
    for records in (
        wal(4, value=b"other"),
        wal(4, key=b"other"),
        [{**wal(4)[0], "timestamp": NS + 1_000_000}],
        wal(7, 8, value=b"other"),
    ):
        answer = client.Replicate(topic=name, records=records)
        assert not answer.success
        assert f"offset {records[0]['offset']} holds another record than the leader's" in answer.error
    assert client.consume(name) == [(each, b"v%d" % each) for each in range(8)]


def test_a_record_that_was_produced_here_is_compared_too(client: Comet, topic: str) -> None:
    client.produce(topic, b"own")
    assert "another record" in client.Replicate(topic=topic, records=wal(0)).error
    [message] = client.Consume(topic=topic).messages
    same = {"offset": 0, "value": b"own", "timestamp": message.timestamp}
    assert client.Replicate(topic=topic, records=[same, *wal(1)]).success
    assert client.consume(topic) == [(0, b"own"), (1, b"v1")]


@pytest.mark.parametrize(
    ("partition", "records", "error"),
    [
        (-1, wal(0), "invalid partition -1"),
        (0, wal(3, 2), "must rise"),
        (0, wal(3, 3), "must rise"),
        (0, wal(-1), "must rise"),
        (0, wal(0, 1 << 40), "span more than a batch"),
        (0, [{"offset": 0, "timestamp": -1}], "before 1970"),
        (1 << 30, [], "partitions_max"),
    ],
)
def test_records_that_no_leader_has_are_refused(
    client: Comet, unique: Unique, partition: int, records: list[dict[str, Any]], error: str
) -> None:
    answer = client.Replicate(topic=unique("bad"), partition=partition, records=records)
    assert not answer.success and error in answer.error


def test_a_store_that_cannot_follow_says_so(tmp_path: Path) -> None:
    with (
        BrokerInThread(tmp_path, store=f"sqlite:{tmp_path / 'store.db'}", comet="127.0.0.1:0") as broker,
        Comet(broker.address("comet")) as client,
    ):
        answer = client.Replicate(topic="copy", records=wal(0))
        assert "cannot take records with offsets" in answer.error
        assert len(client.ListTopics().topics) == 0


# -- across doors, restarts and brokers ------------------------------------------------------------------------------


def test_records_of_kafka_clients_come_out(broker: BrokerInThread, client: Comet, topic: str, join: Joining) -> None:
    for codec in ("none", "gzip", "zstd"):
        producer = KafkaProducer({"bootstrap.servers": broker.address("kafka"), "compression.type": codec})
        producer.produce(topic, f"{codec}".encode(), b"key", partition=0, headers=[("h", b"x")])
        producer.produce(topic, None, b"deleted", partition=0)
        producer.produce(topic, b"no key", None, partition=0)
        assert producer.flush(20) == 0
    found = client.Consume(topic=topic).messages
    assert [(each.key, each.value) for each in found][3:6] == [(b"key", b"gzip"), (b"deleted", b""), (b"", b"no key")]
    assert len(join("kafka").poll()) == 9


def test_prices_flow_through_a_restart_without_loss(tmp_path: Path) -> None:
    """Comet's own producer and consumers, over a broker that is killed: offsets survive without etcd."""
    with ServedBroker(tmp_path, "--comet", "127.0.0.1:0") as served:
        producer = Producer(served.doors["comet"], "prices", 3)
        readers = [Consumer(served.doors["comet"], "prices", "price-alerts") for _ in range(2)]
        for reader in readers:
            reader.subscribe()
        sent = [(b"symbol-%d" % (number % 7), b"%d" % number) for number in range(300)]
        producer.send(sent[:150])
        for _ in range(200):
            for reader in readers:
                reader.poll()
            if sum(len(reader.seen) for reader in readers) == 150:
                break
        for reader in readers:
            reader.poll()
        before = {each[:2] for reader in readers for each in reader.seen}
        assert len(before) == 150
        served.kill()
        served.start()
        producer.close()
        producer = Producer(served.doors["comet"], "prices", 3)
        producer.send(sent[150:])
        for reader in readers:
            reader.seen = []
        deadline = time.monotonic() + 20
        while len(after := {each for reader in readers for each in reader.seen}) < 150:
            assert time.monotonic() < deadline
            for reader in readers:
                reader.poll()
        assert not before & {each[:2] for each in after}, "consumed, whichever consumer polls now"
        assert sorted(value for _, _, value in after) == sorted(value for _, value in sent[150:])
        producer.close()
        for reader in readers:
            reader.close()


def test_two_brokers_over_a_database_know_each_other(tmp_path: Path) -> None:
    url = f"sqlite:{tmp_path / 'store.db'}"
    environ = {"comet": "127.0.0.1:0", "store": url}
    with (
        BrokerInThread(tmp_path / "1", node_id=1, comet_broker_id="alpha", **environ) as one,
        BrokerInThread(tmp_path / "2", node_id=2, **environ) as two,
        Comet(one.address("comet")) as first,
        Comet(two.address("comet")) as second,
    ):
        deadline = time.monotonic() + 20
        while len(first.GetMetadata().brokers) < 2:
            assert time.monotonic() < deadline
        brokers = {each.id: each.address for each in first.GetMetadata().brokers}
        assert brokers == {"alpha": one.address("comet"), "2": two.address("comet")}
        assert first.CreateTopic(name="t", partitions=4, replication_factor=3).error == (
            "replication factor 3 exceeds broker count 2"
        )
        assert first.CreateTopic(name="t", partitions=4).success
        [topic] = first.GetMetadata(topics=["t"]).topics
        assert {each.leader_broker_id for each in topic.partitions} == {"alpha", "2"}
        while not len(second.GetMetadata(topics=["t"]).topics):
            assert time.monotonic() < deadline
        assert second.produce("t", b"any broker appends", partition=0) == [(0, 0)]
        assert "another broker coordinates g" in second.Subscribe(topic="t", group="g").error
        assert first.Subscribe(topic="t", group="g").error == ""
        third = BrokerInThread(tmp_path / "3", node_id=3, comet_broker_id="alpha", **environ)
        with pytest.raises(StartupError, match="belongs to the broker with node id 1"):
            third.start()


def test_a_broker_keeps_its_id(tmp_path: Path) -> None:
    for given, known in (("", "1"), ("edge-7", "edge-7"), ("", "edge-7")):
        with (
            BrokerInThread(tmp_path, comet="127.0.0.1:0", comet_broker_id=given, comet_advertise=":6174") as broker,
            Comet(broker.address("comet")) as client,
        ):
            assert [(each.id, each.address) for each in client.GetMetadata().brokers] == [(known, ":6174")]


# -- starting --------------------------------------------------------------------------------------------------------


def test_a_port_that_is_taken_stops_the_start(broker: BrokerInThread, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"cannot listen on .* for Comet clients"):
        BrokerInThread(tmp_path, comet=broker.address("comet")).start()


def test_a_missing_library_is_named(tmp_path: Path) -> None:
    code = "import sys; sys.modules['grpc'] = None; from millstream.cli import main; main()"
    command = [sys.executable, "-c", code, "serve", "--data", str(tmp_path), "--kafka", "127.0.0.1:0", "--http", "off"]
    ran = subprocess.run([*command, "--comet", "127.0.0.1:0"], capture_output=True, text=True, timeout=30)
    assert ran.returncode == 1 and ran.stdout == ""
    assert "the Comet door needs grpc, which is not installed: pip install 'millstream[comet]'" in ran.stderr


def test_comets_own_command_and_variables_start_a_broker(tmp_path: Path) -> None:
    environ = {**os.environ, "MILLSTREAM_KAFKA": "127.0.0.1:0", "MILLSTREAM_HTTP": "off"}
    environ |= {"COMET_BROKER_ID": "compose-1", "COMET_ADVERTISE_ADDR": "broker:6174"}
    command = [
        MILLSTREAM,
        "comet",
        "--addr",
        "127.0.0.1:0",
        "--data-dir",
        str(tmp_path / "data"),
        "--log-level",
        "warn",
    ]
    with subprocess.Popen(command, env=environ, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = re.search(r" comet=(\S+)", process.stdout.readline())
        assert found is not None
        with Comet(found[1]) as client:
            assert [(each.id, each.address) for each in client.GetMetadata().brokers] == [("compose-1", "broker:6174")]
        process.terminate()
    assert process.returncode == 0 and (tmp_path / "data").is_dir()
