"""The metadata in a classic consumer's JoinGroup (ConsumerProtocolSubscription).

    int16 version                   all versions; one newer than 3 begins with the fields of 3
    topics                          array: int32 count, each int16 length and UTF-8 bytes
    user data                       int32 length or -1, bytes
    owned partitions    version 1   array of topics: name, array of int32
    generation          version 2   int32
    rack                version 3   int16 length or -1, UTF-8 bytes

A classic group passes the bytes to its leader: the broker decodes only the topics, which are the same in every version.
A group with broker-side assignment (`mixed.py`) needs all fields, and refuses a member with malformed bytes. Every
count is checked against the remaining bytes before it is used, and all counts together against `ITEMS_MAX`: the event
loop decodes the bytes in one step.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import repeat
from typing import NamedTuple

_INT16 = struct.Struct(">h")
_INT32 = struct.Struct(">i")
ITEMS_MAX = 50_000
"""Topics and partitions of one member: some 20 ms of work."""


class Subscription(NamedTuple):
    topics: frozenset[str]
    owned: frozenset[tuple[str, int]]
    """Partitions that it keeps while it rejoins: none if its assignor is eager."""
    rack_id: str | None


class FieldReader:
    """Reads the fields of the embedded consumer protocol in order. Raises ValueError if they are malformed."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0
        self._room = ITEMS_MAX

    def int16(self) -> int:
        return int(_INT16.unpack(self._take(2))[0])

    def int32(self) -> int:
        return int(_INT32.unpack(self._take(4))[0])

    def string(self) -> str:
        text = self.nullable_string()
        if text is None:
            raise ValueError("a string is null")
        return text

    def nullable_string(self) -> str | None:
        length = self.int16()
        return None if length == -1 else self._take(length).decode()

    def nullable_bytes(self) -> bytes:
        length = self.int32()
        return b"" if length == -1 else self._take(length)

    def count(self, item_bytes: int) -> int:
        """The length of an array with items of this size."""
        count = self.int32()
        if count < 0 or count * item_bytes > len(self._data) - self._position:
            raise ValueError("an array has more items than bytes")
        self._room -= count
        if self._room < 0:
            raise ValueError(f"more than {ITEMS_MAX} topics and partitions")
        return count

    def partitions(self) -> Iterator[tuple[str, int]]:
        for _ in range(self.count(item_bytes=6)):
            topic = self.string()
            count = self.count(item_bytes=4)
            yield from zip(repeat(topic), struct.unpack(f">{count}i", self._take(4 * count)))

    def _take(self, length: int) -> bytes:
        end = self._position + length
        if length < 0 or end > len(self._data):
            raise ValueError("a field ends beyond the bytes")
        taken = self._data[self._position : end]
        self._position = end
        return taken


def subscribed_topics(metadata: bytes) -> frozenset[str] | None:
    """The topic names, or None if the bytes are no consumer subscription."""
    fields = FieldReader(metadata)
    try:
        fields.int16()
        return _topics(fields)
    except ValueError:
        return None


def decode_subscription(metadata: bytes) -> Subscription | None:
    """The fields that assignors need, or None if the bytes are no consumer subscription or name too much."""
    fields = FieldReader(metadata)
    try:
        version = fields.int16()
        topics = _topics(fields)
        fields.nullable_bytes()
        owned = frozenset(fields.partitions()) if version >= 1 else frozenset()
        if version >= 2:
            fields.int32()
        rack_id = fields.nullable_string() if version >= 3 else None
    except ValueError:
        return None
    return Subscription(topics, owned, rack_id)


def _topics(fields: FieldReader) -> frozenset[str]:
    return frozenset([fields.string() for _ in range(fields.count(item_bytes=2))])
