"""What the stores promise that several processes may open: two of them over one place."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import pytest

from millstream.core.clock import SystemClock
from millstream.core.errors import Code, RequestError, RevisionConflict
from millstream.core.promise import Promise
from millstream.log.config import LogConfig
from millstream.records.batch import read_header
from millstream.stores import postgres, table_store
from millstream.stores.base import Delete, PartitionLog, Put, Versioned
from millstream.stores.database import Append, Database
from millstream.stores.postgres import PostgresDatabase
from millstream.stores.table_store import TableLogStore
from tests.batches import NOW, append, batch, fill, read_back
from tests.contract.conftest import TOPIC, TOPIC_ID, Driver

pytestmark = pytest.mark.parametrize("driver", ["sqlite", "postgresql"], indirect=True)
SECONDS = 10.0


@pytest.fixture
async def stores(driver: Driver) -> AsyncIterator[tuple[TableLogStore, TableLogStore]]:
    pair = []
    for _ in range(2):
        store = driver.make_logs()
        assert isinstance(store, TableLogStore)
        await store.start()
        await store.prepare(TOPIC_ID, 3)
        pair.append(store)
    yield pair[0], pair[1]
    for store in pair:
        await store.close()


@pytest.fixture
def logs(stores: tuple[TableLogStore, TableLogStore]) -> tuple[PartitionLog, PartitionLog]:
    one, two = stores
    return one.open(TOPIC, TOPIC_ID, 0, LogConfig()), two.open(TOPIC, TOPIC_ID, 0, LogConfig())


async def on_its_way(database: PostgresDatabase) -> None:
    """Until a connection carries an append."""
    async with asyncio.timeout(SECONDS):
        while not database._appends.uses():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def woken(log: PartitionLog, condition: Callable[[], bool]) -> None:
    """Returns when a condition holds; looks whenever the log says that there is more."""
    if condition():
        return
    event = asyncio.Event()
    take_off = log.wake(lambda: event.set() if condition() else None)
    async with asyncio.timeout(SECONDS):
        await event.wait()
    take_off()


@contextmanager
def dying_at(database: Database, step: int) -> Iterator[None]:
    """The process that does this to the database does not get further than to some step."""
    name = "_write" if hasattr(database, "_write") else "_fetch"
    whole, steps = getattr(database, name), 0

    async def until_the_crash(*arguments: object) -> object:
        nonlocal steps
        steps += 1
        if steps == step:
            raise ConnectionAbortedError
        return await whole(*arguments)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(ConnectionAbortedError):
        patch.setattr(database, name, until_the_crash)
        yield


class TestLogs:
    async def test_an_append_through_one_wakes_readers_of_the_other(
        self, logs: tuple[PartitionLog, PartitionLog]
    ) -> None:
        one, two = logs
        await append(one, batch(b"a", b"b"))
        await woken(two, lambda: two.high_watermark == 2)
        assert [record.value for record in await read_back(two)] == [b"a", b"b"]

    async def test_offsets_are_dense_and_ordered_however_many_write_at_once(
        self, logs: tuple[PartitionLog, PartitionLog]
    ) -> None:
        async def write(log: PartitionLog, name: bytes) -> list[int]:
            return [(await append(log, batch(b"%s %d" % (name, at)))).base_offset for at in range(60)]

        answers = await asyncio.gather(*(write(log, b"%d" % at) for at in range(4) for log in (logs[at % 2],)))
        assert sorted(offset for offsets in answers for offset in offsets) == list(range(240))
        assert all(offsets == sorted(offsets) for offsets in answers)
        for log in logs:
            await woken(log, lambda log=log: log.high_watermark == 240)  # type: ignore[misc]
            records = await read_back(log)
            assert [record.offset for record in records] == list(range(240))
            for name, offsets in enumerate(answers):
                assert [records[offset].value for offset in offsets] == [b"%d %d" % (name, at) for at in range(60)]

    async def test_a_repeat_through_the_other_is_recognised(self, logs: tuple[PartitionLog, PartitionLog]) -> None:
        one, two = logs
        for sequence in range(3):
            await append(one, batch(b"x", producer=7, sequence=sequence))
        assert (await append(two, batch(b"x", producer=7, sequence=1))) == (1, 0, True)
        assert (await append(two, batch(b"y", producer=7, sequence=3))).base_offset == 3
        assert (await append(one, batch(b"y", producer=7, sequence=3))).duplicate
        with pytest.raises(RequestError) as caught:
            await append(one, batch(b"z", producer=7, sequence=9))
        assert caught.value.code == Code.OUT_OF_ORDER_SEQUENCE_NUMBER
        assert list((await two.known_producers()).by_id) == [7]

    async def test_batches_get_the_epoch_of_their_log(self, logs: tuple[PartitionLog, PartitionLog]) -> None:
        log = logs[0]
        await append(log, batch(b"a"))
        log.epochs.begin(3, log.end)
        await append(log, batch(b"b"))
        epochs = [read_header((await log.read(at, 1)).to_bytes()).leader_epoch for at in (0, 1)]
        assert epochs == [0, 3]

    async def test_a_reader_that_was_elsewhere_before_is_not_out_of_range(
        self, logs: tuple[PartitionLog, PartitionLog]
    ) -> None:
        one, two = logs
        await append(one, batch(b"a"))
        appended = await append(one, batch(b"b"))
        # However far the news have come: what one has answered the other serves.
        assert (await two.read(appended.base_offset + 1, 1000)).size == 0
        assert two.high_watermark == 2
        with pytest.raises(RequestError):
            await two.read(3, 1000)

    async def test_who_is_stopped_within_a_transaction_holds_up_the_others_for_a_moment_only(
        self, stores: tuple[TableLogStore, TableLogStore], driver: Driver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if not isinstance(stores[0].database, PostgresDatabase):
            pytest.skip("SQLite cannot tell who is stopped: docs/stores.md")
        monkeypatch.setattr(postgres, "PAUSE_MS_MAX", 100)
        stopped = driver.make_logs()
        assert isinstance(stopped, TableLogStore) and isinstance(stopped.database, PostgresDatabase)
        await stopped.start()
        log = stores[0].open(TOPIC, TOPIC_ID, 0, LogConfig())
        with pytest.raises(RequestError, match="cannot be reached"):
            async with stopped.database._appends.take() as connection, connection.transaction():
                one = batch(b"never committed")
                await stopped.database._append(
                    connection, [Append(log.id, [bytearray(one)], [read_header(one)], 0)], NOW
                )
                async with asyncio.timeout(SECONDS):
                    assert (await append(log, batch(b"another"))).base_offset == 0
        assert [record.value for record in await read_back(log)] == [b"another"]
        await stopped.close()

    async def test_a_slow_line_is_no_pause_within_a_transaction(
        self, stores: tuple[TableLogStore, TableLogStore], driver: Driver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if not isinstance(stores[0].database, PostgresDatabase):
            pytest.skip("there is no line to it")
        slow = driver.make_logs()
        assert isinstance(slow, TableLogStore) and isinstance(slow.database, PostgresDatabase)
        await slow.start()
        await slow.prepare(TOPIC_ID, 3)
        send, allowed = slow.database._append, []

        async def send_slowly(connection: Any, *arguments: Any) -> Any:
            """The server has begun the transaction: how long does it wait for this, and then for what follows?"""
            allowed.append(await connection.fetchval("SHOW idle_in_transaction_session_timeout"))
            stored = await send(connection, *arguments)
            allowed.append(await connection.fetchval("SHOW idle_in_transaction_session_timeout"))
            return stored

        monkeypatch.setattr(slow.database, "_append", send_slowly)
        with slow.together():
            promises = [append(slow.open(TOPIC, TOPIC_ID, index, LogConfig()), batch(b"a")) for index in range(3)]
        assert [(await promise).base_offset for promise in promises] == [0, 0, 0]
        assert allowed == ["0", f"{postgres.PAUSE_MS_MAX // 1000}s"], "without a bound, until there are locks"
        await slow.close()

    async def test_news_that_overtake_the_opening_of_a_log_are_kept(
        self, stores: tuple[TableLogStore, TableLogStore]
    ) -> None:
        one, two = stores
        await one.prepare("late", 1)
        await two.prepare("late", 1)
        writer = two.open("late", "late", 0, LogConfig())
        await append(writer, batch(b"a"))
        [state] = await one.database.states([writer.id])
        one._learn([state])  # as a notification would, between preparing and opening
        assert one.open("late", "late", 0, LogConfig()).high_watermark == 1

    async def test_a_refresh_shows_what_was_answered_elsewhere(self, logs: tuple[PartitionLog, PartitionLog]) -> None:
        one, two = logs
        await append(one, batch(b"a"))
        await two.refresh()
        assert two.high_watermark == 1

    async def test_a_trim_through_one_moves_the_start_of_the_other(
        self, logs: tuple[PartitionLog, PartitionLog]
    ) -> None:
        one, two = logs
        await fill(one, 10)
        await two.refresh()
        await two.trim(6)
        await one.refresh()
        assert one.start == 6 and one.size_bytes() == two.size_bytes() > 0
        assert [record.offset for record in await read_back(one)] == [6, 7, 8, 9]

    async def test_times_are_found_over_what_both_wrote(self, logs: tuple[PartitionLog, PartitionLog]) -> None:
        one, two = logs
        await append(one, batch(b"a", at=NOW))
        await append(two, batch(b"b", at=NOW + 5))
        await one.refresh()
        assert await one.find_time(NOW + 1) == (1, NOW + 5)

    async def test_what_one_discarded_the_other_cannot_append_to(
        self, stores: tuple[TableLogStore, TableLogStore], logs: tuple[PartitionLog, PartitionLog]
    ) -> None:
        await fill(logs[1], 5)
        await stores[0].discard(TOPIC, TOPIC_ID)
        with pytest.raises(RequestError) as caught:
            await append(logs[1], batch(b"late"))
        assert caught.value.code == Code.UNKNOWN_TOPIC_OR_PARTITION

    async def test_retention_takes_as_many_steps_as_it_needs(
        self, stores: tuple[TableLogStore, TableLogStore], logs: tuple[PartitionLog, PartitionLog]
    ) -> None:
        one, two = logs
        await fill(one, 1200, size=10)
        one.config = LogConfig(retention_ms=-1, retention_bytes=one.size_bytes() // 100)
        await stores[0].housekeep()
        await two.refresh()
        assert 1180 < one.start == two.start < 1200
        assert [record.offset for record in await read_back(two)] == list(range(two.start, 1200))
        assert one.size_bytes() == two.size_bytes() == (await two.read(two.start, 1 << 20)).size

    async def test_logs_without_a_topic_are_removed_by_and_by(
        self, stores: tuple[TableLogStore, TableLogStore], logs: tuple[PartitionLog, PartitionLog]
    ) -> None:
        one, two = stores
        await one.database.open_logs("ffff", 2)
        known = '{"id": "8c1f0e6a-5d7b-4f2e-9a3c-1b0d2e4f6a8c", "partitions": 3, "settings": {}}'
        await one.meta.transact(Put("topics/orders", known.encode()))
        await two.housekeep()
        assert await two.database.topic_ids() == {TOPIC_ID}

    async def test_the_id_of_a_discarded_log_is_never_given_again(
        self, stores: tuple[TableLogStore, TableLogStore], logs: tuple[PartitionLog, PartitionLog]
    ) -> None:
        """News of the old log, and the removal of its batches, would be taken for the new one's."""
        one, two = (store.database for store in stores)
        before = {state.id for state in await one.open_logs(TOPIC_ID, 3)}
        await one.discard(TOPIC_ID)
        assert before.isdisjoint(state.id for state in await two.open_logs("ffff", 3))

    async def test_a_discard_that_a_crash_interrupted_is_finished_by_and_by(
        self,
        driver: Driver,
        stores: tuple[TableLogStore, TableLogStore],
        logs: tuple[PartitionLog, PartitionLog],
    ) -> None:
        await fill(logs[0], 1200, size=10)
        one, two = (store.database for store in stores)
        (log_id,) = (state.id for state in await one.open_logs(TOPIC_ID, 1))
        with dying_at(one, 4):
            await one.discard(TOPIC_ID)
        assert not await two.states([log_id]) and await two.rows(log_id, 0, 1), "closed, and not removed yet"
        restarted = driver.make_logs()
        await restarted.start()
        await restarted.housekeep()
        await restarted.close()
        assert not await two.rows(log_id, 0, 1) and not await two.topic_ids()

    async def test_many_logs_of_several_writers_do_not_lock_each_other_out(
        self, stores: tuple[TableLogStore, TableLogStore]
    ) -> None:
        opened = [[store.open(TOPIC, TOPIC_ID, index, LogConfig()) for index in range(3)] for store in stores]
        work = [
            append(logs[(index * step) % 3], batch(b"x"))
            for index in range(60)
            for step, logs in zip((1, 2), opened, strict=True)
        ]
        await asyncio.gather(*work)
        for log in opened[0]:
            await log.refresh()
        assert sum(log.high_watermark for log in opened[0]) == 120

    async def test_a_reader_that_fails_to_take_the_news_costs_later_ones_nothing(
        self, logs: tuple[PartitionLog, PartitionLog]
    ) -> None:
        one, two = logs
        failed = asyncio.Event()

        def fail() -> None:
            failed.set()
            raise ValueError("a mistake elsewhere")

        take_off = two.wake(fail)
        await append(one, batch(b"a"))
        async with asyncio.timeout(SECONDS):
            await failed.wait()
        take_off()
        await append(one, batch(b"b"))
        await woken(two, lambda: two.high_watermark == 2)

    async def test_whoever_fails_at_an_answer_costs_later_appends_nothing(
        self, logs: tuple[PartitionLog, PartitionLog]
    ) -> None:
        def fail(_: object) -> None:
            raise ValueError("a mistake elsewhere")

        first = append(logs[0], batch(b"a"))
        first.then(fail)
        beside = append(logs[0], batch(b"b"))
        async with asyncio.timeout(SECONDS):
            assert (await beside).base_offset == 1
            assert (await append(logs[0], batch(b"c"))).base_offset == 2
            await logs[0].flush()

    async def test_the_leader_epoch_of_a_producer_is_not_kept(self, logs: tuple[PartitionLog, PartitionLog]) -> None:
        data = batch(b"a")
        data[12:16] = (77).to_bytes(4, "big")
        await append(logs[0], data)
        assert read_header((await logs[0].read(0, 1000)).to_bytes()).leader_epoch == 0

    async def test_retention_by_size_counts_what_is_not_removed_yet(
        self, stores: tuple[TableLogStore, TableLogStore], logs: tuple[PartitionLog, PartitionLog]
    ) -> None:
        """The other one moved the start, and died or is about to remove what lies below it."""
        one, two = logs
        await fill(one, 20)
        limit = one.size_bytes() // 2
        with dying_at(stores[0].database, 2):
            await one.trim(10)
        await two.refresh()
        assert two.start == 10 and two.size_bytes() > limit
        two.config = LogConfig(retention_ms=-1, retention_bytes=limit)
        await stores[1].housekeep()
        assert two.start == 10 and two.size_bytes() == (await two.read(10, 1 << 20)).size < 2 * limit

    async def test_a_log_that_was_deleted_elsewhere_does_not_end_the_retention_of_others(
        self, stores: tuple[TableLogStore, TableLogStore]
    ) -> None:
        one, two = stores
        await two.prepare("ffff", 1)
        config = LogConfig(retention_ms=-1, retention_bytes=0)
        gone, stays = two.open("gone", "ffff", 0, config), two.open(TOPIC, TOPIC_ID, 1, config)
        await fill(gone, 3)
        await fill(stays, 3)
        with dying_at(one.database, 3 if isinstance(one.database, PostgresDatabase) else 2):
            await one.database.discard("ffff")
        assert not await two.database.states([gone.id]) and await two.database.rows(gone.id, 0, 1), "closed, and there"
        await two.housekeep()
        assert stays.start == 3


