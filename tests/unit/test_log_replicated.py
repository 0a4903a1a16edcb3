"""The high watermark of a log that other brokers copy: only the leader moves it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from millstream.log.config import LogConfig
from millstream.log.flusher import Flusher
from millstream.log.log import Log
from millstream.stores.local import LocalLogStore
from millstream.testing.clock import VirtualClock
from tests.batches import append, batch, fill, read_all

TOPIC_ID = "0123456789abcdef"


@pytest.fixture
async def log(tmp_path: Path) -> AsyncIterator[Log]:
    """Ten batches of one record in several segments, counted here and not committed."""
    store = LocalLogStore(str(tmp_path / "data"), VirtualClock(), Flusher(asyncio.get_running_loop()))
    store.lock()
    log = store.open("t", TOPIC_ID, 0, LogConfig(segment_bytes=1000))
    assert isinstance(log, Log)
    log.is_replicated = True
    await fill(log, 10)
    assert len(log.segments) > 1
    yield log
    await store.close()


async def test_readers_wait_until_the_leader_raises_the_high_watermark(log: Log) -> None:
    assert (log.high_watermark, log.counted, log.end) == (0, 10, 10)
    assert read_all(log) == []
    for offset in (1, 4, 10):
        log.raise_high_watermark(offset)
        assert log.high_watermark == offset
        assert [record.offset for record in read_all(log)] == list(range(offset))


async def test_each_step_wakes_readers_once(log: Log) -> None:
    woken: list[int] = []
    log.wake(lambda: woken.append(log.high_watermark))
    for offset in (3, 3, 2, 7):
        log.raise_high_watermark(offset)
    assert woken == [3, 7]


async def test_it_never_goes_back_and_never_above_what_this_copy_counts(log: Log) -> None:
    log.raise_high_watermark(6)
    log.raise_high_watermark(2)
    assert log.high_watermark == 6
    unsynced = append(log, batch(b"not synced"))
    log.raise_high_watermark(11)
    assert (log.high_watermark, log.end) == (10, 11)
    await unsynced
    log.raise_high_watermark(11)
    assert log.high_watermark == 11


async def test_it_stays_at_a_batch_boundary(log: Log) -> None:
    await append(log, batch(b"a", b"b", b"c"))
    log.raise_high_watermark(11)
    assert log.high_watermark == 10
    log.raise_high_watermark(13)
    assert [record.value for record in read_all(log, 10)] == [b"a", b"b", b"c"]


async def test_a_truncation_above_it_leaves_it_where_it_is(log: Log) -> None:
    log.raise_high_watermark(4)
    assert await log.truncate(7) == 7
    assert (log.high_watermark, log.counted, log.end) == (4, 7, 7)
    assert [record.offset for record in read_all(log)] == [0, 1, 2, 3]
    log.raise_high_watermark(7)
    assert [record.offset for record in read_all(log)] == list(range(7))
