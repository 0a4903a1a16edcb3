"""`file:DIR`, where the contract suite does not reach: the directories around the logs."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from millstream.core.disk import Disk, OpenFile
from millstream.core.errors import RequestError, StartupError, StoreInUse
from millstream.core.promise import begin
from millstream.log.config import LogConfig
from millstream.log.flusher import Flusher
from millstream.log.recovery import PIECE_BYTES
from millstream.records.batch import HEADER_BYTES, PREFIX_BYTES, patch_offset
from millstream.stores.local import LocalLogStore
from millstream.testing.clock import VirtualClock
from tests.batches import append, batch, fill, read_all
from tests.crash.machine import HandFlusher
from tests.crash.store_directory import open_log

TOPIC_ID = "0123456789abcdef"


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[LocalLogStore]:
    store = LocalLogStore(str(tmp_path / "data"), VirtualClock(), Flusher(asyncio.get_running_loop()))
    store.lock()
    yield store
    await store.close()


async def test_a_discarded_topic_leaves_nothing_on_disk(store: LocalLogStore, tmp_path: Path) -> None:
    await fill(open_log(store, "t", TOPIC_ID, 0, LogConfig()), 10)
    await store.discard("t", TOPIC_ID)
    assert list((tmp_path / "data" / "logs").iterdir()) == []
    assert list((tmp_path / "data" / "trash").iterdir()) == []


async def test_a_discarded_topic_makes_room_on_a_full_disk(
    store: LocalLogStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(_: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    await fill(open_log(store, "t", TOPIC_ID, 0, LogConfig()), 10)
    monkeypatch.setattr(store._disk, "make_unsynced_directory", no_room)
    await store.discard("t", TOPIC_ID)
    assert list((tmp_path / "data" / "logs").iterdir()) == []


def test_a_directory_is_locked_although_the_disk_has_no_room_for_the_process_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    store, other = (LocalLogStore(str(tmp_path / "data"), VirtualClock(), HandFlusher()) for _ in range(2))
    monkeypatch.setattr(os, "pwrite", no_room)
    store.lock()
    with pytest.raises(StoreInUse):
        other.lock()


async def test_a_deletion_that_was_interrupted_is_finished_at_the_next_start(
    store: LocalLogStore, tmp_path: Path
) -> None:
    left = tmp_path / "data" / "trash" / "t-01234567" / "0"
    left.mkdir(parents=True)
    (left / "00000000000000000000.log").write_bytes(b"x")
    await store.close()
    store.lock()
    assert not (tmp_path / "data" / "trash").exists()


def test_a_file_in_place_of_the_directory_stops_the_start_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("not a directory")
    store = LocalLogStore(str(tmp_path / "data"), VirtualClock(), HandFlusher())
    with pytest.raises(StartupError, match="cannot be used as a data directory"):
        store.lock()


def test_so_does_one_that_is_not_ours_and_it_is_let_go_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk()
    store = LocalLogStore(str(tmp_path / "data"), VirtualClock(), HandFlusher(), disk)

    def refuse(_: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(disk, "sync_directory", refuse)
        with pytest.raises(StartupError, match="cannot be used as a data directory"):
            store.lock()
        (tmp_path / "data").mkdir()
        with pytest.raises(StartupError, match="cannot be used as a data directory"):
            store.lock()
    store.lock()


async def test_so_does_a_file_in_place_of_the_logs(store: LocalLogStore, tmp_path: Path) -> None:
    (tmp_path / "data" / "logs").rmdir()
    (tmp_path / "data" / "logs").write_text("not a directory")
    with pytest.raises(StartupError, match="cannot be used as a data directory"):
        store.opened_all()


async def test_what_cannot_be_set_aside_stops_the_start_with_a_sentence(store: LocalLogStore, tmp_path: Path) -> None:
    (tmp_path / "data" / "logs" / "foreign").write_text("a file")
    (tmp_path / "data" / "set-aside").write_text("not a directory")
    with pytest.raises(StartupError, match="foreign cannot be set aside"):
        store.opened_all()


async def test_directories_without_a_file_are_removed_and_others_set_aside(
    store: LocalLogStore, tmp_path: Path
) -> None:
    logs, aside = tmp_path / "data" / "logs", tmp_path / "data" / "set-aside"
    (logs / "hollow" / "0").mkdir(parents=True)
    (logs / "full" / "0").mkdir(parents=True)
    (logs / "full" / "0" / "x").touch()
    (logs / "linked").mkdir()
    (logs / "linked" / "0").symlink_to(tmp_path)
    (logs / "link").symlink_to(tmp_path)
    store.opened_all()
    assert not list(logs.iterdir())
    assert sorted(path.name.partition(".")[0] for path in aside.iterdir()) == ["full", "link", "linked"]


@pytest.mark.parametrize("letters", [200, 246, 247, 249])
async def test_a_topic_may_have_the_longest_name_there_is(store: LocalLogStore, tmp_path: Path, letters: int) -> None:
    name, other = "n" * letters, "n" * (letters - 1) + "x"
    values = await fill(store.open(name, TOPIC_ID, 12345, LogConfig()), 10)
    await fill(store.open(other, TOPIC_ID[::-1], 0, LogConfig()), 3)
    await store.close()
    (torn,) = (tmp_path / "data" / "logs").glob(f"*-{TOPIC_ID[:8]}/12345/*.log")
    with torn.open("ab") as file:
        file.write(b"half a batch")
    (torn.parent / ("f" * 255)).touch()
    again = LocalLogStore(store.directory, VirtualClock(), Flusher(asyncio.get_running_loop()))
    again.lock()
    assert [record.value for record in read_all(again.open(name, TOPIC_ID, 12345, LogConfig()))] == values
    again.opened_all()
    assert len(list((tmp_path / "data" / "set-aside").iterdir())) == 3, "a foreign file, a torn tail, another topic"
    await again.discard(name, TOPIC_ID)
    assert list((tmp_path / "data" / "logs").iterdir()) == []
    await again.close()


async def test_a_partition_that_was_never_written_to_makes_no_files(store: LocalLogStore, tmp_path: Path) -> None:
    log = open_log(store, "t", TOPIC_ID, 0, LogConfig())
    assert read_all(log) == [] and log.find_max_time().value() is None
    await store.housekeep()
    assert list((tmp_path / "data" / "logs").iterdir()) == []


async def test_idle_segments_hold_no_descriptors(store: LocalLogStore) -> None:
    log = open_log(store, "t", TOPIC_ID, 0, LogConfig(segment_bytes=1000, retention_ms=-1))
    values = await fill(log, 100)
    await store.housekeep()
    assert [segment.is_open for segment in log.segments] == [False] * (len(log.segments) - 1) + [True]
    assert [record.value for record in read_all(log)] == values


class TestRaces:
    """Things that happen while a sync is on its way."""

    CONFIG = LogConfig(segment_bytes=1000, index_interval_bytes=200, retention_ms=-1)

    @pytest.fixture
    def flusher(self) -> HandFlusher:
        return HandFlusher()

    @pytest.fixture
    def by_hand(self, tmp_path: Path, flusher: HandFlusher) -> LocalLogStore:
        return LocalLogStore(str(tmp_path / "by-hand"), VirtualClock(), flusher)

    def test_a_segment_that_is_trimmed_away_does_not_fail_the_sync(
        self, by_hand: LocalLogStore, flusher: HandFlusher
    ) -> None:
        log = open_log(by_hand, "t", TOPIC_ID, 0, self.CONFIG)
        append(log, batch(bytes(900)))
        flusher.run_all()
        late = append(log, batch(bytes(900)))
        assert len(log.segments) == 2
        log.let_go_of_idle_segments()
        flusher.begin(log)
        assert log.trim(1).value() == 1
        assert len(log.segments) == 1
        flusher.end(log)
        assert late.value().base_offset == 1 and log.failure is None

    def test_what_is_appended_during_a_sync_is_not_answered_by_it(
        self, by_hand: LocalLogStore, flusher: HandFlusher
    ) -> None:
        log = open_log(by_hand, "t", TOPIC_ID, 0, self.CONFIG)
        early = append(log, batch(b"early"))
        flusher.begin(log)
        late = append(log, batch(b"late"))
        flusher.end(log)
        assert (early.done, late.done, log.high_watermark) == (True, False, 1)
        flusher.run_all()
        assert late.done and log.high_watermark == 2

    async def test_a_flush_of_a_discarded_log_is_answered(self, by_hand: LocalLogStore) -> None:
        log = open_log(by_hand, "t", TOPIC_ID, 0, self.CONFIG)
        waiting = append(log, batch(b"x"))
        flushing = log.flush()
        await by_hand.discard("t", TOPIC_ID)
        assert waiting.done and flushing.done
        assert log.flush().done

    async def test_who_appends_while_the_store_closes_is_answered(
        self, by_hand: LocalLogStore, flusher: HandFlusher
    ) -> None:
        log = open_log(by_hand, "t", TOPIC_ID, 0, self.CONFIG)
        append(log, batch(b"early"))
        closing = begin(by_hand.close())
        flusher.run_all()
        late = append(log, batch(b"late"))  # the flush has ended, and closing goes on in the next turn
        flusher.is_willing = True
        await closing
        assert late.value().base_offset == 1

    async def test_a_topic_that_is_discarded_while_it_is_compacted(
        self, tmp_path: Path, flusher: HandFlusher, caplog: pytest.LogCaptureFixture
    ) -> None:
        config = LogConfig(
            segment_bytes=500, delete=False, compact=True, min_cleanable_dirty_ratio=0.01, retention_ms=-1
        )
        disk = HaltingDisk(asyncio.get_running_loop())
        store = LocalLogStore(str(tmp_path / "halting"), VirtualClock(), flusher, disk)
        log = open_log(store, "t", TOPIC_ID, 0, config)
        flusher.is_willing = True
        for number in range(20):
            append(log, batch(b"%d" % number + bytes(100), keys=[b"k"]))
        tidying = asyncio.ensure_future(store.housekeep())
        await disk.halted.wait()
        await store.discard("t", TOPIC_ID)
        disk.gate.set()
        await tidying
        assert not Path(log.directory).exists()
        assert caplog.text == ""

    @pytest.mark.parametrize("error", [None, errno.EIO, errno.ENOENT])
    async def test_a_topic_that_is_deleted_during_a_sync_goes_without_an_alarm(
        self,
        by_hand: LocalLogStore,
        flusher: HandFlusher,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        error: int | None,
    ) -> None:
        def sync(file: OpenFile) -> None:
            if error is not None:
                raise OSError(error, os.strerror(error))

        log = open_log(by_hand, "t", TOPIC_ID, 0, LogConfig())
        appended = append(log, batch(b"a"))
        flusher.begin(log)
        await by_hand.discard("t", TOPIC_ID)
        monkeypatch.setattr(by_hand._disk, "sync", sync)
        flusher.end(log)
        assert isinstance(appended.error, RequestError) and "was deleted" in str(appended.error)
        assert not caplog.records and log.failure is None


class HaltingDisk(Disk):
    """Stops in the middle of compaction until it may go on."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.halted = asyncio.Event()
        self.gate = threading.Event()

    def sync(self, file: OpenFile) -> None:
        if file.path.endswith(".cleaned"):
            self._loop.call_soon_threadsafe(self.halted.set)
            assert self.gate.wait(10)
        super().sync(file)


async def test_recovery_keeps_a_large_batch_and_reads_no_claimed_length_at_once(
    store: LocalLogStore, tmp_path: Path
) -> None:
    log = store.open("t", TOPIC_ID, 0, LogConfig())
    await fill(log, 3)
    await store.close()
    (segment,) = (tmp_path / "data" / "logs").glob("*/0/*.log")
    large = batch(os.urandom(2 * PIECE_BYTES))
    patch_offset(large, 3, len(large) - PREFIX_BYTES, 0)
    claim = bytearray(large[:HEADER_BYTES])
    patch_offset(claim, 4, (64 << 20) - PREFIX_BYTES, 0)
    with segment.open("ab") as file:
        file.write(large)
        whole = file.tell()
        file.write(claim)
        file.truncate(whole + (64 << 20))
    again = LocalLogStore(store.directory, VirtualClock(), Flusher(asyncio.get_running_loop()))
    again.lock()
    tracemalloc.start()
    recovered = again.open("t", TOPIC_ID, 0, LogConfig())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (recovered.end, segment.stat().st_size) == (4, whole)
    assert peak < 8 << 20
    await again.close()
