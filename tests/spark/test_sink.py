"""What Spark writes is what other clients read."""

from __future__ import annotations

import datetime
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from millstream.client.cluster import ClusterError, KafkaCluster
from millstream.records import codec
from millstream.records.batch import read_header
from millstream.records.compression import Codec
from millstream.spark.options import ClientOptions, SinkOptions
from millstream.spark.sink import BatchWriter, StreamWriter, Written
from millstream.spark.writing import SinkError, Writing
from tests.serving import ServedBroker

NOW = int(time.time() * 1000) - 3_600_000
"""Not so old that the broker's retention would take the records away."""
SCHEMA = (
    "key BINARY, value BINARY, headers ARRAY<STRUCT<key: STRING, value: BINARY>>, partition INT, timestamp TIMESTAMP"
)
Row = tuple[Any, ...]
"""Partition, key, value, headers, timestamp."""


@pytest.fixture
def topic(broker: ServedBroker, unique: Callable[[str], str]) -> Callable[..., str]:
    """Makes a topic."""

    def make(partitions: int = 1, **config: str) -> str:
        name = unique("sink")
        settings = {key.replace("_", "."): value for key, value in config.items()}
        create(broker.address, NewTopic(name, partitions, 1, config=settings))
        return name

    return make


def create(address: str, topic: NewTopic) -> None:
    admin = AdminClient({"bootstrap.servers": address})
    admin.create_topics([topic])[topic.topic].result(10)


def consume(address: str, topic: str) -> list[Row]:
    """All records of a topic, partition by partition, as librdkafka reads them."""
    consumer = Consumer({"bootstrap.servers": address, "group.id": "tests", "enable.partition.eof": True})
    found: list[Row] = []
    for index in sorted(consumer.list_topics(topic, timeout=10).topics[topic].partitions):
        consumer.assign([TopicPartition(topic, index, 0)])
        while (message := consumer.poll(10)) is not None and not message.error():
            headers = tuple(message.headers() or ())
            found.append((index, message.key(), message.value(), headers, message.timestamp()[1]))
    consumer.close()
    return found


def write(rows: DataFrame, broker: ServedBroker, topic: str | None = None, **options: str) -> None:
    writer = rows.write.format("millstream").mode("append").option("bootstrap.servers", broker.address)
    if topic is not None:
        writer = writer.option("topic", topic)
    writer.options(**options).save()


def moment(timestamp_ms: int) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(timestamp_ms / 1000, datetime.UTC)


# -- what is written is what is read ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "compression", ["none", "zstd", *(pytest.param(each, marks=pytest.mark.slow) for each in ("gzip", "snappy", "lz4"))]
)
def test_keys_values_headers_partitions_and_times_arrive_as_they_were(
    spark: SparkSession, broker: ServedBroker, topic: Callable[..., str], compression: str
) -> None:
    name = topic(partitions=3)
    pick = random.Random(compression)
    rows = [
        (
            pick.choice((None, b"", pick.randbytes(9))),
            pick.choice((None, b"", pick.randbytes(200), b"text " * 100)),
            pick.choice((None, [], [("a", b"1"), ("größe", None), ("a", b"")])),
            pick.randrange(3),
            moment(NOW + pick.randrange(100_000)),
        )
        for _ in range(500)
    ]
    write(spark.createDataFrame(rows, SCHEMA).coalesce(1), broker, name, compression=compression)
    expected = [
        (index, key, value, tuple(headers or ()), round(at.timestamp() * 1000))
        for key, value, headers, index, at in sorted(rows, key=lambda row: row[3])
    ]
    assert consume(broker.address, name) == expected
    cluster = KafkaCluster(broker.address)
    fetched = cluster.fetch((name, 0), 0, 1 << 20, 1000)
    cluster.close()
    header = read_header(fetched.records)
    assert header.codec == Codec.parse(compression)
    assert header.producer_id >= 0 and header.base_sequence == 0


