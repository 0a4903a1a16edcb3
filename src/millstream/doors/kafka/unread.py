"""Answers that lie in memory because their clients do not take them, over all connections of the door.

Records out of segment files are sent from there and cost nothing while they wait. Those of the other stores, and of
share groups, are copies: the less room there is, the fewer are put into the next answer. Where that is not enough, the
connection goes that has taken nothing for longest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from millstream.doors.kafka.connection import Connection

NO_LIMIT = 1 << 62


class Unread:
    __slots__ = ("_size", "_waiting", "limit")

    def __init__(self, limit: int = NO_LIMIT) -> None:
        self.limit = limit
        self._size = 0
        self._waiting: dict[Connection, int] = {}
        """The bytes of each, the one that has taken nothing for longest first."""

    @property
    def room(self) -> int:
        """For the next answer; a part of what is left, because others are being made."""
        return max(self.limit - self._size, 0) // 2

    @property
    def is_over(self) -> bool:
        """Whether somebody has to go. A single one never does: its answer may be one large batch."""
        return self._size > self.limit and len(self._waiting) > 1

    @property
    def longest(self) -> Connection:
        return next(iter(self._waiting))

    def wait(self, connection: Connection, size: int) -> None:
        self._waiting[connection] = size
        self._size += size

    def has_taken(self, connection: Connection) -> None:
        self._waiting[connection] = self._waiting.pop(connection)

    def done(self, connection: Connection) -> int:
        size = self._waiting.pop(connection, 0)
        self._size -= size
        return size
