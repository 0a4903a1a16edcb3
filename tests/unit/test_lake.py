"""Lakes: every batch once, despite crashes and other writers."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from millstream.core.disk import Disk
from millstream.pipeline import files, lake_delta
from millstream.pipeline.files import FileEntry, FilesTooOld, write_files
from millstream.pipeline.lake import Lake, LakeError, create_lake, open_lake
from millstream.pipeline.lake_parquet import ParquetLake
from tests.dice import dice  # noqa: F401  (a fixture)
from tests.lake_driver import ROWS_PER_BATCH, SCHEMA, rows

FORMATS = ("delta", "parquet")
APP = "clicks/lake/1"


@pytest.fixture(params=FORMATS)
def format(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def lake_at(path: Path, format: str, schema: pa.Schema = SCHEMA, app_id: str = APP, **more: Any) -> Lake:
    return create_lake(str(path), format, schema, more.pop("partition_by", "day"), app_id, **more)


def write(lake: Lake, batches: Iterable[pa.RecordBatch], by: str = "day") -> list[FileEntry]:
    return list(write_files(batches, lake.root, by, "_timestamp", 1 << 20, "batch", lake.suffix))


def offsets(path: Path) -> list[int]:
    return sorted(at for batch in open_lake(str(path)).read(["_offset"]) for at in batch.column(0).to_pylist())


def globbed(path: Path) -> list[int]:
    """As a reader sees the lake that takes every file with the right name."""
    return sorted(at for file in path.rglob("*.parquet") for at in pq.ParquetFile(file).read()["_offset"].to_pylist())


def all_of(batches: int) -> list[int]:
    return list(range(batches * ROWS_PER_BATCH))


# -- once ------------------------------------------------------------------------------------------------------------


def test_a_batch_that_comes_again_is_in_already(tmp_path: Path, format: str) -> None:
    lake = lake_at(tmp_path / "lake", format)
    assert not lake.has(0)
    lake.commit(0, write(lake, [rows(0)]))
    assert lake.has(0)
    assert not lake.has(1)
    lake.commit(0, write(lake, [rows(0)]))
    again = lake_at(tmp_path / "lake", format)
    assert again.has(0)
    again.commit(0, write(again, [rows(0)]))
    again.commit(1, write(again, [rows(1)]))
    assert lake.has(1)
    assert offsets(tmp_path / "lake") == all_of(2)


def test_another_checkpoint_counts_on_its_own(tmp_path: Path, format: str) -> None:
    first = lake_at(tmp_path / "lake", format)
    second = lake_at(tmp_path / "lake", format, app_id="clicks/lake/2")
    first.commit(5, write(first, [rows(0)]))
    assert not second.has(0)
    second.commit(0, write(second, [rows(1)]))
    assert first.has(5)
    assert offsets(tmp_path / "lake") == all_of(2)


def test_a_batch_without_rows_changes_nothing(tmp_path: Path, format: str) -> None:
    lake = lake_at(tmp_path / "lake", format)
    lake.commit(0, [])
    lake.commit(1, write(lake, [rows(0)]))
    assert lake.has(0)
    assert offsets(tmp_path / "lake") == all_of(1)


def race(count: int, act: Callable[[int], None]) -> list[BaseException]:
    barrier = threading.Barrier(count)
    failures: list[BaseException] = []

    def run(number: int) -> None:
        barrier.wait()
        try:
            act(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures


def test_of_many_drivers_with_the_same_batch_one_gets_it_in(tmp_path: Path, format: str) -> None:
    lakes = [lake_at(tmp_path / "lake", format) for _ in range(4)]

    def commit(batch: int, written: list[Any], number: int) -> None:
        lakes[number].commit(batch, written[number])

    for batch in range(8):
        written = [write(lake, [rows(batch)]) for lake in lakes]
        failures = race(4, partial(commit, batch, written))
        assert failures == []
        assert all(lake.has(batch) for lake in lakes)
    assert offsets(tmp_path / "lake") == all_of(8)


def test_drivers_of_different_sinks_do_not_lose_to_each_other(tmp_path: Path, format: str) -> None:
    lakes = [lake_at(tmp_path / "lake", format, app_id=f"app-{number}") for number in range(4)]

    def act(number: int) -> None:
        for batch in range(4):
            lakes[number].commit(batch, write(lakes[number], [rows(number * 4 + batch)]))

    assert race(4, act) == []
    assert offsets(tmp_path / "lake") == all_of(16)


def _commit_all(path: str, format: str, batches: int, barrier: Any) -> None:
    lake = create_lake(path, format, SCHEMA, "day", APP)
    for batch in range(batches):
        entries = write(lake, [rows(batch)])
        barrier.wait(60)
        lake.commit(batch, entries)


def test_two_processes_with_the_same_batches_write_each_once(tmp_path: Path, format: str) -> None:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    arguments = (str(tmp_path / "lake"), format, 10, barrier)
    processes = [context.Process(target=_commit_all, args=arguments) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(100)
    assert [process.exitcode for process in processes] == [0, 0]
    assert offsets(tmp_path / "lake") == all_of(10)


def test_killed_at_random_moments_the_lake_has_every_row_once(
    tmp_path: Path,
    format: str,
    dice: random.Random,  # noqa: F811
) -> None:
    batches, kills = 40, 6
    path = tmp_path / "lake"
    for attempt in range(kills + 1):
        driver = subprocess.Popen(
            [sys.executable, "-m", "tests.lake_driver", path, format, str(batches)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        assert driver.stdout is not None
        lines_left = dice.randint(1, 20) if attempt < kills else -1
        last = ""
        for line in driver.stdout:
            last = line.strip()
            lines_left -= 1
            if lines_left == 0:
                time.sleep(dice.random() * 0.03)  # into the middle of the step that follows
                driver.kill()
        driver.stdout.close()
        driver.wait(60)
    assert last == "finished"
    assert offsets(path) == all_of(batches)
    if format == "parquet":
        assert globbed(path) == all_of(batches)


# -- crashes of the machine --------------------------------------------------------------------------------------------


class Crash(BaseException):
    """The process ends here."""


class CrashingDisk(Disk):
    """Dies before its n-th change of the disk."""

    def __init__(self, changes_left: int) -> None:
        self.changes_left = changes_left

    def _count(self) -> None:
        self.changes_left -= 1
        if self.changes_left < 0:
            raise Crash

    def rename(self, source: str, target: str) -> None:
        self._count()
        super().rename(source, target)

    def sync_directory(self, path: str) -> None:
        self._count()
        super().sync_directory(path)

    def append(self, file: Any, data: Any) -> None:
        self._count()
        super().append(file, data)

    def make_unsynced_directory(self, directory: str) -> None:
        self._count()
        super().make_unsynced_directory(directory)


def test_a_parquet_lake_survives_a_crash_after_every_single_step(tmp_path: Path) -> None:
    """Before the restart no row is there twice, and after it every row is there once."""
    steps = 0
    while True:
        path = tmp_path / f"lake-{steps}"
        disk = CrashingDisk(steps)
        crashed = False
        try:
            lake = ParquetLake(str(path), SCHEMA, "day", APP, disk)
            for batch in range(2):
                lake.commit(batch, write(lake, [rows(batch)]))
        except Crash:
            crashed = True
        assert max(Counter(globbed(path)).values(), default=0) <= 1
        restarted = ParquetLake(str(path), SCHEMA, "day", APP)
        for batch in range(2):
            if restarted.has(batch):
                assert set(range(batch * ROWS_PER_BATCH, (batch + 1) * ROWS_PER_BATCH)) <= set(globbed(path))
            else:
                restarted.commit(batch, write(restarted, [rows(batch)]))
        assert globbed(path) == offsets(path) == all_of(2)
        if not crashed:
            break
        steps += 1
    assert steps > 10


class DiesAtTheFirstFile(Disk):
    """After the batch's list of files was written, before the first of them is in place."""

    def rename(self, source: str, target: str) -> None:
        if source.endswith(".staged"):
            raise Crash
        super().rename(source, target)


