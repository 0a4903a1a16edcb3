"""The high watermark of a log that other brokers copy: only the leader moves it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import pytest

from millstream.core.errors import Diverged
from millstream.log.compaction import _cleanable
from millstream.log.config import LogConfig
from millstream.log.flusher import Flusher
from millstream.log.replica import ReplicaLog
from millstream.records import codec
from millstream.records.batch import patch_offset, read_header
from millstream.stores.base import PartitionLog
from millstream.stores.local import LocalLogStore
from millstream.testing.clock import VirtualClock
from tests.batches import append, batch, fill, read_all

TOPIC_ID = "0123456789abcdef"


@pytest.fixture
async def log(tmp_path: Path) -> AsyncIterator[ReplicaLog]:
    """Ten batches of one record in several segments, counted here and not committed."""
    store = LocalLogStore(str(tmp_path / "data"), VirtualClock(), Flusher(asyncio.get_running_loop()))
    store.lock()
    log = store.open("t", TOPIC_ID, 0, LogConfig(segment_bytes=1000))
    assert isinstance(log, ReplicaLog)
    log.is_replicated = True
    await fill(log, 10)
    assert len(log.segments) > 1
    yield log
    await store.close()


async def test_readers_wait_until_the_leader_raises_the_high_watermark(log: ReplicaLog) -> None:
    assert (log.high_watermark, log.counted, log.end) == (0, 10, 10)
    assert read_all(log) == []
    for offset in (1, 4, 10):
        log.raise_high_watermark(offset)
        assert log.high_watermark == offset
        assert [record.offset for record in read_all(log)] == list(range(offset))


async def test_each_step_wakes_readers_once(log: ReplicaLog) -> None:
    woken: list[int] = []
    log.wake(lambda: woken.append(log.high_watermark))
    for offset in (3, 3, 2, 7):
        log.raise_high_watermark(offset)
    assert woken == [3, 7]


async def test_it_never_goes_back_and_never_above_what_this_copy_counts(log: ReplicaLog) -> None:
    log.raise_high_watermark(6)
    log.raise_high_watermark(2)
    assert log.high_watermark == 6
    unsynced = append(log, batch(b"not synced"))
    log.raise_high_watermark(11)
    assert (log.high_watermark, log.end) == (10, 11)
    await unsynced
    log.raise_high_watermark(11)
    assert log.high_watermark == 11


async def test_it_stays_at_a_batch_boundary(log: ReplicaLog) -> None:
    await append(log, batch(b"a", b"b", b"c"))
    log.raise_high_watermark(11)
    assert log.high_watermark == 10
    log.raise_high_watermark(13)
    assert [record.value for record in read_all(log, 10)] == [b"a", b"b", b"c"]


async def test_a_truncation_above_it_leaves_it_where_it_is(log: ReplicaLog) -> None:
    log.raise_high_watermark(4)
    assert await log.truncate(7) == 7
    assert (log.high_watermark, log.counted, log.end) == (4, 7, 7)
    assert [record.offset for record in read_all(log)] == [0, 1, 2, 3]
    log.raise_high_watermark(7)
    assert [record.offset for record in read_all(log)] == list(range(7))


async def test_a_restarted_copy_begins_at_the_leaders_start(log: ReplicaLog, tmp_path: Path) -> None:
    assert await log.restart_at(100) == 100
    assert (log.start, log.high_watermark, log.counted, log.end) == (100, 100, 100, 100)
    data = leaders_batch(b"a", b"b", offset=100, epoch=3)
    await log.follow(memoryview(data), read_header(data))
    log.raise_high_watermark(102)
    assert [(record.offset, record.value) for record in read_all(log)] == [(100, b"a"), (101, b"b")]
    log.close()
    again = reopened(tmp_path)
    assert (again.start, again.end, again.epochs.latest) == (100, 102, 3)
    assert [record.offset for record in read_all(again)] == [100, 101]


@pytest.mark.parametrize("offset", [0, 4], ids=["its own start", "the base of a later segment"])
async def test_a_copy_may_restart_where_one_of_its_segments_begins(
    log: ReplicaLog, tmp_path: Path, offset: int
) -> None:
    if offset:
        offset = log.segments[1].base_offset
    assert await log.restart_at(offset) == offset
    log.close()
    again = reopened(tmp_path)
    assert (again.start, again.end, again.damage.ranges) == (offset, offset, [])


async def test_a_leaders_log_may_start_within_the_first_batch(log: ReplicaLog) -> None:
    await log.restart_at(101)
    data = leaders_batch(b"a", b"b", b"c", offset=100, epoch=3)
    await log.follow(memoryview(data), read_header(data))
    log.raise_high_watermark(103)
    assert (log.start, log.end) == (101, 103)
    assert [record.offset for record in read_all(log) if record.offset >= log.start] == [101, 102]


async def test_replicas_read_what_readers_do_not_see_yet(log: ReplicaLog) -> None:
    log.raise_high_watermark(4)
    unseen, at = [], 4
    while at < log.end:
        piece = log.read_to_end(at, 300).value()
        unseen += [record.offset for record in codec.iterate(piece.to_bytes())]
        at = piece.next_offset
    assert unseen == [4, 5, 6, 7, 8, 9]
    assert log.read_to_end(10, 300).value().size == 0


async def test_a_former_leader_follows_an_older_epoch_than_its_own_empty_one(log: ReplicaLog) -> None:
    log.lead(5)
    data = leaders_batch(b"a", offset=10, epoch=4)
    assert isinstance((await refused(log, data)), Diverged)
    log.epochs.drop_empty(log.end)
    await log.follow(memoryview(data), read_header(data))
    assert log.epochs.latest == 4


async def test_compaction_leaves_uncommitted_records_alone(log: ReplicaLog) -> None:
    assert isinstance(log.clock, VirtualClock)
    log.clock.advance(60)  # past the records' times
    assert _cleanable(log) == []
    closed = [segment for segment, after in pairwise(log.segments) if after.base_offset <= 6]
    log.raise_high_watermark(6)
    assert closed and _cleanable(log) == closed


def leaders_batch(*values: bytes, offset: int, epoch: int) -> bytearray:
    data = batch(*values)
    patch_offset(data, offset, read_header(data).length, epoch)
    return data


async def refused(log: ReplicaLog, data: bytearray) -> BaseException | None:
    return log.follow(memoryview(data), read_header(data)).error


def reopened(tmp_path: Path) -> PartitionLog:
    store = LocalLogStore(str(tmp_path / "data"), VirtualClock(), Flusher(asyncio.get_running_loop()))
    return store.open("t", TOPIC_ID, 0, LogConfig(segment_bytes=1000))
