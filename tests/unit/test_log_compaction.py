"""Compaction, where the contract suite does not reach: its bounds, its end, and what it takes for a change."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from crc32c import crc32c

from millstream.log import compaction
from millstream.log.config import LogConfig
from millstream.log.replica import ReplicaLog
from millstream.records import codec
from millstream.records.batch import Buffer
from millstream.records.compression import Codec, compress
from millstream.records.record import Record
from millstream.stores.local import LocalLogStore
from millstream.testing.clock import VirtualClock
from tests.batches import append, batch, read_all
from tests.crash.machine import HandFlusher
from tests.crash.store_directory import open_log

CONFIG = LogConfig(
    segment_bytes=600, index_interval_bytes=100, delete=False, compact=True, min_cleanable_dirty_ratio=0.01,
    delete_retention_ms=60_000,
)  # fmt: skip
EAGER = LogConfig(delete=False, compact=True, min_cleanable_dirty_ratio=0.01, delete_retention_ms=0, segment_ms=1)
PLACE = "t", "0123456789abcdef", 0
SKIPPABLE_FRAME = (0x184D2A50).to_bytes(4, "little")
"""What a Zstandard frame to skip begins with; its length follows."""


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


def make_store(directory: Path, clock: VirtualClock) -> LocalLogStore:
    flusher = HandFlusher()
    flusher.is_willing = True
    return LocalLogStore(str(directory), clock, flusher)


@pytest.fixture
async def store(tmp_path: Path, clock: VirtualClock) -> AsyncIterator[LocalLogStore]:
    store = make_store(tmp_path, clock)
    yield store
    await store.close()


@pytest.fixture
def log(store: LocalLogStore) -> ReplicaLog:
    return open_log(store, *PLACE, CONFIG)


def put(log: ReplicaLog, key: bytes, value: bytes | None) -> None:
    append(log, batch(value, keys=[key], at=log.clock.now_ms()))


def put_others(log: ReplicaLog, name: bytes, count: int) -> None:
    for number in range(count):
        put(log, b"%b-%d" % (name, number), bytes(60))


def newest(log: ReplicaLog) -> dict[bytes | None, bytes | None]:
    """The newest value of each key in the log."""
    return {record.key: record.value for record in read_all(log)}


async def test_a_deleted_key_stays_deleted_where_there_are_more_keys_than_fit(
    store: LocalLogStore, log: ReplicaLog, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "KEYS_MAX", 2)
    put(log, b"gone", b"value")
    put_others(log, b"before", 8)
    put(log, b"gone", None)
    put_others(log, b"behind", 8)
    clock.advance(61)
    for _ in range(len(log.segments)):
        await store.housekeep()
        assert newest(log).get(b"gone") is None
    assert b"gone" not in newest(log), "a later pass comes to it"
    assert len(newest(log)) == 16


async def test_a_segment_that_stays_as_long_as_it_was_is_replaced_all_the_same(
    store: LocalLogStore, log: ReplicaLog, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compressor makes of one record as many bytes as the producer's made of two."""
    now = clock.now_ms()
    both = [Record(0, now, b"gone", bytes(range(100))), Record(0, now, b"stays", b"value")]
    data = codec.encode(both, codec=Codec.ZSTD)
    append(log, data)
    put_others(log, b"before", 6)
    put(log, b"gone", None)
    put_others(log, b"behind", 12)
    clock.advance(61)
    missing = len(data) - len(codec.encode(both[1:], codec=Codec.ZSTD))

    def compress_badly(kind: Codec, body: Buffer) -> bytes:
        padding = bytes(missing - len(SKIPPABLE_FRAME) - 4)
        return SKIPPABLE_FRAME + len(padding).to_bytes(4, "little") + padding + compress(kind, body)

    monkeypatch.setattr(codec, "compress", compress_badly)
    before_bytes = log.segments[0].size
    await store.housekeep()
    assert log.segments[0].size == before_bytes
    assert b"gone" not in newest(log)
    assert newest(log)[b"stays"] == b"value"


async def test_a_record_older_than_the_largest_lag_is_compacted_however_little_is_new(
    store: LocalLogStore, log: ReplicaLog, clock: VirtualClock
) -> None:
    """KIP-354: `min.cleanable.dirty.ratio` alone would let an old value stay for ever."""
    log.config = replace(CONFIG, min_cleanable_dirty_ratio=0.9, segment_ms=5000)
    put(log, b"erased", b"private")
    put_others(log, b"before", 60)
    clock.advance(10)
    await store.housekeep()
    put(log, b"erased", b"")
    put_others(log, b"behind", 8)
    clock.advance(10)
    await store.housekeep()
    assert [record.value for record in read_all(log) if record.key == b"erased"] == [b"private", b""]
    log.config = replace(log.config, max_compaction_lag_ms=5000)
    await store.housekeep()
    assert [record.value for record in read_all(log) if record.key == b"erased"] == [b""]


