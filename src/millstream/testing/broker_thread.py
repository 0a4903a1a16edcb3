"""A real broker with a real port, in its own thread: for tests of anything that speaks Kafka.

    with BrokerThread() as broker:
        producer = Producer({"bootstrap.servers": broker.bootstrap})

Its clock runs, and a test can move it. Acknowledged records survive `kill` and `restart`, even in `memory:`, as they
would on disk. Group members, sessions and leases do not, as with any broker that dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Self, TypeVar

from millstream.broker.broker import Broker
from millstream.broker.session import Sessions
from millstream.config import Address, configure
from millstream.core.errors import Code
from millstream.core.loop_watch import LoopWatch
from millstream.core.metrics import Metrics
from millstream.doors.kafka.door import KafkaDoor
from millstream.stores.base import LogStore, MetaStore
from millstream.stores.url import open_store
from millstream.testing.faults import Faults
from millstream.testing.held_port import HeldPort
from millstream.testing.moved_clock import MovedClock

T = TypeVar("T")
SECONDS_MAX = 30.0
TURNS = 20
"""Turns of the loop after the clock moved: enough for the work of timers that needs no disk."""


class ClockHandle:
    """The broker's clock, for the test's thread."""

    def __init__(self, owner: BrokerThread) -> None:
        self._owner = owner

    def advance(self, seconds: float) -> None:
        """Moves the broker's clock forward. Returns after every timer that falls due has run."""
        if seconds < 0:
            raise ValueError(f"time only goes forward, not by {seconds} s")

        async def move(broker: Broker) -> None:
            self._owner.moved_clock.advance(seconds)
            for _ in range(TURNS):
                await asyncio.sleep(0)

        self._owner.run(move)

    def now_ms(self) -> int:
        return self._owner.moved_clock.now_ms()


class BrokerThread:
    def __init__(self, store: str = "memory:", **settings: Any) -> None:
        """`settings` are fields of `millstream.config.Config`."""
        self.config = configure(**{"kafka": "127.0.0.1:0", "http": "off", **settings, "store": store})
        self.clock = ClockHandle(self)
        self.moved_clock = MovedClock()
        self.faults = Faults()
        self.metrics = Metrics()
        self._watch = LoopWatch(self.metrics)
        self._address = self.config.kafka_address
        self._held: HeldPort | None = None
        self._memory: tuple[LogStore, MetaStore] | None = None
        self._broker: Broker | None = None
        self._door: KafkaDoor | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def bootstrap(self) -> str:
        """HOST:PORT; the same after a restart."""
        return str(self._address)

    @property
    def is_running(self) -> bool:
        return self._thread is not None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def start(self) -> None:
        """Returns when clients can connect."""
        if self.is_running:
            return
        import uvloop

        self._hold_port()
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="millstream", daemon=True)
        self._thread.start()
        try:
            self._call(self._open())
        except BaseException:
            try:
                self._call(self._close(at_once=True))  # an open store would refuse the next start
            finally:
                self._end()
            raise

    def stop(self) -> None:
        """A clean shutdown."""
        if self.is_running:
            self._call(self._close(at_once=False))
            self._end()
        if self._held is not None:
            self._held.release()
            self._held = None

    def kill(self) -> None:
        """Breaks every connection at once, without answers. `restart` keeps the acknowledged records."""
        if self.is_running:
            self._call(self._close(at_once=True))
            self._end()

    def restart(self) -> None:
        """Starts again with the same port and data; first stops cleanly if it still runs."""
        if self.is_running:
            self.stop()
        self.start()

    @property
    def busy_seconds_max(self) -> float:
        """The longest that one task held the broker's event loop, in CPU time: other processes do not count."""
        return self.metrics.loop_busy_seconds_max

    def fail_next(self, api: str | int, code: Code | int | str, times: int = 1) -> None:
        """The next requests to an API get an error and are not executed.

        broker.fail_next("Produce", "NOT_LEADER_OR_FOLLOWER", times=2)
        """
        self.faults.add(api, code, times)

    def run(self, work: Callable[[Broker], Awaitable[T]]) -> T:
        """Runs `work` on the broker's thread, for tasks that no client can request."""
        broker = self._broker
        if broker is None:
            raise RuntimeError("the broker is not running")

        async def on_loop() -> T:
            return await work(broker)

        return self._call(on_loop())

    def _hold_port(self) -> None:
        """Also across `kill`: parallel tests ask for free ports, and could get this one."""
        if self._held is None:
            with contextlib.suppress(OSError):  # the door reports it
                self._held = HeldPort(self._address.host, self._address.port)
                self._address = Address(self._address.host, self._held.port)

    async def _open(self) -> None:
        self.moved_clock = MovedClock(self.moved_clock.ahead)
        stores = self._memory or open_store(self.config.store, self.moved_clock, lambda seconds: None, self.config.meta)
        if self.config.store == "memory:":
            self._memory = stores
        self._broker = Broker(self.config, *stores, self.moved_clock, self.metrics)
        await self._broker.start()
        self._watch.start()
        self._door = KafkaDoor(Sessions(self._broker))
        self._door.faults = self.faults
        self._address = Address(self._address.host, self._door.start(self._address).port)

    async def _close(self, *, at_once: bool) -> None:
        door, broker, self._door, self._broker = self._door, self._broker, None, None
        self._watch.stop()
        if door is not None:
            if at_once:
                door.abort()
            else:
                await door.close()
        if broker is not None:
            await broker.close()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(SECONDS_MAX)

    def _end(self) -> None:
        loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is not None and thread is not None:
            asyncio.run_coroutine_threadsafe(_cancel_all(), loop).result(SECONDS_MAX)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(SECONDS_MAX)
            loop.close()


async def _cancel_all() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