def die_after_the_list(path: Path, app_id: str = APP) -> None:
    lake = ParquetLake(str(path), SCHEMA, "day", app_id, DiesAtTheFirstFile())
    with pytest.raises(Crash):
        lake.commit(0, write(lake, [rows(0)]))


def test_a_batch_that_another_driver_left_half_way_is_in_place_once_it_counts(tmp_path: Path) -> None:
    successor = lake_at(tmp_path, "parquet")
    die_after_the_list(tmp_path)
    assert globbed(tmp_path) == []
    assert successor.has(0)
    assert globbed(tmp_path) == all_of(1)


def test_folders_that_another_driver_made_are_synced_all_the_way_up(tmp_path: Path) -> None:
    synced: set[str] = set()

    class Spy(Disk):
        def sync_directory(self, path: str) -> None:
            synced.add(path)
            super().sync_directory(path)

    lake = ParquetLake(str(tmp_path), SCHEMA, "hour", APP, Spy())
    entries = write(lake, [rows(0)], "hour")
    for entry in entries:  # by one that died before it synced them
        (tmp_path / entry.path).parent.mkdir(parents=True)
    synced.clear()
    lake.commit(0, entries)
    folders = [tmp_path, *tmp_path.glob("day=*"), *tmp_path.glob("day=*/hour=*")]
    assert len(folders) == 1 + 2 + 2
    assert set(map(str, folders)) <= synced


