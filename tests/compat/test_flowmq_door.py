"""FlowMQ's commands over real sockets: topics, pushed messages, groups, and the way to Kafka's clients and back."""

from __future__ import annotations

import itertools
import os
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, NewPartitions, ResourceType

from tests.compat import raw
from tests.compat.client_flowmq import (
    ACK,
    CREATE_TOPIC,
    ERROR,
    MESSAGE,
    PING,
    PUBLISH,
    SUBSCRIBE,
    SUCCESS,
    FlowmqClient,
    FlowmqError,
)
from tests.serving import ServedBroker

Unique = Callable[[str], str]
Connect = Callable[[], FlowmqClient]
MB = 1 << 20
WINDOW = 20


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedBroker]:
    directory = tmp_path_factory.mktemp("flowmq")
    config = directory / "millstream.toml"
    config.write_text(f"flowmq_unacknowledged_max = {WINDOW}\n")
    with ServedBroker(directory / "data", "--flowmq", "127.0.0.1:0", "--config", str(config)) as broker:
        yield broker


@pytest.fixture
def connect(served: ServedBroker) -> Iterator[Connect]:
    """Opens clients, which go with the test."""
    opened: list[FlowmqClient] = []

    def connect() -> FlowmqClient:
        opened.append(FlowmqClient(served.doors["flowmq"]))
        return opened[-1]

    yield connect
    for client in opened:
        client.close()


@pytest.fixture
def client(connect: Connect) -> FlowmqClient:
    return connect()


# -- commands ----------------------------------------------------------------------------------------------------------


def test_a_ping_is_answered_with_a_pong(client: FlowmqClient) -> None:
    assert client.ping() == b""
    assert client.ping(b"still there?") == b"still there?"


def test_topics_are_made_listed_and_deleted(client: FlowmqClient, unique: Unique) -> None:
    first, second = unique("a"), unique("b")
    client.create_topic(first)
    client.create_topic(second)
    assert {first, second} <= set(client.list_topics())
    client.delete_topic(first)
    assert first not in client.list_topics() and second in client.list_topics()


@pytest.mark.parametrize(
    ("ask", "reason"),
    [
        (lambda client, topic: client.create_topic(topic), "exists already"),
        (lambda client, topic: client.create_topic("no/slash"), "not a valid topic name"),
        (lambda client, topic: client.create_topic(""), "has no name"),
        (lambda client, topic: client.delete_topic("missing"), "there is no topic missing"),
        (lambda client, topic: client.ask(PUBLISH, topic.encode()), "PUBLISH needs a topic"),
        (lambda client, topic: client.publish("no/slash", b"x"), "not a valid topic name"),
        (lambda client, topic: client.publish(topic, b"x" * (2 * MB)), "max.message.bytes"),
        (lambda client, topic: client.subscribe("no/slash"), "not a valid topic name"),
        (lambda client, topic: client.ask(SUBSCRIBE, topic.encode() + b"\0\xff"), "not UTF-8"),
        (lambda client, topic: client.subscribe(topic, "g" * 600), "a group id has 1 to 512 bytes"),
        (lambda client, topic: client.ack("nonsense"), "is not a message id"),
        (lambda client, topic: client.nack("A" * 22 + ":0:0"), "is not leased to this connection"),
        (lambda client, topic: client.ask(MESSAGE, b"id\0x"), "MESSAGE is not a request"),
        (lambda client, topic: client.ask(0x77), "the unknown command 0x77"),
    ],
)
def test_what_cannot_be_done_is_an_error_with_its_reason_and_costs_nothing_else(
    client: FlowmqClient, unique: Unique, ask: Callable[[FlowmqClient, str], object], reason: str
) -> None:
    topic = unique("refused")
    client.create_topic(topic)
    with pytest.raises(FlowmqError, match=reason):
        ask(client, topic)
    assert client.ping() == b"" and topic in client.list_topics()


