"""The checkpoint file: whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream.core.disk import Disk
from millstream.log.checkpoint import FILE_NAME, Checkpoint

POINT = Checkpoint(3, 40, 5000, 77, [[9, 0, 123, [[0, 4, 60], [5, 9, 65]]]], [[0, 4000], [20, 4100]])


def test_reads_what_was_written(tmp_path: Path) -> None:
    POINT.write(Disk(), str(tmp_path))
    assert Checkpoint.read(str(tmp_path)) == POINT


def test_reads_what_an_earlier_version_wrote(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"8339e699 [3,40,5000,77,[]]\n")
    assert Checkpoint.read(str(tmp_path)) == Checkpoint(3, 40, 5000, 77)


def test_leaves_no_other_file(tmp_path: Path) -> None:
    (tmp_path / f"{FILE_NAME}.new").write_text("left over from a crash, and longer than what replaces it" * 100)
    POINT.write(Disk(), str(tmp_path))
    Checkpoint(1).write(Disk(), str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]
    assert Checkpoint.read(str(tmp_path)) == Checkpoint(1)


def test_none_where_there_is_none(tmp_path: Path) -> None:
    assert Checkpoint.read(str(tmp_path)) is None


def test_notices_every_flipped_byte_and_every_missing_tail(tmp_path: Path) -> None:
    POINT.write(Disk(), str(tmp_path))
    path = tmp_path / FILE_NAME
    whole = path.read_bytes()
    for at in range(len(whole) - 1):
        damaged = bytearray(whole)
        damaged[at] ^= 0x11
        for content in (bytes(damaged), whole[:at]):
            path.write_bytes(content)
            with pytest.raises((ValueError, TypeError)):
                Checkpoint.read(str(tmp_path))
