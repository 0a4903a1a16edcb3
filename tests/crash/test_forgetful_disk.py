"""The disk that forgets does forget, and only what it may."""

from __future__ import annotations

import errno
from pathlib import Path
from random import Random

import pytest

from millstream.testing.disk import PAGE_BYTES, SECTOR_BYTES, ForgetfulDisk, PowerLoss

SEEDS = range(60)


@pytest.fixture
def disk(tmp_path: Path) -> ForgetfulDisk:
    return ForgetfulDisk(str(tmp_path))


def outcomes(tmp_path: Path, play: object) -> set[bytes | None]:
    """What the file `f` may hold after a crash, over many seeds; None: there is none."""
    found: set[bytes | None] = set()
    for seed in SEEDS:
        directory = tmp_path / f"run-{seed}"
        directory.mkdir()
        disk = ForgetfulDisk(str(directory))
        play(disk, str(directory / "f"))  # type: ignore[operator]
        disk.crash(Random(seed))
        path = directory / "f"
        found.add(path.read_bytes() if path.exists() else None)
    return found


def durable(disk: ForgetfulDisk, path: str, content: bytes) -> object:
    file = disk.open(path, create=True)
    disk.append(file, content)
    disk.sync(file)
    disk.sync_directory(str(Path(path).parent))
    return file


def test_what_is_synced_stays(tmp_path: Path) -> None:
    assert outcomes(tmp_path, lambda disk, path: durable(disk, path, b"kept")) == {b"kept"}


def test_a_file_whose_name_is_not_synced_may_be_gone(tmp_path: Path) -> None:
    def play(disk: ForgetfulDisk, path: str) -> None:
        file = disk.open(path, create=True)
        disk.append(file, b"kept")
        disk.sync(file)

    assert outcomes(tmp_path, play) == {b"kept", None}


def test_an_unsynced_tail_may_be_torn_anywhere_or_full_of_zeros(tmp_path: Path) -> None:
    def play(disk: ForgetfulDisk, path: str) -> None:
        disk.append(durable(disk, path, b"k" * 700), b"n" * 2000)  # type: ignore[arg-type]

    found = outcomes(tmp_path, play)
    assert all(content is not None and content[:700] == b"k" * 700 for content in found)
    tails = {content[700:] for content in found if content is not None}
    assert {b"", b"n" * 2000} <= tails
    assert any(0 < len(tail) < 2000 and set(tail) == {ord("n")} for tail in tails), "cut short"
    assert any(b"\0" in tail and b"n" in tail for tail in tails), "sectors missing"
    for tail in tails:
        for at in range(700 - 700 % SECTOR_BYTES, 700 + len(tail), SECTOR_BYTES):
            assert len(set(tail[max(at - 700, 0) : at - 700 + SECTOR_BYTES])) <= 1, "a sector is there or is not"


def test_a_truncation_may_not_have_happened_and_what_was_cut_may_shine_through(tmp_path: Path) -> None:
    def play(disk: ForgetfulDisk, path: str) -> None:
        file = durable(disk, path, b"o" * 1024)
        disk.truncate(file, 512)  # type: ignore[arg-type]
        disk.append(file, b"n" * 1024)  # type: ignore[arg-type]

    found = outcomes(tmp_path, play)
    assert b"o" * 1024 in found
    assert b"o" * 512 + b"n" * 1024 in found
    assert any(content is not None and content.startswith(b"o" * 1024 + b"n") for content in found)


def test_a_rename_is_old_or_new(tmp_path: Path) -> None:
    def play(disk: ForgetfulDisk, path: str) -> None:
        durable(disk, path, b"old")
        durable(disk, path + ".new", b"new")
        disk.rename(path + ".new", path)

    assert outcomes(tmp_path, play) == {b"old", b"new"}


def test_replace_is_old_or_new_and_new_once_it_returns(tmp_path: Path) -> None:
    def play(disk: ForgetfulDisk, path: str) -> None:
        durable(disk, path, b"old")
        disk.replace(path, b"new")

    assert outcomes(tmp_path, play) == {b"new"}

    for operation in range(1, 8):
        directory = tmp_path / f"cut-{operation}"
        directory.mkdir()
        disk = ForgetfulDisk(str(directory))
        durable(disk, str(directory / "f"), b"old")
        disk.lose_power_at(operation, Random(operation))
        try:
            disk.replace(str(directory / "f"), b"new")
        except PowerLoss:
            disk.crash(Random(operation))
        assert (directory / "f").read_bytes() in (b"old", b"new")


def test_a_removal_may_not_have_happened(tmp_path: Path) -> None:
    def play(disk: ForgetfulDisk, path: str) -> None:
        durable(disk, path, b"kept")
        disk.remove(path)

    assert outcomes(tmp_path, play) == {b"kept", None}


