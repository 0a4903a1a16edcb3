"""What a server tells about its queues: on `/queues` and in `/metrics`, and of which queues."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from millstream.broker.groups.queue.verbs import Answer, Verb
from millstream.config import Config
from millstream.server import Server
from millstream.testing.clock import VirtualClock


@pytest.fixture
def config() -> Config:
    return Config(store="memory:", kafka="127.0.0.1:0", http="127.0.0.1:0")


async def page(server: Server, path: str) -> str:
    def read() -> str:
        with urllib.request.urlopen(f"http://{server.addresses['http']}{path}", timeout=10) as answer:
            text: str = answer.read().decode()
            return text

    return await asyncio.to_thread(read)


async def test_named_queues_are_told_about_and_private_ones_are_not(config: Config) -> None:
    server = Server(config)
    await server.start()
    try:
        topic = await server.broker.topics.create("jobs", 1, {})
        settings = {"share.auto.offset.reset": "earliest"}
        named = server.broker.queues.open("workers", settings=settings)
        private = server.broker.queues.open("private-of-somebody", durable=False)
        partition = await named.partition(topic, 0)
        await (await private.partition(topic, 0)).take(private.join("him"), 1, 1)
        for value in (b"a", b"b", b"c"):
            await server.broker.inlet(topic.partitions[0]).put(value, None, ())
        member = named.join("me")
        first, second = await partition.take(member, 2, 1 << 20)
        await partition.answer(member, [Answer(first.record.offset, first.record.offset, Verb.ACCEPT)])

        (told,) = json.loads(await page(server, "/queues"))
        (row,) = told.pop("partitions")
        assert told == {
            "group": "workers",
            "settings": settings,
            "member_count": 1,
            "members": [{"member": "me", "leased": 1}],
        }
        assert row.pop("age_ms") >= 0
        expected: dict[str, Any] = {
            "topic": "jobs",
            "partition": 0,
            "available": 1,
            "leased": 1,
            "waiting": 0,
            "done": 1,
        }
        expected |= {"dead": 0, "dying": 0, "redelivered": 0, "low": 1, "next": 2, "end": 3, "ahead": [[2, 2]]}
        assert row == expected and second.record.offset == 1
        metrics = await page(server, "/metrics")
        assert 'millstream_queue_leased{group="workers",partition="0",topic="jobs"} 1.0' in metrics
        assert "private-of-somebody" not in metrics
    finally:
        await server.stop()


async def test_the_broker_knows_where_its_pages_are(config: Config) -> None:
    server = Server(config)
    await server.start()
    try:
        assert server.broker.config.http == str(server.addresses["http"]) != config.http
    finally:
        await server.stop()


@pytest.mark.parametrize("store", ["memory:", "file:{}", "sqlite:{}/app.db"])
async def test_how_long_the_oldest_record_has_waited_is_told_over_every_store(store: str, tmp_path: Path) -> None:
    clock = VirtualClock()
    config = Config(store=store.format(tmp_path), kafka="127.0.0.1:0", http="127.0.0.1:0")
    server = Server(config, clock)
    await server.start()
    try:
        topic = await server.broker.topics.create("jobs", 1, {})
        queue = server.broker.queues.open("workers", settings={"share.auto.offset.reset": "earliest"})
        await queue.partition(topic, 0)
        for value in (b"a", b"b", b"c"):
            await server.broker.inlet(topic.partitions[0]).put(value, None, ())
            clock.advance(10)
        age = 'millstream_queue_oldest_available_seconds{group="workers",partition="0",topic="jobs"}'
        assert f"{age} 30.0" in await page(server, "/metrics")
        await topic.partitions[0].log.trim(1)  # retention may delete what no member has taken
        assert f"{age} 20.0" in await page(server, "/metrics")
        ((told,),) = (each["partitions"] for each in json.loads(await page(server, "/queues")))
        assert told["available"] == 2 and told["age_ms"] == 20_000
    finally:
        await server.stop()


async def test_nor_how_long_one_has_that_is_long_gone() -> None:
    clock = VirtualClock()
    server = Server(Config(store="memory:", kafka="127.0.0.1:0"), clock)
    await server.start()
    try:
        topic = await server.broker.topics.create("jobs", 1, {})
        queue = server.broker.queues.open("workers", settings={"share.auto.offset.reset": "earliest"})
        partition = await queue.partition(topic, 0)
        await server.broker.inlet(topic.partitions[0]).put(b"a", None, ())
        await partition.date()
        member = queue.join("me")
        (taken,) = await partition.take(member, 1, 1 << 20)  # while other partitions are dated
        await partition.answer(member, [Answer(taken.record.offset, taken.record.offset, Verb.ACCEPT)])
        assert partition.figures().age_ms == 0
        clock.advance(3600)
        await partition.date()
        await server.broker.inlet(topic.partitions[0]).put(b"b", None, ())
        assert partition.figures().age_ms == 0
    finally:
        await server.stop()
