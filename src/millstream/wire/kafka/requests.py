"""The client's side of the protocol: the few requests that our own readers and writers send, and their answers.

Every request has the newest version before the flexible ones. Kafka 4 still serves these versions, and so do brokers of
the last eight years. They need only fixed-width fields.

Answers are decoded into plain tuples. Records stay views of the answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from struct import Struct
from typing import NamedTuple

from millstream.wire.kafka.header import fixed
from millstream.wire.kafka.primitives import Reader, string

PRODUCE, FETCH, LIST_OFFSETS, METADATA = 0, 1, 2, 3
OFFSET_COMMIT, FIND_COORDINATOR, API_VERSIONS, INIT_PRODUCER_ID = 8, 10, 18, 22

VERSIONS: Mapping[int, tuple[int, int]] = {
    PRODUCE: (3, 8),
    FETCH: (4, 11),
    LIST_OFFSETS: (1, 2),
    METADATA: (1, 5),
    OFFSET_COMMIT: (2, 2),
    FIND_COORDINATOR: (0, 0),
    API_VERSIONS: (0, 0),
    INIT_PRODUCER_ID: (0, 1),
}
"""The lowest and highest supported version; a link picks the highest that the broker supports too."""

TopicPartition = tuple[str, int]
"""A topic and a partition."""

_I16 = Struct(">h")
_I32 = Struct(">i")
_I64 = Struct(">q")
_PARTITION_AND_TIME = Struct(">iq")


def header(key: int, version: int, correlation_id: int, client_id: str) -> bytes:
    return fixed(key, version, correlation_id) + string(client_id, compact=False)


def _array(items: Sequence[bytes]) -> bytes:
    return _I32.pack(len(items)) + b"".join(items)


def _by_topic(places: Iterable[TopicPartition]) -> dict[str, list[int]]:
    grouped: dict[str, list[int]] = {}
    for topic, partition in places:
        grouped.setdefault(topic, []).append(partition)
    return grouped


def _text(value: str) -> bytes:
    return string(value, compact=False)


# -- ApiVersions -----------------------------------------------------------------------------------------------------


def decode_api_versions(reader: Reader) -> dict[int, tuple[int, int]]:
    reader.i16()
    return {reader.i16(): (reader.i16(), reader.i16()) for _ in range(reader.count(False, 6))}


# -- Metadata --------------------------------------------------------------------------------------------------------


class Node(NamedTuple):
    id: int
    host: str
    port: int


class Metadata(NamedTuple):
    nodes: dict[int, Node]
    leaders: dict[str, dict[int, int]]
    """For each topic, the leader of each partition, or -1."""
    errors: dict[str, int]
    """Error codes of topics that cannot be read."""


def encode_metadata(topics: Sequence[str] | None, version: int) -> bytes:
    names = _I32.pack(-1) if topics is None else _array([_text(topic) for topic in topics])
    return names + (b"\0" if version >= 4 else b"")  # no auto-creation of topics


def decode_metadata(reader: Reader, version: int) -> Metadata:
    if version >= 3:
        reader.i32()
    nodes = {}
    for _ in range(reader.count(False, 10)):
        node = Node(reader.i32(), reader.text(False), reader.i32())
        reader.string(False)
        nodes[node.id] = node
    if version >= 2:
        reader.string(False)
    reader.i32()
    leaders: dict[str, dict[int, int]] = {}
    errors: dict[str, int] = {}
    for _ in range(reader.count(False, 7)):
        error, name = reader.i16(), reader.text(False)
        reader.boolean()
        partitions = {}
        for _ in range(reader.count(False, 14)):
            reader.i16()
            index, leader = reader.i32(), reader.i32()
            for _ in range(3 if version >= 5 else 2):
                reader.raw(4 * max(reader.count(False, 4), 0))
            partitions[index] = leader
        if error:
            errors[name] = error
        else:
            leaders[name] = partitions
    return Metadata(nodes, leaders, errors)


# -- ListOffsets -----------------------------------------------------------------------------------------------------

LATEST, EARLIEST = -1, -2


class FoundOffset(NamedTuple):
    error: int
    timestamp: int
    offset: int
    """-1 if no record is at or after the timestamp."""


def encode_list_offsets(times: Mapping[TopicPartition, int], version: int) -> bytes:
    """With isolation level read_committed, like Fetch, so that the end is not behind an ongoing transaction."""
    topics = [
        _text(topic) + _array([_PARTITION_AND_TIME.pack(index, times[topic, index]) for index in partitions])
        for topic, partitions in _by_topic(times).items()
    ]
    return _I32.pack(-1) + (b"\1" if version >= 2 else b"") + _array(topics)


def decode_list_offsets(reader: Reader, version: int) -> dict[TopicPartition, FoundOffset]:
    found = {}
    if version >= 2:
        reader.i32()
    for _ in range(reader.count(False, 6)):
        topic = reader.text(False)
        for _ in range(reader.count(False, 22)):
            index = reader.i32()
            found[topic, index] = FoundOffset(reader.i16(), reader.i64(), reader.i64())
    return found


# -- Fetch -----------------------------------------------------------------------------------------------------------


class Fetched(NamedTuple):
    error: int
    high_watermark: int
    log_start: int
    records: memoryview
    aborted: list[tuple[int, int]]
    """Producer id and first offset of aborted transactions."""


def encode_fetch(
    topic: str, partition: int, offset: int, bytes_max: int, wait_ms_max: int, version: int, committed: bool = True
) -> bytes:
    """Fetches one partition from an offset on."""
    fields = [_I32.pack(-1), _I32.pack(wait_ms_max), _I32.pack(1), _I32.pack(bytes_max), b"\1" if committed else b"\0"]
    if version >= 7:
        fields += [_I32.pack(0), _I32.pack(-1)]
    fields += [_I32.pack(1), _text(topic), _I32.pack(1), _I32.pack(partition)]
    if version >= 9:
        fields.append(_I32.pack(-1))
    fields.append(_I64.pack(offset))
    if version >= 5:
        fields.append(_I64.pack(-1))
    fields.append(_I32.pack(bytes_max))
    if version >= 7:
        fields.append(_I32.pack(0))
    if version >= 11:
        fields.append(_text(""))
    return b"".join(fields)


def decode_fetch(reader: Reader, version: int) -> Fetched:
    reader.i32()
    error = reader.i16() if version >= 7 else 0
    if version >= 7:
        reader.i32()
    fetched = Fetched(error, -1, -1, memoryview(b""), [])
    for _ in range(reader.count(False, 6)):
        reader.text(False)
        for _ in range(reader.count(False, 22)):
            reader.i32()
            error, high_watermark, _ = reader.i16(), reader.i64(), reader.i64()
            log_start = reader.i64() if version >= 5 else -1
            aborted = [(reader.i64(), reader.i64()) for _ in range(reader.count(False, 16))]
            if version >= 11:
                reader.i32()
            fetched = Fetched(error, high_watermark, log_start, reader.blob(False) or memoryview(b""), aborted)
    return fetched


# -- Produce ---------------------------------------------------------------------------------------------------------


class Produced(NamedTuple):
    error: int
    base_offset: int


def encode_produce_head(topic: str, partition: int, records_bytes: int, timeout_ms: int) -> bytes:
    """The request up to the batch, which is sent without a copy. Asks for acks=all."""
    return b"".join(
        (
            _I16.pack(-1),
            _I16.pack(-1),
            _I32.pack(timeout_ms),
            _I32.pack(1),
            _text(topic),
            _I32.pack(1),
            _I32.pack(partition),
            _I32.pack(records_bytes),
        )
    )


def decode_produce(reader: Reader) -> Produced:
    for _ in range(reader.count(False, 6)):
        reader.text(False)
        for _ in range(reader.count(False, 22)):
            reader.i32()
            return Produced(reader.i16(), reader.i64())
    return Produced(-1, -1)


# -- InitProducerId --------------------------------------------------------------------------------------------------


def encode_init_producer_id() -> bytes:
    return _I16.pack(-1) + _I32.pack(60_000)


def decode_init_producer_id(reader: Reader) -> tuple[int, int, int]:
    """Error, producer id, epoch."""
    reader.i32()
    return reader.i16(), reader.i64(), reader.i16()


# -- FindCoordinator, OffsetCommit -----------------------------------------------------------------------------------


def encode_find_coordinator(group: str) -> bytes:
    return _text(group)


def decode_find_coordinator(reader: Reader) -> tuple[int, Node]:
    error = reader.i16()
    return error, Node(reader.i32(), reader.text(False), reader.i32())


def encode_offset_commit(group: str, offsets: Mapping[TopicPartition, int]) -> bytes:
    """Commits without a member id. Brokers accept that while the group has no members."""
    topics = [
        _text(topic) + _array([_I32.pack(index) + _I64.pack(offsets[topic, index]) + _text("") for index in partitions])
        for topic, partitions in _by_topic(offsets).items()
    ]
    return _text(group) + _I32.pack(-1) + _text("") + _I64.pack(-1) + _array(topics)


def decode_offset_commit(reader: Reader) -> dict[TopicPartition, int]:
    errors = {}
    for _ in range(reader.count(False, 6)):
        topic = reader.text(False)
        for _ in range(reader.count(False, 6)):
            index = reader.i32()
            errors[topic, index] = reader.i16()
    return errors
