"""Threads for blocking work: outcomes in order on the loop, mistakes included, and an end that waits for what began."""

from __future__ import annotations

import threading

import pytest

from millstream.stores.worker import Worker


async def test_work_is_done_elsewhere_and_answered_here_in_order() -> None:
    worker = Worker("test", 1)
    answered: list[int] = []
    here = threading.get_ident()
    promises = [worker.do(lambda number=number: (number, threading.get_ident())) for number in range(20)]  # type: ignore[misc]
    for promise in promises:
        promise.then(lambda done: answered.append(done.value()[0]))
    places = {(await promise)[1] for promise in promises}
    assert answered == list(range(20))
    assert len(places) == 1 and here not in places
    worker.close()


async def test_a_mistake_is_an_answer_too() -> None:
    worker = Worker("test", 2)
    with pytest.raises(ZeroDivisionError):
        await worker.do(lambda: 1 // 0)
    assert await worker.do(lambda: 7) == 7
    worker.close()


async def test_closing_waits_for_what_was_begun_and_nothing_is_taken_afterwards() -> None:
    worker = Worker("test", 1)
    begun: list[str] = []
    worker.do(lambda: begun.append("one"))
    worker.do(lambda: begun.append("two"))
    worker.close()
    assert begun == ["one", "two"]
    with pytest.raises(RuntimeError, match="closed"):
        worker.do(lambda: None)


def test_one_that_was_never_used_needs_no_threads() -> None:
    worker = Worker("idle", 4)
    worker.close()
    assert not any(thread.name.startswith("idle") for thread in threading.enumerate())
