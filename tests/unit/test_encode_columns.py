"""Rows of Arrow columns become the records that they say, with both kernels."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from array import array
from types import ModuleType
from typing import Any

import pyarrow as pa
import pytest
from aiokafka.partitioner import murmur2

from millstream.records import (
    _kernel,
    codec,
    pure,
)
from millstream.records.batch import HEADER_BYTES, check
from millstream.records.compression import Codec
from millstream.records.record import Record
from millstream.records.rows import (
    BAD_BYTES,
    BAD_COLUMN,
    BAD_HEADER,
    BAD_PARTITION,
    BAD_ROW,
    BAD_TIME,
    Bytes,
    Lists,
    Numbers,
    RowColumns,
    RowRefused,
    from_arrow,
)

pytestmark = pytest.mark.usefixtures("kernel")
NOW = 1_700_000_000_000
BYTES_MAX = 32 << 20
SIZES = (None, 0, 1, 31, 32, 33, 63, 64, 65, 100, 127, 128, 8100, 8191, 8192, 20_000)
"""Around the widths of moves and of numbers."""
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


def _random_rows(rng: random.Random, count: int) -> list[Record]:
    def blob() -> bytes | None:
        size = rng.choice((*SIZES[:-3], 10, 10, 10))
        return None if size is None else rng.randbytes(size)

    return [
        Record(
            0,
            NOW + rng.choice((0, 1, -1, 63, 64, -65, 8191, 8192, 2**40)),
            blob(),
            blob(),
            tuple((f"h{n}", blob()) for n in range(rng.choice((0, 0, 0, 1, 3, 70)))),
        )
        for _ in range(count)
    ]


def _arrow(records: list[Record], kind: pa.DataType | None = None) -> pa.RecordBatch:
    return pa.record_batch(
        {
            "key": pa.array([record.key for record in records], kind or pa.binary()),
            "value": pa.array([record.value for record in records], kind or pa.binary()),
            "timestamp": pa.array([record.timestamp * 1000 + 999 for record in records], pa.timestamp("us", tz="UTC")),
            "headers": pa.array([list(record.headers) for record in records], HEADERS),
        }
    )


def _open(batch: pa.RecordBatch, now_ms: int = NOW) -> Any:
    return codec.open_rows(from_arrow(batch, now_ms))


def _encode(batch: pa.RecordBatch, picked: bytes | None = None) -> list[Record]:
    rows = _open(batch)
    count = batch.num_rows if picked is None else len(picked) // 4
    body = codec.begin(BYTES_MAX)
    assert body.add(rows, picked, 0, count) == count == body.count
    return codec.decode(codec.finish(body))


def _numbered(records: list[Record]) -> list[Record]:
    return [record._replace(offset=offset) for offset, record in enumerate(records)]


def _binary(values: list[bytes | None]) -> Bytes:
    array = pa.array(values, pa.binary())
    validity, ends, data = array.buffers()
    return Bytes(len(array), 0, validity, ends, data or b"")


# -- what goes in comes out ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary()])
@pytest.mark.parametrize("seed", range(3))
def test_rows_become_the_records_that_they_say(kind: pa.DataType, seed: int) -> None:
    records = _random_rows(random.Random(seed), 300)
    assert _encode(_arrow(records, kind)) == _numbered(records)


def test_a_slice_is_read_from_where_it_begins() -> None:
    records = _random_rows(random.Random(4), 100)
    batch = _arrow(records)
    for start, count in ((0, 100), (1, 99), (7, 9), (63, 2), (99, 1)):
        assert _encode(batch.slice(start, count)) == _numbered(records[start : start + count])


@pytest.mark.parametrize("size", SIZES)
def test_sizes_at_the_end_of_a_column_are_not_read_beyond_it(size: int | None) -> None:
    value = None if size is None else random.Random(size).randbytes(size)
    records = [Record(0, NOW, b"k", b"first"), Record(1, NOW, value, value)]
    batch = _arrow(records)
    assert _encode(batch) == records
    assert _encode(batch.slice(1)) == _numbered(records[1:])


def test_text_is_written_as_utf_8_and_what_is_missing_is_null_or_now() -> None:
    batch = pa.record_batch({"value": pa.array(["größe", None, ""])})
    expected = [Record(0, NOW, None, "größe".encode()), Record(1, NOW, None, None), Record(2, NOW, None, b"")]
    assert _encode(batch) == expected
    batch = pa.record_batch(
        {
            "value": pa.array(["a", "b"], pa.large_string()),
            "timestamp": pa.array([None, 1_000_000], pa.timestamp("us")),
            "headers": pa.array([None, []], HEADERS),
        }
    )
    assert _encode(batch) == [Record(0, NOW, None, b"a"), Record(1, 1000, None, b"b")]


@pytest.mark.parametrize("kind", [pa.binary(3), pa.dictionary(pa.int32(), pa.binary())])
def test_other_types_of_bytes_are_turned_into_the_ones_that_are_read(kind: pa.DataType) -> None:
    values = pa.array([b"abc", None, b"def"]).cast(pa.binary(3))
    batch = pa.record_batch({"value": values.dictionary_encode() if isinstance(kind, pa.DictionaryType) else values})
    assert [record.value for record in _encode(batch)] == [b"abc", None, b"def"]


def test_picked_rows_come_in_the_order_that_was_picked() -> None:
    records = _random_rows(random.Random(5), 200)
    order = random.Random(6).sample(range(200), 120)
    picked = array("i", order).tobytes()
    assert _encode(_arrow(records), picked) == _numbered([records[row] for row in order])


@pytest.mark.parametrize("compression", Codec)
def test_a_finished_batch_passes_the_checks_of_the_produce_path(compression: Codec) -> None:
    records = _random_rows(random.Random(7), 100)
    body = codec.begin(BYTES_MAX)
    body.add(_open(_arrow(records)), None, 0, 100)
    batch = codec.finish(body, codec=compression, producer_id=7, producer_epoch=3, base_sequence=11)
    header = check(memoryview(batch))
    assert (header.producer_id, header.producer_epoch, header.base_sequence, header.count) == (7, 3, 11, 100)
    assert header.base_timestamp == records[0].timestamp
    assert header.max_timestamp == max(record.timestamp for record in records)
    assert codec.decode(batch) == _numbered(records)
    assert batch == codec.encode(records, codec=compression, producer_id=7, producer_epoch=3, base_sequence=11)


# -- how much goes in ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bytes_max", [0, 100, 1000, 30_000])
def test_full_bodies_follow_each_other_and_lose_nothing(bytes_max: int) -> None:
    records = _random_rows(random.Random(8), 300)
    rows, at, found = _open(_arrow(records)), 0, []
    while at < 300:
        body = codec.begin(bytes_max)
        before, at = at, body.add(rows, None, at, 300)
        assert at == before + body.count > before
        assert body.size <= bytes_max or body.count == 1
        if at < 300:
            assert body.add(rows, None, at, 300) == at  # it stays full
        batch = codec.finish(body)
        found += [record._replace(offset=0) for record in codec.decode(batch)]
    assert found == records


def test_a_body_takes_rows_of_many_tables_and_counts_its_bytes() -> None:
    records = _random_rows(random.Random(9), 60)
    body = codec.begin(BYTES_MAX)
    assert (body.count, body.size) == (0, HEADER_BYTES)
    for start in range(0, 60, 20):
        body.add(_open(_arrow(records[start : start + 20])), None, 0, 20)
    size = body.size
    batch = codec.finish(body)
    assert len(batch) == size and codec.decode(batch) == _numbered(records)


def test_a_record_that_is_larger_than_the_bound_gets_a_body_of_its_own() -> None:
    batch = pa.record_batch({"value": pa.array([b"a", b"b" * 5000, b"c"])})
    rows = _open(batch)
    body = codec.begin(1000)
    assert body.add(rows, None, 0, 3) == 1
    body = codec.begin(1000)
    assert body.add(rows, None, 1, 3) == 2
    assert [record.value for record in codec.decode(codec.finish(body))] == [b"b" * 5000]


def test_a_body_goes_on_after_memory_ran_out(kernel: ModuleType) -> None:
    script = """if True:
        import mmap, resource
        from array import array
        from millstream.records import codec
        from millstream.records.rows import Bytes, RowColumns

        space = mmap.mmap(-1, 1 << 30)  # which costs nothing until it is written to
        def rows(size):
            return codec.open_rows(RowColumns(1, 0, Bytes(1, 0, None, array("i", [0, size]), space)))

        body = codec.begin(1000)
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (128 << 20),) * 2)
        try:
            body.add(rows(1 << 30), None, 0, 1)
        except MemoryError:
            body.add(rows(4 << 20), None, 0, 1)
            print(len(codec.decode(codec.finish(body))[0].value))
    """
    environment = {**os.environ, "MILLSTREAM_PURE": "1" if kernel is pure else "0"}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, f"{4 << 20}\n"), run.stderr


def test_a_batch_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        codec.finish(codec.begin(1000))


def test_both_kernels_write_the_same_bytes() -> None:
    columns = from_arrow(_arrow(_random_rows(random.Random(10), 500)), NOW)
    made = []
    for kernel in (_kernel, pure):
        body = kernel.begin(61, 200_000)
        made.append((body.add(kernel.open_rows(columns), None, 0, 500), body.finish()))
    assert made[0] == made[1]


# -- where it goes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("partitions", [1, 2, 7, 100])
def test_a_key_goes_where_other_clients_send_it_and_the_rest_stands_last(partitions: int) -> None:
    rng = random.Random(11)
    keys = [rng.choice((None, b"", rng.randbytes(rng.randrange(40)))) for _ in range(500)]
    batch = pa.record_batch({"value": pa.array([b"v"] * 500), "key": pa.array(keys)})
    order, ends = codec.pick(_open(batch), partitions)
    groups: list[list[int]] = [[] for _ in range(partitions + 1)]
    for row, key in enumerate(keys):
        groups[partitions if key is None else (murmur2(key) & 0x7FFFFFFF) % partitions].append(row)
    assert list(array("i", bytes(order))) == [row for group in groups for row in group]
    assert ends == [sum(map(len, groups[: at + 1])) for at in range(partitions + 1)]


def test_the_hash_is_that_of_the_java_client() -> None:
    """The values in the tests of Kafka's own `Utils.murmur2`."""
    known = {
        b"21": -973932308,
        b"foobar": -790332482,
        b"a-little-bit-long-string": -985981536,
        b"a-little-bit-longer-string": -1486304829,
        b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
        b"abc": 479470107,
    }
    assert {key: (pure.murmur2(key) + 2**31) % 2**32 - 2**31 for key in known} == known


