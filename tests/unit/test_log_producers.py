"""The table of idempotent producers, where the contract suite does not reach."""

from __future__ import annotations

import json

import pytest

from millstream.core.errors import Code, RequestError
from millstream.log import producers as module
from millstream.log.producers import SEQUENCES, Producers
from millstream.records.batch import BatchHeader, read_header
from tests.batches import batch


def header(producer: int, sequence: int, count: int = 1, epoch: int = 0) -> BatchHeader:
    return read_header(batch(*[b""] * count, producer=producer, sequence=sequence, epoch=epoch))


def test_plain_batches_leave_no_trace() -> None:
    table = Producers()
    table.note(read_header(batch(b"x")), 0, 0)
    assert table.by_id == {}


def test_a_batch_that_begins_alike_and_ends_elsewhere_is_no_repeat() -> None:
    table = Producers()
    table.note(header(1, 0, count=3), 0, 0)
    with pytest.raises(RequestError) as caught:
        table.find_repeat(header(1, 0, count=2))
    assert caught.value.code is Code.OUT_OF_ORDER_SEQUENCE_NUMBER


def test_a_batch_over_the_wrap_ends_below_where_it_began() -> None:
    table = Producers()
    table.note(header(1, SEQUENCES - 2, count=5), 100, 0)
    assert table.by_id[1].batches == [(SEQUENCES - 2, 2, 100)]
    assert table.find_repeat(header(1, SEQUENCES - 2, count=5)) == 100
    assert table.find_repeat(header(1, 3)) is None


def test_survives_as_json() -> None:
    table = Producers()
    for sequence in range(8):
        table.note(header(2**40, sequence, epoch=3), sequence * 10, 1234)
    again = Producers.from_state(json.loads(json.dumps(table.to_state())))
    assert again.to_state() == table.to_state()
    assert again.find_repeat(header(2**40, 5, epoch=3)) == 50


def test_forgets_what_was_truncated() -> None:
    table = Producers()
    for sequence in range(4):
        table.note(header(1, sequence), sequence * 10, 0)
    table.note(header(2, 0), 35, 0)
    table.forget_from(15)
    assert list(table.by_id) == [1]
    assert table.find_repeat(header(1, 2)) is None
    assert table.find_repeat(header(1, 1)) == 10


def test_has_a_bound_and_forgets_the_one_that_was_silent_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PRODUCERS_MAX", 3)
    table = Producers()
    for number in range(3):
        table.note(header(number, 0), number, 100 + number)
    table.note(header(0, 1), 3, 200)
    table.note(header(9, 0), 4, 201)
    assert sorted(table.by_id) == [0, 2, 9]
