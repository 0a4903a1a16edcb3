"""Arrow rows as JSON objects, a column at a time.

The format is that of Spark's `to_json` and `from_json`: null columns are omitted, times are ISO in UTC, bytes are
base64, decimals are numbers with all their digits. Only nested values, and those that need escapes, are converted
one by one.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from json.encoder import encode_basestring
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

_ESCAPED = r'["\\\x00-\x1f]'


def as_objects(rows: pa.RecordBatch, names: list[str]) -> pa.Array:
    """The columns `names` of each row, as the text of one object."""
    members = [_member(name, _texts(rows.column(name))) for name in names]
    joined = pc.binary_join_element_wise(*members, "")
    return pc.binary_join_element_wise("{", pc.utf8_slice_codeunits(joined, 1), "}", "")


def _member(name: str, texts: pa.Array) -> pa.Array:
    """`,"name":text`, and nothing if there is no text. Arrow could omit nulls during the join, but then drops rows of
    nulls only.
    """
    return pc.fill_null(pc.binary_join_element_wise(f",{encode_basestring(name)}:", texts, ""), "")


def _texts(column: pa.Array) -> pa.Array:
    """Each value as JSON; null if there is none."""
    kind, types = column.type, pa.types
    if types.is_boolean(kind) or types.is_integer(kind) or types.is_decimal(kind):
        return column.cast(pa.string())
    if types.is_floating(kind) and pc.all(pc.is_finite(column)).as_py() is not False:
        return column.cast(pa.string())
    if types.is_string(kind) or types.is_large_string(kind):
        column = column.cast(pa.string())
        if not pc.any(pc.match_substring_regex(column, _ESCAPED)).as_py():
            return _quoted(column)
        return _each(column, encode_basestring)
    if types.is_timestamp(kind):
        # Without its zone it stays in UTC, and printing needs no table of time zones.
        printed = pc.replace_substring(column.cast(pa.timestamp(kind.unit)).cast(pa.string()), " ", "T")
        return pc.binary_join_element_wise('"', printed, 'Z"' if kind.tz is not None else '"', "")
    if types.is_date(kind):
        return _quoted(column.cast(pa.string()))
    dump = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
    return _each(column, lambda value: dump(_plain(value, kind)))


def _quoted(texts: pa.Array) -> pa.Array:
    return pc.binary_join_element_wise('"', texts, '"', "", null_handling="emit_null")


def _each(column: pa.Array, write: Callable[[Any], str]) -> pa.Array:
    return pa.array([None if value is None else write(value) for value in column.to_pylist()], pa.string())


def _plain(value: Any, kind: pa.DataType) -> Any:
    """A value that Python's JSON encoder accepts."""
    if value is None:
        return None
    if pa.types.is_struct(kind):
        return {field.name: _plain(value[field.name], field.type) for field in kind if value[field.name] is not None}
    if pa.types.is_map(kind):
        return {str(key): _plain(item, kind.item_type) for key, item in value}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return [_plain(item, kind.value_type) for item in value]
    match value:
        case bytes():
            return base64.b64encode(value).decode()
        case datetime():
            moment = value.astimezone(UTC).replace(tzinfo=None) if value.tzinfo is not None else value
            return moment.isoformat(timespec="microseconds") + "Z" * (value.tzinfo is not None)
        case date():
            return value.isoformat()
        case Decimal():
            number = float(value)
            return number if Decimal(repr(number)) == value else str(value)  # no digit is lost
        case float() if not math.isfinite(value):
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        case _:
            return value
