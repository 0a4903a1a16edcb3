"""Frames that no client sends, on a live port: no crash, no growth, and no effect on other clients."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, Producer, TopicPartition
from crc32c import crc32c
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millstream.doors.kafka.apis import APIS
from millstream.records import batch as batches
from millstream.wire.kafka import messages
from tests import confluent
from tests.compat import raw
from tests.compat.random_messages import Maker
from tests.compat.raw import Raw
from tests.compat.share_frames import topic_id
from tests.serving import ServedBroker

FRAMES = [10_000, pytest.param(100_000, marks=pytest.mark.slow)]
THREADS = 4
FRAMES_A_TURN = 1000
"""Of each thread; every turn begins with other valid requests."""
PIPELINED = 24
RSS_GROWTH_MAX = 64 << 20
BUSY_SECONDS_MAX = 0.1
"""Of CPU time for one request."""
TOPIC_IDS: list[uuid.UUID] = []
"""Of the topics that are attacked."""
HUGE = [struct.pack(">i", number) for number in (0x7FFF_FFFF, -1, -0x8000_0000, 1 << 24, 0x0FFF_FFFF)]
HUGE += [
    b"\xff\xff\xff\xff\x0f",
    b"\xff\xff\xff\xff\x7f",
    b"\x80\x80\x80\x80\x00",
    b"\xff" * 11,
    b"\x7f\xff",
    b"\x80\x00",
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedBroker]:
    """With a bound on partitions that random CreateTopics requests reach soon."""
    directory = tmp_path_factory.mktemp("hostile")
    config = directory / "millstream.toml"
    config.write_text("partitions_max = 500\n")
    with ServedBroker(directory / "data", "--config", str(config)) as served:
        raw.create_topic(served.address, "orders", 3)
        raw.create_topic(served.address, "compacted", 1, cleanup_policy="compact")
        raw.create_topic(served.address, "precious", 1)
        TOPIC_IDS[:] = [topic_id(served.address, name) for name in ("orders", "compacted")]
        yield served


@pytest.fixture(autouse=True)
def unharmed(target: ServedBroker) -> Iterator[None]:
    """After every test here: the broker lives and answers, logged no unexpected error, and blocked no other client."""
    seen = len(target.errors())
    yield
    assert target.is_running
    with Raw(target.address) as other:
        assert other.ask(raw.request(18, 0, {})).error_code == 0
    busy = target.busy_seconds_max()
    assert busy <= BUSY_SECONDS_MAX, f"the event loop was held for {busy:.3f} s"
    log = target.errors()[seen:]
    assert "Traceback" not in log and "failed" not in log, log[max(log.find("Traceback") - 500, 0) :][:4000]


def hints() -> dict[str, list[Any]]:
    soon = [0, 1, 5]
    waits = [number * messages._MILLISECOND for number in soon]
    sound = raw.batch(b"value", key=b"key")
    return {
        "name": ["orders", "compacted"],
        "topic": ["orders", "compacted"],
        "topic_names": ["gone"],
        "topic_id": TOPIC_IDS,
        "resource_name": ["orders", "compacted", "sharers"],
        "resource_type": [2, 4, 32],
        "config_operation": [0, 1, 2, 3],
        "group_id": ["readers", "others", "sharers", "sharers"],
        "member_id": ["member-1", "member-2"],
        "member_epoch": [0, 0, 1, 2, -1],
        "share_session_epoch": [0, 0, 1, 2, -1],
        "subscribed_topic_names": ["orders"],
        "first_offset": [0, 1, 2],
        "last_offset": [0, 1, 2, 9],
        "acknowledge_types": [0, 1, 2, 3, 4],
        "max_records": [1, 10, 500],
        "start_offset": [0, 1],
        "groups": ["readers"],
        "group_ids": ["readers"],
        "groups_names": ["readers"],
        "protocol_type": ["consumer"],
        "partition": [0, 1, 2],
        "partition_index": [0, 1, 2],
        "partitions": [0, 1, 2],
        "index": [0, 1],
        "num_partitions": [1, 2],
        "max_wait": waits,
        "timeout": waits,
        "session_timeout": [6000 * messages._MILLISECOND],
        "rebalance_timeout": waits,
        "records": [sound, raw.batch(b"v" * 300, b"w"), damaged_inside(sound), b""],
        "acks": [-1, 1, 0],
    }


def damaged_inside(sound: bytes) -> bytes:
    """A batch whose header and checksum are right, around records that are not."""
    data = bytearray(sound)
    data[batches.HEADER_BYTES :] = bytes(255 - byte for byte in data[batches.HEADER_BYTES :])
    struct.pack_into(">I", data, 17, crc32c(memoryview(data)[batches.CRC_START :]))
    return bytes(data)


def recorded(seed: int) -> list[bytes]:
    """Valid requests of every API in every version."""
    maker = Maker(random.Random(seed), hints(), hinted_share=0.9)
    every = [(key, version) for key, api in APIS.items() for version in range(api.low, api.high + 1)]
    return [raw.frame(key, version, maker.request(key, version)) for key, version in every for _ in range(3)]


class Mutator:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._recorded = recorded(seed)
        self._maker = Maker(self._random, hints(), hinted_share=0.6)

    def frames(self, count: int) -> Iterator[bytes]:
        broken = (self._flip, self._flip, self._truncate, self._claim, self._insert, self._repeat, self._noise)
        ways = (*broken, self._wild, self._wild, self._wild)
        for _ in range(count):
            yield self._random.choice(ways)(bytearray(self._random.choice(self._recorded)))

    def _wild(self, data: bytearray) -> bytes:
        """Well formed, of the same kind, with values that make no sense together."""
        key, version = struct.unpack_from(">hh", data, 4)
        return raw.frame(key, version, self._maker.request(key, version))

    def _flip(self, data: bytearray) -> bytes:
        for _ in range(self._random.choice((1, 1, 2, 8))):
            data[self._random.randrange(4, len(data))] ^= 1 << self._random.randrange(8)
        return bytes(data)

    def _truncate(self, data: bytearray) -> bytes:
        """Cut short, with a length that fits, so that the frame is whole and its fields are not."""
        del data[self._random.randrange(5, len(data) + 1) :]
        return _with_length(data)

    def _claim(self, data: bytearray) -> bytes:
        """A huge or negative number where a length or a count may stand."""
        claim = self._random.choice(HUGE)
        at = self._random.randrange(4, len(data))
        data[at : at + len(claim)] = claim
        return _with_length(data)

    def _insert(self, data: bytearray) -> bytes:
        at = self._random.randrange(4, len(data))
        data[at:at] = self._random.randbytes(self._random.choice((1, 4, 100)))
        return _with_length(data)

    def _repeat(self, data: bytearray) -> bytes:
        """A part of the frame many times over, as deep as nesting can look."""
        start = self._random.randrange(4, len(data))
        part = data[start : start + self._random.choice((1, 2, 8, 40))]
        data[start:start] = part * self._random.choice((2, 30, 200))
        return _with_length(data)

    def _noise(self, data: bytearray) -> bytes:
        """Random bytes, behind a header that may be right."""
        keep = self._random.choice((4, 8, 12, 16))
        return _with_length(data[:keep] + self._random.randbytes(self._random.choice((0, 3, 50, 500))))


def _with_length(data: bytearray) -> bytes:
    data[:4] = struct.pack(">i", len(data) - 4)
    return bytes(data)


def attack(address: str, frames: list[bytes], pipelined: int = PIPELINED) -> None:
    """Sends all of them, many a connection. After a frame that cost its connection the next goes on with the rest."""
    host, _, port = address.rpartition(":")
    at = 0
    while at < len(frames):
        some = frames[at : at + pipelined]
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            answers = _send_and_count(connection, b"".join(some))
        at += min(answers + 1, len(some))


def _send_and_count(connection: socket.socket, data: bytes) -> int:
    """How many answers came until the broker closed, which it does when there is no more to read."""
    received = bytearray()
    with contextlib.suppress(OSError):  # closed while we were sending
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
    with contextlib.suppress(ConnectionError, TimeoutError):
        while more := connection.recv(1 << 18):
            received += more
    count = position = 0
    while position + 4 <= len(received):
        position += 4 + struct.unpack_from(">i", received, position)[0]
        count += 1
    return count


class Bystander:
    """A real client that produces and consumes while the others attack."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._stopping = threading.Event()
        self.sent = 0
        self.acknowledged = 0
        self.seen: list[int] = []
        self._threads = [threading.Thread(target=self._produce), threading.Thread(target=self._consume)]

    def __enter__(self) -> Bystander:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(60)

    def _produce(self) -> None:
        producer = Producer({"bootstrap.servers": self._address, "linger.ms": 1, "enable.idempotence": True})
        while not self._stopping.wait(0.005):
            producer.produce("precious", b"%d" % self.sent, on_delivery=self._delivered)
            self.sent += 1
            producer.poll(0)
        assert producer.flush(30) == 0

    def _delivered(self, error: object, message: object) -> None:
        assert error is None, error
        self.acknowledged += 1

    def _consume(self) -> None:
        consumer = Consumer({"bootstrap.servers": self._address, "group.id": "bystander", "enable.auto.commit": False})
        consumer.assign([TopicPartition("precious", 0, OFFSET_BEGINNING)])
        end = None
        while end is None or (len(self.seen) < self.sent and time.monotonic() < end):
            for message in consumer.consume(500, 0.1):
                assert message.error() is None, message.error()
                self.seen.append(int(confluent.value(message)))
            if end is None and self._stopping.is_set():
                end = time.monotonic() + 30
        consumer.close()


