"""The Flume door over real sockets: every request and every error of its protocol, groups, pipelining, bad bytes."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from confluent_kafka import Consumer, Message, Producer

from tests.compat import client_flume as flume
from tests.compat.client_flume import Flume
from tests.compat.clients import wait_for
from tests.compat.hostile_frames import attack
from tests.compat.raw import create_topic
from tests.serving import MILLSTREAM, ServedBroker

Unique = Callable[[str], str]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedBroker]:
    with ServedBroker(tmp_path_factory.mktemp("flume"), "--flume", "127.0.0.1:0") as broker:
        yield broker


@pytest.fixture
def client(served: ServedBroker) -> Iterator[Flume]:
    with Flume(served.doors["flume"]) as connection:
        yield connection


@pytest.fixture
def open_client(served: ServedBroker) -> Iterator[Callable[[], Flume]]:
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(Flume(served.doors["flume"]))


# -- records ---------------------------------------------------------------------------------------------------------


def test_the_first_record_creates_a_topic_of_three_partitions(client: Flume, unique: Unique) -> None:
    topic = unique("lazy")
    assert client.fetch(topic, 0, 0).error == flume.TOPIC_NOT_FOUND
    assert client.produce(topic, b"first") == (0, 0, flume.NONE), "without a key it goes to partition 0"
    for partition in range(3):
        assert client.fetch(topic, partition, 0).error == flume.NONE
    for partition in (3, -2):
        assert client.fetch(topic, partition, 0) == (flume.UNKNOWN, [])
        assert client.produce(topic, b"x", partition=partition) == (partition, -1, flume.UNKNOWN)
    assert client.produce(unique("lazy"), b"x", partition=3) == (3, -1, flume.UNKNOWN), "of a new topic as well"


def test_a_key_chooses_its_partition_by_fnv_1a(client: Flume, unique: Unique) -> None:
    topic = unique("keyed")
    offsets = dict.fromkeys(range(3), 0)
    for number in range(30):
        key = f"user-{number % 10}".encode()
        expected = flume.fnv1a(key) % 3
        assert client.produce(topic, b"%d" % number, key) == (expected, offsets[expected], flume.NONE)
        offsets[expected] += 1
    assert sum(1 for count in offsets.values() if count) > 1
    assert flume.fnv1a(b"foobar") == 0xBF9CF968, "the published test vector"


def test_a_partition_that_is_named_counts_more_than_the_key(client: Flume, unique: Unique) -> None:
    assert client.produce(unique("named"), b"x", b"user-1", partition=2) == (2, 0, flume.NONE)


def test_fetch_gives_whole_records_within_max_bytes_and_always_one(client: Flume, unique: Unique) -> None:
    topic = unique("sizes")
    payloads = [b"a" * 10, b"b" * 1000, b"", b"c" * 50]
    for payload in payloads:
        client.produce(topic, payload)
    everything = client.fetch(topic, 0, 0)
    assert everything == (flume.NONE, list(enumerate(payloads)))
    assert client.fetch(topic, 0, 0, max_bytes=22).records == [(0, payloads[0])]
    assert client.fetch(topic, 0, 0, max_bytes=100).records == [(0, payloads[0])]
    assert client.fetch(topic, 0, 0, max_bytes=22 + 1012).records == [(0, payloads[0]), (1, payloads[1])]
    assert client.fetch(topic, 0, 1, max_bytes=1).records == [(1, payloads[1])], "larger than asked, but alone"
    for unlimited in (0, -5):
        assert client.fetch(topic, 0, 0, max_bytes=unlimited) == everything
    assert client.fetch(topic, 0, 4) == (flume.NONE, []), "the end is no error"


def test_offsets_that_are_not_there_are_out_of_range(client: Flume, unique: Unique) -> None:
    topic = unique("range")
    client.produce(topic, b"x")
    for offset in (2, -1, 1 << 40, -(1 << 62)):
        assert client.fetch(topic, 0, offset) == (flume.OFFSET_OUT_OF_RANGE, [])


def test_what_cannot_be_stored_is_an_error_and_the_connection_goes_on(client: Flume, unique: Unique) -> None:
    topic = unique("refused")
    assert client.produce(topic, b"x" * (2 << 20)) == (-1, -1, flume.UNKNOWN)
    assert client.produce("no spaces allowed", b"x") == (-1, -1, flume.UNKNOWN)
    assert client.produce(topic, b"x") == (0, 0, flume.NONE)


def test_the_largest_record_is_the_one_that_a_kafka_producer_may_send(
    served: ServedBroker, client: Flume, unique: Unique
) -> None:
    topic = unique("largest")
    create_topic(served.address, topic, 1)
    producer = Producer({"bootstrap.servers": served.address, "message.max.bytes": 2_000_000})
    taken: dict[int, bool] = {}
    for size in (1_048_508, 1_048_516, 1_048_517, 1_048_530):
        errors: list[object] = []
        producer.produce(topic, b"x" * size, partition=0, on_delivery=lambda *told, into=errors: into.append(told[0]))
        assert producer.flush(20) == 0
        taken[size] = errors[0] is None
        assert (client.produce(topic, b"x" * size, partition=0).error == flume.NONE) == taken[size], size
    assert taken == {1_048_508: True, 1_048_516: True, 1_048_517: False, 1_048_530: False}


def test_a_payload_of_one_mebibyte_fits_a_topic_of_this_door(client: Flume, unique: Unique) -> None:
    topic, largest = unique("mebibyte"), bytes(1_048_576)
    assert client.produce(topic, largest, b"a key", partition=0) == (0, 0, flume.NONE)
    assert client.fetch(topic, 0, 0).records == [(0, largest)]
    assert client.produce(topic, largest + bytes(1024), partition=0).error == flume.UNKNOWN


def test_records_of_kafka_clients_come_out_and_go_in(served: ServedBroker, client: Flume, unique: Unique) -> None:
    topic = unique("both")
    client.produce(topic, b"from flume", b"the key", partition=1)
    for codec in ("none", "gzip", "snappy", "lz4", "zstd"):
        producer = Producer({"bootstrap.servers": served.address, "compression.type": codec, "linger.ms": 50})
        for number in range(20):
            producer.produce(topic, f"{codec} {number}".encode(), partition=1)
        assert producer.flush(10) == 0
    payloads = [payload for _, payload in client.fetch(topic, 1, 0).records]
    assert len(payloads) == 101 and payloads[0] == b"from flume" and payloads[-1] == b"zstd 19"
    assert client.fetch(topic, 1, 37, max_bytes=1).records == [(37, b"gzip 16")], "from the middle of a batch"
    consumer = Consumer({"bootstrap.servers": served.address, "group.id": topic, "auto.offset.reset": "earliest"})
    consumer.subscribe([topic])
    messages: list[Message] = []

    def consume() -> bool:
        messages.extend(consumer.consume(500, 0.05))
        return len(messages) >= 101

    wait_for(consume, "all records")
    first = next(message for message in messages if message.offset() == 0)
    assert (first.key(), first.value()) == (b"the key", b"from flume")
    consumer.close()


# -- pipelining --------------------------------------------------------------------------------------------------------


def test_pipelined_requests_are_answered_in_order_and_reads_see_the_writes_before_them(
    client: Flume, unique: Unique
) -> None:
    topic = unique("pipelined")
    sent: list[tuple[int, int]] = []
    frames = b""
    for number in range(300):
        frames += flume.request(flume.PRODUCE, len(sent), flume.produce_payload(topic, b"%d" % number, partition=0))
        sent.append((len(sent), flume.PRODUCE))
        if number % 50 == 49:
            frames += flume.request(flume.FETCH, len(sent), flume.fetch_payload(topic, 0, number))
            sent.append((len(sent), flume.FETCH))
    client.socket.sendall(frames)
    numbers = iter(range(300))
    last = -1
    for request_id, key in sent:
        answered, body = client.receive()
        assert answered == request_id
        if key == flume.PRODUCE:
            last = next(numbers)
            assert flume.produced(body) == (0, last, flume.NONE)
        else:
            assert flume.fetched(body).records == [(last, b"%d" % last)]


def test_who_stops_sending_still_gets_every_answer(client: Flume, unique: Unique) -> None:
    topic = unique("half-closed")
    for number in range(100):
        client.send(flume.PRODUCE, flume.produce_payload(topic, b"%d" % number))
    client.socket.shutdown(socket.SHUT_WR)
    assert [flume.produced(client.receive()[1]).offset for _ in range(100)] == list(range(100))
    with pytest.raises(EOFError):
        client.receive()


def test_what_was_produced_before_nonsense_is_answered(client: Flume, unique: Unique) -> None:
    topic = unique("nonsense")
    client.produce(topic, b"first", partition=0)
    sent = [client.send(flume.PRODUCE, flume.produce_payload(topic, b"x", partition=0)) for _ in range(20)]
    client.socket.sendall(struct.pack(">i", -1))
    answers = [client.receive() for _ in sent]
    assert [request_id for request_id, _ in answers] == sent
    assert [flume.produced(body) for _, body in answers] == [(0, offset, flume.NONE) for offset in range(1, 21)]
    with pytest.raises(EOFError):
        client.receive()


def test_frames_in_single_bytes_and_large_frames_arrive_whole(client: Flume, unique: Unique) -> None:
    topic = unique("pieces")
    for byte in flume.request(flume.PRODUCE, 7, flume.produce_payload(topic, b"slow")):
        client.socket.sendall(bytes([byte]))
    assert client.receive()[0] == 7
    large = random.Random(1).randbytes(1_000_000)
    assert client.produce(topic, large).offset == 1
    assert client.produce(topic, large + b"!").offset == 2
    records = client.fetch(topic, 0, 1, max_bytes=3_000_000).records
    assert records == [(1, large), (2, large + b"!")]


# -- groups ------------------------------------------------------------------------------------------------------------


def test_a_single_member_leads_and_commits(client: Flume, unique: Unique) -> None:
    topic, group = unique("solo"), unique("solo")
    client.produce(topic, b"x")
    assert client.committed(group, topic, 0) == (flume.NONE, -1)
    joined = client.join(group, [topic])
    assert joined.error == flume.NONE and joined.generation == 1
    assert joined.leader == joined.member and joined.members == [joined.member]
    assert client.heartbeat(group, 1, joined.member) == flume.NONE
    assert client.commit(group, topic, 0, 1) == flume.NONE
    assert client.committed(group, topic, 0) == (flume.NONE, 1)
    assert client.committed(group, topic, 1) == (flume.NONE, -1)
    assert client.leave(group, joined.member) == flume.NONE
    assert client.heartbeat(group, 1, joined.member) == flume.UNKNOWN_MEMBER
    assert client.leave(group, joined.member) == flume.NONE, "a member that is not there has left"


def test_offsets_of_topics_that_do_not_exist(client: Flume, unique: Unique) -> None:
    group, topic = unique("nowhere"), unique("missing")
    assert client.committed(group, topic, 0) == (flume.NONE, -1)
    assert client.commit(group, topic, 0, 42) == flume.NONE
    assert client.committed(group, topic, 0) == (flume.NONE, 42)
    assert client.commit(group, "not a topic", 0, 1) == flume.UNKNOWN
    client.produce(topic, b"x")
    assert client.committed(group, topic, 0) == (flume.NONE, -1), "42 was not an offset of this topic"
    assert client.committed(group, topic, 9) == (flume.NONE, -1)
    assert client.commit(group, topic, 9, 1) == flume.UNKNOWN
    assert client.commit(group, topic, 0, -1) == flume.OFFSET_OUT_OF_RANGE


def test_offsets_of_topics_that_do_not_exist_survive_a_restart(tmp_path: Path) -> None:
    with ServedBroker(tmp_path, "--flume", "127.0.0.1:0") as broker:
        with Flume(broker.doors["flume"]) as client:
            assert client.commit("group", "missing", 0, 42) == flume.NONE
        broker.kill()
        broker.start()
        with Flume(broker.doors["flume"]) as client:
            assert client.committed("group", "missing", 0) == (flume.NONE, 42)
            for number in range(999):
                client.commit("group", f"missing-{number}", 0, 1)
            assert client.commit("group", "one too many", 0, 1) == flume.UNKNOWN
            assert client.commit("group", "missing", 0, 43) == flume.NONE


def test_members_that_are_not_known_and_generations_that_are_over(client: Flume, unique: Unique) -> None:
    topic, group = unique("old"), unique("old")
    client.produce(topic, b"x")
    assert client.join(group, [topic], member="nobody").error == flume.UNKNOWN_MEMBER
    assert client.heartbeat(group, 1, "nobody") == flume.UNKNOWN_MEMBER
    joined = client.join(group, [topic])
    assert client.heartbeat(group, joined.generation + 1, joined.member) == flume.STALE_GENERATION
    assert client.heartbeat(group, joined.generation - 1, joined.member) == flume.STALE_GENERATION
    assert client.join("", [topic]).error == flume.UNKNOWN, "a group needs a name"


def test_a_stranger_who_is_said_to_leave_costs_nobody_a_membership(client: Flume, unique: Unique) -> None:
    topic, group, other = unique("stay"), unique("stay"), unique("stay")
    client.produce(topic, b"x")
    joined = client.join(group, [topic])
    assert client.commit(group, topic, 0, 1) == flume.NONE
    assert client.leave(group, "nobody") == client.leave(other, joined.member) == flume.NONE
    assert client.commit(group, topic, 0, 1) == flume.NONE
    assert client.leave(group, joined.member) == flume.NONE
    assert client.heartbeat(group, joined.generation, joined.member) == flume.UNKNOWN_MEMBER


def rejoin_when_told(client: Flume, group: str, topic: str, joined: flume.Joined) -> flume.Joined:
    """What a Flume consumer does: heartbeat until told to rebalance, then join again as the same member."""
    wait_for(
        lambda: client.heartbeat(group, joined.generation, joined.member) == flume.REBALANCE_NEEDED,
        "a rebalance",
    )
    return client.join(group, [topic], joined.member)


def test_a_second_member_makes_the_first_rejoin_and_both_know_the_same(
    open_client: Callable[[], Flume], unique: Unique
) -> None:
    topic, group = unique("pair"), unique("pair")
    first, second = open_client(), open_client()
    first.produce(topic, b"x")
    alone = first.join(group, [topic])
    other = second.join(group, [topic])
    again = rejoin_when_told(first, group, topic, alone)
    assert again.generation == other.generation == alone.generation + 1
    assert again.member == alone.member != other.member
    assert again.members == other.members == sorted([again.member, other.member])
    assert again.leader == other.leader == again.members[0], "the first in alphabetical order"
    assert first.heartbeat(group, alone.generation, alone.member) == flume.STALE_GENERATION
    assert first.commit(group, topic, 0, 1) == flume.NONE


def test_a_member_that_dies_leaves_its_partitions_to_the_survivor(
    served: ServedBroker, open_client: Callable[[], Flume], unique: Unique
) -> None:
    topic, group = unique("crash"), unique("crash")
    survivor, dying = open_client(), open_client()
    survivor.produce(topic, b"x")
    alone = survivor.join(group, [topic])
    lost = dying.join(group, [topic], "", 5000)
    together = rejoin_when_told(survivor, group, topic, alone)
    assert described(served, group) == {together.member, lost.member}
    dying.close()  # without a word, and without heartbeats from now on
    after = rejoin_when_told(survivor, group, topic, together)
    assert after.generation == together.generation + 1
    assert after.members == [survivor_id := alone.member]
    assert described(served, group) == {survivor_id}
    late = open_client()
    assert late.heartbeat(group, lost.generation, lost.member) == flume.UNKNOWN_MEMBER
    assert survivor.commit(group, topic, 0, 1) == flume.NONE


def test_a_member_that_lost_its_place_cannot_commit(open_client: Callable[[], Flume], unique: Unique) -> None:
    topic, group = unique("fenced"), unique("fenced")
    slow, fast = open_client(), open_client()
    slow.produce(topic, b"x")
    old = slow.join(group, [topic], session_ms=5000)
    assert slow.commit(group, topic, 0, 1) == flume.NONE
    new = fast.join(group, [topic], session_ms=30_000)
    assert new.members == [old.member, new.member] and new.generation == old.generation + 1
    wait_for(lambda: fast.heartbeat(group, new.generation, new.member) == flume.REBALANCE_NEEDED, "the slow one's end")
    assert fast.commit(group, topic, 0, 1) == flume.NONE, "its partitions are the other's, who need not join again"
    assert slow.commit(group, topic, 0, 0) == flume.UNKNOWN_MEMBER
    assert open_client().commit(group, topic, 0, 0) == flume.UNKNOWN_MEMBER, "no member id, in a group with members"
    assert fast.committed(group, topic, 0) == (flume.NONE, 1)


def test_a_generation_that_the_member_has_left_behind_cannot_commit(
    open_client: Callable[[], Flume], unique: Unique
) -> None:
    topic, group = unique("stale"), unique("stale")
    first, second, third = open_client(), open_client(), open_client()
    first.produce(topic, b"x")
    old = first.join(group, [topic])
    assert second.join(group, [topic]).error == flume.NONE
    # The same member rejoins over a new connection: the old one still belongs to the old generation.
    assert third.heartbeat(group, old.generation, old.member) == flume.REBALANCE_NEEDED
    assert first.commit(group, topic, 0, 1) == flume.NONE, "the member has not joined again, and owns it still"
    assert third.join(group, [topic], old.member).error == flume.NONE
    assert first.commit(group, topic, 0, 7) == flume.STALE_GENERATION
    assert third.commit(group, topic, 0, 2) == flume.NONE


def test_a_topic_that_is_created_later_makes_its_members_rejoin(client: Flume, unique: Unique) -> None:
    topic, group = unique("later"), unique("later")
    joined = client.join(group, [topic])
    assert client.heartbeat(group, joined.generation, joined.member) == flume.NONE
    client.produce(topic, b"x")
    assert client.heartbeat(group, joined.generation, joined.member) == flume.REBALANCE_NEEDED
    again = client.join(group, [topic], joined.member)
    assert again.generation == joined.generation + 1
    assert client.heartbeat(group, again.generation, again.member) == flume.NONE


def test_topics_that_cannot_be_are_an_error_and_the_connection_goes_on(client: Flume, unique: Unique) -> None:
    for name in ("", "not a topic", "x" * 40_000):
        assert client.join(unique("group"), [name]).error == flume.UNKNOWN
    assert client.join(unique("group"), [unique("topic")]).error == flume.NONE


def test_kafka_tools_see_the_group_and_what_it_committed(
    served: ServedBroker, open_client: Callable[[], Flume], unique: Unique
) -> None:
    topic, group = unique("tools"), unique("tools")
    client = open_client()
    for number in range(10):
        client.produce(topic, b"%d" % number, partition=2)
    joined = client.join(group, [topic])
    client.commit(group, topic, 2, 4)
    shown = subprocess.run(
        [MILLSTREAM, "group", "describe", group, "--broker", served.address], capture_output=True, text=True, timeout=30
    )
    assert shown.returncode == 0, shown.stderr
    assert joined.member in shown.stdout and topic in shown.stdout
    assert any({"2", "4", "10", "6"} <= set(line.split()) for line in shown.stdout.splitlines()), shown.stdout


def test_a_kafka_consumer_can_be_a_member_beside_flumes(
    served: ServedBroker, open_client: Callable[[], Flume], unique: Unique
) -> None:
    topic, group = unique("mixed"), unique("mixed")
    client = open_client()
    client.produce(topic, b"x")
    alone = client.join(group, [topic], session_ms=10_000)
    consumer = Consumer({"bootstrap.servers": served.address, "group.id": group, "heartbeat.interval.ms": 100})
    consumer.subscribe([topic])
    with ThreadPoolExecutor(1) as pool:
        rejoining = pool.submit(rejoin_when_told, client, group, topic, alone)
        wait_for(lambda: consumer.poll(0.05) is None and len(consumer.assignment()) in (1, 2), "the consumer's share")
        together = rejoining.result(20)
    assert len(together.members) == 2 and together.leader == alone.member, "only Flume's members lead"
    assert described(served, group) == set(together.members)
    consumer.close()
    after = rejoin_when_told(client, group, topic, together)
    assert after.members == [alone.member]


def described(served: ServedBroker, group: str) -> set[str]:
    """Who holds partitions, as Kafka's DescribeGroups tells it."""
    from confluent_kafka.admin import AdminClient

    admin = AdminClient({"bootstrap.servers": served.address})
    description = admin.describe_consumer_groups([group])[group].result(10)
    held = {member.member_id: member.assignment.topic_partitions for member in description.members}
    partitions = sorted(place.partition for places in held.values() for place in places)
    assert partitions == [0, 1, 2], "every partition has exactly one owner"
    return set(held)


