"""Ctrl-C in a thread that waits for an iterator: nothing that was taken for it is lost, and nothing stays open."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

import millstream.sync
from millstream.core.errors import MillstreamError

SECONDS = 20.0
VERBS: dict[str, Callable[[millstream.sync.Millstream], Any]] = {
    "read": lambda ms: ms.read("orders"),
    "stream": lambda ms: ms.stream("orders", group="g"),
    "queue": lambda ms: ms.queue("orders", group="g", prefetch=2),
    "exclusive": lambda ms: ms.exclusive("orders", group="g"),
}


class Interrupted:
    """An outcome whose reader is interrupted when it is there (`late`), or before the loop has begun to work on it."""

    def __init__(self, outcome: concurrent.futures.Future[Any], late: bool, given_up: threading.Event) -> None:
        self._outcome = outcome
        self._late = late
        self._given_up = given_up

    def result(self, timeout: float | None = None) -> Any:
        if timeout is not None:
            return self._outcome.result(timeout)
        if self._late:
            concurrent.futures.wait([self._outcome], SECONDS)
        raise KeyboardInterrupt

    def done(self) -> bool:
        return self._outcome.done()

    def cancel(self) -> bool:
        is_cancelled = self._outcome.cancel()
        self._given_up.set()
        return is_cancelled


class Interrupts:
    """The next call that a thread waits for is interrupted when it is `due`."""

    def __init__(self, late: bool) -> None:
        self.due = False
        self._late = late
        self._run = asyncio.run_coroutine_threadsafe

    def run(self, work: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop) -> Any:
        if not self.due:
            return self._run(work, loop)
        self.due = False
        given_up = threading.Event()
        if not self._late:
            loop.call_soon_threadsafe(given_up.wait, SECONDS)
        return Interrupted(self._run(work, loop), self._late, given_up)


@pytest.fixture
def interrupts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Interrupts:
    made = Interrupts(late=getattr(request, "param", "late") == "late")
    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", made.run)
    return made


late_and_early = pytest.mark.parametrize("interrupts", ["late", "early"], indirect=True)


def opened_with_four() -> millstream.sync.Millstream:
    ms = millstream.sync.open("memory:", default_partitions=1)
    ms.send_many([("orders", b"%d" % number) for number in range(4)])
    return ms


def receive_interrupted(items: Any, interrupts: Interrupts) -> None:
    interrupts.due = True
    with pytest.raises(KeyboardInterrupt):
        items.receive(SECONDS)


@late_and_early
@pytest.mark.parametrize("verb", VERBS)
def test_an_interrupt_costs_no_record(verb: str, interrupts: Interrupts) -> None:
    with opened_with_four() as ms, VERBS[verb](ms) as items:
        assert items.receive(SECONDS).offset == 0
        receive_interrupted(items, interrupts)
        assert [items.receive(SECONDS).offset for _ in range(3)] == [1, 2, 3]


@late_and_early
def test_a_loop_over_a_reading_goes_on_where_it_was_interrupted(interrupts: Interrupts) -> None:
    with opened_with_four() as ms, ms.read("orders", follow=False) as reading:
        interrupts.due = True
        with pytest.raises(KeyboardInterrupt):
            next(iter(reading))
        assert [record.offset for record in reading] == [0, 1, 2, 3]


@late_and_early
def test_closing_does_not_commit_a_record_that_an_interrupt_kept_back(interrupts: Interrupts) -> None:
    with opened_with_four() as ms:
        with ms.stream("orders", group="g") as stream:
            first = stream.receive(SECONDS)
            assert first is not None and first.offset == 0
            receive_interrupted(stream, interrupts)
        with ms.stream("orders", group="g") as stream:
            again = stream.receive(SECONDS)
            assert again is not None and again.offset == 1


def test_a_commit_is_refused_until_the_record_that_an_interrupt_kept_back_is_received(interrupts: Interrupts) -> None:
    with opened_with_four() as ms:
        with ms.stream("orders", group="g") as stream:
            receive_interrupted(stream, interrupts)
            with pytest.raises(MillstreamError, match="receive it first"):
                stream.commit()
            assert stream.receive(SECONDS) is not None
            stream.commit()
        with ms.stream("orders", group="g") as stream:
            following = stream.receive(SECONDS)
            assert following is not None and following.offset == 1


@pytest.mark.parametrize("verb", [*VERBS, "streams"])
def test_an_interrupt_while_it_opens_leaves_no_member_behind(verb: str, interrupts: Interrupts) -> None:
    with opened_with_four() as ms:
        items = ms.streams({"orders": 2}, group="g") if verb == "streams" else VERBS[verb](ms)
        interrupts.due = True
        with pytest.raises(KeyboardInterrupt), items:
            raise AssertionError("it was interrupted before")
        assert not ms._ms._consuming
