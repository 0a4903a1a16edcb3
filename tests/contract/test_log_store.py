"""What every `LogStore` and its logs promise, whatever they keep batches in."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from millstream.core.errors import Code, Diverged, RequestError
from millstream.log.config import FlushPolicy, LogConfig
from millstream.records import codec
from millstream.records.batch import patch_offset, read_header
from millstream.records.record import Record
from millstream.stores.base import PartitionLog
from millstream.testing.clock import VirtualClock
from tests.batches import NOW, append, append_run, batch, fill, read_back
from tests.contract.conftest import TOPIC, TOPIC_ID, Driver

OpenLog = Callable[..., Awaitable[PartitionLog]]
DAY_MS = 24 * 3600 * 1000
KEEP = {"retention_ms": -1}
SMALL: dict[str, Any] = {"segment_bytes": 1000, "index_interval_bytes": 200, **KEEP}


async def refusal(promise: Awaitable[object]) -> Code:
    with pytest.raises(RequestError) as caught:
        await promise
    return caught.value.code


async def read_bytes(log: PartitionLog) -> bytes:
    data, at = b"", log.start
    while at < log.high_watermark:
        piece = await log.read(at, 1 << 20)
        data, at = data + piece.to_bytes(), piece.next_offset
    return data


class TestAppend:
    async def test_assigns_dense_offsets(self, open_log: OpenLog) -> None:
        log = await open_log()
        bases = [(await append(log, batch(*[b"x"] * count))).base_offset for count in (1, 3, 2, 5)]
        assert bases == [0, 1, 4, 6]
        assert (log.start, log.high_watermark, log.end) == (0, 11, 11)

    async def test_keeps_the_producers_bytes_but_for_offset_and_epoch(self, open_log: OpenLog) -> None:
        log = await open_log()
        await append(log, batch(b"first"))
        sent = batch(b"a", None, keys=[b"k", b"k"])
        before = bytes(sent)
        await append(log, sent)
        stored = (await log.read(1, 1 << 20)).to_bytes()
        assert stored[16:] == before[16:]
        assert read_header(stored).base_offset == 1
        assert [(r.key, r.value) for r in codec.decode(stored)] == [(b"k", b"a"), (b"k", None)]

    async def test_does_not_use_the_buffer_after_the_call(self, open_log: OpenLog) -> None:
        log = await open_log()
        data = batch(b"precious")
        promise = append(log, data)
        data[:] = bytes(len(data))
        await promise
        assert [record.value for record in await read_back(log)] == [b"precious"]

    async def test_answers_in_the_order_of_the_log(self, open_log: OpenLog) -> None:
        log = await open_log()
        answered: list[int] = []
        promises = [append(log, batch(b"x")) for _ in range(20)]
        for promise in promises:
            promise.then(lambda done: answered.append(done.value().base_offset))
        await asyncio.gather(*promises)
        assert answered == list(range(20))

    async def test_readers_see_a_batch_when_its_answer_comes(self, open_log: OpenLog) -> None:
        log = await open_log()
        seen_at_answer: list[int] = []
        promise = append(log, batch(b"x", b"y"))
        promise.then(lambda _: seen_at_answer.append(log.high_watermark))
        await promise
        assert seen_at_answer == [2]


class TestAppendRun:
    async def test_assigns_dense_offsets_behind_what_is_there(self, open_log: OpenLog) -> None:
        log = await open_log()
        await append(log, batch(b"before"))
        promises = [append_run(log, batch(b"a"), batch(b"b", b"c"), batch(b"d")), append_run(log, batch(b"e"))]
        assert [(await promise).base_offset for promise in promises] == [1, 5]
        assert (await append(log, batch(b"after"))).base_offset == 6
        assert (log.start, log.high_watermark, log.end) == (0, 7, 7)
        records = await read_back(log)
        assert [record.offset for record in records] == list(range(7))
        assert [record.value for record in records] == [b"before", b"a", b"b", b"c", b"d", b"e", b"after"]

    async def test_keeps_the_producers_bytes_but_for_offset_and_epoch(self, open_log: OpenLog) -> None:
        log = await open_log()
        sent = [batch(b"a", None, keys=[b"k", b"k"]), batch(b"b")]
        before = [bytes(each) for each in sent]
        await append_run(log, *sent)
        stored = (await log.read(0, 1 << 20)).to_bytes()
        first, second = stored[: len(before[0])], stored[len(before[0]) :]
        assert [first[16:], second[16:]] == [each[16:] for each in before]
        assert [read_header(first).base_offset, read_header(second).base_offset] == [0, 2]

    @pytest.mark.parametrize("in_run", [1, 2, 5, 40])
    async def test_every_offset_and_time_is_found_across_segments(self, open_log: OpenLog, in_run: int) -> None:
        """Runs that are shorter and longer than what lies between two entries of an index, or in a segment's rest."""
        log = await open_log(**{**SMALL, "segment_bytes": 6000})
        for first in range(0, 200, in_run):
            await append_run(log, *[batch(b"%d" % n * 20, at=NOW + n * 10) for n in range(first, first + in_run)])
        assert log.end == 200
        for offset in range(200):
            stored = (await log.read(offset, 1)).to_bytes()
            assert read_header(stored).base_offset == offset
            assert codec.decode(stored)[0].value == b"%d" % offset * 20
            found = await log.find_time(NOW + offset * 10 - 5)
            assert found is not None and found == (offset, NOW + offset * 10)
        assert await log.find_max_time() == (199, NOW + 1990)

    async def test_survives_a_kill(self, persistent: Driver) -> None:
        log = await persistent.open(LogConfig(**SMALL))
        for first in range(0, 60, 6):
            await append_run(log, *[batch(b"%d" % number) for number in range(first, first + 6)])
        log = await persistent.reopen_after_kill(LogConfig(**SMALL))
        assert [record.value for record in await read_back(log)] == [b"%d" % number for number in range(60)]
        assert (await append_run(log, batch(b"x"), batch(b"y"))).base_offset == 60

    async def test_a_log_that_was_discarded_refuses_it(self, driver: Driver) -> None:
        log = await driver.open()
        await driver.logs.discard(TOPIC, TOPIC_ID)
        assert await refusal(append_run(log, batch(b"a"), batch(b"b"))) == Code.UNKNOWN_TOPIC_OR_PARTITION


