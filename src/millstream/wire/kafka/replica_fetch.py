"""Fetch (key 1), version 15, as replicas speak it: the fields that consumers leave out, decoded and encoded by hand.

A follower names itself and its registration (ReplicaState, KIP-903), and the epoch of its last batch. The leader
answers with a divergence where the histories differ (KIP-595). Every request is a full one, without a fetch session.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from struct import Struct
from typing import NamedTuple
from uuid import UUID

from millstream.core.errors import ProtocolError
from millstream.wire.kafka.primitives import Reader, array_length, string, uvarint

KEY, VERSION = 1, 15
NO_EPOCH = -1
_REPLICA_STATE, _DIVERGING_EPOCH = 1, 0
_HEAD = Struct(">iiibii")
_WANTED = Struct(">iiqiqi")
_READ = Struct(">ihqqq")
_STATE = Struct(">iq")
_ERROR = Struct(">ihi")
_I32 = Struct(">i")


class ReplicaWanted(NamedTuple):
    topic_id: UUID
    partition: int
    leader_epoch: int
    offset: int
    last_epoch: int
    bytes_max: int


class ReplicaRequest(NamedTuple):
    node_id: int
    """-1: a consumer's request."""
    registration: int
    wait_ms_max: int
    bytes_max: int
    wanted: Sequence[ReplicaWanted]


class ReplicaAnswer(NamedTuple):
    """For one partition. The encoder's caller adds `size` bytes of records behind it."""

    topic_id: UUID
    partition: int
    error: int
    high_watermark: int
    log_start: int
    divergence: tuple[int, int] | None
    """Epoch and end."""
    records: memoryview


def encode_request(request: ReplicaRequest) -> bytes:
    """The body, behind the tagged fields of the header."""
    state = _STATE.pack(request.node_id, request.registration) + b"\0"
    return b"".join(
        (
            _HEAD.pack(request.wait_ms_max, 1, request.bytes_max, 0, 0, -1),
            array_length(sum(1 for _ in _by_topic(request.wanted)), True),
            *(
                b"".join(
                    (
                        topic_id.bytes,
                        array_length(len(partitions), True),
                        *(
                            _WANTED.pack(each.partition, each.leader_epoch, each.offset, each.last_epoch, -1,
                                         each.bytes_max) + b"\0"
                            for each in partitions
                        ),
                        b"\0",
                    )
                )
                for topic_id, partitions in _by_topic(request.wanted)
            ),
            array_length(0, True),
            string("", True),
            b"\1",
            uvarint(_REPLICA_STATE),
            uvarint(len(state)),
            state,
        )
    )  # fmt: skip


def _by_topic(wanted: Iterable[ReplicaWanted]) -> Iterable[tuple[UUID, list[ReplicaWanted]]]:
    grouped: dict[UUID, list[ReplicaWanted]] = {}
    for each in wanted:
        grouped.setdefault(each.topic_id, []).append(each)
    return grouped.items()


def decode_request(reader: Reader) -> ReplicaRequest:
    """A request of version 15."""
    wait_ms_max, _, bytes_max, _, _, _ = reader.unpack(_HEAD)
    wanted: list[ReplicaWanted] = []
    for _ in range(reader.count(True, 3)):
        topic_id = reader.uuid()
        for _ in range(reader.count(True, 33)):
            partition, leader_epoch, offset, last_epoch, _, partition_bytes_max = reader.unpack(_WANTED)
            reader.skip_tags()
            wanted.append(ReplicaWanted(topic_id, partition, leader_epoch, offset, last_epoch, partition_bytes_max))
        reader.skip_tags()
    for _ in range(reader.count(True, 18)):
        reader.uuid()
        reader.raw(4 * reader.count(True, 4))
        reader.skip_tags()
    reader.string(True)
    node_id, registration = -1, -1
    for tag, end in reader.tags():
        if tag == _REPLICA_STATE:
            node_id, registration = reader.unpack(_STATE)
        reader.skip_to(end)
    return ReplicaRequest(node_id, registration, wait_ms_max, bytes_max, wanted)


def encode_head(topic_count: int) -> bytes:
    return _ERROR.pack(0, 0, 0) + array_length(topic_count, True)


def encode_topic(topic_id: UUID, partition_count: int) -> bytes:
    return topic_id.bytes + array_length(partition_count, True)


def encode_partition(partition: int, error: int, high_watermark: int, log_start: int, size: int) -> bytes:
    """A partition's answer up to its records."""
    fields = _READ.pack(partition, error, high_watermark, high_watermark, log_start)
    return fields + array_length(0, True) + _I32.pack(-1) + uvarint(size + 1)


def encode_end(divergence: tuple[int, int] | None) -> bytes:
    """What follows a partition's records."""
    if divergence is None:
        return b"\0"
    field = _STATE.pack(*divergence) + b"\0"
    return b"\1" + uvarint(_DIVERGING_EPOCH) + uvarint(len(field)) + field


def decode_answer(reader: Reader) -> list[ReplicaAnswer]:
    """A leader's answer, behind the header."""
    _, error, _ = reader.unpack(_ERROR)
    if error:
        raise ProtocolError(f"the leader answered the fetch with error {error}")
    answers: list[ReplicaAnswer] = []
    for _ in range(reader.count(True, 18)):
        topic_id = reader.uuid()
        for _ in range(reader.count(True, 37)):
            partition, code, high_watermark, _, log_start = reader.unpack(_READ)
            for _ in range(reader.count(True, 17)):
                reader.raw(16)
                reader.skip_tags()
            reader.i32()
            records = reader.blob(True)
            divergence = None
            for tag, end in reader.tags():
                if tag == _DIVERGING_EPOCH:
                    epoch, offset = reader.unpack(_STATE)
                    divergence = epoch, offset
                reader.skip_to(end)
            answers.append(
                ReplicaAnswer(
                    topic_id, partition, code, high_watermark, log_start, divergence, records or memoryview(b"")
                )
            )
        reader.skip_tags()
    reader.skip_tags()
    return answers
