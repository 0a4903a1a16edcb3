"""Bounds and the finer points of the protocol, with a client that does what no library does."""

from __future__ import annotations

import contextlib
import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from millstream.core.errors import Code
from millstream.testing.held_port import HeldPort
from tests.compat import raw
from tests.compat.clients import wait_for
from tests.compat.raw import Raw
from tests.serving import MILLSTREAM, ServedBroker

Unique = Callable[[str], str]
MB = 1 << 20


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedBroker]:
    """A broker of its own, for tests that measure its memory."""
    with ServedBroker(tmp_path / "data") as broker:
        yield broker


@pytest.fixture
def topic(broker: ServedBroker, unique: Unique) -> str:
    name = unique("limits")
    raw.create_topic(broker.address, name)
    return name


def rss(broker: ServedBroker) -> int:
    return int(psutil.Process(broker.pid).memory_info().rss)


def settled_rss(broker: ServedBroker) -> int:
    """Once it stopped changing."""
    readings = [rss(broker)]

    def is_steady() -> bool:
        time.sleep(0.1)
        readings.append(rss(broker))
        return len(readings) > 4 and max(readings[-4:]) - min(readings[-4:]) < 256 << 10

    wait_for(is_steady, "memory that stays the same")
    return readings[-1]


# -- size and speed ----------------------------------------------------------------------------------------------------


def test_a_thousand_idle_connections_and_a_thousand_partitions_cost_ten_megabytes_at_most(served: ServedBroker) -> None:
    raw.create_topic(served.address, "warm-up", 2)
    with Raw(served.address) as connection:
        assert (
            connection.ask(raw.produce("warm-up", raw.batch(b"x"))).responses[0].partition_responses[0].error_code == 0
        )
        connection.ask(raw.fetch("warm-up", 0))
        connection.ask(raw.request(3, 4, {"topics": None, "allow_auto_topic_creation": False}))
    before = settled_rss(served)
    with contextlib.ExitStack() as stack:
        for number in range(10):
            raw.create_topic(served.address, f"many-{number}", 100)
        partitions = settled_rss(served) - before
        connections = [stack.enter_context(Raw(served.address)) for _ in range(1000)]
        for connection in connections:
            connection.send(raw.request(18, 0, {}))
        for connection in connections:
            assert connection.answer(18, 0).error_code == 0
        grown = settled_rss(served) - before
        print(
            f"\n1,000 partitions: {partitions / MB:.1f} MB, "
            f"with 1,000 connections: {grown / MB:.1f} MB of {before / MB:.0f} MB"
        )
        assert grown <= 10 * MB


def test_the_first_record_is_acknowledged_soon_after_the_start(tmp_path: Path) -> None:
    """Half a second on a machine of its own. Judged by CPU time, as a ratio to what a Python costs that has only the
    event loop: how long a start takes by the clock, or how much a second is worth, is up to whatever else runs.
    """
    runs = [(_seconds_to_first_record(tmp_path / str(number)), _seconds_to_an_event_loop()) for number in range(3)]
    wall, cpu = min(wall for (wall, _), _ in runs), min(cpu for (_, cpu), _ in runs)
    print(f"\nfrom the start of the process to the first acknowledged record: {wall:.2f} s, {cpu:.2f} s of CPU")
    assert min(cpu / reference for (_, cpu), reference in runs) < 4.0


