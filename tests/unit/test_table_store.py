"""How a store over a database handles notifications: lost ones, and those that arrive as a watch begins."""

from __future__ import annotations

import asyncio
import sqlite3
import struct
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from millstream.core.errors import Code, RequestError, RevisionConflict
from millstream.core.promise import begin
from millstream.log.config import LogConfig
from millstream.log.damage import DamagedOffset
from millstream.records import codec
from millstream.records.batch import read_header
from millstream.stores import table_log, table_store
from millstream.stores.base import Operation, PartitionLog, Put, Versioned
from millstream.stores.database import Changes, Database, LogState
from millstream.stores.table_log import TableLog
from millstream.stores.table_meta import TableMeta
from millstream.stores.table_store import TableLogStore
from millstream.stores.url import open_store
from millstream.testing.clock import VirtualClock
from tests.batches import fill


class Figures(Database):
    """A database of one log, which others append to: its end is what a test says."""

    location = "nowhere"
    failure = None

    def __init__(self) -> None:
        self.end = 0
        self.gate: asyncio.Event | None = None
        """Until it is set the revision is not told."""
        self.opening: asyncio.Event | None = None
        """Until it is set, the database does not return the states of a log that is being opened."""
        self.asked = asyncio.Event()
        self.mistakes = 0

    def listen(self, *_: object) -> None:
        return None

    async def open_logs(self, topic_id: str, partitions: int) -> list[LogState]:
        state = self._state()
        if self.opening is not None:
            await self.opening.wait()
        return [state]

    async def states(self, log_ids: Sequence[int]) -> list[LogState]:
        if self.mistakes:
            self.mistakes -= 1
            raise ValueError("a mistake of ours")
        return [self._state()] if 1 in log_ids else []

    def _state(self) -> LogState:
        return LogState(1, self.end, 0, self.end, 0)

    async def revision(self) -> int:
        self.asked.set()
        if self.gate is not None:
            await self.gate.wait()
        return 0


@pytest.fixture
def database() -> Figures:
    return Figures()  # type: ignore[abstract]  # has what is asked here


@pytest.fixture
def store(database: Figures) -> TableLogStore:
    return TableLogStore(database, VirtualClock())


@pytest.fixture
async def log(store: TableLogStore) -> TableLog:
    await store.prepare("id", 1)
    return store.open("t", "id", 0, LogConfig())


async def grown(log: TableLog, end: int) -> None:
    event = asyncio.Event()
    log.wake(event.set)
    async with asyncio.timeout(10):
        while log.high_watermark < end:
            await event.wait()
            event.clear()


async def test_news_that_are_lost_while_it_catches_up_are_asked_for_again(
    store: TableLogStore, log: TableLog, database: Figures
) -> None:
    database.gate = asyncio.Event()
    store._lost()
    await database.asked.wait()
    database.end = 5  # after the states were read, without a notification
    store._lost()
    database.gate.set()
    await grown(log, 5)


async def test_a_mistake_while_it_catches_up_is_not_the_end(
    store: TableLogStore, log: TableLog, database: Figures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_store, "RETRY_SECONDS", 0)
    database.mistakes, database.end = 2, 5
    store._lost()
    await grown(log, 5)
    database.end = 7
    store._lost()
    await grown(log, 7)


async def test_news_that_are_lost_while_a_log_is_prepared_are_asked_for_again(
    store: TableLogStore, database: Figures
) -> None:
    database.opening = asyncio.Event()
    preparing = begin(store._prepare("id", 1))
    database.end = 5  # after the state was read, without a notification
    store._lost()
    await database.asked.wait()
    database.opening.set()
    await preparing
    assert store.open("t", "id", 0, LogConfig()).high_watermark == 5


async def test_news_that_are_lost_between_preparing_a_log_and_opening_it_are_asked_for_again(
    store: TableLogStore, database: Figures
) -> None:
    await store.prepare("id", 1)
    database.end = 5
    store._lost()
    await database.asked.wait()
    assert store.open("t", "id", 0, LogConfig()).high_watermark == 5


class Busy(Database):
    """While it is asked for something, others begin to watch."""

    def __init__(self) -> None:
        self.meta = TableMeta(self)
        self.seen: list[str] = []
        self.coming = ["a/", "b/", "c/"]

    async def list_keys(self, prefix: str) -> list[tuple[str, Versioned]]:
        return []

    async def revision(self) -> int:
        return 0

    async def transact(
        self, transactions: Sequence[Sequence[Operation]], since: int, prefixes: Sequence[str]
    ) -> tuple[list[int | RevisionConflict], Changes]:
        return [1], self._changes(prefixes)

    async def changes(self, since: int, prefixes: Sequence[str]) -> Changes:
        return self._changes(prefixes)

    def _changes(self, prefixes: Sequence[str]) -> Changes:
        if self.coming:
            self.meta.watch(self.coming.pop(0), lambda key, value: self.seen.append(key))
        return Changes(1, True, [(f"{prefix}key", Versioned(b"", 1), 1) for prefix in prefixes])


