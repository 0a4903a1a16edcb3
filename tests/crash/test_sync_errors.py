"""Disks that fail: a sync that reports EIO is the end of that log, a write that finds no room costs its request."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from random import Random
from threading import Event

import pytest

from millstream.core.disk import Disk, OpenFile
from millstream.core.errors import Code, LogReadOnly, MillstreamError, RequestError, StartupError
from millstream.core.promise import Promise
from millstream.log.answers import Appended
from millstream.log.config import LogConfig
from millstream.log.flusher import Flusher
from millstream.log.replica import ReplicaLog
from millstream.stores.local import LocalLogStore
from millstream.testing.clock import VirtualClock
from millstream.testing.disk import ForgetfulDisk
from tests.batches import append, append_run, batch, read_all
from tests.crash.machine import HandFlusher, InlineExecutor
from tests.crash.store_directory import open_log

KEEP = LogConfig(segment_bytes=1500, index_interval_bytes=200, retention_ms=-1)
COMPACT = LogConfig(
    segment_bytes=700, index_interval_bytes=200, delete=False, compact=True, min_cleanable_dirty_ratio=0.01
)
TOPIC_IDS = ("kept", "0123456789abcdef"), ("compacted", "fedcba9876543210")


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    loop.set_default_executor(InlineExecutor(1))
    yield loop
    loop.close()


def fill(disk: ForgetfulDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk has no room but what removed files gave back."""
    room = 0

    def write(file: OpenFile, data: bytes) -> None:
        nonlocal room
        room -= len(data)
        if room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        ForgetfulDisk.append(disk, file, data)

    def remove(path: str) -> None:
        nonlocal room
        room = max(room, 0) + os.stat(path).st_size
        ForgetfulDisk.remove(disk, path)

    monkeypatch.setattr(disk, "append", write)
    monkeypatch.setattr(disk, "remove", remove)