def test_a_torn_entry_at_the_end_of_the_log_is_set_aside_and_its_batch_comes_again(tmp_path: Path) -> None:
    lake = lake_at(tmp_path, "delta")
    for batch in range(3):
        lake.commit(batch, write(lake, [rows(batch)]))
    for left in (0, 100):
        entries = sorted((tmp_path / "_delta_log").glob("*.json"))
        whole = entries[-1].read_bytes()
        entries[-1].write_bytes(whole[:left])
        restarted = lake_at(tmp_path, "delta")
        assert entries[-1].with_suffix(".json.torn").read_bytes() == whole[:left]
        assert restarted.has(1)
        assert not restarted.has(2)
        restarted.commit(2, write(restarted, [rows(2)]))
        assert offsets(tmp_path) == all_of(3)


def test_a_torn_entry_is_set_aside_once_though_two_drivers_find_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look and the renaming of the slow one, the quick one opens the lake and commits, unless it waits."""
    lake = lake_at(tmp_path, "delta")
    for batch in range(3):
        lake.commit(batch, write(lake, [rows(batch)]))
    [*_, torn] = sorted((tmp_path / "_delta_log").glob("*.json"))
    torn.write_bytes(b"{")
    is_whole, flock = lake_delta._is_whole, fcntl.flock
    is_waiting_or_done = threading.Event()
    opened: list[Lake] = []

    def open_and_commit() -> None:
        quick = lake_at(tmp_path, "delta")
        quick.commit(2, write(quick, [rows(2)]))
        opened.append(quick)
        is_waiting_or_done.set()

    thread = threading.Thread(target=open_and_commit, daemon=True)

    def after_the_look(path: str) -> bool:
        found = is_whole(path)
        if threading.current_thread() is not thread:
            thread.start()
            assert is_waiting_or_done.wait(60)
        return found

    def at_the_lock(fd: int, operation: int) -> None:
        if threading.current_thread() is thread:
            is_waiting_or_done.set()
        flock(fd, operation)

    monkeypatch.setattr(lake_delta, "_is_whole", after_the_look)
    monkeypatch.setattr(fcntl, "flock", at_the_lock)
    slow = lake_at(tmp_path, "delta", app_id="other")
    thread.join(60)
    [quick] = opened
    assert quick.has(2)
    slow.commit(0, write(slow, [rows(3)]))
    assert offsets(tmp_path) == all_of(4)


def test_a_torn_checkpoint_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lake_delta, "CHECKPOINT_EVERY", 3)
    lake = lake_at(tmp_path, "delta")
    for batch in range(5):
        lake.commit(batch, write(lake, [rows(batch)]))
    lake.tidy()
    log = tmp_path / "_delta_log"
    [checkpoint] = log.glob("*.checkpoint.parquet")
    whole, hint = checkpoint.read_bytes(), log / "_last_checkpoint"
    tears: list[Callable[[], object]] = [
        lambda: checkpoint.write_bytes(whole[:50]),
        lambda: checkpoint.unlink(),
        lambda: hint.write_bytes(b""),
    ]
    for batch, tear in enumerate(tears, start=5):
        tear()
        restarted = lake_at(tmp_path, "delta")
        assert restarted.has(batch - 1)
        restarted.commit(batch, write(restarted, [rows(batch)]))
        restarted.tidy()
        assert offsets(tmp_path) == all_of(batch + 1)
        [*_, checkpoint] = sorted(log.glob("*.checkpoint.parquet"))


def test_the_entry_of_a_batch_is_synced_before_the_batch_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = lake_at(tmp_path, "delta")
    entries = write(lake, [rows(0)])
    synced: list[str] = []
    sync = os.fsync

    def spy(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        sync(fd)

    monkeypatch.setattr(os, "fsync", spy)
    lake.commit(0, entries)
    log = tmp_path / "_delta_log"
    assert synced == [str(log / f"{1:020}.json"), str(log)]


def test_what_another_driver_committed_is_synced_before_it_is_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake, other = lake_at(tmp_path, "delta"), lake_at(tmp_path, "delta")
    other.commit(0, write(other, [rows(0)]))
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    assert lake.has(0)
    assert synced


# -- tidying ---------------------------------------------------------------------------------------------------------


def files_of(path: Path) -> list[str]:
    return sorted(DeltaTable(str(path)).file_uris())


def test_small_files_are_merged_and_the_rows_stay(tmp_path: Path) -> None:
    lake = lake_at(tmp_path, "delta")
    for batch in range(20):
        lake.commit(batch, write(lake, [rows(batch)]))
    before = DeltaTable(str(tmp_path)).version()
    assert len(files_of(tmp_path)) == 40
    lake.tidy()
    assert len(files_of(tmp_path)) == 2
    assert offsets(tmp_path) == all_of(20)
    assert lake.has(19)
    assert not lake.has(20)
    assert DeltaTable(str(tmp_path), version=before).to_pyarrow_dataset().count_rows() == len(all_of(20))
    lake.tidy()
    assert len(files_of(tmp_path)) == 2
    lake.commit(20, write(lake, [rows(20)]))
    assert offsets(tmp_path) == all_of(21)


def test_large_files_and_files_of_others_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lake_delta, "SMALL_FILES_MAX", 2)
    large = lake_at(tmp_path / "large", "delta", file_bytes=4)
    for batch in range(4):
        large.commit(batch, write(large, [rows(batch)]))
    large.tidy()
    assert len(files_of(tmp_path / "large")) == 8
    mixed = lake_at(tmp_path / "mixed", "delta")
    for batch in range(2):
        mixed.commit(batch, write(mixed, [rows(batch)]))
    from deltalake import write_deltalake

    foreign = pa.Table.from_batches([rows(batch) for batch in range(2, 5)])
    for batch in foreign.to_batches():
        day = pa.array([at.date() for at in batch.column("_timestamp").to_pylist()], pa.date32())
        write_deltalake(str(tmp_path / "mixed"), pa.table([*batch.columns, day], [*SCHEMA.names, "day"]), mode="append")
    mixed.tidy()
    assert len(files_of(tmp_path / "mixed")) == 4 + 6
    assert offsets(tmp_path / "mixed") == all_of(5)


def test_a_merge_takes_no_more_than_one_file_is_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lake_delta, "SMALL_FILES_MAX", 4)
    writer = lake_at(tmp_path, "delta")
    for batch in range(20):
        writer.commit(batch, write(writer, [rows(batch)]))
    size = max(map(os.path.getsize, files_of(tmp_path)))
    lake_at(tmp_path, "delta", file_bytes=size * 5).tidy()
    merged = [file for file in files_of(tmp_path) if "mill-merged" in file]
    assert len(merged) == lake_delta.MERGES_MAX
    assert all(os.path.getsize(file) <= size * 5 for file in merged)
    assert 20 <= len(files_of(tmp_path)) <= 24
    assert offsets(tmp_path) == all_of(20)


def test_two_merges_of_the_same_files_do_not_double_rows(tmp_path: Path) -> None:
    lakes = [lake_at(tmp_path, "delta") for _ in range(3)]
    for batch in range(20):
        lakes[0].commit(batch, write(lakes[0], [rows(batch)]))
    assert race(3, lambda number: lakes[number].tidy()) == []
    assert offsets(tmp_path) == all_of(20)


def test_a_merge_that_comes_second_takes_the_files_that_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other merges both partitions while the first of them is on its way here: none is left to merge."""
    slow, quick = lake_at(tmp_path, "delta"), lake_at(tmp_path, "delta")
    for batch in range(20):
        slow.commit(batch, write(slow, [rows(batch)]))
    write_partition = files.write_partition

    def after_the_other(*given: Any) -> Any:
        monkeypatch.setattr(lake_delta, "write_partition", write_partition)
        quick.tidy()
        return write_partition(*given)

    monkeypatch.setattr(lake_delta, "write_partition", after_the_other)
    slow.tidy()
    assert offsets(tmp_path) == all_of(20)
    assert len(files_of(tmp_path)) == 2


