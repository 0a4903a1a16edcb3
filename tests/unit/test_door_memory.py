"""The door's memory: a budget that is handed out in order, and buffers that are used again."""

from __future__ import annotations

import random
from functools import partial

from millstream.doors.memory import Budget, BufferPool


def test_what_does_not_fit_waits_in_line_and_is_served_in_order() -> None:
    budget, served = Budget(100), []
    assert budget.take(60) and not budget.take(50)
    budget.wait(50, lambda: served.append("first"))
    budget.wait(10, lambda: served.append("second"))
    assert not budget.take(1), "no request overtakes those in line"
    budget.give(5)
    assert served == []
    budget.give(55)
    assert served == ["first", "second"] and budget.free == 40


def test_whoever_leaves_the_line_makes_way_for_the_next() -> None:
    budget, served = Budget(100), []
    assert budget.take(80)
    leave = budget.wait(50, lambda: served.append("large"))
    budget.wait(20, lambda: served.append("small"))
    leave()
    assert served == ["small"] and budget.free == 0


def test_ten_thousand_in_line_who_give_back_at_once_are_all_served() -> None:
    budget = Budget(10)
    assert budget.take(10)
    served: list[int] = []

    def serve(number: int) -> None:
        served.append(number)
        budget.give(10)

    for number in range(10_000):
        budget.wait(10, partial(serve, number))
    budget.give(10)
    assert served == list(range(10_000)) and budget.free == 10


def test_bytes_are_never_lost_or_made_up() -> None:
    pick, budget = random.Random(1), Budget(1000)
    held: list[int] = []
    leaves = []
    for _ in range(5000):
        action, size = pick.randrange(4), pick.randrange(1, 400)
        if action == 0 and budget.take(size):
            held.append(size)
        elif action == 1:
            leaves.append(budget.wait(size, partial(held.append, size)))
        elif action == 2 and held:
            budget.give(held.pop(pick.randrange(len(held))))
        elif action == 3 and leaves:
            leaves.pop(pick.randrange(len(leaves)))()
        assert budget.free + sum(held) == 1000 and budget.free >= 0


def test_buffers_are_used_again_up_to_a_number() -> None:
    pool = BufferPool()
    size = pool.size_for(100)
    assert size == pool.SMALL and pool.size_for(pool.SMALL + 1) == pool.LARGE
    assert pool.size_for(5 * pool.LARGE) == 5 * pool.LARGE
    buffers = [pool.take(size) for _ in range(2 * pool.KEPT_MAX)]
    for buffer in buffers:
        pool.give(buffer)
    again = [pool.take(size) for _ in range(2 * pool.KEPT_MAX)]
    known = {id(buffer) for buffer in buffers}
    assert sum(id(buffer) in known for buffer in again) == pool.KEPT_MAX
    pool.give(bytearray(7))
    assert len(pool.take(7)) == 7
