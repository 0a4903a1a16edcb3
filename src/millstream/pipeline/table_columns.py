"""Arrow columns as SQL columns, for every database of a table sink."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Iterable, Iterator
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from millstream.core.errors import MillstreamError

BATCHES = "millstream_batches"
"""The table with the last stored batch of each application."""
SLICE_ROWS = 65_536
KEY_TEXT_MAX = 200


class TableError(MillstreamError):
    """A table that cannot be written; the text says what to do, and never has a password."""


class TableGone(TableError):
    """Batches of the application are counted, but their table is missing: dropped, or renamed."""

    def __init__(self, table: str) -> None:
        super().__init__(f"the table {table} is missing, but its batches are recorded")


class Columns:
    """The columns of a table sink: their names, their types, and the key."""

    def __init__(self, table: str, schema: pa.Schema, key: tuple[str, ...]) -> None:
        self.table = table
        self.names: list[str] = schema.names
        by_any_case = {name.lower(): name for name in self.names}  # as Spark and `check` compare them
        self.key = key = tuple(name if name in self.names else by_any_case.get(name.lower(), name) for name in key)
        self.rest = [name for name in self.names if name not in key]
        if not key:
            raise TableError(f"the table {table} has no key; name the columns that identify its rows")
        missing = [name for name in key if name not in self.names]
        if missing:
            raise TableError(
                f"the key of the table {table} names {', '.join(missing)}, but the rows have {', '.join(self.names)}"
            )
        self.kinds = {field.name: _kind(table, field) for field in schema}
        nested = [name for name in key if self.kinds[name] == "json"]
        if nested:
            raise TableError(f"{', '.join(nested)} cannot be in the key of the table {table}: use plain columns")
        self._schema = schema

    def type(self, name: str) -> pa.DataType:
        return self._schema.field(name).type

    def slices(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The rows in slices of bounded size, with our columns in our order. Refuses a null key."""
        for batch in batches:
            ours = batch.select(self.names)
            for name in self.key:
                if ours.column(name).null_count:
                    self._refuse(ours, name)
            for start in range(0, ours.num_rows, SLICE_ROWS):
                yield ours.slice(start, SLICE_ROWS)

    def _refuse(self, batch: pa.RecordBatch, name: str) -> None:
        at = pc.index(pc.is_null(batch.column(name)), True).as_py()
        row = {each: batch.column(each)[at].as_py() for each in self.key}
        text = ", ".join(f"{each}={'null' if value is None else value}" for each, value in row.items())
        raise TableError(
            f"a row for the table {self.table} has no {name}, which is part of its key ({text[:KEY_TEXT_MAX]}); leave "
            "such rows out in the step's SQL, or replace null with coalesce()"
        )


_PLAIN: dict[pa.DataType, str] = {
    pa.bool_(): "bool",
    pa.int8(): "int16",
    pa.int16(): "int16",
    pa.int32(): "int32",
    pa.int64(): "int64",
    pa.float32(): "float32",
    pa.float64(): "float64",
    pa.date32(): "date",
    pa.string(): "text",
    pa.large_string(): "text",
    pa.null(): "text",
    pa.binary(): "bytes",
    pa.large_binary(): "bytes",
}


def _kind(table: str, field: pa.Field) -> str:
    types = pa.types
    if field.type in _PLAIN:
        return _PLAIN[field.type]
    if types.is_timestamp(field.type):
        return "instant" if field.type.tz is not None else "time"
    if types.is_decimal128(field.type):
        return "decimal"
    if types.is_nested(field.type):
        return "json"
    raise TableError(f"the table {table} cannot have {field.name}, which is {field.type}; cast it in the step's SQL")


# -- JSON ------------------------------------------------------------------------------------------------------------


def as_json(array: pa.Array) -> pa.Array:
    """Lists, structs and maps as JSON text, like Spark's to_json: bytes in base64, times in ISO 8601.

    U+0000 becomes U+FFFD, as in other text: PostgreSQL accepts U+0000 in neither.
    """
    convert = _converter(array.type)
    texts = [
        None if value is None else json.dumps(convert(value), ensure_ascii=False, separators=(",", ":"))
        for value in array.to_pylist()
    ]
    return pa.array(texts, pa.string())


def _converter(kind: pa.DataType) -> Callable[[Any], Any]:
    """Arrow returns maps as lists of pairs, which look like lists of structs, so the type decides."""
    types = pa.types
    if types.is_map(kind):
        item = _converter(kind.item_type)
        return lambda pairs: {_name(key): None if value is None else item(value) for key, value in pairs}
    if types.is_list(kind) or types.is_large_list(kind):
        element = _converter(kind.value_type)
        return lambda values: [None if value is None else element(value) for value in values]
    if types.is_struct(kind):
        fields = {field.name: _converter(field.type) for field in kind}
        return lambda row: {name: None if row[name] is None else convert(row[name]) for name, convert in fields.items()}
    return _scalar


def _scalar(value: Any) -> Any:
    if isinstance(value, str):
        return value.replace("\0", "\ufffd")
    if isinstance(value, float) and not math.isfinite(value):
        return str(value).replace("inf", "Infinity").replace("nan", "NaN")
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    return value


def _name(key: Any) -> str:
    plain = _scalar(key)
    return plain if isinstance(plain, str) else json.dumps(plain)
