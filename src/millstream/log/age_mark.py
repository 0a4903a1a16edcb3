"""The age of batches whose timestamps lie in the future.

Such a batch says nothing about its age, and must not keep retention from what lies behind it. A mark notes where the
log ended at a time: when `retention.ms` has passed since, everything below the mark arrived too long ago, whatever its
timestamps say. So such a batch goes between one and two retention periods after the broker first saw it.

Files need no mark: a segment's file knows when it was written last.
"""

from __future__ import annotations


class AgeMark:
    __slots__ = ("_at_ms", "_end", "_old_below")

    def __init__(self) -> None:
        self._at_ms: int | None = None
        self._end = 0
        self._old_below = 0

    def old_below(self, end: int, now_ms: int, retention_ms: int) -> int:
        """The offset below which everything is known to have arrived more than `retention_ms` ago."""
        if self._at_ms is None or now_ms - self._at_ms > retention_ms:
            if self._at_ms is not None:
                self._old_below = self._end
            self._at_ms, self._end = now_ms, end
        return self._old_below
