"""Which topics a classic consumer asks for: the head of the metadata that its JoinGroup carries.

    int16 version, then (same in every version) an array of topic names: int32 count, each int16 length and UTF-8 bytes

The rest (user data, owned partitions, rack) concerns the group's leader, not the broker.
"""

from __future__ import annotations

import struct

_COUNT = struct.Struct(">hi")
_LENGTH = struct.Struct(">h")


def subscribed_topics(metadata: bytes) -> frozenset[str] | None:
    """The topic names, or None where the bytes are not a consumer's subscription."""
    try:
        _, count = _COUNT.unpack_from(metadata, 0)
        position = _COUNT.size
        if count < 0 or count > len(metadata) // _LENGTH.size:
            return None
        topics = []
        for _ in range(count):
            (length,) = _LENGTH.unpack_from(metadata, position)
            position += _LENGTH.size
            if length < 0 or position + length > len(metadata):
                return None
            topics.append(metadata[position : position + length].decode())
            position += length
    except (struct.error, UnicodeDecodeError):
        return None
    return frozenset(topics)