class TestTogether:
    async def test_a_refusal_takes_the_others_along_in_an_atomic_store(self, driver: Driver) -> None:
        one, two = await driver.open(), await driver.open(partition=1)
        await append(one, batch(b"known", producer=7))
        woken: list[int] = []
        one.wake(lambda: woken.append(one.end))
        with driver.logs.together():
            promises = [append(log, batch(b"a", producer=8)) for log in (one, two)]
            promises.append(append(one, batch(b"gap", producer=7, sequence=5)))
        assert await refusal(promises[2]) is Code.OUT_OF_ORDER_SEQUENCE_NUMBER
        if not driver.logs.atomic:
            assert [(await promise).base_offset for promise in promises[:2]] == [1, 0]
            return
        for promise in promises[:2]:
            assert await refusal(promise) is Code.OUT_OF_ORDER_SEQUENCE_NUMBER
        assert [log.end for log in (one, two)] == [1, 0] and not woken
        with driver.logs.together():
            promises = [append(log, batch(b"a", producer=8)) for log in (one, two)]
        assert [await promise for promise in promises] == [(1, 0, False), (0, 0, False)]
        assert [record.value for record in await read_back(one)] == [b"known", b"a"]

    async def test_an_error_among_the_appends_takes_them_back_in_an_atomic_store(self, driver: Driver) -> None:
        log = await driver.open()
        with pytest.raises(ZeroDivisionError), driver.logs.together():
            promise = append(log, batch(b"a"))
            raise ZeroDivisionError
        if driver.logs.atomic:
            assert await refusal(promise) is Code.OPERATION_NOT_ATTEMPTED
            assert log.end == 0
        await append(log, batch(b"b"))


class TestRead:
    async def test_answers_whole_batches_from_the_one_that_holds_the_offset(self, open_log: OpenLog) -> None:
        log = await open_log()
        await append(log, batch(b"a", b"b", b"c"))
        await append(log, batch(b"d"))
        piece = await log.read(1, 1 << 20)
        assert [record.offset for record in codec.iterate(piece.to_bytes())] == [0, 1, 2, 3]
        assert piece.next_offset == 4

    async def test_cuts_at_batch_boundaries(self, open_log: OpenLog) -> None:
        log = await open_log()
        await fill(log, 20, size=100)
        size = (await log.read(0, 1)).size
        for bytes_max in (size * 3, size * 3 + 1, size * 4 - 1):
            piece = await log.read(5, bytes_max)
            assert (piece.size, piece.next_offset) == (size * 3, 8)

    async def test_answers_one_batch_however_large(self, open_log: OpenLog) -> None:
        log = await open_log()
        await append(log, batch(bytes(500_000)))
        await append(log, batch(b"small"))
        piece = await log.read(0, 1000)
        assert piece.size > 500_000 and piece.next_offset == 1

    async def test_answers_nothing_at_the_end(self, open_log: OpenLog) -> None:
        log = await open_log()
        await fill(log, 3)
        piece = await log.read(3, 1000)
        assert (piece.size, piece.next_offset, piece.to_bytes()) == (0, 3, b"")

    async def test_answers_nothing_in_an_empty_log(self, open_log: OpenLog) -> None:
        assert (await (await open_log()).read(0, 1000)).size == 0

    @pytest.mark.parametrize("offset", [-1, 4, 1 << 40])
    async def test_refuses_offsets_out_of_range(self, open_log: OpenLog, offset: int) -> None:
        log = await open_log()
        await fill(log, 3)
        assert await refusal(log.read(offset, 1000)) is Code.OFFSET_OUT_OF_RANGE

    async def test_refuses_offsets_below_the_start(self, open_log: OpenLog) -> None:
        log = await open_log()
        await fill(log, 3)
        await log.trim(2)
        assert await refusal(log.read(1, 1000)) is Code.OFFSET_OUT_OF_RANGE

    @pytest.mark.parametrize("bytes_max", [1, 700, 5000, 1 << 20])
    async def test_reads_on_across_segments(self, open_log: OpenLog, bytes_max: int) -> None:
        log = await open_log(**SMALL)
        values = await fill(log, 60)
        assert [record.value for record in await read_back(log, bytes_max=bytes_max)] == values
        assert [record.offset for record in await read_back(log, bytes_max=bytes_max)] == list(range(60))

    async def test_finds_every_offset_in_every_segment(self, open_log: OpenLog) -> None:
        log = await open_log(**SMALL)
        await fill(log, 60)
        for offset in range(60):
            first = next(codec.iterate((await log.read(offset, 1)).to_bytes()))
            assert first.offset == offset


