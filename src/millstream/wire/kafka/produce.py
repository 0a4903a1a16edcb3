"""Produce (key 0), decoded and encoded by hand: the request's batches stay views of the received frame."""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple
from uuid import UUID

from millstream.wire.kafka.primitives import (
    ITEMS_MAX,
    ManyItems,
    Reader,
    array_length,
    error_text,
    string,
    uvarint,
)

LOG_START_FROM = 5
FLEXIBLE_FROM = 9
TOPIC_IDS_FROM = 13

_ACKS_AND_TIMEOUT = Struct(">hi")


class PartitionData(NamedTuple):
    topic: str | UUID
    partition: int
    records: memoryview | None


class ProduceRequest(NamedTuple):
    transactional_id: str | None
    acks: int
    timeout_ms: int
    data: list[PartitionData]


class PartitionAnswer(NamedTuple):
    topic: str | UUID
    partition: int
    error: int
    base_offset: int = -1
    log_append_time: int = -1
    log_start: int = -1
    message: str | None = None
    records: tuple[tuple[int, str], ...] = ()
    """Indexes in the batch of invalid records, with reasons (KIP-467)."""


def decode(reader: Reader, version: int, items_max: int = ITEMS_MAX) -> ProduceRequest:
    """Raises `ManyItems` if the arrays have more than `items_max` items."""
    compact = version >= FLEXIBLE_FROM
    by_id = version >= TOPIC_IDS_FROM
    transactional_id = reader.string(compact)
    acks, timeout_ms = reader.unpack(_ACKS_AND_TIMEOUT)
    data = []
    for _ in range(reader.count(compact, 3)):
        topic: str | UUID = reader.uuid() if by_id else reader.text(compact)
        count = reader.count(compact, 5)
        if reader.items > items_max:
            raise ManyItems
        for _ in range(count):
            data.append(PartitionData(topic, reader.i32(), reader.blob(compact)))
            if compact:
                reader.skip_tags()
        if compact:
            reader.skip_tags()
    return ProduceRequest(transactional_id, acks, timeout_ms, data)


_I32 = Struct(">i")
_V3 = Struct(">ihqq")
_V5 = Struct(">ihqqq")


def encode(answers: list[PartitionAnswer], version: int) -> bytes:
    """The body of the answer, grouped by topic like the request."""
    compact = version >= FLEXIBLE_FROM
    by_topic: dict[str | UUID, list[PartitionAnswer]] = {}
    for answer in answers:
        by_topic.setdefault(answer.topic, []).append(answer)
    parts = [array_length(len(by_topic), compact)]
    for topic, partitions in by_topic.items():
        parts.append(topic.bytes if isinstance(topic, UUID) else string(topic, compact))
        parts.append(array_length(len(partitions), compact))
        for answer in partitions:
            _, index, error, base_offset, append_time, log_start, message, records = answer
            if version >= LOG_START_FROM:
                parts.append(_V5.pack(index, error, base_offset, append_time, log_start))
            else:
                parts.append(_V3.pack(index, error, base_offset, append_time))
            if version >= 8:
                parts.append(array_length(len(records), compact))
                for at, reason in records:
                    parts.append(_I32.pack(at) + string(error_text(reason), compact) + (b"\0" if compact else b""))
                parts.append(string(error_text(message), compact))
            if compact:
                parts.append(b"\0")
        if compact:
            parts.append(b"\0")
    parts.append(b"\0\0\0\0" + (uvarint(0) if compact else b""))
    return b"".join(parts)
