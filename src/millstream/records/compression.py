"""The four codecs of record batches, with a bound on the decompressed size.

Compressed bytes come from clients, and a kilobyte can expand to gigabytes. So no decompressor allocates its own output:
this module sizes the output buffer first, never above `bytes_max`, and the decompressor must stop at its end. Each
codec gets the size in its own way:

    gzip     the trailer holds the length of the last member, modulo 4 GiB (RFC 1952). Exact for a single member; with
             several, the buffer grows fourfold and decompression restarts, at most to deflate's best ratio.
    snappy   every raw block opens with its exact length. The best ratio is 64 bytes from 3; a larger claim is refused.
    lz4      the frame is a list of blocks with a stated largest size. Their sum is exact except for the last block.
    zstd     like lz4, with blocks of at most 128 KiB. The decompressor allocates the frame's window itself, so the
             window is bounded as well (`WINDOW_BYTES_MAX`, which RFC 8878 asks every decoder to support).

Snappy is written with snappy-java's framing, as Kafka's own clients do, and read with or without: librdkafka writes raw
blocks. The versions in that framing are not checked, because some writers use the wrong byte order.
LZ4 frames are written with independent blocks: Kafka's Java reader refuses linked ones.

`cramjam` is imported at first use. A broker that only stores and serves batches never decompresses one.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from struct import Struct

from millstream.records.batch import BatchTooLarge, Buffer, CorruptBatch

WINDOW_BYTES_MAX = 8 << 20
SNAPPY_BLOCK_BYTES = 32 << 10
"""Uncompressed bytes in one block of snappy-java's framing: its own default."""

_SNAPPY_HEADER = b"\x82SNAPPY\x00" + (1).to_bytes(4, "big") * 2
_SNAPPY_MAGIC_BYTES = 8
_SNAPPY_RATIO_MAX = 22
_GZIP_RATIO_MAX = 1032
_LZ4_RATIO_MAX = 255
_LZ4_MAGIC = 0x184D2204
_ZSTD_MAGIC = 0xFD2FB528
_ZSTD_BLOCK_BYTES_MAX = 128 << 10
_SKIPPABLE_MAGIC = 0x184D2A50
"""LZ4 and Zstandard share skippable frames; the low four bits are free."""
_ZSTD_LEVEL = 3
"""Kafka's default. cramjam's own is 11, which is an order of magnitude slower."""
_LZ4_LEVEL = 1

_U32 = Struct("<I")
_I32_BE = Struct(">i")


class Codec(enum.IntEnum):
    """Numbers as in a batch's attributes, names as in Kafka's `compression.type`."""

    NONE = 0
    GZIP = 1
    SNAPPY = 2
    LZ4 = 3
    ZSTD = 4

    @classmethod
    def parse(cls, name: str) -> Codec:
        try:
            return cls[name.strip().upper()]
        except KeyError:
            names = ", ".join(codec.name.lower() for codec in cls)
            raise ValueError(f"there is no compression {name!r}; use one of {names}") from None


def compress(codec: Codec, data: Buffer) -> bytes:
    if codec is Codec.NONE:
        return bytes(data)
    import cramjam

    match codec:
        case Codec.GZIP:
            return bytes(cramjam.gzip.compress(data))
        case Codec.SNAPPY:
            return _compress_snappy(data)
        case Codec.LZ4:
            compressor = cramjam.lz4.Compressor(level=_LZ4_LEVEL, content_checksum=False, block_linked=False)
            compressor.compress(bytes(data))  # it takes only bytes
            return bytes(compressor.finish())
        case Codec.ZSTD:
            return bytes(cramjam.zstd.compress(data, level=_ZSTD_LEVEL))


