"""Avro values, read by fastavro: Spark's own reader is a JAR that the wheel does not have.

A value is one datum in Avro's binary encoding. With `confluent = "true"` among the source's options the five bytes that
Confluent's serializers put in front (a zero and the schema's number) are skipped.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from millstream.errors import MillstreamError

PREFIX_BYTES = 5
_PLAIN: dict[str, DataType] = {
    "boolean": BooleanType(),
    "int": IntegerType(),
    "long": LongType(),
    "float": FloatType(),
    "double": DoubleType(),
    "bytes": BinaryType(),
    "string": StringType(),
    "enum": StringType(),
    "fixed": BinaryType(),
}
_LOGICAL: dict[str, DataType] = {
    "date": DateType(),
    "timestamp-millis": TimestampType(),
    "timestamp-micros": TimestampType(),
    "uuid": StringType(),
}


class BadAvro(MillstreamError):
    """A schema that cannot be columns."""


def columns(schema: str) -> StructType:
    """Spark's columns for an Avro record."""
    made = _spark_type(json.loads(schema), {})
    if not isinstance(made, StructType):
        raise BadAvro("the Avro schema must be a record: its fields become columns")
    return made


def decode(records: DataFrame, schema: str, options: Mapping[str, str], bad: str) -> DataFrame:
    """Adds the struct `_parsed`: the fields, and in `bad` why they could not be read."""
    parsed = StructType([*columns(schema).fields, StructField(bad, StringType())])
    out = StructType([*records.schema.fields, StructField("_parsed", parsed)])
    skip = PREFIX_BYTES if options.get("confluent", "false").lower() == "true" else 0

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import fastavro

        kind = to_arrow_type(parsed, timezone="UTC")
        known = fastavro.parse_schema(json.loads(schema))
        for batch in batches:
            rows = [_read(fastavro, known, value, skip, bad) for value in batch.column("value").to_pylist()]
            names = [*batch.schema.names, "_parsed"]
            yield pa.RecordBatch.from_arrays([*batch.columns, pa.array(rows, kind)], names=names)

    return records.mapInArrow(read, out)


def _read(fastavro: Any, schema: Any, value: bytes | None, skip: int, bad: str) -> dict[str, Any]:
    if value is None:
        return {}
    stream = io.BytesIO(value)
    stream.seek(skip)
    try:
        row: dict[str, Any] = fastavro.schemaless_reader(stream, schema, None)
    except Exception as error:  # fastavro raises what its C code meets: EOFError, IndexError, UnicodeDecodeError...
        return {bad: f"the value is not Avro of this schema: {type(error).__name__} {error}".rstrip()}
    if stream.tell() != len(value):
        return {bad: f"the value is not Avro of this schema: {len(value) - stream.tell()} bytes are left over"}
    return {name: str(item) if type(item).__name__ == "UUID" else item for name, item in row.items()}


def _spark_type(schema: Any, named: dict[str, DataType | None]) -> DataType:
    if isinstance(schema, list):
        return _union(schema, named)
    if isinstance(schema, str):
        if schema in named and named[schema] is None:
            raise BadAvro(f"the Avro type {schema} holds itself, and cannot be a column")
        return named.get(schema) or _plain(schema)
    kind, name = schema["type"], schema.get("name")
    if isinstance(kind, dict | list):
        return _spark_type(kind, named)
    if name is not None:
        named[name] = None
    made = _complex_type(schema, kind, named)
    if name is not None:
        named[name] = made
    return made


def _complex_type(schema: Any, kind: str, named: dict[str, DataType | None]) -> DataType:
    logical = schema.get("logicalType")
    if logical == "decimal":
        return DecimalType(schema["precision"], schema.get("scale", 0))
    if logical in _LOGICAL:
        return _LOGICAL[logical]
    if kind == "record":
        fields = [StructField(field["name"], _spark_type(field["type"], named)) for field in schema["fields"]]
        return StructType(fields)
    if kind == "array":
        return ArrayType(_spark_type(schema["items"], named))
    if kind == "map":
        return MapType(StringType(), _spark_type(schema["values"], named))
    return _plain(kind)


def _plain(kind: str) -> DataType:
    if kind not in _PLAIN:
        raise BadAvro(f"the Avro type {kind} cannot be a column")
    return _PLAIN[kind]


def _union(schema: list[Any], named: dict[str, DataType | None]) -> DataType:
    others = [each for each in schema if each != "null"]
    if len(others) != 1:
        raise BadAvro(f"the union of {len(others)} Avro types cannot be a column; unions of one type and null can")
    return _spark_type(others[0], named)
