"""The pure parts of a redrive: sets of offsets, what a dead letter says, which are selected."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any, cast

import pytest

from millstream.admin.redrive import DeadLetter, Selection
from millstream.admin.redrive_ledger import OffsetSet


@pytest.mark.parametrize("seed", range(5))
def test_runs_hold_what_was_added_and_nothing_else(seed: int) -> None:
    rng = random.Random(seed)
    runs, offsets = OffsetSet(), set[int]()
    for _ in range(300):
        first = rng.randrange(1000)
        last = first + rng.randrange(1, 8) - 1
        runs.add(first, last)
        offsets.update(range(first, last + 1))
        listed = list(runs)
        assert all(left[1] + 1 < right[0] for left, right in pairwise(listed))
    assert {offset for offset in range(-5, 1020) if offset in runs} == offsets


class Dead:
    """As much of a message as a letter is read from."""

    def __init__(self, **headers: str) -> None:
        self._headers = [(name.replace("__", "-"), value.encode()) for name, value in headers.items()]

    def headers(self) -> list[tuple[str, bytes]]:
        return self._headers

    def timestamp(self) -> tuple[int, int]:
        return 1, 5000


def letter(**headers: str) -> DeadLetter | None:
    return DeadLetter.parse(cast("Any", Dead(**headers)))


FULL = {
    "trace": "1",
    "millstream__deliver__at": "4000",
    "millstream__redriven": "2",
    "millstream__redriven__from": "__dlq__/0/1",
    "millstream__dead__topic": "jobs",
    "millstream__dead__partition": "3",
    "millstream__dead__group": "workers",
    "millstream__dead__reason": "Its lease ran out",
    "millstream__dead__at": "1970-01-01T00:00:09.500+00:00",
}


def test_a_letter_tells_where_it_came_from_and_what_its_record_had() -> None:
    assert letter(**FULL) == DeadLetter("jobs", 3, "workers", "Its lease ran out", 9500, [("trace", b"1")], 2)
    assert letter(trace="1") is None
    assert letter(**{**FULL, "millstream__dead__partition": "x"}) is None
    odd = letter(**{**FULL, "millstream__dead__at": "some day", "millstream__redriven": "often"})
    assert odd is not None and (odd.at_ms, odd.redriven) == (5000, 0)


@pytest.mark.parametrize(
    ("selection", "is_meant"),
    [
        (Selection(), True),
        (Selection(topic="jobs", group="workers", reason="LEASE", since_ms=9500, until_ms=9501), True),
        (Selection(topic="job"), False),
        (Selection(group="others"), False),
        (Selection(reason="rejected"), False),
        (Selection(since_ms=9501), False),
        (Selection(until_ms=9500), False),
    ],
)
def test_a_selection_has_the_letters_that_meet_all_its_conditions(selection: Selection, is_meant: bool) -> None:
    dead = letter(**FULL)
    assert dead is not None and selection.has(dead) is is_meant
