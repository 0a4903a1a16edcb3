"""What a store makes is its owner's alone, whatever the umask is."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from millstream.log.config import LogConfig
from millstream.log.flusher import Flusher
from millstream.stores.base import LogStore, MetaStore, Put
from millstream.stores.local import LocalLogStore
from millstream.stores.url import open_store
from millstream.testing.clock import VirtualClock
from tests.batches import append, batch, fill
from tests.serving import ServedBroker

TOPIC_ID = "0123456789abcdef0123456789abcdef"


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def modes(directory: Path) -> dict[str, int]:
    found = {".": directory.stat().st_mode & 0o777}
    return found | {str(path.relative_to(directory)): path.stat().st_mode & 0o777 for path in directory.rglob("*")}


def check(directory: Path) -> set[str]:
    found = modes(directory)
    wrong = {
        name: oct(mode) for name, mode in found.items() if mode != (0o700 if (directory / name).is_dir() else 0o600)
    }
    assert not wrong
    return {Path(name).name for name in found}


async def use(store: tuple[LogStore, MetaStore], partition: int = 0) -> None:
    logs, meta = store
    await logs.start()
    await meta.start()
    await meta.transact(Put("topics/t", b"{}"))
    await logs.prepare(TOPIC_ID, partition + 1)
    await fill(logs.open("t", TOPIC_ID, partition, LogConfig(segment_bytes=5000, index_interval_bytes=200)), 100)


async def test_a_directory_of_files(tmp_path: Path) -> None:
    logs, meta = store = open_store(f"file:{tmp_path / 'some' / 'data'}", VirtualClock(), lambda _: None)
    await use(store)
    logs.opened_all()
    names = check(tmp_path / "some")
    assert {"lock", "meta.db", "meta.db-wal", "meta.db-shm", "reserve", "00000000000000000000.index"} <= names
    await meta.close()
    await logs.close()
    assert "checkpoint" in check(tmp_path / "some")


async def test_a_directory_that_an_earlier_version_made_is_closed_to_others(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    logs, meta = store = open_store(f"file:{directory}", VirtualClock(), lambda _: None)
    await use(store)
    await meta.close()
    await logs.close()
    for path in [directory, *directory.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    logs, meta = store = open_store(f"file:{directory}", VirtualClock(), lambda _: None)
    check(directory)
    await use(store, 1)
    check(directory)
    await meta.close()
    await logs.close()


async def test_files_of_others_in_the_directory_are_left_alone(tmp_path: Path) -> None:
    """`--data .` is a directory like any other."""
    tmp_path.chmod(0o755)
    script = tmp_path / "run.sh"
    script.touch()
    script.chmod(0o755)
    logs, meta = store = open_store(f"file:{tmp_path}", VirtualClock(), lambda _: None)
    await use(store)
    found = modes(tmp_path)
    assert found.pop(".") == found.pop("run.sh") == 0o755
    assert set(found.values()) == {0o600, 0o700}
    await meta.close()
    await logs.close()


@pytest.fixture
async def sqlite(tmp_path: Path) -> AsyncIterator[Path]:
    tmp_path.chmod(0o755)
    yield tmp_path / "store.db"
    assert tmp_path.stat().st_mode & 0o777 == 0o755, "the directory of an sqlite: store is not its own"


async def test_an_sqlite_file_with_its_wal(sqlite: Path) -> None:
    for number in range(2):
        store = open_store(f"sqlite:{sqlite}", VirtualClock(), lambda _: None)
        await use(store, number)
        beside = {path.name: path.stat().st_mode & 0o777 for path in sqlite.parent.iterdir()}
        assert beside == {"store.db": 0o600, "store.db-wal": 0o600, "store.db-shm": 0o600}
        await store[1].close()
        await store[0].close()
        sqlite.chmod(0o644)  # as an earlier version made it


async def test_an_sqlite_file_in_use_keeps_its_locks(sqlite: Path) -> None:
    """A second store in this process makes no descriptor of its own for the file."""
    first = open_store(f"sqlite:{sqlite}", VirtualClock(), lambda _: None)
    await use(first)
    held = locks(sqlite)
    assert held
    second = open_store(f"sqlite:{sqlite}", VirtualClock(), lambda _: None)
    await second[0].start()
    assert held <= locks(sqlite)
    for store in (second, first):
        await store[1].close()
        await store[0].close()


def locks(path: Path) -> set[str]:
    """The POSIX locks of this process on the database and its shared memory, as Linux lists them."""
    inodes = {str(each.stat().st_ino) for each in path.parent.glob(f"{path.name}*")}
    found = set()
    for line in Path("/proc/locks").read_text().splitlines():
        fields = line.split()
        if fields[1] == "POSIX" and fields[4] == str(os.getpid()) and fields[5].split(":")[-1] in inodes:
            found.add(" ".join(fields[3:]))
    return found


async def test_a_directory_that_cannot_be_made_private_is_used_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A volume's directory may belong to another user."""

    def refuse(path: str, mode: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    (tmp_path / "data").mkdir(mode=0o755)
    monkeypatch.setattr(os, "chmod", refuse)
    store = LocalLogStore(str(tmp_path / "data"), VirtualClock(), Flusher(asyncio.get_running_loop()))
    store.lock()
    await append(store.open("t", TOPIC_ID, 0, LogConfig()), batch(b"x"))
    await store.close()


def test_a_real_broker(tmp_path: Path) -> None:
    with ServedBroker(tmp_path / "data"):
        check(tmp_path / "data")
