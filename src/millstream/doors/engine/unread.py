"""Unread answers in memory, over all connections of the door.

Records are sent from segment files without using memory while they wait. Records of other stores and of share groups
are copies. The less memory is left, the fewer records the next answer gets. If that is not enough, the door closes the
connection that has read nothing for longest.
"""

from __future__ import annotations

from typing import Generic, TypeVar

C = TypeVar("C")
NO_LIMIT = 1 << 62


class Unread(Generic[C]):
    __slots__ = ("_size", "_waiting", "limit")

    def __init__(self, limit: int = NO_LIMIT) -> None:
        self.limit = limit
        self._size = 0
        self._waiting: dict[C, int] = {}
        """Bytes per connection; the one that has read nothing for longest is first."""

    @property
    def room(self) -> int:
        """The next answer's limit: half of the free bytes, as others are in progress."""
        return max(self.limit - self._size, 0) // 2

    @property
    def is_over(self) -> bool:
        """Whether a connection must be closed. A single one never is: its answer may be one large batch."""
        return self._size > self.limit and len(self._waiting) > 1

    @property
    def longest(self) -> C:
        return next(iter(self._waiting))

    def wait(self, connection: C, size: int) -> None:
        self._waiting[connection] = size
        self._size += size

    def has_taken(self, connection: C) -> None:
        self._waiting[connection] = self._waiting.pop(connection)

    def done(self, connection: C) -> int:
        size = self._waiting.pop(connection, 0)
        self._size -= size
        return size
