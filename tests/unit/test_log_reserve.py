"""Room that is held back for a full disk, and what gets it."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from millstream.core.disk import Disk
from millstream.core.errors import RequestError
from millstream.log.config import LogConfig
from millstream.log.flusher import Flusher
from millstream.log.reserve import RESERVE_BYTES, ReservingDisk
from millstream.stores.base import Delete, Put, Versioned
from millstream.stores.local import LocalLogStore
from millstream.stores.sqlite_meta import SqliteMeta
from millstream.testing.clock import VirtualClock
from tests.batches import append, batch


def no_room(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def open_store(directory: Path) -> LocalLogStore:
    disk = ReservingDisk(str(directory))
    return LocalLogStore(str(directory), VirtualClock(), Flusher(asyncio.get_running_loop()), disk)


def usage(free: int) -> object:
    return lambda path: SimpleNamespace(total=1 << 40, free=free)


async def test_a_store_that_starts_on_a_full_disk_gives_its_reserve_up_and_takes_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve = tmp_path / "reserve"
    store = open_store(tmp_path)
    store.lock()
    store.opened_all()
    assert reserve.stat().st_blocks * 512 >= RESERVE_BYTES
    await store.close()
    assert reserve.exists(), "it is there for the next start"
    monkeypatch.setattr(shutil, "disk_usage", usage(free=0))
    store = open_store(tmp_path)
    store.lock()
    assert not reserve.exists()
    monkeypatch.setattr(os, "posix_fallocate", no_room)
    store.opened_all()
    assert not reserve.exists()
    monkeypatch.undo()
    await store.housekeep()
    assert reserve.exists()
    await store.close()


async def test_as_much_is_held_back_as_there_is_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allocate = os.posix_fallocate

    def little_room(fd: int, start: int, size: int) -> None:
        if size > 300_000:
            no_room()
        allocate(fd, start, size)

    monkeypatch.setattr(os, "posix_fallocate", little_room)
    ReservingDisk(str(tmp_path)).hold_back()
    assert (tmp_path / "reserve").stat().st_size == RESERVE_BYTES // 16


@pytest.mark.parametrize("left_bytes", [0, 8192], ids=["an empty file", "a short one"])
async def test_a_reserve_that_is_too_small_is_enlarged(tmp_path: Path, left_bytes: int) -> None:
    """A process that is killed between making the file and allocating its blocks leaves an empty one."""
    (tmp_path / "reserve").write_bytes(bytes(left_bytes))
    ReservingDisk(str(tmp_path)).hold_back()
    assert (tmp_path / "reserve").stat().st_blocks * 512 >= RESERVE_BYTES


async def test_a_reserve_that_cannot_be_enlarged_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "reserve").write_bytes(bytes(1 << 20))
    monkeypatch.setattr(os, "posix_fallocate", no_room)
    ReservingDisk(str(tmp_path)).hold_back()
    assert (tmp_path / "reserve").stat().st_blocks * 512 >= 1 << 20


class TestACommitThatFindsNoRoom:
    @pytest.fixture
    async def asked(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[bool]]:
        """How often the reserve was asked for, of a disk that is full until then."""
        asked: list[bool] = []

        def ask() -> bool:
            asked.append(True)
            return True

        self.meta = SqliteMeta(str(tmp_path / "meta.db"), ask)
        await self.meta.transact(Put("topics/old", b"1"), Put("offsets/old", b"1"))
        write = self.meta._write_once

        def full(changes: dict[str, Versioned | None], revision: int) -> None:
            if not asked:
                error = sqlite3.OperationalError("database or disk is full")
                error.sqlite_errorname = "SQLITE_FULL"
                raise error
            write(changes, revision)

        monkeypatch.setattr(self.meta, "_write_once", full)
        yield asked
        await self.meta.close()

    async def test_gets_the_reserve_where_it_deletes(self, asked: list[bool]) -> None:
        await self.meta.transact(Delete("topics/old", 1))
        assert asked == [True] and await self.meta.get("topics/old") is None

    async def test_and_does_not_where_it_stores(self, asked: list[bool]) -> None:
        for operations in ([Put("offsets/old", b"2")], [Put("queues/1", b"2"), Delete("offsets/old")]):
            with pytest.raises(RequestError, match="the disk is full"):
                await self.meta.transact(*operations)
        assert not asked


async def test_opening_metadata_writes_nothing(tmp_path: Path) -> None:
    """A full disk has no room for the WAL that a write needs."""
    path = tmp_path / "meta.db"
    meta = SqliteMeta(str(path))
    await meta.transact(Put("a", b"1"))
    await meta.close()
    meta = SqliteMeta(str(path))
    assert os.stat(f"{path}-wal").st_size == 0
    assert (await meta.get("a")) is not None
    await meta.close()


async def test_a_trim_that_finds_no_room_gets_the_reserve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    store.lock()
    log = store.open("t", "0123456789abcdef", 0, LogConfig(segment_bytes=1))
    store.opened_all()
    for value in (b"1", b"2", b"3"):
        await append(log, batch(value))
    write = Disk.append

    def full(disk: Disk, *arguments: object) -> None:
        if (tmp_path / "reserve").exists():
            no_room()
        write(disk, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Disk, "append", full)
    assert await log.trim(2) == 2
    assert not (tmp_path / "reserve").exists() and log.failure is None
    await store.close()
