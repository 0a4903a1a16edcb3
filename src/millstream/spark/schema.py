"""The columns of `format("millstream")`, as Spark's Kafka source has them, and Arrow batches in that shape.

Spark does not tell a Python source which columns a query needs. An explicit schema does: with
`.schema("value BINARY")` nothing else is decoded, which is the fastest way to read.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from millstream.records.columns import Columns
from millstream.spark.options import BadOption

HEADERS = ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())]))
TYPES: dict[str, DataType] = {
    "key": BinaryType(),
    "value": BinaryType(),
    "topic": StringType(),
    "partition": IntegerType(),
    "offset": LongType(),
    "timestamp": TimestampType(),
    "timestampType": IntegerType(),
    "headers": HEADERS,
}
DECODED = {
    "key": "key",
    "value": "value",
    "offset": "offset",
    "timestamp": "timestamp",
    "timestampType": "timestamp_type",
    "headers": "headers",
}
"""The kernel's column for each column of Spark; topic and partition have none."""
MILLISECONDS_MAX = (2**63 - 1) // 1000


def full_schema(with_headers: bool) -> StructType:
    names = [name for name in TYPES if with_headers or name != "headers"]
    return StructType([StructField(name, TYPES[name]) for name in names])


def check_schema(schema: StructType) -> None:
    """An explicit schema may omit and reorder columns, and nothing else."""
    for wanted in schema.fields:
        if wanted.name not in TYPES:
            raise BadOption(f"there is no column {wanted.name}; there are {', '.join(TYPES)}")
        if wanted.dataType != TYPES[wanted.name]:
            raise BadOption(
                f"column {wanted.name} is {TYPES[wanted.name].simpleString()}, not {wanted.dataType.simpleString()}; "
                "cast it in the query"
            )
        if not wanted.nullable and wanted.name in ("key", "value", "headers"):
            raise BadOption(f"column {wanted.name} may be null in any record; leave NOT NULL out")


class Shape:
    """Turns decoded columns into batches of one schema."""

    def __init__(self, schema: StructType) -> None:
        self.names = schema.fieldNames()
        self.arrow = to_arrow_schema(schema, timezone="UTC")
        self.decoded = frozenset(DECODED[name] for name in self.names if name in DECODED)
        self._repeated: dict[str | int, Any] = {}

    def batch(self, columns: Columns, topic: str, partition: int, first: int, rows: int) -> pa.RecordBatch:
        """Rows `first` to `first + rows` of the decoded columns."""
        decoded = columns.to_arrow()
        arrays = [
            self._array(name, decoded, topic, partition, first, rows, self.arrow.field(at).type)
            for at, name in enumerate(self.names)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self.arrow)

    def _array(
        self, name: str, decoded: pa.RecordBatch, topic: str, partition: int, first: int, rows: int, kind: Any
    ) -> Any:
        if name == "topic":
            return self._repeat(topic, rows, kind)
        if name == "partition":
            return self._repeat(partition, rows, kind)
        array = decoded.column(DECODED[name])
        if rows < len(array):
            array = array.slice(first, rows)
        if name == "headers":
            array = _null_where_empty(array)
        if array.type == kind:
            return array
        return _microseconds(array, kind) if name == "timestamp" else pc.cast(array, kind)

    def _repeat(self, value: str | int, rows: int, kind: Any) -> Any:
        """A repeated value: created once, as long as the longest batch so far, and sliced."""
        array = self._repeated.get(value)
        if array is None or len(array) < rows:
            array = self._repeated[value] = pa.repeat(pa.scalar(value, kind), rows)
        return array.slice(0, rows)


def _null_where_empty(array: Any) -> Any:
    """A record without headers has null, not an empty list, as in Spark's Kafka source."""
    lengths = pc.list_value_length(array)
    if not len(array) or pc.min(lengths).as_py():
        return array
    return pc.if_else(pc.greater(lengths, 0), array, pa.scalar(None, array.type))


def _microseconds(array: Any, kind: Any) -> Any:
    """Milliseconds as Spark's microseconds. Producers may write any number: too large ones become the largest."""
    try:
        return pc.cast(array, kind)
    except pa.ArrowInvalid:
        number = array.cast(pa.int64())
        bounded = pc.min_element_wise(pc.max_element_wise(number, -MILLISECONDS_MAX), MILLISECONDS_MAX)
        return bounded.cast(array.type).cast(kind)
