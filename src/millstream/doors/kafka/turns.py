"""Requests about many things, without holding up the event loop.

One request may name a hundred thousand topics, groups or partitions. To read it, to look each of them up and to write
the answer takes a few microseconds per item: seconds in which no other client would be served. So handlers go through
such lists with `in_turns`, and what is pure computation (`messages`) runs in a thread if it is more than a little
(`is_large`). The thread and the event loop share the interpreter's lock, in slices of a few milliseconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from time import monotonic
from typing import Any, TypeVar

from millstream.core.collector import collector
from millstream.core.promise import begin

T = TypeVar("T")

SLICE_SECONDS = 0.01
LIGHT_BYTES = 4096
"""Of a request that is read on the event loop: some hundred items, a millisecond or two."""
LIGHT_ITEMS = 500
"""Of an answer that is written there."""
ITEMS_A_STEP = 1_000
"""Of a list that the broker takes as a whole: a millisecond or two."""


async def in_turns(items: Iterable[T]) -> AsyncIterator[T]:
    """Each of them; other clients have their turn after every `SLICE_SECONDS`."""
    since = monotonic()
    for item in items:
        yield item
        if monotonic() - since > SLICE_SECONDS:
            collector.postpone()
            await asyncio.sleep(0)
            since = monotonic()


def at_once(work: Coroutine[Any, Any, T]) -> T | Awaitable[T]:
    """The result of a handler that yields for long lists only: a short request costs neither a task nor a turn."""
    promise = begin(work)
    return promise.value() if promise.done else promise


def in_steps(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """The list in parts of `ITEMS_A_STEP`. An empty list is one part."""
    for start in range(0, max(len(items), 1), ITEMS_A_STEP):
        yield items[start : start + ITEMS_A_STEP]


def is_large(fields: Any) -> bool:
    """Whether an answer has more items in its lists, those inside others included, than the event loop has time for."""
    count, left = 0, [fields]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            left += [each for each in value.values() if isinstance(each, list | dict)]
        else:
            count += len(value)
            if count > LIGHT_ITEMS:
                return True
            left += [each for each in value if isinstance(each, dict)]
    return False


def let_go(*lists: list[Any]) -> None:
    """Empties the lists of a large request step by step; to be run in the thread.

    Python frees 100,000 items in 20 to 100 ms, and the interpreter is held all the time if they go at once.
    """
    for items in lists:
        while items:
            del items[-ITEMS_A_STEP:]


async def aside(work: Callable[..., T], *args: Any) -> T:
    collector.postpone()
    collector.in_thread += 1
    try:
        return await asyncio.get_running_loop().run_in_executor(_thread(), work, *args)
    finally:
        collector.in_thread -= 1
        collector.postpone()


@cache
def _thread() -> ThreadPoolExecutor:
    """One, so that any number of clients hold one such answer in the making between them."""
    return ThreadPoolExecutor(1, "millstream-messages")