class TestReadBelow:
    async def test_a_read_ends_at_a_batch_boundary(self, open_log: OpenLog) -> None:
        log = await open_log(**SMALL)
        await fill(log, 40)
        assert log.stable == log.high_watermark == 40
        for below in (1, 2, 17, 40, 50):
            values, at = 0, 0
            while True:
                piece = await log.read(at, 1 << 20, below)
                if not piece.size:
                    break
                values += len(list(codec.iterate(piece.to_bytes())))
                at = piece.next_offset
            assert values == at == min(below, 40)
        assert (await log.read(20, 1 << 20, 7)).size == 0
        assert await refusal(log.read(41, 1 << 20, 7)) is Code.OFFSET_OUT_OF_RANGE

    async def test_a_batch_that_holds_the_boundary_is_left_out(self, open_log: OpenLog) -> None:
        log = await open_log()
        await append(log, batch(b"a", b"b"))
        await append(log, batch(b"c", b"d"))
        piece = await log.read(0, 1 << 20, 3)
        assert [record.value for record in codec.decode(piece.to_bytes())] == [b"a", b"b"]
        assert piece.next_offset == 2
        piece = await log.read(2, 1 << 20, 3)
        assert (piece.size, piece.next_offset) == (0, 2)


class TestTime:
    async def test_finds_the_first_record_at_or_after_a_time(self, open_log: OpenLog) -> None:
        log = await open_log(**SMALL)
        await fill(log, 50, at=NOW)
        for wanted, offset in ((0, 0), (NOW, 0), (NOW + 1, 1), (NOW + 33, 33), (NOW + 49, 49)):
            found = await log.find_time(wanted)
            assert found == (offset, NOW + offset)

    async def test_finds_none_after_the_newest(self, open_log: OpenLog) -> None:
        log = await open_log()
        assert await log.find_time(0) is None
        await fill(log, 3)
        assert await log.find_time(NOW + 3) is None

    async def test_finds_a_record_inside_a_batch(self, open_log: OpenLog) -> None:
        log = await open_log()
        records = [(0, NOW + step, None, b"x") for step in (0, 20, 10)]
        await append(log, codec.encode(records))
        assert await log.find_time(NOW + 5) == (1, NOW + 20)

    async def test_times_need_not_grow(self, open_log: OpenLog) -> None:
        log = await open_log(**SMALL)
        for step in (5, 90, 3, 40, 100, 7) * 8:
            await append(log, batch(bytes(100), at=NOW + step))
        assert await log.find_time(NOW + 6) == (1, NOW + 90)
        assert await log.find_time(NOW + 95) == (4, NOW + 100)
        assert await log.find_max_time() == (4, NOW + 100)

    async def test_finds_the_largest_time(self, open_log: OpenLog) -> None:
        log = await open_log()
        assert await log.find_max_time() is None
        for step in (1, 9, 4):
            await append(log, batch(b"x", at=NOW + step))
        assert await log.find_max_time() == (1, NOW + 9)

    async def test_what_was_trimmed_does_not_count(self, open_log: OpenLog) -> None:
        log = await open_log()
        for step in (1, 9, 4, 6):
            await append(log, batch(b"x", at=NOW + step))
        await log.trim(2)
        assert await log.find_time(NOW) == (2, NOW + 4)
        assert await log.find_max_time() == (3, NOW + 6)

    async def test_what_was_trimmed_of_a_batch_does_not_count(self, open_log: OpenLog) -> None:
        log = await open_log()
        await append(log, codec.encode([(0, NOW + step, None, b"x") for step in (9, 4, 6)]))
        await log.trim(1)
        assert await log.find_time(NOW) == (1, NOW + 4)
        assert await log.find_max_time() == (2, NOW + 6)

    async def test_what_is_not_durable_does_not_count(self, open_log: OpenLog) -> None:
        log = await open_log()
        await append(log, batch(b"x", at=NOW))
        promise = append(log, batch(b"y", at=NOW + 50))
        found = await log.find_max_time()
        assert found in ((0, NOW), (1, NOW + 50)) and found.offset < log.high_watermark
        await promise


class TestTrim:
    async def test_moves_the_start_and_keeps_offsets(self, open_log: OpenLog) -> None:
        log = await open_log(**SMALL)
        values = await fill(log, 40)
        assert await log.trim(25) == 25
        assert (log.start, log.end) == (25, 40)
        assert [record.value for record in await read_back(log)] == values[25:]

    async def test_frees_what_lies_below(self, open_log: OpenLog) -> None:
        log = await open_log(**SMALL)
        await fill(log, 40)
        before = log.size_bytes()
        await log.trim(30)
        assert log.size_bytes() < before / 2

    async def test_inside_a_batch_keeps_the_batch(self, open_log: OpenLog) -> None:
        log = await open_log()
        await append(log, batch(b"a", b"b", b"c"))
        assert await log.trim(2) == 2
        assert [record.offset for record in await read_back(log)] == [2]

    async def test_to_the_end_leaves_an_empty_log_that_goes_on(self, open_log: OpenLog) -> None:
        log = await open_log()
        await fill(log, 4)
        assert await log.trim(4) == 4
        assert await read_back(log) == []
        assert (await append(log, batch(b"next"))).base_offset == 4

    async def test_never_goes_back(self, open_log: OpenLog) -> None:
        log = await open_log()
        await fill(log, 4)
        await log.trim(3)
        assert await log.trim(1) == 3

    @pytest.mark.parametrize("offset", [-1, 5])
    async def test_refuses_offsets_out_of_range(self, open_log: OpenLog, offset: int) -> None:
        log = await open_log()
        await fill(log, 4)
        assert await refusal(log.trim(offset)) is Code.OFFSET_OUT_OF_RANGE


