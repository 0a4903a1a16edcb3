"""Order by key: only the first open record of a key is available.

A delayed record joins the end of its key's line when its delay is over. A released record stays first, so its followers
wait for its backoff.
"""

from __future__ import annotations

from collections import deque


class KeyOrder:
    __slots__ = ("_delayed", "_keys", "_lines")

    def __init__(self) -> None:
        self._lines: dict[bytes, deque[int]] = {}
        self._keys: dict[int, bytes] = {}
        self._delayed: dict[int, bytes | None] = {}

    def join(self, offset: int, key: bytes | None) -> bool:
        """Whether the record is available; otherwise it is held."""
        if key is None:
            return True
        line = self._lines.get(key)
        self._keys[offset] = key
        if line is None:
            self._lines[key] = deque((offset,))
            return True
        line.append(offset)
        return False

    def delay(self, offset: int, key: bytes | None) -> None:
        """Notes a record whose first delivery is delayed."""
        self._delayed[offset] = key

    def due(self, offset: int) -> bool:
        """A wait is over: whether the record is available. A released record has kept its place."""
        return self.join(offset, self._delayed.pop(offset)) if offset in self._delayed else True

    def leave(self, offset: int) -> int | None:
        """The record is done: returns the next record of its key, if this one held it."""
        self._delayed.pop(offset, None)
        key = self._keys.pop(offset, None)
        if key is None:
            return None
        line = self._lines[key]
        was_first = line[0] == offset
        if was_first:
            line.popleft()
        else:
            line.remove(offset)
        if not line:
            del self._lines[key]
            return None
        return line[0] if was_first else None