def test_batches_go_in_beside_a_merge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lake_delta, "SMALL_FILES_MAX", 2)
    first, second = lake_at(tmp_path, "delta"), lake_at(tmp_path, "delta")

    def act(number: int) -> None:
        for batch in range(20):
            if number == 0:
                first.commit(batch, write(first, [rows(batch)]))
            else:
                second.tidy()

    assert race(2, act) == []
    assert offsets(tmp_path) == all_of(20)
    assert first.has(19)


def test_a_merge_that_loses_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lake, other = lake_at(tmp_path, "delta"), lake_at(tmp_path, "delta")
    for batch in range(20):
        lake.commit(batch, write(lake, [rows(batch)]))
    entries = write(other, [rows(20)])
    transact = lake_delta.DeltaLake._transact

    def late(self: Any, actions: Any, transactions: Any) -> bool:
        if not transactions:
            other.commit(20, entries)
        return transact(self, actions, transactions)

    monkeypatch.setattr(lake_delta.DeltaLake, "_transact", late)
    lake.tidy()
    assert offsets(tmp_path) == all_of(21)
    referenced = {os.path.basename(name) for name in files_of(tmp_path)}
    merged = {path.name for path in tmp_path.rglob("mill-merged-*")}
    assert merged <= referenced


def test_merging_fills_columns_that_older_files_lack(tmp_path: Path) -> None:
    lake = lake_at(tmp_path, "delta")
    for batch in range(9):
        lake.commit(batch, write(lake, [rows(batch)]))
    wider = lake_at(tmp_path, "delta", SCHEMA.append(pa.field("tags", pa.list_(pa.string()))))
    for batch in range(9, 18):
        more = rows(batch).append_column("tags", pa.array([["x", None]] * ROWS_PER_BATCH))
        wider.commit(batch, write(wider, [more]))
    wider.tidy()
    assert len(files_of(tmp_path)) == 2
    tags = Counter(str(tag) for batch in open_lake(str(tmp_path)).read(["tags"]) for tag in batch.column(0).to_pylist())
    assert tags == {"None": 9 * ROWS_PER_BATCH, "['x', None]": 9 * ROWS_PER_BATCH}
    assert offsets(tmp_path) == all_of(18)