class TestTruncate:
    @pytest.mark.parametrize("settings", [{}, SMALL], ids=["one segment", "many segments"])
    @pytest.mark.parametrize("offset", [0, 1, 7, 8, 23, 39])
    async def test_drops_the_tail_and_goes_on_there(
        self, open_log: OpenLog, settings: dict[str, int], offset: int
    ) -> None:
        log = await open_log(**settings)
        values = await fill(log, 40)
        assert await log.truncate(offset) == offset
        assert [record.value for record in await read_back(log)] == values[:offset]
        assert (await append(log, batch(b"new", at=NOW + 99))).base_offset == offset
        assert [record.value for record in await read_back(log)] == [*values[:offset], b"new"]
        assert await log.find_max_time() == (offset, NOW + 99)

    async def test_drops_the_whole_batch_that_holds_the_offset(self, open_log: OpenLog) -> None:
        log = await open_log()
        await append(log, batch(b"a"))
        await append(log, batch(b"b", b"c", b"d"))
        assert await log.truncate(3) == 1
        assert log.end == log.high_watermark == 1

    async def test_behind_the_end_does_nothing(self, open_log: OpenLog) -> None:
        log = await open_log()
        await fill(log, 3)
        assert await log.truncate(9) == 3

    async def test_producers_may_send_again_what_was_dropped(self, open_log: OpenLog) -> None:
        log = await open_log()
        await append(log, batch(b"0", producer=7, sequence=0))
        await append(log, batch(b"1", producer=7, sequence=1))
        await log.truncate(1)
        again = await append(log, batch(b"1", producer=7, sequence=1))
        assert (again.base_offset, again.duplicate) == (1, False)

    async def test_is_still_cut_after_a_kill(self, open_log: OpenLog, persistent: Driver) -> None:
        log = await open_log(**SMALL)
        values = await fill(log, 40)
        await log.truncate(11)
        log = await persistent.reopen_after_kill(LogConfig(**SMALL))
        assert log.end == 11
        assert [record.value for record in await read_back(log)] == values[:11]


@pytest.fixture
async def copy(open_log: OpenLog, driver: Driver) -> PartitionLog:
    """A second log, to follow the first one."""
    await open_log()
    assert driver.logs is not None
    if not driver.logs.can_follow:
        pytest.skip("a database has the only copy")
    return await driver.open(LogConfig(**SMALL), partition=1)


async def replicate(leader: PartitionLog, follower: PartitionLog) -> None:
    """A follower in a few lines: cut what the leader does not have (KIP-101), then copy what is new."""
    while True:
        epoch, end = leader.epochs.end_of(follower.epochs.latest, leader.end)
        if follower.end <= end:
            break
        assert await follower.truncate(end) == end
        if follower.epochs.latest <= epoch:
            break
    while follower.end < leader.high_watermark:
        piece = (await leader.read(follower.end, 1)).to_bytes()
        await follower.follow(memoryview(bytearray(piece)), read_header(piece))


class TestFollow:
    async def test_a_follower_has_the_bytes_of_its_leader(self, open_log: OpenLog, copy: PartitionLog) -> None:
        log = await open_log(**SMALL)
        await fill(log, 20)
        log.lead(3)
        await append(log, batch(b"a", b"b", producer=7))
        await replicate(log, copy)
        assert await read_bytes(copy) == await read_bytes(log)
        assert copy.epochs.to_state() == log.epochs.to_state() == [[0, 0], [3, 20]]
        assert (copy.counted, copy.end) == (22, 22)

    async def test_the_same_batch_again_changes_nothing(self, open_log: OpenLog, copy: PartitionLog) -> None:
        log = await open_log()
        await fill(log, 3)
        await replicate(log, copy)
        piece = (await log.read(1, 1)).to_bytes()
        again = await copy.follow(memoryview(bytearray(piece)), read_header(piece))
        assert (again.base_offset, again.duplicate, copy.end) == (1, True, 3)

    async def test_another_batch_at_the_same_offset_is_a_divergence(
        self, open_log: OpenLog, copy: PartitionLog
    ) -> None:
        await fill(copy, 3)
        for epoch, value in ((0, b"other"), (1, b"2:" + bytes(100))):
            data = codec.encode([Record(2, NOW, None, value)], base_offset=2)
            patch_offset(data, 2, read_header(data).length, epoch)
            with pytest.raises(Diverged):
                await copy.follow(memoryview(data), read_header(data))
        assert copy.end == 3

    async def test_a_batch_of_an_older_epoch_is_a_divergence(self, open_log: OpenLog, copy: PartitionLog) -> None:
        copy.lead(4)
        await fill(copy, 2)
        data = codec.encode([Record(2, NOW, None, b"late")], base_offset=2)
        patch_offset(data, 2, read_header(data).length, 3)
        with pytest.raises(Diverged):
            await copy.follow(memoryview(data), read_header(data))

    async def test_offsets_that_compaction_removed_stay_missing(self, open_log: OpenLog, copy: PartitionLog) -> None:
        for base in (5, 9, 1000):
            data = codec.encode([Record(base, NOW, None, b"%d" % base)], base_offset=base)
            patch_offset(data, base, read_header(data).length, 0)
            assert (await copy.follow(memoryview(data), read_header(data))).base_offset == base
        assert [(record.offset, record.value) for record in await read_back(copy)] == [
            (5, b"5"), (9, b"9"), (1000, b"1000"),
        ]  # fmt: skip
        assert (await append(copy, batch(b"next"))).base_offset == 1001

    async def test_a_former_leader_gives_up_what_the_new_one_does_not_have(
        self, open_log: OpenLog, copy: PartitionLog
    ) -> None:
        log = await open_log()
        await fill(log, 5)
        await replicate(log, copy)
        copy.lead(1)
        await append(copy, batch(b"lost"))
        log.lead(2)
        await append(log, batch(b"kept", b"too"))
        await replicate(log, copy)
        assert await read_bytes(copy) == await read_bytes(log)
        assert copy.epochs.to_state() == [[0, 0], [2, 5]]

    async def test_its_history_of_epochs_outlives_a_kill(
        self, open_log: OpenLog, copy: PartitionLog, driver: Driver, persistent: Driver
    ) -> None:
        copy.lead(2)
        await fill(copy, 30)
        copy.lead(7)
        await fill(copy, 1)
        await persistent.reopen_after_kill()
        again = await persistent.open(LogConfig(**SMALL), partition=1)
        assert again.epochs.to_state() == [[2, 0], [7, 30]]
        assert again.end == 31


