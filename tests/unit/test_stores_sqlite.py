"""An SQLite file from inside: the chapters of its index, a file of the schema before, and moving the WAL meanwhile."""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
import sqlite3
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from millstream.core.errors import RequestError, StartupError
from millstream.log.config import LogConfig
from millstream.records import codec
from millstream.records.batch import patch_offset, read_header
from millstream.stores import sqlite_checkpoints, sqlite_writer
from millstream.stores.base import Put
from millstream.stores.sqlite import SqliteDatabase
from millstream.stores.table_log import TableLog
from millstream.stores.table_store import TableLogStore
from millstream.testing.clock import VirtualClock
from tests.batches import append, batch, fill, read_back

TOPIC_ID = "0123456789abcdef0123456789abcdef"
OLD_SCHEMA = Path(__file__).with_name("sqlite_schema_1.sql")


class Opened:
    """The logs of one topic, and a look at the tables behind them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.database = SqliteDatabase(str(path))
        self.store = TableLogStore(self.database, VirtualClock())

    async def logs(self, partitions: int) -> list[TableLog]:
        await self.store.start()
        await self.store.prepare(TOPIC_ID, partitions)
        return [self.store.open("orders", TOPIC_ID, index, LogConfig()) for index in range(partitions)]

    def ask(self, sql: str) -> list[tuple[Any, ...]]:
        connection = sqlite3.connect(self.path)
        try:
            return connection.execute(sql).fetchall()
        finally:
            connection.close()

    def chapters_are_those_with_batches(self) -> bool:
        told = self.ask("SELECT log_id, chapter FROM chapters ORDER BY 1, 2")
        return told == self.ask("SELECT DISTINCT log_id, chapter FROM arrivals ORDER BY 1, 2")


@pytest.fixture
async def opened(tmp_path: Path) -> AsyncIterator[Opened]:
    opened = Opened(tmp_path / "store.db")
    yield opened
    await opened.store.close()


async def values(log: TableLog) -> list[bytes | None]:
    return [record.value for record in await read_back(log)]


async def test_a_transaction_over_many_logs_writes_a_few_neighbouring_pages(opened: Opened) -> None:
    logs = await opened.logs(16)
    await asyncio.gather(*(fill(log, 250, size=1) for log in logs))
    frames = "PRAGMA wal_checkpoint"
    [(_, before, _)] = opened.ask(frames)
    await asyncio.gather(*(append(log, batch(b"one more")) for log in logs))
    [(_, after, _)] = opened.ask(frames)
    assert 0 < (after - before if after > before else after) <= 8


class TestChapters:
    @pytest.fixture(autouse=True)
    def short_chapters(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sqlite_writer, "CHAPTER_ROWS", 4)

    async def test_what_is_put_into_many_logs_in_turns_comes_out_of_each_in_order(self, opened: Opened) -> None:
        logs = await opened.logs(5)
        for number in range(30):
            await asyncio.gather(*(append(log, batch(b"%d" % number)) for log in logs))
        for log in logs:
            assert await values(log) == [b"%d" % number for number in range(30)]
            assert [(await log.read(offset, 1)).next_offset for offset in range(30)] == list(range(1, 31))
        assert opened.chapters_are_those_with_batches()

    async def test_chapters_go_with_the_last_of_their_batches(self, opened: Opened) -> None:
        first, second = await opened.logs(2)
        for number in range(10):
            await append(first, batch(b"%d" % number))
            await append(second, batch(b"%d" % number))
        assert await first.trim(7) == 7
        assert opened.chapters_are_those_with_batches()
        assert await second.truncate(4) == 4
        assert opened.chapters_are_those_with_batches()
        assert await values(first) == [b"7", b"8", b"9"] and await values(second) == [b"0", b"1", b"2", b"3"]

    async def test_a_chapter_that_was_trimmed_in_front_and_cut_behind_is_gone(self, opened: Opened) -> None:
        (log,) = await opened.logs(1)
        await fill(log, 3)
        await log.trim(1)
        await log.truncate(1)
        assert opened.ask("SELECT count(*) FROM chapters") == [(0,)]
        await append(log, batch(b"anew"))
        assert await values(log) == [b"anew"]

    async def test_numbers_of_chapters_that_come_again_do_not_mix_old_and_new(self, opened: Opened) -> None:
        (log,) = await opened.logs(1)
        for round_ in range(3):
            await fill(log, 10)
            await log.trim(log.end)  # the file has no batch at all now, and counts from one again
            opened.database._writer._forget()  # type: ignore[union-attr]  # as after a restart
            sent = [b"%d %d" % (round_, number) for number in range(9)]
            for value in sent:
                await append(log, batch(value))
            assert await values(log) == sent
            await log.trim(log.end)

    async def test_any_mix_of_appends_trims_cuts_and_restarts_reads_as_a_list_would(self, opened: Opened) -> None:
        chance = random.Random(7)
        logs = await opened.logs(3)
        expected: list[list[bytes]] = [[], [], []]
        starts = [0, 0, 0]
        for step in range(250):
            which = chance.randrange(3)
            log, known = logs[which], expected[which]
            match chance.choice(["append"] * 6 + ["trim", "cut", "restart"]):
                case "append":
                    known.append(b"%d" % step)
                    assert (await append(log, batch(known[-1]))).base_offset == len(known) - 1
                case "trim":
                    starts[which] = chance.randint(starts[which], len(known))
                    await log.trim(starts[which])
                case "cut":
                    end = chance.randint(max(starts[which], len(known) - 3), len(known))
                    await log.truncate(end)
                    del known[end:]
                case "restart":
                    opened.database._writer._forget()  # type: ignore[union-attr]
            assert await values(log) == known[starts[which] :]
        assert opened.chapters_are_those_with_batches()


class TestTheSchemaBefore:
    def write(self, path: Path, values: Sequence[bytes]) -> None:
        """A file as schema 1 had it, with two logs of the same records."""
        old = sqlite3.connect(path)
        old.executescript(OLD_SCHEMA.read_text())
        old.execute("PRAGMA application_id=0x4D494C4C")
        old.execute("PRAGMA user_version=1")
        old.execute("PRAGMA journal_mode=WAL")
        for partition in range(2):
            old.execute(
                "INSERT INTO logs (topic_id, partition, end_offset, version) VALUES (?, ?, ?, 1)",
                (TOPIC_ID, partition, len(values)),
            )
        for offset, value in enumerate(values):
            data = codec.encode([(offset, 1_000 + offset, None, value)])
            header = read_header(data)
            patch_offset(data, offset, header.length, 0)
            row = offset, offset, header.max_timestamp, len(data), data
            for log_id in (1, 2):
                old.execute("INSERT INTO batches VALUES (?, ?, ?, ?, ?, ?)", (log_id, *row))
        old.commit()
        old.close()

    async def test_its_records_stay_and_new_ones_follow_them(self, tmp_path: Path) -> None:
        stored = [b"old %d" % number for number in range(600)]
        self.write(tmp_path / "store.db", stored)
        opened = Opened(tmp_path / "store.db")
        first, second = await opened.logs(2)
        assert await values(first) == stored
        assert (await append(first, batch(b"new"))).base_offset == 600
        assert await values(first) == [*stored, b"new"] and await values(second) == stored
        found = await first.find_time(1_300)
        assert found is not None and found.offset == 300
        await first.trim(600)
        assert await values(first) == [b"new"] and opened.chapters_are_those_with_batches()
        assert opened.ask("PRAGMA user_version") == [(2,)] and opened.ask("PRAGMA integrity_check") == [("ok",)]
        await opened.store.close()
        again = Opened(tmp_path / "store.db")
        first, second = await again.logs(2)
        assert await values(first) == [b"new"] and await values(second) == stored
        await again.store.close()

    async def test_a_process_that_knows_only_it_cannot_write_in_between(self, tmp_path: Path) -> None:
        self.write(tmp_path / "store.db", [b"old"])
        before = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
        opened = Opened(tmp_path / "store.db")
        (log,) = await opened.logs(1)
        with pytest.raises(sqlite3.OperationalError, match="it is a view"):
            before.execute("INSERT INTO batches VALUES (1, 1, 1, 0, 1, x'00')")
        assert await values(log) == [b"old"]
        before.close()
        await opened.store.close()


class TestCheckpoints:
    @pytest.fixture(autouse=True)
    def short_wal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sqlite_checkpoints, "WAL_BYTES", 1 << 20)

    def wal_bytes(self, opened: Opened) -> int:
        return os.path.getsize(f"{opened.path}-wal")

    async def write(self, log: TableLog, megabytes: int) -> None:
        for _ in range(megabytes * 16):
            await append(log, batch(os.urandom(64 << 10)))

    async def hold_one(self, opened: Opened, log: TableLog, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
        """Has a checkpoint begin, and stop until it may go on."""
        checkpoints = opened.database._checkpoints
        move, begun, go_on = checkpoints._move, threading.Event(), threading.Event()

        def wait() -> int:
            begun.set()
            go_on.wait(10)
            return move()

        monkeypatch.setattr(checkpoints, "_move", wait)
        while checkpoints._running.done:
            await append(log, batch(os.urandom(64 << 10)))
        assert await asyncio.to_thread(begun.wait, 10)
        return go_on

    async def test_the_wal_begins_anew_while_batches_are_written_and_read(self, opened: Opened) -> None:
        (log,) = await opened.logs(1)
        await self.write(log, 4)
        reading = asyncio.create_task(self.write(log, 20))
        while not reading.done():
            await log.read(0, 1 << 20)
        await reading
        assert self.wal_bytes(opened) < 12 << 20, "of 24 MB that went through it"
        assert len(await read_back(log)) == 24 * 16

    async def test_it_begins_anew_too_where_many_pages_change_and_few_bytes(self, opened: Opened) -> None:
        logs = await opened.logs(200)
        for _ in range(60):
            await asyncio.gather(*(append(log, batch(bytes(300))) for log in logs))
        for log in logs:
            await log.trim(50)
        keys = [f"offsets/{number:05}" for number in range(5_000)]
        for number in range(60):
            some = random.Random(number).sample(keys, 400)
            await opened.database.transact([[Put(key, bytes(100))] for key in some], 0, [])
        assert self.wal_bytes(opened) < 24 << 20

    async def test_a_close_that_is_given_up_closes_all_the_same(
        self, opened: Opened, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (log,) = await opened.logs(1)
        go_on = await self.hold_one(opened, log, monkeypatch)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(opened.database.close(), 0.05)
        go_on.set()
        async with asyncio.timeout(10):
            while os.path.exists(f"{opened.path}-wal"):  # noqa: ASYNC110  (the last connection removes it)
                await asyncio.sleep(0.01)

    async def test_one_that_fails_as_nobody_thought_of_does_not_keep_it_open(
        self, opened: Opened, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (log,) = await opened.logs(1)
        monkeypatch.setattr(opened.database._checkpoints, "_move", lambda: 1 // 0)
        await self.write(log, 4)
        await opened.store.close()
        assert not os.path.exists(f"{opened.path}-wal")

    async def test_a_reader_that_stays_holds_nobody_up_and_the_wal_begins_anew_when_it_is_gone(
        self, opened: Opened
    ) -> None:
        (log,) = await opened.logs(1)
        await self.write(log, 1)
        other = sqlite3.connect(opened.path, isolation_level=None)
        other.execute("BEGIN")
        other.execute("SELECT count(*) FROM arrivals").fetchone()
        await self.write(log, 6)
        grown = self.wal_bytes(opened)
        assert grown > 5 << 20, "what the reader may still want to see"
        other.execute("COMMIT")
        other.close()
        await self.write(log, 16)
        assert self.wal_bytes(opened) < grown + (6 << 20)

    async def test_one_that_fails_on_the_disk_is_final(
        self, opened: Opened, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        (log,) = await opened.logs(1)

        def fail() -> None:
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorname = "SQLITE_IOERR_FSYNC"
            raise error

        monkeypatch.setattr(opened.database._checkpoints, "_move", fail)
        with pytest.raises(RequestError, match="read-only"):
            await self.write(log, 8)
        assert log.failure == "disk I/O error" and "is read-only until a restart" in caplog.text
        end = log.end
        assert len(await read_back(log)) == end > 0, "what is there can still be read"
        await opened.store.close()
        assert self.wal_bytes(opened) > 0, "what the file may lack is still there for the next process"

    async def test_one_that_finds_the_disk_full_is_tried_again(
        self, opened: Opened, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        (log,) = await opened.logs(1)
        move, full = opened.database._checkpoints._move, 0

        def fail() -> int:
            nonlocal full
            full += 1
            if full > 3:
                return move()
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorname = "SQLITE_FULL"
            raise error

        monkeypatch.setattr(opened.database._checkpoints, "_move", fail)
        await self.write(log, 24)
        assert full > 3 and log.failure is None
        assert "checkpoint of the WAL failed; retrying later" in caplog.text and "the disk is full" in caplog.text
        assert self.wal_bytes(opened) < 20 << 20

    async def test_each_begins_after_a_commit_that_none_has_moved(self, opened: Opened) -> None:
        """Else SQLite before 3.51.3 may take frames for moved that are not."""
        (log,) = await opened.logs(1)
        await self.write(log, 8)
        await opened.database._checkpoints._running
        [(touched,)] = opened.ask("SELECT times FROM touched")
        assert touched >= 4 and touched % 2 == 0, "before the one beside, and before the writer's"

    async def test_one_process_makes_one_at_a_time(self, opened: Opened) -> None:
        (log,) = await opened.logs(1)
        directory = os.open(opened.path.parent, os.O_RDONLY)
        fcntl.flock(directory, fcntl.LOCK_EX)  # as another process does
        await self.write(log, 4)
        assert opened.ask("SELECT times FROM touched") == [(0,)]
        os.close(directory)
        await self.write(log, 4)
        await opened.database._checkpoints._running
        assert opened.ask("SELECT times FROM touched") > [(0,)]

    async def test_what_others_left_in_the_wal_is_moved_by_whoever_opens_the_file_next(self, opened: Opened) -> None:
        (log,) = await opened.logs(1)  # stays open, and so does the WAL
        for _ in range(30):
            short = Opened(opened.path)
            (theirs,) = await short.logs(1)
            for _ in range(8):
                await append(theirs, batch(os.urandom(64 << 10)))
            await short.store.close()
        assert self.wal_bytes(opened) < 8 << 20, "of 15 MB, half a megabyte each"
        await log.refresh()
        assert len(await read_back(log)) == 240

    async def test_the_lock_is_held_for_as_long_as_one_runs_whoever_is_cancelled(
        self, opened: Opened, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (log,) = await opened.logs(1)
        go_on = await self.hold_one(opened, log, monkeypatch)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()  # as a loop does that ends
        await asyncio.sleep(0)
        directory = os.open(opened.path.parent, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        go_on.set()
        await opened.store.close()
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(directory)

    async def test_it_is_one_lock_by_whichever_name_the_file_is_opened(self, opened: Opened, tmp_path: Path) -> None:
        await opened.logs(1)
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere" / "link.db").symlink_to(opened.path)
        linked = Opened(tmp_path / "elsewhere" / "link.db")
        await linked.logs(1)
        place = linked.database._checkpoints._directory
        assert os.path.samestat(os.fstat(place), os.stat(tmp_path))
        await linked.store.close()

    async def test_a_directory_that_cannot_be_read_is_refused_with_a_sentence(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: object) -> int:
            raise PermissionError(13, "Permission denied", str(tmp_path))

        monkeypatch.setattr(os, "open", refuse)
        opened = Opened(tmp_path / "store.db")
        for _ in range(2):
            with pytest.raises(StartupError, match=r"store\.db cannot be opened as a store: .*Permission denied"):
                await opened.store.start()
        await opened.database.close()

    async def test_closing_in_the_middle_of_one_loses_nothing(self, tmp_path: Path) -> None:
        opened = Opened(tmp_path / "store.db")
        (log,) = await opened.logs(1)
        while opened.database._checkpoints._running.done:
            await append(log, batch(os.urandom(64 << 10)))
        end = log.end
        await opened.store.close()
        again = Opened(tmp_path / "store.db")
        (log,) = await again.logs(1)
        assert log.end == end and len(await read_back(log)) == end
        await again.store.close()