def age(path: Path, days: float) -> None:
    at = time.time() - days * 86_400
    os.utime(path, (at, at))


def test_files_that_nobody_committed_go_after_a_week_and_others_stay(tmp_path: Path, format: str) -> None:
    path = tmp_path / "lake"
    lake = lake_at(path, format)
    lake.commit(0, write(lake, [rows(0)]))
    root = Path(lake.root)
    old, young = ([root / entry.path for entry in write(lake, [rows(1)])] for _ in range(2))
    foreign = root / "day=2024-05-01" / "notes.parquet"
    foreign.write_bytes(b"not ours")
    for file in [*old, foreign, *path.rglob("mill-*.parquet")]:
        age(file, 8)
    for file in young:
        age(file, 6)
    lake.tidy()
    assert not any(file.exists() for file in old)
    assert all(file.exists() for file in [*young, foreign])
    foreign.unlink()
    assert offsets(path) == all_of(1)


def test_tidying_leaves_the_files_that_another_sink_has_in_its_list(tmp_path: Path) -> None:
    die_after_the_list(tmp_path, app_id="one")
    for file in tmp_path.rglob("*.staged"):
        age(file, 8)
    lake_at(tmp_path, "parquet", app_id="two").tidy()
    assert lake_at(tmp_path, "parquet", app_id="one").has(0)
    assert offsets(tmp_path) == globbed(tmp_path) == all_of(1)


def test_tidying_goes_on_when_files_go_into_place_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lake, other = (lake_at(tmp_path, "parquet", app_id=app) for app in ("one", "two"))
    orphans = [Path(lake.root) / entry.path for entry in write(lake, [rows(1)])]
    for file in orphans:
        age(file, 8)
    entries = write(other, [rows(0)])
    getmtime = os.path.getmtime

    def late(path: str) -> float:
        monkeypatch.setattr(os.path, "getmtime", getmtime)
        other.commit(0, entries)
        return getmtime(path)

    monkeypatch.setattr(os.path, "getmtime", late)
    lake.tidy()
    assert "housekeeping of the lake" not in caplog.text
    assert not any(file.exists() for file in orphans)
    assert offsets(tmp_path) == all_of(1)


def test_files_that_a_sweep_has_taken_are_not_committed(tmp_path: Path, format: str) -> None:
    slow, other = (lake_at(tmp_path, format, app_id=app) for app in ("one", "two"))
    entries = write(slow, [rows(0)])
    for entry in entries:
        age(Path(slow.root) / entry.path, 8)
    other.tidy()
    with pytest.raises(FilesTooOld, match="start the pipeline again"):
        slow.commit(0, entries)
    assert not slow.has(0)
    slow.commit(0, write(slow, [rows(0)]))
    assert offsets(tmp_path) == all_of(1)


def test_files_are_committed_for_half_as_long_as_they_are_kept(tmp_path: Path, format: str) -> None:
    lake = lake_at(tmp_path, format)
    old, young = write(lake, [rows(0)]), write(lake, [rows(0)])
    for days, entries in ((3.6, old), (3.4, young)):
        for entry in entries:
            age(Path(lake.root) / entry.path, days)
    with pytest.raises(FilesTooOld, match="start the pipeline again"):
        lake.commit(0, old)
    lake.commit(0, young)
    assert offsets(tmp_path) == all_of(1)