def test_a_partition_goes_before_a_key() -> None:
    batch = pa.record_batch(
        {
            "value": pa.array([b"v"] * 4),
            "key": pa.array([b"k", None, b"k", None]),
            "partition": pa.array([2, 0, None, None], pa.int32()),
        }
    )
    order, ends = codec.pick(_open(batch), 3)
    by_key = (murmur2(b"k") & 0x7FFFFFFF) % 3
    groups = {0: [1], 1: [], 2: [0], 3: [3]}
    groups[by_key] = sorted([*groups[by_key], 2])
    assert list(array("i", bytes(order))) == groups[0] + groups[1] + groups[2] + groups[3]
    assert ends[-1] == 4


def test_picks_among_picked_rows() -> None:
    batch = pa.record_batch({"value": pa.array([b"v"] * 6), "partition": pa.array([1, 0, 1, 0, 1, 0], pa.int32())})
    order, ends = codec.pick(_open(batch), 2, array("i", [5, 2, 4]).tobytes())
    assert (list(array("i", bytes(order))), ends) == ([5, 2, 4], [1, 3, 3])


# -- what is refused -------------------------------------------------------------------------------------------------

VALUES = [b"one", None, b"three"]


def _refused(columns: RowColumns, picked: bytes | None = None) -> tuple[int, int]:
    with pytest.raises(RowRefused) as refused:
        rows = codec.open_rows(columns)
        codec.begin(BYTES_MAX).add(rows, picked, 0, columns.rows if picked is None else len(picked) // 4)
    return refused.value.reason, refused.value.row


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": 4},
        {"rows": -1},
        {"before": 1},
        {"before": -1},
        {"rows": 2**60},
        {"before": 2**61},
        {"ends": b""},
        {"ends": bytes(15)},
        {"validity": b""},
        {"is_large": True},
    ],
)
def test_columns_that_are_shorter_than_their_rows_are_refused(changes: dict[str, Any]) -> None:
    value = _binary(VALUES)._replace(ends=array("i", [0, 3, 3, 8]).tobytes(), validity=b"\5")
    assert _refused(RowColumns(3, NOW, value._replace(**changes))) == (BAD_COLUMN, 0)
    assert _refused(RowColumns(3, NOW, _binary(VALUES), value._replace(**changes))) == (BAD_COLUMN, 0)


