"""Group commit: who shares a sync with whom."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable

import pytest

from millstream.log.flusher import Flusher


class FakeLog:
    """Asks for syncs; each waits until the test lets it go."""

    def __init__(self, flusher: Flusher) -> None:
        self.flusher = flusher
        self.pending = 0
        self.shared: list[int] = []
        self.errors: list[OSError | None] = []
        self.ended = asyncio.Semaphore(0)
        self.gate = threading.Event()
        self.failure: OSError | None = None
        self._taken = 0
        self.before_answers: Callable[[], object] = lambda: None

    def append(self) -> None:
        self.pending += 1
        self.flusher.request(self)

    def begin_sync(self) -> Callable[[], None] | None:
        if not self.pending:
            return None
        self._taken, self.pending = self.pending, 0
        return self._work

    def _work(self) -> None:
        assert self.gate.wait(10)
        if self.failure is not None:
            raise self.failure

    def end_sync(self, error: OSError | None, go_on: Callable[[], None]) -> None:
        self.shared.append(self._taken)
        self.errors.append(error)
        go_on()
        self.before_answers()
        self.ended.release()


@pytest.fixture
async def flusher() -> AsyncIterator[Flusher]:
    flusher = Flusher(asyncio.get_running_loop())
    yield flusher
    flusher.close()


async def test_what_arrives_in_one_turn_shares_a_sync(flusher: Flusher) -> None:
    log = FakeLog(flusher)
    log.gate.set()
    for _ in range(7):
        log.append()
    await log.ended.acquire()
    assert log.shared == [7]


async def test_what_arrives_during_a_sync_shares_the_next(flusher: Flusher) -> None:
    log = FakeLog(flusher)
    log.append()
    await asyncio.sleep(0)
    for _ in range(5):
        log.append()
        await asyncio.sleep(0)
    assert log.shared == []
    log.gate.set()
    await log.ended.acquire()
    await log.ended.acquire()
    assert log.shared == [1, 5]


async def test_logs_do_not_wait_for_each_other(flusher: Flusher) -> None:
    slow, quick = FakeLog(flusher), FakeLog(flusher)
    quick.gate.set()
    slow.append()
    quick.append()
    await quick.ended.acquire()
    assert slow.shared == []
    slow.gate.set()
    await slow.ended.acquire()


async def test_a_failure_goes_to_its_log_only(flusher: Flusher) -> None:
    bad, good = FakeLog(flusher), FakeLog(flusher)
    bad.failure = OSError(5, "Input/output error")
    for log in (bad, good):
        log.gate.set()
        log.append()
    await bad.ended.acquire()
    await good.ended.acquire()
    assert bad.errors == [bad.failure] and good.errors == [None]


async def test_a_log_with_nothing_to_sync_costs_nothing(flusher: Flusher) -> None:
    idle, busy = FakeLog(flusher), FakeLog(flusher)
    busy.gate.set()
    flusher.request(idle)
    busy.append()
    await busy.ended.acquire()
    assert idle.shared == []
    idle.gate.set()
    idle.append()
    await idle.ended.acquire()
    assert idle.shared == [1]


async def test_tells_how_long_each_sync_took() -> None:
    seconds: list[float] = []
    flusher = Flusher(asyncio.get_running_loop(), seconds.append)
    log = FakeLog(flusher)
    log.gate.set()
    log.append()
    await log.ended.acquire()
    flusher.close()
    assert len(seconds) == 1 and seconds[0] >= 0


async def test_the_next_sync_is_on_its_way_before_those_of_the_last_are_answered(flusher: Flusher) -> None:
    log = FakeLog(flusher)
    log.append()
    await asyncio.sleep(0.01)
    log.append()  # while the first sync waits at its gate
    begun: list[int] = []
    log.before_answers = lambda: begun.append(log.pending)
    log.gate.set()
    await log.ended.acquire()
    assert begun[0] == 0, "the second append was taken before the first was answered"
    await log.ended.acquire()
    assert log.shared == [1, 1]
