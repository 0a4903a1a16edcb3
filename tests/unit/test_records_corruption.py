"""Hostile bytes: always `CorruptBatch` or a result, and always the same from both kernels."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.records import (
    _kernel,
    codec,
    columns,
    pure,
)
from millstream.records.batch import CRC_START, HEADER_BYTES, Buffer, CorruptBatch, patch_offset, read_header
from millstream.records.compression import Codec
from millstream.records.record import Record, Section

NOW = 1_700_000_000_000
RECORDS = [
    Record(0, NOW, b"k", b"value"),
    Record(2, NOW + 300, None, b"x" * 70, (("h", b"1"), ("name", None))),
    Record(70, NOW - 1, b"gone", None),
    Record(71, NOW, b"", b"", (("", b""),)),
    Record(9000, NOW, None, None),
]
BATCH = bytes(codec.encode(RECORDS, base_offset=0))
BODY = BATCH[HEADER_BYTES:]
MUTATIONS = 20_000
ALL_COLUMNS = columns.mask(columns.ALL)


def _section(
    body: Buffer,
    count: int = 5,
    base_offset: int = 5,
    last_delta: int = 9000,
    base: int = NOW,
    largest: int = NOW,
    is_append_time: bool = False,
) -> Section:
    return Section(body, count, base_offset, last_delta, base, largest, is_append_time)


def _outcome(run: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return run(*arguments)
    except CorruptBatch as error:
        return str(error)


def _assert_twins_agree(section: Section, *, deep: bool = True) -> Any:
    """Every function gives the same from both, and what one function accepts the others do as well."""
    decoded = _outcome(_kernel.decode, section)
    assert decoded == _outcome(pure.decode, section)
    filled = _outcome(_kernel.fill, [section], ALL_COLUMNS)
    keys = _outcome(_kernel.keys, section)
    assert _outcome(_kernel.validate, section) == (decoded if isinstance(decoded, str) else None)
    assert isinstance(decoded, str) == isinstance(filled, str) == isinstance(keys, str)
    if isinstance(decoded, str):
        assert decoded == filled == keys
    else:
        assert filled.rows == len(decoded) == len(keys)
    if deep:
        assert filled == _outcome(pure.fill, [section], ALL_COLUMNS)
        assert keys == _outcome(pure.keys, section)
        assert _outcome(_kernel.validate, section) == _outcome(pure.validate, section)
        assert _outcome(_kernel.find_time, section, NOW + 1) == _outcome(pure.find_time, section, NOW + 1)
        assert _outcome(_kernel.newest_time, section, 7) == _outcome(pure.newest_time, section, 7)
        bounds = NOW, NOW + 1, True, 3, len(section.body) + 5 * pure.RECORD_COST + 2 * pure.HEADER_COST
        assert _outcome(_kernel.judge, section, *bounds) == _outcome(pure.judge, section, *bounds)
    return decoded


def _mutate(rng: random.Random, original: bytes) -> bytes:
    """A few edits of the kinds that reach different checks: bits, lengths, cuts, repeats, long numbers."""
    body = bytearray(original)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(body)) if body else 0
        match rng.randrange(7):
            case 0 if body:
                body[at] ^= 1 << rng.randrange(8)
            case 1 if body:
                body[at] = rng.choice((0, 1, 2, 3, 0x7F, 0x80, 0x81, 0xFE, 0xFF, rng.randrange(256)))
            case 2:
                del body[at : at + rng.choice((1, 1, 2, 8, 100))]
            case 3:
                body[at:at] = bytes(rng.choices((0, 1, 0x80, 0xFF), k=rng.choice((1, 1, 2, 9))))
            case 4:
                body[at : at + 5] = b"\xff\xff\xff\xff" + bytes([rng.choice((0x0F, 0x10, 0x7F))])
            case 5:
                body[at : at + 10] = b"\xff" * 9 + bytes([rng.choice((0, 1, 2, 0x7F))])
            case _:
                body[at:at] = body[: rng.randrange(40)]
    return bytes(body)


def test_twins_agree_on_20000_mutated_bodies() -> None:
    rng = random.Random(20_240_601)
    accepted = 0
    for case in range(MUTATIONS):
        section = _section(
            _mutate(rng, BODY),
            count=rng.choice((5, 5, 5, 5, 4, 6, 0, -1, 2**31 - 1)) if case % 4 == 0 else 5,
            base_offset=rng.choice((0, 5, 2**63 - 9001, 2**63 - 1)),
            base=rng.choice((NOW, NOW, 0, 2**63 - 1, -(2**63))),
            is_append_time=rng.random() < 0.1,
        )
        accepted += not isinstance(_assert_twins_agree(section, deep=case % 4 == 0), str)
    assert accepted > MUTATIONS // 100, "too few mutations survive to say anything about what is accepted"


def test_twins_agree_on_mutations_of_records_that_are_read_quickly() -> None:
    """The same with a body of plain records, long enough for all but the last of them to take the quick way."""
    rng = random.Random(20_240_602)
    fields = [(None, b"v" * 20), (b"key", b"v" * 70), (b"", b""), (None, None), (b"k" * 40, None)]
    records = [Record(i * i * 40, NOW + i * 100, *fields[i % 5]) for i in range(16)]
    body = bytes(codec.encode(records, base_offset=0))[HEADER_BYTES:]
    accepted = 0
    for case in range(MUTATIONS // 2):
        mutated = _mutate(rng, body[:-100]) + body[-100:]
        section = _section(
            mutated, 16, base=rng.choice((NOW, 2**63 - 1, -(2**63), 2**62)), is_append_time=rng.random() < 0.1
        )
        accepted += not isinstance(_assert_twins_agree(section, deep=case % 8 == 0), str)
    assert accepted > MUTATIONS // 100


@settings(max_examples=300)
@given(st.binary(max_size=80), st.integers(-1, 12), st.integers(-1, 10), st.integers(0, 2**63 - 1))
def test_twins_agree_on_any_bytes(body: bytes, count: int, last_delta: int, base_offset: int) -> None:
    _assert_twins_agree(_section(body, count, base_offset, last_delta))


@settings(max_examples=150)
@given(st.data())
def test_twins_agree_on_records_with_any_fields(data: st.DataObject) -> None:
    """Built field by field, so that arbitrary numbers stand where numbers are expected."""
    small = st.integers(-2, 6) | st.integers(-(2**31), 2**31 - 1) | st.integers(-(2**63), 2**63 - 1)
    body = bytearray()
    count = data.draw(st.integers(1, 3))
    for _ in range(count):
        fields = bytearray(1)
        for _ in range(data.draw(st.integers(4, 8))):
            pure._put(fields, data.draw(small))
            fields += data.draw(st.binary(max_size=4))
        pure._put(body, data.draw(st.just(len(fields)) | small))
        body += fields
    _assert_twins_agree(_section(bytes(body), count, 0, 10))


@pytest.mark.parametrize("kernel", [_kernel, pure], ids=["compiled", "pure"])
def test_every_cut_of_a_body_is_refused(kernel: ModuleType) -> None:
    for cut in range(len(BODY)):
        with pytest.raises(CorruptBatch):
            kernel.decode(_section(BODY[:cut]))
        with pytest.raises(CorruptBatch):
            kernel.fill([_section(BODY[:cut])], ALL_COLUMNS)
    assert len(kernel.decode(_section(BODY))) == 5


def test_every_value_of_every_byte_gets_the_same_answer_from_both() -> None:
    for at in range(len(BODY)):
        for value in (0, 1, 2, 0x7E, 0x7F, 0x80, 0x81, 0xFF, BODY[at] ^ 1, BODY[at] ^ 0x80):
            _assert_twins_agree(_section(BODY[:at] + bytes([value]) + BODY[at + 1 :]), deep=False)


def _decode_all_ways(batch: Buffer) -> None:
    reads: list[Callable[[Buffer], Any]] = [
        codec.decode,
        codec.keys,
        lambda b: list(codec.iterate(b)),
        codec.decode_columns,
    ]
    for read in reads:
        try:
            read(batch)
        except CorruptBatch:
            continue


@pytest.mark.parametrize("kernel", [_kernel, pure], ids=["compiled", "pure"])
@pytest.mark.parametrize("compression", Codec)
def test_every_broken_byte_of_a_batch_is_refused_or_read(
    kernel: ModuleType, compression: Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the checksum in place only fields outside it pass; with the checksum made right nothing may crash."""
    monkeypatch.setattr(codec, "kernel", kernel)
    batch = codec.encode(RECORDS, base_offset=0, codec=compression)
    for at in range(len(batch)):
        broken = bytearray(batch)
        broken[at] ^= 0x55
        if at >= CRC_START:
            with pytest.raises(CorruptBatch, match="CRC"):
                codec.decode(broken)
            broken[17:21] = crc32c(memoryview(broken)[CRC_START:]).to_bytes(4, "big")
        _decode_all_ways(broken)
        with pytest.raises(CorruptBatch):
            codec.decode(batch[:at])


