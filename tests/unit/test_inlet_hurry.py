"""A lone record need not wait for the end of the turn, where it has no sync to share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from millstream.broker.inlet import Inlet
from millstream.config import Config
from millstream.server import Server


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    server = Server(Config(store=f"file:{tmp_path}", kafka="127.0.0.1:0", http="off"))
    await server.start()
    yield server
    await server.stop()


async def inlet_of(server: Server, flush: str) -> Inlet:
    topic = await server.broker.topics.create("jobs", 1, {"flush": flush})
    return server.broker.inlet(topic.partitions[0])


async def test_the_first_of_a_turn_leaves_at_once_and_the_others_together(server: Server) -> None:
    inlet = await inlet_of(server, "os")
    first = inlet.put(b"1")
    inlet.hurry()
    assert first.done and first.value() == 0
    others = [inlet.put(b"2"), inlet.put(b"3")]
    inlet.hurry()
    others.append(inlet.put(b"4"))
    inlet.hurry()
    assert not any(other.done for other in others)
    before = server.metrics.batches_in
    assert [await other for other in others] == [1, 2, 3]
    assert server.metrics.batches_in == before + 1


async def test_the_next_turn_may_hurry_again(server: Server) -> None:
    inlet = await inlet_of(server, "os")
    for number in range(3):
        put = inlet.put(b"x")
        inlet.hurry()
        assert put.done and put.value() == number
        await asyncio.sleep(0)


async def test_several_that_came_together_stay_together(server: Server) -> None:
    inlet = await inlet_of(server, "os")
    puts = [inlet.put(b"1"), inlet.put(b"2")]
    inlet.hurry()
    assert not puts[0].done
    assert [await put for put in puts] == [0, 1]


async def test_what_waits_for_a_sync_shares_it(server: Server) -> None:
    inlet = await inlet_of(server, "always")
    first = inlet.put(b"1")
    inlet.hurry()
    second = inlet.put(b"2")
    before = server.metrics.batches_in
    assert (await first, await second) == (0, 1)
    assert server.metrics.batches_in == before + 1