def test_publishing_to_a_new_topic_makes_it_and_answers_with_the_message_s_id(
    client: FlowmqClient, connect: Connect, unique: Unique
) -> None:
    topic = unique("made")
    first, second = client.publish(topic, b"1"), client.publish(topic, b"2")
    assert first != second and len(first) <= 36
    worker = connect()
    worker.subscribe(topic, "workers")
    assert worker.take(2) == [(first, b"1"), (second, b"2")]


def test_answers_keep_the_order_of_the_requests(client: FlowmqClient, unique: Unique) -> None:
    topic = unique("order")
    client.send(0x03, topic.encode())
    for number in range(500):
        client.send(PUBLISH, topic.encode() + b"\0%d" % number)
        client.send(0x01, b"%d" % number)
    client.send(0x09, topic.encode())
    client.send(PUBLISH, b"no NUL")
    assert client.answer() == topic.encode()
    offsets = []
    for number in range(500):
        offsets.append(int(client.answer().rpartition(b":")[2]))
        assert client.receive() == (0x02, b"%d" % number)
    assert offsets == list(range(500))
    assert client.receive() == (SUCCESS, topic.encode())
    assert client.receive()[0] == ERROR


@pytest.mark.parametrize("command", [CREATE_TOPIC, PUBLISH, SUBSCRIBE])
def test_what_takes_its_time_is_answered_before_the_error_that_ends_the_connection(
    client: FlowmqClient, unique: Unique, command: int
) -> None:
    payload = unique("topic").encode() + (b"\0message" if command == PUBLISH else b"")
    oversized = struct.pack(">BI", PING, 1 << 30)
    client.socket.sendall(struct.pack(">BI", command, len(payload)) + payload + oversized)
    assert [client.receive()[0] for _ in range(2)] == [SUCCESS, ERROR]
    with pytest.raises(ConnectionError):
        client.receive()


def test_topics_made_here_have_one_partition_and_let_go_of_what_is_done_after_a_minute(
    client: FlowmqClient, served: ServedBroker, unique: Unique
) -> None:
    topic = unique("settings")
    client.create_topic(topic)
    admin = AdminClient({"bootstrap.servers": served.address})
    assert len(admin.list_topics(topic, timeout=10).topics[topic].partitions) == 1
    client.subscribe("__dlq__")
    for name, kept_ms in ((topic, "60000"), ("__dlq__", None)):
        resource = ConfigResource(ResourceType.TOPIC, name)
        entry = admin.describe_configs([resource])[resource].result(10).get("millstream.retention.done.ms")
        assert (entry and entry.value) == kept_ms


# -- delivery ----------------------------------------------------------------------------------------------------------


def test_every_subscriber_without_a_group_gets_every_message_from_then_on(
    client: FlowmqClient, connect: Connect, unique: Unique
) -> None:
    topic = unique("fanout")
    client.publish(topic, b"before")
    subscribers = [connect() for _ in range(3)]
    for subscriber in subscribers:
        subscriber.subscribe(topic)
    ids = [client.publish(topic, b"%d" % number) for number in range(10)]
    for subscriber in subscribers:
        messages = subscriber.take(10)
        assert [message.id for message in messages] == ids
        assert [message.payload for message in messages] == [b"%d" % number for number in range(10)]
        for message in messages:
            subscriber.ack(message)
        assert subscriber.has_nothing()


def test_members_of_a_group_get_messages_in_turn(client: FlowmqClient, connect: Connect, unique: Unique) -> None:
    topic = unique("turns")
    client.create_topic(topic)
    workers = [connect() for _ in range(3)]
    for worker in workers:
        worker.subscribe(topic, "workers")
    for number in range(12):
        client.publish(topic, b"%d" % number)
    shares = [[int(message.payload) for message in worker.take(4)] for worker in workers]
    assert sorted(number for share in shares for number in share) == list(range(12))
    for share in shares:
        assert {later - earlier for earlier, later in itertools.pairwise(share)} == {3}


