"""Decodes whole batches to records, and encodes records to batches.

`batch.py` defines the batch format, `pure.py` the record format. This module opens a batch (header, checksum,
compression), passes its body to a kernel, and closes batches the same way.

There are two kernels with the same functions: the compiled one if it imports, else its twin in Python.
`MILLSTREAM_PURE=1` in the environment forces the twin; `KERNEL` names the one in use.

The checksum is verified by default: compaction writes decoded records under a new checksum, and must not turn a
broken record into one that looks sound. `check_crc=False` is for batches that were just verified.

Every function raises `CorruptBatch` for bytes that are not a batch. `bytes_max` bounds the memory of a batch: its
decompressed bytes and, where they become objects, its records and headers together.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from struct import Struct
from typing import Any, Protocol

from crc32c import crc32c

from millstream.records import pure
from millstream.records.batch import (
    CODEC_MASK,
    CRC_START,
    HEADER_BYTES,
    LOG_APPEND_TIME,
    NO_PRODUCER,
    PREFIX_BYTES,
    BatchHeader,
    Buffer,
    CorruptBatch,
    read_header,
    read_prefix,
)
from millstream.records.columns import ALL, DATA_BYTES_MAX, Columns, ColumnsTooLarge, Filled, mask
from millstream.records.compression import Codec, compress, decompress
from millstream.records.record import Record, Section
from millstream.records.rows import RowColumns

BYTES_MAX = 256 << 20
"""The default bound of one batch: far above any sane `max.message.bytes`."""
OFFSET_DELTA_MAX = 2**31 - 1

_HEADER = Struct(">qiibIhiqqqhii")
_CRC = Struct(">I")
_CRC_POSITION = 17


class Body(Protocol):
    """The records of a batch in the making: add rows until it is full, then `finish` it."""

    @property
    def count(self) -> int: ...
    @property
    def size(self) -> int: ...
    def add(self, rows: Any, picked: Buffer | None, first: int, stop: int) -> int: ...
    def finish(self) -> tuple[bytearray, int, int, int, int]: ...


class Kernel(Protocol):
    def decode(self, section: Section, bytes_max: int = ...) -> list[Record]: ...
    def keys(self, section: Section, bytes_max: int = ...) -> list[tuple[int, bytes | None, bool]]: ...
    def find_time(self, section: Section, timestamp: int, first: int = ...) -> tuple[int, int] | None: ...
    def newest_time(self, section: Section, first: int) -> int: ...
    def judge(
        self, section: Section, earliest: int, latest: int, needs_key: bool, count_max: int, bytes_max: int = ...
    ) -> list[tuple[int, int, bool]]: ...
    def sound_bytes(self, data: Buffer, first: int, behind: int, asked: int, dense: bool) -> int: ...
    def validate(self, section: Section) -> None: ...
    def fill(self, sections: Iterable[Section], columns: int) -> Filled: ...
    def encode(
        self, records: Iterable[tuple[Any, ...]], base_offset: int | None, lead: int
    ) -> tuple[bytearray, int, int, int, int]: ...
    def open_rows(self, columns: RowColumns) -> Any: ...
    def begin(self, lead: int, bytes_max: int) -> Body: ...
    def pick(self, rows: Any, partitions: int, picked: Buffer | None) -> tuple[bytearray, list[int]]: ...


def _pick() -> tuple[Kernel, str]:
    if os.environ.get("MILLSTREAM_PURE") != "1":
        try:
            from millstream.records import _kernel
        except ImportError:
            return pure, "pure"
        return _kernel, "compiled"
    return pure, "pure"


kernel, KERNEL = _pick()


def sound_bytes(data: Buffer, first: int, behind: int, asked: int = -1, dense: bool = False) -> int:
    """The size of the sound batches at the front of stored bytes, by the rules of `batch.sound_batches`."""
    return kernel.sound_bytes(data, first, behind, asked, dense)


def decode(batch: Buffer, bytes_max: int = BYTES_MAX, *, check_crc: bool = True) -> list[Record]:
    """The records of one whole batch, with absolute offsets and timestamps."""
    return kernel.decode(_open_one(batch, bytes_max, check_crc), bytes_max)


def keys(batch: Buffer, bytes_max: int = BYTES_MAX, *, check_crc: bool = True) -> list[tuple[int, bytes | None, bool]]:
    """Offset, key and whether the value is null (a tombstone) of every record of one whole batch."""
    return kernel.keys(_open_one(batch, bytes_max, check_crc), bytes_max)


def find_time(
    batch: Buffer, timestamp: int, first: int = 0, *, bytes_max: int = BYTES_MAX, check_crc: bool = True
) -> tuple[int, int] | None:
    """Offset and timestamp of the first record in one whole batch that is at or after a timestamp, from an offset on.

    Makes no objects of keys, values and headers, so a body costs only its bytes.
    """
    return kernel.find_time(_open_one(batch, bytes_max, check_crc), timestamp, first)


def newest_time(batch: Buffer, first: int, *, bytes_max: int = BYTES_MAX, check_crc: bool = True) -> int:
    """The largest timestamp in one whole batch from an offset on, or -1."""
    return kernel.newest_time(_open_one(batch, bytes_max, check_crc), first)


def judge(
    batch: Buffer,
    earliest: int,
    latest: int,
    needs_key: bool,
    *,
    count_max: int,
    bytes_max: int = BYTES_MAX,
    check_crc: bool = True,
) -> list[tuple[int, int, bool]]:
    """The first records of one whole batch with a timestamp out of bounds, or without a required key: index,
    timestamp, whether there is a key. Raises `CorruptBatch` for a batch that `decode` would refuse.
    """
    section = _open_one(batch, bytes_max, check_crc)
    return kernel.judge(section, earliest, latest, needs_key, count_max, bytes_max)


def validate(batch: Buffer, bytes_max: int = BYTES_MAX, *, check_crc: bool = True) -> None:
    """Raises `CorruptBatch` unless the header of one whole batch matches its records.

    The record count is correct, offsets rise within the span, and the records fill the body exactly. If the span has as
    many offsets as there are records, as in every producer's batch, there are no gaps.
    """
    kernel.validate(_open_one(batch, bytes_max, check_crc))


def contains(batch: Buffer, needle: bytes, bytes_max: int = BYTES_MAX) -> tuple[bool, int]:
    """Whether the body of one whole batch contains some bytes, and the size of that body."""
    body = bytes(_open_one(batch, bytes_max, False).body)
    return needle in body, len(body)


def iterate(data: Buffer, bytes_max: int = BYTES_MAX, *, check_crc: bool = True) -> Iterator[Record]:
    """Every record of consecutive batches. Skips control batches, and ends at a partial last one."""
    for header, batch in split(data):
        if not header.is_control:
            yield from kernel.decode(_open(header, batch, bytes_max, check_crc), bytes_max)


def decode_columns(
    data: Buffer, *, columns: Iterable[str] = ALL, bytes_max: int = BYTES_MAX, check_crc: bool = True
) -> Columns:
    """Like `iterate`, as columns. Here `bytes_max` bounds all batches together: more raises `ColumnsTooLarge`."""
    if not 0 <= bytes_max <= DATA_BYTES_MAX:
        raise ValueError(f"bytes_max is {bytes_max}; columns with 32-bit ends hold at most {DATA_BYTES_MAX}")
    next_offset: int | None = None

    def sections() -> Iterator[Section]:
        nonlocal next_offset
        total = 0
        for header, batch in split(data):
            if not header.is_control:
                section = _open(header, batch, bytes_max, check_crc)
                total += len(section.body)
                if total > bytes_max:
                    raise ColumnsTooLarge(bytes_max)
                yield section
            next_offset = header.next_offset

    filled = kernel.fill(sections(), mask(columns))
    return Columns(*filled, next_offset)


def encode(
    records: Sequence[Record | tuple[Any, ...]],
    *,
    codec: Codec = Codec.NONE,
    producer_id: int = NO_PRODUCER,
    producer_epoch: int = -1,
    base_sequence: int = -1,
    base_offset: int | None = None,
    attributes: int = 0,
    last_offset_delta: int | None = None,
) -> bytearray:
    """One whole batch with its checksum.

    Records are tuples of offset, timestamp, key, value and optional headers. Without a base offset they are numbered
    from 0 and their own offsets are ignored. With one they keep their offsets, gaps included, and `last_offset_delta`
    keeps the span of their original batch, even when no record is left.
    """
    if not records and last_offset_delta is None:
        raise ValueError("a batch without records needs a last_offset_delta, which covers the removed offsets")
    out, base_timestamp, max_timestamp, last_delta, count = kernel.encode(records, base_offset, HEADER_BYTES)
    if last_offset_delta is None:
        last_offset_delta = last_delta
    elif not max(last_delta, 0) <= last_offset_delta <= OFFSET_DELTA_MAX:
        raise ValueError(f"last_offset_delta is {last_offset_delta}, but the last record is at {last_delta}")
    times = base_timestamp, max_timestamp
    producer = producer_id, producer_epoch, base_sequence
    codec = codec if count else Codec.NONE
    return _close(out, codec, base_offset or 0, attributes, last_offset_delta, times, producer, count)


def encode_own(records: Sequence[Record | tuple[Any, ...]]) -> tuple[memoryview, BatchHeader]:
    """`encode` with defaults, and the header that it wrote: for batches of a few small records."""
    return _own(*kernel.encode(records, None, HEADER_BYTES))


def _own(
    out: bytearray, base_timestamp: int, max_timestamp: int, last_delta: int, count: int
) -> tuple[memoryview, BatchHeader]:
    view = memoryview(out)
    length = len(view) - PREFIX_BYTES
    rest = (0, last_delta, base_timestamp, max_timestamp, NO_PRODUCER, -1, -1, count)
    _HEADER.pack_into(out, 0, 0, length, -1, 2, 0, *rest)
    crc = crc32c(view[CRC_START:])
    _CRC.pack_into(out, _CRC_POSITION, crc)
    return view, tuple.__new__(BatchHeader, (0, length, -1, 2, crc, *rest))


def encode_one(value: Buffer, key: bytes | None, timestamp: int) -> tuple[memoryview, BatchHeader]:
    """The same for one record without headers. Copies the value once: for large values."""
    size = len(value)
    fields = b"\0\0\0" + (b"\1" if key is None else _zigzag(len(key)) + key) + _zigzag(size)
    head = _zigzag(len(fields) + size + 1) + fields
    out = bytearray().join((bytes(HEADER_BYTES), head, value, b"\0"))
    return _own(out, timestamp, timestamp, 0, 1)


def _zigzag(number: int) -> bytes:
    """The varint of a non-negative number."""
    number <<= 1
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def open_rows(columns: RowColumns) -> Any:
    """Rows for `pick` and for a body's `add`; raises `RowRefused` if a column is shorter than its rows."""
    return kernel.open_rows(columns)


