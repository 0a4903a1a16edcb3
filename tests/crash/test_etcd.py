"""Metadata in an etcd that dies: under writers and watchers, in one member of three, under a broker.

No acknowledged transaction is lost, watchers end with what is stored, and no caller waits for long.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from random import Random

import pytest
from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from millstream.core.clock import SystemClock
from millstream.core.errors import Code, RequestError
from millstream.stores import etcd_connection, etcd_watch
from millstream.stores.base import Delete, Put, Versioned
from millstream.stores.etcd import EtcdMeta
from tests.etcd import EtcdCluster, PrivateEtcd
from tests.serving import ServedBroker

SECONDS = 60.0
WRITERS = 4


class Load:
    """Writers and a watcher over one store: what they were answered, and what the watcher saw."""

    def __init__(self, name: str, meta: EtcdMeta) -> None:
        self.meta = meta
        self.acknowledged: dict[str, bytes | None] = {}
        self.doubtful: set[str] = set()
        self.seen: dict[str, Versioned] = {}
        self.disordered: list[str] = []
        self._told = 0
        self.slowest = 0.0
        self._name = name
        self._more = asyncio.Condition()
        self._answers = 0
        self._writers: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        await self.meta.start()
        self.meta.watch("", self._changed)
        for key, value in await self.meta.list(""):
            self.seen.setdefault(key, value)
        self._writers = [asyncio.create_task(self._write(number)) for number in range(WRITERS)]

    def _changed(self, key: str, value: Versioned | None) -> None:
        if value is None:
            self.seen.pop(key, None)
            return
        if value.revision < self._told:
            self.disordered.append(key)
        self._told = value.revision
        self.seen[key] = value

    async def _write(self, writer: int) -> None:
        number = 0
        while True:
            number += 1
            key, value = f"{self._name}/{writer}/{number % 500}", b"%d" % number
            is_delete = number % 10 == 0
            self.doubtful |= {key, f"{key}/beside"}
            started = time.monotonic()
            try:
                await self.meta.transact(Delete(key) if is_delete else Put(key, value), Put(f"{key}/beside", value))
            except RequestError as error:
                assert error.code is Code.KAFKA_STORAGE_ERROR and error.code.retriable
                await asyncio.sleep(0.01)  # a client's backoff
            else:
                self.doubtful -= {key, f"{key}/beside"}
                self.acknowledged |= {key: None if is_delete else value, f"{key}/beside": value}
                async with self._more:
                    self._answers += 1
                    self._more.notify_all()
            self.slowest = max(self.slowest, time.monotonic() - started)

    async def more(self, count: int) -> None:
        """Returns after so many further answers."""
        wanted = self._answers + count
        async with asyncio.timeout(SECONDS), self._more:
            await self._more.wait_for(lambda: self._answers >= wanted)

    async def stop(self) -> None:
        for writer in self._writers:
            writer.cancel()
        await asyncio.gather(*self._writers, return_exceptions=True)


async def compare(loads: list[Load]) -> None:
    """Everything acknowledged is stored, and every watcher has seen what is stored."""
    for load in loads:
        await load.stop()
    last = await loads[0].meta.transact(Put("last", b""))
    stored = dict(await loads[0].meta.list(""))
    for load in loads:
        await load.meta._watch.reached(last)
        assert load.seen == stored and not load.disordered
        for key, value in load.acknowledged.items():
            if key not in load.doubtful:
                found = stored.get(key)
                assert (None if found is None else found.value) == value, key
        assert load.slowest < etcd_connection.REQUEST_SECONDS * 4
        await load.meta.close()


@pytest.mark.parametrize("rounds", [pytest.param(2), pytest.param(15, marks=pytest.mark.slow)])
async def test_kill_9_of_etcd_loses_no_acknowledged_transaction(rounds: int) -> None:
    random = Random(rounds)
    with PrivateEtcd() as etcd:
        url = etcd.new_prefix()
        loads = [Load(name, EtcdMeta(url, SystemClock())) for name in ("one", "two")]
        for load in loads:
            await load.start()
        for _ in range(rounds):
            await loads[0].more(100)
            await asyncio.sleep(random.uniform(0, 0.1))  # the random moment: there is no event for it
            etcd.kill()
            await asyncio.to_thread(etcd.restart)
        for load in loads:
            await load.more(100)
        await compare(loads)


@pytest.mark.parametrize("rounds", [pytest.param(1), pytest.param(6, marks=pytest.mark.slow)])
async def test_one_member_of_three_can_be_killed_or_paused(rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that a follower passed to a dead leader gets no answer: it fails in time."""
    for module in (etcd_connection, etcd_watch):
        monkeypatch.setattr(module, "REQUEST_SECONDS", 2.0)
    with EtcdCluster() as cluster:
        loads = [Load(name, EtcdMeta(f"{cluster.url}/app", SystemClock())) for name in ("one", "two")]
        for load in loads:
            await load.start()
        for _ in range(rounds):
            for is_leader in (False, True):
                await loads[0].more(100)
                victim = cluster.leader() if is_leader else cluster.members[loads[0].meta._connection._at]
                victim.kill()
                for load in loads:
                    await load.more(100)
                await asyncio.to_thread(victim.restart)
            paused = cluster.members[loads[0].meta._connection._at]
            paused.pause()
            for load in loads:
                await load.more(100)
            paused.resume()
        await compare(loads)