class Failing:
    """A store on a disk whose syncs fail, its two logs, and what they acknowledged."""

    def __init__(self, directory: Path, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.clock = VirtualClock()
        self.disk = ForgetfulDisk(str(directory))
        self.directory = str(directory / "data")
        self.acknowledged: list[dict[int, bytes]] = [{}, {}]
        self.trimmed = 0
        self.refusals: list[RequestError] = []
        self.open()

    def open(self) -> None:
        self.flusher = HandFlusher()
        self.store = LocalLogStore(self.directory, self.clock, self.flusher, self.disk)
        self.logs = [
            open_log(self.store, topic, topic_id, 0, config)
            for (topic, topic_id), config in zip(TOPIC_IDS, (KEEP, COMPACT), strict=True)
        ]

    def work(self, rounds: int = 30) -> None:
        """Appends to both logs, with trims and housekeeping in between; refusals are collected."""
        for turn in range(rounds):
            for at, log in enumerate(self.logs):
                self._append(at, log, b"%d:" % turn + bytes(150))
            if turn % 10 == 5:
                self._try(lambda: self._trim(self.logs[0]))
            if turn % 10 == 9:
                self.clock.advance(60)
                self.housekeep()

    def housekeep(self) -> None:
        self.flusher.is_willing = True
        self.loop.run_until_complete(self.store.housekeep())
        self.flusher.is_willing = False

    def _append(self, at: int, log: ReplicaLog, value: bytes) -> None:
        data = batch(value, keys=[b"key-%d" % (len(self.acknowledged[at]) % 3)], at=self.clock.now_ms())
        try:
            self.acknowledged[at][self.append(log, data).value().base_offset] = value
        except RequestError as refusal:
            self.refusals.append(refusal)

    def append(self, log: ReplicaLog, data: bytearray) -> Promise[Appended]:
        promise = append(log, data)
        self.flusher.run_all()
        return promise

    def _trim(self, log: ReplicaLog) -> None:
        self.trimmed = log.trim(max(log.high_watermark - 12, 0)).value()

    def _try(self, step: object) -> None:
        try:
            step()  # type: ignore[operator]
        except RequestError as refusal:
            self.refusals.append(refusal)

    def check(self) -> list[dict[int, bytes | None]]:
        """Every acknowledged record can be read, once, at its offset; answers with all that can be read."""
        found: list[dict[int, bytes | None]] = []
        for log, acknowledged in zip(self.logs, self.acknowledged, strict=True):
            records = read_all(log)
            offsets = [record.offset for record in records]
            assert offsets == sorted(set(offsets))
            values = {record.offset: record.value for record in records}
            newest = {offset % 3: offset for offset in sorted(acknowledged)}
            for offset, value in acknowledged.items():
                if log is self.logs[0] and offset < max(log.start, self.trimmed):
                    continue
                if log is self.logs[1] and offset not in values and newest[offset % 3] != offset:
                    continue
                assert values[offset] == value, f"{log.name}: {offset} was acknowledged"
            found.append(values)
        assert self.logs[0].start >= self.trimmed
        return found


@pytest.mark.parametrize("call", range(1, 51))
def test_an_eio_at_sync(
    call: int, tmp_path: Path, loop: asyncio.AbstractEventLoop, caplog: pytest.LogCaptureFixture
) -> None:
    """...makes that log read-only, and neither a restart nor a power loss after it takes an acknowledged record."""
    machine = Failing(tmp_path, loop)
    machine.disk.fail_sync(at=call)
    machine.work()
    assert machine.disk.syncs > call
    failed = [log for log in machine.logs if log.failure is not None]
    assert len(failed) == 1, "the log whose sync failed, and no other"
    assert f"{failed[0].name} is read-only until the broker restarts" in caplog.text
    refused = append(failed[0], batch(b"more", keys=[b"k"]))
    assert isinstance(refused.error, RequestError) and refused.error.code is Code.KAFKA_STORAGE_ERROR
    assert "read-only" in str(refused.error)
    machine.check()

    machine.open()
    shown = machine.check()
    assert all(log.failure is None for log in machine.logs)

    machine.disk = machine.disk.crash(Random(call))
    machine.open()
    left = machine.check()
    assert left[0] == shown[0], "what readers saw after the restart is what they see after the power loss"
    assert shown[1].items() <= left[1].items(), "what compaction had removed may be back, nothing else may be gone"
    machine.work(rounds=3)
    machine.check()


@pytest.mark.parametrize("call", range(1, 9))
def test_an_eio_during_recovery_stops_the_start_with_a_sentence(
    call: int, tmp_path: Path, loop: asyncio.AbstractEventLoop
) -> None:
    machine = Failing(tmp_path, loop)
    machine.work(rounds=8)
    machine.disk.fail_sync(at=call)
    with pytest.raises(StartupError, match="cannot be recovered"):
        machine.open()
    machine.disk = machine.disk.crash(Random(call))
    machine.open()
    machine.check()


def test_an_eio_at_shutdown_costs_only_its_log(
    tmp_path: Path, loop: asyncio.AbstractEventLoop, caplog: pytest.LogCaptureFixture
) -> None:
    machine = Failing(tmp_path, loop)
    machine.work(rounds=4)
    machine.disk.fail_sync(at=1)
    loop.run_until_complete(machine.store.close())
    assert [log.closed for log in machine.logs] == [True, True]
    machine.disk = machine.disk.crash(Random(1))
    machine.open()
    machine.check()
    assert 0 < machine.store.scanned_bytes < 4 * 250, "the other log had a clean point"


async def test_waiting_appends_fail_with_the_sync_and_readers_go_on(tmp_path: Path) -> None:
    disk = ForgetfulDisk(str(tmp_path))
    store = LocalLogStore(str(tmp_path / "data"), VirtualClock(), Flusher(asyncio.get_running_loop()), disk)
    log = open_log(store, "t", "0123456789abcdef", 0, KEEP)
    await append(log, batch(b"kept"))
    woken = asyncio.Event()
    log.wake(woken.set)
    disk.fail_sync(at=1)
    outcomes = await asyncio.gather(*(append(log, batch(b"x")) for _ in range(10)), return_exceptions=True)
    assert {type(outcome).__name__ for outcome in outcomes} == {"LogReadOnly"}
    assert woken.is_set(), "waiting readers are woken"
    assert (log.high_watermark, [record.value for record in read_all(log)]) == (1, [b"kept"])
    with pytest.raises(MillstreamError, match="read-only"):
        await log.flush()
    await store.close()


class FailsWhenTold(Disk):
    """Holds a sync until the test lets it fail."""

    def __init__(self) -> None:
        super().__init__()
        self.is_syncing, self.may_fail = Event(), Event()

    def sync(self, file: OpenFile) -> None:
        self.is_syncing.set()
        self.may_fail.wait(60)
        raise OSError(errno.EIO, os.strerror(errno.EIO))


async def test_a_failed_sync_of_a_topic_that_was_deleted_meanwhile_is_no_news(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FailsWhenTold()
    store = LocalLogStore(str(tmp_path / "data"), VirtualClock(), Flusher(asyncio.get_running_loop()), disk)
    log = store.open("t", "0123456789abcdef", 0, KEEP)
    assert isinstance(log, ReplicaLog)
    waiting = append(log, batch(b"x"))
    assert await asyncio.to_thread(disk.is_syncing.wait, 60)
    await store.discard("t", "0123456789abcdef")
    assert isinstance(waiting.error, RequestError) and waiting.error.code is Code.UNKNOWN_TOPIC_OR_PARTITION
    disk.may_fail.set()
    async with asyncio.timeout(60):
        while log._sync_target is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert log.failure is None
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
    await store.close()


def no_room(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class TestNoRoom:
    @pytest.fixture
    def machine(self, tmp_path: Path, loop: asyncio.AbstractEventLoop) -> Failing:
        return Failing(tmp_path, loop)

    @pytest.mark.parametrize("room", [0, 1, 60, 61, 100, 217, 218, 1000, 1300])
    def test_costs_only_the_request_that_found_none(self, machine: Failing, room: int) -> None:
        machine.work(rounds=2)
        machine.disk.fail_write(errno.ENOSPC, after_bytes=room)
        machine.work(rounds=9)
        assert [refusal.code for refusal in machine.refusals] == [Code.KAFKA_STORAGE_ERROR]
        assert "No space left" in str(machine.refusals[0])
        assert [log.failure for log in machine.logs] == [None, None]
        assert [log.end for log in machine.logs] in ([10, 11], [11, 10]), "the offset goes to the next batch"
        machine.check()
        machine.disk = machine.disk.crash(Random(room))
        machine.open()
        machine.check()
        assert machine.store.cut_bytes == 0

    def test_leaves_no_half_batch_behind(self, machine: Failing) -> None:
        machine.work(rounds=2)
        log = machine.logs[0]
        size = os.stat(log.segments[-1].path).st_size
        machine.disk.fail_write(errno.ENOSPC, after_bytes=100)
        machine._append(0, log, bytes(200))
        assert os.stat(log.segments[-1].path).st_size == size == log.segments[-1].size

    def test_an_idempotent_producer_may_try_again(self, machine: Failing) -> None:
        log = machine.logs[0]
        assert machine.append(log, batch(b"a", producer=7, sequence=0)).value().base_offset == 0
        machine.disk.fail_write(errno.ENOSPC, after_bytes=10)
        again = batch(b"b", producer=7, sequence=1)
        assert machine.append(log, bytearray(again)).error is not None
        answer = machine.append(log, again).value()
        assert (answer.base_offset, answer.duplicate) == (1, False)

    def test_for_a_checkpoint_refuses_the_trim_and_nothing_else(self, machine: Failing) -> None:
        machine.work(rounds=3)
        log = machine.logs[0]
        machine.disk.fail_write(errno.ENOSPC, after_bytes=5)
        refused = log.trim(2)
        assert isinstance(refused.error, RequestError) and refused.error.code is Code.KAFKA_STORAGE_ERROR
        assert log.start == 0 and log.failure is None
        assert log.trim(2).value() == 2

    def test_for_an_index_keeps_nobody_from_reading_trimming_or_closing(
        self, machine: Failing, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        log = machine.logs[0]
        log.config = LogConfig(index_interval_bytes=1, retention_ms=-1)

        for number in range(250):
            machine._append(0, log, b"%d" % number)
        monkeypatch.setattr(os, "posix_fallocate", no_room)
        for number in range(250, 270):
            machine._append(0, log, b"%d" % number)
        assert machine.refusals and all("No space left" in str(refusal) for refusal in machine.refusals)
        assert read_all(log, 100, bytes_max=1000)[0].offset == 100
        machine._trim(log)
        machine.check()
        machine.loop.run_until_complete(machine.store.close())
        monkeypatch.undo()
        machine.open()
        machine.check()

    def test_for_an_index_leaves_nothing_of_a_run_behind(
        self, machine: Failing, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        log = machine.logs[0]
        log.config = LogConfig(index_interval_bytes=500, retention_ms=-1)

        machine._append(0, log, b"first")
        monkeypatch.setattr(os, "posix_fallocate", no_room)
        refused = append_run(log, *[batch(b"refused-%d" % number + bytes(100)) for number in range(10)])
        assert isinstance(refused.error, RequestError) and "No space left" in str(refused.error)
        monkeypatch.undo()
        machine._append(0, log, b"second")
        assert machine.check()[0] == {0: b"first", 1: b"second"}
        machine.open()
        assert machine.check()[0] == {0: b"first", 1: b"second"}
        assert machine.store.cut_bytes == 0

    def test_makes_the_log_read_only_if_the_file_cannot_be_cut_back(
        self, machine: Failing, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        machine.work(rounds=2)
        log = machine.logs[0]

        def refuse(*_: object) -> None:
            raise OSError(errno.EROFS, "Read-only file system")

        machine.disk.fail_write(errno.ENOSPC, after_bytes=100)
        monkeypatch.setattr(machine.disk, "truncate", refuse)
        machine._append(0, log, bytes(200))
        assert log.failure is not None
        assert "kept-0 is read-only until the broker restarts" in caplog.text
        monkeypatch.undo()
        machine.open()
        machine.check()
        assert machine.store.cut_bytes == 100

    @pytest.mark.parametrize("way", ["retention", "trim"])
    def test_at_all_does_not_keep_old_segments_from_going(
        self, machine: Failing, monkeypatch: pytest.MonkeyPatch, way: str
    ) -> None:
        machine.work(rounds=40)
        disk, log = machine.disk, machine.logs[0]
        old = [segment.path for segment in log.segments[:-1]]
        fill(disk, monkeypatch)
        assert machine.append(log, batch(b"no room")).error is not None
        if way == "retention":
            log.config = LogConfig(segment_bytes=1500, retention_ms=-1, retention_bytes=1)
            machine.housekeep()
        else:
            log.trim(log.segments[-1].base_offset).value()
        assert old and not any(map(os.path.exists, old))
        machine.trimmed = log.start
        machine._append(0, log, b"room again")
        machine.check()
        machine.disk = disk.crash(Random(1))
        machine.open()
        machine.check()

    def test_at_all_does_not_keep_the_only_segment_from_going(
        self, machine: Failing, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        disk, log = machine.disk, machine.logs[0]
        log.config = LogConfig(index_interval_bytes=200, segment_ms=1000, retention_ms=60_000)
        for number in range(40):
            machine._append(0, log, b"%d" % number)
        (only,) = [segment.path for segment in log.segments]
        fill(disk, monkeypatch)
        machine.clock.advance(30)
        machine.housekeep()
        assert os.path.exists(only), "it is to begin a new one by now, for which there is no room"
        machine.clock.advance(60)
        machine.housekeep()
        assert not os.path.exists(only) and (log.start, log.end) == (40, 40)
        machine.trimmed = log.start
        machine._append(0, log, b"room again")
        machine.check()
        machine.disk = disk.crash(Random(1))
        machine.open()
        machine.check()

    def test_for_a_new_segment_does_not_make_a_search_of_each_read(
        self, machine: Failing, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        log = machine.logs[0]
        log.config = LogConfig(index_interval_bytes=200, retention_ms=1000)
        for number in range(100):
            machine._append(0, log, b"%d" % number + bytes(200))
        machine.clock.advance(60)
        monkeypatch.setattr(machine.disk, "append", no_room)
        machine.housekeep()
        assert not os.path.exists(log.segments[0].index.path), "it was to make room, and was not enough"
        monkeypatch.undo()
        run = append_run(log, *[batch(b"%d" % number + bytes(200)) for number in range(100, 110)])
        machine.flusher.run_all()
        assert run.value().base_offset == 100
        segment = log.segments[0]
        assert segment.index.by_offset(99)[1] > segment.size // 2
        machine.check()
        machine.disk = machine.disk.crash(Random(1))
        machine.open()
        machine.check()

    def test_is_not_said_of_every_log_in_every_round(
        self, machine: Failing, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        for number in range(50):
            log = open_log(machine.store, "many", "0011223344556677", number, LogConfig(segment_ms=1000))
            machine.append(log, batch(b"x")).value()
        machine.clock.advance(30)
        monkeypatch.setattr(machine.disk, "append", no_room)
        for _ in range(3):
            machine.housekeep()
        lines = [record for record in caplog.records if "housekeeping of " in record.getMessage()]
        assert (
            len(lines) == 10 and "No space left" in lines[0].getMessage() and not any(line.exc_info for line in lines)
        )

    def test_in_housekeeping_of_one_log_does_not_keep_it_from_the_others(
        self, machine: Failing, caplog: pytest.LogCaptureFixture
    ) -> None:
        machine.work(rounds=9)
        config = LogConfig(segment_bytes=1500, retention_ms=1000)
        for log in machine.logs:
            log.config = config
        machine.clock.advance(3600)
        machine.disk.fail_write(errno.EFBIG, after_bytes=0)
        with caplog.at_level(logging.ERROR):
            machine.housekeep()
        assert "housekeeping of kept-0 failed" in caplog.text
        assert machine.logs[1].start == machine.logs[1].end
        machine.housekeep()
        assert machine.logs[0].start == machine.logs[0].end


class TestNoDescriptors:
    """...are no failed sync: nothing was asked of the disk. Clients that connect by the thousand bring it about."""

    @pytest.fixture
    def machine(self, tmp_path: Path, loop: asyncio.AbstractEventLoop) -> Failing:
        return Failing(tmp_path, loop)

    async def test_do_not_keep_a_store_from_closing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        disk, clock = ForgetfulDisk(str(tmp_path)), VirtualClock()
        store = LocalLogStore(str(tmp_path / "data"), clock, Flusher(asyncio.get_running_loop()), disk)
        log = open_log(store, "t", "0123456789abcdef", 0, KEEP)
        await append(log, batch(b"kept"))
        log._directory_dirty = True  # as after each new segment
        monkeypatch.setattr(disk, "sync_directory", no_descriptors)
        waiting = append(log, batch(b"not acknowledged"))
        closing = asyncio.ensure_future(store.close())
        for _ in range(1000):
            if closing.done():
                break
            await asyncio.sleep(0.001)
            clock.advance(0.1)
        assert closing.done() and log.closed and isinstance(waiting.error, LogReadOnly)

    def test_for_the_directory_make_an_append_wait(self, machine: Failing, monkeypatch: pytest.MonkeyPatch) -> None:
        machine.work(rounds=2)
        machine.loop.run_until_complete(machine.store.close())
        machine.open()  # the next sync is to sync the directory too
        log, end = machine.logs[0], machine.logs[0].end
        monkeypatch.setattr(machine.disk, "sync_directory", no_descriptors)
        promises = [machine.append(log, batch(b"a")), machine.append(log, batch(b"b"))]
        assert log.failure is None and (log.high_watermark, log.end) == (end, end + 2)
        assert not any(promise.done for promise in promises)
        monkeypatch.undo()
        machine.clock.advance(1)
        machine.flusher.run_all()
        assert [promise.value().base_offset for promise in promises] == [end, end + 1]
        machine.disk = machine.disk.crash(Random(1))
        machine.open()
        assert [record.value for record in read_all(machine.logs[0], end)] == [b"a", b"b"]

    def test_for_the_file_cost_the_request(self, machine: Failing, monkeypatch: pytest.MonkeyPatch) -> None:
        machine.work(rounds=2)
        machine.loop.run_until_complete(machine.store.close())
        machine.open()  # the file is opened by the next append
        monkeypatch.setattr(machine.disk, "open", no_descriptors)
        machine._append(0, machine.logs[0], b"refused")
        assert [refusal.code for refusal in machine.refusals] == [Code.KAFKA_STORAGE_ERROR]
        monkeypatch.undo()
        machine._append(0, machine.logs[0], b"taken")
        assert machine.logs[0].failure is None and b"taken" in machine.check()[0].values()


def no_descriptors(*_: object, **__: object) -> None:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
