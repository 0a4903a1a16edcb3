"""Values into columns: what cannot be decoded, or not as a whole, is marked and never half a row."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import pytest
from pyspark.sql import SparkSession

from millstream.pipeline import decode, deliveries
from millstream.pipeline.spec import SourceSpec, TopicSink
from millstream.spark.schema import full_schema

AT = datetime(2026, 1, 1, tzinfo=UTC)


def causes(spark: SparkSession, source: SourceSpec, values: Sequence[str | None]) -> list[str | None]:
    rows = [(None, value and value.encode(), "t", 0, at, AT, 0) for at, value in enumerate(values)]
    found = decode.decode(spark.createDataFrame(rows, full_schema(False)), source)
    return [row[0] for row in found.orderBy("_offset").select(decode.CAUSE).collect()]


def test_what_follows_a_json_object_is_not_dropped_in_silence(spark: SparkSession) -> None:
    source = SourceSpec("t", "t", schema="a INT, b STRING, s STRUCT<x: INT>")
    good = ['{"a":1}', ' {"a":1}\r\n', '{"s":{"x":1},"b":"} {"}', "{'b':'} x'}", '{"b":[{"x":1},{"x":2}]}', None]
    assert causes(spark, source, good) == [None] * len(good)
    more = ['{"a":1}\n{"a":2}', '{"a":1},{"a":2}', '{"a":1}x', '{"a":1} ]', '{"a":1}}', '{"a":1}"']
    more += ['{"a":1},{"a":2}]', '{"a":1},0] {"a":2}']  # the end of an array
    assert causes(spark, source, more) == ["the value continues after its JSON object"] * len(more)


@pytest.mark.parametrize("format", ["json", "csv"])
def test_columns_may_have_any_name(spark: SparkSession, format: str) -> None:
    source = SourceSpec("t", "t", format=format, schema="`a``b` INT, `c.d` INT, `größe` INT")
    value = '{"a`b": 1, "c.d": 2, "größe": 3}' if format == "json" else "1,2,3"
    rows = spark.createDataFrame([(None, value.encode(), "t", 0, 0, AT, 0)], full_schema(False))
    view = decode.good(decode.decode(rows, source))
    [row] = deliveries.as_records(view, TopicSink("s", "t", "out", key="a`b")).collect()
    assert (row["key"], row["value"]) == ("1", '{"a`b":1,"c.d":2,"größe":3}')


def columns_to_blame(spark: SparkSession, source: SourceSpec, values: Sequence[str]) -> list[str | None]:
    rows = [(None, value.encode(), "t", 0, at, AT, 0) for at, value in enumerate(values)]
    found = decode.bad(decode.decode(spark.createDataFrame(rows, full_schema(False)), source))
    return [row[0] for row in found.orderBy("_offset").select(decode.COLUMN).collect()]


def test_the_column_that_cannot_be_decoded_is_named(spark: SparkSession) -> None:
    schema = "user STRING, ms LONG, `a b` INT, s STRUCT<x: INT>, l ARRAY<INT>"
    values = [
        '{"ms":"soon"}',
        '{"user":1,"a b":"x"}',
        '{"s":{"x":"y"}}',
        '{"l":["z"]}',
        '{"ms":1.5,"a b":"x"}',
        "{",
        "5",
    ]
    blamed = columns_to_blame(spark, SourceSpec("t", "t", schema=schema), values)
    assert blamed == ["ms", "a b", "s", "l", "ms", None, None]
    csv = SourceSpec("t", "t", format="csv", schema="user STRING, ms LONG, `a b` INT")
    assert columns_to_blame(spark, csv, ["u,soon,1", "u,1,x", "u,1", "u,1,2,3"]) == ["ms", "a b", None, None]