# -- bad bytes ---------------------------------------------------------------------------------------------------------


def test_a_request_that_does_not_exist_is_an_error(client: Flume, unique: Unique) -> None:
    for key in (7, 99, -1):
        assert client.ask(key, b"") == struct.pack(">iqh", -1, -1, flume.UNKNOWN), "in the shape of a produce answer"
    assert client.produce(unique("after"), b"x").error == flume.NONE


ERROR_ONLY = struct.pack(">h", flume.UNKNOWN)
SHAPES = {
    flume.PRODUCE: struct.pack(">iqh", -1, -1, flume.UNKNOWN),
    flume.FETCH: struct.pack(">hi", flume.UNKNOWN, 0),
    flume.JOIN_GROUP: struct.pack(">hihhh", flume.UNKNOWN, 0, 0, 0, 0),
    flume.LEAVE_GROUP: ERROR_ONLY,
    flume.HEARTBEAT: ERROR_ONLY,
    flume.OFFSET_COMMIT: ERROR_ONLY,
    flume.OFFSET_FETCH: struct.pack(">hq", flume.UNKNOWN, -1),
}


@pytest.mark.parametrize("key", SHAPES)
def test_a_body_that_ends_too_soon_is_an_error_in_the_shape_of_its_answer(
    client: Flume, key: int, unique: Unique
) -> None:
    assert client.ask(key, b"") == client.ask(key, b"\x00\x05ab") == SHAPES[key]
    assert client.produce(unique("after"), b"x").error == flume.NONE