def test_a_burst_is_handed_out_in_turn_as_well(client: FlowmqClient, connect: Connect, unique: Unique) -> None:
    topic = unique("burst")
    client.create_topic(topic)
    workers = [connect() for _ in range(2)]
    for worker in workers:
        worker.subscribe(topic, "workers")
    for number in range(20):
        client.send(PUBLISH, topic.encode() + b"\0%d" % number)
    shares = [[int(message.payload) for message in worker.take(10)] for worker in workers]
    assert sorted(shares) == [list(range(0, 20, 2)), list(range(1, 20, 2))]


def test_groups_and_single_subscribers_share_a_topic(client: FlowmqClient, connect: Connect, unique: Unique) -> None:
    topic = unique("both")
    client.create_topic(topic)
    alone, one, two, other = (connect() for _ in range(4))
    alone.subscribe(topic)
    one.subscribe(topic, "first")
    two.subscribe(topic, "first")
    other.subscribe(topic, "second")
    for number in range(4):
        client.publish(topic, b"%d" % number)
    assert [message.payload for message in alone.take(4)] == [b"0", b"1", b"2", b"3"]
    assert [message.payload for message in other.take(4)] == [b"0", b"1", b"2", b"3"]
    assert sorted(message.payload for message in one.take(2) + two.take(2)) == [b"0", b"1", b"2", b"3"]


def test_a_new_group_begins_with_what_was_published_before_it(
    client: FlowmqClient, connect: Connect, unique: Unique
) -> None:
    topic = unique("jobs")
    for number in range(5):
        client.publish(topic, b"%d" % number)
    worker = connect()
    worker.subscribe(topic, "workers")
    messages = worker.take(5)
    for message in messages[:3]:
        worker.ack(message)
    worker.close()
    again = connect()
    again.subscribe(topic, "workers")
    assert again.take(2) == messages[3:]
    assert again.has_nothing()


def test_one_connection_subscribes_to_several_topics(client: FlowmqClient, connect: Connect, unique: Unique) -> None:
    topics = [unique("many") for _ in range(5)]
    subscriber = connect()
    for topic in topics:
        subscriber.subscribe(topic, "workers" if topics.index(topic) % 2 else None)
    for topic in topics:
        client.publish(topic, topic.encode())
    messages = subscriber.take(5)
    assert sorted(message.payload for message in messages) == sorted(topic.encode() for topic in topics)
    for message in messages:
        subscriber.ack(message)


def test_a_second_subscription_to_a_topic_changes_nothing_or_is_refused(
    client: FlowmqClient, connect: Connect, unique: Unique
) -> None:
    topic = unique("twice")
    subscriber = connect()
    subscriber.subscribe(topic, "workers")
    subscriber.subscribe(topic, "workers")
    with pytest.raises(FlowmqError, match=r"already subscribed to .* in group workers"):
        subscriber.subscribe(topic)
    client.publish(topic, b"once")
    assert subscriber.next().payload == b"once"
    assert subscriber.has_nothing()


def test_a_nack_is_delivered_again_at_once_and_an_ack_ends_it(
    client: FlowmqClient, connect: Connect, unique: Unique
) -> None:
    topic = unique("nack")
    worker = connect()
    worker.subscribe(topic, "workers")
    name = client.publish(topic, b"job")
    worker.nack(worker.next())
    again = worker.next()
    assert again == (name, b"job")
    worker.ack(again)
    with pytest.raises(FlowmqError, match="it was answered, or its lease expired"):
        worker.ack(again)
    assert worker.has_nothing()


