"""Our batches in other people's readers, and theirs in ours."""

from __future__ import annotations

from typing import Any

import pytest
from aiokafka.record.default_records import DefaultRecordBatchBuilder as AiokafkaBuilder
from aiokafka.record.memory_records import MemoryRecords as AiokafkaRecords
from kafka.record.memory_records import MemoryRecords as KafkaPythonRecords
from kafka.record.memory_records import MemoryRecordsBuilder as KafkaPythonBuilder

from millstream.records import (
    codec,
)
from millstream.records.compression import Codec
from millstream.records.record import Record

pytestmark = pytest.mark.usefixtures("kernel")
NOW = 1_700_000_000_000
RECORDS = [
    Record(0, NOW, b"k", b"v"),
    Record(1, NOW + 1, None, b"x" * 5000, (("h", b"1"), ("h", None))),
    Record(2, NOW, b"gone", None),
    Record(3, NOW + 70_000, b"", b"", (("ключ", b""),)),
    *(Record(i, NOW + i, b"%d" % i, b"payload %d " % i * 9) for i in range(4, 300)),
]


def _read(reader: Any) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    while (batch := reader.next_batch()) is not None:
        assert batch.validate_crc()
        found += [
            (r.offset, r.timestamp, r.key and bytes(r.key), r.value and bytes(r.value), tuple(map(tuple, r.headers)))
            for r in batch
        ]
    return found


def _as_tuples(records: list[Record]) -> list[tuple[Any, ...]]:
    return [tuple(record) for record in records]


@pytest.mark.parametrize("compression", Codec)
def test_aiokafka_reads_ours(compression: Codec) -> None:
    batch = bytes(codec.encode(RECORDS, codec=compression))
    assert _read(AiokafkaRecords(batch * 2)) == _as_tuples(RECORDS) * 2


@pytest.mark.parametrize("compression", [Codec.NONE, Codec.GZIP])
def test_kafka_python_reads_ours(compression: Codec) -> None:
    batch = bytes(codec.encode(RECORDS, codec=compression))
    assert _read(KafkaPythonRecords(batch * 2)) == _as_tuples(RECORDS) * 2


def _build_with_aiokafka(compression: Codec) -> bytes:
    builder = AiokafkaBuilder(
        magic=2,
        compression_type=compression,
        is_transactional=0,
        producer_id=5,
        producer_epoch=1,
        base_sequence=9,
        batch_size=10**7,
    )
    for record in RECORDS:
        builder.append(record.offset, record.timestamp, record.key, record.value, list(record.headers))
    return bytes(builder.build())


@pytest.mark.parametrize("compression", Codec)
def test_we_read_aiokafkas(compression: Codec) -> None:
    assert codec.decode(_build_with_aiokafka(compression)) == RECORDS


def test_uncompressed_bytes_are_the_same_as_aiokafkas() -> None:
    ours = codec.encode(RECORDS, producer_id=5, producer_epoch=1, base_sequence=9)
    theirs = bytearray(_build_with_aiokafka(Codec.NONE))
    ours[12:16] = theirs[12:16]  # the leader epoch is the broker's to write
    assert ours == theirs


@pytest.mark.parametrize("compression", [Codec.NONE, Codec.GZIP])
def test_we_read_kafka_pythons(compression: Codec) -> None:
    builder = KafkaPythonBuilder(magic=2, compression_type=compression, batch_size=10**7)
    for record in RECORDS:
        builder.append(record.timestamp, record.key, record.value, list(record.headers))
    builder.close()
    assert list(codec.iterate(bytes(builder.buffer()))) == RECORDS
