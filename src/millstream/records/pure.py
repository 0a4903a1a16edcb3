"""Decodes and encodes the records of a section, in Python: the twin of `_kernel.pyx`.

    record:   length varint | attributes int8 | timestamp delta varlong | offset delta varint
              | key length varint | key | value length varint | value | header count varint | headers
    header:   name length varint | name | value length varint | value

Varints are zigzag, seven bits to a byte, lowest first, in at most 5 bytes (varint) or 10 (varlong); -1 as the length
of a key or a value means null.

Rules, the same in both twins and checked in this order, so that they fail alike
--------------------------------------------------------------------------------
1. The count must fit: a record takes at least 7 bytes. Nothing is allocated before this check.
2. A length is checked against the rest of the record before it is used. The fields must fill their record exactly, and
   the records their body. Bits beyond 32 or 64 in a varint are refused, not dropped.
3. Offset deltas rise from at least 0 to at most the batch's last one. Gaps are valid: compaction leaves them.
4. Sums stay within 64 bits.
5. Every function checks whole records, headers included, so all functions accept the same batches. `find_time` stops
   at its result.

Broken rules raise `CorruptBatch`. Bad arguments of `encode` raise `TypeError`, `ValueError` or `OverflowError`. Rows
that cannot become records raise `RowRefused`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Literal

from millstream.records.batch import NO_TIMESTAMP, BatchTooLarge, Buffer, CorruptBatch, sound_batches
from millstream.records.columns import (
    DATA_BYTES_MAX,
    HEADERS,
    KEY,
    OFFSET,
    TIMESTAMP,
    TIMESTAMP_TYPE,
    VALUE,
    Binary,
    ColumnsTooLarge,
    Filled,
    HeaderLists,
)
from millstream.records.record import Record, Section
from millstream.records.rows import (
    BAD_BYTES,
    BAD_COLUMN,
    BAD_HEADER,
    BAD_PARTITION,
    BAD_ROW,
    BAD_TIME,
    TOO_LARGE,
    Bytes,
    Lists,
    Numbers,
    RowColumns,
    RowRefused,
)

RECORD_BYTES_MIN = 7
LENGTH_MIN = 6
HEADER_BYTES_MIN = 2
RECORD_COST = 230
HEADER_COST = 170
"""The approximate memory of a record and a header as objects, besides their bytes. A header may take two bytes in a
body and a record seven, so the size of a body alone bounds neither memory nor time.
"""
BODY_BYTES_MAX = 2**31 - 1 - 61
"""The header's length field is an int32 and includes most of the header."""
INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
INT64_MIN = -(2**63)

(
    BAD_COUNT,
    BAD_NUMBER,
    BAD_LENGTH,
    BAD_OFFSET,
    BAD_TIMESTAMP,
    BAD_KEY,
    BAD_VALUE,
    BAD_HEADER_COUNT,
    BAD_HEADER_NAME,
    BAD_HEADER_VALUE,
    BAD_REST,
    BAD_TAIL,
    TOO_MUCH,
) = range(1, 14)

_REASONS = (
    "",
    "the batch header says more records than its bytes can hold",
    "a number does not end, or is too large",
    "its length is not within the batch",
    "its offset is outside the batch's, or not after the one before",
    "its timestamp is out of range",
    "its key is not within the record",
    "its value is not within the record",
    "its headers are not within the record",
    "a header's name is not within the record",
    "a header's value is not within the record",
    "there are bytes after its last field",
    "there are bytes after the last record",
    "records, headers and bytes together take more memory than a batch may",
)


def corrupt(reason: int, index: int) -> CorruptBatch:
    """The error for a record; both twins raise the same."""
    kind = BatchTooLarge if reason == TOO_MUCH else CorruptBatch
    return kind(f"record {index} of the batch: {_REASONS[reason]}")


_Step = tuple[int, int, int, int, int, int, int, int]
"""Offset, timestamp, starts of key, value and headers, lengths of key and value (-1: null), count of headers."""


