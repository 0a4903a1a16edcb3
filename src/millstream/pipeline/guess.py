"""Guesses the format of a topic's values from a few hundred of them: its first records and its last.

JSON gives columns if nine values of ten are JSON objects; a stream may have bad rows. A column's type is the narrowest
that fits every sampled value, and text if they contradict each other. Other records may not fit: then their columns
are null.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from millstream.client.cluster import KafkaCluster
from millstream.pipeline.ddl import quoted
from millstream.records import codec

SAMPLED_PARTITIONS_MAX = 8
SAMPLED_RECORDS_PER_END = 100
SAMPLED_BYTES_PER_END = 256 << 10
OBJECTS_PART_MIN = 0.9
LONG_MAX = 2**63 - 1

Kind = str | dict[str, "Kind"] | list["Kind"]
"""A type: its name, the fields of an object, or an array's element type (none, if all were empty)."""


def sample(cluster: KafkaCluster, topic: str, partitions: list[int]) -> list[bytes]:
    """Values, without tombstones, of partitions spread over the topic."""
    step = max(1, len(partitions) // SAMPLED_PARTITIONS_MAX)
    places = [(topic, partition) for partition in partitions[::step][:SAMPLED_PARTITIONS_MAX]]
    starts, ends = cluster.earliest(places), cluster.latest(places)
    values: list[bytes] = []
    for place in places:
        near_end = max(starts[place], ends[place] - SAMPLED_RECORDS_PER_END)
        for start in sorted({starts[place], near_end}):
            if start < ends[place]:
                values += _values(cluster.fetch(place, start, SAMPLED_BYTES_PER_END, 0).records, start)
    return values


def _values(records: memoryview, start: int) -> list[bytes]:
    found: list[bytes] = []
    for record in codec.iterate(records):
        if record.offset >= start and record.value is not None:
            found.append(bytes(record.value))
            if len(found) == SAMPLED_RECORDS_PER_END:
                break
    return found


def columns(values: Iterable[bytes]) -> str | None:
    """Spark's DDL for the values; None if they are not JSON objects."""
    seen = [_object(value) for value in values]
    objects = [each for each in seen if each is not None]
    if not seen or len(objects) < OBJECTS_PART_MIN * len(seen):
        return None
    kind: Kind = {}
    for each in objects:
        kind = _merge(kind, _kind(each))
    assert isinstance(kind, dict)
    return ", ".join(f"{quoted(name)} {_ddl(of)}" for name, of in _once(kind).items()) or None


def _object(value: bytes) -> dict[str, Any] | None:
    try:
        read = json.loads(value)
    except (ValueError, RecursionError):
        return None
    return read if isinstance(read, dict) else None


def _kind(value: Any) -> Kind:
    match value:
        case None:
            return ""
        case bool():
            return "BOOLEAN"
        case int():
            return "BIGINT" if -LONG_MAX - 1 <= value <= LONG_MAX else "DECIMAL(38,0)"
        case float():
            return "DOUBLE"
        case dict():
            return {name: _kind(item) for name, item in value.items()}
        case list():
            inner: Kind = ""
            for item in value:
                inner = _merge(inner, _kind(item))
            return [inner] if value else []
        case _:
            return "STRING"


def _merge(one: Kind, other: Kind) -> Kind:
    """The narrowest type that fits both; "" is the type of null."""
    if one == other or other == "":
        return one
    if one == "":
        return other
    if isinstance(one, dict) and isinstance(other, dict):
        return {name: _merge(one.get(name, ""), other.get(name, "")) for name in {**one, **other}}
    if isinstance(one, list) and isinstance(other, list):
        return [_merge(one[0], other[0])] if one and other else one or other
    both = {str(one), str(other)}
    if both <= {"BIGINT", "DOUBLE", "DECIMAL(38,0)"}:
        return "DOUBLE" if "DOUBLE" in both else "DECIMAL(38,0)"
    return "STRING"


def _ddl(kind: Kind) -> str:
    if isinstance(kind, dict):
        fields = ", ".join(f"{quoted(name)}: {_ddl(of)}" for name, of in _once(kind).items())
        return f"STRUCT<{fields}>" if fields else "MAP<STRING, STRING>"
    if isinstance(kind, list):
        return f"ARRAY<{_ddl(kind[0]) if kind else 'STRING'}>"
    return kind or "STRING"


def _once(fields: Mapping[str, Kind]) -> dict[str, Kind]:
    """Spark ignores case: of names that differ only in case the first stays."""
    kept: dict[str, tuple[str, Kind]] = {}
    for name, kind in fields.items():
        kept.setdefault(name.lower(), (name, kind))
    return dict(kept.values())
