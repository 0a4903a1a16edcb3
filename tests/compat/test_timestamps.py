"""Timestamps that a topic does not take (KIP-937), and the answer that names the bad record (KIP-467)."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError, Message, Producer
from crc32c import crc32c

import millstream.sync
from millstream.core.errors import Code
from millstream.records import codec
from millstream.records.compression import Codec
from tests.bombs import empty_headers, empty_records
from tests.compat import raw
from tests.compat.raw import Raw
from tests.in_thread import BrokerInThread

HOUR = 3_600_000
FAR = 1 << 60


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerInThread]:
    with BrokerInThread(tmp_path) as started:
        raw.create_topic(started.address("kafka"), "orders")
        yield started


def batch(now: int, *ahead: int, key: bytes | None = None, **more: Any) -> bytes:
    """One record for each distance from the broker's clock."""
    return bytes(codec.encode([(0, now + each, key, b"x") for each in ahead], **more))


def produce(client: Raw, topic: str, records: bytes, version: int = 9) -> Any:
    return client.ask(raw.produce(topic, records, version=version)).responses[0].partition_responses[0]


@pytest.mark.parametrize("version", [8, 9, 11])
@pytest.mark.parametrize("codec", [Codec.NONE, Codec.GZIP])
def test_the_bad_record_is_named(broker: BrokerInThread, version: int, codec: Codec) -> None:
    """As KafkaProducer reads it: the record at `batch_index` fails with this message, its neighbours with another."""
    now = broker.clock.now_ms()
    with Raw(broker.address("kafka")) as client:
        answer = produce(client, "orders", batch(now, 0, 1, FAR, HOUR, codec=codec), version)
        assert answer.error_code == Code.INVALID_TIMESTAMP and answer.base_offset == -1
        (named,) = answer.record_errors
        assert named.batch_index == 2
        assert str(now + FAR) in named.batch_index_error_message and str(now + HOUR) in named.batch_index_error_message
        assert answer.error_message == named.batch_index_error_message
        assert produce(client, "orders", batch(now, HOUR), version).base_offset == 0


def test_runs_of_small_requests_keep_the_rule(broker: BrokerInThread) -> None:
    """Requests of known shape that arrive together go another way: the third of five is refused, alone."""
    now = broker.clock.now_ms()
    with Raw(broker.address("kafka")) as client:
        assert produce(client, "orders", batch(now, 0)).error_code == 0
        ahead = [0, 0, HOUR + 1, 0, 0]
        client.send(b"".join(raw.produce("orders", batch(now, each)) for each in ahead))
        answers = [client.answer(0, 9).responses[0].partition_responses[0] for _ in ahead]
        assert [each.error_code for each in answers] == [0, 0, Code.INVALID_TIMESTAMP, 0, 0]
        assert [each.base_offset for each in answers] == [1, 2, -1, 3, 4]
        assert [each.batch_index for each in answers[2].record_errors] == [0]


def backdated(now: int, first: int) -> bytes:
    """A batch whose header says "now" at the most, and whose first record has another time."""
    made = bytearray(batch(now, first))
    struct.pack_into(">q", made, 35, now)
    struct.pack_into(">I", made, 17, crc32c(bytes(made[21:])))
    return bytes(made)


def test_the_largest_time_that_a_header_claims_does_not_hide_the_first(broker: BrokerInThread) -> None:
    """Alone, and among others that arrive together."""
    now = broker.clock.now_ms()
    with Raw(broker.address("kafka")) as client:
        answer = produce(client, "orders", backdated(now, FAR))
        assert answer.error_code == Code.INVALID_TIMESTAMP and str(now + FAR) in answer.error_message
        assert produce(client, "orders", backdated(now, HOUR)).error_code == 0
        ahead = [0, FAR, 0]
        client.send(b"".join(raw.produce("orders", backdated(now, each)) for each in ahead))
        answers = [client.answer(0, 9).responses[0].partition_responses[0] for _ in ahead]
        assert [each.error_code for each in answers] == [0, Code.INVALID_TIMESTAMP, 0]


def hidden(now: int, *deltas: int, codec: Codec = Codec.NONE) -> bytes:
    """A batch whose header says "now" for all of its records. They are encoded `deltas` from now, and say so."""
    made = bytearray(batch(now, *deltas, codec=codec))
    assert struct.unpack_from(">q", made, 27) == (now + deltas[0],)
    struct.pack_into(">q", made, 35, now)
    struct.pack_into(">I", made, 17, crc32c(bytes(made[21:])))
    return bytes(made)


