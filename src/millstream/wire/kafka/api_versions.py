"""ApiVersions (key 18), by hand: it is the first thing every client asks, and must be answered whatever the version."""

from __future__ import annotations

from struct import Struct

from millstream.wire.kafka.primitives import array_length

FLEXIBLE_FROM = 3
_RANGE = Struct(">hhh")


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