def test_only_the_connection_that_got_a_message_answers_it(
    client: FlowmqClient, connect: Connect, unique: Unique
) -> None:
    topic = unique("mine")
    workers = [connect(), connect()]
    for worker in workers:
        worker.subscribe(topic, "workers")
    name = client.publish(topic, b"job")
    assert workers[0].next().id == name
    with pytest.raises(FlowmqError, match="is not leased to this connection"):
        workers[1].ack(name)
    workers[0].ack(name)


def test_after_three_failures_a_message_is_a_dead_letter_with_headers_that_say_why(
    client: FlowmqClient, connect: Connect, served: ServedBroker, unique: Unique
) -> None:
    topic = unique("dead")
    worker = connect()
    worker.subscribe(topic, "workers")
    listener = connect()
    listener.subscribe("__dlq__")
    name = client.publish(topic, b"bad\0job")
    for _ in range(3):
        message = worker.next()
        assert message.id == name
        worker.nack(message)
    while listener.next().payload != b"bad\0job":
        pass  # what earlier tests left behind
    assert worker.has_nothing() and "__dlq__" in client.list_topics()
    headers = dict(_read(served, "__dlq__", 1, lambda record: record.value() == b"bad\0job")[0].headers() or [])
    assert headers["millstream-dead-topic"] == topic.encode()
    assert headers["millstream-dead-offset"] == b"0"
    assert headers["millstream-dead-group"] == b"workers"
    assert headers["millstream-dead-attempts"] == b"3"
    assert headers["millstream-dead-reason"] == b"refused by its subscriber"


def test_what_a_subscriber_had_leased_goes_to_the_others_when_it_disconnects(
    client: FlowmqClient, connect: Connect, unique: Unique
) -> None:
    topic = unique("gone")
    first, second = connect(), connect()
    first.subscribe(topic, "workers")
    ids = [client.publish(topic, b"%d" % number) for number in range(10)]
    first.ack(first.take(10)[4])
    second.subscribe(topic, "workers")
    assert second.has_nothing()
    first.close()
    assert [message.id for message in second.take(9)] == ids[:4] + ids[5:]


def test_a_subscriber_has_a_bounded_number_of_unanswered_messages(
    client: FlowmqClient, connect: Connect, unique: Unique
) -> None:
    topic = unique("window")
    for number in range(2 * WINDOW):
        client.publish(topic, b"%d" % number)
    worker = connect()
    worker.subscribe(topic, "workers")
    messages = worker.take(WINDOW)
    assert worker.has_nothing()
    worker.ack(messages[7])
    assert worker.next().payload == b"%d" % WINDOW
    assert worker.has_nothing()
    other = connect()
    other.subscribe(topic, "workers")
    assert [int(message.payload) for message in other.take(WINDOW - 1)] == list(range(WINDOW + 1, 2 * WINDOW))


