"""Isolation levels at the Kafka door, over a throw-away log with a lower stable offset."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from millstream.config import Config
from millstream.records import codec
from millstream.server import Server
from millstream.stores.memory import MemoryLog
from tests.batches import append, batch
from tests.compat import raw

COMMITTED, UNCOMMITTED = 1, 0
LIST_OFFSETS, OFFSETS_VERSION = 2, 7


class OpenTransaction(MemoryLog):
    """Open from offset 2 on."""

    @property
    def stable(self) -> int:
        return min(2, self.high_watermark)


@pytest.fixture
async def client(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[raw.Raw]:
    monkeypatch.setattr("millstream.stores.memory.MemoryLog", OpenTransaction)
    server = Server(Config(store="memory:", kafka="127.0.0.1:0", http="off"))
    await server.start()
    topic = await server.broker.topics.create("orders", 1, {})
    for number in range(3):
        append(topic.partitions[0].log, batch(b"%d" % number, at=1000 + number))
    client = await asyncio.to_thread(raw.Raw, str(server.addresses["kafka"]))
    yield client
    client.close()
    await server.stop()


@pytest.mark.parametrize(
    ("level", "offset", "values"),
    [(UNCOMMITTED, 0, [0, 1, 2]), (COMMITTED, 0, [0, 1]), (UNCOMMITTED, 2, [2]), (COMMITTED, 2, [])],
)
async def test_a_committed_fetch_ends_at_the_stable_offset(
    client: raw.Raw, level: int, offset: int, values: list[int]
) -> None:
    answer = await asyncio.to_thread(client.ask, raw.fetch("orders", offset, isolation=level))
    (one,) = answer.responses[0].partitions
    assert (one.high_watermark, one.last_stable_offset) == (3, 2)
    found = [record.value for record in codec.iterate(one.records or b"")]
    assert found == [b"%d" % value for value in values]


@pytest.mark.parametrize(
    ("level", "timestamp", "offset"),
    [
        (UNCOMMITTED, -1, 3),
        (COMMITTED, -1, 2),
        (UNCOMMITTED, -2, 0),
        (COMMITTED, -2, 0),
        (UNCOMMITTED, 1001, 1),
        (COMMITTED, 1001, 1),
        (UNCOMMITTED, 1002, 2),
        (COMMITTED, 1002, -1),
    ],
)
async def test_committed_offsets_end_at_the_stable_offset(
    client: raw.Raw, level: int, timestamp: int, offset: int
) -> None:
    partition = {"partition_index": 0, "current_leader_epoch": 0, "timestamp": timestamp}
    fields: dict[str, Any] = {
        "replica_id": -1,
        "isolation_level": level,
        "topics": [{"name": "orders", "partitions": [partition]}],
    }
    answer = await asyncio.to_thread(client.ask, raw.request(LIST_OFFSETS, OFFSETS_VERSION, fields))
    assert answer.topics[0].partitions[0].offset == offset
