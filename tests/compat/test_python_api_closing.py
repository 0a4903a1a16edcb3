"""Closing the iterators of the Python API while tasks wait on them, embedded and remote."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from millstream import Closed, Millstream
from millstream.client.consuming import Consuming
from tests.compat.python_api import SECONDS, take

KINDS: dict[str, Callable[[Millstream, str, str], Consuming[Any]]] = {
    "read": lambda ms, topic, group: ms.read(topic, offset="end"),
    "stream": lambda ms, topic, group: ms.stream(topic, group=group),
    "queue": lambda ms, topic, group: ms.queue(topic, group=group),
    "exclusive": lambda ms, topic, group: ms.exclusive(topic, group=group),
}


async def waiting(items: Consuming[Any]) -> asyncio.Task[list[Any]]:
    """A task in a loop over it, which has nothing to get."""

    async def loop() -> list[Any]:
        return [item async for item in items]

    async with asyncio.timeout(SECONDS):
        assert await items.receive(0.01) is None  # it is open now
        while getattr(items, "assignment", True) == []:
            assert await items.receive(0.05) is None
    task = asyncio.ensure_future(loop())
    await asyncio.sleep(0.02)
    assert not task.done()
    return task


async def threads_ended(before: int) -> None:
    async with asyncio.timeout(SECONDS):
        while threading.active_count() > before:  # noqa: ASYNC110  (a thread's end is no event)
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("kind", KINDS)
async def test_who_waits_on_what_is_closed_comes_to_the_end(
    ms: Millstream, unique: Callable[[str], str], kind: str
) -> None:
    topic = unique("orders")
    await ms.create_topic(topic)
    before = threading.active_count()
    items = KINDS[kind](ms, topic, unique("group"))
    task = await waiting(items)
    async with asyncio.timeout(SECONDS):
        await asyncio.gather(items.close(), items.close())
        assert await task == []
    with pytest.raises(Closed):
        await items.receive(0)
    await threads_ended(before)


async def test_a_stream_that_is_closed_while_somebody_waits_on_it_leaves_its_group(
    ms: Millstream, unique: Callable[[str], str]
) -> None:
    topic, group = unique("orders"), unique("group")
    await ms.create_topic(topic)
    stream = ms.stream(topic, group=group)
    task = await waiting(stream)
    async with asyncio.timeout(SECONDS):
        await stream.close()
        await task
    await ms.send(topic, b"after")
    async with ms.stream(topic, group=group) as another:  # the first one's session would last for 45 s
        assert [record.value for record in await take(another, 1)] == [b"after"]


async def test_closing_everything_ends_all_who_wait(ms: Millstream, unique: Callable[[str], str]) -> None:
    topic = unique("orders")
    await ms.create_topic(topic)
    tasks = [await waiting(make(ms, topic, unique("group"))) for make in KINDS.values()]
    async with asyncio.timeout(SECONDS):
        await asyncio.gather(ms.close(), ms.close())
        assert await asyncio.gather(*tasks) == [[], [], [], []]
    await ms.close()


async def test_an_exception_of_ones_own_comes_out_while_others_wait(
    ms: Millstream, unique: Callable[[str], str]
) -> None:
    topic, group = unique("orders"), unique("group")
    await ms.create_topic(topic, partitions=2)
    tasks: list[asyncio.Task[list[Any]]] = []
    with pytest.raises(ZeroDivisionError):
        async with ms.streams({topic: 2}, group=group) as streams:
            tasks += [asyncio.ensure_future(_all(stream)) for stream in streams]
            await asyncio.sleep(0.1)
            1 / 0  # noqa: B018
    async with asyncio.timeout(SECONDS):
        assert await asyncio.gather(*tasks) == [[], []]


async def _all(items: Consuming[Any]) -> list[Any]:
    return [item async for item in items]


@pytest.mark.parametrize("kind", KINDS)
async def test_closing_goes_on_where_the_closer_is_cancelled(
    ms: Millstream, unique: Callable[[str], str], kind: str
) -> None:
    topic = unique("orders")
    await ms.create_topic(topic)
    items = KINDS[kind](ms, topic, unique("group"))
    task = await waiting(items)
    closing = asyncio.ensure_future(items.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    async with asyncio.timeout(SECONDS):
        await items.close()
        assert await task == []
    assert not ms._consuming


@pytest.mark.parametrize("kind", KINDS)
async def test_what_is_closed_while_it_opens_is_closed(ms: Millstream, unique: Callable[[str], str], kind: str) -> None:
    topic = unique("orders")
    await ms.create_topic(topic)
    before = threading.active_count()
    items = KINDS[kind](ms, topic, unique("group"))
    task = asyncio.ensure_future(items.receive())
    await asyncio.sleep(0)
    async with asyncio.timeout(SECONDS):
        await items.close()
        assert await task is None
        assert not ms._consuming
    await threads_ended(before)


async def test_who_is_cancelled_while_it_opens_leaves_nothing_open(
    ms: Millstream, unique: Callable[[str], str]
) -> None:
    topic, group = unique("orders"), unique("group")
    await ms.create_topic(topic)

    async def enter() -> None:
        async with ms.stream(topic, group=group):
            raise AssertionError("it was cancelled before")

    task = asyncio.ensure_future(enter())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(SECONDS):
        while ms._consuming:  # noqa: ASYNC110  (it ends by itself)
            await asyncio.sleep(0.01)
