"""ShareFetch (key 78) and ShareAcknowledge (key 79, KIP-932), decoded and encoded by hand: a worker sends one of them
for every few records, and the answer to a fetch carries record bytes.

Every version of both is flexible. So an acknowledged batch has two tagged fields of our own: the delay of a released
record, and the reason of a release or reject. Brokers and clients that do not know them skip them (KIP-482).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from struct import Struct
from typing import NamedTuple
from uuid import UUID

from millstream.core.errors import ProtocolError
from millstream.wire.kafka.primitives import Reader, array_length, error_text, string, uvarint

TopicIdPartition = tuple[UUID, int]
"""Topic and partition."""


class Acknowledged(NamedTuple):
    """An acknowledgement of the records from `first` to `last`: one type for all, or one type for each."""

    first: int
    last: int
    types: bytes
    delay_ms: int = 0
    reason: str = ""


class ShareFetchRequest(NamedTuple):
    group_id: str | None
    member_id: str | None
    session_epoch: int
    wait_ms_max: int
    bytes_max: int
    records_max: int
    is_record_limit: bool
    """Whether the record limit is strict (KIP-1206)."""
    is_renewal: bool
    acknowledged: dict[TopicIdPartition, list[Acknowledged]]
    """For every named partition; may be an empty list."""
    forgotten: list[TopicIdPartition]


class ShareAcknowledgeRequest(NamedTuple):
    group_id: str | None
    member_id: str | None
    session_epoch: int
    is_renewal: bool
    acknowledged: dict[TopicIdPartition, list[Acknowledged]]


class PartitionAnswer(NamedTuple):
    """The answer for one partition. The caller adds `size` bytes of records behind it."""

    partition: int
    error: int
    error_message: str | None
    acknowledge_error: int
    acknowledge_error_message: str | None
    size: int


DELAY_TAG, REASON_TAG = 10_000, 10_001
DELAY_MS_MAX = (1 << 35) - 1
"""The largest varint of five bytes: a year."""
REASON_BYTES_MAX = 1024
_FETCH_HEAD = Struct(">iiiiii")
_OFFSETS = Struct(">qq")


def decode_fetch(reader: Reader, version: int) -> ShareFetchRequest:
    group_id, member_id = reader.string(True), reader.string(True)
    epoch, wait_ms_max, _, bytes_max, records_max, _ = reader.unpack(_FETCH_HEAD)
    is_record_limit = version >= 2 and reader.i8() == 1
    is_renewal = version >= 2 and reader.boolean()
    acknowledged = _decode_topics(reader)
    forgotten = []
    for _ in range(reader.count(True, 18)):
        topic = reader.uuid()
        forgotten += [(topic, reader.i32()) for _ in range(reader.count(True, 4))]
        reader.skip_tags()
    return ShareFetchRequest(
        group_id,
        member_id,
        epoch,
        wait_ms_max,
        bytes_max,
        records_max,
        is_record_limit,
        is_renewal,
        acknowledged,
        forgotten,
    )


def decode_acknowledge(reader: Reader, version: int) -> ShareAcknowledgeRequest:
    group_id, member_id, epoch = reader.string(True), reader.string(True), reader.i32()
    is_renewal = version >= 2 and reader.boolean()
    return ShareAcknowledgeRequest(group_id, member_id, epoch, is_renewal, _decode_topics(reader))


def _decode_topics(reader: Reader) -> dict[TopicIdPartition, list[Acknowledged]]:
    acknowledged: dict[TopicIdPartition, list[Acknowledged]] = {}
    for _ in range(reader.count(True, 18)):
        topic = reader.uuid()
        for _ in range(reader.count(True, 6)):
            place = (topic, reader.i32())
            batches = [_decode_batch(reader) for _ in range(reader.count(True, 18))]
            acknowledged.setdefault(place, []).extend(batches)
            reader.skip_tags()
        reader.skip_tags()
    return acknowledged


def _decode_batch(reader: Reader) -> Acknowledged:
    first, last = reader.unpack(_OFFSETS)
    count = reader.uvarint() - 1
    if count < 0:
        raise ProtocolError("acknowledge types are null, which their field does not allow")
    batch = Acknowledged(first, last, bytes(reader.raw(count)))
    for tag, end in reader.tags():
        if tag == DELAY_TAG:
            batch = batch._replace(delay_ms=reader.uvarint())
        elif tag == REASON_TAG:
            reason = bytes(reader.raw(min(end - reader.position, REASON_BYTES_MAX)))
            batch = batch._replace(reason=reason.decode("utf-8", "replace"))
        reader.skip_to(end)
    return batch


# -- the client's side, version 2 --------------------------------------------------------------------------------------


def encode_fetch_request(request: ShareFetchRequest) -> bytes:
    size = request.records_max
    return b"".join(
        (
            string(request.group_id, True),
            string(request.member_id, True),
            _FETCH_HEAD.pack(request.session_epoch, request.wait_ms_max, 1, request.bytes_max, size, size),
            _FLAGS.pack(request.is_record_limit, request.is_renewal),
            _encode_topics(request.acknowledged),
            _encode_forgotten(request.forgotten) + END,
        )
    )


def encode_acknowledge_request(request: ShareAcknowledgeRequest) -> bytes:
    return b"".join(
        (
            string(request.group_id, True),
            string(request.member_id, True),
            _I32.pack(request.session_epoch),
            bytes((request.is_renewal,)),
            _encode_topics(request.acknowledged) + END,
        )
    )


def _encode_forgotten(places: Sequence[TopicIdPartition]) -> bytes:
    by_topic: dict[UUID, list[bytes]] = {}
    for topic, partition in places:
        by_topic.setdefault(topic, []).append(_I32.pack(partition))
    topics = (
        encode_topic(topic, len(partitions)) + b"".join(partitions) + END for topic, partitions in by_topic.items()
    )
    return array_length(len(by_topic), True) + b"".join(topics)


def _encode_topics(acknowledged: Mapping[TopicIdPartition, Sequence[Acknowledged]]) -> bytes:
    by_topic: dict[UUID, list[bytes]] = {}
    for (topic, partition), batches in acknowledged.items():
        listed = array_length(len(batches), True) + b"".join(map(_encode_batch, batches))
        by_topic.setdefault(topic, []).append(_I32.pack(partition) + listed + END)
    topics = (
        encode_topic(topic, len(partitions)) + b"".join(partitions) + END for topic, partitions in by_topic.items()
    )
    return array_length(len(by_topic), True) + b"".join(topics)


def _encode_batch(batch: Acknowledged) -> bytes:
    tags = []
    if batch.delay_ms:
        delay = uvarint(min(batch.delay_ms, DELAY_MS_MAX))
        tags.append(uvarint(DELAY_TAG) + uvarint(len(delay)) + delay)
    if batch.reason:
        reason = batch.reason.encode()[:REASON_BYTES_MAX]
        tags.append(uvarint(REASON_TAG) + uvarint(len(reason)) + reason)
    types = array_length(len(batch.types), True) + batch.types
    return _OFFSETS.pack(batch.first, batch.last) + types + uvarint(len(tags)) + b"".join(tags)


# -- the broker's side -------------------------------------------------------------------------------------------------

_HEAD = Struct(">ih")
_FLAGS = Struct(">bb")
_I32 = Struct(">i")
_CODE = Struct(">ih")
_I16 = Struct(">h")
_LEADER = Struct(">iib")
_ACQUIRED = Struct(">qqhb")
_COUNT_MAX = 0x7FFF
END = b"\0"
"""The end of a structure: no tagged fields."""
END_OF_ANSWER = b"\1\0"
"""No node endpoints, no tagged fields."""


def encode_fetch_head(error: int, message: str | None, lock_ms: int, topic_count: int) -> bytes:
    return _head(error, message) + _I32.pack(lock_ms) + array_length(topic_count, True)


def encode_acknowledge_head(version: int, error: int, message: str | None, lock_ms: int, topic_count: int) -> bytes:
    lock = _I32.pack(lock_ms) if version >= 2 else b""
    return _head(error, message) + lock + array_length(topic_count, True)


def _head(error: int, message: str | None) -> bytes:
    return _HEAD.pack(0, error) + string(error_text(message), True)


def encode_topic(topic: UUID, partition_count: int) -> bytes:
    return topic.bytes + array_length(partition_count, True)


def encode_fetched(answer: PartitionAnswer, leader_id: int) -> bytes:
    """A partition's answer up to its records."""
    partition, error, message, acknowledge_error, acknowledge_message, size = answer
    return b"".join(
        (
            _CODE.pack(partition, error),
            string(error_text(message), True),
            _I16.pack(acknowledge_error),
            string(error_text(acknowledge_message), True),
            _LEADER.pack(leader_id, 0, 0),
            uvarint(size + 1),
        )
    )


def encode_acquired(runs: Iterable[tuple[int, int, int]]) -> bytes:
    """First offset, last offset and delivery count of each run of records; follows a partition's records.

    Adjacent runs are merged: batches of a single record are common, and clients keep a list of these runs.
    """
    merged: list[tuple[int, int, int]] = []
    for run in runs:
        if merged and merged[-1][1] + 1 == run[0] and merged[-1][2] == run[2]:
            merged[-1] = (merged[-1][0], run[1], run[2])
        else:
            merged.append(run)
    packed = [_ACQUIRED.pack(first, last, min(count, _COUNT_MAX), 0) for first, last, count in merged]
    return array_length(len(packed), True) + b"".join(packed) + END


def encode_acknowledged(partition: int, error: int, message: str | None, leader_id: int) -> bytes:
    return _CODE.pack(partition, error) + string(error_text(message), True) + _LEADER.pack(leader_id, 0, 0) + END
