"""Records as columns: buffers in Arrow's layout, without Arrow.

    offset, timestamp     int64, milliseconds since 1970
    timestamp_type        int8: 0 the producer's time, 1 the broker's
    key, value            binary: validity bitmap (bit set: not null), int32 ends of values (a 0 first), bytes
    headers               list<struct<key, value>>: int32 ends of lists, then one such binary column for each

A column that was not requested is `None` and was not built. Numbers have the machine's byte order, as in Arrow.

The ends are int32, so one column holds less than 2 GiB of bytes. `decode_columns` refuses more than that up front with
`ColumnsTooLarge`: decode larger data in several steps.

`Columns.to_arrow` needs pyarrow and copies nothing; everything else here works without it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from millstream.core.errors import MillstreamError

if TYPE_CHECKING:
    import pyarrow  # type: ignore[import-not-found, import-untyped, unused-ignore]

NAMES = ("offset", "timestamp", "timestamp_type", "key", "value", "headers")
ALL = frozenset(NAMES)

OFFSET, TIMESTAMP, TIMESTAMP_TYPE, KEY, VALUE, HEADERS = (1 << bit for bit in range(len(NAMES)))
"""Bits that tell the kernels which columns to build."""

DATA_BYTES_MAX = 2**31 - 1


class ColumnsTooLarge(MillstreamError):
    """More bytes than 32-bit ends, or the caller's bound, allow."""

    def __init__(self, bytes_max: int) -> None:
        super().__init__(f"the batches hold more than {bytes_max} bytes of records; decode fewer of them at once")


class Binary(NamedTuple):
    null_count: int
    validity: bytearray
    ends: bytearray
    data: bytearray


class HeaderLists(NamedTuple):
    ends: bytearray
    key: Binary
    value: Binary


class Filled(NamedTuple):
    """The result of a kernel."""

    rows: int
    offset: bytearray | None
    timestamp: bytearray | None
    timestamp_type: bytearray | None
    key: Binary | None
    value: Binary | None
    headers: HeaderLists | None


class Columns(NamedTuple):
    rows: int
    offset: bytearray | None
    timestamp: bytearray | None
    timestamp_type: bytearray | None
    key: Binary | None
    value: Binary | None
    headers: HeaderLists | None
    next_offset: int | None
    """The offset after the last whole batch, control batches included. `None` without a batch."""

    def to_arrow(self) -> pyarrow.RecordBatch:
        import pyarrow as pa

        arrays: dict[str, Any] = {}
        if self.offset is not None:
            arrays["offset"] = _fixed(pa.int64(), self.rows, self.offset)
        if self.timestamp is not None:
            arrays["timestamp"] = _fixed(pa.timestamp("ms", tz="UTC"), self.rows, self.timestamp)
        if self.timestamp_type is not None:
            arrays["timestamp_type"] = _fixed(pa.int8(), self.rows, self.timestamp_type)
        if self.key is not None:
            arrays["key"] = _binary(self.key)
        if self.value is not None:
            arrays["value"] = _binary(self.value)
        if self.headers is not None:
            names, values = _strings(self.headers.key), _binary(self.headers.value)
            pairs = pa.StructArray.from_arrays([names, values], ["key", "value"])
            ends = _fixed(pa.int32(), self.rows + 1, self.headers.ends)
            arrays["headers"] = pa.ListArray.from_arrays(ends, pairs)
        return pa.RecordBatch.from_arrays(list(arrays.values()), list(arrays))


def mask(columns: Iterable[str]) -> int:
    """The kernels' bits for column names."""
    if columns is ALL:
        return (1 << len(NAMES)) - 1
    bits = 0
    for name in columns:
        if name not in ALL:
            raise ValueError(f"there is no column {name!r}; use some of {', '.join(NAMES)}")
        bits |= 1 << NAMES.index(name)
    return bits


def _fixed(kind: Any, count: int, buffer: bytearray) -> Any:
    import pyarrow as pa

    return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(buffer)])


def _binary(column: Binary) -> Any:
    import pyarrow as pa

    validity = pa.py_buffer(column.validity) if column.null_count else None
    buffers = [validity, pa.py_buffer(column.ends), pa.py_buffer(column.data)]
    return pa.Array.from_buffers(pa.binary(), len(column.ends) // 4 - 1, buffers, column.null_count)


def _strings(column: Binary) -> Any:
    """Header names as text. C clients may write bytes that are not UTF-8: those become U+FFFD."""
    import pyarrow as pa

    names = _binary(column)
    try:
        return names.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([name.decode(errors="replace") for name in names.to_pylist()], pa.string())
