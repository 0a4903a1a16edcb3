"""A watcher that collects the changes it is told, for tests that wait for one."""

from __future__ import annotations

import asyncio

from millstream.core.promise import Promise
from millstream.stores.base import Versioned

SECONDS = 10.0


class Watched:
    """Changes in the order of the reports, with an event for each key."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, bytes | None]] = []
        self._waiting: list[tuple[str, Promise[None]]] = []

    def __call__(self, key: str, value: Versioned | None) -> None:
        self.seen.append((key, None if value is None else value.value))
        for wanted, promise in self._waiting:
            if wanted == key and not promise.done:
                promise.settle(None)

    async def key(self, key: str) -> None:
        promise: Promise[None] = Promise()
        self._waiting.append((key, promise))
        if any(seen == key for seen, _ in self.seen):
            return
        async with asyncio.timeout(SECONDS):
            await promise