class Line:
    """The way to a server, on which a server can vanish: what is open then gets no word any more, and no end."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._ways: list[asyncio.StreamWriter] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", self._port)
        self._ways += [writer, there[1]]
        for one, other in ((reader, there[1]), (there[0], writer)):
            self._tasks.append(asyncio.create_task(self._carry(one, other)))

    def cut(self) -> None:
        for task in self._tasks:
            task.cancel()

    def refuse_the_first(self) -> None:
        self._ways[0].transport.abort()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[int]:
        async with await asyncio.start_server(self._connected, "127.0.0.1", 0) as server:
            yield server.sockets[0].getsockname()[1]
            self.cut()
            for way in self._ways:
                way.close()


@asynccontextmanager
async def cut_off(
    store: TableLogStore, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Line, PostgresDatabase, PartitionLog]]:
    """A log with one record, over a line to the same server that has just been cut."""
    if not isinstance(store.database, PostgresDatabase):
        pytest.skip("there is no line to it")
    url = urlsplit(store.database._url.dsn)
    assert url.port is not None
    monkeypatch.setattr(postgres, "PING_SECONDS", 1.0)
    line = Line(url.port)
    async with line.open() as port:
        database = PostgresDatabase(url._replace(netloc=url.netloc.replace(str(url.port), str(port))).geturl())
        beyond = TableLogStore(database, SystemClock())
        await beyond.start()
        await beyond.prepare(TOPIC_ID, 1)
        log = beyond.open(TOPIC, TOPIC_ID, 0, LogConfig())
        await append(log, batch(b"a"))
        line.cut()
        yield line, database, log
        await beyond.close()


class TestLines:
    async def test_what_a_server_that_vanished_did_not_answer_is_given_up_when_there_is_one_again(
        self, driver: Driver, stores: tuple[TableLogStore, TableLogStore], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with cut_off(stores[0], monkeypatch) as (_, _, log):
            async with asyncio.timeout(SECONDS):
                with pytest.raises(RequestError, match="cannot be reached"):
                    await append(log, batch(b"never answered"))
                assert (await append(log, batch(b"b"))).base_offset == 1

    async def test_also_where_its_successor_has_told_the_listening_connection_at_once(
        self, driver: Driver, stores: tuple[TableLogStore, TableLogStore], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with cut_off(stores[0], monkeypatch) as (line, database, log):
            unanswered = append(log, batch(b"never answered"))
            async with asyncio.timeout(SECONDS):
                await on_its_way(database)
                line.refuse_the_first()  # which is the one that listens
                with pytest.raises(RequestError, match="cannot be reached"):
                    await unanswered
                assert (await append(log, batch(b"b"))).base_offset == 1

    async def test_what_a_server_is_at_work_on_is_waited_for_though_the_listening_connection_was_lost(
        self, stores: tuple[TableLogStore, TableLogStore], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It would be stored, and its producer told that it was not."""
        database = stores[0].database
        if not isinstance(database, PostgresDatabase):
            pytest.skip("there is no line to it")
        import asyncpg

        monkeypatch.setattr(postgres, "PING_SECONDS", 0.4)
        log = stores[0].open(TOPIC, TOPIC_ID, 0, LogConfig())
        other = await asyncpg.connect(database._url.dsn)
        async with other.transaction():
            await other.execute("SELECT * FROM millstream.logs FOR UPDATE")
            waiting = append(log, batch(b"a"))
            await on_its_way(database)
            await other.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE query LIKE 'LISTEN%' AND datname = current_database()"
            )
            await asyncio.sleep(1.5)
        async with asyncio.timeout(SECONDS):
            assert (await waiting).base_offset == 0
        await other.close()


