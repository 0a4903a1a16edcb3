"""Fetch (key 1), decoded and encoded by hand: the answer's records are file ranges between byte strings."""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple
from uuid import UUID

from millstream.wire.kafka.primitives import Reader, array_length, string, uvarint

FLEXIBLE_FROM = 12
TOPIC_IDS_FROM = 13
READ_COMMITTED = 1


class PartitionFetch(NamedTuple):
    partition: int
    leader_epoch: int
    offset: int
    bytes_max: int


class FetchRequest(NamedTuple):
    wait_ms_max: int
    bytes_min: int
    bytes_max: int
    isolation: int
    session_id: int
    session_epoch: int
    topics: list[tuple[str | UUID, list[PartitionFetch]]]
    forgotten: list[tuple[str | UUID, list[int]]]


class PartitionRead(NamedTuple):
    """The answer for one partition. The caller adds `size` bytes of records behind it."""

    partition: int
    error: int
    high_watermark: int
    stable: int
    log_start: int
    size: int


_HEAD = Struct(">iiib")
_SESSION = Struct(">ii")


def decode(reader: Reader, version: int) -> FetchRequest:
    compact = version >= FLEXIBLE_FROM
    if version < 15:
        reader.i32()  # the replica id: only brokers set it
    wait_ms_max, bytes_min, bytes_max, isolation = reader.unpack(_HEAD)
    session_id, session_epoch = reader.unpack(_SESSION) if version >= 7 else (0, -1)
    topics = []
    for _ in range(reader.count(compact, 3)):
        topic = reader.uuid() if version >= TOPIC_IDS_FROM else reader.text(compact)
        partitions = [_decode_partition(reader, version, compact) for _ in range(reader.count(compact, 16))]
        if compact:
            reader.skip_tags()
        topics.append((topic, partitions))
    forgotten = []
    for _ in range(reader.count(compact, 3) if version >= 7 else 0):
        topic = reader.uuid() if version >= TOPIC_IDS_FROM else reader.text(compact)
        forgotten.append((topic, [reader.i32() for _ in range(reader.count(compact, 4))]))
        if compact:
            reader.skip_tags()
    return FetchRequest(wait_ms_max, bytes_min, bytes_max, isolation, session_id, session_epoch, topics, forgotten)


def _decode_partition(reader: Reader, version: int, compact: bool) -> PartitionFetch:
    partition = reader.i32()
    leader_epoch = reader.i32() if version >= 9 else -1
    offset = reader.i64()
    if version >= 12:
        reader.i32()  # the last fetched epoch: this broker's epochs never diverge
    if version >= 5:
        reader.i64()  # the follower's log start
    bytes_max = reader.i32()
    if compact:
        reader.skip_tags()
    return PartitionFetch(partition, leader_epoch, offset, bytes_max)


_ANSWER_HEAD = Struct(">ihi")
_READ_V4 = Struct(">ihqq")
_READ_V5 = Struct(">ihqqq")
_I32 = Struct(">i")


def encode_head(version: int, error: int, session_id: int, topic_count: int) -> bytes:
    compact = version >= FLEXIBLE_FROM
    head = _ANSWER_HEAD.pack(0, error, session_id) if version >= 7 else b"\0\0\0\0"
    return head + array_length(topic_count, compact)


def encode_topic(version: int, topic: str | UUID, partition_count: int) -> bytes:
    compact = version >= FLEXIBLE_FROM
    name = topic.bytes if isinstance(topic, UUID) else string(topic, compact)
    return name + array_length(partition_count, compact)


def encode_partition(version: int, read: PartitionRead) -> bytes:
    """A partition's answer up to its records."""
    compact = version >= FLEXIBLE_FROM
    partition, error, high_watermark, stable, log_start, size = read
    if version >= 5:
        fields = _READ_V5.pack(partition, error, high_watermark, stable, log_start)
    else:
        fields = _READ_V4.pack(partition, error, high_watermark, stable)
    # No aborted transactions; no preferred read replica.
    fields += array_length(0, compact)
    if version >= 11:
        fields += b"\xff\xff\xff\xff"
    return fields + (uvarint(size + 1) if compact else _I32.pack(size))


def end_of_structure(version: int) -> bytes:
    return b"\0" if version >= FLEXIBLE_FROM else b""
