"""A log on files whose bytes changed: what readers get, what is looked up, and what goes on as if nothing were."""

from __future__ import annotations

import logging
import os
import shutil
import struct
from pathlib import Path

import pytest

from millstream.broker.batches import read_batches
from millstream.broker.verification import verify_piece
from millstream.core.errors import Code, RequestError
from millstream.log import segment as segments
from millstream.log.config import LogConfig
from millstream.log.damage import Cause, DamagedOffset, UnreadableOffset
from millstream.log.readable import ReadableLog
from millstream.log.replica import ReplicaLog
from millstream.log.segment import Segment
from millstream.records import codec
from millstream.records.batch import read_header
from tests.batches import NOW, append, append_run, batch, fill
from tests.crash.store_directory import SMALL, StoreDirectory, position_of

BARELY_INDEXED = LogConfig(segment_bytes=1 << 30, index_interval_bytes=1 << 20, retention_ms=-1)
SIZE = len(batch(b"0:" + bytes(100)))


def overwrite(path: str, position: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        file.write(data)


def renumber(segment: Segment, offset: int, by: int) -> None:
    overwrite(segment.path, position_of(segment, offset), struct.pack(">q", offset + by))


async def refused(log: ReplicaLog, offset: int) -> DamagedOffset:
    with pytest.raises(DamagedOffset) as caught:
        await log.read(offset, 1 << 20)
    return caught.value


class TestADamagedHeaderInTheLastIndexedBatch:
    """After a clean restart the newest timestamp is looked up from there."""

    @pytest.fixture(params=["magic", "base offset"])
    async def log(self, request: pytest.FixtureRequest, place: StoreDirectory) -> ReplicaLog:
        log = place.open()
        await fill(log, 30)
        active = log.segments[-1]
        at = active.index.entry(active.index.count - 1)[1]
        await place.close()
        overwrite(active.path, at + (16 if request.param == "magic" else 6), b"\x07")
        return place.open()

    @pytest.mark.parametrize("send", [append, append_run])
    async def test_does_not_fail_an_append_of_which_bytes_would_stay(self, log: ReplicaLog, send: object) -> None:
        for number in range(5):
            await send(log, batch(b"after-%d" % number))  # type: ignore[operator]
            assert os.stat(log.segments[-1].path).st_size == log.segments[-1].size
        for number in range(5):
            piece = (await log.read(30 + number, 1)).to_bytes()
            assert read_header(piece).base_offset == 30 + number and b"after-%d" % number in piece

    async def test_does_not_keep_a_segment_from_expiring(self, log: ReplicaLog, place: StoreDirectory) -> None:
        segment = log.segments[0]
        assert NOW <= segment.newest_ms(NOW + 10**12) <= os.stat(segment.path).st_mtime_ns // 1_000_000


class TestABaseOffsetThatIsTooLow:
    async def test_is_damage_where_a_reader_goes_on(self, place: StoreDirectory) -> None:
        await fill(place.open(), 30)
        log = await place.reopen()
        at = (await log.read(0, 5 * SIZE)).next_offset
        renumber(log.segments[0], at, by=-1)
        error = await refused(log, at)
        assert (error.first, error.next_offset) == (at, at + 1)
        assert (await log.read(at + 1, 1)).next_offset == at + 2

    async def test_is_damage_for_readers_that_decode(self, place: StoreDirectory) -> None:
        """Of bytes that this process wrote, which the log itself does not check."""
        log = place.open()
        await fill(log, 30)
        at = (await log.read(0, 5 * SIZE)).next_offset
        renumber(log.segments[0], at, by=-1)
        with pytest.raises(UnreadableOffset) as caught:
            await read_batches(log, at, 1 << 20)
        assert (caught.value.first, caught.value.next_offset) == (at, at + 1)

    async def test_is_damage_for_a_verification(self, place: StoreDirectory) -> None:
        log = place.open()
        await fill(log, 30)
        at = (await log.read(0, 5 * SIZE)).next_offset
        renumber(log.segments[0], at, by=-1)
        assert (await verify_piece(log, at)).next_offset == at + 1
        assert [(each.first, each.end) for each in log.damage.ranges] == [(at, at + 1)]


class TestARangeWithoutAPlaceInItsSegment:
    """Compaction replaced the segment, or there are no bytes at all."""

    @pytest.mark.parametrize("first", [20, 60, 95])
    async def test_ends_the_reads_before_it_and_nothing_else(self, place: StoreDirectory, first: int) -> None:
        await fill(place.open(BARELY_INDEXED), 100)
        log = await place.reopen(BARELY_INDEXED)
        log.damage.add(first, first + 3, Cause.CHECKSUM, "a segment that was replaced")
        at = 0
        while at < first:
            piece = await log.read(at, 7 * SIZE)
            got = [record.offset for record in codec.iterate(piece.to_bytes())]
            assert got == list(range(at, piece.next_offset)) and piece.next_offset <= first
            at = piece.next_offset
        assert (await refused(log, first)).next_offset == first + 3
        assert (await log.read(first + 3, 1 << 20)).next_offset == 100
        assert log.damage.found == 1

    async def test_lies_before_another_range_that_has_one(self, place: StoreDirectory) -> None:
        await fill(place.open(BARELY_INDEXED), 100)
        log = await place.reopen(BARELY_INDEXED)
        overwrite(log.segments[0].path, position_of(log.segments[0], 50) + 80, b"?")
        assert (await log.read(0, 1 << 20)).next_offset == 50
        log.damage.add(20, 22, Cause.CHECKSUM, "a segment that was replaced")
        assert (await log.read(10, 1 << 20)).next_offset == 20
        assert (await log.read(22, 1 << 20)).next_offset == 50
        assert (await log.read(51, 1 << 20)).next_offset == 100

    async def test_between_two_segments_is_not_passed_over(self, place: StoreDirectory) -> None:
        """The first segment ends with a batch that compaction would have left there; the hole follows."""
        log = place.open()
        await fill(log, 400)
        first, second = log.segments[0], log.segments[1]
        await place.close()
        log = place.open()
        log.damage.add(second.base_offset - 2, second.base_offset, Cause.MISSING, "a hole")
        log.segments[0].cut(position_of(first, second.base_offset - 3))
        assert (await log.read(0, 1 << 20)).next_offset == second.base_offset - 2
        for offset in (second.base_offset - 3, second.base_offset - 2, second.base_offset - 1):
            assert (await refused(log, offset)).next_offset == second.base_offset
        assert (await log.read(second.base_offset, 1)).size

    async def test_behind_the_last_batch_is_not_passed_over(self, place: StoreDirectory) -> None:
        log = place.open()
        await fill(log, 40)
        log.damage.add(40, 60, Cause.MISSING, "a hole")
        log.end = log.high_watermark = 60
        assert (await log.read(0, 1 << 20)).next_offset == 40
        assert (await refused(log, 45)).next_offset == 60
        assert await log.inspect(45) is not None, "there is nothing that would have healed"

    async def test_heals_when_it_is_looked_at_again(
        self, place: StoreDirectory, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO)
        await fill(place.open(BARELY_INDEXED), 100)
        log = await place.reopen(BARELY_INDEXED)
        log.damage.add(20, 23, Cause.CHECKSUM, "a segment that was replaced")
        assert await log.inspect(21) is None
        assert not log.damage.ranges and "offsets 20 to 22 are readable again" in caplog.text
        assert (await log.read(20, 1)).next_offset == 21


class TestWithoutAnIndex:
    @pytest.mark.parametrize("damage", ["length", "zeros"])
    async def test_reading_goes_on_at_the_next_batch_behind_a_broken_header(
        self, place: StoreDirectory, damage: str
    ) -> None:
        log = place.open(BARELY_INDEXED)
        await fill(log, 300)
        segment = log.segments[0]
        at, following = position_of(segment, 100), position_of(segment, 101)
        await place.close()
        Path(segment.index.path).unlink(missing_ok=True)
        if damage == "length":
            overwrite(segment.path, at + 8, b"\x00\x01\xff\xff")
        else:
            overwrite(segment.path, at, bytes(following - at))
        log = place.open(BARELY_INDEXED)
        assert (await log.read(0, 1 << 20)).next_offset == 100
        assert (await refused(log, 100)).next_offset == 101
        assert (await log.read(101, 1 << 20)).next_offset == 300

    async def test_a_record_that_looks_like_a_batch_is_not_taken_for_one(self, place: StoreDirectory) -> None:
        log = place.open(BARELY_INDEXED)
        await fill(log, 100)
        inner = batch(b"a batch inside a record")
        struct.pack_into(">q", inner, 0, 105)
        await append(log, batch(bytes(200) + inner + bytes(200)))
        await fill(log, 10)
        segment = log.segments[0]
        at = position_of(segment, 100)
        await place.close()
        Path(segment.index.path).unlink(missing_ok=True)
        overwrite(segment.path, at + 8, b"\x00\x01\xff\xff")
        log = place.open(BARELY_INDEXED)
        assert (await refused(log, 100)).next_offset == 101
        assert read_header((await log.read(101, 1)).to_bytes()).base_offset == 101

    async def test_what_lies_behind_the_damage_is_indexed_again(
        self, place: StoreDirectory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(segments, "SPARSE_BYTES", 8000)
        log = place.open(BARELY_INDEXED)
        await fill(log, 1000)
        segment = log.segments[0]
        at = position_of(segment, 100)
        await place.close()
        Path(segment.index.path).unlink(missing_ok=True)
        overwrite(segment.path, at + 8, b"\x00\x01\xff\xff")
        log = place.open(BARELY_INDEXED)
        await refused(log, 100)
        segment = log.segments[0]
        relative, position, newest = segment.index.by_offset(900)
        assert 850 < relative <= 900 and position == position_of(segment, relative) and newest == NOW + relative - 1
        assert await log.find_time(NOW + 950) == (950, NOW + 950)
        with pytest.raises(RequestError):  # it may have been in the damaged batch
            await log.find_time(NOW + 100)

    async def test_a_large_segment_gets_one_in_a_thread(
        self, place: StoreDirectory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(segments, "REBUILD_BYTES_MAX", 1000)
        log = place.open(BARELY_INDEXED)
        await fill(log, 300)
        await place.close()
        Path(log.segments[0].index.path).unlink(missing_ok=True)
        log = place.open(BARELY_INDEXED)
        monkeypatch.setattr(Segment, "rebuild_index", lambda *_: pytest.fail("on the event loop"))
        assert (await log.read(200, 1)).next_offset == 201
        assert await log.find_time(NOW + 250) == (250, NOW + 250)
        assert log.segments[0].index.count > 5


class TestALogThatIsDeleted:
    async def test_is_unknown_and_not_damaged(self, place: StoreDirectory, caplog: pytest.LogCaptureFixture) -> None:
        log = place.open()
        await fill(log, 400)
        assert len(log.segments) > 2
        log.abandon()
        shutil.rmtree(log.directory)
        for offset in (0, 200, 399):
            with pytest.raises(RequestError) as caught:
                await log.read(offset, 1)
            assert caught.value.code is Code.UNKNOWN_TOPIC_OR_PARTITION
        with pytest.raises(RequestError):
            await log.inspect(0)
        assert not log.damage.ranges and "damaged" not in caplog.text

    async def test_a_segment_that_is_removed_is_damage_and_heals_when_it_is_put_back(
        self, place: StoreDirectory
    ) -> None:
        await fill(place.open(), 400)
        log = await place.reopen()
        path = log.segments[1].path
        os.rename(path, path + "-away")
        first, behind = log.segments[1].base_offset, log.segments[2].base_offset
        assert (await refused(log, first)).next_offset == behind
        assert (await log.inspect(first)) is not None
        os.rename(path + "-away", path)
        assert await log.inspect(first) is None
        assert (await log.read(first, 1)).next_offset == first + 1


async def test_readers_that_meet_one_damage_wait_for_one_look(
    place: StoreDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(place.open(SMALL), 100)
    log = await place.reopen()
    overwrite(log.segments[0].path, position_of(log.segments[0], 50) + 80, b"?")
    looks, real = [], ReadableLog._note_broken

    async def count(log: ReadableLog, error: segments.BrokenSegment) -> None:
        looks.append(error.position)
        await real(log, error)

    monkeypatch.setattr(ReadableLog, "_note_broken", count)
    reads = [log.read(offset, 1 << 20) for offset in (0, 10, 20, 30)]
    assert [(await each).next_offset for each in reads] == [50] * 4
    assert len(looks) == 1
