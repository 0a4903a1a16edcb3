"""The drivers that pass the contract suites. A new driver is one more line in `DRIVERS`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import psycopg
import pytest

from millstream.log.config import LogConfig
from millstream.log.flusher import Flusher
from millstream.stores.base import LogStore, MetaStore, PartitionLog
from millstream.stores.keys import MemoryMeta
from millstream.stores.local import LocalLogStore
from millstream.stores.memory import MemoryLogStore
from millstream.stores.postgres import PostgresDatabase
from millstream.stores.sqlite import SqliteDatabase
from millstream.stores.sqlite_meta import SqliteMeta
from millstream.stores.table_store import TableLogStore
from millstream.stores.url import open_meta
from millstream.testing.clock import VirtualClock
from tests.postgres import postgres as postgres

TOPIC, TOPIC_ID = "orders", "8c1f0e6a5d7b4f2e9a3c1b0d2e4f6a8c"


class Driver:
    """One kind of store over one place: opened, closed and opened again."""

    persists = True
    has_segments = False
    compacts = False

    def __init__(self, place: Path, clock: VirtualClock) -> None:
        self.place = place
        self.clock = clock
        self._logs: LogStore | None = None
        self._meta: MetaStore | None = None
        self.killed: list[LogStore] = []

    @property
    def logs(self) -> LogStore:
        assert self._logs is not None
        return self._logs

    @property
    def meta(self) -> MetaStore:
        assert self._meta is not None
        return self._meta

    def written_now(self) -> None:
        """Files were written by the machine's clock; the test's says another time."""
        for path in self.place.rglob("*.log"):
            if path.stat().st_mtime > self.clock.now_ms() / 1000 + 1e6:
                os.utime(path, (self.clock.now_ms() / 1000,) * 2)

    def make_logs(self) -> LogStore:
        raise NotImplementedError

    def make_meta(self) -> MetaStore:
        raise NotImplementedError

    async def open(self, config: LogConfig | None = None, partition: int = 0) -> PartitionLog:
        return await self.open_topic(TOPIC, TOPIC_ID, partition, config)

    async def open_topic(
        self, topic: str, topic_id: str, partition: int = 0, config: LogConfig | None = None
    ) -> PartitionLog:
        if self._logs is None:
            self._logs = self.make_logs()
            await self._logs.start()
        await self.logs.prepare(topic_id, partition + 1)
        return self.logs.open(topic, topic_id, partition, config or LogConfig())

    async def open_meta(self) -> MetaStore:
        self._meta = self.make_meta()
        await self._meta.start()
        return self._meta

    async def reopen(self, config: LogConfig | None = None) -> PartitionLog:
        """After a clean shutdown."""
        await self.close()
        return await self.open(config)

    async def reopen_after_kill(self, config: LogConfig | None = None) -> PartitionLog:
        """As after `kill -9`: nothing was closed, and the operating system still has every page."""
        if self._logs is not None:
            self.killed.append(self._logs)
        self._logs = None
        return await self.open(config)

    async def close(self) -> None:
        if self._logs is not None:
            await self._logs.close()
        if self._meta is not None:
            await self._meta.close()
        self._logs = self._meta = None

    async def bury(self) -> None:
        """Ends what a killed process would have taken along: threads and connections."""


class MemoryDriver(Driver):
    persists = False

    def make_logs(self) -> LogStore:
        return MemoryLogStore(self.clock)

    def make_meta(self) -> MetaStore:
        return MemoryMeta()


class FileDriver(Driver):
    has_segments = True
    compacts = True

    def make_logs(self) -> LogStore:
        os.makedirs(self.place, exist_ok=True)
        return LocalLogStore(str(self.place), self.clock, Flusher(asyncio.get_running_loop()))

    def make_meta(self) -> MetaStore:
        os.makedirs(self.place, exist_ok=True)
        return SqliteMeta(str(self.place / "meta.db"))


class SqliteDriver(Driver):
    def make_logs(self) -> LogStore:
        return TableLogStore(SqliteDatabase(str(self.place)), self.clock)

    def make_meta(self) -> MetaStore:
        return TableLogStore(SqliteDatabase(str(self.place)), self.clock).meta

    async def bury(self) -> None:
        for store in self.killed:
            await store.close()


class PostgresDriver(SqliteDriver):
    """One database for all tests of a process, emptied for each."""

    def __init__(self, place: Path, clock: VirtualClock, url: str) -> None:
        super().__init__(place, clock)
        self.url = url
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("DROP SCHEMA IF EXISTS millstream CASCADE")

    def make_logs(self) -> LogStore:
        return TableLogStore(PostgresDatabase(self.url), self.clock)

    def make_meta(self) -> MetaStore:
        return TableLogStore(PostgresDatabase(self.url), self.clock).meta


class PairDriver(FileDriver):
    """Logs in files, metadata in a database."""

    def make_logs(self) -> LogStore:
        os.makedirs(self.place, exist_ok=True)
        return LocalLogStore(str(self.place), self.clock, Flusher(asyncio.get_running_loop()), has_meta=False)

    def make_meta(self) -> MetaStore:
        return open_meta(f"sqlite:{self.place}.db")


DRIVERS = {"sqlite": SqliteDriver, "memory": MemoryDriver, "file": FileDriver, "pair": PairDriver}


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture(params=[*DRIVERS, "postgresql"])
async def driver(request: pytest.FixtureRequest, tmp_path: Path, clock: VirtualClock) -> AsyncIterator[Driver]:
    driver: Driver
    if request.param == "postgresql":
        driver = PostgresDriver(tmp_path, clock, request.getfixturevalue("postgres").url)
    else:
        driver = DRIVERS[request.param](tmp_path / "store", clock)
    yield driver
    await driver.close()
    await driver.bury()


@pytest.fixture
def open_log(driver: Driver) -> Callable[..., Awaitable[PartitionLog]]:
    """Opens partition 0 with the given settings."""
    return lambda **settings: driver.open(LogConfig(**settings))


@pytest.fixture
def persistent(driver: Driver) -> Driver:
    if not driver.persists:
        pytest.skip("nothing outlives this store")
    return driver


@pytest.fixture
async def meta(driver: Driver) -> MetaStore:
    return await driver.open_meta()
