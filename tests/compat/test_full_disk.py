"""A disk without room, through real sockets: what clients, pages and workers are told, and what goes on."""

from __future__ import annotations

import errno
import os
import select
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import millstream as package
from millstream.core.disk import Disk, OpenFile
from millstream.core.errors import Code, LeaseLost, RequestError
from millstream.stores.local import LocalLogStore
from millstream.stores.sqlite_meta import SqliteMeta
from tests.compat import raw
from tests.compat.client_flowmq import FlowmqClient, FlowmqError
from tests.compat.share_frames import ACCEPT, REJECT, RELEASE, Bare, codes, leases, topic_id
from tests.compat.share_workers import configure
from tests.in_thread import BrokerInThread
from tests.serving import MILLSTREAM

Unique = Callable[[str], str]
TOLD_SECONDS_MAX = 10


class FullDisk:
    """While it `is_full`, every write fails: commits of the metadata as SQLite says it of a full disk, and appends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = False
        write = SqliteMeta._write

        def full(meta: SqliteMeta, *arguments: object) -> None:
            if self.is_full:
                error = sqlite3.OperationalError("database or disk is full")
                error.sqlite_errorname = "SQLITE_FULL"
                raise error
            write(meta, *arguments)  # type: ignore[arg-type]

        append = Disk.append

        def append_unless_full(real: Disk, file: OpenFile, data: memoryview) -> None:
            if self.is_full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            append(real, file, data)

        def room(store: LocalLogStore) -> tuple[int, int]:
            return 1 << 30, 0 if self.is_full else 1 << 29

        monkeypatch.setattr(SqliteMeta, "_write", full)
        monkeypatch.setattr(Disk, "append", append_unless_full)
        monkeypatch.setattr(LocalLogStore, "room", room)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FullDisk:
    return FullDisk(monkeypatch)


@pytest.fixture
def served(disk: FullDisk, tmp_path: Path) -> Iterator[BrokerInThread]:
    broker = BrokerInThread(tmp_path / "data", flowmq="127.0.0.1:0", http="127.0.0.1:0").start()
    yield broker
    disk.is_full = False
    broker.stop()


@pytest.mark.parametrize("verb", ["ack", "nack"])
def test_a_flowmq_message_whose_answer_was_refused_is_still_its_subscribers(
    served: BrokerInThread, disk: FullDisk, verb: str
) -> None:
    with FlowmqClient(served.address("flowmq")) as client, FlowmqClient(served.address("flowmq")) as other:
        client.create_topic("jobs")
        client.subscribe("jobs", "workers")
        other.publish("jobs", b"1")
        message = client.next()
        disk.is_full = True
        for _ in range(3):
            with pytest.raises(FlowmqError, match="the disk is full"):
                getattr(client, verb)(message)
        other.subscribe("jobs", "workers")
        assert other.has_nothing() and client.has_nothing()
        disk.is_full = False
        getattr(client, verb)(message)
        if verb == "ack":
            with pytest.raises(FlowmqError, match="is not leased to this connection"):
                client.ack(message)
            served.advance(31)
            assert other.has_nothing() and client.has_nothing()


def test_a_flowmq_message_whose_answer_was_refused_comes_again_when_its_lease_ends(
    served: BrokerInThread, disk: FullDisk
) -> None:
    with FlowmqClient(served.address("flowmq")) as client:
        client.create_topic("jobs")
        client.subscribe("jobs", "workers")
        with FlowmqClient(served.address("flowmq")) as other:
            other.publish("jobs", b"1")
        message = client.next()
        disk.is_full = True
        with pytest.raises(FlowmqError, match="the disk is full"):
            client.ack(message)
        served.advance(31)
        assert client.next() == message
        disk.is_full = False
        client.ack(message)


@pytest.mark.parametrize("kind", [ACCEPT, RELEASE, REJECT])
@pytest.mark.parametrize("how", ["acknowledge", "fetch"])
def test_a_share_acknowledgement_that_was_refused_may_be_repeated(
    served: BrokerInThread, disk: FullDisk, kind: int, how: str
) -> None:
    """The Java client repeats an acknowledgement whose error is retriable, until its timeout."""
    address = served.address("kafka")
    raw.create_topic(address, "jobs", 1)
    configure(address, "workers")
    place = topic_id(address, "jobs"), 0
    with raw.Raw(address) as connection:
        assert (
            connection.ask(raw.produce("jobs", raw.batch(b"1", b"2"))).responses[0].partition_responses[0].error_code
            == 0
        )
    with Bare(address, "workers", "jobs") as member:
        assert leases(member.fetch(0, {place: ()})) == {0: [(0, 1, 1)]}
        disk.is_full = True
        for epoch in (1, 2):
            told = codes(getattr(member, how)(epoch, {place: [(0, 1, [kind])]}))
            assert told == {0: Code.COORDINATOR_NOT_AVAILABLE} and Code.COORDINATOR_NOT_AVAILABLE.retriable
        disk.is_full = False
        assert codes(getattr(member, how)(3, {place: [(0, 1, [kind])]})) == {0: 0}


async def test_a_job_whose_answer_was_refused_is_still_its_workers(served: BrokerInThread, disk: FullDisk) -> None:
    async with package.connect(served.address("kafka"), timeout=10) as ms:
        await ms.send("jobs", b"1")
        async with ms.queue("jobs", group="workers") as queue:
            job = await queue.receive(timeout=20)
            assert job is not None
            disk.is_full = True
            for _ in range(2):
                with pytest.raises(RequestError, match="the disk is full") as refused:
                    await job.accept()
                assert not isinstance(refused.value, LeaseLost)
            disk.is_full = False
            await job.accept()
            with pytest.raises(LeaseLost):
                await job.accept()


async def test_so_is_one_of_a_broker_in_the_process(disk: FullDisk, tmp_path: Path) -> None:
    async with package.open(f"file:{tmp_path}/data") as ms:
        await ms.send("jobs", b"1")
        async with ms.queue("jobs", group="workers") as queue:
            job = await queue.receive(timeout=20)
            assert job is not None
            disk.is_full = True
            with pytest.raises(RequestError, match="the disk is full"):
                await job.reject("bad")
            disk.is_full = False
            await job.accept()


def test_produce_says_why_records_wait_and_goes_on_when_there_is_room(served: BrokerInThread, disk: FullDisk) -> None:
    address = served.address("kafka")
    raw.create_topic(address, "logs", 1)
    disk.is_full = True
    command = [MILLSTREAM, "produce", "logs", "one", "two", "--broker", address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None and process.stdout is not None
        started = served.ask(lambda server: server.metrics.requests[3])
        deadline = time.monotonic() + 60  # the interpreter takes its time to start on a busy machine
        while served.ask(lambda server: server.metrics.requests[3]) == started and time.monotonic() < deadline:
            time.sleep(0.02)
        # It has connected: it tells the reason after 2 s, which other processes may delay, and tries for 30 s.
        assert select.select([process.stderr], [], [], TOLD_SECONDS_MAX)[0], "it says nothing"
        told = process.stderr.readline()
        assert told.startswith("millstream: logs: 2 records not stored yet, retrying: the disk is full: ")
        disk.is_full = False
        assert process.stdout.read().count("Produced to logs") == 2
        assert process.wait(30) == 0
