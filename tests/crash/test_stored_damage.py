"""Damaged segments: what is wrong is never served, and everything else is."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from millstream.core.errors import Code, RequestError
from millstream.core.promise import Promise
from millstream.log.answers import Appended
from millstream.log.config import LogConfig
from millstream.log.damage import Cause
from millstream.log.log import Log
from millstream.log.retention import expire
from millstream.log.segment import BrokenSegment, Segment
from millstream.records import codec
from tests.batches import NOW, append, append_run, batch, fill, read_all
from tests.crash.reading import read_around
from tests.crash.store_directory import SMALL, StoreDirectory, position_of

FIELDS = {
    "base offset, too low": (6, 1 << 6),
    "base offset, far too high": (2, 1),
    "base offset, a little too high": (7, 1 << 4),
    "length, too short": (11, 1 << 5),
    "length, too long": (9, 1),
    "length, negative": (8, 1 << 7),
    "magic": (16, 1 << 6),
    "checksum": (18, 1),
    "codec": (22, 1),
    "last offset delta": (24, 1 << 3),
    "max timestamp": (36, 1),
    "record count": (60, 1 << 1),
    "value": (80, 1 << 3),
}

LOWERED = {"last offset delta": (23, struct.pack(">i", 1)), "max timestamp": (35, struct.pack(">q", NOW - 1000))}


def write(path: str, position: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        file.write(data)


def flip(path: str | Path, position: int, bits: int) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ bits]))


class TestOneDamagedBatch:
    @pytest.mark.parametrize("field", FIELDS)
    @pytest.mark.parametrize("victim", [0, 57, 260, 399], ids=["first", "of a closed segment", "later", "last"])
    @pytest.mark.parametrize("bytes_max", [300, 1 << 20])
    async def test_is_refused_and_its_neighbours_are_served(
        self, place: StoreDirectory, field: str, victim: int, bytes_max: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        log = place.open()
        values = dict(enumerate(await fill(log, 400)))
        segment = log.segments[log._segment_index(victim)]
        at = position_of(segment, victim)
        await place.close()
        flip(segment.path, at + FIELDS[field][0], FIELDS[field][1])
        log = place.open()
        got, refused = await read_around(log, bytes_max)
        assert victim in refused and len(refused) < 12
        assert got == {offset: value for offset, value in values.items() if offset not in refused}
        assert len(log.damage.ranges) == 1
        assert [record.levelname for record in caplog.records if "are damaged" in record.message] == ["ERROR"]
        assert segment.path in caplog.text
        # Again, from every offset, now that the damage is known.
        assert await read_around(log, bytes_max) == (got, refused)
        for offset in range(400):
            answer = log.read(offset, 1)
            if offset in refused:
                assert answer.error is not None
            else:
                assert next(codec.iterate(answer.value().to_bytes())).offset == offset
        assert (log.start, log.end) == (0, 400)

    async def test_found_while_the_broker_runs_is_refused_from_then_on(self, place: StoreDirectory) -> None:
        log = place.open()
        await fill(log, 50)
        segment = log.segments[0]
        flip(segment.path, position_of(segment, 20) + 80, 1)
        assert log.read(20, 1).error is None, "this process wrote it: it is not read again"
        assert await log.inspect(19) is None
        damaged = await log.inspect(20)
        assert damaged is not None and (damaged.first, damaged.end, damaged.cause) == (20, 21, Cause.CHECKSUM)
        assert log.read(0, 1 << 20).value().next_offset == 20
        assert isinstance(log.read(20, 1).error, RequestError)
        assert log.read(21, 1).value().next_offset == 22

    async def test_an_idle_segment_is_checked_again(self, place: StoreDirectory) -> None:
        log = place.open()
        await fill(log, 400)
        segment = log.segments[0]
        assert log.read(20, 1).error is None
        flip(segment.path, position_of(segment, 20) + 80, 1)
        log.let_go_of_idle_segments()
        assert log.read(20, 1).error is None, "it was in use"
        log.let_go_of_idle_segments()
        log.let_go_of_idle_segments()
        with pytest.raises(RequestError):
            await log.read(20, 1)

    async def test_sound_bytes_are_checked_once(self, place: StoreDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
        await fill(place.open(), 400)
        log = await place.reopen()
        await read_around(log)
        monkeypatch.setattr(Log, "_check", lambda *_: pytest.fail("checked twice"))
        await read_around(log)

    @pytest.mark.parametrize("field", ["magic", "value"])
    async def test_a_time_is_not_looked_up_over_it(self, place: StoreDirectory, field: str) -> None:
        log = place.open()
        await fill(log, 400)
        segment = log.segments[0]
        at = position_of(segment, 20)
        await place.close()
        flip(segment.path, at + FIELDS[field][0], FIELDS[field][1])
        log = place.open()
        with pytest.raises(RequestError) as caught:
            await log.find_time(NOW + 20)
        assert caught.value.code is Code.CORRUPT_MESSAGE
        assert len(log.damage.ranges) == 1
        assert await log.find_time(NOW + 19) == (19, NOW + 19)
        assert await log.find_time(NOW + 60) == (60, NOW + 60)
        assert await log.find_max_time() == (399, NOW + 399)

    async def test_does_not_keep_retention_from_its_segment(self, place: StoreDirectory) -> None:
        log = place.open()
        await fill(log, 400)
        first, last = log.segments[0], log.segments[-2]
        ends = [position_of(first, 0), position_of(last, log.segments[-1].base_offset - 1)]
        await place.close()
        for segment, at in zip((first, last), ends, strict=True):
            flip(segment.path, at + FIELDS["magic"][0], 1)
            os.utime(segment.path, (NOW / 1000, NOW / 1000))
        log = place.open()
        log.config = SMALL.__class__(segment_bytes=20_000, retention_ms=1000)
        place.clock.advance(3600)
        expire(log)
        assert log.start >= log.segments[-1].base_offset > last.base_offset
        assert not log.damage.ranges

    async def test_does_not_stop_appends(self, place: StoreDirectory) -> None:
        log = place.open()
        await fill(log, 30)
        segment = log.segments[0]
        at = position_of(segment, 10)
        await place.close()
        flip(segment.path, at + FIELDS["magic"][0], 1)
        log = place.open()
        assert (await append(log, batch(b"more"))).base_offset == 30
        got, refused = await read_around(log)
        assert got[30] == b"more" and 10 in refused


class TestAFailedAppend:
    """Leaves nothing behind, whatever the error was."""

    @pytest.fixture(params=["append", "append_run"])
    def send(self, request: pytest.FixtureRequest) -> Callable[..., Promise[Appended]]:
        return append if request.param == "append" else append_run

    async def test_of_which_a_part_is_in_the_books_is_taken_back(
        self, place: StoreDirectory, send: Callable[..., Promise[Appended]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        log = place.open()
        values = await fill(log, 5)
        segment = log.segments[-1]
        size, note, batches = segment.size, Segment.note, [batch(bytes(300)), batch(bytes(300)), batch(bytes(300))]

        def fail(each: Segment, *arguments: int) -> None:
            if each.size > size + 300 or send is append:
                raise BrokenSegment(each.path, 0)
            note(each, *arguments)

        monkeypatch.setattr(Segment, "note", fail)
        refused = send(log, *batches[: 1 if send is append else 3])
        assert isinstance(refused.error, RequestError) and refused.error.code is Code.KAFKA_STORAGE_ERROR
        monkeypatch.undo()
        assert os.stat(segment.path).st_size == segment.size == size and log.end == 5 and log.failure is None
        assert (await send(log, batch(b"next"))).base_offset == 5
        for _ in range(2):
            assert [record.value for record in read_all(log)] == [*values, b"next"]
            log = await place.reopen()

    async def test_behind_a_damaged_header_the_next_one_succeeds(
        self, place: StoreDirectory, send: Callable[..., Promise[Appended]]
    ) -> None:
        log = place.open()
        await fill(log, 30)
        segment = log.segments[0]
        at = segment.index.entry(segment.index.count - 1)[1]
        await place.close()
        flip(segment.path, at + FIELDS["magic"][0], 1)
        log = place.open()
        end = log.end
        for value in (b"1", b"2", b"3"):
            answer = send(log, batch(value, at=NOW))
            if answer.error is None:
                assert (await answer).base_offset == end
                end += 1
        assert end >= 32
        log = await place.reopen()
        got = await read_around(log)
        assert log.end == end and [got[0][offset] for offset in range(30, end)][-1] == b"3"


async def test_a_damaged_header_below_the_checkpoint_does_not_stop_the_start(place: StoreDirectory) -> None:
    """The tail is walked and taken in, and the other logs of the store open as well."""
    log = place.open()
    await fill(log, 30)
    log.write_checkpoint()
    segment = log.segments[0]
    at = segment.index.entry(segment.index.count - 1)[1]
    await fill(log, 10)
    place.kill()
    flip(segment.path, at + FIELDS["magic"][0], 1)
    log = place.open()
    assert log.end == 40 and log.failure is None
    assert (await append(log, batch(b"more"))).base_offset == 40
    got, refused = await read_around(log)
    assert set(range(30, 41)) <= set(got) and refused
    assert log.damage.ranges


class TestAHeaderThatSkipsRecords:
    """A header that lies about its records is refused, although a search by the headers passes over its batch."""

    @pytest.fixture
    def config(self) -> LogConfig:
        return SMALL.__class__(segment_bytes=2000, index_interval_bytes=200, retention_ms=-1)

    async def filled(self, place: StoreDirectory, config: LogConfig) -> Log:
        """60 batches of ten records, a millisecond apart."""
        log = place.open(config)
        for number in range(60):
            await append(log, batch(*(b"%d" % each for each in range(10)), at=NOW + number))
        return log

    @pytest.mark.parametrize("victim", [0, 200, 590], ids=["first", "in the middle", "last"])
    async def test_by_offset_is_refused_from_every_offset(
        self, place: StoreDirectory, config: LogConfig, victim: int
    ) -> None:
        log = await self.filled(place, config)
        assert len(log.segments) > 3
        await self.lower(place, log, victim, "last offset delta")
        for offset in range(log.end):
            log = place.open(config)
            if victim <= offset < victim + 10:
                with pytest.raises(RequestError) as caught:
                    await log.read(offset, 300)
                assert caught.value.code is Code.CORRUPT_MESSAGE
                assert [(each.first, each.end) for each in log.damage.ranges] == [(victim, victim + 10)]
            else:
                piece = await log.read(offset, 300)
                assert next(codec.iterate(piece.to_bytes())).offset == offset // 10 * 10
            await place.close()

    async def test_by_offset_is_refused_at_the_end_of_a_segment(self, place: StoreDirectory, config: LogConfig) -> None:
        log = await self.filled(place, config)
        victim = log.segments[1].base_offset - 10
        await self.lower(place, log, victim, "last offset delta")
        log = place.open(config)
        with pytest.raises(RequestError) as caught:
            await log.read(victim + 5, 300)
        assert caught.value.code is Code.CORRUPT_MESSAGE

    @pytest.mark.parametrize("field", ["max timestamp", "last offset delta"])
    @pytest.mark.parametrize("victim", [0, 200, 590], ids=["first", "in the middle", "last"])
    async def test_by_time_is_refused(self, place: StoreDirectory, config: LogConfig, victim: int, field: str) -> None:
        log = await self.filled(place, config)
        await self.lower(place, log, victim, field)
        log = place.open(config)
        time = NOW + victim // 10
        with pytest.raises(RequestError) as caught:
            await log.find_time(time)
        assert caught.value.code is Code.CORRUPT_MESSAGE
        assert [(each.first, each.end) for each in log.damage.ranges] == [(victim, victim + 10)]
        if victim < 590:
            assert await log.find_time(log.segments[-1].max_timestamp) == (590, NOW + 59)

    async def test_by_time_is_refused_at_the_end_of_a_segment(self, place: StoreDirectory, config: LogConfig) -> None:
        log = await self.filled(place, config)
        victim = log.segments[1].base_offset - 10
        await self.lower(place, log, victim, "max timestamp")
        log = place.open(config)
        with pytest.raises(RequestError) as caught:
            await log.find_time(NOW + victim // 10)
        assert caught.value.code is Code.CORRUPT_MESSAGE

    async def test_of_the_newest_record_is_refused(self, place: StoreDirectory, config: LogConfig) -> None:
        log = await self.filled(place, config)
        await self.lower(place, log, 590, "max timestamp")
        log = place.open(config)
        with pytest.raises(RequestError) as caught:
            await log.find_max_time()
        assert caught.value.code is Code.CORRUPT_MESSAGE

    @pytest.mark.parametrize("start", [0, 5], ids=["whole", "trimmed"])
    async def test_is_found_once_and_checked_bytes_are_not_read_again(
        self, place: StoreDirectory, config: LogConfig, start: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await self.filled(place, config)
        log = await place.reopen(config)
        if start:
            await log.trim(start)
        times = [NOW + number for number in range(60)]
        found = [await log.find_time(time) for time in times]
        assert found == [(max(number * 10, start), time) for number, time in enumerate(times)]
        assert await log.find_max_time() == (590, NOW + 59)
        monkeypatch.setattr(Log, "_check", lambda *_: pytest.fail("checked twice"))
        assert [await log.find_time(time) for time in times] == found
        assert await log.find_max_time() == (590, NOW + 59)

    async def lower(self, place: StoreDirectory, log: Log, victim: int, field: str) -> None:
        segment = log.segments[log._segment_index(victim)]
        at = position_of(segment, victim)
        await place.close()
        write(segment.path, at + LOWERED[field][0], LOWERED[field][1])
