"""Many writes, one transaction: writes that arrive during a transaction share the next one.

    put --> waiting --end of the turn--> one transaction --durable--> each is answered, in order

One transaction is in flight at a time, so answers keep the order of arrival. The next one starts one turn of the loop
after the answers, so that it includes the writes which they trigger. No task is involved: on a fast disk, its turns of
the loop would be a large part of a transaction.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from millstream.core.promise import Promise

logger = logging.getLogger(__name__)

Item = TypeVar("Item")

COUNT_MAX = 2_000
BYTES_MAX = 16 << 20
"""Limits of one transaction. A single put is never split."""


class GroupCommit(Generic[Item]):
    def __init__(self, write: Callable[[list[Item]], Promise[None]]) -> None:
        self._write = write
        """Writes, and answers every item, also on error, before its promise settles."""
        self._waiting: deque[tuple[list[Item], int]] = deque()
        self._running = False
        self._put = self._answered = 0
        """The number of puts, and how many of them are answered."""
        self._drains: deque[tuple[int, asyncio.Future[None]]] = deque()

    def put(self, items: list[Item], size: int) -> None:
        """Queues items for one transaction, however many there are."""
        self._put += 1
        self._waiting.append((items, size))
        if not self._running:
            self._running = True
            asyncio.get_running_loop().call_soon(self._leave)

    def _leave(self) -> None:
        if not self._waiting:
            self._running = False
            return
        group, count = self._next()
        try:
            written = self._write(group)
        except Exception as error:
            written = Promise.failed(error)
        written.then(lambda done: self._landed(count, done))

    def _landed(self, count: int, done: Promise[None]) -> None:
        if done.error is not None:  # should not happen; later transactions go on
            logger.error("unexpected error after a group commit", exc_info=done.error)
        self._answered += count
        while self._drains and self._drains[0][0] <= self._answered:
            drained = self._drains.popleft()[1]
            if not drained.done():  # else the wait was cancelled
                drained.set_result(None)
        asyncio.get_running_loop().call_soon(self._leave)

    def _next(self) -> tuple[list[Item], int]:
        """The next items, and their number of puts."""
        group: list[Item] = []
        size = count = 0
        while self._waiting and len(group) < COUNT_MAX and (not group or size + self._waiting[0][1] <= BYTES_MAX):
            items, more = self._waiting.popleft()
            group += items
            size += more
            count += 1
        return group, count

    async def drained(self) -> None:
        """Returns when all earlier puts are answered, regardless of later ones."""
        if self._answered < self._put:
            drained = asyncio.get_running_loop().create_future()
            self._drains.append((self._put, drained))
            await drained
