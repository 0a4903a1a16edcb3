"""Streams with `format("millstream")`: batch after batch, over restarts, and what comes up on the way."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable

from millstream.spark.schema import full_schema
from millstream.spark.source import MillstreamSource
from millstream.spark.stream import StreamReader
from tests.serving import ServedBroker
from tests.spark.streams import Batches, drain, start, stream
from tests.spark.topics import Sent, Topics

Unique = Callable[[str], str]


@pytest.fixture
def topics(broker: ServedBroker) -> Topics:
    return Topics(broker.address)


@pytest.fixture
def readers(topics: Topics) -> Iterator[Callable[..., StreamReader]]:
    """Readers as Spark's driver holds them, without Spark."""
    made = []

    def make(**options: Any) -> StreamReader:
        given = {"bootstrap.servers": topics.address, "startingOffsets": "earliest", **options}
        reader = MillstreamSource({name: str(value) for name, value in given.items()}).streamReader(full_schema(False))
        assert isinstance(reader, StreamReader)
        made.append(reader)
        return reader

    yield make
    for reader in made:
        reader.stop()


# -- over restarts ---------------------------------------------------------------------------------------------------


def test_available_now_reads_in_batches_and_goes_on_where_it_stopped(
    spark: SparkSession, topics: Topics, unique: Unique, tmp_path: Path
) -> None:
    topic, group = topics.create(unique("resumed"), 2), unique("group")
    topics.count(topic, 300, 0)
    topics.count(topic, 100, 1)

    def run() -> Batches:
        options = {"subscribe": topic, "maxOffsetsPerTrigger": 150, "kafka.group.id": group, "includeHeaders": True}
        return drain(stream(spark, topics, **options), tmp_path)

    first = run()
    assert first.rows == topics.rows(topic)
    assert [len(batch) for batch in first.seen] == [149, 149, 102]
    assert {row.partition for row in first.seen[0]} == {0, 1}
    # Spark never says that it is done with the last batch of a run; its tasks say so themselves.
    assert topics.committed(group, topic) == {(topic, 0): 300, (topic, 1): 100}

    topics.count(topic, 20, 1)
    topics.grow(topic, 3)
    topics.count(topic, 10, 2)
    second = run()
    assert first.rows + second.rows != first.rows and len(second.rows) == 30
    assert sorted(first.rows + second.rows, key=lambda row: row[:3]) == topics.rows(topic)
    assert topics.committed(group, topic) == {(topic, 0): 300, (topic, 1): 120, (topic, 2): 10}

    assert run().seen == []


def test_a_pattern_finds_topics_that_are_made_later(
    spark: SparkSession, topics: Topics, unique: Unique, tmp_path: Path
) -> None:
    stem = unique("app")
    one, other = topics.create(f"{stem}-one"), topics.create(f"not-{stem}-one")
    topics.count(one, 5)
    topics.count(other, 5)

    def run() -> Batches:
        return drain(stream(spark, topics, subscribePattern=f"{stem}-.*", includeHeaders=True), tmp_path)

    assert run().rows == topics.rows(one)
    two = topics.create(f"{stem}-two", 2)
    topics.count(two, 7, 1)
    assert run().rows == topics.rows(two)


def test_a_stream_begins_at_the_end_unless_told(
    spark: SparkSession, topics: Topics, unique: Unique, tmp_path: Path
) -> None:
    topic = topics.create(unique("latest"), 2)
    topics.count(topic, 50)
    latest = (
        spark.readStream.format("millstream").option("bootstrap.servers", topics.address).option("subscribe", topic)
    )
    assert drain(latest.load(), tmp_path).rows == []
    topics.count(topic, 3, 1)
    assert [row[:3] for row in drain(latest.load(), tmp_path).rows] == [(topic, 1, at) for at in range(3)]

    begin = json.dumps({topic: {"0": 48}})
    assigned = stream(spark, topics, assign=json.dumps({topic: [0]}), startingOffsets=begin)
    assert [row[:3] for row in drain(assigned).rows] == [(topic, 0, 48), (topic, 0, 49)]


# -- while it runs ---------------------------------------------------------------------------------------------------


