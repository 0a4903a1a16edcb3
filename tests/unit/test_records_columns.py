"""Columns say what records say."""

from __future__ import annotations

import random
import subprocess
import sys
from array import array
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pyarrow as pa
import pytest

from millstream.records import (
    codec,
)
from millstream.records.batch import CONTROL, LOG_APPEND_TIME, CorruptBatch
from millstream.records.columns import ALL, Binary, Columns, ColumnsTooLarge
from millstream.records.compression import Codec
from millstream.records.record import Record

pytestmark = pytest.mark.usefixtures("kernel")
NOW = 1_700_000_000_000


def _random_records(rng: random.Random, count: int, base: int) -> list[Record]:
    def blob() -> bytes | None:
        return rng.choice((None, b"", rng.randbytes(rng.randrange(60)), rng.randbytes(8)))

    return [
        Record(
            base + i,
            NOW + rng.randrange(-500, 500),
            blob(),
            blob(),
            tuple((f"h{n}", blob()) for n in range(rng.choice((0, 0, 0, 1, 3)))),
        )
        for i in range(count)
    ]


def _binary(column: Binary | None) -> list[bytes | None]:
    assert column is not None
    ends = array("i", bytes(column.ends))
    found = [bytes(column.data[start:end]) for start, end in pairwise(ends)]
    there = [bool(column.validity[i >> 3] >> (i & 7) & 1) for i in range(len(found))]
    assert there.count(False) == column.null_count
    assert len(column.validity) == (len(found) + 7) // 8
    return [value if ok else None for value, ok in zip(found, there, strict=True)]


def _rows(columns: Columns) -> list[Record]:
    assert columns.offset is not None and columns.timestamp is not None and columns.headers is not None
    ends = array("i", bytes(columns.headers.ends))
    names = [name.decode() for name in _binary(columns.headers.key) if name is not None]
    pairs = list(zip(names, _binary(columns.headers.value), strict=True))
    headers = [tuple(pairs[start:end]) for start, end in pairwise(ends)]
    fields = (array("q", bytes(columns.offset)), array("q", bytes(columns.timestamp)))
    return [Record(*row) for row in zip(*fields, _binary(columns.key), _binary(columns.value), headers, strict=True)]


def test_columns_hold_the_records_of_batches_with_all_compressions() -> None:
    rng = random.Random(1)
    data, expected = bytearray(), []
    for step in range(30):
        records = _random_records(rng, rng.choice((1, 7, 8, 9, 300)), 10_000 * step)
        expected += records
        data += codec.encode(records, base_offset=10_000 * step, codec=Codec(step % 5))
    columns = codec.decode_columns(data)
    assert columns.rows == len(expected) and _rows(columns) == expected
    assert columns.next_offset == expected[-1].offset + 1
    assert columns.timestamp_type == bytearray(len(expected))


SIZES = (None, 0, 1, 31, 32, 33, 63, 64, 65, 100, 127, 128, 8100, 8180, 8191, 8192, 20_000)
"""Around the widths of moves, of numbers and of what the compiled kernel reads quickly."""


@pytest.mark.parametrize("key_bytes", SIZES)
def test_columns_hold_keys_and_values_of_every_size(key_bytes: int | None) -> None:
    rng = random.Random(4)

    def blob(size: int | None) -> bytes | None:
        return None if size is None else rng.randbytes(size)

    sizes = [size for size in SIZES for _ in range(3)] * 2
    rng.shuffle(sizes)
    records = [
        Record(7 + i * rng.choice((1, 100, 9000)) * 60, NOW + (1 << i), blob(key_bytes), blob(size))
        for i, size in enumerate(sizes[:60])
    ]
    records.sort(key=lambda record: record.offset)
    records = [record for record, after in pairwise(records) if record.offset != after.offset]
    data = codec.encode(records, base_offset=7)
    assert _rows(codec.decode_columns(data + data)) == records * 2
    some = codec.decode_columns(data, columns=["value", "offset"])
    assert _binary(some.value) == [record.value for record in records]


def test_columns_are_filled_by_threads_at_once() -> None:
    records = [Record(i, NOW, b"%d" % i, b"%d" % i * 20) for i in range(3000)]
    data = bytes(codec.encode(records))
    expected = codec.decode_columns(data)
    with ThreadPoolExecutor(4) as pool:
        assert all(found == expected for found in pool.map(codec.decode_columns, [data] * 40))


def test_only_the_columns_that_were_asked_for_are_built() -> None:
    data = codec.encode(_random_records(random.Random(2), 20, 0))
    whole = codec.decode_columns(data)
    for name in ALL:
        some = codec.decode_columns(data, columns=[name])
        assert some.rows == 20
        assert {other for other in ALL if getattr(some, other) is not None} == {name}
        assert getattr(some, name) == getattr(whole, name)
    with pytest.raises(ValueError, match="no column 'offsets'"):
        codec.decode_columns(data, columns=["offsets"])


def test_control_batches_move_the_next_offset_but_give_no_rows() -> None:
    first = codec.encode([Record(0, NOW, b"k", b"v")], attributes=LOG_APPEND_TIME)
    control = codec.encode([Record(1, NOW, b"", b"")], base_offset=1, attributes=CONTROL)
    partial = codec.encode([Record(2, NOW, b"", b"")], base_offset=2)[:-1]
    columns = codec.decode_columns(first + control + partial)
    assert (columns.rows, columns.next_offset, columns.timestamp_type) == (1, 2, bytearray(b"\x01"))


@pytest.mark.parametrize("data", [b"", b"\0" * 11])
def test_nothing_gives_empty_columns(data: bytes) -> None:
    columns = codec.decode_columns(data)
    assert columns.rows == 0 and columns.next_offset is None
    assert columns.key is not None
    assert _rows(columns) == [] and columns.key.ends == b"\0" * 4


def test_more_bytes_than_the_bound_are_refused() -> None:
    batch = codec.encode([Record(0, NOW, None, b"x" * 1000)])
    assert codec.decode_columns(batch, bytes_max=1100).rows == 1
    with pytest.raises(ColumnsTooLarge, match="more than 1100 bytes"):
        codec.decode_columns(batch * 2, bytes_max=1100)
    with pytest.raises(CorruptBatch):
        codec.decode_columns(batch, bytes_max=900)
    with pytest.raises(ValueError, match="32-bit"):
        codec.decode_columns(batch, bytes_max=2**31)


def test_columns_need_no_pyarrow_until_they_become_arrow() -> None:
    code = "import sys; from millstream.records import codec; codec.decode_columns(codec.encode([(0, 1, None, b'x')]));"
    subprocess.run([sys.executable, "-c", code + "assert 'pyarrow' not in sys.modules"], check=True)


def test_to_arrow_says_the_same() -> None:
    records = _random_records(random.Random(3), 500, 0)
    table = codec.decode_columns(codec.encode(records)).to_arrow()
    table.validate(full=True)
    assert table.schema.field("timestamp").type == pa.timestamp("ms", tz="UTC")
    rows = zip(
        table["offset"].to_pylist(),
        table["timestamp"].cast(pa.int64()).to_pylist(),
        table["key"].to_pylist(),
        table["value"].to_pylist(),
        (tuple((h["key"], h["value"]) for h in headers) for headers in table["headers"].to_pylist()),
        strict=True,
    )
    assert [Record(*row) for row in rows] == records
    odd = codec.decode_columns(codec.encode([Record(0, NOW, None, None, (("\udcff", b""),))])).to_arrow()
    assert odd["headers"].to_pylist() == [[{"key": "�", "value": b""}]]
