"""A directory that stores are opened on, one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from millstream.core.disk import Disk
from millstream.log.config import LogConfig
from millstream.log.flusher import Flusher
from millstream.log.replica import ReplicaLog
from millstream.log.segment import Segment
from millstream.stores.local import LocalLogStore
from millstream.testing.clock import VirtualClock

TOPIC, TOPIC_ID = "orders", "0123456789abcdef"
SMALL = LogConfig(segment_bytes=20_000, index_interval_bytes=200, retention_ms=-1)


class StoreDirectory:
    """A directory that stores are opened on, one after the other."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.clock = VirtualClock()
        self.disk = Disk()
        self.store: LocalLogStore | None = None

    def open(self, config: LogConfig = SMALL) -> ReplicaLog:
        self.store = LocalLogStore(str(self.directory), self.clock, Flusher(asyncio.get_running_loop()), self.disk)
        self.store.lock()
        log = open_log(self.store, TOPIC, TOPIC_ID, 0, config)
        self.store.opened_all()
        return log

    async def close(self) -> None:
        if self.store is not None:
            await self.store.close()
            self.store = None

    def kill(self) -> None:
        """The process died without closing anything; the next one finds only that the lock is free."""
        assert self.store is not None and self.store._lock is not None
        self.store._lock.release()
        self.store = None

    async def reopen(self, config: LogConfig = SMALL) -> ReplicaLog:
        await self.close()
        return self.open(config)

    @property
    def partition(self) -> Path:
        return self.directory / "logs" / "orders-01234567" / "0"

    def set_aside(self) -> dict[str, bytes]:
        directory = self.directory / "set-aside"
        return {path.name: path.read_bytes() for path in directory.iterdir()} if directory.exists() else {}


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[StoreDirectory]:
    place = StoreDirectory(tmp_path / "data")
    yield place
    await place.close()


def open_log(store: LocalLogStore, topic: str, topic_id: str, partition: int, config: LogConfig) -> ReplicaLog:
    """Its directory is there."""
    log = store.open(topic, topic_id, partition, config)
    assert isinstance(log, ReplicaLog)
    return log


def position_of(segment: Segment, offset: int) -> int:
    found = segment.locate(offset, segment.size)
    assert found is not None
    return found[0]