def test_a_sweep_writes_no_entry_that_a_crash_could_tear(tmp_path: Path) -> None:
    lake = lake_at(tmp_path, "delta")
    for batch in range(20):
        lake.commit(batch, write(lake, [rows(batch)]))
    table = DeltaTable(str(tmp_path))
    table.alter.set_table_properties({"delta.deletedFileRetentionDuration": "interval 0 days"})
    before = table.version()
    lake.tidy()
    assert len(list(tmp_path.rglob("mill-*.parquet"))) == len(files_of(tmp_path)) == 2
    assert offsets(tmp_path) == all_of(20)
    merges = 2
    assert DeltaTable(str(tmp_path)).version() == before + merges


def test_merged_files_stay_for_readers_of_older_versions(tmp_path: Path) -> None:
    lake = lake_at(tmp_path, "delta")
    for batch in range(20):
        lake.commit(batch, write(lake, [rows(batch)]))
    before = open_lake(str(tmp_path))
    for file in tmp_path.rglob("mill-*.parquet"):
        age(file, 20)
    lake.tidy()
    assert sum(batch.num_rows for batch in before.read()) == len(all_of(20))


def test_many_batches_later_the_lake_still_knows_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lake_delta, "CHECKPOINT_EVERY", 5)
    lake = lake_at(tmp_path, "delta")
    for batch in range(12):
        lake.commit(batch, write(lake, [rows(batch)]))
        lake.tidy()
    assert len(list((tmp_path / "_delta_log").glob("*.checkpoint.parquet"))) == 2
    again = lake_at(tmp_path, "delta")
    assert again.has(11)
    assert not again.has(12)


def test_a_lake_that_cannot_be_tidied_says_so_and_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lake_delta, "SMALL_FILES_MAX", 1)
    lake = lake_at(tmp_path, "delta")
    for batch in range(3):
        lake.commit(batch, write(lake, [rows(batch)]))
    for file in tmp_path.rglob("mill-*.parquet"):
        file.rename(file.with_suffix(".away"))
    lake.tidy()
    assert "housekeeping of the lake" in caplog.text
    lake.commit(3, write(lake, [rows(3)]))
    assert lake.has(3)


# -- columns ---------------------------------------------------------------------------------------------------------


def test_a_new_column_is_null_in_older_rows_and_a_dropped_one_in_newer(tmp_path: Path, format: str) -> None:
    path = tmp_path / "lake"
    lake = lake_at(path, format)
    lake.commit(0, write(lake, [rows(0)]))
    other = pa.schema([SCHEMA.field("_offset"), SCHEMA.field("_timestamp"), pa.field("page", pa.string())])
    grown = lake_at(path, format, other)
    changed = rows(1).drop_columns(["value"]).append_column("page", pa.array(["/"] * ROWS_PER_BATCH))
    grown.commit(1, write(grown, [changed]))
    lake.commit(2, write(lake, [rows(2)]))  # the driver before it, which knows nothing of the new column
    assert open_lake(str(path)).schema.names == ["value", "_offset", "_timestamp", "page"]
    seen = {
        row["_offset"] // ROWS_PER_BATCH: (row["value"] is None, row["page"])
        for batch in open_lake(str(path)).read()
        for row in batch.to_pylist()
    }
    assert seen == {0: (False, None), 1: (True, "/"), 2: (False, None)}


def test_drivers_that_add_the_same_column_at_once_both_get_it(tmp_path: Path, format: str) -> None:
    path = tmp_path / "lake"

    def open_at(schema: pa.Schema) -> None:
        lake_at(path, format, schema)

    assert race(4, lambda number: open_at(SCHEMA)) == []
    wider = SCHEMA.append(pa.field("page", pa.string()))
    assert race(4, lambda number: open_at(wider)) == []
    assert open_lake(str(path)).schema.names == wider.names


def refusal(act: Callable[[], object]) -> str:
    with pytest.raises(LakeError) as caught:
        act()
    return str(caught.value)


def test_a_changed_type_is_refused_with_every_column_that_changed(tmp_path: Path, format: str) -> None:
    lake_at(tmp_path, format)
    wrong = pa.schema([("value", pa.string()), ("_offset", pa.int32()), ("_timestamp", pa.timestamp("ns", "UTC"))])
    text = refusal(lambda: lake_at(tmp_path, format, wrong))
    assert (
        "value is binary in the lake and string in the rows; _offset is int64 in the lake and int32 in the rows" in text
    )
    assert "_timestamp" not in text
    assert "Cast" in text


