"""Luxun's queue service (`luxun.thrift`): decodes calls and encodes results, without sockets; and the clients' packs.

Requests are decoded by hand, with every length checked; the IDL's required fields must be present. Results follow the
IDL: a failure has an error code and a message, a success has neither.

A pack is an item of Luxun's high-level clients: several messages, compressed together, with a checksum. Items are
opaque to the broker; `pack` and `unpack` are for clients.
"""

from __future__ import annotations

import enum
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from millstream.core.errors import MillstreamError, ProtocolError
from millstream.records.batch import CorruptBatch
from millstream.records.compression import Codec, compress, decompress
from millstream.wire import thrift
from millstream.wire.thrift import Reader

IDL = Path(__file__).with_name("luxun.thrift")
EARLIEST_TIME, LATEST_TIME = -1, -2

PRODUCE, ASYNC_PRODUCE, CONSUME = "produce", "asyncProduce", "consume"
FIND, DELETE_TOPIC, GET_SIZE = "findClosestIndexByTime", "deleteTopic", "getSize"

UNPACKED_BYTES_MAX = 64 << 20
MAGIC = 1


class ResultCode(enum.IntEnum):
    SUCCESS = 0
    FAILURE = 1
    TRY_LATER = 2


class ErrorCode(enum.IntEnum):
    INTERNAL_ERROR = 0
    TOPIC_NOT_EXIST = 1
    INDEX_OUT_OF_BOUNDS = 2
    INVALID_TOPIC = 3
    TOPIC_IS_EMPTY = 4
    AUTHENTICATION_FAILURE = 5
    MESSAGE_SIZE_TOO_LARGE = 6
    ALL_MESSAGE_CONSUMED = 7


class Produce(NamedTuple):
    item: memoryview
    """A view of the frame."""
    topic: str


class Consume(NamedTuple):
    topic: str
    fanout_id: str
    """Empty: read by index."""
    start_index: int
    fetch_bytes_max: int


class Find(NamedTuple):
    timestamp: int
    topic: str


class DeleteTopic(NamedTuple):
    topic: str
    password: str


class GetSize(NamedTuple):
    topic: str
    fanout_id: str


class Failure(NamedTuple):
    """A result that is not a success."""

    error: ErrorCode
    text: str
    result: ResultCode = ResultCode.FAILURE


# -- calls -------------------------------------------------------------------------------------------------------------


def decode_produce(reader: Reader) -> Produce:
    fields = reader.arguments({1: thrift.VIEW, 2: thrift.STRING})
    if 1 not in fields:
        raise ProtocolError("ProduceRequest has no item")
    return Produce(fields[1], _text(fields.get(2), "ProduceRequest", "topic"))


def decode_consume(reader: Reader) -> Consume:
    fields = reader.arguments({1: thrift.STRING, 2: thrift.STRING, 3: thrift.I64, 4: thrift.I32})
    fanout_id = _text(fields.get(2, b""), "ConsumeRequest", "fanoutId")
    return Consume(_text(fields.get(1), "ConsumeRequest", "topic"), fanout_id, fields.get(3, 0), fields.get(4, 0))


def decode_find(reader: Reader) -> Find:
    fields = reader.arguments({1: thrift.I64, 2: thrift.STRING})
    if 1 not in fields:
        raise ProtocolError("FindClosestIndexByTimeRequest has no timestamp")
    return Find(fields[1], _text(fields.get(2), "FindClosestIndexByTimeRequest", "topic"))


def decode_delete_topic(reader: Reader) -> DeleteTopic:
    fields = reader.arguments({1: thrift.STRING, 2: thrift.STRING})
    return DeleteTopic(
        _text(fields.get(1), "DeleteTopicRequest", "topic"), _text(fields.get(2), "DeleteTopicRequest", "password")
    )


def decode_get_size(reader: Reader) -> GetSize:
    fields = reader.arguments({1: thrift.STRING, 3: thrift.STRING})
    return GetSize(_text(fields.get(1), "GetSizeRequest", "topic"), _text(fields.get(3, b""), "GetSizeRequest", "id"))


def _text(value: bytes | None, struct: str, name: str) -> str:
    if value is None:
        raise ProtocolError(f"{struct} has no {name}")
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise ProtocolError(f"the {name} of {struct} is not UTF-8") from None