def _varint(
    body: bytes, position: int, end: int, index: int, last_shift: int = 28, last_max: int = 0x0F
) -> tuple[int, int]:
    """A zigzag number and the position after it. The last possible byte has few bits and must end it."""
    value = shift = 0
    while position < end:
        byte = body[position]
        position += 1
        if shift == last_shift and byte > last_max:
            break
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value >> 1 ^ -(value & 1), position
        shift += 7
    raise corrupt(BAD_NUMBER, index)


def _walk(body: bytes, section: Section, bytes_max: int = INT64_MAX) -> Iterator[_Step]:
    _, count, base_offset, span, base_timestamp, max_timestamp, is_append_time = section
    end = len(body)
    if count < 0 or count > end // RECORD_BYTES_MIN:
        raise corrupt(BAD_COUNT, 0)
    if base_offset > INT64_MAX - max(span, 0):
        raise corrupt(BAD_OFFSET, 0)
    left = bytes_max - end - count * RECORD_COST
    if left < 0:
        raise corrupt(TOO_MUCH, 0)
    position = delta_min = 0
    for index in range(count):
        length, position = _varint(body, position, end, index)
        if length < LENGTH_MIN or length > end - position:
            raise corrupt(BAD_LENGTH, index)
        stop = position + length
        time_delta, position = _varint(body, position + 1, stop, index, 63, 0x01)
        delta, position = _varint(body, position, stop, index)
        if delta < delta_min or delta > span:
            raise corrupt(BAD_OFFSET, index)
        delta_min = delta + 1
        timestamp = max_timestamp if is_append_time else base_timestamp + time_delta
        if not INT64_MIN <= timestamp <= INT64_MAX:
            raise corrupt(BAD_TIMESTAMP, index)
        key_bytes, key = _varint(body, position, stop, index)
        if key_bytes < -1 or key_bytes > stop - key:
            raise corrupt(BAD_KEY, index)
        value_bytes, value = _varint(body, key + max(key_bytes, 0), stop, index)
        if value_bytes < -1 or value_bytes > stop - value:
            raise corrupt(BAD_VALUE, index)
        header_count, headers = _varint(body, value + max(value_bytes, 0), stop, index)
        position = headers
        if header_count:
            if header_count < 0 or header_count > (stop - headers) // HEADER_BYTES_MIN:
                raise corrupt(BAD_HEADER_COUNT, index)
            position = _check_headers(body, headers, stop, header_count, index)
        if position != stop:
            raise corrupt(BAD_REST, index)
        left -= header_count * HEADER_COST
        if left < 0:
            raise corrupt(TOO_MUCH, index)
        yield base_offset + delta, timestamp, key, value, headers, key_bytes, value_bytes, header_count
    if position != end:
        raise corrupt(BAD_TAIL, count)


def _check_headers(body: bytes, position: int, stop: int, count: int, index: int) -> int:
    for _ in range(count):
        size, position = _varint(body, position, stop, index)
        if size < 0 or size > stop - position:
            raise corrupt(BAD_HEADER_NAME, index)
        size, position = _varint(body, position + size, stop, index)
        if size < -1 or size > stop - position:
            raise corrupt(BAD_HEADER_VALUE, index)
        position += max(size, 0)
    return position


def _headers(body: bytes, position: int, count: int) -> Iterator[tuple[bytes, bytes | None]]:
    """Headers that `_walk` has checked."""
    end = len(body)
    for _ in range(count):
        size, position = _varint(body, position, end, 0)
        name = body[position : position + size]
        size, position = _varint(body, position + size, end, 0)
        yield name, _slice(body, position, size)
        position += max(size, 0)


def _slice(body: bytes, start: int, size: int) -> bytes | None:
    return None if size < 0 else body[start : start + size]


