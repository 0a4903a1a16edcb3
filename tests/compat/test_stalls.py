"""Small requests that ask for much work: the event loop serves the other clients meanwhile.

Judged by the CPU time of the loop's thread (`core/loop_watch.py`), so that a busy machine makes no difference.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from time import sleep
from typing import Any

import psutil
import pytest

from millstream.core.errors import Code
from millstream.core.loop_watch import BEAT_SECONDS, BUSY_SECONDS_MAX
from millstream.records.batch import read_header
from millstream.records.compression import Codec
from millstream.wire.flowmq import Command, frame
from tests import stores
from tests.bombs import empty_headers, empty_records
from tests.compat import client_flume, raw
from tests.compat.client_flowmq import FlowmqClient
from tests.compat.client_flume import Flume
from tests.compat.client_luxun import Luxun
from tests.compat.raw import Raw
from tests.in_thread import BrokerInThread

DOORS = dict.fromkeys(("flowmq", "flume", "luxun"), "127.0.0.1:0")
HEADERS = 20_000_000
"""40 MB of them are a kilobyte with Zstandard."""
RSS_GROWTH_MAX = 700 << 20


@pytest.fixture(params=["file", "memory", "sqlite"])
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BrokerInThread]:
    url = stores.store_url(request.param, tmp_path, request)
    with BrokerInThread(tmp_path, store=url, **DOORS) as started:
        warm(started)
        yield started


@pytest.fixture
def files(tmp_path: Path) -> Iterator[BrokerInThread]:
    with BrokerInThread(tmp_path, **DOORS) as started:
        warm(started)
        yield started


def warm(broker: BrokerInThread) -> None:
    """What is imported at its first use is no stall of the request that comes next."""
    with Raw(broker.address("kafka")) as client:
        raw.create_topic(broker.address("kafka"), "warm")
        produce(client, "warm", empty_headers(1))
        list_offset(client, "warm", 0)


@contextlib.contextmanager
def responsive(broker: BrokerInThread) -> Iterator[None]:
    """The event loop is never held for longer than the bound, and memory does not explode."""

    def reset(server: Any) -> None:
        server.metrics.loop_busy_seconds_max = 0.0

    broker.ask(reset)
    process = psutil.Process()
    before = process.memory_info().rss
    yield
    broker._wait(asyncio.sleep(3 * BEAT_SECONDS))  # the beat that tells
    busy = broker.ask(lambda server: server.metrics.loop_busy_seconds_max)
    assert busy <= BUSY_SECONDS_MAX, f"the event loop was held for {busy:.3f} s"
    assert process.memory_info().rss - before < RSS_GROWTH_MAX


def produce(client: Raw, topic: str, batch: bytes) -> int:
    answer = client.ask(raw.produce(topic, batch))
    return int(answer.responses[0].partition_responses[0].error_code)


def list_offset(client: Raw, topic: str, timestamp: int) -> tuple[int, int]:
    """Error and offset, as `KafkaConsumer.offsetsForTimes` asks."""
    one = {"partition_index": 0, "current_leader_epoch": -1, "timestamp": timestamp}
    topics = [{"name": topic, "partitions": [one]}]
    answer = client.ask(raw.request(2, 7, {"replica_id": -1, "isolation_level": 0, "topics": topics}))
    found = answer.topics[0].partitions[0]
    return int(found.error_code), int(found.offset)


@pytest.mark.parametrize("compression", [Codec.ZSTD, Codec.GZIP], ids=["zstd", "gzip"])
def test_a_time_look_up_in_a_batch_of_empty_headers_holds_up_nobody(broker: BrokerInThread, compression: Codec) -> None:
    address = broker.address("kafka")
    raw.create_topic(address, "orders")
    bomb = empty_headers(HEADERS, compression)
    assert len(bomb) < 100_000
    with Raw(address) as client:
        assert produce(client, "orders", bomb) == Code.NONE
        with responsive(broker):
            assert list_offset(client, "orders", 1) == (Code.NONE, 0)
            assert list_offset(client, "orders", -3) == (Code.NONE, 0)


def test_a_batch_beyond_every_bound_is_an_error_of_its_partition(files: BrokerInThread) -> None:
    address = files.address("kafka")
    raw.create_topic(address, "orders")
    with Raw(address) as client:
        assert produce(client, "orders", empty_headers(150_000_000)) == Code.NONE  # 300 MB
        with responsive(files):
            assert list_offset(client, "orders", 1) == (Code.CORRUPT_MESSAGE, -1)


BOMBS = {
    "headers": lambda: empty_headers(HEADERS),
    "records": lambda: empty_records(1_500_000),
}


@pytest.mark.parametrize("make", BOMBS.values(), ids=BOMBS)
def test_doors_that_give_out_records_are_not_held_up_by_a_bomb(
    files: BrokerInThread, generated: tuple[Any, Any], make: Callable[[], bytes]
) -> None:
    address = files.address("kafka")
    raw.create_topic(address, "orders", max_message_bytes="10000000", group_share_auto_offset_reset="earliest")
    with Raw(address) as client:
        assert produce(client, "orders", make()) == Code.NONE
        assert produce(client, "orders", raw.batch(b"after")) == Code.NONE
    with responsive(files):
        with Flume(files.address("flume")) as flume:
            assert not flume.fetch("orders", 0, 0).records
        with Luxun(files.address("luxun"), generated) as luxun:
            assert not luxun.consume("orders", index=0, size=1000).itemList
        with FlowmqClient(files.address("flowmq")) as flowmq:
            flowmq.subscribe("orders", "workers")
            assert flowmq.ping(b"still here") == b"still here"


def kafka_heartbeat() -> bytes:
    return raw.request(12, 1, {"group_id": "g", "generation_id": 1, "member_id": "m"})


def kafka_committed() -> bytes:
    return raw.request(9, 1, {"group_id": "g", "topics": [{"name": "warm", "partition_indexes": [0]}]})


PIPELINED = {
    "kafka api versions": ("kafka", lambda: raw.request(18, 0, {})),
    "kafka heartbeat": ("kafka", kafka_heartbeat),
    "kafka offset fetch": ("kafka", kafka_committed),
    "flume heartbeat": (
        "flume",
        lambda: client_flume.request(4, 1, client_flume.string("g") + bytes(4) + client_flume.string("m")),
    ),
    "flume fetch": ("flume", lambda: client_flume.request(1, 1, client_flume.fetch_payload("warm", 0, 0))),
    "flowmq ack": ("flowmq", lambda: frame(Command.ACK, b"x")),
    "flowmq list": ("flowmq", lambda: frame(Command.LIST_TOPICS)),
}


@pytest.mark.parametrize(("door", "make"), PIPELINED.values(), ids=PIPELINED)
def test_thousands_of_small_requests_in_one_piece_leave_turns_to_others(
    files: BrokerInThread, door: str, make: Callable[[], bytes]
) -> None:
    """As much as fits into the door's receive buffer, and the answers to all of it."""
    one = make()
    count = (256 << 10) // len(one)
    with Raw(files.address(door)) as client:
        client.socket.settimeout(60)
        client.send(one)
        left = len(client.socket.recv(1 << 16)) * count
        with responsive(files), ThreadPoolExecutor(1) as pool:
            sent = pool.submit(client.send, one * count)
            while left > 0:
                left -= len(client.socket.recv(1 << 16))
            sent.result()


