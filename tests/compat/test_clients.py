"""What every client must be able to do, shown with each: a table of tests over the four clients."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from confluent_kafka import ConsumerGroupState, KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient

from tests.compat import clients
from tests.compat.clients import FROM_END, FROM_START, Client, Sent, Start, by_partition, settle, shared_evenly
from tests.serving import ServedBroker
from tests.stores import stored_key

Unique = Callable[[str], str]

IDLE = frozenset(
    {
        # The combinations that a client does not have, so that they do not show up as skipped tests.
        ("kcat", "timestamps"),
    }
)
CODECS = [(name, codec) for name in clients.NAMES for codec in ("gzip", "snappy", "lz4", "zstd")]
ASSIGNORS = [
    ("confluent-kafka", "range"),
    ("confluent-kafka", "roundrobin"),
    ("confluent-kafka", "cooperative-sticky"),
    ("aiokafka", "range"),
    ("aiokafka", "roundrobin"),
    ("aiokafka", "sticky"),
    ("kafka-python", "range"),
    ("kafka-python", "roundrobin"),
    ("kafka-python", "sticky"),
    ("kafka-python", "cooperative-sticky"),
    ("kcat", "range"),
    ("kcat", "cooperative-sticky"),
]


@pytest.fixture(params=clients.NAMES)
def client(request: pytest.FixtureRequest, broker: ServedBroker) -> Client:
    return clients.load(broker.address)[request.param]


def numbered(count: int, partitions: int = 1, first: int = 0) -> list[Sent]:
    """Records that tell their place: partition by partition, so that order can be checked."""
    return [
        Sent(f"{partition}/{number}".encode(), partition=partition)
        for partition in range(partitions)
        for number in range(first, first + count)
    ]


def assert_exactly(seen: list[clients.Seen], count: int, partitions: int) -> None:
    """Every record of `numbered` once, in the order in which it was produced, at offsets without gaps."""
    found = by_partition(seen)
    assert sorted(found) == list(range(partitions))
    for partition, records in found.items():
        assert [record.value for record in records] == [f"{partition}/{number}".encode() for number in range(count)]
        assert [record.offset for record in records] == list(range(count))


def test_creates_a_topic_and_finds_what_it_produced(client: Client, unique: Unique) -> None:
    topic = unique("plain")
    client.create_topic(topic, 1)
    client.produce(topic, numbered(100))
    with client.reader(topic, [0], FROM_START) as reader:
        assert_exactly(reader.read(100), 100, 1)


def test_keys_and_headers_arrive_as_they_were_sent(client: Client, unique: Unique) -> None:
    topic = unique("shapes")
    client.create_topic(topic, 1)
    headers = [("trace", b"abc"), ("trace", b"def"), ("kind", b"order")]
    sent = [Sent(b"plain"), Sent(b"keyed", key=b"user-1"), Sent(b"both", key=b"user-2", headers=headers)]
    client.produce(topic, sent)
    with client.reader(topic, [0], FROM_START) as reader:
        seen = reader.read(3)
    assert [(one.key, one.value, one.headers) for one in seen] == [
        (one.key, one.value, one.headers or []) for one in sent
    ]


def test_records_of_one_key_stay_in_one_partition_and_in_order(client: Client, unique: Unique) -> None:
    topic = unique("keyed")
    client.create_topic(topic, 4)
    client.produce(topic, [Sent(f"{number}".encode(), key=f"user-{number % 10}".encode()) for number in range(200)])
    seen: list[clients.Seen] = []
    with client.member(unique("keyed-group"), topic) as member:
        seen = list(member.read(200))
    partitions: dict[bytes | None, set[int]] = {}
    for record in seen:
        partitions.setdefault(record.key, set()).add(record.partition)
    assert len(partitions) == 10 and all(len(each) == 1 for each in partitions.values())
    for key in partitions:
        numbers = [int(record.value or b"") for record in seen if record.key == key]
        assert numbers == sorted(numbers) and len(numbers) == 20


@pytest.mark.parametrize(("name", "codec"), CODECS)
def test_every_codec_survives_the_round_trip(name: str, codec: str, broker: ServedBroker, unique: Unique) -> None:
    client, topic = clients.load(broker.address)[name], unique(codec)
    client.create_topic(topic, 1)
    values = [f"{number} {'millstream ' * 20}".encode() for number in range(200)]
    client.produce(topic, [Sent(value, partition=0) for value in values], codec=codec)
    with client.reader(topic, [0], FROM_START) as reader:
        assert [record.value for record in reader.read(200)] == values


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
def test_what_one_client_compressed_every_other_reads(codec: str, broker: ServedBroker, unique: Unique) -> None:
    topic, everyone = unique(f"across-{codec}"), clients.load(broker.address)
    everyone["confluent-kafka"].create_topic(topic, 1)
    for name, client in everyone.items():
        client.produce(topic, [Sent(f"{name} {number}".encode(), partition=0) for number in range(20)], codec=codec)
    expected = [f"{name} {number}".encode() for name in everyone for number in range(20)]
    for client in everyone.values():
        with client.reader(topic, [0], FROM_START) as reader:
            assert [record.value for record in reader.read(len(expected))] == expected


def test_an_idempotent_producer_stores_every_record_once(client: Client, unique: Unique) -> None:
    topic = unique("idempotent")
    client.create_topic(topic, 1)
    client.produce(topic, numbered(500), idempotent=True)
    with client.reader(topic, [0], FROM_START) as reader:
        assert_exactly(reader.read(500), 500, 1)


def test_librdkafka_gives_transactions_up_at_once(broker: ServedBroker) -> None:
    producer = Producer({"bootstrap.servers": broker.address, "transactional.id": "tx", "log_level": 0})
    with pytest.raises(KafkaException) as refused:
        producer.init_transactions(30)
    error = refused.value.args[0]
    assert error.fatal() and error.code() == KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED


def test_reads_from_an_offset(client: Client, unique: Unique) -> None:
    topic = unique("offset")
    client.create_topic(topic, 1)
    client.produce(topic, numbered(50))
    with client.reader(topic, [0], Start(offset=30)) as reader:
        assert [record.offset for record in reader.read(20)] == list(range(30, 50))


def test_reads_from_the_end_only_what_comes_after(client: Client, unique: Unique) -> None:
    topic = unique("end")
    client.create_topic(topic, 1)
    client.produce(topic, numbered(10))
    with client.reader(topic, [0], FROM_END) as reader:
        client.produce(topic, numbered(5, first=10))
        assert [record.offset for record in reader.read(5)] == list(range(10, 15))


def test_reads_from_a_timestamp(client: Client, broker: ServedBroker, unique: Unique) -> None:
    topic = unique("time")
    writer = client if (client.name, "timestamps") not in IDLE else clients.load(broker.address)["confluent-kafka"]
    client.create_topic(topic, 1)
    first_ms = int(time.time() * 1000) - 100_000
    writer.produce(
        topic, [Sent(b"%d" % number, partition=0, timestamp_ms=first_ms + 1000 * number) for number in range(50)]
    )
    with client.reader(topic, [0], Start(timestamp_ms=first_ms + 29_500)) as reader:
        seen = reader.read(20)
    assert [(record.offset, record.timestamp_ms) for record in seen] == [
        (number, first_ms + 1000 * number) for number in range(30, 50)
    ]


@pytest.mark.parametrize(("name", "assignor"), ASSIGNORS)
def test_two_members_share_the_partitions_and_the_last_gets_all(
    name: str, assignor: str, broker: ServedBroker, unique: Unique
) -> None:
    client, topic, group = clients.load(broker.address)[name], unique("shared"), unique("group")
    client.create_topic(topic, 4)
    client.produce(topic, numbered(20, 4))
    with client.member(group, topic, assignor=assignor) as first:
        settle([first], shared_evenly(4))
        first.read(80)
        commit(first)
        with client.member(group, topic, assignor=assignor) as second:
            settle([first, second], shared_evenly(4))
            client.produce(topic, numbered(20, 4, first=20))
            clients.wait_for(
                lambda: (first.poll(0.05), second.poll(0.05)) and len(first.seen) + len(second.seen) >= 160,
                "what was produced for two",
            )
            assert {record.partition for record in second.seen} == second.assignment
            commit(first, second)
        settle([first], shared_evenly(4))
        client.produce(topic, numbered(20, 4, first=40))
        first.read(240 - len(second.seen))
        assert first.poll(0.3) == []
        found = by_partition(first.seen + second.seen)
        for partition in range(4):
            assert [record.offset for record in sorted(found[partition])] == list(range(60))
        for member in (first, second):
            for records in by_partition(member.seen).values():
                assert records == sorted(records)


@pytest.mark.parametrize("name", clients.NAMES)
def test_a_static_member_that_returns_in_time_causes_no_rebalance(
    name: str, broker: ServedBroker, unique: Unique
) -> None:
    client, topic, group = clients.load(broker.address)[name], unique("static"), unique("static-group")
    client.create_topic(topic, 2)
    with client.member(group, topic, instance="a") as stays:
        goes = client.member(group, topic, instance="b")
        settle([stays, goes], shared_evenly(2))
        before, owned = generation(broker, group), goes.assignment
        goes.close()
        with client.member(group, topic, instance="b") as returned:
            settle([stays, returned], shared_evenly(2))
            assert returned.assignment == owned
            assert generation(broker, group) == before


def commit(*members: clients.Member) -> None:
    for member in members:
        if not member.commits_by_itself:
            member.commit()


def has_members(broker: ServedBroker, group: str) -> bool:
    admin = AdminClient({"bootstrap.servers": broker.address})
    described = admin.describe_consumer_groups([group])[group].result(10)
    return described.state == ConsumerGroupState.STABLE and len(described.members) > 0


def generation(broker: ServedBroker, group: str) -> int:
    """Of a classic group, as the broker stores it: no client tells."""
    from millstream.broker.groups.record import decode_group, group_key

    if broker.store == "memory:":
        pytest.skip("what is in the broker's memory cannot be looked at")
    return decode_group(stored_key(broker.store, group_key(group))).epoch


@pytest.mark.parametrize("how", ["stop", "kill"])
@pytest.mark.parametrize("name", clients.NAMES)
def test_a_member_goes_on_where_it_was_after_a_restart(name: str, how: str, own_broker: ServedBroker) -> None:
    client = clients.load(own_broker.address)[name]
    client.create_topic("orders", 3)
    client.produce("orders", numbered(100, 3), idempotent=True)
    before = client.member("readers", "orders")
    before.read(300)
    before.commit()
    getattr(own_broker, how)()
    if not before.survives_restart:
        before.give_up()
    own_broker.start()
    after = before if before.survives_restart else client.member("readers", "orders")
    # What a member fetches before it learns that it must join again, it gets a second time.
    clients.wait_for(lambda: (after.poll(0.1), has_members(own_broker, "readers"))[1], "the member back in its group")
    client.produce("orders", numbered(50, 3, first=100), idempotent=True)
    seen = after.read(450 if after is before else 150)
    assert after.poll(0.3) == []
    assert_exactly(seen if after is before else before.seen + seen, 150, 3)
    commit(after)
    for member in {before, after}:
        member.close()
    client.produce("orders", numbered(10, 3, first=150))
    with client.member("readers", "orders") as another:
        another.read(30)
        assert another.poll(0.3) == []
        assert sorted(record.offset for record in another.seen) == sorted(list(range(150, 160)) * 3)
    assert "Traceback" not in own_broker.errors()
