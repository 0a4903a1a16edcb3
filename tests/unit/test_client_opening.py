"""Iterators whose opening is cancelled or fails leave no member behind, and can be asked again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import millstream as package
from millstream import Millstream
from millstream.client.consuming import Consuming
from millstream.testing.broker_thread import BrokerThread

SECONDS = 20.0
VERBS = ("read", "stream", "queue", "exclusive")
_names = iter(range(10**6))


def ask(ms: Millstream, verb: str, topic: str, group: str) -> Any:
    options = {} if verb == "read" else {"group": group}
    return getattr(ms, verb)(topic, **options)


async def nothing_is_open(ms: Millstream) -> None:
    """What ends by itself has ended."""
    async with asyncio.timeout(SECONDS):
        while ms._consuming:  # noqa: ASYNC110  (there is no event for it)
            await asyncio.sleep(0.01)


class Held:
    """An opening that pauses when it is done, so that a test can cancel its waiter."""

    def __init__(self, iterator: Consuming[Any]) -> None:
        self.is_there = asyncio.Event()
        self.may_go_on = asyncio.Event()
        self.count = 0
        self._start = iterator._start
        iterator._start = self._stop  # type: ignore[method-assign]

    async def _stop(self) -> None:
        self.count += 1
        await self._start()
        self.is_there.set()
        await self.may_go_on.wait()


@pytest.mark.parametrize("verb", VERBS)
async def test_a_receive_that_is_cancelled_while_it_opens_leaves_no_member(ms: Millstream, verb: str) -> None:
    topic, group = f"orders-{next(_names)}", f"group-{next(_names)}"
    await ms.send(topic, b"x")
    iterator = ask(ms, verb, topic, group)
    held = Held(iterator)
    task = asyncio.ensure_future(iterator.receive())
    await asyncio.wait_for(held.is_there.wait(), SECONDS)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    held.may_go_on.set()
    async with asyncio.timeout(SECONDS), ask(ms, verb, topic, group) as another:
        item = await another.receive(SECONDS)
        assert item is not None and item.value == b"x"  # no other member has the partition or is active
    assert not iterator.is_closed
    await nothing_is_open(ms)


@pytest.mark.parametrize("verb", VERBS)
async def test_it_opens_anew_for_whoever_asks_next(ms: Millstream, verb: str) -> None:
    topic, group = f"orders-{next(_names)}", f"group-{next(_names)}"
    await ms.send(topic, b"x")
    iterator = ask(ms, verb, topic, group)
    held = Held(iterator)
    task = asyncio.ensure_future(iterator.receive())
    await asyncio.wait_for(held.is_there.wait(), SECONDS)
    task.cancel()
    await asyncio.wait([task])
    held.may_go_on.set()
    item = await iterator.receive(SECONDS)
    assert item is not None and item.value == b"x"
    await iterator.close()
    assert not ms._consuming


@pytest.mark.parametrize("verb", VERBS)
async def test_an_async_with_that_is_cancelled_while_it_opens_is_closed(ms: Millstream, verb: str) -> None:
    topic, group = f"orders-{next(_names)}", f"group-{next(_names)}"
    await ms.send(topic, b"x")
    iterator = ask(ms, verb, topic, group)
    held = Held(iterator)
    task = asyncio.ensure_future(iterator.__aenter__())
    await asyncio.wait_for(held.is_there.wait(), SECONDS)
    task.cancel()
    await asyncio.wait([task])
    held.may_go_on.set()
    await iterator.close()
    assert iterator.is_closed and not ms._consuming
    async with asyncio.timeout(SECONDS), ask(ms, verb, topic, group) as another:
        assert await another.receive(SECONDS) is not None


@pytest.mark.parametrize("verb", VERBS)
async def test_a_closing_that_is_cancelled_goes_on_to_its_end(ms: Millstream, verb: str) -> None:
    topic, group = f"orders-{next(_names)}", f"group-{next(_names)}"
    await ms.send(topic, b"x")
    iterator = await ask(ms, verb, topic, group).__aenter__()
    task = asyncio.ensure_future(iterator.close(clean=False))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    async with asyncio.timeout(SECONDS), ask(ms, verb, topic, group) as another:
        item = await another.receive(SECONDS)
        assert item is not None and item.value == b"x"
    await nothing_is_open(ms)


async def test_one_who_still_waits_for_an_opening_gets_it(ms: Millstream) -> None:
    topic, group = f"orders-{next(_names)}", f"group-{next(_names)}"
    await ms.send(topic, b"x")
    ledger = ms.exclusive(topic, group=group)
    held = Held(ledger)
    cancelled = asyncio.ensure_future(ledger.changed())
    stays = asyncio.ensure_future(ledger.receive(SECONDS))
    await asyncio.wait_for(held.is_there.wait(), SECONDS)
    cancelled.cancel()
    await asyncio.wait([cancelled])
    held.may_go_on.set()
    event = await stays
    assert event is not None and event.value == b"x"
    await ledger.close()


async def test_closing_all_waits_for_an_opening_that_is_undone(server: BrokerThread) -> None:
    async with package.open("memory:") as ms:
        await ms.send("orders", b"x")
        stream = ms.stream("orders", group="g")
        held = Held(stream)
        task = asyncio.ensure_future(stream.receive())
        await asyncio.wait_for(held.is_there.wait(), SECONDS)
        task.cancel()
        await asyncio.wait([task])
        closing = asyncio.ensure_future(ms.close())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not closing.done()
        held.may_go_on.set()
        await closing


async def ask_and_go(iterator: Any, held: Held) -> None:
    """Asks, and is cancelled when an opening is on its way."""
    task = asyncio.ensure_future(iterator.receive())
    await asyncio.wait_for(held.is_there.wait(), SECONDS)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])


@pytest.mark.parametrize("verb", VERBS)
async def test_those_who_ask_and_go_while_it_is_shut_cost_nobody_an_opening(ms: Millstream, verb: str) -> None:
    """As `asyncio.wait_for` in a loop, with less time than an opening takes: each would be one more to wait for."""
    topic, group = f"orders-{next(_names)}", f"group-{next(_names)}"
    await ms.send(topic, b"x")
    iterator = ask(ms, verb, topic, group)
    held = Held(iterator)
    for _ in range(5):
        await ask_and_go(iterator, held)
    assert held.count == 1
    held.may_go_on.set()
    item = await iterator.receive(SECONDS)
    assert item is not None and item.value == b"x" and held.count == 2
    await iterator.close()
    assert not ms._consuming


@pytest.mark.parametrize("verb", VERBS)
async def test_an_opening_that_nobody_waits_for_any_more_does_not_begin(ms: Millstream, verb: str) -> None:
    topic, group = f"orders-{next(_names)}", f"group-{next(_names)}"
    await ms.send(topic, b"x")
    iterator = ask(ms, verb, topic, group)
    held = Held(iterator)
    for _ in range(2):
        await ask_and_go(iterator, held)
    held.may_go_on.set()
    await nothing_is_open(ms)
    assert held.count == 1 and not iterator.is_closed
    await iterator.close()


async def test_one_who_is_cancelled_when_it_has_opened_shuts_it_under_nobody_who_waited_too(ms: Millstream) -> None:
    topic, group = f"orders-{next(_names)}", f"group-{next(_names)}"
    await ms.create_topic(topic)
    ledger = ms.exclusive(topic, group=group)
    held = Held(ledger)
    stays = asyncio.ensure_future(ledger.receive(SECONDS))
    cancelled = asyncio.ensure_future(ledger.changed())
    await asyncio.wait_for(held.is_there.wait(), SECONDS)
    assert ledger._opening is not None
    ledger._opening.add_done_callback(lambda done: cancelled.cancel())  # both know that it is open, and have yet to run
    held.may_go_on.set()
    await asyncio.wait([cancelled])
    await ms.send(topic, b"x")
    event = await stays
    assert event is not None and event.value == b"x" and held.count == 1
    await ledger.close()
    assert not ms._consuming


@pytest.mark.parametrize("verb", VERBS)
async def test_one_who_is_cancelled_when_it_has_opened_shuts_it_under_nobody_who_came(
    ms: Millstream, verb: str
) -> None:
    topic, group = f"orders-{next(_names)}", f"group-{next(_names)}"
    await ms.create_topic(topic)
    iterator = ask(ms, verb, topic, group)
    held = Held(iterator)
    cancelled = asyncio.ensure_future(iterator.receive())
    await asyncio.wait_for(held.is_there.wait(), SECONDS)
    held.may_go_on.set()
    came = asyncio.ensure_future(iterator.receive(SECONDS))  # finds it open before the opening task resumes
    asyncio.get_running_loop().call_soon(cancelled.cancel)
    await asyncio.wait([cancelled])
    await ms.send(topic, b"x")
    item = await came
    assert item is not None and item.value == b"x" and held.count == 1
    await iterator.close()
    assert not ms._consuming