def decode(section: Section, bytes_max: int = INT64_MAX) -> list[Record]:
    """All records; `bytes_max` bounds their memory and the body's."""
    body = bytes(section.body)
    return [
        Record(
            offset,
            timestamp,
            _slice(body, key, key_bytes),
            _slice(body, value, value_bytes),
            tuple(
                (name.decode(errors="surrogateescape"), held) for name, held in _headers(body, headers, header_count)
            ),
        )
        for offset, timestamp, key, value, headers, key_bytes, value_bytes, header_count in _walk(
            body, section, bytes_max
        )
    ]


def keys(section: Section, bytes_max: int = INT64_MAX) -> list[tuple[int, bytes | None, bool]]:
    """Offset, key and whether the value is null."""
    body = bytes(section.body)
    return [(step[0], _slice(body, step[2], step[5]), step[6] < 0) for step in _walk(body, section, bytes_max)]


def find_time(section: Section, timestamp: int, first: int = 0) -> tuple[int, int] | None:
    """Offset and timestamp of the first record at or after a timestamp, from an offset on."""
    for step in _walk(bytes(section.body), section):
        if step[1] >= timestamp and step[0] >= first:
            return step[0], step[1]
    return None


def newest_time(section: Section, first: int) -> int:
    """The largest timestamp from an offset on, or -1."""
    times = (step[1] for step in _walk(bytes(section.body), section) if step[0] >= first)
    return max(NO_TIMESTAMP, max(times, default=NO_TIMESTAMP))


def judge(
    section: Section, earliest: int, latest: int, needs_key: bool, count_max: int, bytes_max: int = INT64_MAX
) -> list[tuple[int, int, bool]]:
    """The first `count_max` records with a timestamp out of bounds, or without a required key: index, timestamp,
    whether there is a key. A missing timestamp is not out of bounds.
    """
    bad: list[tuple[int, int, bool]] = []
    for index, step in enumerate(_walk(bytes(section.body), section, bytes_max)):
        timestamp, has_key = step[1], step[5] >= 0
        is_late = timestamp != NO_TIMESTAMP and not earliest <= timestamp <= latest
        if (is_late or (needs_key and not has_key)) and len(bad) < count_max:
            bad.append((index, timestamp, has_key))
    return bad


def sound_bytes(data: Buffer, first: int, behind: int, asked: int, dense: bool) -> int:
    return sum(len(batch) for _, batch in sound_batches(data, first, behind, asked, dense))


def validate(section: Section) -> None:
    for _ in _walk(bytes(section.body), section):
        pass


