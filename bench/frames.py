"""The Kafka frames that the C programs send, built once and written to a file.

Plain `struct` instead of the project's own codecs: the ruler must not be made from what it measures.
"""

from __future__ import annotations

import struct
import time

from crc32c import crc32c

PRODUCE, FETCH = 0, 1


def _string(text: str) -> bytes:
    return struct.pack(">h", len(text)) + text.encode()


def _frame(key: int, version: int, body: bytes) -> bytes:
    """Header version 1, correlation id 0: at byte 8, where load.c patches it."""
    message = struct.pack(">hhi", key, version, 0) + _string("bench") + body
    return struct.pack(">i", len(message)) + message


def _varint(number: int) -> bytes:
    number = (number << 1) ^ (number >> 63)
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def batch_of(values: list[bytes]) -> bytes:
    """A record batch (format 2) of records without keys."""
    records = bytearray()
    for delta, value in enumerate(values):
        record = b"\0\0" + _varint(delta) + _varint(-1) + _varint(len(value)) + value + _varint(0)
        records += _varint(len(record)) + record
    now_ms = int(time.time() * 1000)
    covered = struct.pack(">hiqqqhii", 0, len(values) - 1, now_ms, now_ms, -1, -1, -1, len(values)) + records
    return struct.pack(">qiibI", 0, 9 + len(covered), -1, 2, crc32c(covered)) + covered


def produce(topic: str, values: list[bytes], partition: int = 0) -> bytes:
    """Produce v7, acks=1, one batch for one partition."""
    batch = batch_of(values)
    body = struct.pack(">hhi", -1, 1, 10_000)  # no transaction, acks, timeout
    body += struct.pack(">i", 1) + _string(topic) + struct.pack(">iii", 1, partition, len(batch)) + batch
    return _frame(PRODUCE, 7, body)


def produce_error_at(topic: str) -> int:
    """Where the error code stands in the answer to `produce`, counted from the correlation id."""
    return 4 + 4 + 2 + len(topic) + 4 + 4


def fetch_one_partition(topic: str, bytes_max: int) -> bytes:
    """Fetch v11 of partition 0 from offset 0, without a session. drain.c patches the offset, 26 bytes from the end."""
    body = struct.pack(">iiiibii", -1, 500, 1, 50 << 20, 0, 0, -1)
    body += struct.pack(">i", 1) + _string(topic) + struct.pack(">iii", 1, 0, -1)
    body += struct.pack(">qqi", 0, -1, bytes_max) + struct.pack(">i", 0) + _string("")
    return _frame(FETCH, 11, body)
