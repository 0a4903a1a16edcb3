"""The registry of damaged ranges of offsets that every log has."""

from __future__ import annotations

import pytest

from millstream.core.errors import Code
from millstream.log.damage import RANGES_MAX, Cause, Damage, DamagedOffset


@pytest.fixture
def damage() -> Damage:
    return Damage("orders-0")


def spans(damage: Damage) -> list[tuple[int, int]]:
    return [(each.first, each.end) for each in damage.ranges]


def test_an_offset_inside_a_range_is_refused_with_the_next_readable_offset(damage: Damage) -> None:
    damage.add(10, 20, Cause.CHECKSUM, "a.log at 500")
    damage.check(9)
    damage.check(20)
    with pytest.raises(
        DamagedOffset, match=r"offsets 10 to 19 are damaged .checksum mismatch.; the next .* is 20"
    ) as at:
        damage.check(15)
    assert at.value.code is Code.CORRUPT_MESSAGE and at.value.range.end == 20


def test_a_range_is_logged_and_counted_once(damage: Damage, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        damage.add(10, 20, Cause.CHECKSUM, "a.log at 500")
    damage.add(12, 14, Cause.HEADER, "a.log at 510")
    assert len(caplog.records) == damage.found == 1
    assert "orders-0: offsets 10 to 19 are damaged (checksum mismatch: a.log at 500)" in caplog.text
    assert "readers continue at offset 20" in caplog.text


def test_ranges_that_overlap_or_touch_with_one_cause_become_one(damage: Damage) -> None:
    damage.add(10, 20, Cause.CHECKSUM, "")
    damage.add(30, 40, Cause.CHECKSUM, "")
    damage.add(40, 50, Cause.MISSING, "")
    assert spans(damage) == [(10, 20), (30, 40), (40, 50)]
    damage.add(20, 25, Cause.CHECKSUM, "")
    damage.add(45, 60, Cause.HEADER, "")
    assert spans(damage) == [(10, 25), (30, 40), (40, 60)]
    damage.add(5, 100, Cause.MISSING, "")
    assert spans(damage) == [(5, 100)]


def test_a_read_ends_before_the_next_range(damage: Damage) -> None:
    damage.add(10, 20, Cause.CHECKSUM, "")
    damage.add(30, 40, Cause.CHECKSUM, "")
    assert [next_.first if (next_ := damage.behind(offset)) else None for offset in (0, 10, 29, 30)] == [
        10, 30, 30, None,
    ]  # fmt: skip


def test_ranges_outside_the_log_are_forgotten_and_stay_counted(damage: Damage) -> None:
    for first in (0, 10, 20, 30):
        damage.add(first, first + 5, Cause.CHECKSUM, "")
    damage.forget(start=12, end=30)
    assert spans(damage) == [(10, 15), (20, 25)] and damage.found == 4


def test_the_number_of_ranges_has_a_bound_and_further_damage_is_still_logged(
    damage: Damage, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(RANGES_MAX + 3):
        damage.add(number * 10, number * 10 + 5, Cause.CHECKSUM, "")
    assert len(damage.ranges) == RANGES_MAX and damage.found == len(caplog.records) == RANGES_MAX + 3


def test_a_restored_place_is_readable_again(damage: Damage) -> None:
    damage.add(10, 20, Cause.MISSING, "")
    damage.heal(10, 20)
    damage.check(10)
    assert not damage.ranges


def test_of_a_range_that_is_sound_in_part_the_rest_stays(damage: Damage) -> None:
    damage.add(10, 40, Cause.CHECKSUM, "")
    damage.add(50, 60, Cause.HEADER, "")
    damage.heal(20, 30)
    assert spans(damage) == [(10, 20), (30, 40), (50, 60)]
    damage.heal(35, 55)
    assert spans(damage) == [(10, 20), (30, 35), (55, 60)]