def _seconds_to_an_event_loop() -> float:
    process = subprocess.Popen(
        [sys.executable, "-c", "import asyncio, sqlite3, uvloop"], env={**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    )
    used = os.wait4(process.pid, 0)[2]
    process.returncode = 0  # it has been waited for
    return used.ru_utime + used.ru_stime


def _seconds_to_first_record(directory: Path) -> tuple[float, float]:
    """A producer that waits for the port, with a client's requests: metadata, which creates the topic, and produce."""
    with HeldPort() as held:
        return _seconds_to_first_record_at(held.address, directory)


def _seconds_to_first_record_at(address: str, directory: Path) -> tuple[float, float]:
    metadata = raw.request(3, 4, {"topics": [{"name": "first"}], "allow_auto_topic_creation": True})
    produce = raw.produce("first", raw.batch(b"hello"))
    started = time.perf_counter()
    process = subprocess.Popen(
        [MILLSTREAM, "serve", "--data", str(directory), "--kafka", address, "--http", "127.0.0.1:0"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "MILLSTREAM_LOG_FORMAT": "text", "PYTHONDONTWRITEBYTECODE": ""},  # as a user's second start
    )
    try:
        connection = _connect_when_open(address)
        with connection:
            assert connection.ask(metadata).topics[0].error_code == 0
            assert connection.ask(produce).responses[0].partition_responses[0].error_code == 0
            spent = psutil.Process(process.pid).cpu_times()
            return time.perf_counter() - started, spent.user + spent.system
    finally:
        process.terminate()
        process.wait(30)


def _connect_when_open(address: str) -> Raw:
    end = time.monotonic() + 30
    while True:
        try:
            return Raw(address)
        except ConnectionRefusedError:
            assert time.monotonic() < end, "the broker did not open its port"
            time.sleep(0.002)


# -- slow and greedy clients -------------------------------------------------------------------------------------------


def test_a_consumer_that_never_reads_its_answers_costs_little(served: ServedBroker) -> None:
    raw.create_topic(served.address, "large")
    with Raw(served.address) as producer:
        for _ in range(20):
            answer = producer.ask(raw.produce("large", raw.batch(os.urandom(900_000))))
            assert answer.responses[0].partition_responses[0].error_code == 0
    before = settled_rss(served)
    with contextlib.ExitStack() as stack:
        for _ in range(50):
            greedy = stack.enter_context(Raw(served.address))
            greedy.socket.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                greedy.socket.send(raw.fetch("large", 0, bytes_max=50 * MB) * 200)
        _answers_others(served)
        assert settled_rss(served) - before < 16 * MB


def test_answers_that_nobody_reads_are_not_made(served: ServedBroker) -> None:
    """A few bytes ask for a long answer, thousands of times in one write."""
    for number in range(5):
        raw.create_topic(served.address, f"wide-{number}", 200)
    before = settled_rss(served)
    with contextlib.ExitStack() as stack:
        for _ in range(10):
            greedy = stack.enter_context(Raw(served.address))
            greedy.socket.setblocking(False)
            everything = raw.request(3, 1, {"topics": None})
            for _ in range(3):
                with contextlib.suppress(BlockingIOError):
                    greedy.socket.send(everything * 8000)
            _answers_others(served)
        assert settled_rss(served) - before < 32 * MB


def test_answers_behind_a_produce_that_waits_are_not_piled_up(served: ServedBroker) -> None:
    for number in range(5):
        raw.create_topic(served.address, f"wide-{number}", 200)
    before = settled_rss(served)
    everything = raw.request(3, 1, {"topics": None})
    with contextlib.ExitStack() as stack:
        for _ in range(10):
            greedy = stack.enter_context(Raw(served.address))
            greedy.socket.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                greedy.socket.send(raw.produce("wide-0", raw.batch(b"x")) + everything * 8000)
            _answers_others(served)
        assert settled_rss(served) - before < 32 * MB


def _answers_others(broker: ServedBroker) -> None:
    with Raw(broker.address) as other:
        assert other.ask(raw.request(18, 0, {})).error_code == 0


def test_every_answer_arrives_in_order_however_slowly_it_is_read(served: ServedBroker) -> None:
    """The same greed, but read in the end: nothing was lost or left out."""
    raw.create_topic(served.address, "wide", 500)
    count = 3000
    frames = b"".join(raw.request(3, 1, {"topics": None}, number) for number in range(count))
    with Raw(served.address) as slow:
        sender = threading.Thread(target=slow.send, args=(frames,))
        sender.start()
        for number in range(count):
            assert struct.unpack_from(">i", slow.receive()) == (number,)
        sender.join(30)


def test_large_frames_that_fill_the_memory_give_way_to_others(tmp_path: Path) -> None:
    """Each holds a part of the budget and waits for more: one must lose its memory, or all would wait forever."""
    config = tmp_path / "millstream.toml"
    config.write_text("inflight_bytes_max = 8388608\n")
    with ServedBroker(tmp_path / "data", "--config", str(config)) as served:
        raw.create_topic(served.address, "orders")
        with contextlib.ExitStack() as stack:
            for _ in range(12):
                greedy = stack.enter_context(Raw(served.address))
                greedy.socket.settimeout(0.2)
                with contextlib.suppress(OSError):
                    greedy.socket.sendall(struct.pack(">i", 50 * MB) + bytes(6 * MB))
            with Raw(served.address) as other:
                answer = other.ask(raw.produce("orders", raw.batch(os.urandom(600_000))))
                assert answer.responses[0].partition_responses[0].error_code == 0


# -- produce -----------------------------------------------------------------------------------------------------------


def produced(link: Raw, data: bytes) -> Any:
    return link.ask(data).responses[0].partition_responses[0]


def test_acks_0_is_stored_and_not_answered(link: Raw, topic: str) -> None:
    for number in range(10):
        link.send(raw.produce(topic, raw.batch(b"%d" % number), acks=0))
    assert link.ask(raw.request(18, 0, {})).error_code == 0, "the next answer belongs to the next request"
    assert produced(link, raw.produce(topic, raw.batch(b"last"))).base_offset == 10


def test_acks_0_with_a_batch_that_is_refused_costs_the_connection(link: Raw, topic: str) -> None:
    link.send(raw.produce(topic, b"nonsense", acks=0))
    assert link.receive() == b""


@pytest.mark.parametrize("version", [3, 8, 9, 12])
def test_bad_batches_are_refused_with_the_error_that_says_why(version: int, link: Raw, topic: str) -> None:
    sound = raw.batch(b"hello" * 10)
    flipped = sound[:-1] + bytes([sound[-1] ^ 1])
    old = sound[:16] + b"\1" + sound[17:]
    control = raw.batch(b"x", attributes=0x20)
    transactional = raw.batch(b"x", producer_id=1, producer_epoch=0, base_sequence=0, attributes=0x10)
    refused = {
        "bad checksum": (flipped, Code.CORRUPT_MESSAGE),
        "cut short": (sound[:-3], Code.CORRUPT_MESSAGE),
        "two batches": (sound + sound, Code.CORRUPT_MESSAGE),
        "too large": (raw.batch(bytes(1_100_000)), Code.MESSAGE_TOO_LARGE),
        "wrong magic": (old, Code.UNSUPPORTED_FOR_MESSAGE_FORMAT),
        "control": (control, Code.INVALID_RECORD),
        "transactional": (transactional, Code.INVALID_RECORD),
        "nothing": (None, Code.INVALID_RECORD),
        "no epoch": (raw.batch(b"x", producer_id=1), Code.INVALID_RECORD),
    }
    for name, (records, code) in refused.items():
        answer = produced(link, raw.produce(topic, records, version=version))
        assert answer.error_code == code, name
        assert answer.base_offset == -1
    assert produced(link, raw.produce(topic, sound, version=version)).base_offset == 0


def test_unknown_topics_and_partitions_are_refused(link: Raw, topic: str, unique: Unique) -> None:
    sound = raw.batch(b"x")
    assert produced(link, raw.produce(unique("nowhere"), sound)).error_code == Code.UNKNOWN_TOPIC_OR_PARTITION
    for partition in (1, -1, 0x7FFF_FFFF):
        answer = produced(link, raw.produce(topic, sound, partition=partition))
        assert answer.error_code == Code.UNKNOWN_TOPIC_OR_PARTITION


def test_acks_that_do_not_exist_are_refused_every_time(link: Raw, topic: str) -> None:
    for _ in range(3):
        answer = produced(link, raw.produce(topic, raw.batch(b"x"), acks=2))
        assert answer.error_code == Code.INVALID_REQUIRED_ACKS
    assert produced(link, raw.produce(topic, raw.batch(b"x"))).base_offset == 0


def test_a_repeated_batch_of_an_idempotent_producer_is_stored_once(link: Raw, topic: str) -> None:
    ids = {"producer_id": link.ask(raw.request(22, 4, init_producer())).producer_id, "producer_epoch": 0}
    batches = [raw.batch(b"%d" % number, base_sequence=number, **ids) for number in range(6)]
    offsets = [produced(link, raw.produce(topic, one)).base_offset for one in batches]
    assert offsets == list(range(6))
    assert [produced(link, raw.produce(topic, one)).base_offset for one in batches[1:]] == offsets[1:]
    too_old = produced(link, raw.produce(topic, batches[0]))
    assert too_old.error_code == Code.OUT_OF_ORDER_SEQUENCE_NUMBER
    skipping = produced(link, raw.produce(topic, raw.batch(b"x", base_sequence=9, **ids)))
    assert skipping.error_code == Code.OUT_OF_ORDER_SEQUENCE_NUMBER
    newer = raw.batch(b"x", base_sequence=0, producer_id=ids["producer_id"], producer_epoch=1)
    assert produced(link, raw.produce(topic, newer)).base_offset == 6
    fenced = produced(link, raw.produce(topic, raw.batch(b"x", base_sequence=6, **ids)))
    assert fenced.error_code == Code.INVALID_PRODUCER_EPOCH


def init_producer(transactional_id: str | None = None) -> dict[str, Any]:
    return {
        "transactional_id": transactional_id,
        "transaction_timeout": 60_000,
        "producer_id": -1,
        "producer_epoch": -1,
    }


def test_a_transactional_producer_is_refused(link: Raw) -> None:
    answer = link.ask(raw.request(22, 4, init_producer("tx")))
    assert answer.error_code == Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED and answer.producer_id == -1


# -- fetch -------------------------------------------------------------------------------------------------------------


def test_pipelined_produce_requests_are_answered_in_order_at_consecutive_offsets(link: Raw, topic: str) -> None:
    frames = [raw.produce(topic, raw.batch(b"%d" % number)) for number in range(500)]
    link.send(b"".join(frames))
    answers = [link.answer(0, 9).responses[0].partition_responses[0] for _ in frames]
    assert [answer.base_offset for answer in answers] == list(range(500))


def test_a_waiting_fetch_wakes_on_the_append_long_before_its_time_is_over(
    broker: ServedBroker, link: Raw, topic: str
) -> None:
    link.send(raw.fetch(topic, 0, wait_ms=20_000))
    with Raw(broker.address) as producer:
        link.socket.settimeout(0.2)
        with pytest.raises(TimeoutError):
            link.receive()
        link.socket.settimeout(20)
        produced(producer, raw.produce(topic, raw.batch(b"at last")))
        started = time.monotonic()
        answer = link.answer(1, 11)
    assert time.monotonic() - started < 10, "its time is 20 s"
    assert b"at last" in answer.responses[0].partitions[0].records


def test_a_fetch_with_nothing_to_give_answers_when_its_time_is_over(link: Raw, topic: str) -> None:
    started = time.monotonic()
    answer = link.ask(raw.fetch(topic, 0, wait_ms=300))
    assert 0.29 < time.monotonic() - started < 10
    assert not answer.responses[0].partitions[0].records


def test_a_client_that_goes_while_its_fetch_waits_is_noticed(served: ServedBroker) -> None:
    raw.create_topic(served.address, "quiet")
    process = psutil.Process(served.pid)
    wait_for(lambda: len(process.net_connections()) <= 2, "no connection", pause=0.02)
    before = process.num_fds()
    connections = [Raw(served.address) for _ in range(20)]
    for connection in connections:
        connection.send(raw.fetch("quiet", 0, wait_ms=60_000))
    wait_for(lambda: process.num_fds() >= before + 20, "twenty connections", pause=0.02)
    for connection in connections:
        connection.close()
    wait_for(lambda: process.num_fds() <= before, "descriptors that are closed", pause=0.02)


def test_a_fetch_is_cut_at_whole_batches_and_gives_at_least_one(link: Raw, topic: str) -> None:
    one = raw.batch(b"x" * 1000)
    for _ in range(5):
        produced(link, raw.produce(topic, one))
    for bytes_max, whole in ((1, 1), (len(one), 1), (len(one) * 2 + 10, 2), (MB, 5)):
        records = link.ask(raw.fetch(topic, 0, bytes_max=bytes_max)).responses[0].partitions[0].records
        assert len(records) == whole * len(one)


def test_an_answer_has_a_largest_size_whatever_the_client_allows(link: Raw, topic: str) -> None:
    produced(link, raw.produce(topic, raw.batch(os.urandom(1_000_000))))
    one = {"partition": 0, "fetch_offset": 0, "partition_max_bytes": 0x7FFF_FFFF}
    topics = [{"topic": topic, "partitions": [one] * 80}]
    fields = {"replica_id": -1, "max_wait": 0, "min_bytes": 1, "max_bytes": 0x7FFF_FFFF, "isolation_level": 0}
    link.send(raw.request(1, 4, {**fields, "topics": topics}))
    assert 50 * MB < len(link.receive()) < 56 * MB


@pytest.mark.parametrize("offset", [-1, 1, 1 << 62, -(1 << 63)])
def test_an_offset_outside_the_log_is_refused_at_once(offset: int, link: Raw, topic: str) -> None:
    answer = link.ask(raw.fetch(topic, offset, wait_ms=10_000)).responses[0].partitions[0]
    assert answer.error_code == Code.OFFSET_OUT_OF_RANGE


def test_an_incremental_session_tells_only_news(link: Raw, topic: str) -> None:
    first = link.ask(raw.fetch(topic, 0, session=(0, 0)))
    session = first.session_id
    assert session > 0 and len(first.responses) == 1
    quiet = link.ask(raw.fetch(topic, 0, session=(session, 1), is_named=False))
    assert quiet.session_id == session and quiet.responses == ()
    produced(link, raw.produce(topic, raw.batch(b"news")))
    news = link.ask(raw.fetch(topic, 0, session=(session, 2), is_named=False))
    assert b"news" in news.responses[0].partitions[0].records
    moved = link.ask(raw.fetch(topic, 1, session=(session, 3)))
    assert moved.responses == (), "it asked for what comes next, and nothing came"
    forgotten = [{"topic": topic, "partitions": [0]}]
    link.ask(raw.fetch(topic, 1, session=(session, 4), forgotten=forgotten, is_named=False))
    produced(link, raw.produce(topic, raw.batch(b"not for us")))
    assert link.ask(raw.fetch(topic, 1, session=(session, 5), is_named=False)).responses == ()


def test_a_session_that_is_not_known_or_out_of_step_starts_over(link: Raw, topic: str) -> None:
    unknown = link.ask(raw.fetch(topic, 0, session=(0x7FFF_0000, 1)))
    assert unknown.error_code == Code.FETCH_SESSION_ID_NOT_FOUND
    session = link.ask(raw.fetch(topic, 0, session=(0, 0))).session_id
    ahead = link.ask(raw.fetch(topic, 0, session=(session, 5)))
    assert ahead.error_code == Code.INVALID_FETCH_SESSION_EPOCH
    closing = link.ask(raw.fetch(topic, 0, session=(session, -1)))
    assert closing.error_code == 0 and closing.session_id == 0
    gone = link.ask(raw.fetch(topic, 0, session=(session, 1)))
    assert gone.error_code == Code.FETCH_SESSION_ID_NOT_FOUND
