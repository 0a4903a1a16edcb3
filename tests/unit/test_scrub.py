"""The scrub finds damage that no reader has met, at its pace, and goes on where it was after a restart."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from millstream.broker import known_damage, scrub
from millstream.broker.broker import Broker
from millstream.broker.scrub import FIRST_SECONDS, KEY, ROUND_SECONDS
from millstream.broker.verification import Verification
from millstream.cluster.base import Node, Solo
from millstream.config import Config
from millstream.core.errors import Code, RequestError
from millstream.core.metrics import Metrics
from millstream.core.promise import Promise
from millstream.log.damage import Cause
from millstream.log.replica import ReplicaLog
from millstream.log.slice import Slice
from millstream.stores.url import open_store
from millstream.testing.clock import VirtualClock
from tests.batches import append, batch

TOPIC = "scrubbed"
PACE = 1000
"""Bytes per second: a batch of these tests takes a second or two."""


class PausedCluster(Solo):
    """A cluster in which this broker is not the one with the lowest number, until it is."""

    paused = True

    def others(self) -> tuple[Node, ...]:
        return (Node(self.node_id - 1, "127.0.0.1", 1),) if self.paused else ()


@asynccontextmanager
async def running(
    store: str, clock: VirtualClock, pace: int = PACE, cluster: Solo | None = None
) -> AsyncIterator[Broker]:
    logs, meta = open_store(store, clock, lambda seconds: None)
    config = Config(store=store, scrub_bytes_per_second=pace)
    broker = Broker(config, logs, meta, clock, Metrics(), cluster)
    await broker.start()
    await broker.cluster.start()
    try:
        yield broker
    finally:
        await broker.close()


async def until(clock: VirtualClock, holds: Callable[[], bool], step: float = 1.0) -> None:
    for _ in range(5000):
        if holds():
            return
        clock.advance(step)
        await asyncio.sleep(0.001)
    raise AssertionError("it never came to that")


def is_damaged(broker: Broker) -> bool:
    return bool(list(broker.damage()))


async def settle(holds: Callable[[], object]) -> None:
    """Waits for what a thread or the store answers, without time passing for the broker."""
    for _ in range(4000):
        if holds():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never came to that")


async def fill(broker: Broker, partitions: int = 2, batches: int = 3) -> None:
    topic = await broker.topics.create(TOPIC, partitions, {})
    for part in topic.partitions:
        for number in range(batches):
            await append(part.log, batch(b"balance=1000" * 100, b"%d" % number))


def damage_files(directory: Path, partition: int = 1) -> None:
    """One bit of the middle batch, as a disk loses it."""
    [segment] = directory.glob(f"logs/{TOPIC}-*/{partition}/*.log")
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)


async def test_a_flipped_bit_that_no_reader_met_is_found_and_named(tmp_path: Path) -> None:
    clock = VirtualClock()
    async with running(f"file:{tmp_path}", clock) as broker:
        await fill(broker)
        damage_files(tmp_path)
        await until(clock, lambda: broker.metrics.scrub_rounds == 1)
        [(topic, partition, damaged)] = broker.damage()
        assert (topic, partition, damaged.first, damaged.end) == (TOPIC, 1, 2, 4)
        assert damaged.cause is Cause.CHECKSUM and ".log at position " in damaged.where
        sizes = sum(part.log.size_bytes() for topic in broker.topics for part in topic.partitions)
        assert sizes // 2 < broker.metrics.verified_bytes < sizes  # all but the damaged batch


async def test_a_row_of_a_database_is_checked_too(tmp_path: Path) -> None:
    clock = VirtualClock()
    file = tmp_path / "store.db"
    async with running(f"sqlite:{file}", clock) as broker:
        await fill(broker, partitions=1)
        with sqlite3.connect(file) as database:
            [(row, data)] = database.execute("SELECT rowid, data FROM arrivals ORDER BY rowid LIMIT 1")
            spoilt = data[:-3] + bytes([data[-3] ^ 1]) + data[-2:]
            database.execute("UPDATE arrivals SET data = ? WHERE rowid = ?", (spoilt, row))
        await until(clock, lambda: broker.metrics.scrub_rounds == 1)
        [(_, _, damaged)] = broker.damage()
        assert (damaged.first, damaged.end) == (0, 2)


async def test_it_keeps_to_its_pace_and_begins_a_round_a_day(tmp_path: Path) -> None:
    clock = VirtualClock()
    async with running(f"file:{tmp_path}", clock) as broker:
        await fill(broker, partitions=4, batches=5)
        size = sum(part.log.size_bytes() for topic in broker.topics for part in topic.partitions)
        await until(clock, lambda: broker.metrics.scrub_rounds == 1)
        took = clock.monotonic() - FIRST_SECONDS
        assert took >= size / PACE
        await until(clock, lambda: broker.metrics.scrub_rounds == 2, step=600)
        assert clock.monotonic() >= FIRST_SECONDS + ROUND_SECONDS


async def test_a_scrub_of_0_bytes_per_second_is_off(tmp_path: Path) -> None:
    clock = VirtualClock()
    async with running(f"file:{tmp_path}", clock, pace=0) as broker:
        await fill(broker)
        clock.advance(FIRST_SECONDS + ROUND_SECONDS)
        await asyncio.sleep(0)
        assert broker.metrics.verified_bytes == 0


async def test_after_a_restart_the_round_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrub, "SAVE_BYTES", 1)
    clock = VirtualClock()
    store = f"sqlite:{tmp_path / 'store.db'}"
    async with running(store, clock, pace=10) as broker:  # a partition takes minutes
        await fill(broker, partitions=3)
        await until(clock, lambda: broker.metrics.verified_bytes > 0)
        one = broker.metrics.verified_bytes
        await until(clock, lambda: broker.metrics.verified_bytes > one)
        first = broker.metrics.verified_bytes
        assert broker.metrics.scrub_rounds == 0
    async with running(store, clock) as broker:
        sizes = [part.log.size_bytes() for topic in broker.topics for part in topic.partitions]
        await until(clock, lambda: broker.metrics.scrub_rounds == 1)
        assert 0 < broker.metrics.verified_bytes < sum(sizes)
        assert first + broker.metrics.verified_bytes >= sum(sizes)


async def test_of_several_brokers_the_one_with_the_lowest_number_scrubs(tmp_path: Path) -> None:
    clock = VirtualClock()
    cluster = PausedCluster(2)
    async with running(f"file:{tmp_path}", clock, cluster=cluster) as broker:
        await fill(broker)
        for _ in range(100):
            clock.advance(60)
            await asyncio.sleep(0)
        assert broker.metrics.verified_bytes == 0
        cluster.paused = False
        await until(clock, lambda: broker.metrics.scrub_rounds == 1)


async def test_a_topic_that_is_deleted_meanwhile_does_not_end_the_round(tmp_path: Path) -> None:
    clock = VirtualClock()
    async with running(f"file:{tmp_path}", clock, pace=100) as broker:
        await fill(broker, partitions=1, batches=1)
        await broker.topics.create("other", 1, {})
        await until(clock, lambda: broker.metrics.verified_bytes > 0)
        await broker.delete_topic(TOPIC)
        await until(clock, lambda: broker.metrics.scrub_rounds == 1)


async def test_a_topic_that_is_deleted_meanwhile_is_not_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = VirtualClock()
    async with running(f"file:{tmp_path}", clock, pace=100) as broker:
        topic = await broker.topics.create(TOPIC, 1, {"segment.bytes": "2000"})
        log = topic.partitions[0].log
        for number in range(20):
            await append(log, batch(b"balance=1000" * 100, b"%d" % number))
        log.damage.add(38, 40, Cause.CHECKSUM, "a place that a verification looks at again")
        await until(clock, lambda: broker.metrics.verified_bytes > 0)
        verification = Verification(broker.topics, broker.metrics)
        await broker.delete_topic(TOPIC)
        await asyncio.sleep(0.05)
        await verification.run()
        assert verification.unread == [] and verification.partitions_done == 1
        await until(clock, lambda: broker.metrics.scrub_rounds == 1)
        assert log.damage.found == 1
    assert "missing segment" not in caplog.text and "scrub cannot read" not in caplog.text


class TestKnownDamage:
    async def test_is_known_right_after_a_restart_and_forgotten_when_it_was_repaired(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        clock, store = VirtualClock(), f"file:{tmp_path}"
        async with running(store, clock, pace=0) as broker:
            await fill(broker)
            damage_files(tmp_path)
            await Verification(broker.topics, broker.metrics).run()
            [(_, _, damaged)] = broker.damage()
        for _ in range(2):
            async with running(store, clock, pace=0) as broker:
                await settle(partial(is_damaged, broker))
                assert [(name, part, each[:3]) for name, part, each in broker.damage()] == [(TOPIC, 1, damaged[:3])]
        damage_files(tmp_path)  # the same bit again
        async with running(store, clock, pace=0) as broker:
            await settle(lambda: broker._scrub._known._stored is not None)
            assert not list(broker.damage())
        caplog.clear()
        async with running(store, clock, pace=0) as broker:
            await settle(lambda: broker._scrub._known._stored == [])
        assert "damaged" not in caplog.text

    async def test_outlives_a_broker_that_is_killed(self, tmp_path: Path) -> None:
        clock, store = VirtualClock(), f"file:{tmp_path}"
        async with running(store, clock, pace=0) as broker:
            await fill(broker)
            damage_files(tmp_path)
            await settle(lambda: broker._scrub._known._stored is not None)
            await Verification(broker.topics, broker.metrics).run()
            await until(clock, lambda: bool(broker._scrub._known._stored))
            broker._scrub._known._stored = None  # nothing is stored at the end
        async with running(store, clock, pace=0) as broker:
            await settle(lambda: list(broker.damage()))

    async def test_of_a_database_heals_too(self, tmp_path: Path) -> None:
        clock, file = VirtualClock(), tmp_path / "store.db"
        async with running(f"sqlite:{file}", clock, pace=0) as broker:
            await fill(broker, partitions=1)
            with sqlite3.connect(file) as database:
                [(row, data)] = database.execute("SELECT rowid, data FROM arrivals ORDER BY rowid LIMIT 1")
                spoilt = data[:-3] + bytes([data[-3] ^ 1]) + data[-2:]
                database.execute("UPDATE arrivals SET data = ? WHERE rowid = ?", (spoilt, row))
            await Verification(broker.topics, broker.metrics).run()
            assert len(list(broker.damage())) == 1
            with sqlite3.connect(file) as database:
                database.execute("UPDATE arrivals SET data = ? WHERE rowid = ?", (data, row))
            await Verification(broker.topics, broker.metrics).run()
            assert not list(broker.damage())

    async def test_that_makes_no_sense_is_forgotten(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        clock, store = VirtualClock(), f"file:{tmp_path}"
        async with running(store, clock, pace=0) as broker:
            await fill(broker)
        with sqlite3.connect(tmp_path / "meta.db") as database:
            key = known_damage.KEY.format(node=broker.node_id)
            database.execute("INSERT INTO meta (key, value, revision) VALUES (?, ?, 1)", (key, b'[["x", 1]]'))
        async with running(store, clock, pace=0) as broker:
            await settle(lambda: broker._scrub._known._stored is not None)
        assert "cannot load known damage" in caplog.text


async def test_a_position_that_makes_no_sense_starts_the_round_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = VirtualClock()
    store = f"file:{tmp_path}"
    async with running(store, clock) as broker:
        await fill(broker)
    with sqlite3.connect(tmp_path / "meta.db") as database:
        database.execute("INSERT INTO meta (key, value, revision) VALUES (?, ?, 1)", (KEY, b"no position"))
    async with running(store, clock) as broker:
        await until(clock, lambda: broker.metrics.scrub_rounds == 1)
    assert "scrub" in caplog.text


async def test_a_verification_reports_its_progress_and_what_it_found(tmp_path: Path) -> None:
    clock = VirtualClock()
    async with running(f"file:{tmp_path}", clock, pace=0) as broker:
        await fill(broker)
        damage_files(tmp_path)
        verification = Verification(broker.topics, broker.metrics)
        assert verification.bytes_total > 0 and verification.bytes_done == 0
        await verification.run()
        assert verification.is_over
        assert verification.bytes_total // 2 < verification.bytes_done < verification.bytes_total  # what is sound
        assert verification.partitions_done == verification.partitions_total == 2
        assert [(topic, partition) for topic, partition, _ in verification.damage()] == [(TOPIC, 1)]
        assert broker.metrics.verified_bytes == verification.bytes_done


async def test_a_partition_that_cannot_be_read_is_named_and_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(f"file:{tmp_path}", VirtualClock(), pace=0) as broker:
        await fill(broker)
        verification = Verification(broker.topics, broker.metrics)
        broken = next(iter(broker.topics)).partitions[0].log
        refusal = RequestError(Code.KAFKA_STORAGE_ERROR, "the disk does not answer")
        real = ReplicaLog.read

        def read(log: ReplicaLog, offset: int, bytes_max: int) -> Promise[Slice]:
            return Promise.failed(refusal) if log is broken else real(log, offset, bytes_max)

        monkeypatch.setattr(ReplicaLog, "read", read)
        await verification.run()
        [sentence] = verification.unread
        assert sentence.startswith(f"{TOPIC}-0 cannot be read") and "the disk does not answer" in sentence
        assert verification.partitions_done == 2 and verification.bytes_done > 0
