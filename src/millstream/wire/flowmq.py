"""FlowMQ's protocol: frames and their payloads, without sockets.

    frame      command (1 byte), length of the payload (4 bytes, big endian), payload
    PUBLISH    topic NUL message             only the first NUL separates; a message may be empty or have any bytes
    SUBSCRIBE  topic, or topic NUL group
    MESSAGE    message id NUL payload

Rules
-----
1. Any split of the input gives the same frames.
2. A length is checked as soon as it arrives. Only PUBLISH may be long. Every other payload is a name or an id, and is
   limited to `SMALL_BYTES_MAX`, so that an unknown command can be skipped and answered.
3. After a length that is too large the stream cannot be decoded (`ProtocolError`). The frames before it are valid.
"""

from __future__ import annotations

import enum
from struct import Struct

from millstream.core.errors import Code, ProtocolError, RequestError

SMALL_BYTES_MAX = 64 * 1024
ERROR_BYTES_MAX = 1000

HEAD = Struct(">BI")
HEAD_BYTES = HEAD.size
_SEPARATOR = b"\0"

Frame = tuple[int, bytes]
"""Command and payload."""


class Command(enum.IntEnum):
    PING = 0x01
    PONG = 0x02
    CREATE_TOPIC = 0x03
    PUBLISH = 0x04
    SUBSCRIBE = 0x05
    ACK = 0x06
    MESSAGE = 0x07
    LIST_TOPICS = 0x08
    DELETE_TOPIC = 0x09
    NACK = 0x0A
    SUCCESS = 0x10
    ERROR = 0xFF


_PUBLISH = int(Command.PUBLISH)
_MESSAGE = int(Command.MESSAGE)


def frame_size(data: memoryview | bytearray, at: int, publish_bytes_max: int) -> int:
    """The size of the frame whose head is at this position, with the head."""
    command, size = HEAD.unpack_from(data, at)
    if size > SMALL_BYTES_MAX and (command != _PUBLISH or size > publish_bytes_max):
        bound = publish_bytes_max if command == _PUBLISH else SMALL_BYTES_MAX
        raise ProtocolError(f"a payload of {size} bytes for {name_of(command)}: at most {bound} are allowed")
    return HEAD_BYTES + int(size)


def next_frame(data: memoryview, at: int, publish_bytes_max: int) -> tuple[Frame, int] | None:
    """The frame at this position, and the position behind it. None if it is incomplete."""
    if len(data) - at < HEAD_BYTES:
        return None
    after = at + frame_size(data, at, publish_bytes_max)
    return ((data[at], bytes(data[at + HEAD_BYTES : after])), after) if after <= len(data) else None


def frame(command: int, payload: bytes = b"") -> bytes:
    return HEAD.pack(command, len(payload)) + payload


def error(reason: str) -> bytes:
    """An ERROR frame. The reason is truncated to `ERROR_BYTES_MAX`."""
    text = reason.encode("utf-8", "replace")[:ERROR_BYTES_MAX]
    return HEAD.pack(Command.ERROR, len(text)) + text


def message_head(message_id: bytes, size: int) -> bytes:
    """A MESSAGE without its payload of `size` bytes."""
    return HEAD.pack(_MESSAGE, len(message_id) + 1 + size) + message_id + _SEPARATOR


def split_publish(payload: bytes) -> tuple[bytes, bytes]:
    """Topic and message."""
    topic, separator, message = payload.partition(_SEPARATOR)
    if not separator or not topic:
        raise RequestError(Code.INVALID_REQUEST, "PUBLISH needs a topic, a NUL byte and the message")
    return topic, message


def split_subscribe(payload: bytes) -> tuple[str, str]:
    """Topic and group; the group may be empty."""
    topic, _, group = payload.partition(_SEPARATOR)
    return text_of(topic, "topic"), text_of(group, "group") if group else ""


def text_of(payload: bytes, what: str) -> str:
    """Decodes a name. `what` is its kind, for the error text."""
    if not payload:
        raise RequestError(Code.INVALID_REQUEST, f"the {what} has no name")
    try:
        return payload.decode()
    except UnicodeDecodeError:
        raise RequestError(Code.INVALID_REQUEST, f"the name of the {what} is not UTF-8") from None


def name_of(command: int) -> str:
    try:
        return Command(command).name
    except ValueError:
        return f"the unknown command 0x{command:02X}"