def decompress(codec: int, data: Buffer, bytes_max: int) -> Buffer:
    """The decompressed bytes as a view; raises `CorruptBatch` before it writes more than `bytes_max`."""
    if codec == Codec.NONE or not len(data):
        if len(data) > bytes_max:
            raise _too_large(bytes_max)
        return data
    import cramjam

    view = memoryview(data)
    try:
        match codec:
            case Codec.GZIP:
                return _decompress_gzip(view, bytes_max)
            case Codec.SNAPPY:
                return _decompress_snappy(view, bytes_max)
            case Codec.LZ4:
                return _into(cramjam.lz4.decompress_into, view, min(_measure_lz4(view), bytes_max), bytes_max)
            case Codec.ZSTD:
                return _into(
                    cramjam.zstd.decompress_into, view, min(_measure_zstd(view, bytes_max), bytes_max), bytes_max
                )
    except cramjam.DecompressionError as error:
        raise CorruptBatch(f"the batch does not decompress: {error}") from None
    raise CorruptBatch(f"the batch names compression {codec}, which does not exist")


def _too_large(bytes_max: int) -> BatchTooLarge:
    return BatchTooLarge(f"the batch decompresses to more than {bytes_max} bytes")


def _is_overflow(error: Exception) -> bool:
    """Whether the output buffer was too small. cramjam has one exception for all errors; only the text differs."""
    return str(error) == "failed to write whole buffer"


def _into(into: Callable[[memoryview, bytearray], int], data: memoryview, size: int, bytes_max: int) -> Buffer:
    import cramjam

    out = bytearray(size)
    try:
        return memoryview(out)[: into(data, out)]
    except cramjam.DecompressionError as error:
        if _is_overflow(error):
            raise _too_large(bytes_max) from None
        raise


def _decompress_gzip(data: memoryview, bytes_max: int) -> Buffer:
    import cramjam

    size_max = min(bytes_max, len(data) * _GZIP_RATIO_MAX)
    size = _U32.unpack_from(data, len(data) - 4)[0] if len(data) >= 4 else 0
    if size > size_max:
        raise _too_large(bytes_max)
    while True:
        out = bytearray(size)
        try:
            return memoryview(out)[: cramjam.gzip.decompress_into(data, out)]
        except cramjam.DecompressionError as error:
            if not _is_overflow(error):
                raise
        if size == size_max:
            raise _too_large(bytes_max)
        del out  # before the next allocation, so that the two never add up
        size = min(max(size, 1024) * 4, size_max)


def _compress_snappy(data: Buffer) -> bytes:
    import cramjam

    view = memoryview(data)
    out = bytearray(_SNAPPY_HEADER)
    # At least one block, even without data: readers take a lone header for raw snappy.
    for start in range(0, max(len(view), 1), SNAPPY_BLOCK_BYTES):
        block = cramjam.snappy.compress_raw(view[start : start + SNAPPY_BLOCK_BYTES])
        out += _I32_BE.pack(len(block))
        out += block
    return bytes(out)


def _decompress_snappy(data: memoryview, bytes_max: int) -> Buffer:
    """Sums the lengths of all blocks, then fills one buffer."""
    import cramjam

    blocks = _snappy_blocks(data)
    sizes = []
    for block in blocks:
        size = cramjam.snappy.decompress_raw_len(block)
        if size > len(block) * _SNAPPY_RATIO_MAX:
            raise CorruptBatch(f"a snappy block of {len(block)} bytes cannot hold the {size} it claims")
        sizes.append(size)
    if sum(sizes) > bytes_max:
        raise _too_large(bytes_max)
    out = memoryview(bytearray(sum(sizes)))
    start = 0
    for block, size in zip(blocks, sizes, strict=True):
        cramjam.snappy.decompress_raw_into(block, out[start : start + size])
        start += size
    return out


def _snappy_blocks(data: memoryview) -> list[memoryview]:
    if data[:_SNAPPY_MAGIC_BYTES] != _SNAPPY_HEADER[:_SNAPPY_MAGIC_BYTES]:
        return [data]
    if len(data) < len(_SNAPPY_HEADER):
        raise CorruptBatch("the snappy framing ends inside its header")
    blocks = []
    position = len(_SNAPPY_HEADER)
    while position < len(data):
        if len(data) - position < 4:
            raise CorruptBatch("the snappy framing ends inside a block's length")
        (size,) = _I32_BE.unpack_from(data, position)
        position += 4
        if not 0 < size <= len(data) - position:
            raise CorruptBatch(f"a snappy block of {size} bytes does not fit into {len(data) - position}")
        blocks.append(data[position : position + size])
        position += size
    return blocks


