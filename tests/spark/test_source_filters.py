"""Filters of a query in the read: less is fetched, and the rows are those that Spark would have kept anyway."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringStartsWith,
)

from millstream.spark.filters import Bounds, FilteringReader
from millstream.spark.options import parse_source
from millstream.spark.ranges import RangePartition
from millstream.spark.schema import full_schema
from tests.serving import ServedBroker
from tests.spark.topics import Row, Sent, Topics, from_spark

SKEW_MS = 5_000
RECORDS = 400
PARTITIONS = 3
PUSHDOWN = "spark.sql.python.filterPushdown.enabled"

TESTS: dict[type[Filter], Callable[[Any, Any], bool]] = {
    EqualTo: lambda have, value: have == value,
    EqualNullSafe: lambda have, value: have == value,
    GreaterThan: lambda have, value: have > value,
    GreaterThanOrEqual: lambda have, value: have >= value,
    LessThan: lambda have, value: have < value,
    LessThanOrEqual: lambda have, value: have <= value,
    In: lambda have, value: have in value,
    StringStartsWith: lambda have, value: have.startswith(value),
}


class Written:
    """Two topics, a record a second in each partition, times out of order by up to `SKEW_MS`."""

    def __init__(self, topics: Topics) -> None:
        self.topics = topics
        self.names = [topics.create("filtered-a", PARTITIONS), topics.create("filtered-b", PARTITIONS)]
        self.start_ms = time.time_ns() // 1_000_000
        pick = random.Random(5)
        for name in self.names:
            records = [
                Sent(b"%d" % at, partition=index, timestamp_ms=self.time(at) + pick.randint(-SKEW_MS, SKEW_MS) // 2)
                for index in range(PARTITIONS)
                for at in range(RECORDS)
            ]
            topics.produce(name, records)
        self.rows = [row._replace(headers=None) for row in topics.rows(*self.names)]

    def time(self, at: int) -> int:
        return self.start_ms + at * 1000


@pytest.fixture(scope="module")
def written(broker: ServedBroker) -> Written:
    return Written(Topics(broker.address))


def reader(written: Written, *filters: Filter, **options: str) -> FilteringReader:
    given = {
        "bootstrap.servers": written.topics.address,
        "subscribe": ",".join(written.names),
        "timestampSkewMs": str(SKEW_MS),
        **options,
    }
    made = FilteringReader(parse_source(given, streaming=False), full_schema(False))
    left = list(made.pushFilters(list(filters)))
    assert left == list(filters)  # Spark filters what comes out once more
    return made


def planned(reader: FilteringReader) -> dict[tuple[str, int], tuple[int, int]]:
    parts = [part.range for part in reader.partitions() if isinstance(part, RangePartition)]
    return {part.place: (part.start, part.end) for part in parts}


def moment(ms: float) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=ms)


# -- what is planned -------------------------------------------------------------------------------------------------


def test_a_filter_on_topic_partition_or_offset_plans_exactly_that(written: Written) -> None:
    a, b = written.names
    everything = {(name, index): (0, RECORDS) for name in (a, b) for index in range(PARTITIONS)}
    assert planned(reader(written)) == everything
    assert planned(reader(written, EqualTo(("topic",), a), In(("partition",), (0, 2, 9)))) == {
        (a, 0): (0, RECORDS),
        (a, 2): (0, RECORDS),
    }
    assert planned(reader(written, In(("topic",), (b, "c")), GreaterThan(("partition",), 1))) == {(b, 2): (0, RECORDS)}
    assert planned(
        reader(written, EqualTo(("topic",), a), EqualTo(("Partition",), 1), GreaterThanOrEqual(("offset",), 390))
    ) == {(a, 1): (390, RECORDS)}
    some = planned(reader(written, GreaterThanOrEqual(("offset",), 10), LessThanOrEqual(("offset",), 12)))
    assert set(some.values()) == {(10, 13)}
    assert planned(reader(written, EqualTo(("offset",), RECORDS))) == {}
    assert planned(reader(written, EqualTo(("topic",), a), EqualTo(("topic",), b))) == {}


def test_a_query_over_a_minute_plans_little_more_than_a_minute(written: Written) -> None:
    first, last = written.time(100), written.time(160)
    minute = reader(written, GreaterThanOrEqual(("timestamp",), moment(first)), LessThan(("timestamp",), moment(last)))
    for start, end in planned(minute).values():
        assert 95 <= start <= 103 and 160 <= end <= 170
    open_end = reader(written, LessThan(("timestamp",), moment(last)), timestampSkewMs="-1")
    assert set(planned(open_end).values()) == {(0, RECORDS)}
    later = reader(written, GreaterThan(("timestamp",), moment(written.time(10 * RECORDS))))
    assert planned(later) == {}


def test_filters_that_say_nothing_about_ranges_cut_nothing() -> None:
    for filter_ in (
        IsNotNull(("offset",)),
        Not(EqualTo(("partition",), 1)),
        StringStartsWith(("topic",), "a"),
        EqualTo(("value",), b"x"),
        EqualNullSafe(("offset",), None),
        GreaterThan(("headers", "key"), "x"),
    ):
        assert Bounds().narrowed(filter_) == Bounds()


def test_times_are_taken_to_the_millisecond() -> None:
    for ms in (1_700_000_000_123, 1_794_788_511_001, 4_102_444_799_999, -1):
        assert Bounds().narrowed(EqualTo(("timestamp",), moment(ms))).of("timestamp") == (ms, ms)
        assert Bounds().narrowed(LessThan(("timestamp",), moment(ms + 0.5))).of("timestamp")[1] == ms
    elsewhere = datetime(2030, 1, 1, 2, tzinfo=timezone(timedelta(hours=2)))
    assert Bounds().narrowed(EqualTo(("timestamp",), elsewhere)).of("timestamp")[0] == 1_893_456_000_000


# -- what comes out --------------------------------------------------------------------------------------------------


def random_filter(pick: random.Random, written: Written) -> tuple[Filter, Callable[[Row], bool]]:
    """A filter, and the same as a test of a row."""
    column = pick.choice(("topic", "partition", "offset", "timestamp", "timestamp"))

    def value() -> Any:
        if column == "topic":
            return pick.choice((*written.names, "other"))
        if column == "timestamp":
            return moment(pick.choice(written.rows).timestamp_ms + pick.choice((0, 0, 1, -1, 0.5)))
        return pick.randrange(PARTITIONS if column == "partition" else RECORDS)

    kind = pick.choice([one for one in TESTS if (one is StringStartsWith) <= (column == "topic")])
    wanted = tuple(value() for _ in range(pick.randrange(1, 5))) if kind is In else value()
    name = "timestamp_ms" if column == "timestamp" else column

    def holds(row: Row) -> bool:
        have = getattr(row, name)
        return TESTS[kind](moment(have) if column == "timestamp" else have, wanted)

    return kind((column,), wanted), holds  # type: ignore[call-arg]


@pytest.mark.parametrize("seed", range(60))
def test_no_row_is_missed_whatever_the_filters_are(written: Written, seed: int) -> None:
    pick = random.Random(seed)
    chosen = [random_filter(pick, written) for _ in range(pick.randrange(1, 4))]
    ranges = planned(reader(written, *(filter_ for filter_, _ in chosen)))
    wanted = [row for row in written.rows if all(holds(row) for _, holds in chosen)]
    for row in wanted:
        start, end = ranges[row.topic, row.partition]
        assert start <= row.offset < end


@pytest.fixture
def without_pushdown(spark: SparkSession) -> Iterator[None]:
    spark.conf.set(PUSHDOWN, "false")
    yield
    spark.conf.set(PUSHDOWN, "true")


def frame(spark: SparkSession, written: Written, **options: Any) -> DataFrame:
    given = {"bootstrap.servers": written.topics.address, "subscribe": ",".join(written.names), **options}
    return spark.read.format("millstream").options(**given).load()


def queries(written: Written) -> list[tuple[str, Callable[[Row], bool]]]:
    a, _ = written.names
    early, late = written.time(50), written.time(70)

    def text(ms: int) -> str:
        return moment(ms).strftime("TIMESTAMP '%Y-%m-%d %H:%M:%S.%f'")

    return [
        (
            f"timestamp >= {text(early)} AND timestamp < {text(late)}",
            lambda row: early <= row.timestamp_ms < late,
        ),
        (
            f"topic = '{a}' AND partition IN (0, 1) AND offset BETWEEN 395 AND 1000 AND value != '399'",
            lambda row: row.topic == a and row.partition < 2 and row.offset >= 395 and row.value != b"399",
        ),
    ]


def test_spark_gets_the_rows_it_asked_for_and_fetches_few_more(spark: SparkSession, written: Written) -> None:
    options = {"timestampSkewMs": SKEW_MS, "maxRecordsPerPartition": 10, "pushFilters": "true"}
    assert frame(spark, written, **options).rdd.getNumPartitions() == 2 * PARTITIONS * RECORDS // 10
    for (condition, holds), tasks_max in zip(queries(written), (2 * PARTITIONS * 4, 2), strict=True):
        kept = frame(spark, written, **options).filter(condition)
        assert from_spark(kept) == [row for row in written.rows if holds(row)]
        assert kept.rdd.getNumPartitions() <= tasks_max


def test_a_frame_that_is_used_again_has_all_its_rows(spark: SparkSession, written: Written) -> None:
    source = frame(spark, written)
    assert source.filter("partition = 0").count() == 2 * RECORDS
    assert source.count() == 2 * PARTITIONS * RECORDS
    both = source.filter("partition = 0").union(source.filter("partition = 1"))
    assert both.count() == 4 * RECORDS


@pytest.mark.usefixtures("without_pushdown")
def test_without_pushdown_the_same_queries_work(spark: SparkSession, written: Written) -> None:
    for condition, holds in queries(written):
        kept = frame(spark, written).filter(condition)
        assert from_spark(kept) == [row for row in written.rows if holds(row)]


@pytest.mark.usefixtures("without_pushdown")
def test_a_read_that_is_to_take_filters_says_which_setting_of_spark_it_needs(
    spark: SparkSession, written: Written
) -> None:
    with pytest.raises(AnalysisException, match=PUSHDOWN):
        frame(spark, written, pushFilters="true").filter("partition = 0").count()
