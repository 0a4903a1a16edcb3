"""A real server in a thread of the test, on a clock that the test moves: 30 seconds pass in a millisecond."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from millstream.config import Config
from millstream.server import Server
from millstream.testing.clock import VirtualClock

T = TypeVar("T")
TURNS = 30
"""Of the event loop, after which what time set off has come to its end, unless it waits for a disk."""


class BrokerInThread:
    """Its sockets are real. Settings are those of `Config`; a second start finds what the first one stored."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        doors = {"kafka": "127.0.0.1:0", "http": "off"}
        self.config = Config(**{"store": f"file:{directory}", **doors, **settings})
        self.clock = VirtualClock(time.time_ns() // 1_000_000)  # real clients stamp their records with the real time
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: Server | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> BrokerInThread:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = Server(self.config, self.clock)
        self._wait(self._server.start())
        return self

    def stop(self) -> None:
        assert self._server is not None and self._loop is not None and self._thread is not None
        self._wait(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _stop(self) -> None:
        """As `asyncio.run` does it: what is still under way afterwards is cancelled."""
        assert self._server is not None
        await self._server.stop()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def address(self, door: str) -> str:
        assert self._server is not None
        return str(self._server.addresses[door])

    def advance(self, seconds: float) -> None:
        """Returns when all that time set off has been done."""
        self.ask(lambda server: self.clock.advance(seconds))

    def ask(self, question: Callable[[Server], T]) -> T:
        """Asks the server something, on its own thread."""

        async def answer() -> T:
            assert self._server is not None
            found = question(self._server)
            for _ in range(TURNS):
                await asyncio.sleep(0)
            return found

        return self._wait(answer())

    def _wait(self, work: Awaitable[T]) -> T:
        assert self._loop is not None

        async def run() -> T:
            return await work

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(30)

    def __enter__(self) -> BrokerInThread:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()
