"""What a queue says about itself."""

from __future__ import annotations

from typing import NamedTuple


class QueueFigures(NamedTuple):
    """Of one partition."""

    available: int
    leased: int
    waiting: int
    """Delayed, or resting after a failed delivery."""
    done: int
    dead: int
    dying: int
    """On their way to the dead-letter topic."""
    redelivered: int
    age_ms: int
    """Of the oldest record that is available."""
    low: int
    next: int
