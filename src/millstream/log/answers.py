"""What a log answers to appends and to questions about time."""

from __future__ import annotations

from typing import NamedTuple


class Appended(NamedTuple):
    base_offset: int
    log_start: int
    duplicate: bool = False
    """The producer sent this batch before; `base_offset` is where it was stored then."""


class TimedOffset(NamedTuple):
    offset: int
    timestamp: int