def pick(rows: Any, partitions: int, picked: Buffer | None = None) -> tuple[bytearray, list[int]]:
    """Rows in order of their partitions: row numbers as int32, and the end of each partition's rows.

    A row with a partition goes there; a row with a key goes where Kafka's Java clients send it. The other rows come
    last, as if there were one partition more. `picked` are the row numbers to choose from, if not all.
    """
    return kernel.pick(rows, partitions, picked)


def begin(bytes_max: int) -> Body:
    """An empty body for a batch of at most `bytes_max`, or of one record that is larger."""
    return kernel.begin(HEADER_BYTES, bytes_max)


def finish(
    body: Body,
    *,
    codec: Codec = Codec.NONE,
    producer_id: int = NO_PRODUCER,
    producer_epoch: int = -1,
    base_sequence: int = -1,
) -> bytearray:
    """The whole batch with its checksum."""
    out, base_timestamp, max_timestamp, last_delta, count = body.finish()
    if not count:
        raise ValueError("a batch needs at least one row")
    times = base_timestamp, max_timestamp
    producer = producer_id, producer_epoch, base_sequence
    return _close(out, codec, 0, 0, last_delta, times, producer, count)


def _close(
    out: bytearray,
    codec: Codec,
    base_offset: int,
    attributes: int,
    last_offset_delta: int,
    times: tuple[int, int],
    producer: tuple[int, int, int],
    count: int,
) -> bytearray:
    """Compresses the body after the header's space, and writes the header."""
    if codec is not Codec.NONE:
        body = compress(codec, memoryview(out)[HEADER_BYTES:])
        out = bytearray(HEADER_BYTES)
        out += body
    length = len(out) - PREFIX_BYTES
    attributes = attributes & ~CODEC_MASK | codec
    _HEADER.pack_into(out, 0, base_offset, length, -1, 2, 0, attributes, last_offset_delta, *times, *producer, count)
    _CRC.pack_into(out, _CRC_POSITION, crc32c(memoryview(out)[CRC_START:]))
    return out