@pytest.mark.parametrize("frames", FRAMES)
@pytest.mark.timeout(240)
def test_hostile_frames_by_the_ten_thousand_harm_nobody(frames: int, target: ServedBroker) -> None:
    process = psutil.Process(target.pid)
    attack(target.address, recorded(0), pipelined=1)  # the first use of a message imports it: one import a turn
    before = process.memory_info().rss
    peak = before
    started = time.monotonic()
    turns = frames // (THREADS * FRAMES_A_TURN)
    with Bystander(target.address) as bystander, ThreadPoolExecutor(THREADS) as pool, _half_frames(target.address, 300):
        for turn in range(turns):
            waves = [list(Mutator(1000 * turn + number).frames(FRAMES_A_TURN)) for number in range(THREADS)]
            list(pool.map(lambda wave: attack(target.address, wave), waves))
            peak = max(peak, process.memory_info().rss)
    assert bystander.sent > 100
    assert bystander.acknowledged == bystander.sent
    assert bystander.seen == list(range(bystander.sent))
    took = time.monotonic() - started
    print(f"\n{frames} hostile frames in {took:.0f} s; {bystander.sent} records of a bystander, none lost")
    print(f"memory: {before >> 20} MB before, {peak >> 20} MB at most")
    assert peak - before < RSS_GROWTH_MAX


