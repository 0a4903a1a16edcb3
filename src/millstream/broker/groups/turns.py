"""Splits long work of groups into turns of the event loop.

All work shares one budget of steps per turn. Work that exhausts the budget joins a FIFO line, and each turn continues
with the first in line: a thousand clients with costly patterns delay other clients no longer than one does.
"""

from __future__ import annotations

import asyncio
from collections import deque

STEPS_A_TURN = 4_000
"""The budget of a turn. At worst a step takes some 5 microseconds, a turn some 20 ms."""


class Turns:
    def __init__(self) -> None:
        self._steps = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_due = False

    @property
    def is_taken(self) -> bool:
        """Whether new work must first await `next`."""
        return bool(self._waiting) or self._steps >= STEPS_A_TURN

    def spend(self, steps: int) -> bool:
        """Whether the turn is over: the caller awaits `next`."""
        self._steps += steps
        self._schedule()
        return self._steps >= STEPS_A_TURN

    async def next(self) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._schedule()
        await turn

    def _schedule(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        self._is_due = False
        self._steps = 0
        if self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
            self._schedule()
