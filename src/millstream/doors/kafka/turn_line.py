"""Shares the event loop among the clients that send thousands of small requests at once.

All connections of a door have one budget per turn of the event loop. A connection with more requests than the budget
waits in line, first in, first out, so eight such clients delay others no longer than one does. A request that no other
follows in the receive buffer neither counts nor waits; runs of small produce requests do not count either.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from time import monotonic

TURN_SECONDS = 0.02


class TurnLine:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._began = 0.0
        """When the first request of this turn began; 0 before it."""
        self._waiting: deque[Callable[[], None]] = deque()

    def is_over(self, now: float) -> bool:
        if not self._began:
            self._began = now
            self._loop.call_soon(self._next)
        return now - self._began > TURN_SECONDS

    def wait(self, go_on: Callable[[], None]) -> None:
        """Calls back in a later turn."""
        self._waiting.append(go_on)

    def _next(self) -> None:
        self._began = 0.0
        if self._waiting:
            self._began = monotonic()
            self._loop.call_soon(self._next)
            while self._waiting and not self.is_over(monotonic()):
                self._waiting.popleft()()
