"""Segment files in any state: what is found in them, and where reading can go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream.log import inspection
from millstream.log.inspection import inspect, next_batch
from millstream.records import codec
from millstream.records.batch import BatchHeader


def batch(base: int, count: int = 2) -> bytes:
    records = [(base + at, 1000 + at, b"key", b"value-%d" % (base + at)) for at in range(count)]
    return bytes(codec.encode(records, base_offset=base))


@pytest.fixture
def segment(tmp_path: Path) -> Path:
    path = tmp_path / f"{0:020d}.log"
    path.write_bytes(batch(0) + batch(2) + batch(4))
    return path


def spans(path: Path) -> list[tuple[int | None, str]]:
    return [(found.header.base_offset if found.header else None, found.problem) for found, _ in inspect(str(path))]


def behind(path: Path, position: int, first: int = 0, end: int = 100) -> tuple[int, BatchHeader] | None:
    with path.open("rb") as file:
        return next_batch(file.fileno(), position, path.stat().st_size, first, end)


def damage(path: Path, at: int, data: bytes) -> None:
    stored = bytearray(path.read_bytes())
    stored[at : at + len(data)] = data
    path.write_bytes(stored)


def test_sound_batches_are_found_with_their_bytes(segment: Path) -> None:
    assert spans(segment) == [(0, ""), (2, ""), (4, "")]
    assert [bytes(data) for _, data in inspect(str(segment))] == [batch(0), batch(2), batch(4)]


def test_an_empty_file_holds_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty.log").touch()
    assert spans(tmp_path / "empty.log") == []


def test_a_flipped_bit_in_a_record_is_a_checksum_that_does_not_match(segment: Path) -> None:
    damage(segment, len(batch(0)) + 70, b"\xff")
    assert spans(segment) == [(0, ""), (2, "the CRC-32C does not match the bytes"), (4, "")]


@pytest.mark.parametrize("at", [8, 16], ids=["length", "magic"])
def test_behind_a_broken_header_the_next_sound_batch_is_found(segment: Path, at: int) -> None:
    size = len(batch(0))
    damage(segment, size + at, b"\x7f")
    assert spans(segment) == [(0, ""), (None, "no batch header"), (4, "")]
    found = behind(segment, size)
    assert found is not None and found[0] == 2 * size and found[1].base_offset == 4


def test_a_zeroed_page_is_named_as_zeros(segment: Path) -> None:
    damage(segment, len(batch(0)), bytes(len(batch(2))))
    assert spans(segment) == [(0, ""), (None, "zeros"), (4, "")]


def test_a_torn_tail_is_no_batch(segment: Path) -> None:
    segment.write_bytes(segment.read_bytes()[:-10])
    assert spans(segment) == [(0, ""), (2, ""), (None, "no batch header")]
    assert behind(segment, 2 * len(batch(0))) is None


def test_a_file_of_magic_bytes_ends_without_a_batch(tmp_path: Path) -> None:
    path = tmp_path / "magic.log"
    path.write_bytes(b"\2" * 100_000)
    assert spans(path) == [(None, "no batch header")]


@pytest.mark.parametrize(("first", "end"), [(5, 100), (0, 5)], ids=["too low", "too high"])
def test_a_batch_with_other_offsets_is_not_the_next_one(segment: Path, first: int, end: int) -> None:
    assert behind(segment, 2 * len(batch(0)), first, end) is None


@pytest.mark.parametrize("distance", [0, 1, 16, 17, 60, 61, 62, 5000])
def test_a_batch_is_found_wherever_the_pieces_of_a_search_end(
    tmp_path: Path, distance: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "_CHUNK_BYTES", 100)
    path = tmp_path / "far.log"
    path.write_bytes(b"\2" * distance + batch(4))
    found = behind(path, 0)
    assert found is not None and found[0] == distance