def offset_of_time(client: Raw, topic: str, timestamp: int) -> tuple[int, int, int]:
    partition = {"partition_index": 0, "current_leader_epoch": 0, "timestamp": timestamp}
    fields = {"replica_id": -1, "isolation_level": 0, "topics": [{"name": topic, "partitions": [partition]}]}
    found = client.ask(raw.request(2, 5, fields)).topics[0].partitions[0]
    return found.error_code, found.offset, found.timestamp


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.GZIP])
def test_a_time_that_a_header_hides_breaks_nothing(tmp_path: Path, codec: Codec) -> None:
    """By default the header alone is checked, as the compatibility page says. Look-ups end, and retention works."""
    with BrokerInThread(tmp_path, housekeeping_interval_ms=1000) as broker:
        now, address = broker.clock.now_ms(), broker.address("kafka")
        raw.create_topic(address, "orders", retention_ms="60000", segment_ms="1000")
        raw.create_topic(address, "bounded", message_timestamp_before_max_ms="1000")
        with Raw(address) as client:
            assert produce(client, "bounded", hidden(now, 0, FAR, codec=codec)).error_code == Code.INVALID_TIMESTAMP
            assert produce(client, "orders", hidden(now, 0, FAR, -FAR, codec=codec)).error_code == 0
            assert produce(client, "orders", batch(now, 5)).base_offset == 3
            assert offset_of_time(client, "orders", now) == (0, 0, now)
            assert offset_of_time(client, "orders", now + 1) == (0, 3, now + 5), "the header of the first says: older"
            assert offset_of_time(client, "orders", now + 6) == (0, -1, -1)
            assert offset_of_time(client, "orders", -3)[0] == 0
            with millstream.sync.connect(address) as ms, ms.read("orders", follow=False) as reading:
                times = [record.time.year for record in reading]
            assert times[1:3] == [9999, 1]
            broker.advance(120)
            assert offset_of_time(client, "orders", -2) == (0, 4, -1), "retention goes by the header"


def test_a_topic_sets_its_own_bounds(broker: BrokerInThread) -> None:
    now, address = broker.clock.now_ms(), broker.address("kafka")
    bounds = {"message_timestamp_after_max_ms": "10", "message_timestamp_before_max_ms": "1000"}
    raw.create_topic(address, "narrow", **bounds)
    raw.create_topic(address, "stamped", message_timestamp_type="LogAppendTime", **bounds)
    raw.create_topic(address, "open", message_timestamp_after_max_ms=str((1 << 63) - 1))
    with Raw(address) as client:
        assert produce(client, "narrow", batch(now, 10, -1000)).error_code == 0
        answer = produce(client, "narrow", batch(now, 0, -1001, 11, -5000))
        assert answer.error_code == Code.INVALID_TIMESTAMP
        assert [each.batch_index for each in answer.record_errors] == [1, 2, 3]
        assert produce(client, "narrow", batch(-1, 0)).error_code == 0, (
            "a record without a timestamp has none to refuse"
        )
        assert produce(client, "stamped", batch(now, FAR)).error_code == 0
        assert produce(client, "open", batch(now, FAR)).error_code == 0


def test_a_record_without_a_key_is_named_too(broker: BrokerInThread) -> None:
    now, address = broker.clock.now_ms(), broker.address("kafka")
    raw.create_topic(address, "latest", cleanup_policy="compact")
    rows = [(0, now, b"k", b"x"), (0, now, None, b"x"), (0, now, b"k", b"x")]
    with Raw(address) as client:
        answer = produce(client, "latest", bytes(codec.encode(rows)))
        assert answer.error_code == Code.INVALID_RECORD
        assert [each.batch_index for each in answer.record_errors] == [1]
        rows[0] = (0, now + FAR, b"k", b"x")
        answer = produce(client, "latest", bytes(codec.encode(rows)))
        assert answer.error_code == Code.INVALID_TIMESTAMP, "as Kafka has it where both rules are broken"
        assert [each.batch_index for each in answer.record_errors] == [0, 1]


def test_batches_that_are_checked_in_a_thread_keep_their_order(broker: BrokerInThread) -> None:
    now, address = broker.clock.now_ms(), broker.address("kafka")
    raw.create_topic(address, "latest", cleanup_policy="compact", max_message_bytes="10000000")
    large = empty_headers(1_000_000, at=now, key=b"k")
    sent = [large, batch(now, 0, key=b"k"), empty_records(200_000, at=now), batch(now, 0, 0, key=b"k"), large]
    with Raw(address) as client:
        client.send(b"".join(raw.produce("latest", each) for each in sent))
        answers = [client.answer(0, 9).responses[0].partition_responses[0] for _ in sent]
    assert [each.error_code for each in answers] == [0, 0, Code.INVALID_RECORD, 0, 0]
    assert [each.base_offset for each in answers] == [0, 1, -1, 2, 4]


def test_librdkafka_says_that_the_timestamp_is_invalid(tmp_path: Path) -> None:
    from millstream.testing.broker_thread import BrokerThread

    told: list[tuple[KafkaError | None, int | None]] = []

    def done(error: KafkaError | None, message: Message) -> None:
        told.append((error, message.offset()))

    with BrokerThread() as broker:
        producer = Producer({"bootstrap.servers": broker.bootstrap, "linger.ms": 0})
        producer.produce("orders", b"far", timestamp=FAR, on_delivery=done)
        producer.flush(20)
        producer.produce("orders", b"now", on_delivery=done)
        producer.flush(20)
    (first, _), (second, offset) = told
    assert first is not None and first.code() == KafkaError.INVALID_TIMESTAMP
    assert second is None and offset == 0


async def test_the_embedded_api_refuses_and_shows_what_is_stored_already() -> None:
    async with millstream.open("memory:") as ms:
        await ms.create_topic("open", settings={"message.timestamp.after.max.ms": str((1 << 63) - 1)})
        await ms.create_topic("orders")
        with pytest.raises(millstream.MillstreamError, match="out of range"):
            await ms.send("orders", b"far", timestamp=FAR)
        with pytest.raises(millstream.MillstreamError, match="out of range"):
            await ms.send_many([("orders", b"now"), millstream.Message("orders", b"far", timestamp=FAR)])
        await ms.send("open", b"far", timestamp=FAR)
        async with ms.read("open", follow=False) as reading:
            (record,) = [each async for each in reading]
        assert record.timestamp == FAR
        assert record.time == datetime.max.replace(tzinfo=UTC)