def test_many_clients_with_thousands_of_small_requests_share_one_turn(files: BrokerInThread) -> None:
    """All are ready in the same turn of the event loop, which sleeps while they send."""
    one = kafka_heartbeat()
    count = (128 << 10) // len(one)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(Raw(files.address("kafka"))) for _ in range(16)]
        for client in clients:
            client.socket.settimeout(60)
            client.send(one)
            size = len(client.socket.recv(1 << 16))
        pool = stack.enter_context(ThreadPoolExecutor(len(clients)))
        with responsive(files):
            asleep = Event()

            def hold(_: object) -> None:
                asleep.set()
                sleep(0.5)

            held = pool.submit(files.ask, hold)
            asleep.wait(60)
            list(pool.map(lambda client: client.send(one * count), clients))
            held.result()

            def receive(client: Raw) -> None:
                left = size * count
                while left > 0:
                    left -= len(client.socket.recv(1 << 16))

            list(pool.map(receive, clients))


def test_a_batch_of_very_many_records_is_read_piece_by_piece(files: BrokerInThread, generated: tuple[Any, Any]) -> None:
    """Half a million records: within the bounds, and far too many for one turn of the loop."""
    address, count = files.address("kafka"), 500_000
    raw.create_topic(address, "orders", max_message_bytes="10000000", group_share_auto_offset_reset="earliest")
    with Raw(address) as client:
        assert produce(client, "orders", empty_records(count)) == Code.NONE
    with responsive(files):
        with Luxun(files.address("luxun"), generated) as luxun:
            assert len(luxun.consume("orders", index=count - 5, size=1000).itemList) == 5
        with Flume(files.address("flume")) as flume:
            assert flume.fetch("orders", 0, count - 1).records == [(count - 1, b"")]
        with FlowmqClient(files.address("flowmq")) as flowmq:
            flowmq.subscribe("orders", "workers")
            assert len(flowmq.take(3)) == 3