@pytest.mark.parametrize(
    ("key", "body"),
    [
        pytest.param(0, flume.string("t") + struct.pack(">ii", 0, -5), id="a negative key"),
        pytest.param(1, flume.fetch_payload("t", 0, 0) + b"!", id="a byte too many"),
        pytest.param(2, flume.join_payload("g", [])[:-2] + b"\xff\xff", id="65,535 topics"),
        pytest.param(4, b"\x00\x02\xff\xfe" + bytes(6), id="not UTF-8"),
    ],
)
def test_a_body_that_makes_no_sense_is_an_error(client: Flume, key: int, body: bytes, unique: Unique) -> None:
    assert client.ask(key, body) == SHAPES[key]
    assert client.produce(unique("after"), b"x").error == flume.NONE


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(struct.pack(">i", -1) + bytes(20), id="a negative size"),
        pytest.param(struct.pack(">i", 0x7FFFFFFF) + bytes(20), id="a size of two gigabytes"),
        pytest.param(struct.pack(">i", 3) + bytes(3), id="no room for a header"),
    ],
)
def test_bytes_that_make_no_sense_cost_their_connection_only(served: ServedBroker, data: bytes, client: Flume) -> None:
    with Flume(served.doors["flume"]) as other:
        other.socket.sendall(data)
        with pytest.raises(EOFError):
            other.receive()
    assert client.committed("g", "missing", 0) == (flume.NONE, -1)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[ServedBroker]:
    """A broker whose memory no other test uses."""
    with ServedBroker(tmp_path, "--flume", "127.0.0.1:0") as broker:
        yield broker


