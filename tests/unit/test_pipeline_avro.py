"""Avro values into columns, without Spark."""

from __future__ import annotations

import io
import json
import struct
from datetime import datetime, time
from decimal import Decimal
from typing import Any
from uuid import UUID

import fastavro
import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import StringType, StructField, StructType

from millstream.pipeline import avro

BAD, COLUMN = "_bad", "_bad_column"
ID = UUID("12345678-1234-5678-1234-567812345678")


def record(kind: Any, **more: Any) -> str:
    return json.dumps({"type": "record", "name": "Click", "fields": [{"name": "x", "type": kind}], **more})


def encoded(schema: str, x: Any) -> bytes:
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(json.loads(schema)), {"x": x})
    return stream.getvalue()


def read(schema: str, *values: bytes, ids: dict[int, str] | None = None) -> list[dict[str, Any]]:
    """As `avro.decode` does it in a task; without the column that is to blame, where none is."""
    more = [StructField(BAD, StringType()), StructField(COLUMN, StringType())]
    kind = to_arrow_type(StructType([*avro.columns(schema).fields, *more]), timezone="UTC")
    reader = avro.Reader(schema, ids or {})
    rows = avro.as_structs([reader.row(value, BAD) for value in values], kind, BAD, COLUMN).to_pylist()
    return [{key: each for key, each in row.items() if key != COLUMN or each is not None} for row in rows]


@pytest.mark.parametrize(
    ("kind", "written", "column", "wanted"),
    [
        ({"type": "int", "logicalType": "time-millis"}, time(0, 0, 1), "int", 1_000),
        ({"type": "long", "logicalType": "time-micros"}, time(0, 0, 1), "bigint", 1_000_000),
        ({"type": "long", "logicalType": "local-timestamp-millis"}, datetime(2026, 1, 2), "timestamp_ntz", None),
        ({"type": "long", "logicalType": "local-timestamp-micros"}, datetime(2026, 1, 2), "timestamp_ntz", None),
        ({"type": "array", "items": {"type": "string", "logicalType": "uuid"}}, [ID], "array<string>", [str(ID)]),
        ({"type": "string", "logicalType": "date"}, "today", "string", None),
        ({"type": "bytes", "logicalType": "decimal", "precision": 5, "scale": 2}, Decimal(1), "decimal(5,2)", None),
    ],
)  # fmt: skip
def test_every_logical_type_is_a_column(kind: Any, written: Any, column: str, wanted: Any) -> None:
    schema = record(kind)
    assert avro.columns(schema)["x"].dataType.simpleString() == column
    assert read(schema, encoded(schema, written)) == [{"x": written if wanted is None else wanted, BAD: None}]


def test_a_logical_type_beside_a_fields_type_is_none() -> None:
    """A slip that readers of Avro pass over: it belongs into the type."""
    schema = json.dumps(
        {"type": "record", "name": "Click", "fields": [{"name": "x", "type": "bytes", "logicalType": "decimal"}]}
    )
    assert avro.columns(schema).simpleString() == "struct<x:binary>"
    assert read(schema, encoded(schema, b"ab")) == [{"x": b"ab", BAD: None}]


def test_a_type_is_called_by_its_full_name_or_by_its_short_one() -> None:
    inner = {"type": "record", "name": "Point", "fields": [{"name": "at", "type": "int"}]}
    fields = [{"name": "a", "type": inner}, {"name": "b", "type": "com.example.Point"}, {"name": "c", "type": "Point"}]
    schema = json.dumps({"type": "record", "name": "Click", "namespace": "com.example", "fields": fields})
    assert avro.columns(schema).simpleString() == "struct<a:struct<at:int>,b:struct<at:int>,c:struct<at:int>>"


