"""A partition whose directory is missing: reported and refused, with the positions of its readers kept."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
import urllib.request
from collections.abc import Awaitable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

import millstream
from millstream.broker.topics import PREFIX, Topics
from millstream.core.errors import Code, RequestError
from millstream.log.flusher import Flusher
from millstream.stores.base import Put
from millstream.stores.local import LocalLogStore
from millstream.stores.sqlite_meta import SqliteMeta
from millstream.testing.clock import VirtualClock
from millstream.testing.disk import ForgetfulDisk
from tests.batches import append, batch, read_all
from tests.command_line import Cli
from tests.compat import raw
from tests.compat.client_flowmq import FlowmqClient
from tests.serving import ServedBroker
from tests.stores import stored_key

SECONDS = 20.0
LIST_OFFSETS, OFFSETS_VERSION = 2, 5


async def code_of(work: Awaitable[object]) -> Code:
    with pytest.raises(RequestError) as caught:
        await work
    return caught.value.code


class Machine:
    """A data directory and the topics of brokers that are started on it, one after the other."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.disk: ForgetfulDisk | None = None

    async def start(self) -> Topics:
        self.logs = LocalLogStore(str(self.directory), VirtualClock(), Flusher(asyncio.get_running_loop()), self.disk)
        self.logs.lock()
        self.meta = SqliteMeta(str(self.directory / "meta.db"))
        self.topics = Topics(
            self.meta,
            self.logs,
            VirtualClock(),
            defaults={},
            partitions_max=100,
            default_partitions=1,
            auto_create=True,
        )
        await self.topics.start()
        return self.topics

    async def stop(self) -> None:
        self.topics.close()
        await self.logs.close()
        await self.meta.close()

    async def restart(self) -> Topics:
        await self.stop()
        return await self.start()

    def partitions(self, topic: str) -> set[str]:
        return {path.parent.name[:-9] + "/" + path.name for path in self.directory.glob(f"logs/{topic}-*/*")}

    def stored(self, topic: str) -> Any:
        return json.loads(stored_key(f"file:{self.directory}", PREFIX + topic))

    async def forget_mark(self, topic: str) -> None:
        """Leaves the key as an earlier version wrote it."""
        stored = self.stored(topic)
        del stored["created"]
        await self.meta.transact(Put(PREFIX + topic, json.dumps(stored).encode()))

    def lose(self, topic: str, partition: int) -> None:
        [path] = self.directory.glob(f"logs/{topic}-*/{partition}")
        shutil.rmtree(path)


@pytest.fixture
async def machine(tmp_path: Path) -> Any:
    made = Machine(tmp_path / "data")
    await made.start()
    yield made
    await made.stop()


def lost(topics: Topics, name: str) -> list[int]:
    topic = topics.get(name)
    assert topic is not None
    return [partition.index for partition in topic.partitions if partition.log.damage.lost is not None]


