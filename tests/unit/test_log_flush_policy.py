"""`flush=`: what it may say, and when a log then syncs."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream.core.disk import Disk
from millstream.core.errors import StartupError
from millstream.log.config import FlushPolicy, LogConfig
from millstream.stores.local import LocalLogStore
from millstream.testing.clock import VirtualClock
from tests.batches import append, batch
from tests.crash.machine import HandFlusher


@pytest.mark.parametrize("text", ["always", "os", "every=100", "every=500ms", "every=100,500ms"])
def test_says_itself_as_it_was_written(text: str) -> None:
    assert str(FlushPolicy.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", "never", "every=", "every=0", "every=1", "every=-5", "every=0ms", "every=5s", "os,"]
)
def test_refuses_what_it_does_not_know(text: str) -> None:
    with pytest.raises(StartupError, match="use always, os"):
        FlushPolicy.parse(text)


class CountingDisk(Disk):
    syncs = 0

    def sync(self, file: object) -> None:
        self.syncs += 1


@pytest.fixture
def machine(tmp_path: Path) -> tuple[LocalLogStore, VirtualClock, HandFlusher, CountingDisk]:
    clock, flusher, disk = VirtualClock(), HandFlusher(), CountingDisk()
    return LocalLogStore(str(tmp_path), clock, flusher, disk), clock, flusher, disk


Machine = tuple[LocalLogStore, VirtualClock, HandFlusher, CountingDisk]


def test_always_answers_after_the_sync(machine: Machine) -> None:
    store, _, flusher, disk = machine
    log = store.open("t", "id", 0, LogConfig())
    promise = append(log, batch(b"x"))
    assert not promise.done and log.high_watermark == 0 and log.end == 1
    flusher.run_all()
    assert promise.done and log.high_watermark == 1 and disk.syncs == 1


def test_os_never_asks_for_one(machine: Machine) -> None:
    store, clock, flusher, disk = machine
    log = store.open("t", "id", 0, LogConfig(flush=FlushPolicy.parse("os")))
    assert all(append(log, batch(b"x")).done for _ in range(50))
    clock.advance(3600)
    assert log.high_watermark == 50 and not flusher.waiting and disk.syncs == 0


def test_every_n_batches(machine: Machine) -> None:
    store, _, flusher, disk = machine
    log = store.open("t", "id", 0, LogConfig(flush=FlushPolicy.parse("every=3")))
    for number in range(1, 10):
        assert append(log, batch(b"x")).done
        flusher.run_all()
        assert disk.syncs == number // 3


def test_every_n_records_of_a_topics_flush_messages(machine: Machine) -> None:
    store, _, flusher, disk = machine
    log = store.open("t", "id", 0, LogConfig(flush=FlushPolicy.parse("os").tightened(records=5, ms=1 << 62)))
    for number in range(1, 10):
        assert append(log, batch(b"x", b"y")).done
        flusher.run_all()
        assert disk.syncs == number // 3, "of batches with two records each"


def test_every_so_often(machine: Machine) -> None:
    store, clock, flusher, disk = machine
    log = store.open("t", "id", 0, LogConfig(flush=FlushPolicy.parse("every=500ms")))
    append(log, batch(b"x"))
    append(log, batch(b"y"))
    clock.advance(0.4)
    flusher.run_all()
    assert disk.syncs == 0
    clock.advance(0.2)
    flusher.run_all()
    assert disk.syncs == 1 and log.unsynced_bytes == 0
    clock.advance(10)
    flusher.run_all()
    assert disk.syncs == 1, "there was nothing new"
    append(log, batch(b"z"))
    clock.advance(0.5)
    flusher.run_all()
    assert disk.syncs == 2
