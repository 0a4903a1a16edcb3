"""Handles requests with many items without blocking the event loop.

One request may name a hundred thousand topics, groups or partitions. To decode it, look up each item and encode the
answer takes a few microseconds per item, and would block other clients for seconds. So handlers iterate over such lists
with `in_turns`. Large encoding and decoding (`messages`, `is_large`) runs in a thread. The thread and the event loop
share the interpreter's lock, in slices of a few milliseconds.
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
"""The largest request that the event loop decodes: some hundred items, a millisecond or two."""
LIGHT_ITEMS = 500
"""The largest answer that it encodes."""
ITEMS_A_STEP = 1_000
"""The longest list that the broker takes in one step: a millisecond or two."""


async def in_turns(items: Iterable[T]) -> AsyncIterator[T]:
    """Yields each item; the event loop runs after every `SLICE_SECONDS`."""
    since = monotonic()
    for item in items:
        yield item
        if monotonic() - since > SLICE_SECONDS:
            collector.postpone()
            await asyncio.sleep(0)
            since = monotonic()


def at_once(work: Coroutine[Any, Any, T]) -> T | Awaitable[T]:
    """Runs a handler that waits for long lists only. A short request costs neither a task nor a turn."""
    promise = begin(work)
    return promise.value() if promise.done else promise


def in_steps(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """The list in parts of `ITEMS_A_STEP`. An empty list is one part."""
    for start in range(0, max(len(items), 1), ITEMS_A_STEP):
        yield items[start : start + ITEMS_A_STEP]


def is_large(fields: Any) -> bool:
    """Whether an answer has more items, including nested lists, than the event loop encodes."""
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
    """Empties the lists of a large request step by step. Runs in the thread.

    Python frees 100,000 items in 20 to 100 ms, and holds the interpreter's lock if they are freed at once.
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
    """A single thread, so that only one large answer is encoded at a time."""
    return ThreadPoolExecutor(1, "millstream-messages")