class TestDamage:
    """One segment of several is damaged; the keys are the same in all of them."""

    VICTIM = 2

    @pytest.fixture
    async def path(self, store: LocalLogStore, log: ReplicaLog, clock: VirtualClock) -> Path:
        put(log, b"before", b"the damage")
        for turn in range(10):
            for key in range(3):
                put(log, b"key-%d" % key, b"%d" % turn + bytes(150))
        assert len(log.segments) > 6
        path = Path(log.segments[self.VICTIM].path)
        clock.advance(10)
        await store.close()
        return path

    @staticmethod
    def flip(path: Path, position: int) -> bytes:
        data = bytearray(path.read_bytes())
        data[position] ^= 1
        path.write_bytes(data)
        return bytes(data)

    @pytest.mark.parametrize("position", [16, 90], ids=["header", "value"])
    @pytest.mark.parametrize("is_known", [True, False], ids=["known", "found by compaction"])
    async def test_a_damaged_segment_is_left_as_it_is(
        self, path: Path, tmp_path: Path, clock: VirtualClock, position: int, is_known: bool
    ) -> None:
        data = self.flip(path, position)
        store = make_store(tmp_path, clock)
        log = open_log(store, *PLACE, CONFIG)
        base, behind = (log.segments[at].base_offset for at in (self.VICTIM, self.VICTIM + 1))
        if is_known:
            assert await log.inspect(base) is not None
        before = [segment.size for segment in log.segments]
        await store.housekeep()
        assert path.read_bytes() == data
        assert log.damage.at(base) is not None and len(log.damage.ranges) == 1
        assert sum(segment.size for segment in log.segments) < sum(before), "the others were compacted"
        assert not [segment for segment in log.segments[:-1] if segment.is_open], "housekeeping went on"
        # Sound data on both sides can be read, now and after a restart.
        for _ in range(2):
            assert [record.value for record in codec.decode((await log.read(0, 1)).to_bytes())] == [b"the damage"]
            assert newest_from(log, behind) == {b"key-%d" % key: b"9" + bytes(150) for key in range(3)}
            await store.close()
            store = make_store(tmp_path, clock)
            log = open_log(store, *PLACE, CONFIG)
            assert await log.inspect(base) is not None
        assert not list(tmp_path.glob("**/*.cleaned"))
        await store.close()

    async def test_a_tombstone_behind_it_stays(self, path: Path, tmp_path: Path, clock: VirtualClock) -> None:
        """What it deletes may be in the damaged segment, which may be restored."""
        store = make_store(tmp_path, clock)
        log = open_log(store, *PLACE, CONFIG)
        put(log, b"key-1", None)
        put_others(log, b"behind", 12)
        behind = log.segments[self.VICTIM + 1].base_offset
        await store.close()
        self.flip(path, 90)
        clock.advance(61)
        store = make_store(tmp_path, clock)
        log = open_log(store, *PLACE, CONFIG)
        await store.housekeep()
        assert log.damage.ranges
        assert newest_from(log, behind)[b"key-1"] is None
        self.flip(path, 90)
        await store.close()
        store = make_store(tmp_path, clock)
        log = open_log(store, *PLACE, CONFIG)
        await store.housekeep()
        assert b"key-1" not in newest(log), "and goes once that is done"
        await store.close()

    async def test_a_batch_that_cannot_be_decoded_and_came_like_that_is_kept(
        self, store: LocalLogStore, log: ReplicaLog, clock: VirtualClock
    ) -> None:
        strange = batch(b"x" * 50, keys=[b"key"], at=clock.now_ms())
        strange[22] = 3  # LZ4, it says
        strange[17:21] = crc32c(bytes(strange[21:])).to_bytes(4, "big")
        put(log, b"key", b"old")
        append(log, strange)
        put_others(log, b"other", 20)
        put(log, b"key", b"new")
        put_others(log, b"other", 20)
        clock.advance(10)
        before = log.size_bytes()
        await store.housekeep()
        assert log.size_bytes() < before and not log.damage.ranges
        piece = log.read(1, 1).value().to_bytes()
        assert piece[21:] == strange[21:]


def newest_from(log: ReplicaLog, offset: int) -> dict[bytes | None, bytes | None]:
    return {record.key: record.value for record in read_all(log, offset)}


class TestTheEnd:
    """Of a log that has one key and its tombstone, which is old enough to go."""

    @pytest.fixture
    async def restarted(
        self, store: LocalLogStore, log: ReplicaLog, clock: VirtualClock, tmp_path: Path
    ) -> AsyncIterator[LocalLogStore]:
        """Only then the checkpoint reaches behind the last batch, and compaction as far."""
        put(log, b"only", b"value")
        put(log, b"only", None)
        log.config = EAGER
        clock.advance(10)
        await store.housekeep()
        await store.close()
        restarted = make_store(tmp_path, clock)
        yield restarted
        await restarted.close()

    async def test_keeps_a_batch_for_readers_to_get_there(self, restarted: LocalLogStore) -> None:
        log = restarted.open(*PLACE, EAGER)
        await restarted.housekeep()
        assert log.read(1, 1 << 20).value().size
        assert log.read(0, 1 << 20).value().next_offset == log.end == 2

    async def test_is_where_a_read_goes_on_if_an_earlier_version_took_all(
        self, restarted: LocalLogStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(compaction, "_cleanable", lambda log: log.segments[:-1])
        log = restarted.open(*PLACE, EAGER)
        await restarted.housekeep()
        assert log.size_bytes() == 0
        for offset in range(3):
            assert log.read(offset, 1 << 20).value().next_offset == log.end == 2
