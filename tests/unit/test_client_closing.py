"""The life of an iterator of the Python API, with one whose opening, waiting and closing are the test's."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from millstream.client.consuming import Consuming
from millstream.client.iterators import Streams
from millstream.client.remote import Remote
from millstream.client.remote_worker import Polling, Worker
from millstream.client.signal import Signal
from millstream.core.clock import Clock, SystemClock
from millstream.core.errors import Closed, MillstreamError
from millstream.records.compression import Codec
from millstream.testing.clock import VirtualClock


class Owner:
    def __init__(self) -> None:
        self.clock: Clock = SystemClock()
        self.open: set[Consuming[object]] = set()

    def opened(self, consuming: Consuming[object]) -> None:
        self.open.add(consuming)

    def closed(self, consuming: Consuming[object]) -> None:
        self.open.discard(consuming)


class Items(Consuming[int]):
    def __init__(self, owner: Owner) -> None:
        super().__init__(owner)
        self.may_open = asyncio.Event()
        self.may_close = asyncio.Event()
        self.may_open.set()
        self.may_close.set()
        self.failure: Exception | None = None
        self.log: list[str] = []
        self._woken = asyncio.Event()

    async def _start(self) -> None:
        self.log.append("opens")
        await self.may_open.wait()
        if self.failure is not None:
            raise self.failure

    async def _next(self, timeout: float | None) -> int | None:
        await self._woken.wait()
        return None

    async def _shut(self, clean: bool) -> None:
        self.log.append("closes" if clean else "breaks off")
        self._woken.set()
        await self.may_close.wait()
        self.log.append("closed")
        if self.failure is not None:
            raise self.failure


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_two_closers_wait_for_one_closing() -> None:
    owner = Owner()
    items = await Items(owner).__aenter__()
    items.may_close.clear()
    closers = [asyncio.ensure_future(items.close()) for _ in range(2)]
    await settle()
    assert not any(closer.done() for closer in closers) and owner.open == {items}
    items.may_close.set()
    await asyncio.gather(*closers)
    assert items.log == ["opens", "closes", "closed"] and not owner.open


async def test_what_is_closed_while_it_opens_is_closed_when_it_is_open() -> None:
    owner = Owner()
    items = Items(owner)
    items.may_open.clear()
    waiting, closing = asyncio.ensure_future(items.receive()), asyncio.ensure_future(items.close())
    await settle()
    assert items.log == ["opens"]
    items.may_open.set()
    await closing
    assert await waiting is None and items.log == ["opens", "closes", "closed"] and not owner.open


async def test_two_who_ask_at_once_open_it_once() -> None:
    items = Items(Owner())
    items.may_open.clear()
    tasks = [asyncio.ensure_future(items.receive()) for _ in range(2)]
    await settle()
    tasks[0].cancel()
    items.may_open.set()
    await settle()
    await items.close()
    assert await tasks[1] is None and items.log == ["opens", "closes", "closed"]


async def test_one_that_cannot_be_opened_is_closed() -> None:
    owner = Owner()
    items = Items(owner)
    items.failure = MillstreamError("there is no such topic")
    with pytest.raises(MillstreamError, match="no such topic"):
        async with items:
            raise AssertionError
    await settle()
    assert items.log == ["opens", "breaks off", "closed"] and not owner.open
    with pytest.raises(Closed):
        await items.receive()


async def test_what_goes_wrong_inside_counts_more_than_what_goes_wrong_at_the_end() -> None:
    items = Items(Owner())
    with pytest.raises(ZeroDivisionError) as raised:
        some: Any = items
        async with Streams[Any]({"topic": [some]}) as streams:
            items.failure = MillstreamError("no broker answers")
            for _ in streams:
                1 / 0  # noqa: B018
    assert raised.value.__notes__ == ["closing failed, too: MillstreamError: no broker answers"]
    with pytest.raises(MillstreamError, match="no broker answers"):
        await items.close()


async def test_a_cancelled_wait_does_not_take_the_next_ones_place() -> None:
    signal = Signal(VirtualClock())
    first = asyncio.ensure_future(signal.wait())
    await settle()

    async def next_one() -> bool:
        first.cancel()
        return await signal.wait()  # begins before the first one has heard of its end

    waiting = asyncio.ensure_future(next_one())
    await settle()
    signal.set()
    async with asyncio.timeout(20):
        assert await waiting


class Hands(Worker):
    """A thread whose work is done when the test says so."""

    def __init__(self) -> None:
        self.given: list[Future[Any]] = []

    def start(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> asyncio.Future[Any]:
        future: Future[Any] = Future()
        self.given.append(future)
        return asyncio.wrap_future(future)


async def test_polling_stops_while_somebody_waits_for_it() -> None:
    hands = Hands()
    polling: Polling[int] = Polling(hands, lambda seconds: [])
    filling, stopping = asyncio.ensure_future(polling.fill(1)), asyncio.ensure_future(polling.stop())
    await settle()
    assert not filling.done() and not stopping.done()
    hands.given[0].set_result([1])
    await asyncio.gather(filling, stopping)
    await polling.fill(1)
    assert not polling.ready and len(hands.given) == 1


async def test_one_poll_serves_two_who_wait() -> None:
    hands = Hands()
    polling: Polling[int] = Polling(hands, lambda seconds: [])

    async def taken() -> int:
        while not polling.ready:
            await polling.fill(1)
        return polling.ready.popleft()

    tasks = [asyncio.ensure_future(taken()) for _ in range(2)]
    await settle()
    hands.given[0].set_result([1])
    await settle()
    hands.given[1].set_result([2])
    assert await asyncio.gather(*tasks) == [1, 2] and len(hands.given) == 2


async def test_threads_that_need_a_producer_at_once_get_the_same_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was made twice would never be polled, and who sent over it would wait for ever."""
    made: list[object] = []
    asking, making = threading.Barrier(2), threading.Barrier(2)

    def make(settings: object) -> object:
        with contextlib.suppress(threading.BrokenBarrierError):
            making.wait(0.5)  # for the other thread, which must not come
        made.append(object())
        return made[-1]

    monkeypatch.setattr("millstream.client.remote.Producer", make)
    remote = Remote()

    def ask() -> object:
        asking.wait(20)
        return remote._producer(Codec.NONE)

    with ThreadPoolExecutor(2) as threads:
        given = [each.result() for each in [threads.submit(ask), threads.submit(ask)]]
    assert len(made) == 1 and given[0] is given[1]