class TestTogether:
    @pytest.fixture
    def pair(self, stores: tuple[TableLogStore, TableLogStore]) -> tuple[PartitionLog, PartitionLog]:
        store = stores[0]
        return store.open(TOPIC, TOPIC_ID, 0, LogConfig()), store.open(TOPIC, TOPIC_ID, 1, LogConfig())

    async def test_all_are_stored(
        self, stores: tuple[TableLogStore, TableLogStore], pair: tuple[PartitionLog, PartitionLog]
    ) -> None:
        with stores[0].together():
            promises = [append(log, batch(b"a")) for log in (*pair, *pair)]
        assert [(await promise).base_offset for promise in promises] == [0, 0, 1, 1]

    @pytest.mark.parametrize("is_first", [False, True])
    async def test_one_without_room_takes_the_others_along(
        self,
        stores: tuple[TableLogStore, TableLogStore],
        pair: tuple[PartitionLog, PartitionLog],
        monkeypatch: pytest.MonkeyPatch,
        is_first: bool,
    ) -> None:
        monkeypatch.setattr(table_store, "WAITING_BYTES_MAX", 1000)
        small, large = batch(b"a"), batch(bytes(2000))
        before = append(pair[0], batch(b"before"))
        with stores[0].together():
            promises = [
                append(log, data) for log, data in zip(pair, (small, large)[:: -1 if is_first else 1], strict=True)
            ]
        for promise in promises:
            with pytest.raises(RequestError, match="too many bytes wait for the database"):
                await promise
        await before
        assert [log.end for log in pair] == [1, 0] and [log.unsynced_bytes for log in pair] == [0, 0]
        assert stores[0].has_room(1000)

    async def test_one_that_was_deleted_elsewhere_takes_the_others_along(
        self, stores: tuple[TableLogStore, TableLogStore], pair: tuple[PartitionLog, PartitionLog]
    ) -> None:
        one, two = stores
        await one.prepare("ffff", 1)
        gone = one.open("gone", "ffff", 0, LogConfig())
        await two.database.discard("ffff")
        with one.together():
            promises = [append(log, batch(b"a", producer=7)) for log in (*pair, gone)]
        with one.together():
            whole = [append(log, batch(b"b")) for log in pair]
        beside = append(pair[0], batch(b"c"))
        for promise in promises:
            with pytest.raises(RequestError) as caught:
                await promise
            assert caught.value.code == Code.UNKNOWN_TOPIC_OR_PARTITION
        assert [(await promise).base_offset for promise in (*whole, beside)] == [0, 0, 1]
        assert not (await append(pair[0], batch(b"a", producer=7))).duplicate
        assert [record.value for record in await read_back(pair[0])] == [b"b", b"c", b"a"]


