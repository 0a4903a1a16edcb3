"""The metadata store on SQLite, where the contract suite does not reach: failing disks and foreign files."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest

from millstream.core.errors import Code, RequestError, StartupError
from millstream.stores.base import Put, Versioned
from millstream.stores.sqlite_meta import SqliteMeta
from tests.stores import stored


async def test_a_failed_commit_is_final_and_reads_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    meta = SqliteMeta(str(tmp_path / "meta.db"))
    await meta.transact(Put("a", b"1"))

    def fail(*_: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(meta, "_write", fail)
    promises = [meta.transact(Put("a", b"2"))]
    await asyncio.sleep(0)
    promises.append(meta.transact(Put("b", b"3")))
    for outcome in await asyncio.gather(*promises, return_exceptions=True):
        assert isinstance(outcome, RequestError) and outcome.code is Code.KAFKA_STORAGE_ERROR
    monkeypatch.undo()
    with pytest.raises(RequestError, match="read-only: disk I/O error"):
        await meta.transact(Put("c", b"4"))
    assert (await stored(meta, "a")).value == b"1"
    assert "is read-only until the broker restarts" in caplog.text
    await meta.close()
    again = SqliteMeta(str(tmp_path / "meta.db"))
    assert [key for key, _ in await again.list("")] == ["a"]
    await again.close()


async def test_a_full_disk_costs_what_it_has_no_room_for_and_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    meta = SqliteMeta(str(tmp_path / "meta.db"))
    await meta.transact(Put("a", b"1"))
    (pages,) = meta._database.execute("PRAGMA page_count").fetchone()
    meta._database.execute(f"PRAGMA max_page_count={pages}")  # what SQLite says then is what it says of a full disk
    large = bytes(100_000)
    promises = [meta.transact(Put("a", large)), meta.transact(Put("a", b"2", if_revision=1))]
    for outcome in await asyncio.gather(*promises, return_exceptions=True):
        assert isinstance(outcome, RequestError) and outcome.code is Code.KAFKA_STORAGE_ERROR
        assert "the disk is full" in outcome.detail
    assert meta.failure is None and "until the broker restarts" not in caplog.text
    assert (await stored(meta, "a")).value == b"1"
    meta._database.execute("PRAGMA max_page_count=1000000")
    assert await meta.transact(Put("a", large, if_revision=1)) == 2
    await meta.close()
    again = SqliteMeta(str(tmp_path / "meta.db"))
    assert (await stored(again, "a")).value == large
    await again.close()


async def test_what_is_not_committed_cannot_be_read(tmp_path: Path) -> None:
    meta = SqliteMeta(str(tmp_path / "meta.db"))
    promise = meta.transact(Put("a", b"1"))
    assert (await meta.get("a")) is None
    await promise
    assert (await stored(meta, "a")).value == b"1"
    await meta.close()


async def test_what_arrives_together_is_committed_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meta = SqliteMeta(str(tmp_path / "meta.db"))
    sizes: list[int] = []
    write = meta._write

    def count(changes: dict[str, Versioned | None], revision: int, is_deletion: bool) -> None:
        sizes.append(len(changes))
        write(changes, revision, is_deletion)

    monkeypatch.setattr(meta, "_write", count)
    await asyncio.gather(*(meta.transact(Put(f"k/{number}", b"")) for number in range(100)))
    assert sizes == [100]
    await meta.close()


def test_a_file_that_is_no_database_stops_the_start_with_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "meta.db"
    path.write_bytes(b"this is not a database, and it is long enough to be looked at" * 20)
    with pytest.raises(StartupError, match=r"is damaged \(file is not a database\)"):
        SqliteMeta(str(path))


async def test_so_does_one_that_is_damaged_further_inside(tmp_path: Path) -> None:
    meta = SqliteMeta(str(tmp_path / "meta.db"))
    await meta.transact(*(Put(f"k/{number}", bytes(500)) for number in range(100)))
    await meta.close()
    with (tmp_path / "meta.db").open("r+b") as file:
        file.seek(4096)
        file.write(b"damage" * 5000)
    with pytest.raises(StartupError, match="is damaged"):
        SqliteMeta(str(tmp_path / "meta.db"))


def test_a_newer_schema_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "meta.db"
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version=99")
    database.close()
    with pytest.raises(StartupError, match="newer Millstream"):
        SqliteMeta(str(path))