@contextlib.contextmanager
def _half_frames(address: str, count: int) -> Iterator[None]:
    """Connections that stop in the middle of a frame, and keep the broker waiting."""
    host, _, port = address.rpartition(":")
    with contextlib.ExitStack() as stack:
        for number in range(count):
            connection = stack.enter_context(socket.create_connection((host, int(port)), timeout=5))
            connection.sendall(struct.pack(">i", 1 << (10 + number % 16))[: 1 + number % 4] + bytes(number))
        yield


def test_a_frame_that_is_too_large_costs_its_connection_at_once(target: ServedBroker) -> None:
    for size in (0x7FFF_FFFF, (100 << 20) + 1, 0, -1, -0x8000_0000):
        with Raw(target.address) as connection:
            connection.send(struct.pack(">i", size) + bytes(20))
            assert connection.receive() == b""


def test_a_large_length_costs_no_memory_until_the_bytes_arrive(target: ServedBroker) -> None:
    process = psutil.Process(target.pid)
    before = process.memory_info().rss
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            connection = stack.enter_context(Raw(target.address))
            connection.send(struct.pack(">i", 99 << 20) + bytes(1000))
        with Raw(target.address) as other:
            assert other.ask(raw.request(18, 0, {})).error_code == 0
        assert process.memory_info().rss - before < 32 << 20


@pytest.mark.parametrize(
    ("key", "version", "body"),
    [
        pytest.param(1, 4, bytes(17) + struct.pack(">i", 900_000) + bytes(900_000 * 6), id="fetch of 900,000 topics"),
        pytest.param(3, 1, struct.pack(">i", 2_000_000) + bytes(4_000_000), id="metadata of 2,000,000 topics"),
        pytest.param(
            0,
            3,
            b"\xff\xff" + bytes(6) + struct.pack(">i", 800_000) + bytes(800_000 * 6),
            id="produce to 800,000 topics",
        ),
        pytest.param(15, 0, struct.pack(">i", 2_000_000) + bytes(4_000_000), id="describe 2,000,000 groups"),
        pytest.param(32, 1, struct.pack(">i", 700_000) + bytes(700_000 * 7), id="configs of 700,000 resources"),
        pytest.param(42, 0, struct.pack(">i", 3_000_000) + bytes(6_000_000), id="delete 3,000,000 groups"),
    ],
)
def test_a_request_for_more_than_there_can_be_is_refused(
    key: int, version: int, body: bytes, target: ServedBroker
) -> None:
    process = psutil.Process(target.pid)
    before = process.memory_info().rss
    with Raw(target.address) as connection:
        connection.send(raw.frame(key, version, body))
        assert connection.receive() == b""
    assert process.memory_info().rss - before < RSS_GROWTH_MAX


