"""Several embedded brokers over one SQLite file, as several processes have them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import millstream
from millstream.client.embedded import Embedded
from millstream.core.errors import LeaseLost, RequestError
from millstream.stores import group_commit
from tests.compat.python_api import SECONDS, take


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"sqlite:{tmp_path / 'app.db'}"


async def test_what_one_sends_the_other_reads(store: str) -> None:
    async with millstream.open(store) as one, millstream.open(store) as two:
        await one.send("orders", b"1")
        assert await two.topics() == {"orders": 1}
        async with two.read("orders") as reading:
            assert [record.value for record in await take(reading, 1)] == [b"1"]
            await one.send("orders", b"2")
            assert [record.value for record in await take(reading, 1)] == [b"2"]


async def test_what_one_has_sent_the_other_sees_at_once(store: str) -> None:
    async with millstream.open(store) as one, millstream.open(store) as two:
        for number in range(20):
            await one.send(f"orders-{number}", b"1")
            assert [record.value async for record in two.read(f"orders-{number}", follow=False)] == [b"1"]
            await one.send(f"orders-{number}", b"2")
            assert [record.value async for record in two.read(f"orders-{number}", follow=False)] == [b"1", b"2"]


async def test_opening_a_file_a_second_time_leaves_its_wal_to_the_first(store: str) -> None:
    """A second process would remove a WAL that seems unused."""
    path = store.removeprefix("sqlite:")
    look = f"import sqlite3; print(*sqlite3.connect({path!r}).execute('SELECT count(*) FROM batches').fetchone())"
    async with millstream.open(store) as one, millstream.open(store) as two:
        for number, ms in enumerate((one, two, one), 1):
            await ms.send("orders", b"%d" % number)
            seen = await asyncio.to_thread(subprocess.check_output, [sys.executable, "-c", look])
            assert int(seen) == number
        assert [record.value async for record in two.read("orders", follow=False)] == [b"1", b"2", b"3"]


async def test_both_write_to_one_partition_without_gaps(store: str) -> None:
    async with millstream.open(store) as one, millstream.open(store) as two:
        await one.create_topic("orders")
        assert "orders" in await two.topics()
        sent = await asyncio.gather(*(ms.send("orders", b"x") for ms in (one, two) for _ in range(50)))
        assert sorted(each.offset for each in sent) == list(range(100))


async def test_one_call_is_one_transaction_over_all_its_topics(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_commit, "COUNT_MAX", 1)
    async with millstream.open(store) as ms:
        assert ms.atomic_across
        transactions: list[int] = []
        database = ms.broker._logs.database  # type: ignore[attr-defined]
        append = database.append

        def count(appends: Any, now_ms: int) -> Any:
            transactions.append(len(appends))
            return append(appends, now_ms)

        monkeypatch.setattr(database, "append", count)
        await ms.send_many([("orders", b"a"), ("audit", b"b"), ("ledger", b"c"), ("orders", b"d")])
        assert transactions == [3]
        with pytest.raises(RequestError):
            await ms.send_many([("orders", b"a"), ("audit", b"x" * 2_000_000)])
        assert transactions == [3]


async def test_members_of_a_stream_stand_by_until_the_process_that_has_the_group_goes(store: str) -> None:
    async with millstream.open(store) as two:
        async with millstream.open(store) as one:
            await one.send_many([("orders", b"%d" % number) for number in range(6)])
            async with one.stream("orders", group="g") as first:
                assert [record.offset for record in await take(first, 3)] == [0, 1, 2]
                second = two.stream("orders", group="g")
                assert await second.receive(0.1) is None and second.assignment == []
        assert [record.offset for record in await take(second, 3)] == [3, 4, 5]


async def test_workers_of_a_queue_stand_by_until_the_process_that_has_the_group_goes(store: str) -> None:
    async with millstream.open(store) as two:
        async with millstream.open(store) as one:
            await one.send_many([("jobs", b"%d" % number) for number in range(3)])
            async with one.queue("jobs", group="g") as first:
                [job, late] = await take(first, 2)
                await job.accept()
                second = two.queue("jobs", group="g")
                assert await second.receive(0.1) is None
        jobs = await take(second, 2)
        assert sorted((job.offset, job.attempt) for job in jobs) == [(1, 2), (2, 1)]
        for job in jobs:
            await job.accept()
        assert await second.receive(0.1) is None
        assert late.offset == 1


async def test_a_process_that_lost_its_groups_loses_their_jobs_and_stands_by(store: str) -> None:
    async with millstream.open(store) as ms:
        await ms.send("jobs", b"x")
        async with ms.queue("jobs", group="g") as jobs:
            [job] = await take(jobs, 1)
            ms.broker.groups.release()  # what a cluster says that gave the groups to another
            with pytest.raises(LeaseLost, match="another process coordinates the queue"):
                await job.accept()


async def test_exclusive_groups_need_no_coordinator(store: str) -> None:
    changes: list[bool] = []
    async with millstream.open(store) as one, millstream.open(store) as two:
        await one.send_many([("ledger", b"0"), ("ledger", b"1")])
        async with asyncio.timeout(SECONDS):
            while "ledger" not in await two.topics():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        async with two.exclusive("ledger", group="g", on_change=changes.append) as first:
            [event] = await take(first, 1)
            await event.commit()
            async with one.exclusive("ledger", group="g") as second:
                assert await second.receive(0.05) is None and not second.is_active
                await first.close()
                assert (await take(second, 1))[0].offset == 1
        assert changes == [True, False]


async def test_every_one_has_a_number_of_its_own(store: str) -> None:
    one, two = Embedded(store), Embedded(store)
    async with one, two:
        assert one.broker.node_id != two.broker.node_id
        assert one.broker.nodes("h", 1) == [
            (one.broker.node_id, "h", 1)
        ]  # clients are never sent to an embedded broker
