"""Record batches (Kafka's format 2) as a view over bytes.

    offset  size  field
         0     8  base offset            not covered by the checksum: the broker patches it in place
         8     4  batch length           counts everything after itself
        12     4  partition leader epoch not covered by the checksum either
        16     1  magic                  2
        17     4  CRC-32C                of everything from `attributes` on
        21     2  attributes             bits 0-2 codec, 3 log-append time, 4 transactional, 5 control, 6 delete horizon
        23     4  last offset delta
        27     8  base timestamp
        35     8  max timestamp
        43     8  producer id            -1 without idempotence
        51     2  producer epoch
        53     4  base sequence
        57     4  record count
        61     -  records, compressed as a whole if attributes name a codec

The broker stores, replicates and serves these bytes unchanged; only `patch_offset` and `stamp` write to them.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from typing import NamedTuple

from crc32c import crc32c

from millstream.core.errors import Code, RequestError

HEADER_BYTES = 61
PREFIX_BYTES = 12
"""Base offset and batch length: enough to know a batch's size."""
CRC_START = 21

CODEC_MASK = 0x07
LOG_APPEND_TIME = 0x08
TRANSACTIONAL = 0x10
CONTROL = 0x20
CODEC_MAX = 4
ORDINARY = CODEC_MASK | LOG_APPEND_TIME
"""The attributes that a producer may set."""

NO_PRODUCER = -1
NO_TIMESTAMP = -1

_HEADER = Struct(">qiibIhiqqqhii")
_PREFIX = Struct(">qi")
_OFFSET_AND_LENGTH_AND_EPOCH = Struct(">qii")
_CRC = Struct(">I")
_ATTRIBUTES_TO_MAX_TIMESTAMP = Struct(">hiqq")

Buffer = bytes | bytearray | memoryview


class BatchHeader(NamedTuple):
    base_offset: int
    length: int
    leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    count: int  # type: ignore[assignment]  # tuple.count, which is not called on a header

    @property
    def size(self) -> int:
        """The size of the batch, prefix included."""
        return self.length + PREFIX_BYTES

    @property
    def last_offset(self) -> int:
        return self.base_offset + self.last_offset_delta

    @property
    def next_offset(self) -> int:
        return self.base_offset + self.last_offset_delta + 1

    @property
    def codec(self) -> int:
        return self.attributes & CODEC_MASK

    @property
    def is_control(self) -> bool:
        return bool(self.attributes & CONTROL)


class CorruptBatch(RequestError):
    """The bytes are not a valid record batch."""

    def __init__(self, detail: str) -> None:
        super().__init__(Code.CORRUPT_MESSAGE, detail)


class BatchTooLarge(CorruptBatch):
    """The batch takes more memory than the caller allows: its bytes, records and headers together."""


def read_header(buffer: Buffer, position: int = 0) -> BatchHeader:
    """The header at a position, unchecked. The buffer must hold `HEADER_BYTES` there."""
    return tuple.__new__(BatchHeader, _HEADER.unpack_from(buffer, position))  # `_make`, inlined


def read_prefix(buffer: Buffer, position: int = 0) -> tuple[int, int]:
    """Base offset and full size of the batch at a position."""
    base_offset, length = _PREFIX.unpack_from(buffer, position)
    return base_offset, length + PREFIX_BYTES


def check(buffer: memoryview) -> BatchHeader:
    """The header of exactly one sound batch, as a producer sends it; raises `CorruptBatch`."""
    have = len(buffer)
    if have < HEADER_BYTES:
        raise CorruptBatch(f"a batch needs at least {HEADER_BYTES} bytes, got {have}")
    header = tuple.__new__(BatchHeader, _HEADER.unpack_from(buffer))  # `_make`, inlined
    if header.magic != 2:
        raise RequestError(
            Code.UNSUPPORTED_FOR_MESSAGE_FORMAT, f"record format {header.magic} is not supported, only format 2 is"
        )
    if header.length + PREFIX_BYTES != have:
        raise CorruptBatch(f"the batch header says {header.length + PREFIX_BYTES} bytes, but {have} arrived")
    if crc32c(buffer[CRC_START:]) != header.crc:
        raise CorruptBatch("the batch's CRC-32C does not match its bytes")
    if header.count < 1 or header.last_offset_delta != header.count - 1:
        raise CorruptBatch(f"the batch header says {header.count} records over {header.last_offset_delta + 1} offsets")
    return header


def is_sound(buffer: memoryview, header: BatchHeader) -> bool:
    """Whether stored bytes are still the written batch: used by recovery, which expects torn writes."""
    return (
        header.magic == 2
        and header.length + PREFIX_BYTES == len(buffer)
        and header.last_offset_delta >= 0
        and crc32c(buffer[CRC_START:]) == header.crc
    )


def sound_batches(
    data: Buffer, first: int, behind: int, asked: int, dense: bool = False
) -> Iterator[tuple[BatchHeader, memoryview]]:
    """The sound batches at the front of stored bytes, with rising offsets from `first` to below `behind`.

    The first batch holds the offset `asked` or lies after it. With `dense` it holds that offset, and no offset is
    missing between two batches. The checksum does not cover the base offset, so the order proves it.
    """
    view, position, expected = memoryview(data), 0, -1
    size = len(view)
    while size - position >= HEADER_BYTES:
        header = read_header(view, position)
        base = header.base_offset
        end = position + header.length + PREFIX_BYTES
        next_offset = base + header.last_offset_delta + 1
        if (
            header.magic != 2
            or not position + HEADER_BYTES <= end <= size
            or base < 0
            or not first <= base < next_offset <= behind
            or next_offset <= asked
            or (dense and (base > asked if expected < 0 else base != expected))
            or crc32c(view[position + CRC_START : end]) != header.crc
        ):
            return
        yield header, view[position:end]
        position, first, expected = end, next_offset, next_offset


def patch_offset(buffer: bytearray | memoryview, base_offset: int, length: int, leader_epoch: int) -> None:
    """Sets the batch's offset and epoch. The checksum does not cover these fields."""
    _OFFSET_AND_LENGTH_AND_EPOCH.pack_into(buffer, 0, base_offset, length, leader_epoch)


def stamp(buffer: bytearray | memoryview, header: BatchHeader, now_ms: int) -> BatchHeader:
    """Sets the broker's time (`message.timestamp.type=LogAppendTime`) and the new checksum."""
    attributes = header.attributes | LOG_APPEND_TIME
    _ATTRIBUTES_TO_MAX_TIMESTAMP.pack_into(
        buffer, CRC_START, attributes, header.last_offset_delta, header.base_timestamp, now_ms
    )
    crc = crc32c(memoryview(buffer)[CRC_START:])
    _CRC.pack_into(buffer, 17, crc)
    return header._replace(attributes=attributes, max_timestamp=now_ms, crc=crc)