class TestADirectory:
    async def test_that_is_missing_costs_its_partition(
        self, machine: Machine, caplog: pytest.LogCaptureFixture
    ) -> None:
        topic = await machine.topics.create("orders", 2, {})
        for partition in topic.partitions:
            await append(partition.log, batch(b"kept"))
        await machine.stop()
        machine.lose("orders", 0)
        caplog.clear()
        topics = await machine.start()
        assert lost(topics, "orders") == [0]
        found = topics.get("orders")
        assert found is not None
        gone, kept = (partition.log for partition in found.partitions)
        told = [message.getMessage() for message in caplog.records if "missing directory" in message.getMessage()]
        assert len(told) == 1 and "orders-0" in told[0] and str(machine.directory / "logs") in told[0]
        for work in (
            gone.read(0, 100), gone.read(1, 100), gone.append(*_batch()), gone.trim(0), gone.refresh(),
            gone.find_time(0), gone.find_max_time(),
        ):  # fmt: skip
            assert isinstance(work.error, RequestError) and work.error.code is Code.KAFKA_STORAGE_ERROR
            assert "restore it and restart the broker, or delete the topic" in work.error.detail
        assert [record.value for record in read_all(kept)] == [b"kept"] and (
            await append(kept, batch(b"more"))
        ).base_offset == 1
        topics = await machine.restart()
        assert lost(topics, "orders") == [0], "nothing made the directory"

    async def test_that_never_had_a_record_is_noticed_as_well(self, machine: Machine) -> None:
        await machine.topics.create("orders", 2, {})
        assert lost(await machine.restart(), "orders") == []
        machine.lose("orders", 1)
        assert lost(await machine.restart(), "orders") == [1]

    async def test_of_a_partition_that_was_added_is_noticed(self, machine: Machine) -> None:
        await machine.topics.create("orders", 1, {})
        await machine.topics.grow("orders", 3)
        await machine.topics.configure("orders", {"retention.ms": "5"})
        assert machine.stored("orders")["created"] == 3
        machine.lose("orders", 2)
        assert lost(await machine.restart(), "orders") == [2]

    async def test_can_be_deleted_with_its_topic(self, machine: Machine) -> None:
        await machine.topics.create("orders", 2, {})
        machine.lose("orders", 0)
        topics = await machine.restart()
        await (await topics.delete("orders"))
        async with asyncio.timeout(SECONDS):
            while machine.partitions("orders"):  # noqa: ASYNC110  (the removal runs in a thread)
                await asyncio.sleep(0.01)
        await topics.create("orders", 2, {})
        assert lost(await machine.restart(), "orders") == []

    async def test_that_is_made_again_by_hand_is_an_empty_log(self, machine: Machine) -> None:
        await machine.topics.create("orders", 1, {})
        machine.lose("orders", 0)
        await machine.restart()
        [topic] = machine.directory.glob("logs/orders-*")
        (topic / "0").mkdir()
        topics = await machine.restart()
        found = topics.get("orders")
        assert found is not None and lost(topics, "orders") == []
        assert (await append(found.partitions[0].log, batch(b"x"))).base_offset == 0


