"""Avro values, read by fastavro: Spark's own reader is a JAR that the wheel lacks.

A value is one datum in Avro's binary encoding. Confluent's serializers put five bytes in front of it: a zero and the id
of the writer's schema. With `schema_ids` the source maps each id to a schema. A value is read with its writer's schema
and resolved to the source's own. A value with another id cannot be read, because the bytes of one schema are often
valid in another.

Logical types are read as in Spark's own reader, if Spark has such a type. A value of any other logical type is its
plain stored value, such as milliseconds for a time of day.
"""

from __future__ import annotations

import io
import json
import struct
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
    TimestampNTZType,
    TimestampType,
)

from millstream.core.errors import MillstreamError

_PREFIX = struct.Struct(">BI")
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
_LOGICAL: dict[tuple[str, str], DataType] = {
    ("int", "date"): DateType(),
    ("long", "timestamp-millis"): TimestampType(),
    ("long", "timestamp-micros"): TimestampType(),
    ("long", "local-timestamp-millis"): TimestampNTZType(),
    ("long", "local-timestamp-micros"): TimestampNTZType(),
}
_CONVERTED = (DateType, DecimalType, TimestampNTZType, TimestampType)
"""Converted from numbers or bytes, by the writer's schema."""
_DECIMALS = ("bytes", "fixed")
_DIGITS_MAX = 38


class BadAvro(MillstreamError):
    """A schema that does not map to columns."""


def columns(schema: str) -> StructType:
    """Spark's columns for an Avro record."""
    made = _spark_type(json.loads(schema), {}, "")
    if not isinstance(made, StructType):
        raise BadAvro("the Avro schema must be a record: its fields become columns")
    return made


def reader_schema(schema: str) -> Any:
    """The schema for fastavro, without logical types whose Python values no column holds."""
    return _bare(json.loads(schema))


def refuse_writer(schema: str, written_by: str) -> None:
    """Raises BadAvro if values of one schema cannot be read as another."""
    import fastavro
    from fastavro.utils import generate_one

    ours = {field.name: field.dataType for field in columns(schema)}
    for field in columns(written_by):
        kinds = ours.get(field.name, field.dataType), field.dataType
        if kinds[0] != kinds[1] and any(isinstance(kind, _CONVERTED) for kind in kinds):
            wanted, given = (kind.simpleString() for kind in kinds)
            raise BadAvro(f"its field {field.name} is {given}, and {wanted} in source.schema")
    writer = fastavro.parse_schema(json.loads(written_by))
    sample = io.BytesIO()
    fastavro.schemaless_writer(sample, writer, generate_one(writer))
    sample.seek(0)
    try:
        fastavro.schemaless_reader(sample, writer, fastavro.parse_schema(json.loads(schema)))
    except fastavro.read.SchemaResolutionError as error:
        raise BadAvro(f"its values cannot be read by source.schema: {error}") from error


def decode(records: DataFrame, schema: str, schema_ids: Mapping[int, str], bad: str, column: str) -> DataFrame:
    """Adds the struct `_parsed`: the fields, the cause of a failure in `bad`, and in `column` its column, if known.

    Without `schema_ids` values have no id in front.
    """
    parsed = StructType([*columns(schema).fields, StructField(bad, StringType()), StructField(column, StringType())])
    out = StructType([*records.schema.fields, StructField("_parsed", parsed)])

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        kind = to_arrow_type(parsed, timezone="UTC")
        reader = Reader(schema, schema_ids)
        for batch in batches:
            rows = [reader.row(value, bad) for value in batch.column("value").to_pylist()]
            names = [*batch.schema.names, "_parsed"]
            yield pa.RecordBatch.from_arrays([*batch.columns, as_structs(rows, kind, bad, column)], names=names)

    return records.mapInArrow(read, out)


class Reader:
    """Converts values to rows, in a task."""

    def __init__(self, schema: str, schema_ids: Mapping[int, str]) -> None:
        import fastavro

        self._fastavro = fastavro
        self._schema = fastavro.parse_schema(reader_schema(schema))
        self._writers = {
            number: self._schema if written_by == schema else fastavro.parse_schema(reader_schema(written_by))
            for number, written_by in schema_ids.items()
        }

    def row(self, value: bytes | None, bad: str) -> dict[str, Any]:
        if value is None:
            return {}
        writer, start = self._schema, 0
        if self._writers:
            if len(value) < _PREFIX.size or value[0] != 0:
                return {bad: "the value does not begin with a zero byte and a schema id, as Confluent's serializers do"}
            number, start = _PREFIX.unpack_from(value)[1], _PREFIX.size
            if number not in self._writers:
                known = ", ".join(map(str, sorted(self._writers)))
                return {bad: f"the value was written by the schema with id {number}; source.schema_ids has {known}"}
            writer = self._writers[number]
        stream = io.BytesIO(value)
        stream.seek(start)
        try:
            resolved_to = None if writer is self._schema else self._schema
            row: Any = self._fastavro.schemaless_reader(stream, writer, resolved_to)
        except Exception as error:  # fastavro raises many kinds: EOFError, IndexError, UnicodeDecodeError...
            return {bad: f"the value is not Avro of this schema: {type(error).__name__} {error}".rstrip()}
        if stream.tell() != len(value):
            return {bad: f"the value is not Avro of this schema: {len(value) - stream.tell()} bytes are left over"}
        return dict(row)


