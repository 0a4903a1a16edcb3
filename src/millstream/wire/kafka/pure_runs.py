"""Produce requests that arrived together: extracts their batches and encodes their answers.

A request of a known shape is recognised by its first bytes, so that only its batch is decoded. `take` walks the frames
of a receive buffer, checks each batch's header and checksum, and copies it behind the partition's other batches, so
that one write stores them all. `answers` encodes all answers of a run at once.

Rules
-----
1. `take` stops before the first frame that is not exactly as known: an incomplete frame, another API or shape, anything
   unusual around the batch, a batch that the gate (`broker/partition.py`) would refuse, or a batch of an idempotent
   producer. It does not report the reason; the general path does.
2. The result is the same as if each request had arrived alone.
3. Every length is checked against the available bytes before it is used. The buffer is only read.

This code runs for every small request, and in Python it was most of the request's cost. `_runs.pyx` is the compiled
version, this module is its twin, and `runs.py` selects one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from struct import Struct
from typing import Any, TypeVar

from millstream.core.errors import RequestError
from millstream.records.batch import (
    CODEC_MASK,
    CODEC_MAX,
    LOG_APPEND_TIME,
    NO_PRODUCER,
    NO_TIMESTAMP,
    ORDINARY,
    BatchHeader,
    check,
    patch_offset,
)
from millstream.records.run import split

TIMESTAMP_MAX = 2**63 - 1
OFFSETS_MAX = 2**31 - 1
"""Per run, so that a batch's distance from the start of its segment fits into 32 bits."""
_PRODUCE = 0
_HEAD = Struct(">ihhi")
"""Size of the frame, API key, version, correlation id."""
_SIZE = Struct(">i")
_TAGS = b"\0\0\0"
"""Behind the batch in flexible versions: no tagged fields of partition, topic, request."""
_ANSWER_HEAD = Struct(">ii")
_OFFSET_AND_TIME = Struct(">qq")
_OFFSET_TIME_AND_START = Struct(">qqq")


class Shape:
    """The constant bytes of similar requests and their answers."""

    __slots__ = ("has_log_start", "head", "is_flexible", "partition", "prefix", "tail", "version")

    def __init__(
        self,
        prefix: bytes,
        version: int,
        head: bytes,
        tail: bytes,
        partition: Any,
        *,
        is_flexible: bool,
        has_log_start: bool,
    ) -> None:
        self.prefix = prefix
        """The request from behind its correlation id up to the length of its batch."""
        self.version = version
        self.is_flexible = is_flexible
        self.head = head
        """The answer from behind its correlation id up to its base offset, log append time and perhaps log start."""
        self.tail = tail
        self.has_log_start = has_log_start
        self.partition = partition
        """The door's object for the partition."""


class Part:
    """A run's batches for one partition: a `records.run.BatchRun`, with its offsets in the log."""

    __slots__ = (
        "_batch_bytes_max", "_room", "_timestamp_max", "base_offset", "count", "data", "log_start", "max_timestamp",
        "offsets",
    )  # fmt: skip

    def __init__(self, batch_bytes_max: int, bytes_max: int, timestamp_max: int = TIMESTAMP_MAX) -> None:
        """An empty part, with limits for a batch's bytes, the part's bytes and a batch's timestamps."""
        self._batch_bytes_max = batch_bytes_max
        self._room = bytes_max
        self._timestamp_max = timestamp_max
        self.data = bytearray()
        self.count = self.offsets = 0
        self.max_timestamp = NO_TIMESTAMP
        self.base_offset = self.log_start = -1

    def add(self, batch: memoryview) -> BatchHeader | None:
        """Adds a batch; None if it cannot be stored unchanged."""
        size = len(batch)
        if size > self._batch_bytes_max or size > self._room:
            return None
        try:
            header = check(batch)
        except RequestError:
            return None
        attributes = header.attributes
        if attributes & ~ORDINARY or attributes & CODEC_MASK > CODEC_MAX or header.producer_id != NO_PRODUCER:
            return None
        if self.offsets + header.count > OFFSETS_MAX:
            return None
        if header.max_timestamp > self._timestamp_max or header.base_timestamp > self._timestamp_max:
            return None
        self.data += batch
        self.count += 1
        self.offsets += header.count
        self.max_timestamp = max(self.max_timestamp, header.max_timestamp)
        self._room -= size
        return header

    def place(self, base_offset: int, leader_epoch: int) -> None:
        for batch, header in split(self.data):
            patch_offset(batch, base_offset, header.length, leader_epoch)
            base_offset += header.count

    def settle(self, base_offset: int, log_start: int) -> None:
        """Stores the log's answer."""
        self.base_offset = base_offset
        self.log_start = log_start

    def let_go(self) -> None:
        """Frees the bytes, which the log holds by now."""
        self.data = bytearray()