def _skip_frames(data: memoryview, position: int) -> int:
    """The position after skippable frames."""
    while position < len(data) and _u32(data, position) & 0xFFFFFFF0 == _SKIPPABLE_MAGIC:
        position += 8 + _u32(data, position + 4)
    return position


def _measure_lz4(data: memoryview) -> int:
    """The most bytes that the frames can hold, from their lists of blocks; frames must fill the data exactly."""
    total = 0
    position = _skip_frames(data, 0)
    while position < len(data):
        if _u32(data, position) != _LZ4_MAGIC or len(data) - position < 7:
            raise CorruptBatch("the batch is not an LZ4 frame")
        flags, sizes = data[position + 4], data[position + 5]
        block_bytes_max = 1 << (8 + 2 * (sizes >> 4 & 0x7))
        has_block_checksum, has_size, has_checksum, has_dictionary = (flags & bit for bit in (0x10, 0x08, 0x04, 0x01))
        position += 7 + (8 if has_size else 0) + (4 if has_dictionary else 0)
        while size := _u32(data, position):
            stored, size = size & 0x80000000, size & 0x7FFFFFFF
            total += min(size if stored else size * _LZ4_RATIO_MAX, block_bytes_max)
            position += 4 + size + (4 if has_block_checksum else 0)
        position = _skip_frames(data, position + 4 + (4 if has_checksum else 0))
    _check_end(data, position, "LZ4")
    return total


def _measure_zstd(data: memoryview, bytes_max: int) -> int:
    """The most bytes that the frames can hold, from their lists of blocks; refuses windows that are too large."""
    total = 0
    position = _skip_frames(data, 0)
    while position < len(data):
        if _u32(data, position) != _ZSTD_MAGIC:
            raise CorruptBatch("the batch is not a Zstandard frame")
        position, window, has_checksum = _zstd_header(data, position + 4)
        if window > max(bytes_max, WINDOW_BYTES_MAX):
            raise BatchTooLarge(f"the batch needs a window of {window} bytes to decompress")
        last = False
        while not last:
            block = _number(data, position, 3)
            last, kind, size = bool(block & 1), block >> 1 & 3, block >> 3
            # 0 is stored, 1 is one byte repeated, 2 is compressed: only 0 and 1 state their output size.
            total += min(size, _ZSTD_BLOCK_BYTES_MAX) if kind < 2 else _ZSTD_BLOCK_BYTES_MAX
            position += 3 + (1 if kind == 1 else size)
        position = _skip_frames(data, position + (4 if has_checksum else 0))
    _check_end(data, position, "Zstandard")
    return total


def _zstd_header(data: memoryview, position: int) -> tuple[int, int, bool]:
    """Position of the first block, size of the window, and whether a checksum follows the last block."""
    descriptor = _number(data, position, 1)
    is_single = bool(descriptor & 0x20)
    size_bytes = (1 if is_single else 0, 2, 4, 8)[descriptor >> 6]
    dictionary_bytes = (0, 1, 2, 4)[descriptor & 3]
    position += 1
    if is_single:
        position += dictionary_bytes
        window = _number(data, position, size_bytes) + (256 if size_bytes == 2 else 0)
    else:
        exponent, mantissa = divmod(_number(data, position, 1), 8)
        window = (1 << (10 + exponent)) // 8 * (8 + mantissa)
        position += 1 + dictionary_bytes
    return position + size_bytes, window, bool(descriptor & 0x04)


def _number(data: memoryview, position: int, size: int) -> int:
    if len(data) - position < size:
        raise CorruptBatch("the compressed bytes end too early")
    return int.from_bytes(data[position : position + size], "little")


def _u32(data: memoryview, position: int) -> int:
    return _number(data, position, 4)


def _check_end(data: memoryview, position: int, name: str) -> None:
    if position != len(data):
        raise CorruptBatch(f"the {name} frame ends {position - len(data)} bytes after the input")