def test_text_is_enough_and_rows_without_a_time_get_the_present_one(
    spark: SparkSession, broker: ServedBroker, topic: Callable[..., str]
) -> None:
    name = topic()
    write(spark.createDataFrame([("größe",), (None,)], "value STRING").coalesce(1), broker, name)
    found = consume(broker.address, name)
    assert [row[:4] for row in found] == [(0, None, "größe".encode(), ()), (0, None, None, ())]
    now_ms = datetime.datetime.now().timestamp() * 1000
    assert all(now_ms - 60_000 < row[4] <= now_ms for row in found)


def test_a_column_says_the_topic_unless_the_option_does(
    spark: SparkSession, broker: ServedBroker, topic: Callable[..., str]
) -> None:
    names = [topic(partitions=2), topic(), topic()]
    rows = spark.createDataFrame(
        [(names[n % 3], b"%d" % n, b"k%d" % n) for n in range(300)], "topic STRING, value BINARY, key BINARY"
    )
    write(rows, broker)
    for at, name in enumerate(names):
        assert sorted(int(row[2]) for row in consume(broker.address, name)) == list(range(at, 300, 3))
    other = topic()
    write(rows, broker, other)
    assert len(consume(broker.address, other)) == 300


def test_a_key_goes_to_the_partition_that_a_java_client_would_choose(
    spark: SparkSession, broker: ServedBroker, topic: Callable[..., str]
) -> None:
    ours, theirs = topic(partitions=7), topic(partitions=7)
    pick = random.Random(3)
    keys = [b"", *(pick.randbytes(pick.randrange(1, 40)) for _ in range(300))]
    write(spark.createDataFrame([(key, b"v") for key in keys], "key BINARY, value BINARY"), broker, ours)
    producer = Producer({"bootstrap.servers": broker.address, "partitioner": "murmur2"})
    for key in keys:
        producer.produce(theirs, b"v", key)
    producer.flush(10)
    places = [Counter(row[:2] for row in consume(broker.address, name)) for name in (ours, theirs)]
    assert places[0] == places[1]


def test_rows_without_keys_fill_one_batch_after_the_other_and_reach_every_partition(
    spark: SparkSession, broker: ServedBroker, topic: Callable[..., str]
) -> None:
    name = topic(partitions=3)
    rows = spark.range(40_000, numPartitions=2).select(F.concat(F.lit("x" * 100), "id").alias("value"))
    write(rows, broker, name, **{"max.request.size": "100000"})
    found = consume(broker.address, name)
    assert sorted(int(row[2][100:]) for row in found) == list(range(40_000))
    shares = Counter(row[0] for row in found)
    assert set(shares) == {0, 1, 2} and min(shares.values()) > 10_000


