"""Both kinds of the Python API for the tests of it, and a look at the broker behind either."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

import millstream as package
from millstream import Millstream, Record
from millstream.broker.broker import Broker
from millstream.client.embedded import Embedded
from millstream.testing.broker_thread import BrokerThread

T = TypeVar("T")
SECONDS = 20.0
"""Far more than anything here takes: what waits longer hangs."""


@pytest.fixture(scope="module")
def server() -> Iterator[BrokerThread]:
    with BrokerThread() as broker:
        yield broker


@pytest.fixture(params=["memory", "sqlite", "remote"])
async def ms(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Millstream]:
    """Embedded over two stores, and remote. Each test has topics of its own; the remote ones share a server."""
    if request.param == "memory":
        made: Millstream = package.open("memory:")
    elif request.param == "sqlite":
        made = package.open(f"sqlite:{tmp_path / 'app.db'}")
    else:
        made = package.connect(request.getfixturevalue("server").bootstrap, timeout=10)
    async with made:
        yield made


@pytest.fixture
def behind(
    ms: Millstream, request: pytest.FixtureRequest
) -> Callable[[Callable[[Broker], Awaitable[T]]], Awaitable[T]]:
    """Runs something on the broker behind `ms`, for what no client can ask for."""

    async def run(work: Callable[[Broker], Awaitable[T]]) -> T:
        if isinstance(ms, Embedded):
            return await work(ms.broker)
        server: BrokerThread = request.getfixturevalue("server")
        return await asyncio.to_thread(server.run, work)

    return run


async def take(items: Any, count: int) -> list[Any]:
    taken: list[Any] = []
    async with asyncio.timeout(SECONDS):
        while len(taken) < count:
            item = await items.receive(SECONDS)
            assert item is not None
            taken.append(item)
    return taken


async def everything(ms: Millstream, topic: str, partition: int = 0) -> list[Record[bytes | None]]:
    async with asyncio.timeout(SECONDS):
        return [record async for record in ms.read(topic, partition=partition, follow=False)]