def test_a_running_query_sees_new_records_partitions_and_topics(
    spark: SparkSession, topics: Topics, unique: Unique
) -> None:
    stem, group, batches = unique("running"), unique("group"), Batches()
    one = topics.create(f"{stem}-one")
    topics.count(one, 10)
    options = {"subscribePattern": f"{stem}-.*", "group.id": group, "includeHeaders": True}
    query = start(stream(spark, topics, **options), batches, processingTime="100 milliseconds")
    try:
        batches.wait_for(10, query)
        topics.count(one, 5)
        batches.wait_for(15, query)
        topics.grow(one, 2)
        topics.count(one, 4, 1)
        two = topics.create(f"{stem}-two")
        topics.count(two, 3)
        query.processAllAvailable()
        assert batches.wait_for(22, query) == topics.rows(one, two)
        assert topics.committed(group, one, two) == {(one, 0): 15, (one, 1): 4, (two, 0): 3}
    finally:
        query.stop()
    assert query.exception() is None


# -- planning, without Spark -----------------------------------------------------------------------------------------


def test_where_a_stream_begins(readers: Callable[..., StreamReader], topics: Topics, unique: Unique) -> None:
    topic, now = topics.create(unique("begin"), 2), time.time_ns() // 1_000_000
    topics.produce(topic, [Sent(b"", partition=at % 2, timestamp_ms=now + at) for at in range(40)])

    def begin(**options: Any) -> dict[str, int]:
        return readers(subscribe=topic, **options).initialOffset()[topic]

    assert begin() == {"0": 0, "1": 0}
    assert begin(startingOffsets="latest") == {"0": 20, "1": 20}
    assert begin(startingOffsets=json.dumps({topic: {"0": 7}})) == {"0": 7, "1": 20}
    assert begin(startingTimestamp=now + 10) == {"0": 5, "1": 5}
    assert begin(startingOffsetsByTimestamp=json.dumps({topic: {"1": now + 30}})) == {"0": 20, "1": 15}
    assert readers(subscribePattern="no-such-.*").initialOffset() == {}


def test_more_tasks_where_they_are_asked_for(
    readers: Callable[..., StreamReader], topics: Topics, unique: Unique
) -> None:
    topic = topics.create(unique("tasks"), 2)
    topics.count(topic, 90, 0)
    topics.count(topic, 10, 1)

    def tasks(**options: Any) -> int:
        return len(readers(subscribe=topic, **options).partitions({topic: {"0": 0}}, {topic: {"0": 90, "1": 10}}))

    assert (tasks(), tasks(minPartitions=10), tasks(maxRecordsPerPartition=30)) == (2, 10, 4)


def test_records_that_come_while_an_available_now_run_begins_do_not_confuse_it(
    readers: Callable[..., StreamReader], topics: Topics, unique: Unique
) -> None:
    topic = topics.create(unique("begins"))
    topics.count(topic, 5)
    reader = readers(subscribe=topic, startingOffsets="latest")
    reader.prepareForTriggerAvailableNow()
    topics.count(topic, 5)
    began = reader.initialOffset()
    topics.count(topic, 5)
    assert reader.latestOffset(began, reader.getDefaultReadLimit()) == began == {topic: {"0": 10}}


def test_a_batch_waits_for_enough_records_though_not_for_ever(
    readers: Callable[..., StreamReader], topics: Topics, unique: Unique
) -> None:
    topic = topics.create(unique("waiting"))
    topics.count(topic, 5)
    reader = readers(subscribe=topic, minOffsetsPerTrigger=10, maxTriggerDelay="1h")
    began = reader.initialOffset()
    first = reader.latestOffset(began, ReadAllAvailable())
    assert first == {topic: {"0": 5}}  # there was no batch before, so none was waited for
    topics.count(topic, 9)
    assert reader.latestOffset(first, ReadAllAvailable()) == first
    topics.count(topic, 1)
    assert reader.latestOffset(first, ReadAllAvailable()) == {topic: {"0": 15}}

    patient = readers(subscribe=topic, minOffsetsPerTrigger=1000, maxTriggerDelay="0ms")
    for end in (15, 16):
        assert patient.latestOffset(first, ReadAllAvailable()) == {topic: {"0": end}}
        topics.count(topic, 1)
    once = readers(subscribe=topic, minOffsetsPerTrigger=1000)
    once.prepareForTriggerAvailableNow()
    assert once.latestOffset(first, ReadAllAvailable()) == {topic: {"0": 17}}
    assert once.latestOffset(first, ReadAllAvailable()) == {topic: {"0": 17}}
