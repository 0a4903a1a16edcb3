"""Flume's protocol: bytes to requests, answers to bytes, without sockets. Everything is big-endian.

    request   [size 4][API key 2][request id 4][payload]      answer   [size 4][request id 4][payload]

`size` counts the bytes after it. Strings are [length 2][UTF-8], byte strings [length 4][bytes], lists [count 2] and
items.

    key  request       payload                                               answer's payload
    0    Produce       topic, partition 4, key, payload                      partition 4, offset 8, error 2
    1    Fetch         topic, partition 4, offset 8, max bytes 4             error 2, count 4, records
    2    JoinGroup     group, member, session timeout 4 (ms), topics         error 2, generation 4, leader, member,
                                                                             members
    3    LeaveGroup    group, member                                         error 2
    4    Heartbeat     group, generation 4, member                           error 2
    5    OffsetCommit  group, topic, partition 4, offset 8                   error 2
    6    OffsetFetch   group, topic, partition 4                             error 2, offset 8

A fetched record is [offset 8][length 4][payload]. A request that is longer or shorter than its fields raises
`ProtocolError`. Its frame is whole, so the error has the shape of the request's answer (`encode_refused`), and the
connection stays open.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from struct import Struct
from struct import error as StructError
from typing import NamedTuple

from millstream.core.errors import ProtocolError
from millstream.wire.reader import BoundedReader

PRODUCE, FETCH, JOIN_GROUP, LEAVE_GROUP, HEARTBEAT, OFFSET_COMMIT, OFFSET_FETCH = range(7)
BY_KEY = -1
"""In a produce request: the key selects the partition."""
NO_OFFSET = -1
HEAD_BYTES = 10
TOPICS_MAX = 10_000
"""Per JoinGroup request."""
RECORD_HEAD_BYTES = 12

_HEAD = Struct(">ihi")
_U16 = Struct(">H")
_I32 = Struct(">i")
_PARTITION_KEY = Struct(">ii")
_PLACE = Struct(">iqi")
_PARTITION_OFFSET = Struct(">iq")
PRODUCED = Struct(">iiiqh")
"""The whole answer to Produce: its size (18), request id, partition, offset, error."""
_ERROR_ONLY = Struct(">iih")
_FETCHED = Struct(">iihi")
_RECORD = Struct(">qi")
_JOINED = Struct(">hi")
_OFFSET = Struct(">iihq")


class Error(enum.IntEnum):
    NONE = 0
    UNKNOWN = 1
    TOPIC_NOT_FOUND = 2
    OFFSET_OUT_OF_RANGE = 3
    UNKNOWN_MEMBER = 4
    STALE_GENERATION = 5
    REBALANCE_NEEDED = 6


class Produce(NamedTuple):
    topic: str
    partition: int
    key: bytes
    payload: bytes


class Fetch(NamedTuple):
    topic: str
    partition: int
    offset: int
    bytes_max: int


class JoinGroup(NamedTuple):
    group: str
    member: str
    session_ms: int
    topics: tuple[str, ...]


class LeaveGroup(NamedTuple):
    group: str
    member: str


class Heartbeat(NamedTuple):
    group: str
    generation: int
    member: str


class OffsetCommit(NamedTuple):
    group: str
    topic: str
    partition: int
    offset: int


class OffsetFetch(NamedTuple):
    group: str
    topic: str
    partition: int


Request = Produce | Fetch | JoinGroup | LeaveGroup | Heartbeat | OffsetCommit | OffsetFetch


class Reader(BoundedReader):
    __slots__ = ()

    def raw(self, size: int) -> bytes:
        position = self._advance(size)
        return bytes(self.buffer[position : position + size])

    def string(self) -> str:
        (size,) = self.unpack(_U16)
        try:
            return self.raw(size).decode()
        except UnicodeDecodeError as error:
            raise ProtocolError(f"a string is not UTF-8: {error}") from None

    def finish(self) -> None:
        if self.position != self.end:
            raise ProtocolError(f"the request is {self.end - self.position} bytes longer than its fields")


def peek(frame: memoryview) -> tuple[int, int]:
    """API key and request id of a whole frame."""
    if len(frame) < HEAD_BYTES:
        raise ProtocolError(f"a request of {len(frame)} bytes has no room for its header")
    _, key, request_id = _HEAD.unpack_from(frame)
    return key, request_id


def decode_produce(frame: memoryview) -> tuple[str, int, bytes, bytes]:
    """The fields of `Produce`, in fewer steps than `decode`: it is the most frequent request."""
    try:
        key_at = HEAD_BYTES + 2 + _U16.unpack_from(frame, HEAD_BYTES)[0] + _PARTITION_KEY.size
        partition, key_bytes = _PARTITION_KEY.unpack_from(frame, key_at - _PARTITION_KEY.size)
        payload_at = key_at + key_bytes + 4
        if key_bytes < 0 or payload_at + _I32.unpack_from(frame, payload_at - 4)[0] != len(frame):
            raise ProtocolError("the lengths of a produce request do not add up to its size")
        topic = str(frame[HEAD_BYTES + 2 : key_at - _PARTITION_KEY.size], "utf-8")
    except StructError:
        raise ProtocolError("a produce request ends before its fields do") from None
    except UnicodeDecodeError as error:
        raise ProtocolError(f"a string is not UTF-8: {error}") from None
    key = bytes(frame[key_at : key_at + key_bytes]) if key_bytes else b""
    return topic, partition, key, bytes(frame[payload_at:])


class ProduceTo:
    """Decodes produce requests to one topic: a client repeats them, and only a few fields differ."""

    __slots__ = ("_layout", "_name", "_size")

    def __init__(self, topic: str) -> None:
        self._name = topic.encode()
        self._layout = Struct(f">ihiH{len(self._name)}sii")
        self._size = self._layout.size + _I32.size

    def decode(self, frame: memoryview) -> tuple[int, int, bytes | None, bytes] | None:
        """Request id, partition, key and payload; None for another request or an invalid one."""
        size = len(frame)
        if size < self._size:
            return None
        _, key, request_id, name_bytes, name, partition, key_bytes = self._layout.unpack_from(frame)
        payload_at = self._size + key_bytes
        if key != PRODUCE or name != self._name or name_bytes != len(name) or not self._size <= payload_at <= size:
            return None
        if payload_at + _I32.unpack_from(frame, payload_at - 4)[0] != size:
            return None
        return (
            request_id,
            partition,
            bytes(frame[payload_at - 4 - key_bytes : payload_at - 4]) if key_bytes else None,
            bytes(frame[payload_at:]),
        )


def decode(key: int, frame: memoryview) -> Request:
    reader = Reader(frame, HEAD_BYTES)
    decoder = _DECODERS.get(key)
    if decoder is None:
        raise ProtocolError(f"there is no request with the API key {key}")
    request = decoder(reader)
    reader.finish()
    return request


def _produce(reader: Reader) -> Produce:
    topic = reader.string()
    partition, key_bytes = reader.unpack(_PARTITION_KEY)
    key = reader.raw(key_bytes)
    return Produce(topic, partition, key, reader.raw(*reader.unpack(_I32)))


def _fetch(reader: Reader) -> Fetch:
    return Fetch(reader.string(), *reader.unpack(_PLACE))


def _join_group(reader: Reader) -> JoinGroup:
    group, member = reader.string(), reader.string()
    (session_ms,) = reader.unpack(_I32)
    (count,) = reader.unpack(_U16)
    if count > TOPICS_MAX:
        raise ProtocolError(f"a member of {count} topics: at most {TOPICS_MAX} are allowed")
    return JoinGroup(group, member, session_ms, tuple(reader.string() for _ in range(count)))


def _leave_group(reader: Reader) -> LeaveGroup:
    return LeaveGroup(reader.string(), reader.string())


def _heartbeat(reader: Reader) -> Heartbeat:
    group = reader.string()
    (generation,) = reader.unpack(_I32)
    return Heartbeat(group, generation, reader.string())


def _offset_commit(reader: Reader) -> OffsetCommit:
    return OffsetCommit(reader.string(), reader.string(), *reader.unpack(_PARTITION_OFFSET))


def _offset_fetch(reader: Reader) -> OffsetFetch:
    return OffsetFetch(reader.string(), reader.string(), *reader.unpack(_I32))


_DECODERS: dict[int, Callable[[Reader], Request]] = {
    PRODUCE: _produce,
    FETCH: _fetch,
    JOIN_GROUP: _join_group,
    LEAVE_GROUP: _leave_group,
    HEARTBEAT: _heartbeat,
    OFFSET_COMMIT: _offset_commit,
    OFFSET_FETCH: _offset_fetch,
}


def encode_produced(request_id: int, partition: int, offset: int, error: int = 0) -> bytes:
    return PRODUCED.pack(18, request_id, partition, offset, error)


def encode_fetched(request_id: int, error: int, records: Iterable[tuple[int, bytes]] = ()) -> bytes:
    parts, count = [b""], 0
    for offset, payload in records:
        parts.append(_RECORD.pack(offset, len(payload)))
        parts.append(payload)
        count += 1
    size = sum(map(len, parts))
    parts[0] = _FETCHED.pack(10 + size, request_id, error, count)
    return b"".join(parts)


def encode_joined(
    request_id: int, error: int, generation: int = 0, leader: str = "", member: str = "", members: Sequence[str] = ()
) -> bytes:
    body = _JOINED.pack(error, generation) + _string(leader) + _string(member) + _U16.pack(len(members))
    body += b"".join(map(_string, members))
    return _I32.pack(4 + len(body)) + _I32.pack(request_id) + body


def encode_error(request_id: int, error: int) -> bytes:
    """The answer to LeaveGroup, Heartbeat and OffsetCommit."""
    return _ERROR_ONLY.pack(6, request_id, error)


def encode_offset(request_id: int, error: int, offset: int = NO_OFFSET) -> bytes:
    return _OFFSET.pack(14, request_id, error, offset)


def encode_refused(key: int, request_id: int, error: int) -> bytes:
    """An error in the shape of the request's answer; an unknown key gets the shape of Produce."""
    if key == FETCH:
        return encode_fetched(request_id, error)
    if key == JOIN_GROUP:
        return encode_joined(request_id, error)
    if key == OFFSET_FETCH:
        return encode_offset(request_id, error)
    if key in (LEAVE_GROUP, HEARTBEAT, OFFSET_COMMIT):
        return encode_error(request_id, error)
    return encode_produced(request_id, -1, -1, error)


def _string(text: str) -> bytes:
    data = text.encode()
    return _U16.pack(len(data)) + data


def partition_of(key: bytes | None, partitions: int) -> int:
    """32-bit FNV-1a, as in Flume's clients; without a key the first partition."""
    if not key:
        return 0
    number = 0x811C9DC5
    for byte in key:
        number = (number ^ byte) * 0x01000193 & 0xFFFFFFFF
    return number % partitions