def test_a_record_of_64_mb_is_given_whole(files: BrokerInThread, generated: tuple[Any, Any]) -> None:
    address = files.address("kafka")
    raw.create_topic(address, "orders", max_message_bytes="10000000")
    with Raw(address) as client:
        assert produce(client, "orders", raw.batch(b"first", bytes(64 << 20), b"last", codec=Codec.GZIP)) == Code.NONE
    with responsive(files), Luxun(files.address("luxun"), generated) as luxun:
        for offset, item in ((0, b"first"), (2, b"last")):
            assert luxun.consume("orders", index=offset).itemList == [item]


def subscribe(client: Raw, group: str, pattern: str, member: str, epoch: int = 0) -> Any:
    """ConsumerGroupHeartbeat as KafkaConsumer sends it for `subscribe(SubscriptionPattern)`."""
    beat = {
        "group_id": group,
        "member_id": member,
        "member_epoch": epoch,
        "instance_id": None,
        "rack_id": None,
        "rebalance_timeout": 300_000,
        "subscribed_topic_names": None,
        "subscribed_topic_regex": pattern,
        "server_assignor": None,
        "topic_partitions": [],
    }
    return client.ask(raw.request(68, 1, beat))


def test_a_costly_topic_pattern_holds_up_nobody(tmp_path: Path) -> None:
    """Topics with long names, and one more: only that is matched then."""
    pattern = "(.*a.{20}|.*b.{30}|.*c.{40}|.*d.{50}){2}z"
    names = ["".join(random.Random(at).choices("abcdef-.", k=240)) for at in range(201)]
    with BrokerInThread(tmp_path, store="memory:") as broker:
        warm(broker)
        address = broker.address("kafka")
        for name in names[1:]:
            raw.create_topic(address, name)
        with Raw(address) as client, responsive(broker):
            answer = subscribe(client, "watchers", pattern, str(uuid.uuid4()))
            assert answer.error_code == Code.NONE
            raw.create_topic(address, names[0])
            assert subscribe(client, "watchers", pattern, answer.member_id, answer.member_epoch).error_code == Code.NONE
            refused = subscribe(client, "watchers", "(.*a.{300}){2}", str(uuid.uuid4()))
            assert refused.error_code == Code.INVALID_REGULAR_EXPRESSION and "500 states" in refused.error_message


def fill_with_small_batches(broker: BrokerInThread, topic: str, partition: int, count: int) -> None:
    """Straight into the log: a client would need a request for each."""
    small = raw.batch(b"")

    def fill(server: Any) -> None:
        log = server.broker.topics.get(topic).partitions[partition].log
        for _ in range(count):
            data = bytearray(small)
            log.append(memoryview(data), read_header(data))

    broker.ask(fill)