class TestFlushAndWake:
    @pytest.mark.parametrize("policy", ["always", "os", "every=3", "every=50ms"])
    async def test_a_flush_makes_all_durable(self, open_log: OpenLog, policy: str) -> None:
        log = await open_log(flush=FlushPolicy.parse(policy))
        promises = [append(log, batch(b"x")) for _ in range(5)]
        await log.flush()
        assert all(promise.done for promise in promises)
        assert (log.high_watermark, log.unsynced_bytes) == (5, 0)

    async def test_a_flush_of_an_empty_log_is_done_at_once(self, open_log: OpenLog) -> None:
        assert (await open_log()).flush().done

    async def test_wakes_whenever_more_can_be_read(self, open_log: OpenLog) -> None:
        log = await open_log()
        seen: list[int] = []
        log.wake(lambda: seen.append(log.high_watermark))
        await append(log, batch(b"a"))
        await append(log, batch(b"b", b"c"))
        assert seen == [1, 3]

    async def test_a_waker_that_fails_costs_neither_the_others_nor_the_append(self, open_log: OpenLog) -> None:
        log = await open_log()
        woken: list[int] = []

        def fail() -> None:
            raise ValueError("a mistake elsewhere")

        log.wake(fail)
        log.wake(lambda: woken.append(log.high_watermark))
        assert (await append(log, batch(b"a"))).base_offset == 0
        assert (await append(log, batch(b"b"))).base_offset == 1
        assert woken == [1, 2]

    async def test_wakes_nobody_who_was_taken_off(self, open_log: OpenLog) -> None:
        log = await open_log()
        seen: list[int] = []
        take_off = log.wake(lambda: seen.append(log.high_watermark))
        take_off()
        take_off()
        await append(log, batch(b"a"))
        assert seen == []

    async def test_wakers_may_come_and_go_while_waking(self, open_log: OpenLog) -> None:
        log = await open_log()
        seen: list[str] = []

        def once() -> None:
            seen.append("once")
            take_off()
            log.wake(lambda: seen.append("later"))

        take_off = log.wake(once)
        await append(log, batch(b"a"))
        assert seen == ["once"]
        await append(log, batch(b"b"))
        assert seen == ["once", "later"]


class TestIdempotence:
    async def test_a_repeat_is_answered_with_the_first_offset(self, open_log: OpenLog) -> None:
        log = await open_log()
        await append(log, batch(b"other"))
        first = await append(log, batch(b"a", b"b", producer=7, sequence=0))
        again = await append(log, batch(b"a", b"b", producer=7, sequence=0))
        assert (first.base_offset, first.duplicate) == (1, False)
        assert (again.base_offset, again.duplicate) == (1, True)
        assert log.end == 3

    async def test_a_repeat_of_what_is_not_durable_yet_waits_for_it(self, open_log: OpenLog) -> None:
        log = await open_log()
        first = append(log, batch(b"a", producer=7))
        again = append(log, batch(b"a", producer=7))
        assert again.done == first.done
        assert (await again).duplicate and first.done

    async def test_remembers_the_last_five_batches(self, open_log: OpenLog) -> None:
        log = await open_log()
        for sequence in range(7):
            await append(log, batch(b"x", producer=7, sequence=sequence))
        for sequence in range(2, 7):
            again = await append(log, batch(b"x", producer=7, sequence=sequence))
            assert again == (sequence, 0, True)
        assert await refusal(append(log, batch(b"x", producer=7, sequence=1))) is Code.OUT_OF_ORDER_SEQUENCE_NUMBER
        assert log.end == 7

    async def test_never_calls_a_duplicate_what_it_may_not_have_stored(self, open_log: OpenLog) -> None:
        """Clients take that for success. The first of several batches was refused, by a log that has a producer's later
        ones as the first it hears of it.
        """
        log = await open_log()
        await append(log, batch(b"c", b"d", producer=7, sequence=2))
        assert await refusal(append(log, batch(b"a", b"b", producer=7))) is Code.OUT_OF_ORDER_SEQUENCE_NUMBER
        assert (await append(log, batch(b"e", producer=7, sequence=4))).base_offset == 2

    async def test_refuses_a_gap(self, open_log: OpenLog) -> None:
        log = await open_log()
        await append(log, batch(b"a", producer=7, sequence=0))
        assert await refusal(append(log, batch(b"c", producer=7, sequence=2))) is Code.OUT_OF_ORDER_SEQUENCE_NUMBER
        assert (await append(log, batch(b"b", producer=7, sequence=1))).base_offset == 1

    async def test_sequences_wrap_around(self, open_log: OpenLog) -> None:
        log = await open_log()
        last = 2**31 - 1
        await append(log, batch(b"a", b"b", producer=7, sequence=last - 2))
        await append(log, batch(b"c", b"d", b"e", producer=7, sequence=last))
        again = await append(log, batch(b"c", b"d", b"e", producer=7, sequence=last))
        assert (again.base_offset, again.duplicate) == (2, True)
        assert (await append(log, batch(b"f", producer=7, sequence=2))).base_offset == 5
        assert await refusal(append(log, batch(b"h", producer=7, sequence=4))) is Code.OUT_OF_ORDER_SEQUENCE_NUMBER

    async def test_fences_an_older_epoch(self, open_log: OpenLog) -> None:
        log = await open_log()
        await append(log, batch(b"a", producer=7, epoch=0))
        await append(log, batch(b"b", producer=7, epoch=1))
        assert await refusal(append(log, batch(b"c", producer=7, epoch=0, sequence=1))) is Code.INVALID_PRODUCER_EPOCH

    async def test_a_new_epoch_starts_at_zero(self, open_log: OpenLog) -> None:
        log = await open_log()
        await append(log, batch(b"a", producer=7, epoch=0))
        late = append(log, batch(b"b", producer=7, epoch=1, sequence=1))
        assert await refusal(late) is Code.OUT_OF_ORDER_SEQUENCE_NUMBER
        assert (await append(log, batch(b"b", producer=7, epoch=1, sequence=0))).base_offset == 1

    async def test_producers_do_not_disturb_each_other(self, open_log: OpenLog) -> None:
        log = await open_log()
        for sequence in range(3):
            for producer in (7, 8):
                await append(log, batch(b"x", producer=producer, sequence=sequence))
        assert (await append(log, batch(b"x", producer=8, sequence=1))) == (3, 0, True)

    async def test_an_unknown_producer_may_start_anywhere(self, open_log: OpenLog) -> None:
        log = await open_log()
        assert (await append(log, batch(b"x", producer=7, sequence=40))).base_offset == 0


