"""Starting: on what a crash, a user or another broker left in the directory."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from confluent_kafka import Producer

from millstream.core.disk import Disk
from millstream.core.errors import StoreInUse
from millstream.log.checkpoint import Checkpoint
from millstream.log.config import LogConfig
from millstream.log.flusher import Flusher
from millstream.records.batch import read_header
from millstream.stores.local import LocalLogStore
from millstream.testing.clock import VirtualClock
from millstream.testing.disk import ForgetfulDisk
from tests.batches import NOW, append, batch, fill, read_all
from tests.crash.machine import HandFlusher
from tests.crash.store_directory import SMALL, TOPIC, TOPIC_ID, StoreDirectory
from tests.serving import MILLSTREAM, ServedBroker


def add(path: Path, tail: bytes) -> None:
    path.write_bytes(path.read_bytes() + tail)


class TestTheLock:
    async def test_a_second_store_refuses_and_names_the_holder(self, place: StoreDirectory) -> None:
        place.open()
        second = LocalLogStore(str(place.directory), place.clock, Flusher(asyncio.get_running_loop()))
        with pytest.raises(StoreInUse) as caught:
            second.lock()
        assert str(caught.value) == (
            f"{place.directory} is in use by another broker (process {os.getpid()}); "
            "stop it, or give this one another directory (serve --data)"
        )

    def test_a_second_broker_exits_with_that_sentence(self, tmp_path: Path) -> None:
        with ServedBroker(tmp_path / "data") as first:
            second = subprocess.run(
                [MILLSTREAM, "serve", "--data", first.directory, "--kafka", "127.0.0.1:0", "--http", "127.0.0.1:0"],
                capture_output=True,
                text=True,
                timeout=30,
            )
            assert second.returncode == 1
            sentence = " ".join(second.stderr.split())
            assert f"is in use by another broker (process {first.pid}); stop it" in sentence
            assert "Traceback" not in second.stderr
            assert first.is_running

    def test_a_killed_broker_leaves_no_lock_behind(self, tmp_path: Path) -> None:
        with ServedBroker(tmp_path / "data") as broker:
            broker.kill()
            broker.start()


class TestForeignThings:
    async def test_a_foreign_file_is_set_aside_and_named(
        self, place: StoreDirectory, caplog: pytest.LogCaptureFixture
    ) -> None:
        values = await fill(place.open(), 20)
        await place.close()
        names = ["notes.txt", "42.log", "notes.new", "00000000000000000000.log.bak", "dump.cleaned"]
        for name in names:
            (place.partition / name).write_text(f"this is {name}")
        (place.partition / "folder").mkdir()
        log = place.open()
        assert [record.value for record in read_all(log)] == values
        kept = place.directory / "set-aside"
        assert sorted(path.name for path in kept.iterdir()) == sorted(f"orders-0.{name}" for name in [*names, "folder"])
        for name in names:
            assert (kept / f"orders-0.{name}").read_text() == f"this is {name}"
            assert f"set {place.partition / name} aside as {kept / f'orders-0.{name}'}" in caplog.text

    async def test_two_of_one_name_are_both_kept(self, place: StoreDirectory) -> None:
        await fill(place.open(), 1)
        for text in ("first", "second"):
            await place.close()
            (place.partition / "notes.txt").write_text(text)
            place.open()
        assert place.set_aside() == {"orders-0.notes.txt": b"first", "orders-0.notes.txt.2": b"second"}

    async def test_an_unknown_topic_directory_is_set_aside_and_named(
        self, place: StoreDirectory, caplog: pytest.LogCaptureFixture
    ) -> None:
        await fill(place.open(), 3)
        await place.close()
        lost = place.directory / "logs" / "lost-deadbeef" / "0"
        lost.mkdir(parents=True)
        (lost / "00000000000000000000.log").write_bytes(b"precious")
        log = place.open()
        assert log.end == 3
        (moved,) = (place.directory / "set-aside").iterdir()
        assert moved.name.startswith("lost-deadbeef.")
        assert (moved / "0" / "00000000000000000000.log").read_bytes() == b"precious"
        assert f"set lost-deadbeef aside as {moved}" in caplog.text

    async def test_our_own_temporary_files_are_removed(self, place: StoreDirectory) -> None:
        await fill(place.open(), 3)
        await place.close()
        for name in ("checkpoint.new", "00000000000000000000.log.cleaned"):
            (place.partition / name).write_bytes(b"half")
        place.open()
        assert sorted(path.name for path in place.partition.iterdir() if path.suffix != ".index") == [
            "00000000000000000000.log",
            "checkpoint",
        ]
        assert place.set_aside() == {}


class TestTornTails:
    @pytest.mark.parametrize("left", [1, 60, 61, 100])
    async def test_half_a_batch_is_cut_and_kept(
        self, place: StoreDirectory, left: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        log = place.open()
        values = await fill(log, 10)
        segment = Path(log.segments[-1].path)
        size = segment.stat().st_size
        await place.close()
        torn = bytes(batch(b"torn" * 50))[:left]
        add(segment, torn)
        log = place.open()
        assert [record.value for record in read_all(log)] == values
        assert segment.stat().st_size == size
        kept = {} if not torn.strip(b"\0") else {f"orders-0.00000000000000000000.log.from-{size}": torn}
        assert place.set_aside() == kept
        assert not kept or f"cut a torn tail of {left} bytes after the last valid batch" in caplog.text

    async def test_zeros_are_cut_and_not_worth_keeping(self, place: StoreDirectory) -> None:
        log = place.open()
        await fill(log, 10)
        segment = Path(log.segments[-1].path)
        await place.close()
        add(segment, bytes(5000))
        assert place.open().end == 10
        assert place.set_aside() == {}
        assert place.store is not None and place.store.cut_bytes == 5000

    async def test_a_large_tail_is_set_aside_in_pieces(self, place: StoreDirectory) -> None:
        log = place.open()
        await fill(log, 10)
        segment = Path(log.segments[-1].path)
        size = segment.stat().st_size
        await place.close()
        tail = bytes(12 << 20) + b"the end"
        add(segment, tail)
        tracemalloc.start()
        try:
            assert place.open().end == 10
            assert tracemalloc.get_traced_memory()[1] < 4 << 20
        finally:
            tracemalloc.stop()
        (kept,) = (place.directory / "set-aside").iterdir()
        assert kept.name == f"orders-0.00000000000000000000.log.from-{size}" and kept.read_bytes() == tail

    async def test_segments_behind_a_cut_are_kept_aside(self, place: StoreDirectory) -> None:
        config = LogConfig(segment_bytes=1000, retention_ms=-1)
        log = place.open(config)
        await fill(log, 2)
        await place.close()
        log = place.open(config)
        await fill(log, 20)
        paths = [Path(segment.path) for segment in log.segments]
        place.kill()
        paths[1].write_bytes(paths[1].read_bytes()[:-5] + b"flip!")
        behind = {f"orders-0.{path.name}": path.read_bytes() for path in paths[2:]}
        log = place.open(config)
        kept = place.set_aside()
        assert behind.items() <= kept.items()
        assert len(kept) == len(behind) + 1
        offsets = [record.offset for record in read_all(log)]
        assert offsets == list(range(log.end)) and log.end > 2

    async def test_the_next_start_finds_nothing_to_do(self, place: StoreDirectory) -> None:
        log = place.open()
        await fill(log, 10)
        segment = Path(log.segments[-1].path)
        await place.close()
        add(segment, b"garbage")
        place.open()
        await place.reopen()
        assert place.store is not None and place.store.scanned_bytes == place.store.cut_bytes == 0


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for at in range(0, len(data), 16):
        # Offsets and positions, not times: those cannot be told from others by a look at the segment.
        data[at + 3] ^= 0x15
        data[at + 7] ^= 0x2A
    path.write_bytes(data)


def flip_one(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2 // 16 * 16 + 7] ^= 0x40
    path.write_bytes(data)


def shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 32 * 16)


def tear(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 7)


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def scramble(path: Path) -> None:
    path.write_bytes(bytes((at * 37 + 11) % 251 for at in range(path.stat().st_size)))


def empty(path: Path) -> None:
    path.write_bytes(b"")


class TestBrokenIndexes:
    @pytest.mark.parametrize("damage", [flip, flip_one, shorten, tear, zero, scramble, empty, os.remove])
    async def test_reads_find_everything_all_the_same(
        self, place: StoreDirectory, damage: Callable[[Path], None]
    ) -> None:
        log = place.open()
        values = await fill(log, 400)
        await place.close()
        indexes = sorted(place.partition.glob("*.index"))
        assert len(indexes) > 2 and indexes[0].stat().st_size > 500
        for index in indexes:
            damage(index)
        log = place.open()
        for offset in range(0, 400, 7):
            piece = log.read(offset, 1000).value()
            assert read_header(piece.to_bytes()).base_offset == offset
            assert log.find_time(NOW + offset).value() == (offset, NOW + offset)
        assert [record.value for record in read_all(log, bytes_max=700)] == values
        assert log.find_max_time().value() == (399, NOW + 399)

    @pytest.mark.parametrize("damage", [flip, scramble, tear, os.remove])
    async def test_appends_go_on_behind_it(self, place: StoreDirectory, damage: Callable[[Path], None]) -> None:
        log = place.open()
        values = await fill(log, 30)
        await place.close()
        for index in place.partition.glob("*.index"):
            damage(index)
        log = place.open()
        values += await fill(log, 30)
        for offset in range(60):
            assert read_header(log.read(offset, 1).value().to_bytes()).base_offset == offset
        log = await place.reopen()
        assert [record.value for record in read_all(log, bytes_max=300)] == values

    async def test_a_rebuilt_index_is_as_good_as_before(
        self, place: StoreDirectory, caplog: pytest.LogCaptureFixture
    ) -> None:
        log = place.open(LogConfig(index_interval_bytes=4096))
        await fill(log, 300)
        await place.close()
        (index,) = place.partition.glob("*.index")
        before = index.read_bytes()
        flip(index)
        log = place.open(LogConfig(index_interval_bytes=4096))
        log.read(200, 1).value()
        assert f"rebuilding an index that does not match its segment: {index}" in caplog.text
        await place.close()
        assert index.read_bytes() == before

    async def test_an_index_without_its_segment_does_not_mislead_the_next_one(self, place: StoreDirectory) -> None:
        log = place.open()
        await fill(log, 60)
        await place.close()
        (index,) = place.partition.glob("*.index")
        (place.partition / "00000000000000000000.log").unlink()
        (place.partition / "checkpoint").unlink()
        assert index.stat().st_size > 100
        log = place.open()
        assert log.end == 0
        large = batch(bytes(8000), at=NOW)
        await append(log, large)
        await append(log, batch(b"x", at=NOW + 1))
        log.write_checkpoint()
        place.kill()
        log = place.open()
        index_now = log.segments[-1].index
        assert [index_now.entry(at)[1] for at in range(index_now.count)] == [len(large)]
        assert len(read_all(log, bytes_max=1)) == 2


class TestCheckpoints:
    async def test_a_clean_restart_scans_nothing(self, place: StoreDirectory) -> None:
        await fill(place.open(), 500)
        log = await place.reopen()
        assert place.store is not None and place.store.scanned_bytes == 0
        assert (log.end, len(read_all(log))) == (500, 500)

    async def test_after_a_kill_only_what_came_behind_the_checkpoint_is_scanned(self, place: StoreDirectory) -> None:
        log = place.open()
        await fill(log, 300)
        log.write_checkpoint()
        before = log.size_bytes()
        await fill(log, 5)
        behind = log.size_bytes() - before
        place.kill()
        assert place.open().end == 305
        assert place.store is not None
        assert place.store.scanned_bytes == behind

    async def test_opening_takes_no_longer_for_ten_gigabytes(self, place: StoreDirectory) -> None:
        """Sparse files replace the bytes: recovery must not read them."""
        log = place.open()
        await fill(log, 10)
        path, size = Path(log.segments[-1].path), log.segments[-1].size
        await place.close()
        checkpoint = place.partition / "checkpoint"
        os.truncate(path, 10 << 30)
        point = Checkpoint.read(str(place.partition))
        assert point is not None and point.position == size
        point.position = 10 << 30
        point.write(Disk(), str(place.partition))
        took = []
        for _ in range(3):  # one may meet a garbage collection of all tests' objects
            began = time.thread_time()
            log = place.open()
            took.append(time.thread_time() - began)
            assert place.store is not None and place.store.scanned_bytes == 0
            assert log.segments[-1].size == 10 << 30 and checkpoint.exists()
            place.kill()
        assert min(took) < 0.25

    @pytest.mark.parametrize("damage", [b"", b"garbage", b"00000000 []\n", b"\0" * 100])
    async def test_a_damaged_one_is_set_aside_and_the_log_scanned(
        self, place: StoreDirectory, damage: bytes, caplog: pytest.LogCaptureFixture
    ) -> None:
        log = place.open()
        values = await fill(log, 300)
        for sequence in range(3):
            await append(log, batch(b"i", producer=7, sequence=sequence))
        size = log.size_bytes()
        await place.close()
        checkpoint = place.partition / "checkpoint"
        checkpoint.write_bytes(damage)
        log = place.open()
        assert place.store is not None and place.store.scanned_bytes == size
        assert [record.value for record in read_all(log)] == values + [b"i"] * 3
        assert (await append(log, batch(b"i", producer=7, sequence=2))).duplicate
        assert place.set_aside() == {"orders-0.checkpoint": damage}
        assert f"set {checkpoint} aside" in caplog.text
        await place.reopen()
        assert place.store is not None
        assert place.store.scanned_bytes == 0

    async def test_a_flipped_bit_is_noticed(self, place: StoreDirectory) -> None:
        await fill(place.open(), 3)
        await place.close()
        checkpoint = place.partition / "checkpoint"
        data = bytearray(checkpoint.read_bytes())
        data[12] ^= 1
        checkpoint.write_bytes(data)
        assert place.open().end == 3
        assert list(place.set_aside()) == ["orders-0.checkpoint"]

    async def test_a_missing_one_costs_a_scan_and_nothing_else(self, place: StoreDirectory) -> None:
        values = await fill(place.open(), 300)
        await place.close()
        (place.partition / "checkpoint").unlink()
        log = place.open()
        assert [record.value for record in read_all(log)] == values

    async def test_a_compacted_log_survives_the_loss_of_it(self, place: StoreDirectory) -> None:
        """Without a checkpoint the gaps that compaction left between segments are not taken for holes."""
        config = LogConfig(segment_bytes=600, delete=False, compact=True, min_cleanable_dirty_ratio=0.01)
        log = place.open(config)
        for turn in range(60):
            await append(log, batch(b"%d" % turn + bytes(60), keys=[b"only"], at=place.clock.now_ms()))
        assert place.store is not None
        await place.store.housekeep()
        left = read_all(log)
        assert len(left) < 20
        await place.close()
        (place.partition / "checkpoint").unlink()
        log = place.open(config)
        assert read_all(log) == left and log.end == 60


def test_the_name_of_a_new_data_directory_is_durable_before_anything_is_acknowledged(tmp_path: Path) -> None:
    disk = ForgetfulDisk(str(tmp_path))
    flusher = HandFlusher()
    store = LocalLogStore(str(tmp_path / "some" / "where"), VirtualClock(), flusher, disk)
    store.lock()
    log = store.open(TOPIC, TOPIC_ID, 0, SMALL)
    promise = append(log, batch(b"x"))
    flusher.run_all()
    assert promise.done
    for seed in range(20):
        disk = disk.crash(Random(seed))
    assert (tmp_path / "some" / "where" / "logs" / "orders-01234567" / "0" / "00000000000000000000.log").exists()


class OnlyWhatWasSynced(Random):
    """The worst that a power loss can do to a `ForgetfulDisk`."""

    def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:
        return 0


class TestNamesThatAKilledBrokerDidNotSync:
    """They are durable before the next one acknowledges anything under them."""

    @pytest.fixture
    def disk(self, place: StoreDirectory, tmp_path: Path) -> ForgetfulDisk:
        place.disk = disk = ForgetfulDisk(str(tmp_path))
        return disk

    async def test_of_a_segment(self, place: StoreDirectory, disk: ForgetfulDisk) -> None:
        log = place.open()
        await fill(log, 3)
        log.roll()
        place.kill()
        assert (await append(place.open(), batch(b"acknowledged"))).base_offset == 3
        place.kill()
        place.disk = disk.crash(OnlyWhatWasSynced())
        assert place.open().end == 4

    @pytest.mark.parametrize("name", [".", "logs", "logs/orders-01234567", "logs/orders-01234567/0"])
    async def test_of_a_directory(self, place: StoreDirectory, disk: ForgetfulDisk, name: str) -> None:
        directory = place.directory / name
        disk.make_directory(str(directory.parent))
        disk.make_unsynced_directory(str(directory))  # and is killed in the middle of `make_directory`
        assert (await append(place.open(), batch(b"acknowledged"))).base_offset == 0
        place.kill()
        place.disk = disk.crash(OnlyWhatWasSynced())
        assert place.open().end == 1


def test_from_start_to_the_first_acknowledged_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    delivered: list[object] = []
    began = time.perf_counter()
    with ServedBroker(tmp_path / "data") as broker:
        ready = time.perf_counter() - began
        producer = Producer({"bootstrap.servers": broker.address, "acks": "all", "linger.ms": 0})
        producer.produce("first", b"record", on_delivery=lambda error, message: delivered.append(error))
        assert producer.flush(60) == 0
        took = time.perf_counter() - began
    with capsys.disabled():
        print(f"\nstart: ready after {ready * 1000:.0f} ms, first record acknowledged after {took * 1000:.0f} ms")
    assert delivered == [None]
    assert took < 60, "0.5 s on a quiet machine; this only notices what is broken"
