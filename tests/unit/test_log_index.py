"""The sparse index: lookups, growth, and what is left of it in a file."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from millstream.core.disk import Disk
from millstream.log.index import ENTRY_BYTES, NO_TIME, Index

NOTHING = (0, 0, NO_TIME)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "00000000000000000000.index"


def make(path: Path, count: int, disk: Disk | None = None) -> Index:
    """Entries at offsets 10, 20…, positions 100, 200…, times 1000, 2000…"""
    index = Index(disk or Disk(), str(path))
    for number in range(1, count + 1):
        index.add(number * 10, number * 100, number * 1000)
    return index


@pytest.mark.parametrize(
    ("wanted", "found"),
    [(0, NOTHING), (9, NOTHING), (10, (10, 100, 1000)), (19, (10, 100, 1000)), (999, (50, 500, 5000))],
)
def test_finds_the_last_entry_at_or_before_an_offset(path: Path, wanted: int, found: tuple[int, int, int]) -> None:
    assert make(path, 5).by_offset(wanted) == found


def test_finds_by_position_and_by_time(path: Path) -> None:
    index = make(path, 5)
    assert index.by_position(99) == NOTHING
    assert index.by_position(100) == (10, 100, 1000)
    assert index.by_position(10_000) == (50, 500, 5000)
    # Everything before the entry must be older than the time that is looked for.
    assert index.by_time(1000) == NOTHING
    assert index.by_time(1001) == (10, 100, 1000)
    assert index.by_time(99_999) == (50, 500, 5000)


def test_an_empty_one_says_from_the_beginning_and_makes_no_file(path: Path) -> None:
    index = Index(Disk(), str(path))
    assert index.by_offset(5) == index.by_position(5) == index.by_time(5) == NOTHING
    assert not path.exists()


def test_grows_past_its_first_capacity(path: Path) -> None:
    index = make(path, 1000)
    assert [index.entry(at)[0] for at in (0, 255, 256, 999)] == [10, 2560, 2570, 10_000]
    index.close()
    assert path.stat().st_size == 1000 * ENTRY_BYTES


def test_is_there_again_after_closing(path: Path) -> None:
    index = make(path, 5)
    index.close()
    assert index.by_offset(35) == (30, 300, 3000)
    index.add(60, 600, 6000)
    index.close()
    again = Index(Disk(), str(path))
    assert again.load(10_000) and again.count == 6


def test_loads_only_entries_below_a_position(path: Path) -> None:
    make(path, 9).close()
    index = Index(Disk(), str(path))
    assert index.load(350) and index.count == 3
    index.close()
    assert path.stat().st_size == 3 * ENTRY_BYTES


def test_the_zeros_behind_the_entries_of_a_killed_broker_do_not_count(path: Path) -> None:
    index = make(path, 5)
    assert path.stat().st_size > 5 * ENTRY_BYTES
    again = Index(Disk(), str(path))
    assert again.load(10_000) and again.count == 5
    assert again.by_offset(99) == index.by_offset(99)


@pytest.mark.parametrize("content", [None, b"", b"x" * 17])
def test_does_not_load_what_is_no_index(path: Path, content: bytes | None) -> None:
    if content is not None:
        path.write_bytes(content)
    assert not Index(Disk(), str(path)).load(1000)


def test_cut_forgets_entries_at_and_behind_a_position(path: Path) -> None:
    index = make(path, 5)
    index.cut(300)
    assert index.count == 2 and index.by_offset(99) == (20, 200, 2000)
    assert path.stat().st_size == 2 * ENTRY_BYTES


def test_clear_empties_also_a_file_that_it_never_opened(path: Path) -> None:
    make(path, 5).close()
    index = Index(Disk(), str(path))
    index.clear()
    assert path.stat().st_size == 0
    index.add(1, 2, 3)
    index.close()
    assert path.stat().st_size == ENTRY_BYTES


class CountingDisk(Disk):
    def __init__(self) -> None:
        self.synced = 0

    def sync(self, file: object) -> None:
        self.synced += 1

    def sync_map(self, file: object, mapped: object) -> None:
        self.synced += 1


def test_syncs_what_changed_even_if_it_was_let_go_since(path: Path) -> None:
    disk = CountingDisk()
    index = make(path, 3, disk)
    index.sync()
    index.sync()
    assert disk.synced == 1, "nothing changed in between"
    index.add(40, 400, 4000)
    index.close()
    index.sync()
    assert disk.synced == 2
    index.sync()
    assert disk.synced == 2


def no_room(fd: int, start: int, size: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_an_error_and_not_a_bus_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mapped file has its blocks before it is written to."""
    monkeypatch.setattr(os, "posix_fallocate", no_room)
    with pytest.raises(OSError, match="No space left"):
        make(path, 1)


def test_still_has_its_entries_where_a_full_disk_keeps_it_from_growing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = make(path, 256)
    with monkeypatch.context() as full:
        full.setattr(os, "posix_fallocate", no_room)
        for _ in range(2):
            with pytest.raises(OSError, match="No space left"):
                index.add(2570, 25_700, 257_000)
            assert index.by_offset(9999) == (2560, 25_600, 256_000)
    index.add(2570, 25_700, 257_000)
    assert index.by_offset(9999) == (2570, 25_700, 257_000)
    index.close()
    assert path.stat().st_size == 257 * ENTRY_BYTES


def test_grows_by_truncation_where_blocks_cannot_be_reserved(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_here(fd: int, start: int, size: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", not_here)
    assert make(path, 300).by_offset(3000) == (3000, 30_000, 300_000)
