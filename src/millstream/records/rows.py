"""Rows in Arrow's layout: columns that the encoder reads without a copy.

    Bytes      validity bitmap (bit set: not null; None: no nulls), ends of values as int32 or int64, bytes
    Numbers    validity bitmap, int64 or int32
    Lists      validity bitmap, ends of lists, then the columns of their items

`before` counts the rows in front of the first one: a slice shares the buffers of its array. Numbers have the machine's
byte order. The kernels trust no column: they compare every length and every end with the buffer's size before they use
it, and raise `RowRefused` if it does not fit.

`from_arrow` needs pyarrow and copies no column of the types above; everything else works without pyarrow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from millstream.core.errors import MillstreamError

if TYPE_CHECKING:
    import pyarrow  # type: ignore[import-not-found, import-untyped, unused-ignore]

BAD_COLUMN, BAD_ROW, BAD_BYTES, BAD_TIME, BAD_HEADER, BAD_PARTITION, TOO_LARGE = range(1, 8)

_REASONS = (
    "",
    "a column is shorter than its rows",
    "there is no such row",
    "a column's ends do not lie within its bytes",
    "its timestamp lies before 1970",
    "one of its headers is null or has no key",
    "its partition is not one of the topic's",
    "it is larger than the 2 GiB that a batch can hold",
)


class RowRefused(MillstreamError):
    """A row that cannot become a record."""

    def __init__(self, reason: int, row: int) -> None:
        super().__init__(f"row {row} cannot be written: {_REASONS[reason]}")
        self.reason = reason
        self.row = row


class Bytes(NamedTuple):
    rows: int
    before: int
    validity: Any
    ends: Any
    data: Any
    is_large: bool = False
    """The ends have 64 bits, not 32."""


class Numbers(NamedTuple):
    rows: int
    before: int
    validity: Any
    data: Any


class Lists(NamedTuple):
    rows: int
    before: int
    validity: Any
    ends: Any
    is_large: bool
    key: Bytes
    value: Bytes


class RowColumns(NamedTuple):
    rows: int
    now_ms: int
    """The timestamp of rows without one."""
    value: Bytes
    key: Bytes | None = None
    timestamp: Numbers | None = None
    """int64, microseconds since 1970, as in Spark."""
    partition: Numbers | None = None
    """int32."""
    headers: Lists | None = None


def from_arrow(batch: pyarrow.RecordBatch, now_ms: int) -> RowColumns:
    """The columns `value`, `key`, `timestamp`, `partition` and `headers` of a batch; only `value` is required."""
    import pyarrow as pa

    names = set(batch.schema.names)

    def column(name: str) -> Any:
        return batch.column(name) if name in names else None

    timestamp, partition, headers = column("timestamp"), column("partition"), column("headers")
    return RowColumns(
        batch.num_rows,
        now_ms,
        _bytes(column("value")),
        _bytes(column("key")) if "key" in names else None,
        _numbers(timestamp, pa.timestamp("us", tz=timestamp.type.tz)) if timestamp is not None else None,
        _numbers(partition, pa.int32()) if partition is not None else None,
        _lists(headers) if headers is not None else None,
    )


def _bytes(array: Any) -> Bytes:
    import pyarrow as pa

    kind = array.type
    is_large = pa.types.is_large_binary(kind) or pa.types.is_large_string(kind)
    if not (is_large or pa.types.is_binary(kind) or pa.types.is_string(kind)):
        array = array.cast(pa.binary())
    validity, ends, data = array.buffers()
    return Bytes(len(array), array.offset, validity if array.null_count else None, ends or b"", data or b"", is_large)


def _numbers(array: Any, kind: Any) -> Numbers:
    if array.type != kind:
        array = array.cast(kind)
    validity, data = array.buffers()
    return Numbers(len(array), array.offset, validity if array.null_count else None, data or b"")


def _lists(array: Any) -> Lists:
    import pyarrow as pa
    import pyarrow.compute as pc

    validity, ends = array.buffers()[:2]
    pairs = array.values
    names = pairs.field(0)
    if pairs.null_count:
        # A null pair may still have a key; without one, the kernels refuse the pair as they must.
        names = pc.if_else(pairs.is_valid(), names, None)
    return Lists(
        len(array),
        array.offset,
        validity if array.null_count else None,
        ends or b"",
        pa.types.is_large_list(array.type),
        _bytes(names),
        _bytes(pairs.field(1)),
    )
