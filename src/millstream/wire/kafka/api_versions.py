"""ApiVersions (key 18), by hand: every client sends it first, and every version of it gets an answer (KIP-511)."""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import NamedTuple

from millstream.wire.kafka.conversation import Request
from millstream.wire.kafka.primitives import array_length, string, uvarint

KEY = 18
FLEXIBLE_FROM = 3
RELAY = "millstream-relay"
"""The client software name of a broker's relay, with the node id as the version."""
_RANGE = Struct(">hhh")
_LEVELS = Struct(">hh")


def introduce(name: str, version: str) -> Request:
    """With the client's software name and version (KIP-511)."""
    return Request(KEY, 3, b"\0" + string(name, True) + string(version, True) + b"\0")


class Feature(NamedTuple):
    """The supported levels of a feature (KIP-584); the highest is in use."""

    name: str
    low: int
    high: int


def encode(version: int, error: int, ranges: list[tuple[int, int, int]], features: Sequence[Feature] = ()) -> bytes:
    """API keys with their lowest and highest version. An unknown request version gets version 0 (KIP-511)."""
    compact = version >= FLEXIBLE_FROM
    tags = b"\0" if compact else b""
    parts = [error.to_bytes(2, "big", signed=True), array_length(len(ranges), compact)]
    parts += [_RANGE.pack(*entry) + tags for entry in ranges]
    if version >= 1:
        parts.append(b"\0\0\0\0")
    parts.append(_features(version, features) if compact and features else tags)
    return b"".join(parts)


def _features(version: int, features: Sequence[Feature]) -> bytes:
    """Three tagged fields: supported, the epoch of the finalized features, finalized. Clients up to version 3 fail on a
    lowest level of 0 (KAFKA-17011), so such a feature is omitted.
    """
    shown = [feature for feature in features if feature.low > 0 or version >= 4]
    supported = b"".join(string(name, True) + _LEVELS.pack(low, high) + b"\0" for name, low, high in shown)
    in_use = b"".join(string(name, True) + _LEVELS.pack(high, high) + b"\0" for name, _, high in features)
    fields = (array_length(len(shown), True) + supported, bytes(8), array_length(len(features), True) + in_use)
    tagged = b"".join(uvarint(tag) + uvarint(len(field)) + field for tag, field in enumerate(fields))
    return uvarint(len(fields)) + tagged