def fetch_all(
    client: Raw, topic: str, offsets: dict[int, int], bytes_max: int = 50 << 20
) -> dict[int, tuple[int, int]]:
    """One Fetch of several partitions, as a KafkaConsumer sends it: error and bytes of each."""
    partitions = [
        {
            "partition": partition,
            "current_leader_epoch": -1,
            "fetch_offset": offset,
            "log_start_offset": -1,
            "partition_max_bytes": bytes_max,
        }
        for partition, offset in offsets.items()
    ]
    fields = {
        "replica_id": -1,
        "max_wait": 500,
        "min_bytes": 1,
        "max_bytes": 50 << 20,
        "isolation_level": 0,
        "session_id": 0,
        "session_epoch": -1,
        "topics": [{"topic": topic, "partitions": partitions}],
        "forgotten_topics_data": [],
        "rack_id": "",
    }
    [answer] = client.ask(raw.request(1, 11, fields)).responses
    return {int(one.partition_index): (int(one.error_code), len(one.records or b"")) for one in answer.partitions}


def test_a_fetch_over_60_cold_partitions_holds_up_nobody(tmp_path: Path) -> None:
    """A quarter of a megabyte of the smallest batches in each: 4000 checksums."""
    with BrokerInThread(tmp_path) as broker:
        raw.create_topic(broker.address("kafka"), "orders", 60)
        for partition in range(60):
            fill_with_small_batches(broker, "orders", partition, 4000)
    with BrokerInThread(tmp_path) as broker:
        warm(broker)
        with Raw(broker.address("kafka")) as client, responsive(broker):
            got = fetch_all(client, "orders", dict.fromkeys(range(60), 0), 1 << 20)
        assert set(got) == set(range(60)) and all(code == Code.NONE and size > 250_000 for code, size in got.values())


LARGE = 600_000
"""Batches of 70 bytes."""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of a broker with one large segment of small batches."""
    directory = tmp_path_factory.mktemp("large")
    with BrokerInThread(directory) as broker:
        raw.create_topic(broker.address("kafka"), "orders")
        fill_with_small_batches(broker, "orders", 0, LARGE)
    return directory


DAMAGES: dict[str, Callable[[bytearray, int], None]] = {
    "a few kilobytes in the middle": lambda data, size: data.__setitem__(
        slice(size // 2, size // 2 + 8000), bytes(8000)
    ),
    "the second half zeroed": lambda data, size: data.__setitem__(slice(size // 2, size), bytes(size - size // 2)),
}


@pytest.mark.parametrize("is_indexed", [True, False], ids=["indexed", "not indexed"])
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_large_damaged_segment_holds_up_nobody(
    tmp_path: Path, large: Path, damage: Callable[[bytearray, int], None], is_indexed: bool
) -> None:
    shutil.copytree(large, tmp_path, dirs_exist_ok=True)
    [segment] = tmp_path.glob("logs/orders-*/0/*.log")
    data = bytearray(segment.read_bytes())
    damage(data, len(data))
    segment.write_bytes(data)
    if not is_indexed:
        segment.with_suffix(".index").unlink()
    with BrokerInThread(tmp_path) as broker:
        warm(broker)
        with Raw(broker.address("kafka")) as client, responsive(broker):
            codes = {fetch_all(client, "orders", {0: offset})[0][0] for offset in (LARGE // 2 + 5, 0, LARGE - 1)}
            assert Code.CORRUPT_MESSAGE in codes and Code.NONE in codes
            list_offset(client, "orders", 1)


def test_a_large_read_from_a_database_holds_up_nobody(tmp_path: Path) -> None:
    with BrokerInThread(tmp_path, store=f"sqlite:{tmp_path / 'store.db'}") as broker:
        warm(broker)
        raw.create_topic(broker.address("kafka"), "orders")
        fill_with_small_batches(broker, "orders", 0, LARGE // 2)
        with Raw(broker.address("kafka")) as client:
            while list_offset(client, "orders", -1)[1] < LARGE // 2:
                pass
            with responsive(broker):
                assert fetch_all(client, "orders", {0: 0})[0][1] > 15_000_000
