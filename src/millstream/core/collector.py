"""Full garbage collections, postponed while large messages are in memory.

A request of 100,000 items is a few hundred thousand objects, and so is its response. None of them is in a cycle:
reference counts free them. Yet their number makes Python repeatedly search all objects of the process for cycles, and
each search holds the GIL for 50 to 100 ms. Younger generations are collected as usual.

Call `postpone` at every step of such a request. Full collections resume `QUIET_SECONDS` after the last call, or
`POSTPONED_SECONDS_MAX` after the first, so that garbage does not pile up if clients send only large requests. That
bound is long: a collection that it lets through searches the objects of the request at hand.
"""

from __future__ import annotations

import asyncio
import gc

QUIET_SECONDS = 1.0
POSTPONED_SECONDS_MAX = 600.0
NEVER = 1_000_000


class Collector:
    def __init__(self) -> None:
        self._since: float | None = None
        self._last = 0.0
        self._old = 0
        self.in_thread = 0
        """Messages that threads decode or encode now, which may take seconds."""

    def postpone(self) -> None:
        loop = asyncio.get_running_loop()
        self._last = loop.time()
        if self._since is None:
            self._since = self._last
            young, middle, self._old = gc.get_threshold()
            gc.set_threshold(young, middle, NEVER)
            loop.call_later(QUIET_SECONDS, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        assert self._since is not None
        now = loop.time()
        is_quiet = now - self._last >= QUIET_SECONDS and not self.in_thread
        if not is_quiet and now - self._since < POSTPONED_SECONDS_MAX:
            loop.call_later(QUIET_SECONDS, self._look, loop)
            return
        self._since = None
        young, middle, _ = gc.get_threshold()
        gc.set_threshold(young, middle, self._old)


collector = Collector()
"""One per process."""