def test_hostile_frames_harm_nobody(alone: ServedBroker, unique: Unique) -> None:
    topic = unique("hostile")
    address = alone.doors["flume"]
    sound = [
        flume.request(flume.PRODUCE, 1, flume.produce_payload(topic, b"v" * 100, b"k")),
        flume.request(flume.FETCH, 2, flume.fetch_payload(topic, 0, 0)),
        flume.request(flume.JOIN_GROUP, 3, flume.join_payload("hostile", [topic], session_ms=1000)),
        flume.request(flume.LEAVE_GROUP, 4, flume.string("hostile") + flume.string("m")),
        flume.request(flume.HEARTBEAT, 5, flume.string("hostile") + struct.pack(">i", 1) + flume.string("m")),
        flume.request(flume.OFFSET_COMMIT, 6, flume.string("h") + flume.string(topic) + struct.pack(">iq", 0, 1)),
        flume.request(flume.OFFSET_FETCH, 7, flume.string("h") + flume.string(topic) + struct.pack(">i", 0)),
    ]
    process = psutil.Process(alone.pid)
    with Flume(address) as bystander, contextlib.ExitStack() as stack:
        bystander.produce(topic, b"0")
        before = peak = process.memory_info().rss
        for number in range(100):  # connections that stop in the middle of a frame, or claim a large one
            waiting = stack.enter_context(Flume(address))
            waiting.socket.sendall(struct.pack(">i", 1 << (10 + number % 16)) + bytes(number))
        stopping = threading.Event()
        sent: list[bool] = []

        def produce() -> None:
            nonlocal peak
            while not stopping.is_set():
                sent.append(bystander.produce(topic, b"%d" % len(sent), partition=2).error == flume.NONE)
                peak = max(peak, process.memory_info().rss)

        steady = threading.Thread(target=produce)
        steady.start()
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda seed: attack(address, sound, seed, header=10), range(40)))
        stopping.set()
        steady.join(20)
        assert len(sent) > 5 and all(sent)
        assert bystander.fetch(topic, 2, 0, max_bytes=1 << 20).records[0] == (0, b"0")
    assert alone.is_running and "Traceback" not in alone.errors(), alone.errors()[-3000:]
    assert peak - before < 64 << 20, "while they are connected, not only afterwards"