class TestATopicOfAnEarlierVersion:
    """Its key does not say that its directories were made; they were made by the first append."""

    async def test_opens_without_directories_and_is_protected_from_then_on(self, machine: Machine) -> None:
        await machine.topics.create("orders", 2, {"retention.ms": "5"})
        await machine.forget_mark("orders")
        machine.lose("orders", 0)
        topics = await machine.restart()
        assert lost(topics, "orders") == [] and machine.partitions("orders") == {"orders/0", "orders/1"}
        assert machine.stored("orders")["created"] == 2
        assert machine.stored("orders")["settings"] == {"retention.ms": "5"}
        await topics.configure("orders", {})
        await topics.grow("orders", 3)  # the revision is the new one
        machine.lose("orders", 0)
        assert lost(await machine.restart(), "orders") == [0]

    async def test_opens_where_no_directory_can_be_made(
        self, machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        await machine.topics.create("orders", 2, {})
        await machine.forget_mark("orders")
        machine.lose("orders", 0)

        async def refuse(*_: object) -> None:
            raise RequestError(Code.KAFKA_STORAGE_ERROR, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(LocalLogStore, "create", refuse)
            topics = await machine.restart()
        assert lost(topics, "orders") == [] and "created" not in machine.stored("orders")
        assert "No space left on device" in caplog.text
        await topics.grow("orders", 3)
        assert "created" not in machine.stored("orders"), "partition 0 may have no directory"
        assert lost(await machine.restart(), "orders") == []
        assert machine.stored("orders")["created"] == 3


class TestAKill:
    async def test_between_the_directories_and_the_key_leaves_nothing(self, machine: Machine) -> None:
        await machine.logs.create("orders", "0123456789abcdef", range(3))
        topics = await machine.restart()
        assert topics.get("orders") is None and not machine.partitions("orders")
        assert not (machine.directory / "set-aside").exists()

    async def test_in_the_middle_of_growth_leaves_the_topic_as_it_was(self, machine: Machine) -> None:
        topic = await machine.topics.create("orders", 1, {})
        await machine.logs.create("orders", topic.id.hex, range(1, 3))
        topics = await machine.restart()
        assert lost(topics, "orders") == [] and machine.stored("orders")["partitions"] == 1
        await topics.grow("orders", 3)
        assert lost(await machine.restart(), "orders") == []

    async def test_behind_a_deleted_key_leaves_no_topic(self, machine: Machine) -> None:
        await machine.topics.create("orders", 2, {})
        machine.topics.close()
        with sqlite3.connect(machine.directory / "meta.db") as database:
            database.execute("DELETE FROM meta WHERE key = ?", (PREFIX + "orders",))
        topics = await machine.restart()
        assert topics.get("orders") is None and not machine.partitions("orders")

    @pytest.mark.parametrize("partitions", [1, 3])
    async def test_or_a_power_cut_finds_each_directory_that_a_key_may_name(
        self, tmp_path: Path, partitions: int
    ) -> None:
        """Whatever the disk forgets: `create` returns only when all directories are durable."""
        for operation in range(1, 12):
            machine = Machine(tmp_path / str(operation))
            machine.disk = disk = ForgetfulDisk(str(tmp_path))
            await machine.start()
            disk.lose_power_at(operation, Random(operation))
            try:
                await machine.logs.create("orders", "0123456789abcdef", range(partitions))
                is_created = True
            except BaseException:
                is_created = False
            await machine.meta.close()
            machine.logs.unlock()
            if not is_created:
                continue
            disk.crash(Random(operation))
            assert len(machine.partitions("orders")) == partitions
            break
        else:
            raise AssertionError("the power was always gone")
        assert operation > partitions

    async def test_or_a_failed_sync_creates_nothing(self, tmp_path: Path) -> None:
        for failing in (1, 2):
            machine = Machine(tmp_path / str(failing))
            machine.disk = ForgetfulDisk(str(tmp_path))
            topics = await machine.start()
            machine.disk.fail_sync(failing)
            assert await code_of(topics.create("orders", 2, {})) is Code.KAFKA_STORAGE_ERROR
            assert topics.get("orders") is None and not list(machine.directory.glob("logs/*"))
            await topics.create("orders", 2, {})
            await machine.stop()


async def test_of_two_that_create_a_topic_one_leaves_no_directories(machine: Machine) -> None:
    made = await asyncio.gather(*(machine.topics.create("orders", 2, {}) for _ in range(2)), return_exceptions=True)
    assert [each.code for each in made if isinstance(each, RequestError)] == [Code.TOPIC_ALREADY_EXISTS]
    assert len(list(machine.directory.glob("logs/*"))) == 1


async def test_positions_of_all_disciplines_outlive_a_missing_directory(tmp_path: Path) -> None:
    """A group that fell back to offset 0 would process everything again once the directory is restored."""
    store, aside = f"file:{tmp_path / 'data'}", tmp_path / "aside"

    async def receive(ms: millstream.Millstream) -> list[object]:
        got: list[object] = []
        async with ms.stream("t", group="stream") as records:
            got.append(await _outcome(records.receive(SECONDS)))
            if not isinstance(got[-1], RequestError):
                await records.commit()
        async with ms.exclusive("t", group="exclusive") as events:
            event = await _outcome(events.receive(SECONDS))
            got.append(event)
            if not isinstance(event, RequestError):
                await event.commit()
        async with ms.queue("t", group="queue") as jobs:
            job = await _outcome(jobs.receive(1.0))
            got.append(job)
            if job is not None and not isinstance(job, RequestError):
                await job.accept()
        topic = ms.broker.topics.get("t")  # type: ignore[attr-defined]
        taken = await _outcome(ms.broker.cursors.read("fanout", topic, 100, 1))  # type: ignore[attr-defined]
        got.append(taken if isinstance(taken, RequestError) else taken[0])
        return got

    async with millstream.open(store, default_partitions=1) as ms:
        await ms.send_many([("t", b"%d" % number) for number in range(3)])
        assert [each.offset for each in await receive(ms)] == [0] * 4  # type: ignore[attr-defined]
    [partition] = (tmp_path / "data").glob("logs/t-*/0")
    partition.rename(aside)
    async with millstream.open(store, default_partitions=1) as ms:
        for each in await receive(ms):
            assert each is None or (isinstance(each, RequestError) and each.code is Code.KAFKA_STORAGE_ERROR), each
        assert await code_of(ms.send("t", b"x")) is Code.KAFKA_STORAGE_ERROR
    aside.rename(partition)
    async with millstream.open(store, default_partitions=1) as ms:
        assert [each.offset for each in await receive(ms)] == [1] * 4  # type: ignore[attr-defined]
        assert (await ms.send("t", b"x")).offset == 3


async def _outcome(work: Awaitable[Any]) -> Any:
    try:
        return await work
    except RequestError as error:
        return error


def test_clients_and_operators_are_told_of_a_missing_directory(tmp_path: Path) -> None:
    with ServedBroker(tmp_path / "data", "--flowmq", "127.0.0.1:0") as broker:
        raw.create_topic(broker.address, "t", 2)
        producer = Producer({"bootstrap.servers": broker.address, "linger.ms": 0})
        for partition in (0, 1):
            producer.produce("t", b"kept", partition=partition)
        assert producer.flush(SECONDS) == 0
        broker.kill()
        [directory] = tmp_path.glob("data/logs/t-*/0")
        directory.rename(tmp_path / "aside")
        broker.start()
        _check_refusals(broker.address)
        _check_reports(broker, directory)
        with FlowmqClient(broker.doors["flowmq"]) as client:
            client.subscribe("t", "workers")
            assert client.next().payload == b"kept", "the other partition is served"
        assert broker.errors().count("missing directory") == 1
        broker.stop()
        (tmp_path / "aside").rename(directory)
        broker.start()
        assert _health(broker)["status"] == "ok"
        assert _consume(broker.address, 0) == b"kept"
        broker.stop()
        shutil.rmtree(directory.parent)
        broker.start()
        Cli(broker.address)("topic", "delete", "t")
        assert _health(broker)["status"] == "ok"


def _check_refusals(address: str) -> None:
    assert _consume(address, 1) == b"kept"
    consumer = Consumer({"bootstrap.servers": address, "group.id": "g", "auto.offset.reset": "earliest"})
    with pytest.raises(KafkaException) as caught:
        consumer.get_watermark_offsets(TopicPartition("t", 0), timeout=2)
    assert caught.value.args[0].code() in (KafkaError.KAFKA_STORAGE_ERROR, KafkaError._TIMED_OUT)
    consumer.close()
    with raw.Raw(address) as client:
        answer = client.ask(raw.produce("t", raw.batch(b"x"), partition=0))
        assert answer.responses[0].partition_responses[0].error_code == Code.KAFKA_STORAGE_ERROR
        for offset in (0, 1, 5):
            answer = client.ask(raw.fetch("t", offset))
            assert answer.responses[0].partitions[0].error_code == Code.KAFKA_STORAGE_ERROR
        for timestamp in (-1, -2, -3, 0):
            partition = {"partition_index": 0, "current_leader_epoch": 0, "timestamp": timestamp}
            fields = {"replica_id": -1, "isolation_level": 0, "topics": [{"name": "t", "partitions": [partition]}]}
            client.send(raw.request(LIST_OFFSETS, OFFSETS_VERSION, fields))
            answer = client.answer(LIST_OFFSETS, OFFSETS_VERSION)
            assert answer.topics[0].partitions[0].error_code == Code.KAFKA_STORAGE_ERROR


def _check_reports(broker: ServedBroker, directory: Path) -> None:
    health = _health(broker)
    assert health["status"] == "damaged" and len(health["reasons"]) == 1
    assert str(directory) in health["reasons"][0] and "t-0" in health["reasons"][0]
    cli = Cli(broker.address)
    shown = cli("topic", "describe", "t")
    assert f"partition 0 is lost: its directory {directory} is missing" in shown
    described = cli.json("topic", "describe", "t")
    assert [each["end"] for each in described["partitions"]] == [None, 1]
    assert described["damage"][0]["cause"] == "missing directory"
    metrics = _page(broker, "metrics").decode()
    assert 'millstream_damaged_ranges{partition="0",topic="t"} 1.0' in metrics
    assert "millstream_damage_found_total 1.0" in metrics


def _page(broker: ServedBroker, page: str) -> bytes:
    with urllib.request.urlopen(f"http://{broker.http}/{page}", timeout=SECONDS) as answer:
        return bytes(answer.read())


def _health(broker: ServedBroker) -> Any:
    return json.loads(_page(broker, "healthz"))


def _consume(address: str, partition: int) -> bytes | None:
    consumer = Consumer({"bootstrap.servers": address, "group.id": "g", "auto.offset.reset": "earliest"})
    consumer.assign([TopicPartition("t", partition, 0)])
    message = consumer.poll(SECONDS)
    consumer.close()
    assert message is not None and message.error() is None
    value = message.value()
    assert isinstance(value, bytes)
    return value


def _batch() -> Any:
    from millstream.records.batch import read_header

    data = memoryview(bytearray(batch(b"x")))
    return data, read_header(data)
