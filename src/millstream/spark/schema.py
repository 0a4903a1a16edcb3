"""The columns of `format("millstream")`, as Spark's Kafka source has them, and Arrow batches in that shape.

Spark does not tell a Python source which columns a query needs. A schema given by hand does: with
`.schema("value BINARY")` nothing else is decoded, and that is the way to read fast.
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
"""Which column of the kernel a column of Spark is made of; topic and partition are made of nothing."""


def full_schema(with_headers: bool) -> StructType:
    names = [name for name in TYPES if with_headers or name != "headers"]
    return StructType([StructField(name, TYPES[name]) for name in names])


def check_schema(schema: StructType) -> None:
    """A schema given by hand may leave columns out and order them anew, and nothing else."""
    for wanted in schema.fields:
        if wanted.name not in TYPES:
            raise BadOption(f"there is no column {wanted.name}; there are {', '.join(TYPES)}")
        if wanted.dataType != TYPES[wanted.name]:
            raise BadOption(
                f"column {wanted.name} is {TYPES[wanted.name].simpleString()}, not {wanted.dataType.simpleString()}; "
                "cast it in the query"
            )


class Shape:
    """Turns decoded columns into batches of one schema."""

    def __init__(self, schema: StructType) -> None:
        self.names = schema.fieldNames()
        self.arrow = to_arrow_schema(schema, timezone="UTC")
        self.decoded = frozenset(DECODED[name] for name in self.names if name in DECODED)

    def batch(self, columns: Columns, topic: str, partition: int, first: int, rows: int) -> pa.RecordBatch:
        """Rows `first` to `first + rows` of what was decoded."""
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
            return pa.repeat(pa.scalar(topic, kind), rows)
        if name == "partition":
            return pa.repeat(pa.scalar(partition, kind), rows)
        array = decoded.column(DECODED[name]).slice(first, rows)
        return array if array.type == kind else pc.cast(array, kind)
