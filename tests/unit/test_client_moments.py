"""The Python API in bad moments: closing beside work, retention that is faster, commits that take long."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import millstream
import millstream.sync
from millstream.client.embedded import Embedded
from millstream.core.errors import Closed
from millstream.testing.broker_thread import BrokerThread

SECONDS = 20.0


@pytest.fixture(params=["memory", "file", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return {"memory": "memory:", "file": f"file:{tmp_path / 'data'}", "sqlite": f"sqlite:{tmp_path / 'app.db'}"}[
        request.param
    ]


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def committed(ms: millstream.Millstream, group: str, topic: str) -> int:
    assert isinstance(ms, Embedded)
    [fetched] = ms.broker.groups.fetch(group, [(topic, [0])])
    place = fetched.partitions[0][1]
    return -1 if place is None else place.offset


async def test_what_was_stored_beside_a_close_is_not_said_to_be_refused(tmp_path: Path) -> None:
    store = f"file:{tmp_path}"
    ms = await millstream.open(store).__aenter__()
    await ms.create_topic("orders")
    sending = asyncio.ensure_future(ms.send_many([("orders", b"1"), ("orders", b"2")]))
    await asyncio.sleep(0)
    await ms.close()
    offsets = [sent.offset for sent in await sending]
    async with millstream.open(store) as again:
        assert [record.offset async for record in again.read("orders", follow=False)] == offsets


async def test_a_send_beside_a_close_is_answered() -> None:
    with BrokerThread() as server:
        async with millstream.connect(server.bootstrap) as ms:
            await ms.create_topic("orders")
        ms = millstream.connect(server.bootstrap)
        await ms.__aenter__()
        sending = asyncio.ensure_future(ms.send("orders", b"1"))
        await asyncio.sleep(0)
        await ms.close()
        async with asyncio.timeout(SECONDS):
            [answer] = await asyncio.gather(sending, return_exceptions=True)
        async with millstream.connect(server.bootstrap) as again:
            stored = [record.value async for record in again.read("orders", follow=False)]
        assert stored == ([] if isinstance(answer, Closed) else [b"1"])


async def test_a_reader_that_opens_while_all_closes_is_closed_too(store: str) -> None:
    ms = await millstream.open(store).__aenter__()
    await ms.create_topic("orders")
    stream = ms.stream("orders", group="g")
    assert await stream.receive(0.2) is None  # its end takes some turns
    reading = ms.read("orders")
    closing = asyncio.ensure_future(ms.close())
    for _ in range(3):
        await asyncio.sleep(0)
    receiving = asyncio.ensure_future(reading.receive())
    await closing
    async with asyncio.timeout(SECONDS):
        with pytest.raises(Closed):
            await receiving
    assert reading.is_closed


async def test_retention_that_overtakes_an_exclusive_member_costs_only_what_is_gone(store: str) -> None:
    async with millstream.open(store) as ms:
        for number in range(10):
            await ms.send("orders", b"%d" % number * 100_000)
        async with ms.exclusive("orders", group="g") as ledger:
            first = await ledger.receive(SECONDS)
            assert first is not None and first.offset == 0
            await _trim(ms, 8)
            while (await _take(ledger)).offset < 9:
                pass
            await ms.send("orders", b"new")
            last = await ledger.receive(SECONDS)
            assert last is not None and last.offset == 10


async def test_retention_that_overtakes_a_member_of_a_stream_costs_only_what_is_gone(store: str) -> None:
    async with millstream.open(store) as ms:
        for number in range(10):
            await ms.send("orders", b"%d" % number * 300_000)
        async with ms.stream("orders", group="g") as stream, asyncio.timeout(SECONDS):
            assert (await _take(stream)).offset == 0
            await _trim(ms, 8)
            while (await _take(stream)).offset < 9:
                pass


async def test_what_is_processed_while_a_commit_is_under_way_is_committed_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with millstream.open("memory:") as ms:
        assert isinstance(ms, Embedded)
        await ms.create_topic("orders")
        groups, commit, gate = ms.broker.groups, ms.broker.groups.commit, asyncio.Event()
        begun: list[bool] = []

        async def slow(*args: Any, **terms: Any) -> Any:
            begun.append(True)
            await gate.wait()
            return await _settled(commit(*args, **terms))

        monkeypatch.setattr(groups, "commit", slow)
        seen: list[int] = []

        async def read() -> None:
            async for record in ms.stream("orders", group="g"):
                seen.append(record.offset)  # noqa: PERF401  (others look while it goes on)

        reading = asyncio.ensure_future(read())
        await ms.send("orders", b"x")
        await until(lambda: begun)
        await ms.send("orders", b"y")
        await until(lambda: len(seen) == 2)
        for _ in range(10):
            await asyncio.sleep(0)  # it is idle, and waits
        gate.set()
        await until(lambda: committed(ms, "g", "orders") == 2)
        reading.cancel()
        await asyncio.wait([reading])


def test_a_callback_that_closes_is_refused_and_all_goes_on() -> None:
    refused: list[BaseException] = []
    ended = threading.Event()

    def work() -> None:
        with millstream.sync.open("memory:") as ms:

            def close(*_: object) -> None:
                try:
                    ms.close()
                except Exception as error:
                    refused.append(error)

            sender = ms.sender("orders", on_sent=close)
            sender.send(b"x")
            sender.flush()
        ended.set()

    threading.Thread(target=work, daemon=True).start()
    assert ended.wait(SECONDS)
    assert len(refused) == 1


async def _trim(ms: millstream.Millstream, offset: int) -> None:
    assert isinstance(ms, Embedded)
    topic = ms.broker.topics.get("orders")
    assert topic is not None
    await topic.partitions[0].log.trim(offset)


async def _take(stream: Any) -> Any:
    record = await stream.receive(SECONDS)
    assert record is not None
    return record


async def _settled(answer: Awaitable[Any]) -> Any:
    return await answer