async def test_who_begins_to_watch_while_a_transaction_is_told_hears_of_it() -> None:
    database = Busy()  # type: ignore[abstract]  # has what is asked here
    await database.meta.transact(Put("a/key", b""), Put("b/key", b""), Put("c/key", b""))
    assert database.seen == ["a/key", "b/key", "c/key"]


class Amnesiac(Database):
    """It has forgotten deletions; a watch of `b/` begins while it lists the keys under `a/`."""

    def __init__(self) -> None:
        self.meta = TableMeta(self)
        self.heard: list[str] = []
        self.is_compared = False
        self.listed = asyncio.Event()

    async def revision(self) -> int:
        self.is_compared = True
        return 5

    async def transact(
        self, transactions: Sequence[Sequence[Operation]], since: int, prefixes: Sequence[str]
    ) -> tuple[list[int | RevisionConflict], Changes]:
        return [5], Changes(5, False, [])

    async def list_keys(self, prefix: str) -> list[tuple[str, Versioned]]:
        if prefix == "b/":
            self.listed.set()
            return [("b/key", Versioned(b"", 3))]
        if self.is_compared:
            self.meta.watch("b/", lambda key, value: self.heard.append(key))
            await self.listed.wait()
        return []


async def test_who_begins_to_watch_while_all_is_compared_hears_of_no_end_that_was_none() -> None:
    database = Amnesiac()  # type: ignore[abstract]  # it is asked for no more than that
    database.meta.watch("a/", lambda key, value: None)
    await database.meta.transact(Put("a/key", b""))
    assert database.listed.is_set() and database.heard == []


class Away(Amnesiac):
    """It answers nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    async def transact(self, *_: object) -> tuple[list[int | RevisionConflict], Changes]:
        raise RequestError(Code.KAFKA_STORAGE_ERROR, "the database cannot be reached")

    async def changes(self, since: int, prefixes: Sequence[str]) -> Changes:
        self.asked += 1
        raise RequestError(Code.KAFKA_STORAGE_ERROR, "the database cannot be reached")

    async def list_keys(self, prefix: str) -> list[tuple[str, Versioned]]:
        return []


async def test_writes_that_fail_while_the_database_is_away_begin_no_further_looks_for_changes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    database = Away()  # type: ignore[abstract]  # it is asked for no more than that
    database.meta.watch("a/", lambda key, value: None)
    database.meta.news(5)
    for _ in range(40):
        with pytest.raises(RequestError):
            await database.meta.transact(Put("a/key", b""))
        await asyncio.sleep(0)
    assert database.asked == 1 and len(caplog.records) == 1
    database.meta.news(6)  # from the database itself: it is back
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert database.asked == 2


class TestStoredRowsThatChanged:
    """Rows of a real database, whose bytes no longer are the batches that were appended."""

    @pytest.fixture
    async def log(self, tmp_path: Path) -> AsyncIterator[PartitionLog]:
        logs, meta = open_store(f"sqlite:{tmp_path / 'store.db'}", VirtualClock(), lambda seconds: None)
        await logs.start()
        await meta.start()
        await logs.prepare("0123456789abcdef", 1)
        log = logs.open("orders", "0123456789abcdef", 0, LogConfig())
        await fill(log, 9)
        yield log
        await logs.close()
        await meta.close()

    def renumber(self, tmp_path: Path, offset: int, by: int) -> None:
        """The checksum does not cover the base offset."""
        with sqlite3.connect(tmp_path / "store.db") as database:
            [(row, data)] = [
                (row, data)
                for row, data in database.execute("SELECT rowid, data FROM arrivals")
                if read_header(data).base_offset == offset
            ]
            changed = struct.pack(">q", offset + by) + data[8:]
            database.execute("UPDATE arrivals SET data = ? WHERE rowid = ?", (changed, row))

    @pytest.mark.parametrize("by", [-1, 1], ids=["too low", "too high"])
    @pytest.mark.parametrize("asked", [0, 4], ids=["behind others", "first"])
    async def test_a_base_offset_that_is_wrong_is_damage_of_its_batch(
        self, log: PartitionLog, tmp_path: Path, by: int, asked: int
    ) -> None:
        self.renumber(tmp_path, 4, by)
        if asked < 4:
            assert (await log.read(asked, 1 << 20)).next_offset == 4
        with pytest.raises(DamagedOffset, match="the next offset to read is 5"):
            await log.read(4, 1 << 20)
        assert (await log.read(5, 1 << 20)).next_offset == 9
        assert [(each.first, each.end) for each in log.damage.ranges] == [(4, 5)]

    async def test_a_large_read_is_checked_in_a_thread(
        self, log: PartitionLog, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        threads = []
        real = codec.sound_bytes

        def check(data: bytes, first: int, behind: int, asked: int = -1, *, dense: bool) -> int:
            threads.append((len(data) > table_log.CHECK_BYTES_MAX, threading.get_ident()))
            return real(data, first, behind, asked, dense=dense)

        monkeypatch.setattr(codec, "sound_bytes", check)
        await log.read(0, 1 << 20)
        monkeypatch.setattr(table_log, "CHECK_BYTES_MAX", 1000)
        assert (await log.read(0, 1 << 20)).next_offset == 9
        assert [is_large for is_large, _ in threads] == [False, True]
        assert threads[0][1] == threading.get_ident() != threads[1][1]