class TestRetention:
    async def test_drops_what_is_too_old(self, driver: Driver, clock: VirtualClock) -> None:
        log = await driver.open(LogConfig(segment_bytes=1000, retention_ms=DAY_MS))
        await fill(log, 20, at=clock.now_ms())
        clock.advance(DAY_MS / 1000 / 2)
        await fill(log, 20, at=clock.now_ms())
        clock.advance(DAY_MS / 1000 / 2 + 1)
        await driver.logs.housekeep()
        assert 15 <= log.start <= 20, "whole segments of the first twenty"
        assert [record.offset for record in await read_back(log)] == list(range(log.start, 40))

    async def test_drops_everything_when_everything_is_too_old(self, driver: Driver, clock: VirtualClock) -> None:
        log = await driver.open(LogConfig(retention_ms=DAY_MS))
        await fill(log, 20, at=clock.now_ms())
        clock.advance(DAY_MS / 1000 + 1)
        await driver.logs.housekeep()
        assert (log.start, log.end, log.size_bytes()) == (20, 20, 0)
        assert (await append(log, batch(b"x"))).base_offset == 20

    async def test_does_not_take_for_old_what_has_no_time(self, driver: Driver, clock: VirtualClock) -> None:
        log = await driver.open(LogConfig(retention_ms=DAY_MS))
        for _ in range(3):
            await append(log, batch(b"some time", at=-1))
        await driver.logs.housekeep()
        assert len(await read_back(log)) == 3
        await append(log, batch(b"now", at=clock.now_ms()))
        await driver.logs.housekeep()
        assert len(await read_back(log)) == 4
        clock.advance(DAY_MS / 1000 + 1)
        await driver.logs.housekeep()
        assert log.start == log.end == 4, "they go with what follows them"

    async def test_a_timestamp_far_in_the_future_does_not_keep_a_log(self, driver: Driver, clock: VirtualClock) -> None:
        """Such records may be stored already, or the topic allows them."""
        log = await driver.open(LogConfig(segment_bytes=1000, segment_ms=DAY_MS, retention_ms=DAY_MS))
        await driver.logs.housekeep()
        for _ in range(3):
            await append(log, batch(b"far", at=1 << 60))
            await fill(log, 20, at=clock.now_ms())
            driver.written_now()
            await driver.logs.housekeep()
            assert log.start == 0, "it is no older than its arrival"
            clock.advance(DAY_MS / 1000 / 4)
        for _ in range(3):
            clock.advance(DAY_MS / 1000 + 1)
            await driver.logs.housekeep()
        assert log.start == log.end == 63

    async def test_an_active_segment_that_begins_in_the_future_is_closed_all_the_same(
        self, driver: Driver, clock: VirtualClock
    ) -> None:
        log = await driver.open(LogConfig(segment_ms=DAY_MS, retention_ms=2 * DAY_MS))
        await append(log, batch(b"far", at=1 << 60))
        await driver.logs.housekeep()
        for _ in range(8):
            clock.advance(DAY_MS / 1000)
            await fill(log, 1, at=clock.now_ms())
            driver.written_now()
            await driver.logs.housekeep()
        assert 1 <= log.start <= 8

    async def test_keeps_at_least_what_retention_bytes_says(self, driver: Driver) -> None:
        log = await driver.open(LogConfig(segment_bytes=1000, retention_ms=-1, retention_bytes=3000))
        await fill(log, 100)
        await driver.logs.housekeep()
        assert 2800 <= log.size_bytes() <= 4000
        assert [record.offset for record in await read_back(log)] == list(range(log.start, 100))

    async def test_keeps_everything_when_told_so(self, driver: Driver, clock: VirtualClock) -> None:
        log = await driver.open(LogConfig(segment_bytes=1000, retention_ms=-1))
        await fill(log, 50)
        clock.advance(DAY_MS)
        await driver.logs.housekeep()
        assert log.start == 0

    async def test_does_not_touch_topics_that_are_only_compacted(self, driver: Driver, clock: VirtualClock) -> None:
        log = await driver.open(LogConfig(segment_bytes=1000, retention_ms=DAY_MS, delete=False))
        await fill(log, 50)
        clock.advance(10 * DAY_MS)
        await driver.logs.housekeep()
        assert log.start == 0 and len(await read_back(log)) == 50

    async def test_goes_by_a_configuration_that_changed(self, driver: Driver, clock: VirtualClock) -> None:
        log = await driver.open(LogConfig(segment_bytes=1000, retention_ms=-1))
        await fill(log, 50, at=clock.now_ms())
        clock.advance(10)
        log.config = LogConfig(segment_bytes=1000, retention_ms=1000)
        await driver.logs.housekeep()
        assert log.start == log.end == 50

    async def test_stays_dropped_after_a_restart(self, persistent: Driver) -> None:
        config = LogConfig(segment_bytes=1000, retention_ms=-1, retention_bytes=3000)
        log = await persistent.open(config)
        await fill(log, 100)
        await persistent.logs.housekeep()
        start = log.start
        assert (await persistent.reopen(config)).start == start
        assert (await persistent.reopen_after_kill(config)).start == start