def test_another_partitioning_or_format_is_refused(tmp_path: Path, format: str) -> None:
    lake_at(tmp_path, format)
    assert "is partitioned by day, not by hour" in refusal(lambda: lake_at(tmp_path, format, partition_by="hour"))
    other = "parquet" if format == "delta" else "delta"
    assert f'say format = "{format}"' in refusal(lambda: lake_at(tmp_path, other))
    assert "month is not known" in refusal(lambda: lake_at(tmp_path, format, partition_by="month"))
    assert "orc is not known" in refusal(lambda: lake_at(tmp_path / "other", "orc"))


def test_columns_that_no_lake_can_store_are_refused_together(tmp_path: Path, format: str) -> None:
    odd = pa.schema([("a", pa.duration("us")), ("b", pa.int64()), ("c", pa.list_(pa.uint64()))])
    text = refusal(lambda: lake_at(tmp_path / "odd", format, odd, partition_by="none"))
    assert "a is duration[us]; c is uint64" in text
    twice = pa.schema([("A", pa.int64()), ("a", pa.int64())])
    assert "two columns 'a'" in refusal(lambda: lake_at(tmp_path / "twice", format, twice, partition_by="none"))
    day = SCHEMA.append(pa.field("Day", pa.string()))
    assert "have a column 'Day'" in refusal(lambda: lake_at(tmp_path / "day", format, day))


def test_a_folder_that_cannot_be_a_lake_is_refused(tmp_path: Path, format: str) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot write to the lake" in refusal(lambda: lake_at(tmp_path / "file" / "lake", format))
    assert "is not a folder" in refusal(lambda: create_lake("s3://bucket/lake", format, SCHEMA, "day", APP))
    assert "does not exist" in refusal(lambda: open_lake(str(tmp_path / "none")))
    assert "holds no lake" in refusal(lambda: open_lake(str(tmp_path)))