# -- results -----------------------------------------------------------------------------------------------------------

_OPEN = thrift.field(thrift.STRUCT, 0)
"""Field 0 of a reply is the call's result."""
_SUCCESS = thrift.field(thrift.STRUCT, 1) + thrift.i32(1, ResultCode.SUCCESS) + b"\0"
_CLOSE = b"\0\0"


def encode_failure(call: str, sequence_id: int, failure: Failure) -> bytes:
    result = thrift.i32(1, failure.result) + thrift.i32(2, failure.error) + thrift.string(3, failure.text.encode())
    return _reply(call, sequence_id, thrift.field(thrift.STRUCT, 1) + result + b"\0")


def encode_produced(sequence_id: int, index: int) -> bytes:
    return _reply(PRODUCE, sequence_id, _SUCCESS + thrift.i64(2, index))


def encode_consumed(sequence_id: int, items: Sequence[bytes], last_index: int) -> bytes:
    parts = [thrift.head(CONSUME, thrift.REPLY, sequence_id) + _OPEN + _SUCCESS + thrift.list_head(2, len(items))]
    for item in items:
        parts.append(thrift.length(len(item)))
        parts.append(item)
    parts.append(thrift.i64(3, last_index) + _CLOSE)
    return thrift.framed(*parts)


def encode_found(sequence_id: int, index: int, timestamp: int | None) -> bytes:
    fields = thrift.i64(2, index) + (thrift.i64(3, timestamp) if timestamp is not None else b"")
    return _reply(FIND, sequence_id, _SUCCESS + fields)


def encode_deleted(sequence_id: int) -> bytes:
    return _reply(DELETE_TOPIC, sequence_id, _SUCCESS)


def encode_size(sequence_id: int, size: int) -> bytes:
    return _reply(GET_SIZE, sequence_id, _SUCCESS + thrift.i64(2, size))


def _reply(call: str, sequence_id: int, fields: bytes) -> bytes:
    return thrift.framed(thrift.head(call, thrift.REPLY, sequence_id), _OPEN, fields, _CLOSE)


# -- packs -------------------------------------------------------------------------------------------------------------


class BadPack(MillstreamError):
    """An item that is not a pack, or has an invalid checksum or compression."""


def pack(messages: Sequence[bytes], codec: Codec = Codec.NONE) -> bytes:
    if codec not in (Codec.NONE, Codec.GZIP, Codec.SNAPPY):
        raise ValueError(f"a pack is compressed with gzip, snappy or not at all, not with {codec.name.lower()}")
    parts = [thrift.list_head(1, len(messages))]
    for message in messages:
        parts.append(thrift.length(len(message)))
        parts.append(message)
    parts.append(b"\0")
    content = compress(codec, b"".join(parts))
    checksum = zlib.crc32(content)
    signed = checksum - (1 << 32) if checksum >= 1 << 31 else checksum
    return thrift.byte(1, MAGIC) + thrift.byte(2, codec) + thrift.i32(3, signed) + thrift.string(4, content) + b"\0"


def unpack(item: bytes, bytes_max: int = UNPACKED_BYTES_MAX) -> list[bytes]:
    """The messages of a pack; raises `BadPack`. A checksum of 0 is not checked: Luxun's clients do not compute it."""
    try:
        fields = Reader(memoryview(item)).struct({1: thrift.BYTE, 2: thrift.BYTE, 3: thrift.I32, 4: thrift.STRING})
        if 4 not in fields:
            raise BadPack("the item is not a pack: it has no messageList")
        content, codec, magic = fields[4], fields.get(2, 0), fields.get(1, MAGIC)
        if magic != MAGIC or codec not in (Codec.NONE, Codec.GZIP, Codec.SNAPPY):
            raise BadPack(f"packs of magic {magic} with compression {codec} are not supported")
        checksum = fields.get(3, 0)
        if checksum and checksum & 0xFFFFFFFF != zlib.crc32(content):
            raise BadPack("the pack's CRC-32 does not match its bytes")
        body = decompress(codec, content, bytes_max)
        messages: list[bytes] = Reader(memoryview(body)).struct({1: thrift.LIST}).get(1, [])
        return messages
    except (ProtocolError, CorruptBatch) as error:
        raise BadPack(f"the item is not a pack: {error}") from None
