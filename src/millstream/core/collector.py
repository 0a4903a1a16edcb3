"""Full garbage collections, postponed while large messages are in memory.

A request of 100,000 items is a few hundred thousand objects, and so is its answer. None of them is in a cycle: they go
when the last reference does. Yet their number makes Python look for cycles among all objects of the process again and
again, and each such look holds the interpreter for 50 to 100 ms. Younger generations are collected as ever.

`postpone` is called at every step of such a request. Full collections resume `QUIET_SECONDS` after the last call, or
`POSTPONED_SECONDS_MAX` after the first: garbage does not pile up under clients that send nothing but large requests.
"""

from __future__ import annotations

import asyncio
import gc

QUIET_SECONDS = 1.0
POSTPONED_SECONDS_MAX = 30.0
NEVER = 1_000_000


class Collector:
    def __init__(self) -> None:
        self._since: float | None = None
        self._last = 0.0
        self._old = 0
        self.in_thread = 0
        """How many messages are being decoded or encoded: that may take seconds."""

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
"""The process has one."""
