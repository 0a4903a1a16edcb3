"""Batches to records and back, with both kernels."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millstream.records import (
    _kernel,
    codec,
    pure,
)
from millstream.records.batch import (
    CONTROL,
    HEADER_BYTES,
    LOG_APPEND_TIME,
    BatchTooLarge,
    CorruptBatch,
    check,
    read_header,
)
from millstream.records.compression import Codec
from millstream.records.record import Record
from tests.bombs import empty_headers, empty_records

pytestmark = pytest.mark.usefixtures("kernel")
NOW = 1_700_000_000_000
SAMPLE = [
    Record(0, NOW, b"key", b"value"),
    Record(1, NOW + 5, None, b"no key"),
    Record(2, NOW - 7, b"earlier, and a tombstone", None),
    Record(3, NOW, b"", b""),
    Record(4, NOW, None, None, (("trace", b"\x00\x01"), ("empty", b""), ("null", None), ("", b"no name"))),
    Record(5, NOW + 2**40, b"k" * 300, b"v" * 200_000, (("größe", b"\xff" * 1000),)),
    Record(6, NOW, b"not UTF-8", b"", (("\udcff\udc80", b"bytes kept as surrogates"),)),
]


@pytest.mark.parametrize("compression", Codec)
def test_records_survive_every_compression(compression: Codec) -> None:
    batch = codec.encode(SAMPLE, codec=compression)
    assert codec.decode(batch) == SAMPLE
    assert all(type(record) is Record for record in codec.decode(bytes(batch)))


@pytest.mark.parametrize("compression", Codec)
def test_an_encoded_batch_passes_the_checks_of_the_produce_path(compression: Codec) -> None:
    batch = codec.encode(SAMPLE, codec=compression, producer_id=7, producer_epoch=3, base_sequence=11, attributes=0x17)
    header = check(memoryview(batch))
    assert header.count == len(SAMPLE) and header.base_offset == 0
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (7, 3, 11)
    assert header.attributes == 0x10 | compression
    assert (header.base_timestamp, header.max_timestamp) == (NOW, NOW + 2**40)


def test_both_kernels_encode_to_the_same_bytes() -> None:
    assert _kernel.encode(SAMPLE, None, 61) == pure.encode(SAMPLE, None, 61)
    assert _kernel.encode(SAMPLE, 0, 0) == pure.encode(SAMPLE, 0, 0)


def test_without_a_base_offset_records_are_numbered_from_0() -> None:
    batch = codec.encode([(None, NOW, None, b"a"), (99, NOW, None, b"b")])
    assert [record.offset for record in codec.decode(batch)] == [0, 1]


def test_compaction_keeps_gaps_and_the_span_of_the_original_batch() -> None:
    kept = [Record(1003, NOW, b"a", b"1"), Record(1007, NOW + 1, b"b", b"2")]
    batch = codec.encode(kept, base_offset=1000, last_offset_delta=9, codec=Codec.ZSTD)
    assert codec.decode(batch) == kept
    assert read_header(batch).base_offset == 1000 and read_header(batch).next_offset == 1010


def test_a_batch_may_have_lost_all_its_records() -> None:
    batch = codec.encode([], base_offset=40, last_offset_delta=4, codec=Codec.GZIP)
    assert len(batch) == HEADER_BYTES
    assert codec.decode(batch) == [] and codec.keys(batch) == [] and codec.find_time(batch, 0) is None
    assert read_header(batch).next_offset == 45


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"records": []}, ValueError),
        ({"records": [(0, NOW, b"", b"")], "base_offset": 1}, ValueError),
        ({"records": [(5, NOW, b"", b""), (5, NOW, b"", b"")], "base_offset": 5}, ValueError),
        ({"records": [(2**31, NOW, b"", b"")], "base_offset": 0}, ValueError),
        ({"records": [(9, NOW, b"", b"")], "base_offset": 0, "last_offset_delta": 8}, ValueError),
        ({"records": [(0, NOW, b"", b"")], "last_offset_delta": 2**31}, ValueError),
        ({"records": [(0, NOW, b"")]}, ValueError),
        ({"records": [(0, NOW, b"", b"", (), 1)]}, ValueError),
        ({"records": [[0, NOW, b"", b""]]}, TypeError),
        ({"records": [(0, NOW, "text", b"")]}, TypeError),
        ({"records": [(0, NOW, b"", 5)]}, TypeError),
        ({"records": [(0, 2**63, b"", b"")]}, OverflowError),
        ({"records": [(0, 2**63 - 1, b"", b""), (1, -2, b"", b"")]}, ValueError),
        ({"records": [(0, -2, b"", b""), (1, 2**63 - 1, b"", b"")]}, ValueError),
    ],
)
def test_encode_refuses_what_a_batch_cannot_say(arguments: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        codec.encode(**arguments)


def test_extreme_timestamps_survive() -> None:
    for first, second in ((2**63 - 1, 0), (-(2**63), -1), (0, 2**63 - 1), (-1, -(2**63))):
        records = [Record(0, first, None, b""), Record(1, second, None, b"")]
        assert codec.decode(codec.encode(records)) == records


def test_bytes_like_keys_and_values_are_taken() -> None:
    batch = codec.encode([(0, NOW, bytearray(b"k"), memoryview(b"v"), [("h", bytearray(b"x"))])])
    assert codec.decode(batch) == [Record(0, NOW, b"k", b"v", (("h", b"x"),))]


class OtherText(str):
    """Makes of itself what no other text does."""

    encoded: object

    def encode(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
        return self.encoded  # type: ignore[return-value]


def test_header_names_that_turn_into_something_else_are_taken_or_refused_like_values() -> None:
    name = OtherText("h")
    name.encoded = bytearray(b"name")
    assert codec.decode(codec.encode([(0, NOW, b"", b"", [(name, b"x")])]))[0].headers == (("name", b"x"),)
    name.encoded = 5
    with pytest.raises(TypeError):
        codec.encode([(0, NOW, b"", b"", [(name, b"x")])])


def test_headers_are_anything_to_go_through_or_nothing() -> None:
    pairs = (("h", b"x"), ("i", None))
    for headers, expected in ((None, ()), ([], ()), (iter(()), ()), (list(pairs), pairs), (iter(pairs), pairs)):
        assert codec.decode(codec.encode([(0, NOW, b"", b"", headers)]))[0].headers == expected


def test_there_are_no_fewer_than_no_bytes_in_front_of_the_records() -> None:
    with pytest.raises(ValueError, match="negative count"):
        codec.kernel.encode([], None, -1)
    with pytest.raises(ValueError, match="negative count"):
        codec.kernel.begin(-1, 1000)


def test_log_append_time_replaces_every_timestamp() -> None:
    batch = codec.encode(SAMPLE, attributes=LOG_APPEND_TIME)
    assert {record.timestamp for record in codec.decode(batch)} == {NOW + 2**40}
    assert codec.find_time(batch, NOW + 2**40) == (0, NOW + 2**40)
    assert codec.find_time(batch, NOW + 2**40 + 1) is None


@pytest.mark.parametrize("compression", Codec)
def test_keys_tell_tombstones_apart(compression: Codec) -> None:
    batch = codec.encode(SAMPLE, codec=compression)
    assert codec.keys(batch) == [(r.offset, r.key, r.value is None) for r in SAMPLE]


@pytest.mark.parametrize("compression", Codec)
def test_validate_takes_batches_whose_header_is_true(compression: Codec) -> None:
    batch = codec.encode(SAMPLE, codec=compression)
    codec.validate(batch)
    codec.validate(codec.encode(SAMPLE[3:], base_offset=0, last_offset_delta=9, codec=compression))
    with pytest.raises(CorruptBatch, match="more than 1000 bytes"):
        codec.validate(batch, bytes_max=1000)


@pytest.mark.parametrize("compression", Codec)
@pytest.mark.parametrize(
    ("position", "number", "reason"),
    [
        (57, len(SAMPLE) - 1, "bytes after the last record"),
        (57, len(SAMPLE) + 1, "a number does not end"),
        (57, 2**31 - 1, "more records than its bytes can hold"),
        (23, len(SAMPLE) - 2, "its offset is outside the batch's"),
    ],
)
def test_validate_refuses_headers_that_are_not_true(
    compression: Codec, position: int, number: int, reason: str
) -> None:
    batch = codec.encode(SAMPLE, codec=compression)
    batch[position : position + 4] = number.to_bytes(4, "big")
    with pytest.raises(CorruptBatch, match="CRC"):
        codec.validate(batch)
    with pytest.raises(CorruptBatch, match=reason):
        codec.validate(batch, check_crc=False)


def test_find_time_gives_the_first_record_at_or_after() -> None:
    batch = codec.encode([Record(10 + i, NOW + 10 * i, None, b"") for i in range(5)], base_offset=10)
    assert codec.find_time(batch, 0) == (10, NOW)
    assert codec.find_time(batch, NOW + 10) == (11, NOW + 10)
    assert codec.find_time(batch, NOW + 11) == (12, NOW + 20)
    assert codec.find_time(batch, NOW + 41) is None


def test_iterate_passes_control_batches_over_and_ends_at_a_partial_one() -> None:
    first = codec.encode(SAMPLE[:2], base_offset=0)
    control = codec.encode([Record(2, NOW, b"\0\0\0\1", b"\0\0\0\0\0\0")], base_offset=2, attributes=CONTROL)
    last = codec.encode([Record(3, NOW, b"k", b"v")], base_offset=3, codec=Codec.LZ4)
    data = bytes(first + control + last)
    expected = [*SAMPLE[:2], Record(3, NOW, b"k", b"v")]
    assert list(codec.iterate(data)) == expected
    for cut in range(1, len(last)):
        assert list(codec.iterate(memoryview(data)[:-cut])) == expected[:2]


def test_a_batch_larger_than_the_bound_is_refused() -> None:
    batch = codec.encode(SAMPLE)
    with pytest.raises(CorruptBatch):
        codec.decode(batch, bytes_max=1000)


def test_a_broken_checksum_is_refused_unless_asked_otherwise() -> None:
    batch = codec.encode([Record(0, NOW, b"k", b"value")])
    batch[-3] ^= 1
    for read in (codec.decode, codec.keys, lambda b: codec.find_time(b, 0), lambda b: list(codec.iterate(b))):
        with pytest.raises(CorruptBatch, match="CRC"):
            read(batch)
    assert len(codec.decode(batch, check_crc=False)) == 1


_blob = st.none() | st.binary(max_size=40)
_name = st.text(max_size=8).filter(lambda name: not any(0xD800 <= ord(c) < 0xE000 for c in name))
_record = st.tuples(
    st.integers(1, 1000), st.integers(-1, 2**45), _blob, _blob, st.lists(st.tuples(_name, _blob), max_size=3).map(tuple)
)


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(_record, min_size=1, max_size=8), st.sampled_from(Codec), st.integers(0, 2**60))
def test_any_records_survive(fields: list[tuple[Any, ...]], compression: Codec, base: int) -> None:
    offset, records = base - 1, []
    for gap, *rest in fields:
        offset += gap
        records.append(Record(offset, *rest))
    batch = codec.encode(records, codec=compression, base_offset=base)
    assert codec.decode(batch) == records
    assert list(codec.iterate(batch + batch)) == records * 2


def test_the_environment_can_force_the_twin() -> None:
    show = [sys.executable, "-c", "from millstream.records import codec; print(codec.KERNEL)"]
    environment = {**os.environ, "MILLSTREAM_PURE": "1"}
    assert subprocess.run(show, env=environment, capture_output=True, text=True, check=True).stdout == "pure\n"
    environment["MILLSTREAM_PURE"] = "0"
    assert subprocess.run(show, env=environment, capture_output=True, text=True, check=True).stdout == "compiled\n"


def test_decoded_records_do_not_burden_the_garbage_collector(kernel: ModuleType) -> None:
    import gc

    record = codec.decode(codec.encode(SAMPLE))[5]
    assert record == SAMPLE[5] and record.value == b"v" * 200_000
    assert kernel is pure or not gc.is_tracked(record)


@pytest.mark.parametrize("key", [None, b"", b"k" * 200])
@pytest.mark.parametrize("size", [0, 1, 63, 64, 8191, 8192, 16_384, 1_000_000])
def test_one_record_is_encoded_as_a_list_of_one_is(size: int, key: bytes | None) -> None:
    value = bytes(size)
    expected = codec.encode([(0, 1_700_000_000_000, key, value)])
    batch, header = codec.encode_one(memoryview(value), key, 1_700_000_000_000)
    assert batch == expected and header == check(batch)
    batch, header = codec.encode_own([(0, 1_700_000_000_000, key, value)])
    assert batch == expected and header == check(batch)


def test_records_headers_and_bytes_are_bounded_together(kernel: ModuleType) -> None:
    section = codec._open_one(empty_headers(1000), codec.BYTES_MAX, True)
    needed = len(section.body) + pure.RECORD_COST + 1000 * pure.HEADER_COST
    assert len(kernel.decode(section, needed)[0].headers) == 1000
    for read in (kernel.decode, kernel.keys, lambda *each: kernel.judge(each[0], 0, NOW, False, 1, each[1])):
        with pytest.raises(BatchTooLarge):
            read(section, needed - 1)
    many = codec._open_one(empty_records(100), codec.BYTES_MAX, True)
    assert len(kernel.decode(many, len(many.body) + 100 * pure.RECORD_COST)) == 100
    with pytest.raises(BatchTooLarge):
        kernel.decode(many, len(many.body) + 100 * pure.RECORD_COST - 1)


def test_time_look_ups_need_no_memory_for_what_they_pass_over(kernel: ModuleType) -> None:
    section = codec._open_one(empty_headers(100_000), codec.BYTES_MAX, True)
    assert kernel.find_time(section, NOW) == (0, NOW)
    assert kernel.newest_time(section, 0) == NOW
    tracemalloc.start()
    try:
        if kernel is _kernel:  # the twin copies the body
            kernel.find_time(section, NOW)
            assert tracemalloc.get_traced_memory()[1] < 10_000
    finally:
        tracemalloc.stop()


def test_time_look_ups_begin_at_an_offset(kernel: ModuleType) -> None:
    times = [5, 9, 7, -1, 8]
    batch = codec.encode([(10 + at, NOW + each, None, b"") for at, each in enumerate(times)], base_offset=10)
    section = codec._open_one(batch, codec.BYTES_MAX, True)
    assert kernel.find_time(section, NOW + 7) == (11, NOW + 9)
    assert kernel.find_time(section, NOW + 7, 12) == (12, NOW + 7)
    assert kernel.find_time(section, NOW + 9, 12) is None
    assert [kernel.newest_time(section, first) for first in (0, 11, 12, 14, 15)] == [
        NOW + 9, NOW + 9, NOW + 8, NOW + 8, -1,
    ]  # fmt: skip


def test_judging_names_records_out_of_time_and_without_a_key(kernel: ModuleType) -> None:
    rows = [(0, NOW, b"k", b""), (0, NOW + 5, b"k", b""), (0, NOW, None, b""), (0, -1, b"k", b""), (0, 1, None, b"")]
    section = codec._open_one(codec.encode(rows), codec.BYTES_MAX, True)
    assert kernel.judge(section, 0, NOW, False, 9) == [(1, NOW + 5, True)]
    assert kernel.judge(section, 2, NOW, True, 9) == [(1, NOW + 5, True), (2, NOW, False), (4, 1, False)]
    assert kernel.judge(section, 2, NOW, True, 1) == [(1, NOW + 5, True)]
    assert kernel.judge(section, 0, NOW + 5, False, 9) == []