def test_a_value_that_no_column_holds_is_one_bad_row() -> None:
    schema = record({"type": "bytes", "logicalType": "decimal", "precision": 5, "scale": 2})
    wide = record({"type": "bytes", "logicalType": "decimal", "precision": 20, "scale": 2})
    fits, does_not = read(schema, encoded(schema, Decimal("1.25")), encoded(wide, Decimal("1234567890.25")))
    assert fits == {"x": Decimal("1.25"), BAD: None}
    assert does_not["x"] is None and does_not[BAD].startswith("the value does not fit this schema")
    assert does_not[COLUMN] == "x"


def test_a_value_without_confluents_prefix_is_not_read_from_its_middle() -> None:
    schema = record("string")
    with_prefix, without, short = read(
        schema, b"\0\0\0\0\7" + encoded(schema, "click"), encoded(schema, "click click"), b"\0\0", ids={7: schema}
    )
    assert with_prefix == {"x": "click", BAD: None}
    assert "does not begin with a zero" in without[BAD] and "does not begin with a zero" in short[BAD]


def two_fields(*names: str, **more: Any) -> str:
    fields = [{"name": name, "type": "string"} for name in names] + [
        {"name": name, "type": "string", "default": default} for name, default in more.items()
    ]
    return json.dumps({"type": "record", "name": "Order", "fields": fields})


def framed(number: int, schema: str, row: dict[str, str]) -> bytes:
    """As Confluent's serializer writes it: a zero, the id in four bytes, the datum."""
    stream = io.BytesIO(struct.pack(">bI", 0, number))
    stream.seek(0, io.SEEK_END)
    fastavro.schemaless_writer(stream, fastavro.parse_schema(json.loads(schema)), row)
    return stream.getvalue()


def test_a_value_of_another_schema_is_never_read_as_one_of_this() -> None:
    """Both are two strings, so that the bytes of one make sense in the other."""
    ours, other = two_fields("id", "customer"), two_fields("customer", "id")
    row = {"id": "o-1", "customer": "ann"}
    known, unknown = read(ours, framed(17, ours, row), framed(18, other, row), ids={17: ours})
    assert known == {**row, BAD: None}
    assert unknown["id"] is unknown["customer"] is None
    assert unknown[BAD] == "the value was written by the schema with id 18; source.schema_ids has 17"
    [resolved] = read(ours, framed(18, other, row), ids={17: ours, 18: other})
    assert resolved == {**row, BAD: None}


def test_values_of_an_older_schema_have_the_defaults_of_this_one() -> None:
    new, old = two_fields("id", coupon="none"), two_fields("id")
    assert read(new, framed(3, old, {"id": "o-1"}), ids={3: old}) == [{"id": "o-1", "coupon": "none", BAD: None}]
    avro.refuse_writer(new, old)
    with pytest.raises(avro.BadAvro, match=r"its values cannot be read by source\.schema"):
        avro.refuse_writer(two_fields("id", "customer"), old)
    number, moment = record("long"), record({"type": "long", "logicalType": "timestamp-millis"})
    with pytest.raises(avro.BadAvro, match=r"its field x is bigint, and timestamp in source\.schema"):
        avro.refuse_writer(moment, number)


@pytest.mark.parametrize(
    ("schema", "wanted"),
    [
        (record({"type": "bytes", "logicalType": "decimal", "precision": 50}), "a decimal of 50 digits cannot be"),
        (record("int", fields=[{"name": name, "type": "int"} for name in "aA"]), "the field A occurs twice"),
    ],
)  # fmt: skip
def test_what_cannot_be_columns_is_refused(schema: str, wanted: str) -> None:
    with pytest.raises(avro.BadAvro, match=wanted):
        avro.columns(schema)


def test_rows_that_fit_come_as_they_are() -> None:
    kind = pa.struct([("x", pa.int32()), (BAD, pa.string()), (COLUMN, pa.string())])
    made = avro.as_structs([{"x": 1}, {}, {"x": 2**40}], kind, BAD, COLUMN)
    assert made.field("x").to_pylist() == [1, None, None] and made.field(COLUMN).to_pylist() == [None, None, "x"]
