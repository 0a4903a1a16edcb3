"""Memory for FlowMQ frames that arrive in pieces: a waiting connection holds none that another waits for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from millstream.broker.broker import Broker
from millstream.broker.session import Sessions
from millstream.config import Config
from millstream.core.metrics import Metrics
from millstream.doors.engine.connection import Connection
from millstream.doors.flowmq.door import FlowmqDoor
from millstream.doors.memory import BufferPool
from millstream.stores.keys import MemoryMeta
from millstream.stores.memory import MemoryLogStore
from millstream.testing.clock import VirtualClock
from millstream.wire.flowmq import Command, frame
from tests.transports import MemoryTransport

TOPIC = b"jobs\0"
SMALL = frame(Command.PUBLISH, TOPIC + bytes(40_000))
LARGE = frame(Command.PUBLISH, TOPIC + bytes(1_000_000))


class Sender:
    """A client, and its connection."""

    def __init__(self, door: FlowmqDoor) -> None:
        self.client = MemoryTransport()
        before = set(door._connections)
        door._let_in(self.client, "192.0.2.1")
        [self.connection] = set(door._connections) - before

    async def send(self, data: bytes) -> Connection:
        """Until the broker has it, or waits for memory."""
        self.client.put(data)
        await until(lambda: not (self.client.unread and self.client.is_read))
        return self.connection


async def until(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not happened():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@pytest.fixture
async def door() -> AsyncIterator[FlowmqDoor]:
    """With memory for a large frame and a small one."""
    clock = VirtualClock()
    config = Config(inflight_bytes_max=BufferPool.LARGE + BufferPool.SMALL)
    broker = Broker(config, MemoryLogStore(clock), MemoryMeta(), clock, Metrics())
    await broker.start()
    await broker.topics.create("jobs", 1, {})
    door = FlowmqDoor(Sessions(broker))
    yield door
    await door.close()
    assert door.frames.free == door.frames.limit and not door.frames.is_contested
    await broker.close()


async def test_who_begins_a_larger_frame_does_not_wait_with_the_memory_of_the_last_one(door: FlowmqDoor) -> None:
    budget = door.frames
    one, two = Sender(door), Sender(door)
    for sender in (one, two):
        await sender.send(SMALL[:-10])
    assert budget.free < BufferPool.LARGE
    for sender in (one, two):
        await sender.send(SMALL[-10:] + LARGE[:20_000])
    waiting = [sender for sender in (one, two) if sender.connection.waits_for_memory]
    assert len(waiting) < 2, "each waits for what the other has"
    for sender in (one, two):
        await sender.send(LARGE[20_000:])
    answer = len(frame(Command.SUCCESS)) + 26
    await until(lambda: min(len(one.client.taken), len(two.client.taken)) >= 2 * answer)
    assert budget.free == budget.limit


async def test_what_is_given_back_is_enough_for_who_gave_it(door: FlowmqDoor) -> None:
    budget = door.frames
    sender, other = Sender(door), Sender(door)
    await sender.send(LARGE[:-10])
    assert (await other.send(LARGE[:20_000])).waits_for_memory
    other.connection.close()
    connection = await sender.send(LARGE[-10:] + LARGE[:20_000])
    assert not connection.waits_for_memory and budget.free == BufferPool.SMALL


async def test_who_is_closed_while_it_gives_back_takes_nothing_more(door: FlowmqDoor) -> None:
    """Who gets the memory handles what it has received: that may send something to the one that gave it."""
    budget = door.frames
    giver = Sender(door)
    await giver.send(LARGE[:-10])
    taken = budget.free
    assert budget.take(taken)
    budget.wait(100, giver.connection.close)
    await giver.send(LARGE[-10:] + LARGE[:20_000])
    assert giver.client.is_closed
    budget.give(taken + 100)
    assert budget.free == budget.limit and not budget.is_contested