async def test_an_etcd_that_does_not_answer_costs_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (etcd_connection, etcd_watch):
        monkeypatch.setattr(module, "REQUEST_SECONDS", 1.0)
    monkeypatch.setattr(etcd_connection, "CONNECT_SECONDS", 1.0)
    with PrivateEtcd() as etcd:
        url = etcd.new_prefix()
        meta, other = EtcdMeta(url, SystemClock()), EtcdMeta(url, SystemClock())
        await meta.start()
        await other.start()
        seen = asyncio.Event()
        meta.watch("", lambda key, value: seen.set() if key == "after" else None)
        await meta.transact(Put("before", b""))
        etcd.pause()
        started = time.monotonic()
        waiting = [meta.transact(Put("a", b"%d" % at)) for at in range(20)]  # each in a request of its own
        for promise in (meta.get("before"), meta.list(""), *waiting):
            with pytest.raises(RequestError, match="cannot be reached") as caught:
                await promise  # type: ignore[misc]
            assert caught.value.code.retriable
        assert time.monotonic() - started < 6.0
        etcd.resume()
        async with asyncio.timeout(SECONDS):
            while True:
                with contextlib.suppress(RequestError):
                    await other.transact(Put("after", b""))
                    break
                await asyncio.sleep(0.05)
            await seen.wait()
        await meta.close()
        await other.close()


async def test_an_etcd_that_lost_its_data_makes_the_metadata_read_only() -> None:
    """Else its brokers would take every topic for deleted, and delete the logs."""
    with PrivateEtcd() as etcd:
        meta = EtcdMeta(etcd.new_prefix(), SystemClock())
        await meta.start()
        seen: list[str] = []
        await meta.transact(Put("topics/a", b""))
        await meta.transact(Put("topics/b", b""))
        meta.watch("topics/", lambda key, value: seen.append(key))
        etcd.kill()
        etcd.lose_data()
        await asyncio.to_thread(etcd.restart)
        async with asyncio.timeout(SECONDS):
            while True:
                with contextlib.suppress(RequestError):
                    await meta.get("topics/a")
                if meta.failure is not None:
                    break
                await asyncio.sleep(0.01)
        assert "etcd lost its data or was restored from a snapshot (revision 1 after" in meta.failure
        for promise in (meta.get("topics/a"), meta.list("topics/"), meta.transact(Put("x", b""))):
            with pytest.raises(RequestError, match="the metadata store is read-only: etcd lost its data"):
                await promise
        assert seen == []
        await meta.close()


def test_a_broker_serves_records_while_etcd_is_away_and_changes_after_that(tmp_path: Path) -> None:
    with PrivateEtcd() as etcd:
        url = etcd.new_prefix()
        with ServedBroker(tmp_path / "data", "--meta", url) as broker:
            admin = AdminClient({"bootstrap.servers": broker.address})
            admin.create_topics([NewTopic("orders", 1)])["orders"].result(20)
            etcd.kill()
            producer = Producer({"bootstrap.servers": broker.address})
            producer.produce("orders", b"x")
            assert producer.flush(20) == 0
            started = time.monotonic()
            with pytest.raises(KafkaException, match=r"KAFKA_STORAGE_ERROR|cannot be reached"):
                admin.create_topics([NewTopic("late", 1)])["late"].result(20)
            assert time.monotonic() - started < 10
            etcd.restart()
            deadline = time.monotonic() + SECONDS
            while True:
                with contextlib.suppress(KafkaException):
                    admin.create_topics([NewTopic("late", 1)])["late"].result(20)
                    break
                assert time.monotonic() < deadline
            broker.kill()
            broker.start()
            assert {"orders", "late"} <= set(admin.list_topics(timeout=20).topics)
            errors = broker.errors()
        assert "Traceback" not in errors and errors.count("watch lost") == 1, errors
        with (
            pytest.raises(AssertionError, match="the metadata belong to other logs than those in"),
            ServedBroker(tmp_path / "other", "--meta", url),
        ):
            pass
