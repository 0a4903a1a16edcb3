"""The source against a cluster that is not ours: librdkafka's built-in mock, with three brokers."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Producer
from pyspark.sql import SparkSession

from tests.spark.streams import drain, stream
from tests.spark.topics import Headers, Row, Sent, Topics, from_spark

PARTITIONS = 4
"""What the mock gives every topic."""


@pytest.fixture(scope="module")
def mocked() -> Iterator[Topics]:
    host = Producer({"bootstrap.servers": "mock", "test.mock.num.brokers": 3, "log_level": 0})
    brokers = host.list_topics("mocked", timeout=10).brokers.values()
    yield Topics(",".join(f"{node.host}:{node.port}" for node in brokers))
    host.flush(0)  # it is the cluster, and has to live until here


def fill(topics: Topics, name: str, count: int) -> list[Row]:
    """Answers with what has to come out."""
    headers: Headers = [("h", b"1"), ("h", None)]
    start_ms = time.time_ns() // 1_000_000
    rows = []
    for codec in ("none", "zstd", "snappy", "lz4", "gzip"):
        sent = [
            Sent(b"%d" % number * 20, None if number % 3 else b"k", number % PARTITIONS, start_ms + number, headers)
            for number in range(count)
        ]
        topics.produce(name, sent, codec)
        rows += sent
    expected: list[Row] = []
    for index in range(PARTITIONS):
        mine = [one for one in rows if one.partition == index]
        for offset, one in enumerate(mine):
            expected.append(Row(name, index, offset, one.key, one.value, one.timestamp_ms, 0, headers))
    return expected


def test_a_batch_reads_every_partition_from_its_leader(spark: SparkSession, mocked: Topics) -> None:
    expected = fill(mocked, "mocked", 400)
    reader = spark.read.format("millstream").option("bootstrap.servers", mocked.address)
    everything = reader.option("subscribe", "mocked").option("includeHeaders", True)
    assert from_spark(everything.load()) == expected
    some = everything.option("startingOffsets", json.dumps({"mocked": {"1": 7}})).option("maxRecordsPerPartition", 50)
    assert from_spark(some.load()) == [row for row in expected if row.partition != 1 or row.offset >= 7]


def test_a_stream_goes_on_where_it_stopped_and_commits(spark: SparkSession, mocked: Topics, tmp_path: Path) -> None:
    first = fill(mocked, "mocked-stream", 100)
    options = {"subscribePattern": "mocked-st.*", "group.id": "readers", "includeHeaders": True}
    batches = drain(stream(spark, mocked, maxOffsetsPerTrigger=400, **options), tmp_path)
    assert batches.rows == first
    assert len(batches.seen) == 2
    mocked.produce("mocked-stream", [Sent(b"more", partition=2)])
    (row,) = drain(stream(spark, mocked, **options), tmp_path).rows
    assert (row.partition, row.value) == (2, b"more")
    ends = {("mocked-stream", index): 125 + (index == 2) for index in range(PARTITIONS)}
    assert mocked.committed("readers", "mocked-stream") == ends
