"""Producer ids: unique among those who ask at the same time, and after a restart."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from millstream.broker.producer_ids import BLOCK, ProducerIds
from millstream.stores.keys import MemoryMeta
from millstream.stores.sqlite_meta import SqliteMeta


@pytest.fixture(params=["memory", "sqlite"])
async def meta(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    made = MemoryMeta() if request.param == "memory" else SqliteMeta(str(tmp_path / "meta.db"))
    yield made
    await made.close()


async def test_nobody_gets_an_id_that_another_has(meta: Any) -> None:
    ids = ProducerIds(meta)
    taken = await asyncio.gather(*(ids.take() for _ in range(3 * BLOCK)))
    assert len(set(taken)) == 3 * BLOCK and min(taken) >= 0


async def test_ids_are_not_given_again_after_a_restart(meta: Any) -> None:
    before = [await ProducerIds(meta).take() for _ in range(3)]
    restarted = ProducerIds(meta)
    after = [await restarted.take() for _ in range(3)]
    assert not set(before) & set(after)


async def test_two_brokers_over_one_store_never_give_the_same(meta: Any) -> None:
    brokers = [ProducerIds(meta) for _ in range(4)]
    taken = await asyncio.gather(*(broker.take() for broker in brokers for _ in range(BLOCK + 5)))
    assert len(set(taken)) == len(taken)