def split(data: Buffer) -> Iterator[tuple[BatchHeader, memoryview]]:
    """Whole batches in sequence. Fetch responses may be cut anywhere, so a partial last one is no error."""
    view = memoryview(data)
    position = 0
    while len(view) - position >= HEADER_BYTES:
        size = read_prefix(view, position)[1]
        if size < HEADER_BYTES:
            raise CorruptBatch(f"the batch header says {size} bytes, less than the header itself")
        if size > len(view) - position:
            return
        yield read_header(view, position), view[position : position + size]
        position += size


def _open_one(batch: Buffer, bytes_max: int, check_crc: bool) -> Section:
    view = memoryview(batch)
    if len(view) < HEADER_BYTES:
        raise CorruptBatch(f"a batch needs at least {HEADER_BYTES} bytes, got {len(view)}")
    header = read_header(view)
    if header.size != len(view):
        raise CorruptBatch(f"the batch header says {header.size} bytes, but there are {len(view)}")
    return _open(header, view, bytes_max, check_crc)


def _open(header: BatchHeader, batch: memoryview, bytes_max: int, check_crc: bool) -> Section:
    if header.magic != 2:
        raise CorruptBatch(f"record format {header.magic} is not supported, only format 2 is")
    if check_crc and crc32c(batch[CRC_START:]) != header.crc:
        raise CorruptBatch("the batch's CRC-32C does not match its bytes")
    if header.base_offset < 0 or header.last_offset_delta < 0:
        raise CorruptBatch(f"the batch header says offsets {header.base_offset} to {header.last_offset}")
    return Section(
        decompress(header.codec, batch[HEADER_BYTES:], bytes_max),
        header.count,
        header.base_offset,
        header.last_offset_delta,
        header.base_timestamp,
        header.max_timestamp,
        bool(header.attributes & LOG_APPEND_TIME),
    )
