"""Segments that are missing or too short, below the checkpoint: a hole is told, and nothing is renumbered."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition

from millstream.core.disk import Disk
from millstream.core.errors import Code, RequestError
from millstream.log.checkpoint import Checkpoint
from millstream.log.config import LogConfig
from millstream.log.damage import Cause
from millstream.log.replica import ReplicaLog
from millstream.log.segment import Segment
from millstream.records import codec
from tests import confluent
from tests.batches import NOW, append, batch, fill, read_all
from tests.compat import raw
from tests.crash.reading import read_around
from tests.crash.store_directory import StoreDirectory
from tests.serving import ServedBroker

RECORDS = 400
COMPACTED = LogConfig(
    segment_bytes=1000, index_interval_bytes=200, delete=False, compact=True, min_cleanable_dirty_ratio=0.01
)
SECONDS = 20.0


def spans(log: ReplicaLog) -> list[tuple[int, int, Cause]]:
    return [(each.first, each.end, each.cause) for each in log.damage.ranges]


async def check(log: ReplicaLog, values: list[bytes], lost: set[int]) -> None:
    """A reader gets all that is not lost, under its own offset, and is refused the rest."""
    for bytes_max in (1, 300, 1 << 20):
        got, refused = await read_around(log, bytes_max)
        assert refused == lost
        assert got == {offset: value for offset, value in enumerate(values) if offset not in lost}
    for offset in lost:
        assert await log.inspect(offset) is not None, "a scrub does not take it back"
        answer = log.read(offset, 1 << 20)
        assert isinstance(answer.error, RequestError) and answer.error.code is Code.CORRUPT_MESSAGE


async def check_through_restarts(place: StoreDirectory, values: list[bytes], lost: set[int]) -> ReplicaLog:
    """Now, behind appends, after a clean restart, and after a kill."""
    log = place.open()
    found = spans(log)
    for end in (RECORDS, RECORDS + 1, RECORDS + 2):
        assert (log.start, log.end) == (0, end) and spans(log) == found
        await check(log, values, lost)
        assert (await append(log, batch(b"more", at=NOW))).base_offset == end
        values = [*values, b"more"]
        await check(log, values, lost)
        if end == RECORDS:
            await place.close()
        else:
            place.kill()
        log = place.open()
    return log


class TestOfAClosedSegment:
    @pytest.mark.parametrize("victim", [0, 1, 2], ids=["the first", "a middle one", "the last"])
    async def test_that_is_missing(self, place: StoreDirectory, victim: int, caplog: pytest.LogCaptureFixture) -> None:
        log = place.open()
        values = await fill(log, RECORDS)
        bases = [segment.base_offset for segment in log.segments]
        assert len(bases) == 4
        path = Path(log.segments[victim].path)
        await place.close()
        path.rename(place.directory / "elsewhere")
        lost = set(range(bases[victim], bases[victim + 1]))
        log = await check_through_restarts(place, values, lost)
        assert spans(log) == [(bases[victim], bases[victim + 1], Cause.MISSING)]
        assert f"are damaged (missing segment: {path})" in caplog.text
        await place.close()
        (place.directory / "elsewhere").rename(path)
        log = place.open()
        assert not log.damage.ranges, "it was restored"
        await check(log, [*values, *[b"more"] * 3], set())

    async def test_two_in_a_row_are_one_hole(self, place: StoreDirectory) -> None:
        log = place.open()
        values = await fill(log, RECORDS)
        bases = [segment.base_offset for segment in log.segments]
        paths = [Path(segment.path) for segment in log.segments]
        await place.close()
        paths[1].unlink()
        paths[2].unlink()
        log = place.open()
        assert spans(log) == [(bases[1], bases[3], Cause.MISSING)]
        await check(log, values, set(range(bases[1], bases[3])))

    @pytest.mark.parametrize("more", [0, 1, 60, 61, 100], ids=str)
    @pytest.mark.parametrize("batches", [0, 30], ids=["to its beginning", "to some batches"])
    async def test_that_is_too_short(self, place: StoreDirectory, batches: int, more: int) -> None:
        log = place.open()
        values = await fill(log, RECORDS)
        segment, behind = log.segments[1], log.segments[2].base_offset
        first = segment.base_offset + batches
        found = segment.locate(first, segment.size)
        assert found is not None
        await place.close()
        os.truncate(segment.path, found[0] + more)
        log = await check_through_restarts(place, values, set(range(first, behind)))
        assert spans(log) == [(first, behind, Cause.TRUNCATED)]

    async def test_is_forgotten_once_it_is_trimmed(self, place: StoreDirectory) -> None:
        log = place.open()
        await fill(log, RECORDS)
        paths = [Path(segment.path) for segment in log.segments]
        bases = [segment.base_offset for segment in log.segments]
        await place.close()
        paths[1].unlink()
        log = place.open()
        assert log.trim(bases[1] + 5).value() == bases[1] + 5
        log = await place.reopen()
        assert spans(log) == [(bases[1] + 5, bases[2], Cause.MISSING)]
        assert log.trim(bases[2]).value() == bases[2]
        assert not log.damage.ranges
        log = await place.reopen()
        assert not log.damage.ranges and log.start == bases[2]
        assert len(read_all(log)) == RECORDS - bases[2]

    async def test_a_time_is_not_looked_up_over_it(self, place: StoreDirectory) -> None:
        log = place.open()
        await fill(log, RECORDS)
        paths = [Path(segment.path) for segment in log.segments]
        bases = [segment.base_offset for segment in log.segments]
        await place.close()
        paths[1].unlink()
        log = place.open()
        for lost in (bases[1], bases[1] + 20, bases[2]):
            with pytest.raises(RequestError) as caught:
                await log.find_time(NOW + lost)
            assert caught.value.code is Code.CORRUPT_MESSAGE
        assert await log.find_time(NOW + 5) == (5, NOW + 5)
        assert await log.find_time(NOW + bases[2] + 1) == (bases[2] + 1, NOW + bases[2] + 1)

    async def test_a_checkpoint_of_an_earlier_version_knows_of_none(self, place: StoreDirectory) -> None:
        log = place.open()
        values = await fill(log, RECORDS)
        paths = [Path(segment.path) for segment in log.segments]
        await place.close()
        point = Checkpoint.read(str(place.partition))
        assert point is not None and point.closed is not None and len(point.closed) == 3
        point.closed = None
        point.write(Disk(), str(place.partition))
        log = place.open()
        assert [record.value for record in read_all(log)] == values
        point.write(Disk(), str(place.partition))
        place.kill()
        paths[1].unlink()
        assert not place.open().damage.ranges


def remove(segment: Segment, position: int) -> None:
    os.remove(segment.path)


def halve(segment: Segment, position: int) -> None:
    os.truncate(segment.path, position)


class TestOfTheActiveSegment:
    @pytest.mark.parametrize(("damage", "kept"), [(remove, 0), (halve, 10)], ids=["missing", "too short"])
    async def test_the_end_stays_and_appends_go_on_behind_it(
        self, place: StoreDirectory, damage: Callable[[Segment, int], None], kept: int
    ) -> None:
        log = place.open()
        values = await fill(log, RECORDS)
        segment = log.segments[-1]
        first = segment.base_offset + kept
        found = segment.locate(first, segment.size)
        assert found is not None
        await place.close()
        damage(segment, found[0] + 7)
        log = await check_through_restarts(place, values, set(range(first, RECORDS)))
        assert log.segments[-1].base_offset == RECORDS

    @pytest.mark.parametrize("damage", [remove, halve], ids=["missing", "too short"])
    async def test_segments_behind_it_stay(self, place: StoreDirectory, damage: Callable[[Segment, int], None]) -> None:
        """A broker was killed that had begun others since its last checkpoint."""
        log = place.open()
        values = await fill(log, 50)
        segment = log.segments[-1]
        log.write_checkpoint()
        values += await fill(log, RECORDS - 50)
        behind = log.segments[1].base_offset
        place.kill()
        damage(segment, 0)
        await check_through_restarts(place, values, set(range(behind)))
        assert place.set_aside() == {}

    async def test_what_was_trimmed_is_no_hole_and_appends_go_on(self, place: StoreDirectory) -> None:
        log = place.open()
        await fill(log, 20)
        await log.trim(20)
        segment = log.segments[-1]
        await place.close()
        os.truncate(segment.path, segment.size - 7)
        log = place.open()
        assert (log.start, log.end) == (20, 20) and not log.damage.ranges
        for _ in range(2):
            await append(log, batch(b"more"))
            log = await place.reopen()
            assert not log.damage.ranges
        assert [record.offset for record in read_all(log)] == [20, 21]

    async def test_all_segments_are_missing(self, place: StoreDirectory) -> None:
        log = place.open()
        values = await fill(log, RECORDS)
        paths = [Path(segment.path) for segment in log.segments]
        await place.close()
        for path in paths:
            path.unlink()
        await check_through_restarts(place, values, set(range(RECORDS)))

    async def test_an_idempotent_producer_goes_on(self, place: StoreDirectory) -> None:
        log = place.open()
        for sequence in range(5):
            await append(log, batch(b"i", producer=7, sequence=sequence))
        path = log.segments[-1].path
        await place.close()
        os.remove(path)
        log = place.open()
        assert (await append(log, batch(b"i", producer=7, sequence=4))).duplicate
        assert (await append(log, batch(b"i", producer=7, sequence=5))).base_offset == 5


class TestOfACompactedLog:
    @staticmethod
    async def fill(place: StoreDirectory) -> ReplicaLog:
        """Of whose first segments little is left, and nothing of some."""
        log = place.open(COMPACTED)
        for turn in range(60):
            key = b"kept-%d" % turn if turn % 20 == 5 else b"key"
            await append(log, batch(b"%d" % turn + bytes(60), keys=[key], at=place.clock.now_ms()))
        before = len(log.segments)
        assert place.store is not None
        await place.store.housekeep()
        assert len(log.segments) < before
        return log

    @pytest.mark.parametrize("end", ["closed", "killed"])
    async def test_gaps_are_no_holes(self, place: StoreDirectory, end: str) -> None:
        log = await self.fill(place)
        left = read_all(log)
        for _ in range(3):
            if end == "closed":
                await place.close()
            else:
                place.kill()
            log = place.open(COMPACTED)
            assert not log.damage.ranges and read_all(log) == left

    async def test_a_hole_is_told_also_to_a_reader_in_the_gap_before_it(self, place: StoreDirectory) -> None:
        log = await self.fill(place)
        at = next(
            at
            for at in range(1, len(log.segments) - 1)
            if log.read(log.segments[at].base_offset - 1, 1).value().position == 0
        )
        victim, behind = log.segments[at], log.segments[at + 1].base_offset
        await place.close()
        os.remove(victim.path)
        log = place.open(COMPACTED)
        assert spans(log) == [(victim.base_offset, behind, Cause.MISSING)]
        answer = log.read(victim.base_offset - 1, 1)
        assert isinstance(answer.error, RequestError) and answer.error.code is Code.CORRUPT_MESSAGE
        assert f"the next offset to read is {behind}" in answer.error.detail
        assert next(codec.iterate(log.read(behind, 1).value().to_bytes())).offset >= behind


def test_librdkafka_is_told_of_a_hole_and_goes_on_where_it_seeks_to(tmp_path: Path) -> None:
    values = [b"%d" % number + bytes(5000) for number in range(20)]
    with ServedBroker(tmp_path / "data") as broker:
        raw.create_topic(broker.address, "t", 1, **{"segment.bytes": "14000"})
        producer = Producer({"bootstrap.servers": broker.address, "linger.ms": 0})
        for value in values:
            producer.produce("t", value, partition=0)
            assert producer.flush(SECONDS) == 0
        broker.stop()
        segments = sorted(tmp_path.glob("data/logs/t-*/0/*.log"))
        first, behind = int(segments[2].stem), int(segments[3].stem)
        segments[2].unlink()
        broker.start()
        consumer = Consumer({"bootstrap.servers": broker.address, "group.id": "g", "enable.auto.commit": False})
        consumer.assign([TopicPartition("t", 0, 0)])
        got = [consumer.poll(SECONDS) for _ in range(first + 1)]
        assert [confluent.value(message) for message in got[:-1]] == values[:first]
        assert confluent.error_code(got[-1]) == KafkaError.INVALID_MSG
        consumer.seek(TopicPartition("t", 0, behind))
        rest: list[bytes | None] = []
        while len(rest) < len(values) - behind:
            message = consumer.poll(SECONDS)
            assert message is not None
            if message.error() is None:
                rest.append(message.value())
        consumer.close()
        assert rest == values[behind:]
        with urllib.request.urlopen(f"http://{broker.http}/damage", timeout=SECONDS) as answer:
            assert "missing segment" in json.dumps(json.load(answer))