class TestDiscard:
    async def test_a_new_topic_of_the_same_name_is_empty(self, driver: Driver) -> None:
        await fill(await driver.open(), 5)
        await driver.logs.discard(TOPIC, TOPIC_ID)
        log = await driver.open_topic(TOPIC, "another-id")
        assert (log.start, log.end) == (0, 0)

    async def test_takes_all_partitions_and_no_other_topic(self, driver: Driver) -> None:
        for partition in range(3):
            await fill(await driver.open(partition=partition), 5)
        other = await driver.open_topic("payments", "fedcba9876543210")
        await fill(other, 5)
        await driver.logs.discard(TOPIC, TOPIC_ID)
        assert [(await driver.open(partition=partition)).end for partition in range(3)] == [0, 0, 0]
        assert len(await read_back(other)) == 5

    async def test_wakes_whoever_waits_and_takes_nothing_more(self, driver: Driver) -> None:
        log = await driver.open()
        await fill(log, 1)
        woken: list[bool] = []
        log.wake(lambda: woken.append(True))
        await driver.logs.discard(TOPIC, TOPIC_ID)
        assert woken == [True]
        assert await refusal(append(log, batch(b"late"))) is Code.UNKNOWN_TOPIC_OR_PARTITION

    async def test_answers_whoever_waits_for_a_sync(self, driver: Driver) -> None:
        log = await driver.open()
        await fill(log, 1)
        promise = append(log, batch(b"x"))
        await driver.logs.discard(TOPIC, TOPIC_ID)
        assert promise.done

    async def test_of_an_unknown_topic_does_nothing(self, driver: Driver) -> None:
        await driver.open()
        await driver.logs.discard("nobody", "knows-me")


class TestReopen:
    async def test_everything_is_there_after_a_clean_shutdown(self, persistent: Driver) -> None:
        config = LogConfig(**SMALL)
        values = await fill(await persistent.open(config), 50)
        log = await persistent.reopen(config)
        assert (log.start, log.high_watermark, log.end) == (0, 50, 50)
        assert [record.value for record in await read_back(log)] == values
        assert await log.find_time(NOW + 30) == (30, NOW + 30)
        assert (await append(log, batch(b"next"))).base_offset == 50

    async def test_everything_is_there_after_a_kill(self, persistent: Driver) -> None:
        config = LogConfig(**SMALL)
        values = await fill(await persistent.open(config), 50)
        log = await persistent.reopen_after_kill(config)
        assert [record.value for record in await read_back(log)] == values
        assert await log.find_time(NOW + 30) == (30, NOW + 30)
        assert (await append(log, batch(b"next"))).base_offset == 50

    @pytest.mark.parametrize("how", ["cleanly", "by a kill"])
    async def test_producers_are_remembered(self, persistent: Driver, how: str) -> None:
        log = await persistent.open(LogConfig(**SMALL))
        for sequence in range(9):
            await append(log, batch(b"x", producer=7, epoch=2, sequence=sequence))
        config = LogConfig(**SMALL)
        log = await persistent.reopen(config) if how == "cleanly" else await persistent.reopen_after_kill(config)
        for sequence in range(4, 9):
            assert (await append(log, batch(b"x", producer=7, epoch=2, sequence=sequence))) == (sequence, 0, True)
        assert await refusal(append(log, batch(b"x", producer=7, epoch=1, sequence=9))) is Code.INVALID_PRODUCER_EPOCH
        late = append(log, batch(b"x", producer=7, epoch=2, sequence=10))
        assert await refusal(late) is Code.OUT_OF_ORDER_SEQUENCE_NUMBER
        assert (await append(log, batch(b"x", producer=7, epoch=2, sequence=9))).base_offset == 9

    async def test_producers_outlive_their_batches(self, persistent: Driver) -> None:
        config = LogConfig(segment_bytes=1000, retention_ms=-1, retention_bytes=2000)
        log = await persistent.open(config)
        await append(log, batch(b"x", producer=7, sequence=0))
        await fill(log, 100)
        await persistent.logs.housekeep()
        assert log.start > 0
        log = await persistent.reopen_after_kill(config)
        assert (await append(log, batch(b"x", producer=7, sequence=0))).duplicate

    async def test_the_start_is_remembered(self, persistent: Driver) -> None:
        log = await persistent.open(LogConfig(**SMALL))
        await fill(log, 50)
        await log.trim(33)
        assert (await persistent.reopen_after_kill(LogConfig(**SMALL))).start == 33
        assert (await persistent.reopen(LogConfig(**SMALL))).start == 33

    async def test_several_partitions_come_back_each_with_its_own(self, persistent: Driver) -> None:
        for partition in range(3):
            await fill(await persistent.open(partition=partition), 5 + partition)
        await persistent.close()
        assert [(await persistent.open(partition=partition)).end for partition in range(3)] == [5, 6, 7]