# -- reading ---------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["none", "day", "hour"])
def by(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def test_rows_of_a_time_are_read_from_its_days_only(tmp_path: Path, format: str, by: str) -> None:
    path = tmp_path / "a läke"
    lake = lake_at(path, format, partition_by=by)
    start = datetime(2024, 5, 1, tzinfo=UTC)
    times = [start + timedelta(hours=6 * at) for at in range(12)]
    batch = pa.RecordBatch.from_arrays(
        [pa.array([b""] * 12), pa.array(range(12)), pa.array(times, SCHEMA.field("_timestamp").type)], schema=SCHEMA
    )
    lake.commit(0, write(lake, [batch], by))
    if by != "none":
        for file in path.rglob("day=2024-05-01/**/*.parquet"):
            file.write_bytes(b"nobody may look here")

    def read(since: datetime | None, until: datetime | None) -> list[int]:
        found = open_lake(str(path)).read(["_offset"], since, until)
        return sorted(at for batch in found for at in batch.column(0).to_pylist())

    assert read(times[4], times[7]) == [4, 5, 6]
    assert read(times[5] + timedelta(microseconds=1), None) == list(range(6, 12))
    assert read(times[4].replace(tzinfo=None), datetime(2024, 5, 2, 9)) == [4, 5]


def test_rows_come_without_the_lakes_own_columns_unless_asked_for(tmp_path: Path, format: str) -> None:
    path = tmp_path / "lake"
    lake = lake_at(path, format)
    lake.commit(0, write(lake, [rows(0)]))
    lake_rows = lake.rows()
    assert lake_rows.schema == SCHEMA
    assert lake_rows.count() == ROWS_PER_BATCH
    assert {batch.schema for batch in lake_rows.read()} == {SCHEMA}
    [first, *_] = lake_rows.read(["day", "value"])
    assert first.schema.names == ["day", "value"]
    assert "has no column nope; it has value, _offset" in refusal(lambda: lake_rows.read(["nope"]))


def test_a_lake_without_record_times_is_not_read_by_time(tmp_path: Path, format: str) -> None:
    lake_at(tmp_path, format, pa.schema([("hits", pa.int64())]), partition_by="none")
    text = refusal(lambda: open_lake(str(tmp_path)).read(since=datetime.now(UTC)))
    assert "has no column _timestamp" in text


def test_rows_without_a_time_are_there(tmp_path: Path, format: str) -> None:
    lake = lake_at(tmp_path, format)
    odd = pa.RecordBatch.from_pylist([{"value": b"", "_offset": 1, "_timestamp": None}], schema=SCHEMA)
    lake.commit(0, write(lake, [odd, rows(1)]))
    assert lake.rows().count() == 1 + ROWS_PER_BATCH
    assert {None} < {day for batch in lake.rows().read(["day"]) for day in batch.column(0).to_pylist()}


def test_nested_columns_and_local_times_come_back(tmp_path: Path, format: str) -> None:
    schema = pa.schema(
        [
            ("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
            ("tags", pa.map_(pa.string(), pa.int64())),
            ("local", pa.timestamp("us")),
            ("price", pa.decimal128(12, 3)),
        ]
    )
    row = {"headers": [{"key": "k", "value": b"v"}, None], "tags": [("a", 1)], "local": datetime(2024, 1, 1)}
    lake = lake_at(tmp_path, format, schema, partition_by="none")
    batch = pa.RecordBatch.from_pylist([row, {}], schema=schema)
    lake.commit(0, list(write_files([batch], lake.root, "none", None, 1 << 20, "x", lake.suffix)))
    assert [row for each in lake.rows().read() for row in each.to_pylist()] == batch.to_pylist()
    again = lake_at(tmp_path, format, schema, partition_by="none")
    assert again.has(0)


def test_a_path_with_a_percent_sign_is_refused_for_delta_alone(tmp_path: Path) -> None:
    assert "has a % in its path" in refusal(lambda: lake_at(tmp_path / "a%20b", "delta"))
    assert list(tmp_path.iterdir()) == []
    lake = lake_at(tmp_path / "a%20b", "parquet")
    lake.commit(0, write(lake, [rows(0)]))
    assert offsets(tmp_path / "a%20b") == all_of(1)


def test_other_readers_of_parquet_see_a_parquet_lake_as_it_is(tmp_path: Path) -> None:
    lake = lake_at(tmp_path, "parquet")
    lake.commit(0, write(lake, [rows(0)]))
    write(lake, [rows(1)])
    found = ds.dataset(str(tmp_path), partitioning="hive")
    assert found.count_rows() == len(globbed(tmp_path)) == ROWS_PER_BATCH
    assert found.schema.names == [*SCHEMA.names, "day"]


def test_statistics_in_the_log_are_what_delta_readers_expect(tmp_path: Path) -> None:
    lake = lake_at(tmp_path, "delta")
    lake.commit(0, write(lake, [rows(0)]))
    found = pa.table(DeltaTable(str(tmp_path)).get_add_actions(flatten=True)).to_pylist()
    assert sum(file["num_records"] for file in found) == ROWS_PER_BATCH
    assert DeltaTable(str(tmp_path)).count() == ROWS_PER_BATCH
    assert json.loads((tmp_path / "_delta_log" / f"{1:020}.json").read_text().splitlines()[0])


def test_readers_of_delta_find_rows_by_any_column(tmp_path: Path) -> None:
    """Their library takes a column that has no bounds, beside others that have them, for one that no value fits."""
    kinds = {"user": pa.string(), "ms": pa.float64(), "n": pa.int64(), "_timestamp": pa.timestamp("us", "UTC")}
    noon = datetime(2024, 5, 1, 12, tzinfo=UTC)
    old = {"user": "ann", "ms": 1.5, "n": 1, "_timestamp": noon}
    for batch, (schema, row) in enumerate(
        [
            (pa.schema(list(kinds.items())), old),
            (pa.schema([*kinds.items(), ("later", pa.int64())]), {**old, "later": 7}),
        ]
    ):
        lake = lake_at(tmp_path, "delta", schema)
        lake.commit(batch, write(lake, [pa.RecordBatch.from_pylist([row], schema=schema)]))
    table = DeltaTable(str(tmp_path))
    for name, value in old.items():
        assert table.to_pyarrow_table(filters=[(name, "=", value)]).num_rows == 2, name
    found = table.to_pyarrow_dataset()
    assert found.to_table(filter=ds.field("later").is_null()).num_rows == 1
    assert found.to_table(filter=ds.field("later") == 7).num_rows == 1


def test_rows_of_no_day_are_found_by_their_time(tmp_path: Path, format: str) -> None:
    """Producers that count microseconds where Kafka counts milliseconds write in the year 57846."""
    lake = lake_at(tmp_path, format)
    times = pa.array([1_763_300_000_000_000, 1_763_300_000_000_000_000]).cast(pa.timestamp("us", "UTC"))
    columns = {"value": pa.array([b"now", b"far"]), "_offset": pa.array([0, 1]), "_timestamp": times}
    batch = pa.RecordBatch.from_arrays([columns[name] for name in SCHEMA.names], schema=SCHEMA)
    lake.commit(0, write(lake, [batch]))
    since, later = datetime(2025, 1, 1, tzinfo=UTC), datetime(2026, 1, 1, tzinfo=UTC)

    def values(**span: datetime) -> set[bytes]:
        return {value for each in lake.rows().read(["value"], **span) for value in each.column(0).to_pylist()}

    assert values(since=since) == {b"now", b"far"}
    assert values(since=later) == {b"far"}
    assert values(since=since, until=later) == {b"now"}
