"""What the codecs hand out and take in.

`Record` is one record with its absolute offset and timestamp. `Section` is what stands between a batch and its records:
the batch's body, already decompressed, with the few header fields that say how to read it. The kernels work on sections
only, so neither of them knows about compression or checksums.
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
    """At most what a record takes in a batch: 40 bytes for its lengths, deltas and attributes, ten for each header."""
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
    """The broker's time counts for all records (`max_timestamp`), their own timestamps do not."""