def test_a_count_beyond_the_bytes_allocates_nothing() -> None:
    for kernel in (_kernel, pure):
        with pytest.raises(CorruptBatch, match="more records than its bytes"):
            kernel.decode(_section(b"\x0c" + b"\0" * 6, count=2**31 - 1))


def test_header_names_that_are_not_utf8_survive_a_rewrite() -> None:
    for kernel in (_kernel, pure):
        out, *_ = kernel.encode([(0, NOW, None, None, (("\udcfe", b""),))], None, 0)
        assert b"\xfe" in out
        (record,) = kernel.decode(_section(out, 1, 0, 0))
        assert kernel.encode([record], 0, 0)[0] == out


def test_the_kernel_holds_the_buffer_only_while_it_reads() -> None:
    body = bytearray(BODY)
    _kernel.decode(_section(body))
    with pytest.raises(CorruptBatch):
        _kernel.decode(_section(memoryview(body)[:-1]))
    body += b"x"  # raises BufferError while something still exports the buffer


def _stored(*gaps: int) -> tuple[bytearray, int]:
    """Batches one behind the other, with so many offsets missing before each, and the offset behind the last."""
    data, offset = bytearray(), 0
    for gap in gaps:
        batch = bytearray(BATCH)
        patch_offset(batch, offset + gap, read_header(batch).length, 0)
        data += batch
        offset = read_header(batch).next_offset
    return data, offset


