"""Logs in a directory and metadata in a database: which pairs start, and what is kept of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import millstream
from millstream.client.embedded import Embedded
from millstream.cluster.base import Solo
from millstream.core.errors import Code, RequestError, StartupError, StoreInUse
from millstream.core.promise import Promise
from millstream.stores import pair, table_meta
from millstream.stores.base import MetaStore, Operation
from millstream.stores.sqlite import SqliteDatabase
from millstream.stores.url import open_meta

Open = Callable[..., Embedded]


@pytest.fixture
def opened(tmp_path: Path) -> Open:
    """A broker over a directory and a database, by their names."""

    def make(logs: str | None = "logs", meta: str | None = "meta.db", **settings: Any) -> Embedded:
        url = f"sqlite:{tmp_path / str(meta)}" if logs is None else f"file:{tmp_path / logs}"
        if logs is not None and meta is not None:
            settings["meta"] = f"sqlite:{tmp_path / meta}"
        return millstream.open(url, **settings)

    return make


async def fill(store: Embedded, topic: str = "orders") -> None:
    async with store as ms:
        await ms.create_topic(topic, partitions=2)
        await ms.send(topic, b"kept", key=b"k")


async def refusal(store: Embedded) -> str:
    with pytest.raises(StartupError) as caught:
        async with store:
            pass
    return str(caught.value)


async def test_a_pair_keeps_records_and_positions_over_a_restart(opened: Open, tmp_path: Path) -> None:
    await fill(opened())
    async with opened() as ms:
        assert isinstance(ms.broker.cluster, Solo) and not ms.atomic_across
        async with ms.stream("orders", group="readers") as stream, ms.queue("orders", group="workers") as queue:
            read, work = await stream.receive(), await queue.receive()
            assert read is not None and read.value == b"kept" and work is not None
            await stream.commit()
            await work.accept()
        await ms.send("orders", b"next", key=b"k")
    async with opened() as ms, ms.stream("orders", group="readers") as stream, ms.queue("orders", group="workers") as q:
        read, work = await stream.receive(), await q.receive()
        assert read is not None and work is not None
        assert (read.value, work.value) == (b"next", b"next")
    assert not (tmp_path / "logs" / "meta.db").exists()
    assert (tmp_path / "logs" / "pair").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("logs", ["logs", None])
async def test_housekeeping_forgets_deleted_keys(
    opened: Open, logs: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[int] = []

    async def forget(self: SqliteDatabase, keep: int) -> None:
        kept.append(keep)

    monkeypatch.setattr(SqliteDatabase, "forget_deleted", forget)
    async with opened(logs) as ms:
        await ms.broker._housekeep()
    assert kept == [table_meta.DELETIONS_KEPT]


async def test_lost_news_are_asked_for_until_the_database_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_meta, "RETRY_SECONDS", 0)
    meta = open_meta(f"sqlite:{tmp_path / 'meta.db'}")
    await meta.start()
    unwatch = meta.watch("a", lambda key, value: None)
    asked, revision, failures = asyncio.Event(), SqliteDatabase.revision, [1, 2]

    async def revision_or_failure(self: SqliteDatabase) -> int:
        if failures:
            raise RequestError(Code.KAFKA_STORAGE_ERROR, f"not there {failures.pop()}")
        asked.set()
        return await revision(self)

    monkeypatch.setattr(SqliteDatabase, "revision", revision_or_failure)
    meta.lost()  # type: ignore[attr-defined]
    async with asyncio.timeout(10):
        await asked.wait()
    unwatch()
    await meta.close()


class TestRefusals:
    async def test_logs_with_the_metadata_of_others(self, opened: Open) -> None:
        await fill(opened())
        await fill(opened("other", "other.db"))
        assert "the metadata belong to other logs than those in" in await refusal(opened("logs", "other.db"))
        assert "the metadata belong to other logs than those in" in await refusal(opened("other", "meta.db"))
        assert "the metadata belong to other logs than those in" in await refusal(opened("new", "meta.db"))

    async def test_logs_whose_metadata_are_gone(self, opened: Open, tmp_path: Path) -> None:
        await fill(opened())
        assert "and this --meta is empty" in await refusal(opened("logs", "empty.db"))
        assert (await refusal(opened("logs", None))).endswith("in another store: give its URL to --meta")
        assert not (tmp_path / "logs" / "set-aside").exists() and not (tmp_path / "logs" / "meta.db").exists()
        async with opened() as ms:
            assert await ms.topics() == {"orders": 2}

    async def test_metadata_whose_logs_are_elsewhere(self, opened: Open) -> None:
        await fill(opened())
        assert "has the metadata of logs in a data directory" in await refusal(opened(None, "meta.db"))

    async def test_stores_that_hold_both(self, opened: Open) -> None:
        await fill(opened("both", None))
        await fill(opened(None, "both.db"))
        assert "has metadata of its own, in meta.db" in await refusal(opened("both", "new.db"))
        assert "they were used without --meta" in await refusal(opened("new", "both.db"))

    async def test_a_second_broker(self, opened: Open) -> None:
        async with opened():
            with pytest.raises(StoreInUse):
                async with opened():
                    pass
            assert "the metadata belong to other logs" in await refusal(opened("second"))

    @pytest.mark.parametrize(
        ("store", "meta", "sentence"),
        [
            ("memory:", "sqlite:m.db", "--meta is for logs in file:DIR only: other stores"),
            ("sqlite:a.db", "sqlite:m.db", "--meta is for logs in file:DIR only: other stores"),
            ("postgresql://host/db", "sqlite:m.db", "--meta is for logs in file:DIR only: other stores"),
            ("file:a", "sqlite:./a/meta.db", "keeps its own metadata in meta.db"),
            ("file:a", "file:b", "metadata cannot live in file:b without the logs"),
            ("file:a", "memory:", "metadata cannot live in memory: without the logs"),
            ("file:a", "sqlite:", "metadata cannot live in sqlite: without the logs"),
            ("file:a", "etcd://u:secret@host", "metadata cannot live in etcd://u:***@host without the logs"),
        ],
    )
    async def test_stores_that_cannot_be_apart(self, store: str, meta: str, sentence: str) -> None:
        assert sentence in await refusal(millstream.open(store, meta=meta))

    async def test_the_same_store_twice_is_one_store(self, tmp_path: Path) -> None:
        url = f"sqlite:{tmp_path / 'both.db'}"
        await fill(millstream.open(url, meta=url))
        await fill(millstream.open(url), "more")


class TestCrashes:
    async def test_a_first_start_that_ended_before_the_key_is_repeated(
        self, opened: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        match = pair.match

        async def cut(meta: MetaStore, *rest: Any) -> None:
            def refuse(*operations: Operation) -> Promise[int]:
                return Promise.failed(RequestError(Code.KAFKA_STORAGE_ERROR, "cut off"))

            monkeypatch.setattr(meta, "transact", refuse)
            await match(meta, *rest)

        monkeypatch.setattr(pair, "match", cut)
        assert "cut off" in await refusal(opened())
        monkeypatch.setattr(pair, "match", match)
        mark = (tmp_path / "logs" / "pair").read_bytes()
        await fill(opened())
        assert (tmp_path / "logs" / "pair").read_bytes() == mark

    async def test_a_creation_that_ended_before_the_key_leaves_no_topic(
        self, opened: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        async with opened() as ms:

            def refuse(*operations: Operation) -> Promise[int]:
                return Promise.failed(RequestError(Code.KAFKA_STORAGE_ERROR, "cut off"))

            with monkeypatch.context() as patch:
                patch.setattr(ms.broker.topics._meta, "transact", refuse)
                with pytest.raises(millstream.MillstreamError):
                    await ms.create_topic("half")
            assert list((tmp_path / "logs" / "logs").iterdir())
        async with opened() as ms:
            assert await ms.topics() == {}
        assert not list((tmp_path / "logs" / "logs").iterdir())

    async def test_a_lost_directory_of_a_pair_is_reported(self, opened: Open, tmp_path: Path) -> None:
        await fill(opened())
        (topic,) = (tmp_path / "logs" / "logs").iterdir()
        topic.rename(tmp_path / "away")
        async with opened() as ms:
            found = ms.broker.topics.get("orders")
            assert found is not None
            assert [part.log.damage.lost is not None for part in found.partitions] == [True, True]
