"""The counters of a queue."""

from __future__ import annotations

from typing import NamedTuple


class QueueFigures(NamedTuple):
    """Counters of one partition."""

    available: int
    leased: int
    waiting: int
    """Delayed or in backoff."""
    done: int
    dead: int
    dying: int
    """Dead, with a dead letter not written yet."""
    redelivered: int
    age_ms: int
    """Age of the oldest available record."""
    low: int
    next: int