S = TypeVar("S", bound=Shape)
Request = tuple[S, int, Part, int, int]
"""Shape, correlation id, part, number of the part's offsets before this batch, and log append time or -1."""


def take(
    data: memoryview,
    position: int,
    shapes: Mapping[tuple[int, bytes], S],
    lengths: Iterable[int],
    part_of: Callable[[Any], Part | None],
    requests: list[Request[S]],
) -> int:
    """Adds valid requests from a position on; returns where it stopped.

    Shapes are found by version and prefix; `lengths` has the lengths of all prefixes. `part_of` creates the part of a
    partition, or returns None if the partition takes no runs.
    """
    if position < 0:
        raise ValueError("a position before the first byte")
    parts: dict[Any, Part] = {}
    shape: S | None = None
    end = len(data)
    while end - position >= _HEAD.size:
        size, key, version, correlation_id = _HEAD.unpack_from(data, position)
        after = position + _SIZE.size + size
        if key != _PRODUCE or size < _HEAD.size or after > end:
            break
        frame = data[position + _HEAD.size : after]
        if shape is None or not _matches(shape, frame, version):
            shape = _shape_of(frame, version, shapes, lengths)
        batch = _batch_behind(shape, frame) if shape is not None else None
        if shape is None or batch is None:
            break
        part = parts.get(shape.partition) or part_of(shape.partition)
        if part is None:
            break
        parts[shape.partition] = part
        behind = part.offsets
        header = part.add(batch)
        if header is None:
            break
        append_time = header.max_timestamp if header.attributes & LOG_APPEND_TIME else NO_TIMESTAMP
        requests.append((shape, correlation_id, part, behind, append_time))
        position = after
    return position


def _matches(shape: Shape, frame: memoryview, version: int) -> bool:
    length = len(shape.prefix)
    return version == shape.version and len(frame) > length + _SIZE.size and frame[:length] == shape.prefix


def _shape_of(
    frame: memoryview, version: int, shapes: Mapping[tuple[int, bytes], S], lengths: Iterable[int]
) -> S | None:
    for length in lengths:
        shape = shapes.get((version, bytes(frame[:length])))
        if shape is not None and len(frame) > length + _SIZE.size:
            return shape
    return None


def _batch_behind(shape: Shape, frame: memoryview) -> memoryview | None:
    """The batch of a request that begins with the known bytes; None if anything unusual surrounds it."""
    start = len(shape.prefix)
    if not shape.is_flexible:
        begin = start + _SIZE.size
        return frame[begin:] if _SIZE.unpack_from(frame, start)[0] == len(frame) - begin else None
    size = shift = 0
    for at in range(start, min(start + 5, len(frame))):
        byte = frame[at]
        size |= (byte & 0x7F) << shift
        if byte < 0x80:
            return frame[at + 1 : at + size] if size and frame[at + size :] == _TAGS else None
        shift += 7
    return None


def find(
    frame: memoryview, position: int, version: int, shapes: Mapping[tuple[int, bytes], S], lengths: Iterable[int]
) -> tuple[S, memoryview] | None:
    """The shape of a request whose known bytes begin at a position, and its batch; None if it is not valid."""
    rest = frame[position:]
    shape = _shape_of(rest, version, shapes, lengths)
    batch = _batch_behind(shape, rest) if shape is not None else None
    return (shape, batch) if shape is not None and batch is not None else None


def answer(shape: Shape, correlation_id: int, base_offset: int, append_time: int, log_start: int) -> bytes:
    """The whole frame of the answer to a successful append."""
    if shape.has_log_start:
        numbers = _OFFSET_TIME_AND_START.pack(base_offset, append_time, log_start)
    else:
        numbers = _OFFSET_AND_TIME.pack(base_offset, append_time)
    size = 4 + len(shape.head) + len(numbers) + len(shape.tail)
    return b"".join((_ANSWER_HEAD.pack(size, correlation_id), shape.head, numbers, shape.tail))


def answers(requests: Sequence[Request[S]]) -> bytes:
    """The concatenated answers to requests whose parts are all settled."""
    return b"".join(
        answer(shape, correlation_id, part.base_offset + behind, append_time, part.log_start)
        for shape, correlation_id, part, behind, append_time in requests
    )