def test_more_than_fits_into_the_open_batches_is_sent_early(
    broker: ServedBroker, topic: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millstream.spark.writing.OPEN_BYTES_MAX", 50_000)
    name = topic(partitions=5)
    keys = [b"%d" % number for number in range(3000)]
    batch = pa.record_batch({"key": pa.array(keys), "value": pa.array([b"v" * 100] * 3000)})
    written = BatchWriter(options(broker, name)).write(iter([batch.slice(at, 100) for at in range(0, 3000, 100)]))
    assert sum(part.rows for part in written.delivered) == 3000
    assert sorted(row[1] for row in consume(broker.address, name)) == sorted(keys)


def test_no_rows_are_no_work(spark: SparkSession, broker: ServedBroker, topic: Callable[..., str]) -> None:
    name = topic()
    write(spark.createDataFrame([], "value STRING"), broker, name)
    assert consume(broker.address, name) == []


# -- streams ---------------------------------------------------------------------------------------------------------


def test_a_stream_writes_what_its_files_hold_once_per_batch(
    spark: SparkSession, broker: ServedBroker, topic: Callable[..., str], tmp_path: Path
) -> None:
    name = topic(partitions=2)
    source = str(tmp_path / "rows")

    def run(first: int) -> None:
        rows = spark.range(first, first + 1000, numPartitions=2)
        rows.select(F.col("id").cast("string").alias("value")).write.mode("append").parquet(source)
        stream = spark.readStream.schema("value STRING").parquet(source)
        query = (
            stream.writeStream.format("millstream")
            .option("bootstrap.servers", broker.address)
            .option("topic", name)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .queryName(name)
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(60)

    for first in (0, 1000):
        run(first)
    found = consume(broker.address, name)
    assert sorted(int(row[2]) for row in found) == list(range(2000))
    assert {row[0] for row in found} == {0, 1}


def test_a_stream_that_failed_in_a_task_loses_nothing_when_it_is_started_again(
    spark: SparkSession, broker: ServedBroker, topic: Callable[..., str], tmp_path: Path
) -> None:
    name, source, marker = topic(), str(tmp_path / "rows"), str(tmp_path / "failed")
    spark.range(30_000, numPartitions=1).select(F.col("id").cast("string").alias("value")).write.parquet(source)

    def fail_once(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate(batches):
            if number == 2 and not Path(marker).exists():
                Path(marker).touch()
                raise RuntimeError("a task fails in the middle")
            yield batch

    def start() -> bool | None:
        stream = spark.readStream.schema("value STRING").parquet(source).mapInArrow(fail_once, "value STRING")
        writer = stream.writeStream.format("millstream").option("bootstrap.servers", broker.address)
        writer = writer.options(**{"topic": name, "max.request.size": "10000"})
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
        return writer.trigger(availableNow=True).start().awaitTermination(60)

    with pytest.raises(StreamingQueryException, match="a task fails"):
        start()
    sent = consume(broker.address, name)
    assert len(sent) < 30_000
    assert start()
    found = Counter(int(row[2]) for row in consume(broker.address, name))
    assert set(found) == set(range(30_000))
    # The first attempt's sink had the first two batches at hand, and may go on with them after its query has failed.
    assert 30_000 + len(sent) <= sum(found.values()) <= 50_000


def test_a_task_reports_its_query_batch_and_attempt(
    broker: ServedBroker, topic: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Context:
        def getLocalProperty(self, key: str) -> str:
            return {"streaming.sql.batchId": "12", "sql.streaming.queryId": "a-query"}[key]

        def partitionId(self) -> int:
            return 3

        def attemptNumber(self) -> int:
            return 1

    monkeypatch.setattr("pyspark.TaskContext.get", classmethod(lambda _: Context()))
    name = topic(partitions=4)
    batch = pa.record_batch({"value": pa.array([b"a", b"b"])})
    written = StreamWriter(options(broker, name)).write(iter([batch, batch]))
    assert isinstance(written, Written)
    attempt = written.attempt
    assert (attempt.query, attempt.batch, attempt.partition, attempt.number) == ("a-query", 12, 3, 1)
    (part,) = written.delivered
    # 12 + 3: streams with few rows take turns too
    assert (part.topic, part.partition, part.rows, part.first_offset, part.last_offset) == (name, 3, 4, 0, 3)
    assert written.producer is not None


# -- failures --------------------------------------------------------------------------------------------------------


def options(broker: ServedBroker, topic: str, **changes: Any) -> SinkOptions:
    return SinkOptions(ClientOptions(broker.address), topic, **changes)


def test_an_attempt_that_failed_is_repeated_whole_by_another_producer(
    broker: ServedBroker, topic: Callable[..., str]
) -> None:
    name = topic()
    batches = [pa.record_batch({"value": pa.array([b"%d" % n])}) for n in range(100)]
    writer = BatchWriter(options(broker, name, batch_bytes=100))

    def failing() -> Iterator[pa.RecordBatch]:
        yield from batches[:50]
        raise RuntimeError("the task is lost")

    with pytest.raises(RuntimeError, match="the task is lost"):
        writer.write(failing())
    before = len(consume(broker.address, name))
    assert before < 50
    written = writer.write(iter(batches))
    assert written.delivered[0].rows == 100
    found = Counter(int(row[2]) for row in consume(broker.address, name))
    assert set(found) == set(range(100)) and sum(found.values()) == 100 + before


def test_a_broker_that_is_killed_under_the_writer_keeps_every_row_once_and_in_order(
    tmp_path: Path, unique: Callable[[str], str]
) -> None:
    name = unique("sink")
    with ServedBroker(tmp_path / "data") as served:
        create(served.address, NewTopic(name, 1, 1))
        writing = Writing(options(served, name, batch_bytes=20_000), spread=0)
        restarts: list[threading.Thread] = []
        for number in range(400):
            values = [b"%d" % (number * 100 + at) for at in range(100)]
            writing.add(pa.record_batch({"value": pa.array(values)}))
            if number in (100, 250):
                served.kill()
                restarts.append(threading.Thread(target=served.start))
                restarts[-1].start()
        (delivered,) = writing.finish()
        writing.stop()
        for restart in restarts:
            restart.join()
        assert (delivered.rows, delivered.first_offset, delivered.last_offset) == (40_000, 0, 39_999)
        assert [int(row[2]) for row in consume(served.address, name)] == list(range(40_000))


def test_nothing_is_reported_when_a_batch_is_not_acknowledged(
    broker: ServedBroker, topic: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = Counter[str]()
    produce = KafkaCluster.produce

    def refuse_the_third(self: KafkaCluster, place: tuple[str, int], batch: bytearray) -> int:
        sent["batches"] += 1
        if sent["batches"] == 3:
            raise ClusterError("no answer")
        return produce(self, place, batch)

    monkeypatch.setattr(KafkaCluster, "produce", refuse_the_third)
    batches = [pa.record_batch({"value": pa.array([b"x" * 1000])}) for _ in range(20)]
    with pytest.raises(ClusterError, match="no answer"):
        BatchWriter(options(broker, topic(), batch_bytes=1024)).write(iter(batches))
    assert sent["batches"] == 3  # what was numbered after it is not sent any more


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("value STRING, colour STRING", "a topic has no column colour; it takes key, value, headers, topic, partition"),
        ("key STRING", "there is no column value"),
        ("value INT", "column value must be STRING or BINARY, not INT"),
        ("value STRING, partition BIGINT", "column partition must be INT, not BIGINT"),
        ("value STRING, timestamp BIGINT", "column timestamp must be TIMESTAMP, not BIGINT"),
        ("value STRING, headers MAP<STRING, BINARY>", "column headers must be ARRAY<STRUCT<key: STRING, value: BIN"),
        ("value STRING, headers ARRAY<STRUCT<key: STRING, value: STRING>>", "column headers must be ARRAY<STRUCT<"),
    ],
)
def test_columns_that_cannot_be_written_are_refused_before_any_task_runs(
    spark: SparkSession, broker: ServedBroker, topic: Callable[..., str], schema: str, message: str
) -> None:
    with pytest.raises(PySparkException) as refused:
        write(spark.createDataFrame([], schema), broker, topic())
    assert message in str(refused.value)


def test_what_has_nowhere_to_go_is_refused(
    spark: SparkSession, broker: ServedBroker, topic: Callable[..., str], unique: Callable[[str], str]
) -> None:
    rows = spark.createDataFrame([("v",)], "value STRING")
    with pytest.raises(PySparkException, match="set the option topic, or select a column topic"):
        write(rows, broker)
    missing = unique("missing")
    create = f"there is no topic {missing} at .*; create it, as with `millstream topic create {missing}"
    with pytest.raises(PySparkException, match=create):
        write(rows, broker, missing)
    with pytest.raises(PySparkException, match=create):
        write(rows.withColumn("topic", F.lit(missing)), broker)
    for none in (F.lit(None).cast("string"), F.lit("")):
        with pytest.raises(PySparkException, match="a row has no topic"):
            write(rows.withColumn("topic", none), broker)
    name = topic(partitions=2)
    with pytest.raises(PySparkException, match=f"partition 2 of topic {name}, which has partitions 0 to 1"):
        write(rows.withColumn("partition", F.lit(2)), broker, name)
    with pytest.raises(PySparkException, match="its timestamp lies before 1970"):
        write(rows.withColumn("timestamp", F.timestamp_seconds(F.lit(-1))), broker, name)


def test_a_topic_is_not_overwritten(
    spark: SparkSession, broker: ServedBroker, topic: Callable[..., str], tmp_path: Path
) -> None:
    rows = spark.createDataFrame([("v",)], "value STRING")
    writer = rows.write.format("millstream").option("bootstrap.servers", broker.address).option("topic", topic())
    with pytest.raises(PySparkException, match=r'a topic can only be added to: use mode\("append"\)'):
        writer.mode("overwrite").save()
    plain = rows.write.format("millstream").option("bootstrap.servers", broker.address).option("topic", topic())
    with pytest.raises(PySparkException, match="UNSUPPORTED_DATA_SOURCE_SAVE_MODE"):  # as docs/spark.md says
        plain.save()
    counts = spark.readStream.format("rate").load().groupBy("value").count().selectExpr("CAST(value AS STRING) value")
    stream = counts.writeStream.format("millstream").outputMode("complete").option("topic", topic())
    stream = stream.option("bootstrap.servers", broker.address).option("checkpointLocation", str(tmp_path))
    with pytest.raises(StreamingQueryException, match="a topic can only be added to"):
        stream.trigger(availableNow=True).start().awaitTermination(60)


def test_a_record_that_is_too_large_is_named_with_topic_and_size(
    spark: SparkSession, broker: ServedBroker, topic: Callable[..., str]
) -> None:
    name = topic()
    rows = spark.createDataFrame([(bytearray(b"x" * 2_000_000),)], "value BINARY")
    with pytest.raises(PySparkException, match=f"a record of 20000[0-9]+ bytes is larger than topic {name} takes"):
        write(rows, broker, name)
    roomy = topic(max_message_bytes="4000000")
    write(rows, broker, roomy)
    assert [len(row[2]) for row in consume(broker.address, roomy)] == [2_000_000]


def test_a_topic_that_takes_only_small_batches_says_which_option_to_set(
    broker: ServedBroker, topic: Callable[..., str]
) -> None:
    name = topic(max_message_bytes="10000")
    batch = pa.record_batch({"value": pa.array([b"x" * 1000] * 100)})
    with pytest.raises(SinkError, match=f"topic {name} takes no batch of 10[0-9]+ bytes; set the option max.request"):
        BatchWriter(options(broker, name)).write(iter([batch]))
    BatchWriter(options(broker, name, batch_bytes=10_000)).write(iter([batch]))
    assert len(consume(broker.address, name)) == 100


def test_a_broker_that_does_not_answer_is_one_clear_error(spark: SparkSession) -> None:
    rows = spark.createDataFrame([("v",)], "value STRING").write.format("millstream").mode("append")
    rows = rows.options(**{"bootstrap.servers": "127.0.0.1:1", "topic": "t", "request.timeout.ms": "500"})
    with pytest.raises(PySparkException, match=r"cannot find t within 0\.5 s: no broker answers at 127\.0\.0\.1:1"):
        rows.save()


# -- another broker --------------------------------------------------------------------------------------------------


def test_it_writes_to_a_broker_that_is_not_ours(spark: SparkSession) -> None:
    mock = Producer({"bootstrap.servers": "mock", "test.mock.num.brokers": 3})
    nodes = mock.list_topics("mocked", timeout=10).brokers.values()
    address = ",".join(f"{node.host}:{node.port}" for node in nodes)
    rows = spark.range(5000, numPartitions=2).selectExpr("CAST(id AS STRING) key", "CAST(id * 2 AS STRING) value")
    writer = rows.write.format("millstream").mode("append").option("bootstrap.servers", address)
    writer.options(topic="mocked", compression="lz4", **{"max.request.size": "10000"}).save()
    cluster = KafkaCluster(address)
    found = {}
    for index in cluster.partitions(["mocked"])["mocked"]:
        offset, end = 0, cluster.latest([("mocked", index)])["mocked", index]
        while offset < end:
            for record in codec.iterate(cluster.fetch(("mocked", index), offset, 1 << 20, 500).records):
                found[record.key] = record.value
                offset = record.offset + 1
    cluster.close()
    assert found == {b"%d" % number: b"%d" % (2 * number) for number in range(5000)}