def test_a_subscriber_that_does_not_read_holds_nobody_up(
    client: FlowmqClient, connect: Connect, unique: Unique
) -> None:
    topic = unique("slow")
    client.create_topic(topic)
    slow, quick, alone = connect(), connect(), connect()
    slow.subscribe(topic, "workers")
    quick.subscribe(topic, "workers")
    alone.subscribe(topic)
    payload = os.urandom(MB // 2)
    count = 60
    alone_got: list[bytes] = []
    follower = threading.Thread(target=lambda: alone_got.extend(_drain(alone, count)), daemon=True)
    follower.start()
    worker = threading.Thread(target=lambda: _drain(quick, count - WINDOW), daemon=True)
    worker.start()
    for _ in range(count):
        client.publish(topic, payload)
    follower.join(30)
    worker.join(30)
    assert not follower.is_alive() and not worker.is_alive()
    assert alone_got == [payload] * count
    slow.close()
    assert client.ping() == b""


def _drain(client: FlowmqClient, count: int) -> list[bytes]:
    payloads = []
    for _ in range(count):
        message = client.next()
        payloads.append(message.payload)
        client.ack(message)
    return payloads


@pytest.mark.parametrize(
    "payload",
    [b"", b"\0", b"\0a\0\0b\0", bytes(range(256)) * 16, b"x" * 1_000_000, b"\0" * MB],
    ids=["empty", "zero", "zeros", "all bytes", "a million", "a MB of zeros"],  # a name has to fit into the environment
)
def test_payloads_arrive_byte_for_byte(client: FlowmqClient, connect: Connect, unique: Unique, payload: bytes) -> None:
    topic = unique("bytes")
    alone, worker = connect(), connect()
    alone.subscribe(topic)
    worker.subscribe(topic, "workers")
    name = client.publish(topic, payload)
    for subscriber in (alone, worker):
        message = subscriber.next()
        assert message == (name, payload)
        subscriber.ack(message)


def test_a_deleted_topic_ends_its_subscriptions_and_leaves_the_others(
    client: FlowmqClient, connect: Connect, unique: Unique
) -> None:
    gone, kept = unique("gone"), unique("kept")
    subscriber = connect()
    subscriber.subscribe(gone)
    subscriber.subscribe(gone + "-group", "workers")
    subscriber.subscribe(kept)
    client.publish(gone, b"1")
    left = subscriber.next()
    client.delete_topic(gone)
    client.delete_topic(gone + "-group")
    with pytest.raises(FlowmqError, match="is not leased to this connection"):
        subscriber.ack(left)
    client.publish(gone, b"2")
    client.publish(kept, b"3")
    assert subscriber.next().payload == b"3"
    subscriber.subscribe(gone)
    client.publish(gone, b"4")
    assert subscriber.next().payload == b"4"


# -- other doors -------------------------------------------------------------------------------------------------------


def test_what_is_published_here_is_read_by_a_kafka_client(
    client: FlowmqClient, served: ServedBroker, unique: Unique
) -> None:
    topic = unique("to-kafka")
    for number in range(5):
        client.publish(topic, b"\0%d" % number)
    records = _read(served, topic, 5)
    assert [(record.key(), record.value()) for record in records] == [(None, b"\0%d" % number) for number in range(5)]
    assert abs(records[0].timestamp()[1] / 1000 - time.time()) < 60


@pytest.mark.parametrize("compression", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_what_a_kafka_client_produces_is_pushed_here(
    client: FlowmqClient, connect: Connect, served: ServedBroker, unique: Unique, compression: str
) -> None:
    topic = unique("from-kafka")
    client.create_topic(topic)
    alone, worker = connect(), connect()
    alone.subscribe(topic)
    worker.subscribe(topic, "workers")
    producer = Producer({"bootstrap.servers": served.address, "compression.type": compression, "linger.ms": 50})
    producer.produce(topic, value=b"plain")
    producer.produce(topic, value=b"with more" * 50, key=b"key", headers=[("name", b"value")])
    producer.produce(topic, value=None, key=b"tombstone")
    assert producer.flush(20) == 0
    for subscriber in (alone, worker):
        messages = subscriber.take(3)
        assert [message.payload for message in messages] == [b"plain", b"with more" * 50, b""]
        for message in messages:
            subscriber.ack(message)


def test_a_large_batch_of_a_kafka_client_passes_through_small_windows(
    client: FlowmqClient, connect: Connect, served: ServedBroker, unique: Unique
) -> None:
    topic, count = unique("large"), 2000
    client.create_topic(topic)
    producer = Producer({"bootstrap.servers": served.address, "compression.type": "lz4", "linger.ms": 200})
    for number in range(count):
        producer.produce(topic, value=b"%d" % number)
    assert producer.flush(20) == 0
    worker = connect()
    worker.subscribe(topic, "workers")
    assert [int(payload) for payload in _drain(worker, count)] == list(range(count))


def test_messages_go_to_the_partitions_of_a_topic_in_turn_and_come_from_all_of_them(
    client: FlowmqClient, connect: Connect, served: ServedBroker, unique: Unique
) -> None:
    topic = unique("wide")
    raw.create_topic(served.address, topic, 3)
    alone, workers = connect(), [connect(), connect()]
    alone.subscribe(topic)
    for worker in workers:
        worker.subscribe(topic, "workers")
    ids = [client.publish(topic, b"%d" % number) for number in range(12)]
    assert Counter(name.split(":")[1] for name in ids) == {"0": 4, "1": 4, "2": 4}
    assert sorted(message.id for message in alone.take(12)) == sorted(ids)
    assert sorted(message.id for worker in workers for message in worker.take(6)) == sorted(ids)


def test_subscribers_follow_a_topic_that_grows(
    client: FlowmqClient, connect: Connect, served: ServedBroker, unique: Unique
) -> None:
    topic = unique("grows")
    alone, worker = connect(), connect()
    alone.subscribe(topic)
    worker.subscribe(topic, "workers")
    ids = [client.publish(topic, b"before")]
    admin = AdminClient({"bootstrap.servers": served.address})
    admin.create_partitions([NewPartitions(topic, 3)])[topic].result(10)
    ids += [client.publish(topic, b"after") for _ in range(6)]
    assert {name.split(":")[1] for name in ids} == {"0", "1", "2"}
    assert sorted(message.id for message in alone.take(7)) == sorted(ids)
    assert sorted(message.id for message in worker.take(7)) == sorted(ids)


def test_a_group_of_a_kafka_consumer_is_not_taken_over(
    client: FlowmqClient, served: ServedBroker, unique: Unique
) -> None:
    topic, group = unique("streams"), unique("readers")
    client.publish(topic, b"1")
    consumer = Consumer({"bootstrap.servers": served.address, "group.id": group, "auto.offset.reset": "earliest"})
    consumer.subscribe([topic])
    try:
        while (record := consumer.poll(1)) is None or record.error():
            pass
        consumer.commit(asynchronous=False)
        with pytest.raises(FlowmqError, match="is not a queue"):
            client.subscribe(topic, group)
    finally:
        consumer.close()


def _read(
    served: ServedBroker, topic: str, count: int, wanted: Callable[[Message], bool] = lambda record: True
) -> list[Message]:
    """The first records of partition 0, as a Kafka client sees them."""
    consumer = Consumer({"bootstrap.servers": served.address, "group.id": "unused", "enable.auto.commit": False})
    consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
    found: list[Message] = []
    deadline = time.monotonic() + 20
    while len(found) < count and time.monotonic() < deadline:
        record = consumer.poll(0.5)
        if record is not None and not record.error() and wanted(record):
            found.append(record)
    consumer.close()
    assert len(found) == count
    return found


def test_a_port_that_is_taken_stops_the_start_with_what_to_do(served: ServedBroker, tmp_path: Path) -> None:
    other = ServedBroker(tmp_path / "data", "--flowmq", served.doors["flowmq"])
    with pytest.raises(AssertionError, match=r"for FlowMQ clients: .* choose another with --flowmq HOST:PORT"):
        other.start()


# -- restarts ----------------------------------------------------------------------------------------------------------


def test_acknowledgements_survive_a_kill_of_the_broker(tmp_path: Path) -> None:
    with ServedBroker(tmp_path / "data", "--flowmq", "127.0.0.1:0") as broker:
        with FlowmqClient(broker.doors["flowmq"]) as client:
            client.subscribe("jobs", "workers")
            for number in range(30):
                client.publish("jobs", b"%d" % number)
            for message in client.take(30):
                if int(message.payload) % 3:
                    client.send(ACK, message.id.encode())
            for _ in range(20):
                assert client.answer() == b""
            broker.kill()
        broker.start()
        with FlowmqClient(broker.doors["flowmq"]) as client:
            client.subscribe("jobs", "workers")
            assert [int(message.payload) for message in client.take(10)] == list(range(0, 30, 3))
            assert client.has_nothing()