class Watched:
    """The changes that a watch reports, with an event per change."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, bytes | None]] = []
        self._waiting: list[tuple[str, Promise[None]]] = []

    def __call__(self, key: str, value: Versioned | None) -> None:
        self.seen.append((key, None if value is None else value.value))
        for wanted, promise in self._waiting:
            if wanted == key and not promise.done:
                promise.settle(None)

    async def key(self, key: str) -> None:
        promise: Promise[None] = Promise()
        self._waiting.append((key, promise))
        if any(seen == key for seen, _ in self.seen):
            return
        async with asyncio.timeout(SECONDS):
            await promise


class TestMetadata:
    async def test_a_watch_tells_what_the_other_changed(self, stores: tuple[TableLogStore, TableLogStore]) -> None:
        one, two = stores
        watched = Watched()
        two.meta.watch("t/", watched)
        await one.meta.transact(Put("t/a", b"1"), Put("u/a", b"1"))
        await watched.key("t/a")
        await one.meta.transact(Delete("t/a"))
        await one.meta.transact(Put("t/b", b"2"))
        await watched.key("t/b")
        assert watched.seen == [("t/a", b"1"), ("t/a", None), ("t/b", b"2")]

    async def test_own_and_others_changes_come_in_one_order(self, stores: tuple[TableLogStore, TableLogStore]) -> None:
        one, two = stores
        told: tuple[list[int], list[int]] = ([], [])

        def note(revisions: list[int], _: str, value: Versioned | None) -> None:
            assert value is not None
            revisions.append(value.revision)

        for store, revisions in zip(stores, told, strict=True):
            store.meta.watch("t/", partial(note, revisions))
        await asyncio.gather(*(store.meta.transact(Put(f"t/{at}", b"")) for at in range(30) for store in stores))
        last = Watched()
        for store in stores:
            store.meta.watch("end", last)
        await one.meta.transact(Put("end", b""))
        await two.meta.transact(Put("end", b""))
        for revisions in told:
            assert revisions == sorted(set(revisions)), "each once, in order"
            assert revisions[-1] == 60

    async def test_compare_and_set_holds_across_both(self, stores: tuple[TableLogStore, TableLogStore]) -> None:
        one, two = stores
        await one.meta.transact(Put("a", b"1", if_revision=0))
        with pytest.raises(RevisionConflict):
            await two.meta.transact(Put("a", b"2", if_revision=0))
        assert await two.meta.get("a") == Versioned(b"1", 1)

    async def test_who_was_away_too_long_to_know_what_was_deleted_compares_everything(
        self, stores: tuple[TableLogStore, TableLogStore]
    ) -> None:
        one, two = stores
        watched = Watched()
        await one.meta.transact(Put("t/stays", b"1"), Put("t/goes", b"1"))
        two.meta.watch("t/", watched)
        await two.meta.list("t/")
        two.database.listen(lambda states: None, lambda revision: None, lambda: None)  # it hears nothing any more
        await one.meta.transact(Delete("t/goes"))
        await one.meta.transact(Put("t/comes", b"2"))
        await one.database.forget_deleted(0)
        await two.meta.catch_up()
        await watched.key("t/comes")
        assert ("t/goes", None) in watched.seen and ("t/comes", b"2") in watched.seen

    async def test_forgetting_what_was_deleted_and_a_transaction_do_not_wait_for_each_other(
        self, stores: tuple[TableLogStore, TableLogStore]
    ) -> None:
        one, two = stores
        if not isinstance(one.database, PostgresDatabase):
            pytest.skip("one writes at a time")
        await one.meta.transact(Put("a", b""))
        await one.meta.transact(Delete("a"))
        async with one.database._meta.take() as connection, asyncio.timeout(SECONDS):
            async with connection.transaction():
                await connection.execute("SELECT FROM millstream.meta_revision FOR NO KEY UPDATE")
                forgetting = asyncio.ensure_future(two.database.forget_deleted(0))
                waiting = (
                    "SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid)"
                    " WHERE NOT granted AND datname = current_database()"
                )
                while not await connection.fetchval(waiting):
                    pass  # it has not come that far
                await connection.execute("UPDATE millstream.meta SET value = '' WHERE key = 'a'")
            await forgetting
        assert await one.meta.get("a") is not None, "it is there again"