class _BinaryColumn:
    def __init__(self) -> None:
        self.null_count = 0
        self.validity: list[bool] = []
        self.ends = array("i", [0])
        self.data = bytearray()

    def add(self, value: bytes | None) -> None:
        self.validity.append(value is not None)
        if value is None:
            self.null_count += 1
        elif len(value) > DATA_BYTES_MAX - len(self.data):
            raise ColumnsTooLarge(DATA_BYTES_MAX)
        else:
            self.data += value
        self.ends.append(len(self.data))

    def finish(self) -> Binary:
        bitmap = bytearray((len(self.validity) + 7) // 8)
        for index, is_there in enumerate(self.validity):
            if is_there:
                bitmap[index >> 3] |= 1 << (index & 7)
        return Binary(self.null_count, bitmap, bytearray(self.ends.tobytes()), self.data)


def fill(sections: Iterable[Section], columns: int) -> Filled:
    """The records of sections as columns; `columns` has the bits of `columns.mask`."""
    offsets, timestamps, kinds, list_ends = array("q"), array("q"), bytearray(), array("i", [0])
    key, value, names, held = _BinaryColumn(), _BinaryColumn(), _BinaryColumn(), _BinaryColumn()
    count = 0
    for section in sections:
        body = bytes(section.body)
        for step in _walk(body, section):
            count += 1
            if columns & OFFSET:
                offsets.append(step[0])
            if columns & TIMESTAMP:
                timestamps.append(step[1])
            if columns & KEY:
                key.add(_slice(body, step[2], step[5]))
            if columns & VALUE:
                value.add(_slice(body, step[3], step[6]))
            if columns & HEADERS:
                for header_name, header_value in _headers(body, step[4], step[7]):
                    names.add(header_name)
                    held.add(header_value)
                list_ends.append(len(names.validity))
        kinds += bytes([section.is_append_time]) * section.record_count
    return Filled(
        count,
        bytearray(offsets.tobytes()) if columns & OFFSET else None,
        bytearray(timestamps.tobytes()) if columns & TIMESTAMP else None,
        kinds if columns & TIMESTAMP_TYPE else None,
        key.finish() if columns & KEY else None,
        value.finish() if columns & VALUE else None,
        HeaderLists(bytearray(list_ends.tobytes()), names.finish(), held.finish()) if columns & HEADERS else None,
    )


def _put(out: bytearray, value: int) -> None:
    value = value << 1 ^ value >> 63
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def _put_bytes(out: bytearray, value: Any) -> None:
    if value is None:
        out.append(1)
        return
    # Through a memoryview, because bytes(5) is not an error and bytes("x") would ask for an encoding.
    value = value if type(value) is bytes else bytes(memoryview(value))
    _put(out, len(value))
    out += value


def _put_headers(out: bytearray, headers: Sequence[tuple[str, Any]]) -> None:
    _put(out, len(headers))
    for name, value in headers:
        _put_bytes(out, name.encode(errors="surrogateescape"))
        _put_bytes(out, value)


def encode(
    records: Iterable[tuple[Any, ...]], base_offset: int | None, lead: int
) -> tuple[bytearray, int, int, int, int]:
    """A buffer of `lead` zeros and the records; base and largest timestamp, last offset delta, and count."""
    out = bytearray(lead)
    base_timestamp = max_timestamp = -1
    last_delta = index = -1
    for index, record in enumerate(records):
        if not isinstance(record, tuple):
            raise TypeError(f"record {index} is not a tuple but a {type(record).__name__}")
        if not 4 <= len(record) <= 5:
            raise ValueError(f"record {index} has {len(record)} fields, not 4 or 5")
        timestamp = record[1]
        if not INT64_MIN <= timestamp <= INT64_MAX:
            raise OverflowError(f"record {index}: its timestamp is out of range")
        if index == 0:
            base_timestamp = max_timestamp = timestamp
        time_delta = timestamp - base_timestamp
        if not INT64_MIN <= time_delta <= INT64_MAX:
            raise ValueError(f"record {index}: its timestamp is too far from the first one's")
        max_timestamp = max(max_timestamp, timestamp)
        delta = index if base_offset is None else record[0] - base_offset
        if delta <= last_delta or delta > INT32_MAX:
            raise ValueError(f"record {index}: its offset is not after the one before, or too far from the first")
        last_delta = delta
        fields = bytearray(1)
        _put(fields, time_delta)
        _put(fields, delta)
        _put_bytes(fields, record[2])
        _put_bytes(fields, record[3])
        _put_headers(fields, list(record[4] or ()) if len(record) == 5 else ())
        if len(fields) > BODY_BYTES_MAX - len(out):
            raise ValueError(f"record {index}: the batch would be larger than 2 GiB")
        _put(out, len(fields))
        out += fields
    return out, base_timestamp, max_timestamp, last_delta, index + 1


_Code = Literal["i", "q"]


def _view(column: Bytes | Numbers | Lists, buffer: Any, code: _Code, extra: int) -> memoryview:
    """The numbers of a column's rows, and `extra` more: there is one more end than rows."""
    width = 8 if code == "q" else 4
    if column.rows < 0 or column.before < 0:
        raise RowRefused(BAD_COLUMN, 0)
    if not column.rows:
        return memoryview(b"").cast(code)
    view = memoryview(buffer).cast("B")
    start, stop = column.before * width, (column.before + column.rows + extra) * width
    if stop > len(view):
        raise RowRefused(BAD_COLUMN, 0)
    return view[start:stop].cast(code)


class _Given:
    """An input column: whether a row is null, and where it starts and ends."""

    def __init__(self, column: Bytes | Numbers | Lists, numbers: Any, code: _Code, extra: int) -> None:
        self.rows = column.rows
        self.numbers = _view(column, numbers, code, extra)
        self._before = column.before
        self._validity: memoryview | None = None
        if column.validity is not None and column.rows:
            self._validity = memoryview(column.validity).cast("B")
            if (column.before + column.rows + 7) // 8 > len(self._validity):
                raise RowRefused(BAD_COLUMN, 0)

    def has(self, row: int) -> bool:
        at = self._before + row
        return self._validity is None or bool(self._validity[at >> 3] >> (at & 7) & 1)

    def ends(self, row: int, end_max: int, blamed: int) -> tuple[int, int]:
        start, end = self.numbers[row], self.numbers[row + 1]
        if not 0 <= start <= end <= end_max:
            raise RowRefused(BAD_BYTES, blamed)
        return start, end


class _GivenBytes(_Given):
    def __init__(self, column: Bytes) -> None:
        super().__init__(column, column.ends, "q" if column.is_large else "i", 1)
        self._data = memoryview(column.data).cast("B")

    def get(self, row: int, blamed: int) -> bytes | None:
        if not self.has(row):
            return None
        start, end = self.ends(row, len(self._data), blamed)
        return bytes(self._data[start:end])


class Rows:
    """Columns open for reading."""

    def __init__(self, columns: RowColumns) -> None:
        self.count = columns.rows
        self.now_ms = columns.now_ms
        self.value = _GivenBytes(columns.value)
        self.key = _GivenBytes(columns.key) if columns.key is not None else None
        self.timestamp = self.partition = self.headers = None
        if (times := columns.timestamp) is not None:
            self.timestamp = _Given(times, times.data, "q", 0)
        if (numbers := columns.partition) is not None:
            self.partition = _Given(numbers, numbers.data, "i", 0)
        if (lists := columns.headers) is not None:
            self.headers = _Given(lists, lists.ends, "q" if lists.is_large else "i", 1)
            self.names, self.held = _GivenBytes(lists.key), _GivenBytes(lists.value)
        for column in (self.value, self.key, self.timestamp, self.partition, self.headers):
            if column is not None and not 0 <= self.count <= column.rows:
                raise RowRefused(BAD_COLUMN, 0)

    def time(self, row: int) -> int:
        if self.timestamp is None or not self.timestamp.has(row):
            return self.now_ms
        micros: int = self.timestamp.numbers[row]
        if micros < 0:
            raise RowRefused(BAD_TIME, row)
        return micros // 1000

    def pairs(self, row: int) -> list[tuple[bytes, bytes | None]]:
        if self.headers is None or not self.headers.has(row):
            return []
        start, end = self.headers.ends(row, min(self.names.rows, self.held.rows), row)
        pairs = []
        for at in range(start, end):
            name = self.names.get(at, row)
            if name is None:
                raise RowRefused(BAD_HEADER, row)
            pairs.append((name, self.held.get(at, row)))
        return pairs


def open_rows(columns: RowColumns) -> Rows:
    return Rows(columns)


def _picked(rows: Rows, picked: Any) -> Sequence[int]:
    """The picked row numbers, as int32, or all."""
    if picked is None:
        return range(rows.count)
    return memoryview(picked).cast("B").cast("i")


class Body:
    """The records of a batch in the making: add rows until it is full."""

    def __init__(self, lead: int, bytes_max: int) -> None:
        self._out = bytearray(lead)
        self._bytes_max = bytes_max
        self._base_timestamp = self._max_timestamp = -1
        self.count = 0

    @property
    def size(self) -> int:
        return len(self._out)

    def add(self, rows: Rows, picked: Any, first: int, stop: int) -> int:
        """Adds rows, or picked rows, from `first` on; returns the first one that does not fit, or `stop`.

        An empty body takes even a row that is larger than the bound.
        """
        order = _picked(rows, picked)
        if not 0 <= first <= stop <= len(order):
            raise RowRefused(BAD_ROW, first)
        for at in range(first, stop):
            row = order[at]
            if not 0 <= row < rows.count:
                raise RowRefused(BAD_ROW, row)
            if not self._add(rows, row):
                return at
        return stop

    def _add(self, rows: Rows, row: int) -> bool:
        timestamp = rows.time(row)
        base_timestamp = self._base_timestamp if self.count else timestamp
        fields = bytearray(1)
        _put(fields, timestamp - base_timestamp)
        _put(fields, self.count)
        _put_bytes(fields, rows.key.get(row, row) if rows.key is not None else None)
        _put_bytes(fields, rows.value.get(row, row))
        pairs = rows.pairs(row)
        _put(fields, len(pairs))
        for name, held in pairs:
            _put_bytes(fields, name)
            _put_bytes(fields, held)
        if len(fields) > BODY_BYTES_MAX - len(self._out):
            if self.count:
                return False
            raise RowRefused(TOO_LARGE, row)
        length = bytearray()
        _put(length, len(fields))
        if self.count and len(length) + len(fields) > self._bytes_max - len(self._out):
            return False
        self._out += length
        self._out += fields
        self._base_timestamp = base_timestamp
        self._max_timestamp = max(self._max_timestamp, timestamp)
        self.count += 1
        return True

    def finish(self) -> tuple[bytearray, int, int, int, int]:
        """The same result as `encode`. Add nothing after it."""
        return self._out, self._base_timestamp, self._max_timestamp, self.count - 1, self.count


def begin(lead: int, bytes_max: int) -> Body:
    return Body(lead, bytes_max)


def murmur2(key: bytes) -> int:
    """The hash of Kafka's Java clients, as an unsigned 32-bit number."""
    size = len(key)
    multiplier, mask = 0x5BD1E995, 0xFFFFFFFF
    hashed = 0x9747B28C ^ size
    for at in range(0, size - size % 4, 4):
        word = int.from_bytes(key[at : at + 4], "little") * multiplier & mask
        word = (word ^ word >> 24) * multiplier & mask
        hashed = hashed * multiplier & mask ^ word
    if size % 4:
        hashed = (hashed ^ int.from_bytes(key[size - size % 4 :], "little")) * multiplier & mask
    hashed = (hashed ^ hashed >> 13) * multiplier & mask
    return hashed ^ hashed >> 15


def pick(rows: Rows, partitions: int, picked: Any) -> tuple[bytearray, list[int]]:
    """Rows in order of their partitions: row numbers as int32, and the end of each partition's rows.

    A row with a partition goes there; a row with a key goes where Kafka's Java clients send it. The other rows come
    last, as if there were one partition more.
    """
    if partitions < 1:
        raise ValueError("a topic has at least one partition")
    groups: list[list[int]] = [[] for _ in range(partitions + 1)]
    for row in _picked(rows, picked):
        if not 0 <= row < rows.count:
            raise RowRefused(BAD_ROW, row)
        group = partitions
        if rows.partition is not None and rows.partition.has(row):
            group = rows.partition.numbers[row]
            if not 0 <= group < partitions:
                raise RowRefused(BAD_PARTITION, row)
        elif rows.key is not None:
            key = rows.key.get(row, row)
            if key is not None:
                group = (murmur2(key) & INT32_MAX) % partitions
        groups[group].append(row)
    ends = list(accumulate(len(group) for group in groups))
    return bytearray(array("i", (row for group in groups for row in group)).tobytes()), ends
