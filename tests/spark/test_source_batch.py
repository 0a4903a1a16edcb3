"""Batch reads with `format("millstream")`: what comes out is what a confluent-kafka consumer reads."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, DataFrameReader, SparkSession

from tests.serving import ServedBroker
from tests.spark.topics import Headers, Row, Sent, Topics, from_spark

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
HOUR_MS = 3_600_000
SIZES = (0, 0, 1, 1, 10, 10, 100, 100, 1000, 1000, 20_000, 100_000)
NUMBERED = 1_000
"""Records of the topic whose records are only numbers, over two partitions."""


@pytest.fixture(scope="module")
def topics(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Topics]:
    """A broker that compacts as soon as it can."""
    config = tmp_path_factory.mktemp("config") / "broker.toml"
    config.write_text("housekeeping_interval_ms = 50\n")
    with ServedBroker(tmp_path_factory.mktemp("broker"), "--config", str(config)) as served:
        yield Topics(served.address)


@pytest.fixture(scope="module")
def numbered(topics: Topics) -> str:
    """Two partitions with numbers from 0 on, a second apart, the first one an hour ahead of the second."""
    name, now = topics.create("numbered", 2), time.time_ns() // 1_000_000
    for partition in (0, 1):
        first_ms = now - (1 + partition) * HOUR_MS
        records = [Sent(b"%d" % at, b"k", partition, first_ms + at * 1000) for at in range(NUMBERED // 2)]
        topics.produce(name, records)
    return name


def reader(spark: SparkSession, topics: Topics, **options: Any) -> DataFrameReader:
    given = {"bootstrap.servers": topics.address, **options}
    return spark.read.format("millstream").options(**given)


def places(frame: DataFrame) -> list[tuple[int, int]]:
    return sorted((row["partition"], row["offset"]) for row in frame.select("partition", "offset").collect())


# -- everything that a topic may hold --------------------------------------------------------------------------------


def random_record(pick: random.Random, partition: int, now_ms: int) -> Sent:
    value = None if pick.random() < 0.1 else pick.randbytes(pick.choice(SIZES))
    if pick.random() < 0.01:
        value = pick.randbytes(1_000_000)
    key = None if pick.random() < 0.3 else b"key-%d" % pick.randrange(50)
    names = ("a", "a", "trace-id", "ä€", "")
    headers: Headers = [
        (pick.choice(names), None if pick.random() < 0.3 else pick.randbytes(pick.choice((0, 3, 200))))
        for _ in range(pick.choice((0, 0, 0, 1, 2, 5)))
    ]
    return Sent(value, key, partition, now_ms - pick.randrange(HOUR_MS), headers or None)


def fill_at_random(topics: Topics, name: str, pick: random.Random, partitions: int, chunks: int) -> None:
    """Batches of every compression, in any order, in every partition."""
    now_ms = time.time_ns() // 1_000_000
    for _ in range(chunks):
        partition = pick.randrange(partitions)
        records = [random_record(pick, partition, now_ms) for _ in range(pick.randrange(1, 80))]
        topics.produce(name, records, pick.choice(CODECS))


def make_compacted(topics: Topics, name: str, pick: random.Random) -> None:
    """Few keys, each written many times, and small segments: most of it goes, and holes stay."""
    topics.create(name, 2, cleanup_policy="compact", segment_bytes="40000", min_cleanable_dirty_ratio="0")
    records = [
        Sent(pick.randbytes(100), b"%d" % pick.choice((at % 7, pick.randrange(400))), at % 2) for at in range(3_000)
    ]
    for first in range(0, len(records), 500):
        topics.produce(name, records[first : first + 500], pick.choice(CODECS))
    wait_until_smaller(topics, name, 2_000)


def wait_until_smaller(topics: Topics, name: str, rows_max: int) -> None:
    """Until compaction has taken enough; then it is switched off, so that what is there stays."""
    deadline = time.monotonic() + 60
    rows, before = topics.rows(name), None
    while len(rows) > rows_max or rows != before:  # each look is a whole read, so this does not spin
        assert time.monotonic() < deadline, f"the broker did not compact: {len(rows)} records are there"
        if len(rows) <= rows_max:
            topics.configure(name, cleanup_policy="delete")
        rows, before = topics.rows(name), rows


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_random_topics_are_read_exactly_as_a_consumer_reads_them(
    spark: SparkSession, topics: Topics, unique: Callable[[str], str], seed: int
) -> None:
    pick = random.Random(seed)
    mixed, trimmed, compacted = unique("mixed"), unique("trimmed"), unique("compacted")
    stamped, empty = unique("stamped"), unique("empty")
    topics.create(mixed, 3)
    fill_at_random(topics, mixed, pick, 3, 25)
    topics.create(trimmed, 2)
    fill_at_random(topics, trimmed, pick, 2, 12)
    topics.trim(
        trimmed, {row.partition: pick.randrange(1, row.offset + 1) for row in topics.rows(trimmed) if row.offset}
    )
    make_compacted(topics, compacted, pick)
    topics.create(stamped, 1, message_timestamp_type="LogAppendTime")
    fill_at_random(topics, stamped, pick, 1, 4)
    topics.create(empty, 2)
    names = [mixed, trimmed, compacted, stamped, empty]
    expected = topics.rows(*names)
    assert {row.timestamp_type for row in expected} == {0, 1}
    assert any(b.offset > a.offset + 1 for a, b in itertools.pairwise(expected) if a[:2] == b[:2])

    everything = reader(spark, topics, subscribe=",".join(names), includeHeaders=True)
    assert from_spark(everything.load()) == expected
    # Ranges that begin and end anywhere, and answers that hold a few batches or less than one.
    pieces = everything.options(maxRecordsPerPartition=173, **{"max.partition.fetch.bytes": 5_000})
    assert from_spark(pieces.load()) == expected
    without = reader(spark, topics, subscribePattern="|".join(names), minPartitions=30)
    assert from_spark(without.load()) == [row._replace(headers=None) for row in expected]


# -- which rows ------------------------------------------------------------------------------------------------------


def test_offsets_and_times_say_where_to_begin_and_end(spark: SparkSession, topics: Topics, numbered: str) -> None:
    now_ms = topics.rows(numbered)[NUMBERED // 2].timestamp_ms  # of the first record of partition 1

    def read(**options: Any) -> list[tuple[int, int]]:
        return places(reader(spark, topics, subscribe=numbered, **options).load())

    def span(partition: int, start: int, end: int) -> list[tuple[int, int]]:
        return [(partition, offset) for offset in range(start, end)]

    half = NUMBERED // 2
    by_offset = json.dumps({numbered: {"0": 490, "1": -2}})
    assert read(startingOffsets=by_offset, endingOffsets=json.dumps({numbered: {"1": 3}})) == [
        *span(0, 490, half),
        *span(1, 0, 3),
    ]
    assert read(startingTimestamp=now_ms + 10_000, endingTimestamp=now_ms + 20_000) == span(1, 10, 20)
    by_time = {
        "startingOffsetsByTimestamp": json.dumps({numbered: {"0": now_ms + HOUR_MS + 5_000, "1": now_ms + 450_000}}),
        "endingOffsetsByTimestamp": json.dumps({numbered: {"0": now_ms + HOUR_MS + 7_000}}),
    }
    assert read(**by_time) == [*span(0, 5, 7), *span(1, 450, half)]
    late = {"startingTimestamp": now_ms + 2 * HOUR_MS, "startingOffsetsByTimestampStrategy": "latest"}
    assert read(**late) == []
    assigned = reader(spark, topics, assign=json.dumps({numbered: [1]}), endingOffsets='{"numbered": {"1": 9}}')
    assert places(assigned.load()) == span(1, 0, 9)


def test_a_long_partition_is_read_by_several_tasks(spark: SparkSession, topics: Topics, numbered: str) -> None:
    def tasks(**options: Any) -> int:
        return reader(spark, topics, subscribe=numbered, **options).load().rdd.getNumPartitions()

    assert tasks() == 2
    assert tasks(minPartitions=7) == 8  # shares are rounded
    assert tasks(maxRecordsPerPartition=100) == 10
    assert tasks(startingOffsets=json.dumps({numbered: {"0": NUMBERED // 2, "1": 0}})) == 1


def test_a_topic_without_records_is_a_frame_without_rows(
    spark: SparkSession, topics: Topics, unique: Callable[[str], str]
) -> None:
    empty = topics.create(unique("empty"))
    assert reader(spark, topics, subscribe=empty).load().collect() == []
    assert reader(spark, topics, subscribePattern="no-such-.*").load().collect() == []


# -- which columns ---------------------------------------------------------------------------------------------------


def test_columns_are_those_of_sparks_kafka_source(spark: SparkSession, topics: Topics, numbered: str) -> None:
    plain = reader(spark, topics, subscribe=numbered).load()
    assert plain.schema.simpleString() == (
        "struct<key:binary,value:binary,topic:string,partition:int,offset:bigint,timestamp:timestamp,timestampType:int>"
    )
    headers = reader(spark, topics, subscribe=numbered, includeHeaders=True).load()
    assert headers.schema["headers"].simpleString() == "headers:array<struct<key:string,value:binary>>"


def test_a_schema_by_hand_leaves_columns_out_and_orders_them_anew(
    spark: SparkSession, topics: Topics, numbered: str
) -> None:
    expected = topics.rows(numbered)
    values = reader(spark, topics, subscribe=numbered).schema("value BINARY").load()
    assert values.columns == ["value"]
    assert sorted(row[0] for row in values.collect()) == sorted(row.value for row in expected if row.value is not None)
    schema = "offset LONG, topic STRING, headers ARRAY<STRUCT<key: STRING, value: BINARY>>, partition INT"
    rows = reader(spark, topics, subscribe=numbered).schema(schema).load().collect()
    assert sorted(rows, key=lambda row: (row[3], row[0])) == [
        (row.offset, row.topic, row.headers, row.partition) for row in expected
    ]
    counted = reader(spark, topics, subscribe=numbered).schema("topic STRING").load()
    assert counted.groupBy("topic").count().collect() == [(numbered, NUMBERED)]


def test_a_topic_answers_sql(spark: SparkSession, topics: Topics, numbered: str) -> None:
    reader(spark, topics, subscribe=numbered).load().createOrReplaceTempView("numbers")
    row = spark.sql("SELECT count(*), sum(int(string(value))), max(offset) FROM numbers WHERE value != '7'").first()
    half = NUMBERED // 2
    assert row == (NUMBERED - 2, half * (half - 1) - 14, half - 1)


def test_a_frame_is_read_anew_each_time_it_is_used(
    spark: SparkSession, topics: Topics, unique: Callable[[str], str], tmp_path: Path
) -> None:
    topic = topics.create(unique("growing"))
    topics.count(topic, 5)
    frame = reader(spark, topics, subscribe=topic).load()
    rows = from_spark(frame)
    assert rows == [Row(topic, 0, at, None, b"%d" % at, row.timestamp_ms, 0, None) for at, row in enumerate(rows)]
    frame.write.parquet(str(tmp_path / "rows"))
    topics.count(topic, 3)
    assert from_spark(spark.read.parquet(str(tmp_path / "rows"))) == rows
    assert len(reader(spark, topics, subscribe=topic).load().collect()) == 8
