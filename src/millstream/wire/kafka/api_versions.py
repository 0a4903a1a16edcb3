"""ApiVersions (key 18), by hand: it is the first thing every client asks, and must be answered whatever the version."""

from __future__ import annotations

from struct import Struct

from millstream.wire.kafka import header
from millstream.wire.kafka.primitives import array_length, string

KEY = 18
FLEXIBLE_FROM = 3
RELAY = "millstream-relay"
"""The name under which a broker introduces itself to another one, with its number as the version."""
_RANGE = Struct(">hhh")


def introduce(name: str, version: str) -> bytes:
    """A request (version 3) that says which client this is, and in which version."""
    return header.fixed(KEY, 3, 0) + string(name, False) + b"\0" + string(name, True) + string(version, True) + b"\0"


def encode(version: int, error: int, ranges: list[tuple[int, int, int]]) -> bytes:
    """API keys with their lowest and highest version. An unknown request version is answered in version 0."""
    compact = version >= FLEXIBLE_FROM
    tags = b"\0" if compact else b""
    parts = [error.to_bytes(2, "big", signed=True), array_length(len(ranges), compact)]
    parts += [_RANGE.pack(*entry) + tags for entry in ranges]
    if version >= 1:
        parts.append(b"\0\0\0\0")
    parts.append(tags)
    return b"".join(parts)