def test_naming_a_topic_many_times_does_not_multiply_the_answer(target: ServedBroker) -> None:
    with Raw(target.address) as connection:
        answer = connection.ask(raw.request(3, 1, {"topics": [{"name": "orders"}] * 50_000}))
        assert len(answer.topics) == 1
        resource = {"resource_type": 2, "resource_name": "orders", "configuration_keys": None}
        fields = {"resources": [resource] * 20_000, "include_synonyms": True, "include_documentation": True}
        assert len(connection.ask(raw.request(32, 4, fields)).results) == 1
        fields = {"topics": [{"name": "orders", "partition_indexes": [0] * 10_000}] * 2}
        (topic,) = connection.ask(raw.request(61, 0, fields)).topics
        assert len(topic.partitions) == 1


def test_names_as_long_as_a_string_can_be_are_refused_with_an_error_that_fits(target: ServedBroker) -> None:
    name = "n" * 0x7FFF
    with Raw(target.address) as connection:
        for version in (8, 9):
            answer = connection.ask(raw.produce(name, raw.batch(b"x"), version=version))
            assert answer.responses[0].partition_responses[0].error_code == 3
        wanted = {"name": name, "num_partitions": 1, "replication_factor": 1, "assignments": [], "configs": []}
        fields = {"topics": [wanted, wanted], "timeout": 1000, "validate_only": False}
        for version in (2, 7):
            answer = connection.ask(raw.request(19, version, fields))
            assert {topic.error_code for topic in answer.topics} == {42}
        resource = {"resource_type": 2, "resource_name": name, "configuration_keys": None, "configs": []}
        for key, version in ((32, 1), (33, 0), (44, 0)):
            fields = {"resources": [resource], "include_synonyms": False, "validate_only": False}
            connection.ask(raw.request(key, version, fields))


def test_records_that_are_garbage_inside_a_sound_batch_do_no_harm(target: ServedBroker, tmp_path: Path) -> None:
    """The broker does not decode batches when it appends them; later readers must survive them."""
    raw.create_topic(target.address, "garbage", 1)
    generator = random.Random(7)
    with Raw(target.address) as connection:
        for number in range(300):
            data = bytearray(raw.batch(b"v" * 50, key=b"k", timestamp_ms=generator.randrange(1 << 62)))
            data[batches.HEADER_BYTES :] = generator.randbytes(len(data) - batches.HEADER_BYTES)
            struct.pack_into(">h", data, batches.CRC_START, number % 5)
            struct.pack_into(
                ">qq", data, 27, generator.randrange(-(1 << 63), 1 << 63), generator.randrange(-(1 << 63), 1 << 63)
            )
            struct.pack_into(">I", data, 17, crc32c(memoryview(data)[batches.CRC_START :]))
            connection.ask(raw.produce("garbage", bytes(data)))
            connection.ask(raw.produce("compacted", bytes(data)))
            one = {"partition_index": 0, "current_leader_epoch": -1, "timestamp": generator.randrange(1 << 62)}
            for timestamp in (one["timestamp"], -3):
                topics = [{"name": "garbage", "partitions": [{**one, "timestamp": timestamp}]}]
                fields = {"replica_id": -1, "isolation_level": 0, "topics": topics, "timeout": 1000}
                assert connection.ask(raw.request(2, 7, fields)) is not None


def test_producers_with_strange_numbers_are_described(target: ServedBroker) -> None:
    raw.create_topic(target.address, "producers", 1, message_timestamp_after_max_ms=str((1 << 63) - 1))
    with Raw(target.address) as connection:
        for number in range(50):
            data = raw.batch(
                b"x",
                producer_id=(1 << 63) - 1 - number,
                producer_epoch=0x7FFF,
                base_sequence=0x7FFF_FFFF,
                timestamp_ms=1 << 61,
            )
            connection.ask(raw.produce("producers", data))
        answer = connection.ask(raw.request(61, 0, {"topics": [{"name": "producers", "partition_indexes": [0]}]}))
        assert len(answer.topics[0].partitions[0].active_producers) == 50


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=400),
            st.builds(
                lambda key, version, rest: _with_length(bytearray(4) + struct.pack(">hhi", key, version, 1) + rest),
                st.sampled_from(sorted(APIS)),
                st.integers(-1, 19),
                st.binary(max_size=300),
            ),
        ),
        max_size=8,
    ),
    st.data(),
)
def test_any_bytes_in_any_pieces_leave_the_broker_well(
    target: ServedBroker, parts: list[bytes], data: st.DataObject
) -> None:
    stream = b"".join(parts)
    cut = data.draw(st.integers(0, len(stream)))
    host, _, port = target.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(stream[:cut])
            connection.sendall(stream[cut:])
            connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError, TimeoutError):
            while connection.recv(1 << 16):
                pass
    assert target.is_running