def test_a_mapped_file_keeps_any_mix_of_pages(tmp_path: Path) -> None:
    def play(disk: ForgetfulDisk, path: str) -> None:
        file = disk.open(path, create=True)
        mapped = disk.map(file, 3 * PAGE_BYTES)
        disk.sync_map(file, mapped)
        disk.sync_directory(str(Path(path).parent))
        mapped[:] = b"m" * 3 * PAGE_BYTES

    found = outcomes(tmp_path, play)
    zero, full = bytes(PAGE_BYTES), b"m" * PAGE_BYTES
    assert {zero * 3, full * 3} <= found
    assert any(
        content is not None and content not in (zero * 3, full * 3) and len(content) == 3 * PAGE_BYTES
        for content in found
    )


def test_a_directory_made_by_itself_may_be_gone_and_made_by_make_directory_is_not(tmp_path: Path) -> None:
    disk = ForgetfulDisk(str(tmp_path))
    disk.make_directory(str(tmp_path / "a" / "b"))
    for seed in SEEDS:
        disk = disk.crash(Random(seed))
    assert (tmp_path / "a" / "b").is_dir()


class TestFailedSync:
    def test_says_so_and_forgets_although_reads_show_it(self, tmp_path: Path) -> None:
        def play(disk: ForgetfulDisk, path: str) -> None:
            file = durable(disk, path, b"k" * 512)
            disk.append(file, b"n" * 512)  # type: ignore[arg-type]
            disk.fail_sync(at=1)
            with pytest.raises(OSError, match="Input/output error"):
                disk.sync(file)  # type: ignore[arg-type]
            assert Path(path).read_bytes() == b"k" * 512 + b"n" * 512
            disk.sync(file)  # type: ignore[arg-type]

        assert outcomes(tmp_path, play) == {b"k" * 512 + bytes(512)}

    def test_writing_again_helps(self, tmp_path: Path) -> None:
        def play(disk: ForgetfulDisk, path: str) -> None:
            file = durable(disk, path, b"k" * 512)
            disk.append(file, b"n" * 512)  # type: ignore[arg-type]
            disk.fail_sync(at=1)
            with pytest.raises(OSError, match="Input/output error"):
                disk.sync(file)  # type: ignore[arg-type]
            disk.rewrite(path, 512, b"n" * 512)
            disk.sync(file)  # type: ignore[arg-type]

        assert outcomes(tmp_path, play) == {b"k" * 512 + b"n" * 512}

    def test_counts_from_now_and_fails_once(self, disk: ForgetfulDisk, tmp_path: Path) -> None:
        file = durable(disk, str(tmp_path / "f"), b"x")
        disk.fail_sync(at=3)
        disk.sync(file)  # type: ignore[arg-type]
        disk.sync_directory(str(tmp_path))
        with pytest.raises(OSError, match="Input/output error"):
            disk.sync(file)  # type: ignore[arg-type]
        disk.sync(file)  # type: ignore[arg-type]


def test_a_failed_write_stops_in_the_middle_once(disk: ForgetfulDisk, tmp_path: Path) -> None:
    file = disk.open(str(tmp_path / "f"), create=True)
    disk.fail_write(errno.ENOSPC, after_bytes=15)
    disk.append(file, b"a" * 10)
    with pytest.raises(OSError, match="No space left"):
        disk.append(file, b"b" * 10)
    disk.append(file, b"c")
    assert (tmp_path / "f").read_bytes() == b"a" * 10 + b"b" * 5 + b"c"


def test_without_power_nothing_works_any_more(disk: ForgetfulDisk, tmp_path: Path) -> None:
    file = disk.open(str(tmp_path / "f"), create=True)
    disk.lose_power_at(2, Random(3))
    disk.append(file, b"whole")
    with pytest.raises(PowerLoss):
        disk.append(file, b"torn" * 100)
    assert 5 <= (tmp_path / "f").stat().st_size <= 405
    for attempt in (
        lambda: disk.append(file, b"x"),
        lambda: disk.sync(file),
        lambda: disk.open(str(tmp_path / "f")),
        lambda: disk.sync_directory(str(tmp_path)),
    ):
        with pytest.raises(PowerLoss):
            attempt()


def test_files_of_others_are_left_alone(disk: ForgetfulDisk, tmp_path: Path) -> None:
    (tmp_path / "lock").write_bytes(b"123\n")
    durable(disk, str(tmp_path / "f"), b"x")
    disk.crash(Random(1))
    assert (tmp_path / "lock").read_bytes() == b"123\n"
