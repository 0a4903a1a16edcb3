"""Every compression round trips, reads what others write, and never writes more than its bound."""

from __future__ import annotations

import gzip
import os
import random
import re
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import cramjam
import pytest
from aiokafka import codec as aiokafka

from millstream.records.batch import CorruptBatch
from millstream.records.compression import WINDOW_BYTES_MAX, Codec, compress, decompress

COMPRESSED = [Codec.GZIP, Codec.SNAPPY, Codec.LZ4, Codec.ZSTD]
MIB = 1 << 20
TEXT = b"".join(b"line %d of a text that compresses\n" % i for i in range(20_000))


@pytest.mark.parametrize("codec", Codec)
@pytest.mark.parametrize("data", [b"", b"x", TEXT, os.urandom(100_000), bytes(3 * MIB)], ids=len)
def test_what_goes_in_comes_out(codec: Codec, data: bytes) -> None:
    packed = compress(codec, data)
    assert bytes(decompress(codec, packed, len(data))) == data
    assert bytes(decompress(codec, memoryview(bytearray(packed)), 256 * MIB)) == data


@pytest.mark.parametrize("codec", Codec)
def test_one_byte_more_than_the_bound_is_refused(codec: Codec) -> None:
    with pytest.raises(CorruptBatch):
        decompress(codec, compress(codec, TEXT), len(TEXT) - 1)


@pytest.mark.parametrize("codec", COMPRESSED)
def test_nothing_decompresses_to_nothing(codec: Codec) -> None:
    assert bytes(decompress(codec, b"", 100)) == b""


@pytest.mark.parametrize("codec", COMPRESSED)
def test_every_cut_is_refused(codec: Codec) -> None:
    packed = compress(codec, TEXT[:2000])
    for cut in range(1, len(packed)):
        # Snappy-java's framing has no end mark: a cut between blocks is a shorter stream. Here there is one block.
        if codec is Codec.SNAPPY and cut == 16:
            continue
        with pytest.raises(CorruptBatch):
            decompress(codec, packed[:cut], MIB)


@pytest.mark.parametrize("codec", COMPRESSED)
def test_mutated_bytes_are_refused_or_stay_within_the_bound(codec: Codec) -> None:
    rng = random.Random(codec)
    packed = compress(codec, TEXT[:3000])
    for _ in range(1500):
        broken = bytearray(packed)
        for _ in range(rng.choice((1, 1, 3))):
            broken[rng.randrange(min(len(broken), rng.choice((24, 10_000))))] = rng.randrange(256)
        try:
            assert len(decompress(codec, broken, 8000)) <= 8000
        except CorruptBatch:
            continue


def test_gzip_of_several_members_is_one_stream() -> None:
    packed = gzip.compress(TEXT) + gzip.compress(b"") + gzip.compress(b"end")
    assert bytes(decompress(Codec.GZIP, packed, MIB)) == TEXT + b"end"
    with pytest.raises(CorruptBatch):
        decompress(Codec.GZIP, packed, len(TEXT) + 2)
    with pytest.raises(CorruptBatch):
        decompress(Codec.GZIP, packed + b"trailing", MIB)


def test_raw_snappy_is_read_as_librdkafka_writes_it() -> None:
    assert bytes(decompress(Codec.SNAPPY, bytes(cramjam.snappy.compress_raw(TEXT)), MIB)) == TEXT


def test_snappy_is_written_with_the_framing_of_snappy_java() -> None:
    packed = compress(Codec.SNAPPY, TEXT)
    assert packed[:16] == b"\x82SNAPPY\0\0\0\0\1\0\0\0\1"
    assert packed == aiokafka.snappy_encode(TEXT)
    # librdkafka and aiokafka tell the framing by more than 16 or 20 bytes, so even nothing has a block.
    assert len(compress(Codec.SNAPPY, b"")) == 21


def test_snappy_framing_with_versions_in_the_wrong_byte_order_is_read() -> None:
    packed = bytearray(compress(Codec.SNAPPY, TEXT))
    packed[8:16] = b"\1\0\0\0\1\0\0\0"
    assert bytes(decompress(Codec.SNAPPY, packed, MIB)) == TEXT


@pytest.mark.parametrize("name", ["gzip", "snappy", "lz4", "zstd"])
def test_aiokafka_and_we_read_each_other(name: str) -> None:
    codec = Codec.parse(name)
    assert getattr(aiokafka, f"{name}_decode")(compress(codec, TEXT)) == TEXT
    assert bytes(decompress(codec, getattr(aiokafka, f"{name}_encode")(TEXT), MIB)) == TEXT


def test_frames_that_follow_each_other_and_skippable_ones_are_read() -> None:
    skippable = (0x184D2A53).to_bytes(4, "little") + (5).to_bytes(4, "little") + b"hello"
    for codec in (Codec.LZ4, Codec.ZSTD):
        packed = compress(codec, TEXT)
        assert bytes(decompress(codec, packed + packed, 2 * MIB)) == TEXT * 2
    assert bytes(decompress(Codec.ZSTD, skippable + compress(Codec.ZSTD, TEXT), MIB)) == TEXT


