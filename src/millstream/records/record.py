"""The input and output types of the codecs.

`Record` is one record with its absolute offset and timestamp. `Section` is the decompressed body of a batch, with the
few header fields that are needed to read it. The kernels work on sections only, so neither of them knows about
compression or checksums.
"""

from __future__ import annotations

from typing import NamedTuple

from millstream.records.batch import Buffer

Headers = tuple[tuple[str, bytes | None], ...]


class Record(NamedTuple):
    """Timestamps are milliseconds since 1970; header names that are not UTF-8 keep their bytes as lone surrogates."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Headers = ()


def record_bytes_max(value: Buffer | None, key: bytes | None, headers: Headers) -> int:
    """The most that a record takes in a batch: 40 bytes for lengths, deltas and attributes, ten for each header."""
    size = 40 + (len(value) if value is not None else 0) + (len(key) if key is not None else 0)
    if headers:
        size += sum(len(name) * 3 + len(content or b"") + 10 for name, content in headers)
    return size


class Section(NamedTuple):
    """The records of one batch, decompressed."""

    body: Buffer
    record_count: int
    base_offset: int
    last_offset_delta: int
    base_timestamp: int
    max_timestamp: int
    is_append_time: bool
    """All records have the broker's time (`max_timestamp`); their own timestamps are ignored."""
