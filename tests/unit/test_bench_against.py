"""How two versions are compared: an interval that holds the true median, and a verdict that admits doubt."""

from __future__ import annotations

import random

import pytest

from bench.against import Comparison, compare


def test_the_interval_of_twenty_rounds_runs_from_the_sixth_to_the_fifteenth() -> None:
    values = [float(value) for value in range(1, 21)]
    random.shuffle(values)
    assert compare(values) == Comparison(6.0, 10.5, 15.0)


def test_six_rounds_need_all_of_them_and_fewer_are_refused() -> None:
    assert compare([1.0, 6.0, 3.0, 2.0, 5.0, 4.0]) == Comparison(1.0, 3.5, 6.0)
    with pytest.raises(ValueError, match="at least 6 rounds"):
        compare([1.0] * 5)


def test_the_interval_holds_the_true_median_in_at_least_95_of_100_experiments() -> None:
    dice = random.Random(20)
    held = 0
    for _ in range(2000):
        result = compare([dice.lognormvariate(0.0, 0.4) for _ in range(20)])  # whose median is 1
        held += result.low <= 1.0 <= result.high
    assert held / 2000 >= 0.945


@pytest.mark.parametrize(
    ("result", "verdict"),
    [
        (Comparison(0.97, 1.0, 1.04), "within"),
        (Comparison(1.01, 1.03, 1.09), "open"),
        (Comparison(1.06, 1.1, 1.2), "slower"),
    ],
)
def test_a_row_is_judged_by_its_whole_interval(result: Comparison, verdict: str) -> None:
    assert result.verdict(0.05) == verdict