def as_structs(rows: list[dict[str, Any]], kind: pa.StructType, bad: str, column: str) -> pa.Array:
    """The rows in Arrow's format; a row with a value that no column holds is a bad row, and stops nothing."""
    try:
        return pa.array(rows, kind)
    except (pa.ArrowException, OverflowError, ValueError, TypeError):
        return pa.array([_that_fits(row, kind, bad, column) for row in rows], kind)


def _that_fits(row: dict[str, Any], kind: pa.StructType, bad: str, column: str) -> dict[str, Any]:
    for field in kind:
        try:
            pa.array([row.get(field.name)], field.type)
        except (pa.ArrowException, OverflowError, ValueError, TypeError) as error:
            return {bad: f"the value does not fit this schema: {error}", column: field.name}
    return row


def _bare(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_bare(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kind = schema.get("type")
    bare = {key: _bare(value) if key in ("type", "items", "values") else value for key, value in schema.items()}
    if isinstance(schema.get("fields"), list):
        bare["fields"] = [{**field, "type": _bare(field["type"])} for field in schema["fields"]]
    if isinstance(kind, str) and _logical(schema, kind) is None:
        bare.pop("logicalType", None)
    return bare


def _logical(schema: Mapping[str, Any], kind: str) -> DataType | None:
    logical = schema.get("logicalType")
    if logical == "decimal" and kind in _DECIMALS:
        if schema["precision"] > _DIGITS_MAX:
            raise BadAvro(f"a decimal of {schema['precision']} digits cannot be a column; {_DIGITS_MAX} are the most")
        return DecimalType(schema["precision"], schema.get("scale", 0))
    return _LOGICAL.get((kind, str(logical)))


def _spark_type(schema: Any, named: dict[str, DataType | None], space: str) -> DataType:
    """`named` holds the types so far, by their full names; `space` is the enclosing namespace."""
    if isinstance(schema, list):
        return _union(schema, named, space)
    if isinstance(schema, str):
        full = schema if schema in _PLAIN else _full(schema, space)
        if full in named and named[full] is None:
            raise BadAvro(f"the Avro type {schema} is recursive and cannot be a column")
        return named.get(full) or named.get(schema) or _plain(schema)
    kind = schema["type"]
    if isinstance(kind, dict | list):
        return _spark_type(kind, named, space)
    if "name" not in schema:
        return _complex_type(schema, kind, named, space)
    full = _full(schema["name"], schema.get("namespace", space))
    named[full] = None
    named[full] = made = _complex_type(schema, kind, named, full.rpartition(".")[0])
    return made


def _full(name: str, space: str) -> str:
    return name if "." in name or not space else f"{space}.{name}"


def _complex_type(schema: Any, kind: str, named: dict[str, DataType | None], space: str) -> DataType:
    logical = _logical(schema, kind)
    if logical is not None:
        return logical
    if kind == "record":
        fields = [StructField(field["name"], _spark_type(field["type"], named, space)) for field in schema["fields"]]
        _refuse_twins([field.name for field in fields])
        return StructType(fields)
    if kind == "array":
        return ArrayType(_spark_type(schema["items"], named, space))
    if kind == "map":
        return MapType(StringType(), _spark_type(schema["values"], named, space))
    return _plain(kind) if kind in _PLAIN else _spark_type(kind, named, space)


def _refuse_twins(names: list[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name.lower() in seen:
            raise BadAvro(f"the field {name} occurs twice; Spark ignores case")
        seen.add(name.lower())


def _plain(kind: str) -> DataType:
    if kind not in _PLAIN:
        raise BadAvro(f"the Avro type {kind} cannot be a column")
    return _PLAIN[kind]


def _union(schema: list[Any], named: dict[str, DataType | None], space: str) -> DataType:
    others = [each for each in schema if each != "null"]
    if len(others) != 1:
        raise BadAvro(f"the union of {len(others)} Avro types cannot be a column; unions of one type and null can")
    return _spark_type(others[0], named, space)
