"""The columns of a lake: storable types, the partition columns, and allowed changes.

A lake grows: new columns of a pipeline are added, and are null in older rows. Columns that a pipeline no longer has
stay, and are null in newer rows. A column never changes its type: old files would contradict
new ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from millstream.core.errors import MillstreamError
from millstream.pipeline.files import PARTITIONS

PARTITION_TYPES = {"day": pa.date32(), "hour": pa.int32()}
_PLAIN = (
    pa.bool_(),
    pa.int8(),
    pa.int16(),
    pa.int32(),
    pa.int64(),
    pa.float32(),
    pa.float64(),
    pa.date32(),
)


class LakeError(MillstreamError):
    """A lake that cannot be written or read; the text says what to do."""


def settle(schema: pa.Schema) -> pa.Schema:
    """The schema as lakes store it: every column is nullable, times are in microseconds, names are unique."""
    wrong: list[str] = []
    fields = []
    for field in schema:
        try:
            fields.append(pa.field(field.name, _settle(field.type)))
        except TypeError as error:
            wrong.append(f"{field.name} is {error}")
    if wrong:
        raise LakeError(f"a lake cannot store these columns: {'; '.join(wrong)}; cast them in the step's SQL")
    seen: set[str] = set()
    for field in fields:
        if field.name.lower() in seen:
            raise LakeError(
                f"the rows have two columns {field.name!r} (case does not count); rename one in the step's SQL"
            )
        seen.add(field.name.lower())
    return pa.schema(fields)


def _settle(kind: pa.DataType) -> pa.DataType:
    types = pa.types
    if kind in _PLAIN or types.is_decimal128(kind):
        return kind
    if types.is_string(kind) or types.is_large_string(kind):
        return pa.string()
    if types.is_binary(kind) or types.is_large_binary(kind):
        return pa.binary()
    if types.is_timestamp(kind):
        return pa.timestamp("us", "UTC" if kind.tz is not None else None)
    if types.is_list(kind) or types.is_large_list(kind):
        return pa.list_(pa.field("element", _settle(kind.value_type)))
    if types.is_struct(kind):
        return pa.struct([pa.field(field.name, _settle(field.type)) for field in kind])
    if types.is_map(kind):
        return pa.map_(_settle(kind.key_type), _settle(kind.item_type))
    raise TypeError(str(kind))


def with_partition(schema: pa.Schema, partition_by: str) -> pa.Schema:
    """The settled schema and the partition columns after it."""
    for name in PARTITIONS[partition_by]:
        taken = [each for each in schema.names if each.lower() == name]
        if taken:
            raise LakeError(
                f"the rows have a column {taken[0]!r}, which a lake partitioned by {partition_by} adds itself: "
                "rename it in the step's SQL, or set partition_by"
            )
        schema = schema.append(pa.field(name, PARTITION_TYPES[name]))
    return schema


def partitioned_by(columns: Sequence[str], path: str) -> str:
    for name, wanted in PARTITIONS.items():
        if tuple(columns) == wanted:
            return name
    raise LakeError(
        f"the lake {path} is partitioned by {', '.join(columns)}: only day, hour and no partitions can be written to"
    )


def new_columns(path: str, stored: pa.Schema, wanted: pa.Schema) -> list[pa.Field]:
    """The columns that the lake must add; refuses a column whose type has changed."""
    known = {field.name.lower(): field for field in stored}
    added, changed = [], []
    for field in wanted:
        there = known.get(field.name.lower())
        if there is None:
            added.append(field)
        elif there.type != field.type:
            changed.append(f"{field.name} is {there.type} in the lake and {field.type} in the rows")
        elif there.name != field.name:
            changed.append(f"{there.name} in the lake is {field.name} in the rows")
    if changed:
        raise LakeError(
            f"the rows do not fit the lake {path}: {'; '.join(changed)}. Cast or rename in the step's SQL, or write to "
            "another lake"
        )
    return added