def greedy_for(topic: str, times: int = 200) -> bytes:
    return flume.request(flume.FETCH, 1, flume.fetch_payload(topic, 0, 0, 0x7FFFFFFF)) * times


def test_clients_that_never_read_their_answers_cost_little_and_keep_nobody_from_writing(
    served: ServedBroker, unique: Unique
) -> None:
    topic = unique("greedy")
    with Flume(served.doors["flume"]) as producer, contextlib.ExitStack() as stack:
        for _ in range(10):
            producer.produce(topic, bytes(900_000), partition=0)
        process = psutil.Process(served.pid)
        before = process.memory_info().rss
        for _ in range(100):
            greedy = stack.enter_context(Flume(served.doors["flume"]))
            greedy.socket.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                greedy.socket.send(greedy_for(topic))
        for number in range(20):
            assert producer.produce(topic, b"still served", partition=1) == (1, number, flume.NONE)
        assert process.memory_info().rss - before < 300 << 20, "inflight_bytes_max is 256 MiB"


def test_memory_that_is_used_up_is_waited_for_and_given_back(tmp_path: Path, unique: Unique) -> None:
    """Half of 16 MiB is for answers, and one answer may take all of it: the others get theirs one after the other."""
    config = tmp_path / "millstream.toml"
    config.write_text("inflight_bytes_max = 16777216\n")
    flags = ("--flume", "127.0.0.1:0", "--config", str(config))
    with ServedBroker(tmp_path / "data", *flags) as broker, contextlib.ExitStack() as stack:
        address = broker.doors["flume"]
        clients = [stack.enter_context(Flume(address)) for _ in range(12)]
        payload = random.Random(3).randbytes(900_000)
        for _ in range(8):
            clients[0].produce("t", payload, partition=0)
        greedy = stack.enter_context(Flume(address))
        greedy.socket.sendall(greedy_for("t", 3))
        for _ in range(3):  # frames that are half there, and hold on to their memory
            stack.enter_context(Flume(address)).socket.sendall(struct.pack(">i", 50 << 20) + bytes(300_000))
        assert clients[0].produce("t", payload, partition=1).error == flume.NONE, "there is memory for a frame"
        greedy.close()
        with ThreadPoolExecutor(len(clients)) as pool:
            answers = list(pool.map(lambda client: client.fetch("t", 0, 0, 0x7FFFFFFF), clients))
        assert all(len(answer.records) == 8 for answer in answers)
        assert all(record == payload for _, record in answers[-1].records)
        large = flume.request(flume.PRODUCE, 1, flume.produce_payload("t", bytes(40 << 20)))
        clients[1].socket.settimeout(5)
        with pytest.raises((EOFError, OSError)):  # no memory for it: it costs its connection
            clients[1].socket.sendall(large)
            clients[1].receive()
        assert clients[2].produce("t", payload, partition=2).error == flume.NONE
