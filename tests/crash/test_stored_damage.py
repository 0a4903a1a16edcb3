"""Damaged segments: what is wrong is never served, and everything else is."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from millstream.errors import Code, RequestError
from millstream.log.damage import Cause
from millstream.log.log import Log
from millstream.log.retention import expire
from millstream.log.segment import Segment
from millstream.promise import Promise
from millstream.records import codec
from tests.batches import NOW, append, batch, fill
from tests.crash.place import SMALL, Place

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


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    place = Place(tmp_path / "data")
    yield place
    await place.close()


def position_of(segment: Segment, offset: int) -> int:
    found = segment.locate(offset, segment.size)
    assert found is not None
    return found[0]


def flip(path: str | Path, position: int, bits: int) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ bits]))


def read_around(log: Log, bytes_max: int = 1 << 20) -> tuple[dict[int, bytes | None], set[int]]:
    """What a reader that goes on behind each refusal gets, by offset; and which offsets are refused."""
    values: dict[int, bytes | None] = {}
    refused: set[int] = set()
    at = log.start
    while at < log.durable:
        answer = log.read(at, bytes_max)
        if answer.error is not None:
            assert isinstance(answer.error, RequestError) and answer.error.code is Code.CORRUPT_MESSAGE
            damaged = log.damage.at(at)
            assert damaged is not None and f"the next offset to read is {damaged.end}" in answer.error.detail
            refused |= set(range(at, damaged.end))
            at = damaged.end
            continue
        piece = answer.value()
        values |= {record.offset: record.value for record in codec.iterate(piece.to_bytes()) if record.offset >= at}
        assert piece.next_offset > at
        at = piece.next_offset
    return values, refused


class TestOneDamagedBatch:
    @pytest.mark.parametrize("field", FIELDS)
    @pytest.mark.parametrize("victim", [0, 57, 260, 399], ids=["first", "of a closed segment", "later", "last"])
    @pytest.mark.parametrize("bytes_max", [300, 1 << 20])
    async def test_is_refused_and_its_neighbours_are_served(
        self, place: Place, field: str, victim: int, bytes_max: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        log = place.open()
        values = dict(enumerate(await fill(log, 400)))
        segment = log.segments[log._segment_index(victim)]
        at = position_of(segment, victim)
        await place.close()
        flip(segment.path, at + FIELDS[field][0], FIELDS[field][1])
        log = place.open()
        got, refused = read_around(log, bytes_max)
        assert victim in refused and len(refused) < 12
        assert got == {offset: value for offset, value in values.items() if offset not in refused}
        assert len(log.damage.ranges) == 1
        assert [record.levelname for record in caplog.records if "are damaged" in record.message] == ["ERROR"]
        assert segment.path in caplog.text
        # Again, from every offset, now that the damage is known.
        assert read_around(log, bytes_max) == (got, refused)
        for offset in range(400):
            answer = log.read(offset, 1)
            if offset in refused:
                assert answer.error is not None
            else:
                assert next(codec.iterate(answer.value().to_bytes())).offset == offset
        assert (log.start, log.end) == (0, 400)

    async def test_found_while_the_broker_runs_is_refused_from_then_on(self, place: Place) -> None:
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

    async def test_an_idle_segment_is_checked_again(self, place: Place) -> None:
        log = place.open()
        await fill(log, 400)
        segment = log.segments[0]
        assert log.read(20, 1).error is None
        flip(segment.path, position_of(segment, 20) + 80, 1)
        log.let_go_of_idle_segments()
        assert log.read(20, 1).error is None, "it was in use"
        log.let_go_of_idle_segments()
        log.let_go_of_idle_segments()
        assert isinstance(log.read(20, 1).error, RequestError)

    async def test_sound_bytes_are_checked_once(self, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
        await fill(place.open(), 400)
        log = await place.reopen()
        read_around(log)
        monkeypatch.setattr(Log, "_check", lambda *_: pytest.fail("checked twice"))
        read_around(log)

    @pytest.mark.parametrize("field", ["magic", "value"])
    async def test_a_time_is_not_looked_up_over_it(self, place: Place, field: str) -> None:
        log = place.open()
        await fill(log, 400)
        segment = log.segments[0]
        at = position_of(segment, 20)
        await place.close()
        flip(segment.path, at + FIELDS[field][0], FIELDS[field][1])
        log = place.open()
        answer: Promise[object] = log.find_time(NOW + 20)
        assert isinstance(answer.error, RequestError) and answer.error.code is Code.CORRUPT_MESSAGE
        assert len(log.damage.ranges) == 1
        assert log.find_time(NOW + 19).value() == (19, NOW + 19)
        assert log.find_time(NOW + 60).value() == (60, NOW + 60)
        assert log.find_max_time().value() == (399, NOW + 399)

    async def test_does_not_keep_retention_from_its_segment(self, place: Place) -> None:
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

    async def test_does_not_stop_appends(self, place: Place) -> None:
        log = place.open()
        await fill(log, 30)
        segment = log.segments[0]
        at = position_of(segment, 10)
        await place.close()
        flip(segment.path, at + FIELDS["magic"][0], 1)
        log = place.open()
        assert (await append(log, batch(b"more"))).base_offset == 30
        got, refused = read_around(log)
        assert got[30] == b"more" and 10 in refused
