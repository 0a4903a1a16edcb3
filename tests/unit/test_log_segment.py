"""One segment: finding batches, cutting reads at them, and telling times."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from millstream.core.disk import Disk
from millstream.log.index import NO_TIME
from millstream.log.segment import BrokenSegment, Segment, file_name
from millstream.records.batch import patch_offset, read_header
from tests.batches import NOW, batch

BASE = 1000


def make(directory: Path, count: int = 30, interval: int = 300, records: int = 3) -> Segment:
    """Batches of three records from offset 1000 on, ten milliseconds apart."""
    segment = Segment(Disk(), str(directory), BASE, 0)
    segment.create()
    for number in range(count):
        data = batch(*[b"x" * 20] * records, at=NOW + number * 10)
        header = read_header(data)
        offset = BASE + number * records
        patch_offset(data, offset, header.length, 0)
        segment.append(data, read_header(data), offset, interval)
    return segment


@pytest.fixture
def segment(tmp_path: Path) -> Segment:
    return make(tmp_path)


def test_is_named_by_its_base_offset_in_twenty_digits() -> None:
    assert file_name(42) == "00000000000000000042.log"


def test_locates_the_batch_that_holds_an_offset(segment: Segment) -> None:
    for offset in range(BASE, BASE + 90):
        found = segment.locate(offset, segment.size)
        assert found is not None
        assert found[1].base_offset == BASE + (offset - BASE) // 3 * 3


def test_locates_nothing_at_or_behind_the_limit(segment: Segment) -> None:
    assert segment.locate(BASE + 90, segment.size) is None
    found = segment.locate(BASE + 45, segment.size)
    assert found is not None
    position, _ = found
    assert segment.locate(BASE + 45, position) is None


def test_the_index_stays_sparse(segment: Segment, tmp_path: Path) -> None:
    size = read_header(os.pread(segment.file.fd, 61, 0)).size
    assert segment.index.count == 29 * size // (-(-300 // size) * size)


def test_cuts_at_batches(segment: Segment) -> None:
    size = segment.size // 30
    assert segment.cut_at_batch(0, size * 4 + 5, segment.size) == (size * 4, BASE + 12)
    assert segment.cut_at_batch(size * 7, size * 4, segment.size) == (size * 11, BASE + 33)
    assert segment.cut_at_batch(size * 7, 1, segment.size) == (size * 8, BASE + 24)
    assert segment.cut_at_batch(size * 7, 1 << 30, segment.size) == (segment.size, BASE + 90)


def test_knows_its_largest_time_again_after_a_restart(segment: Segment, tmp_path: Path) -> None:
    segment.let_go()
    again = Segment(Disk(), str(tmp_path), BASE, segment.size)
    assert again.max_timestamp == segment.max_timestamp == NOW + 290
    assert again.first_timestamp == NOW


def test_knows_the_largest_time_of_a_part(segment: Segment) -> None:
    size = segment.size // 30
    assert segment.newest_time(BASE, size * 10) == NOW + 90
    assert segment.newest_time(BASE + 3, size * 10) == NOW + 90
    assert segment.newest_time(BASE + 60, size * 10) == NO_TIME
    assert segment.newest_time(BASE, size) == NOW


def test_an_empty_one_has_no_times(tmp_path: Path) -> None:
    segment = make(tmp_path, count=0)
    assert segment.max_timestamp == segment.first_timestamp == NO_TIME
    assert segment.locate(BASE, 0) is None


def test_a_segment_too_small_for_an_index_does_not_look_for_one_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, count=2).let_go()
    segment = Segment(Disk(), str(tmp_path), BASE, os.stat(tmp_path / file_name(BASE)).st_size)
    segment.locate(BASE, segment.size)
    monkeypatch.setattr(Segment, "rebuild_index", lambda *_: pytest.fail("rebuilt twice"))
    segment.locate(BASE, segment.size)


def test_a_new_segment_does_not_inherit_the_index_of_an_old_one(tmp_path: Path) -> None:
    make(tmp_path).let_go()
    os.remove(tmp_path / file_name(BASE))
    segment = make(tmp_path, count=2)
    assert segment.index.count == 0
    assert os.stat(segment.index.path).st_size == 0


def test_bytes_that_are_no_batch_are_an_error_and_not_data(segment: Segment) -> None:
    with open(segment.path, "r+b") as file:
        file.seek(segment.size // 2)
        file.write(bytes(500))
    with pytest.raises(BrokenSegment, match="holds no batch at position"):
        list(segment.walk(0, segment.size))


def test_readers_keep_the_file_while_the_segment_lets_go(segment: Segment) -> None:
    walking = segment.walk(0, segment.size)
    next(walking)
    segment.let_go()
    os.remove(segment.path)
    assert sum(1 for _ in walking) == 29