def test_fewer_rows_than_none_are_refused() -> None:
    with pytest.raises(RowRefused):
        codec.open_rows(RowColumns(-1, NOW, _binary(VALUES)))


@pytest.mark.parametrize("ends", [(0, 3, 3, 9), (0, 4, 3, 3), (0, -1, 3, 8), (-4, 0, 0, 8), (0, 3, 3, 2**31 - 1)])
def test_ends_that_lie_outside_their_bytes_are_refused(ends: tuple[int, ...]) -> None:
    value = _binary(VALUES)._replace(validity=None, ends=array("i", ends).tobytes())
    reason, row = _refused(RowColumns(3, NOW, value))
    assert reason == BAD_BYTES and 0 <= row < 3


def test_numbers_that_are_too_few_are_refused() -> None:
    value = _binary(VALUES)
    assert _refused(RowColumns(3, NOW, value, timestamp=Numbers(3, 0, None, bytes(23)))) == (BAD_COLUMN, 0)
    assert _refused(RowColumns(3, NOW, value, timestamp=Numbers(2, 0, None, bytes(16)))) == (BAD_COLUMN, 0)
    assert _refused(RowColumns(3, NOW, value, partition=Numbers(3, 0, None, bytes(11)))) == (BAD_COLUMN, 0)
    assert _refused(RowColumns(3, NOW, value, partition=Numbers(3, 0, b"", bytes(12)))) == (BAD_COLUMN, 0)