@pytest.mark.parametrize("kernel", [_kernel, pure], ids=["compiled", "pure"])
def test_sound_bytes_end_before_the_first_damaged_or_misplaced_batch(kernel: ModuleType) -> None:
    data, behind = _stored(0, 0, 5)
    size = len(BATCH)
    assert kernel.sound_bytes(data, 0, behind, -1, False) == 3 * size
    assert kernel.sound_bytes(data, 0, behind, 0, True) == 2 * size, "offsets are missing before the third batch"
    assert kernel.sound_bytes(data, 0, behind - 1, -1, False) == 2 * size, "the third batch ends behind the limit"
    assert kernel.sound_bytes(data, 1, behind, -1, False) == 0, "the first batch begins too early"
    assert kernel.sound_bytes(data, 0, behind, 9001, False) == 0, "the first batch lies before the offset asked for"
    assert kernel.sound_bytes(data[size:], 0, behind, 0, True) == 0, "the first batch lies behind the offset asked for"
    assert kernel.sound_bytes(data[:-1], 0, behind, -1, False) == 2 * size
    data[size + HEADER_BYTES] ^= 1
    assert kernel.sound_bytes(data, 0, behind, -1, False) == size


@settings(max_examples=500, deadline=None)
@given(
    gaps=st.lists(st.sampled_from([0, 0, 3]), min_size=1, max_size=4),
    at=st.integers(0, 4 * len(BATCH)),
    byte=st.integers(0, 255),
    first=st.integers(0, 2),
    asked=st.sampled_from([-1, 0, 9000, 9001, 2**62]),
    short=st.integers(-1, 1),
    dense=st.booleans(),
)
def test_both_kernels_find_the_same_bytes_sound(
    gaps: list[int], at: int, byte: int, first: int, asked: int, short: int, dense: bool
) -> None:
    data, behind = _stored(*gaps)
    data[at % len(data)] = byte
    arguments = (data, first, behind - short, asked, dense)
    assert _kernel.sound_bytes(*arguments) == pure.sound_bytes(*arguments)