@pytest.mark.parametrize("flags", [{"content_checksum": True, "block_linked": True}, {"content_checksum": False}])
def test_lz4_frames_of_other_kinds_are_read(flags: dict[str, bool]) -> None:
    compressor = cramjam.lz4.Compressor(level=4, **flags)
    compressor.compress(TEXT)
    assert bytes(decompress(Codec.LZ4, bytes(compressor.finish()), MIB)) == TEXT


def test_a_zstd_stream_without_its_size_is_read() -> None:
    compressor = cramjam.zstd.Compressor(level=3)
    for start in range(0, len(TEXT), 50_000):
        compressor.compress(TEXT[start : start + 50_000])
    assert bytes(decompress(Codec.ZSTD, bytes(compressor.finish()), MIB)) == TEXT


def test_a_zstd_window_beyond_the_bound_is_refused() -> None:
    too_large = b"\x28\xb5\x2f\xfd\x00" + bytes([(24 - 10) << 3]) + b"\x01\x00\x00"
    with pytest.raises(CorruptBatch, match=f"window of {2 * WINDOW_BYTES_MAX}"):
        decompress(Codec.ZSTD, too_large, MIB)
    assert bytes(decompress(Codec.ZSTD, too_large, 16 * MIB)) == b""


def _peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) * 1024


def _reset_peak() -> int:
    """Makes the peak of this process's memory what it is now: earlier tests have had their own."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak_bytes()


def _bomb(codec: Codec) -> bytes:
    """Bytes that stand for 512 MiB; compressed piece by piece so that the test does not hold those itself."""
    match codec:
        case Codec.GZIP:
            return bytes(cramjam.gzip.compress(bytes(4 * MIB))) * 128
        case Codec.SNAPPY:
            # One byte, and 64-byte copies of it: the best ratio that the format has. 128 MiB are enough here.
            size = 128 * MIB + 1
            varint = bytes([size >> shift & 0x7F | (0x80 if shift < 21 else 0) for shift in range(0, 28, 7)])
            return varint + b"\x00x" + b"\xfe\x01\x00" * (size // 64)
        case Codec.LZ4:
            return bytes(cramjam.lz4.compress(bytes(4 * MIB))) * 128
        case _:
            return bytes(cramjam.zstd.compress(bytes(64 * MIB))) * 8


_LIES = {
    "gzip that hides its size": (Codec.GZIP, lambda: _bomb(Codec.GZIP) + gzip.compress(b"")),
    "snappy that claims 4 GiB": (Codec.SNAPPY, lambda: b"\xff\xff\xff\xff\x0f" + b"\0" * 100),
    "snappy block that claims 4 GiB": (
        Codec.SNAPPY,
        lambda: compress(Codec.SNAPPY, b"")[:16] + b"\0\0\0\x08\xff\xff\xff\xff\x0f\0\0\0",
    ),
    "zstd blocks of one repeated byte": (
        Codec.ZSTD,
        lambda: b"\x28\xb5\x2f\xfd\x00\x58" + (b"\x02\x00\x10\x00" * 5000) + b"\x03\x00\x10\x00",
    ),
}


@pytest.mark.parametrize(
    ("codec", "make"),
    [*((codec, lambda codec=codec: _bomb(codec)) for codec in COMPRESSED), *_LIES.values()],
    ids=[*(codec.name.lower() for codec in COMPRESSED), *_LIES],
)
def test_a_bomb_is_refused_before_memory_passes_the_bound(codec: Codec, make: Callable[[], bytes]) -> None:
    bomb, bytes_max = make(), 16 * MIB
    before = _reset_peak()
    tracemalloc.start()
    try:
        with pytest.raises(CorruptBatch):
            decompress(codec, bomb, bytes_max)
        assert tracemalloc.get_traced_memory()[1] < bytes_max + MIB
    finally:
        tracemalloc.stop()
    # Decompressors allocate outside Python too: a window or two blocks, and never the output.
    assert _peak_bytes() - before < bytes_max + 2 * WINDOW_BYTES_MAX


def test_unknown_compressions_are_refused() -> None:
    for codec in (5, 6, 7):
        with pytest.raises(CorruptBatch, match="does not exist"):
            decompress(codec, b"x", 100)


def test_names_are_those_of_compression_type() -> None:
    assert [Codec.parse(name) for name in ("none", "gzip", "snappy", "LZ4", " zstd ")] == list(Codec)
    with pytest.raises(ValueError, match="no compression 'brotli'; use one of none, gzip, snappy, lz4, zstd"):
        Codec.parse("brotli")


def test_cramjam_is_loaded_only_when_something_is_compressed() -> None:
    code = (
        "import sys; from millstream.records import codec; b = codec.encode([(0, 1, b'k', b'v')]); codec.decode(b);"
        "assert 'cramjam' not in sys.modules; codec.encode([(0, 1, b'k', b'v')], codec=codec.Codec.ZSTD);"
        "assert 'cramjam' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
