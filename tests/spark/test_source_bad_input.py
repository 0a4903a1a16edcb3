"""Errors as the author of a query sees them: through Spark, in one sentence that says what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException, PythonException, StreamingQueryException
from pyspark.sql import SparkSession

from tests.serving import ServedBroker
from tests.spark.streams import drain, stream
from tests.spark.topics import Topics, from_spark

Unique = Callable[[str], str]
NOBODY = "127.0.0.1:1"


@pytest.fixture
def topics(broker: ServedBroker) -> Topics:
    return Topics(broker.address)


class Reads:
    """Batch reads of one topic, and how they are refused."""

    def __init__(self, spark: SparkSession, topics: Topics, topic: str) -> None:
        self._spark, self._topics, self._topic = spark, topics, topic

    def values(self, schema: str | None = None, **options: Any) -> list[bytes | None]:
        given = {"kafka.bootstrap.servers": self._topics.address, "subscribe": self._topic, **options}
        reader = self._spark.read.format("millstream").options(**given)
        frame = reader.schema(schema).load() if schema is not None else reader.load()
        return [row.value for row in from_spark(frame)]

    def refusal(self, schema: str | None = None, **options: Any) -> str:
        with pytest.raises((AnalysisException, PythonException)) as caught:
            self.values(schema, **options)
        return str(caught.value)


@pytest.fixture
def reads(spark: SparkSession, topics: Topics, unique: Unique) -> Reads:
    topic = topics.create(unique("bad"))
    topics.count(topic, 10)
    topics.trim(topic, {0: 3})
    return Reads(spark, topics, topic)


def stream_failure(run: Callable[[], object]) -> str:
    with pytest.raises(StreamingQueryException) as caught:
        run()
    return str(caught.value)


# -- options ---------------------------------------------------------------------------------------------------------


def test_options_that_cannot_be_are_refused_before_anything_is_read(reads: Reads, spark: SparkSession) -> None:
    assert "option 'subscribes' is not known; did you mean subscribe? Known are: " in reads.refusal(subscribes="x")
    assert "given are subscribe, assign" in reads.refusal(assign="{}")
    assert "encryption and logins are not supported here" in reads.refusal(**{"kafka.security.protocol": "SASL_SSL"})
    assert "there is no column colour; there are key, value, " in reads.refusal("colour STRING")
    assert "column value is binary, not string; cast it in the query" in reads.refusal("value STRING")
    assert "column value may be null in any record; leave NOT NULL out" in reads.refusal("value BINARY NOT NULL")


def test_options_of_sparks_kafka_source_that_mean_nothing_here_do_not_stop_a_job(reads: Reads) -> None:
    tuning: dict[str, Any] = {
        "kafka.session.timeout.ms": 10_000,
        "kafka.security.protocol": "PLAINTEXT",
        "kafkaConsumer.pollTimeoutMs": 512,
        "fetchOffset.numRetries": 3,
        "groupIdPrefix": "mine",
        "kafka.group.id": "theirs",
        "kafka.max.poll.records": 500,
    }
    assert len(reads.values(**tuning)) == 7


def test_a_stream_refuses_what_only_a_batch_can_have(spark: SparkSession, topics: Topics, unique: Unique) -> None:
    topic = topics.create(unique("bad"))
    frame = stream(spark, topics, subscribe=topic, endingOffsets="latest")
    assert "a stream has no end: endingOffsets, " in stream_failure(lambda: drain(frame))


# -- brokers and topics that are not there ---------------------------------------------------------------------------


def test_a_broker_that_cannot_be_reached_is_told_soon(reads: Reads, spark: SparkSession, topics: Topics) -> None:
    away: dict[str, Any] = {"kafka.bootstrap.servers": NOBODY, "request.timeout.ms": 300}
    assert f"within 0.3 s: no broker answers at {NOBODY}: " in reads.refusal(**away)
    frame = stream(spark, topics, subscribe="t", **{"bootstrap.servers": NOBODY, "request.timeout.ms": 300})
    assert f"no broker answers at {NOBODY}: " in stream_failure(lambda: drain(frame))
    assert "'nowhere' is not HOST:PORT" in reads.refusal(**{"kafka.bootstrap.servers": "nowhere"})


def test_a_topic_or_partition_that_does_not_exist_is_named(reads: Reads, spark: SparkSession, topics: Topics) -> None:
    assert f"there is no topic nope at {topics.address}" in reads.refusal(subscribe="nope")
    frame = stream(spark, topics, subscribe="nope")
    assert f"there is no topic nope at {topics.address}" in stream_failure(lambda: drain(frame))


# -- offsets that are not there --------------------------------------------------------------------------------------


def test_offsets_out_of_range_fail_a_batch_or_are_left_out(reads: Reads) -> None:
    topic = reads._topic
    before = {"startingOffsets": json.dumps({topic: {"0": 1}})}
    behind = {"endingOffsets": json.dumps({topic: {"0": 12}})}
    far = {"startingOffsets": json.dumps({topic: {"0": 50}})}
    assert "offsets 1 to 9 cannot be read, the partition starts at 3 and ends at 10; set " in reads.refusal(**before)
    assert "offsets 10 to 11 cannot be read, the partition ends at 10; set failOnDataLoss" in reads.refusal(**behind)
    assert f"{topic}-0 cannot start at offset 50: it ends at 10; set failOnDataLoss" in reads.refusal(**far)
    there = [b"%d" % number for number in range(3, 10)]
    assert reads.values(**before, **behind, failOnDataLoss=False) == there
    assert reads.values(**far, failOnDataLoss=False) == []


def test_records_that_go_before_a_stream_reads_them_fail_it_or_are_left_out(
    spark: SparkSession, topics: Topics, unique: Unique, tmp_path: Path
) -> None:
    topic = topics.create(unique("trimmed"))
    topics.count(topic, 10)

    def run(**options: Any) -> list[int]:
        return [row.offset for row in drain(stream(spark, topics, subscribe=topic, **options), tmp_path).rows]

    assert run() == list(range(10))
    topics.count(topic, 20)
    topics.trim(topic, {0: 25})
    lost = f"{topic}-0: offsets 10 to 29 cannot be read, the partition starts at 25 and ends at 30; set failOnDataLoss"
    assert lost in stream_failure(run)
    assert run(failOnDataLoss=False) == list(range(25, 30))


def test_a_topic_that_is_deleted_and_made_anew_fails_a_stream_or_is_read_from_its_start(
    spark: SparkSession, topics: Topics, unique: Unique, tmp_path: Path
) -> None:
    topic, other = topics.create(unique("anew")), topics.create(unique("other"))
    topics.count(topic, 20)

    def run(**options: Any) -> list[tuple[str, int]]:
        wanted = {"subscribe": f"{topic},{other}", "maxOffsetsPerTrigger": 100, **options}
        return [(row.topic, row.offset) for row in drain(stream(spark, topics, **wanted), tmp_path).rows]

    assert len(run()) == 20
    assert f"{topic}-0 is no longer read, but" in stream_failure(lambda: run(subscribe=other))
    topics.delete(topic)
    topics.count(other, 2)
    assert f"{topic}-0 no longer exists, but the checkpoint has read it" in stream_failure(run)
    assert run(failOnDataLoss=False) == [(other, 0), (other, 1)]
    topics.create(topic)
    topics.count(topic, 3)
    assert f"{topic}-0 ends at 3, before 20, but the checkpoint has read it" in stream_failure(run)
    assert run(failOnDataLoss=False) == [(topic, 0), (topic, 1), (topic, 2)]
    topics.count(topic, 1)
    assert run() == [(topic, 3)]


def test_a_name_that_is_added_to_a_stream_must_exist(
    spark: SparkSession, topics: Topics, unique: Unique, tmp_path: Path
) -> None:
    topic = topics.create(unique("known"))
    topics.count(topic, 1)
    assert len(drain(stream(spark, topics, subscribe=topic), tmp_path).rows) == 1
    more = stream(spark, topics, subscribe=f"{topic},mistyped")
    assert "there is no topic mistyped at " in stream_failure(lambda: drain(more, tmp_path))