def test_rows_that_there_are_not_are_refused() -> None:
    columns = RowColumns(3, NOW, _binary(VALUES))
    assert _refused(columns, array("i", [0, 3]).tobytes()) == (BAD_ROW, 3)
    assert _refused(columns, array("i", [-1]).tobytes()) == (BAD_ROW, -1)
    rows = codec.open_rows(columns)
    for first, stop in ((-1, 2), (0, 4), (2, 1)):
        with pytest.raises(RowRefused):
            codec.begin(BYTES_MAX).add(rows, None, first, stop)
    with pytest.raises(RowRefused):
        codec.pick(rows, 2, array("i", [3]).tobytes())


def test_times_before_1970_are_refused() -> None:
    times = Numbers(3, 0, None, array("q", [5, -1, 5]).tobytes())
    assert _refused(RowColumns(3, NOW, _binary(VALUES), timestamp=times)) == (BAD_TIME, 1)


def test_headers_that_are_null_or_have_no_key_are_refused() -> None:
    for pairs in ([("a", b"1"), None], [(None, b"1")]):
        batch = pa.record_batch({"value": pa.array([b"v", b"w"]), "headers": pa.array([[], pairs], HEADERS)})
        assert _refused(from_arrow(batch, NOW)) == (BAD_HEADER, 1)


@pytest.mark.parametrize("ends", [(0, 0, 3), (0, 2, 1), (-1, 0, 2), (0, 0, 2**31 - 1)])
def test_lists_that_end_outside_their_pairs_are_refused(ends: tuple[int, ...]) -> None:
    lists = Lists(2, 0, None, array("i", ends).tobytes(), False, _binary([b"a", b"b"]), _binary([b"1", None]))
    reason, _ = _refused(RowColumns(2, NOW, _binary([b"v", b"w"]), headers=lists))
    assert reason == BAD_BYTES


@pytest.mark.parametrize("number", [-1, 2, 2**31 - 1])
def test_partitions_that_the_topic_does_not_have_are_refused(number: int) -> None:
    batch = pa.record_batch({"value": pa.array([b"v", b"w"]), "partition": pa.array([0, number], pa.int32())})
    with pytest.raises(RowRefused) as refused:
        codec.pick(_open(batch), 2)
    assert (refused.value.reason, refused.value.row) == (BAD_PARTITION, 1)
    with pytest.raises(ValueError, match="at least one partition"):
        codec.pick(_open(batch), 0)


@pytest.mark.parametrize("seed", range(20))
def test_both_kernels_take_or_refuse_the_same_broken_columns(seed: int) -> None:
    rng = random.Random(seed)
    columns = from_arrow(_arrow(_random_rows(rng, 40)), NOW)

    def broken(column: Bytes) -> Bytes:
        ends = bytearray(column.ends)
        for _ in range(rng.choice((0, 1, 3))):
            ends[rng.randrange(len(ends))] = rng.randrange(256)
        return column._replace(ends=bytes(ends), data=memoryview(column.data)[: rng.choice((None, -1, 10))])

    for _ in range(25):
        headers = columns.headers
        assert headers is not None and columns.key is not None
        headers = headers._replace(key=broken(headers.key), value=broken(headers.value))
        table = columns._replace(value=broken(columns.value), key=broken(columns.key), headers=headers)
        picked = array("i", [rng.randrange(-1 if rng.random() < 0.1 else 0, 41) for _ in range(20)]).tobytes()
        outcomes = []
        for kernel in (_kernel, pure):
            body = kernel.begin(61, 50_000)
            try:
                outcome = body.add(kernel.open_rows(table), picked, 0, 20)
            except RowRefused as refused:
                outcome = (refused.reason, refused.row)
            outcomes.append((outcome, body.count, body.finish()))
        assert outcomes[0] == outcomes[1]
