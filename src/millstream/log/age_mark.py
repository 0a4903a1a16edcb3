"""The age of batches whose timestamps lie in the future.

A future timestamp does not tell a batch's age, and must not keep retention from later batches. A mark records the end
of the log at a point in time. Once `retention.ms` has passed, every batch below the mark is too old, whatever its
timestamp. Retention deletes such a batch between one and two retention periods after the broker first saw it.

Segment files need no mark: their modification time is enough.
"""

from __future__ import annotations


class AgeMark:
    __slots__ = ("_at_ms", "_end", "_old_below")

    def __init__(self) -> None:
        self._at_ms: int | None = None
        self._end = 0
        self._old_below = 0

    def old_below(self, end: int, now_ms: int, retention_ms: int) -> int:
        """The offset below which every batch arrived more than `retention_ms` ago."""
        if self._at_ms is None or now_ms - self._at_ms > retention_ms:
            if self._at_ms is not None:
                self._old_below = self._end
            self._at_ms, self._end = now_ms, end
        return self._old_below