class TestCompaction:
    CONFIG = LogConfig(
        segment_bytes=600, index_interval_bytes=100, delete=False, compact=True, min_cleanable_dirty_ratio=0.01,
        delete_retention_ms=60_000,
    )  # fmt: skip

    @pytest.fixture
    async def log(self, driver: Driver) -> PartitionLog:
        if not driver.compacts:
            pytest.skip("this store does not compact")
        return await driver.open(self.CONFIG)

    async def put(self, log: PartitionLog, clock: VirtualClock, *pairs: tuple[bytes, bytes | None]) -> None:
        keys = [key for key, _ in pairs]
        await append(log, batch(*[value for _, value in pairs], keys=keys, at=clock.now_ms()))

    async def test_keeps_the_newest_of_each_key_at_its_offset(
        self, driver: Driver, log: PartitionLog, clock: VirtualClock
    ) -> None:
        for turn in range(40):
            await self.put(log, clock, (b"key-%d" % (turn % 5), b"%d" % turn + bytes(50)))
        before = {record.offset: record for record in await read_back(log)}
        await driver.logs.housekeep()
        after = await read_back(log)
        assert len(after) < 20
        assert all(record == before[record.offset] for record in after)
        newest = {record.key: record.offset for record in before.values()}
        assert set(newest.values()) <= {record.offset for record in after}
        assert (log.start, log.end) == (0, 40)

    async def test_reads_from_inside_a_gap_go_on_behind_it(
        self, driver: Driver, log: PartitionLog, clock: VirtualClock
    ) -> None:
        for turn in range(40):
            await self.put(log, clock, (b"only", b"%d" % turn + bytes(50)))
        await driver.logs.housekeep()
        left = [record.offset for record in await read_back(log)]
        assert left[0] > 5
        for offset in range(left[0] + 1):
            assert (await read_back(log, offset))[0].offset == left[0]

    async def test_a_batch_that_loses_records_keeps_its_span(
        self, driver: Driver, log: PartitionLog, clock: VirtualClock
    ) -> None:
        await self.put(log, clock, (b"a", b"old"), (b"b", b"stays"), (b"c", b"old"))
        for turn in range(20):
            await self.put(log, clock, (b"a", b"%d" % turn + bytes(50)), (b"c", b"%d" % turn))
        await driver.logs.housekeep()
        header = read_header((await log.read(0, 1)).to_bytes())
        assert (header.base_offset, header.last_offset) == (0, 2)
        assert (await read_back(log))[0][:1] + (await read_back(log))[0][2:4] == (1, b"b", b"stays")

    async def test_a_tombstone_goes_after_its_retention(
        self, driver: Driver, log: PartitionLog, clock: VirtualClock
    ) -> None:
        async def fill_up() -> None:
            for turn in range(12):
                await self.put(log, clock, (b"filler-%d" % turn, bytes(100)))

        await self.put(log, clock, (b"gone", b"value"))
        await self.put(log, clock, (b"gone", None))
        await fill_up()
        await driver.logs.housekeep()
        left = [(record.offset, record.value) for record in await read_back(log) if record.key == b"gone"]
        assert left == [(1, None)]
        clock.advance(61)
        await fill_up()
        await driver.logs.housekeep()
        assert [record for record in await read_back(log) if record.key == b"gone"] == []

    async def test_nothing_is_lost_when_the_broker_is_killed_afterwards(
        self, driver: Driver, log: PartitionLog, clock: VirtualClock
    ) -> None:
        await self.put(log, clock, (b"early", b"bird"))
        log = await driver.reopen(self.CONFIG)
        for turn in range(60):
            await self.put(log, clock, (b"key-%d" % (turn % 3), b"%d" % turn + bytes(50)))
        await driver.logs.housekeep()
        left = await read_back(log)
        log = await driver.reopen_after_kill(self.CONFIG)
        assert await read_back(log) == left
        assert log.end == 61

    async def test_a_slice_handed_out_before_stays_valid(
        self, driver: Driver, log: PartitionLog, clock: VirtualClock
    ) -> None:
        for turn in range(40):
            await self.put(log, clock, (b"only", b"%d" % turn + bytes(50)))
        piece = await log.read(0, 1 << 20)
        before = piece.to_bytes()
        await driver.logs.housekeep()
        assert piece.to_bytes() == before

    async def test_retention_removes_segments_that_compaction_emptied(
        self, driver: Driver, log: PartitionLog, clock: VirtualClock
    ) -> None:
        config = LogConfig(
            segment_bytes=600, delete=True, compact=True, min_cleanable_dirty_ratio=0.01, retention_ms=1000_000
        )
        log.config = config
        for turn in range(40):
            await self.put(log, clock, (b"only", b"%d" % turn + bytes(50)))
        await driver.logs.housekeep()
        assert len(await read_back(log)) < 10
        clock.advance(1001)
        await driver.logs.housekeep()
        assert log.start == log.end == 40


async def test_says_where_it_lives_and_how_much_room_there_is(driver: Driver) -> None:
    await driver.open()
    assert driver.logs is not None and driver.logs.location
    assert len(driver.logs.room()) == 2
