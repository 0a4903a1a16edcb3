"""Parked fetches of a queue, in one line per partition.

An available record calls only the first fetch in line: with a thousand idle workers it would otherwise cost a thousand
attempts. A called fetch that leases records calls the next fetch, since more may be available. A called fetch that
finds nothing calls no other. A called fetch that leaves without an attempt passes the call on.

    waiting --called--> tries (from here on it may be called again) --nothing--> waiting, last in line
                          |
                          +--leased, or gone--> calls the next
"""

from __future__ import annotations

from collections.abc import Callable

from millstream.broker.groups.queue.partition import QueuePartition


class Waiter:
    """One fetch's place in one line."""

    __slots__ = ("callback", "is_called", "line")

    def __init__(self, line: Line, callback: Callable[[], None]) -> None:
        self.line = line
        self.callback = callback
        self.is_called = False

    def leave(self, call_next: bool) -> None:
        self.line.leave(self)
        if call_next or self.is_called:
            self.line.call()


class Line:
    def __init__(self, partition: QueuePartition, on_empty: Callable[[], object]) -> None:
        self.partition = partition
        self._waiters: dict[Waiter, None] = {}
        """Called waiters are at the end, so `call` checks only the first."""
        self._on_empty = on_empty
        self._unwake = partition.wake(self.call)

    def join(self, callback: Callable[[], None]) -> Waiter:
        waiter = Waiter(self, callback)
        self._waiters[waiter] = None
        return waiter

    def leave(self, waiter: Waiter) -> None:
        del self._waiters[waiter]
        if not self._waiters:
            self._unwake()
            self._on_empty()

    def call(self) -> None:
        first = next(iter(self._waiters), None)
        if first is None or first.is_called:  # then all are called and have not tried yet
            return
        del self._waiters[first]
        self._waiters[first] = None
        first.is_called = True
        first.callback()


class Lines:
    """The lines of one group; a line exists while a fetch waits in it."""

    def __init__(self) -> None:
        self._lines: dict[QueuePartition, Line] = {}

    def join(self, partition: QueuePartition, callback: Callable[[], None]) -> Waiter:
        line = self._lines.get(partition)
        if line is None:
            line = self._lines[partition] = Line(partition, lambda: self._lines.pop(partition, None))
        return line.join(callback)

    def __len__(self) -> int:
        return len(self._lines)
