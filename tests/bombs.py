"""Batches that are small on the wire and large in memory: what a hostile producer sends."""

from __future__ import annotations

import struct

from crc32c import crc32c

from millstream.records.batch import HEADER_BYTES
from millstream.records.compression import Codec, compress
from tests.batches import NOW

_BATCH = struct.Struct(">qiibIhiqqqhii")


def varint(number: int) -> bytes:
    number = number << 1 ^ number >> 63
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def empty_headers(count: int, compression: Codec = Codec.ZSTD, at: int = NOW, key: bytes | None = None) -> bytes:
    """One record with so many headers of two bytes each."""
    held = varint(-1) if key is None else varint(len(key)) + key
    fields = b"\0\0\0" + held + b"\1" + varint(count)
    body = varint(len(fields) + 2 * count) + fields + bytes(2 * count)
    return closed(body, 1, compression, at)


def empty_records(count: int, compression: Codec = Codec.ZSTD, at: int = NOW) -> bytes:
    """So many records without key, value and headers."""
    rows = b"".join(varint(len(row)) + row for row in (b"\0\0" + varint(n) + b"\1\1\0" for n in range(count)))
    return closed(rows, count, compression, at)


def closed(body: bytes, count: int, compression: Codec, at: int = NOW) -> bytes:
    out = bytearray(HEADER_BYTES) + compress(compression, body)
    producer = (-1, -1, -1)
    _BATCH.pack_into(out, 0, 0, len(out) - 12, -1, 2, 0, compression, count - 1, at, at, *producer, count)
    struct.pack_into(">I", out, 17, crc32c(memoryview(out)[21:]))
    return bytes(out)
