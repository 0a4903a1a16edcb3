"""Results of appends and of lookups by time."""

from __future__ import annotations

from typing import NamedTuple


class Appended(NamedTuple):
    base_offset: int
    log_start: int
    duplicate: bool = False
    """The producer retried a stored batch; `base_offset` is its original offset."""


class TimedOffset(NamedTuple):
    offset: int
    timestamp: int
