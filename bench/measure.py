"""What a measure is, and how rounds become one figure.

A figure from a shared machine means little alone: clock speed, neighbours and the disk's mood change from minute to
minute. So every measure has two sides, ours and a reference, run alternately (reference, ours, reference, ours, ...).
Each round gives one ratio from two neighbours in time; the median of the ratios is the result, their smallest and
largest the noise. A measure without a reference (memory) keeps its own unit.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from statistics import median

Side = Callable[[], float]
"""Measures once. What it returns is in the measure's unit."""


class Unavailable(Exception):
    """A part that this measure needs is not there; the run says so and goes on."""


@dataclass(frozen=True)
class Scale:
    """How much work a sample does. Quick samples are noisier, and good for telling whether something broke."""

    rounds: int
    quick: bool

    def of(self, full: int) -> int:
        return full // 4 if self.quick else full

    def seconds(self, full: float) -> float:
        return full / 3 if self.quick else full


Sides = Callable[[Scale], AbstractContextManager[tuple[Side | None, Side]]]
"""Opens what both sides share and gives them: the reference (or none) and ours."""


@dataclass(frozen=True)
class Measure:
    key: str
    title: str
    reference: str
    unit: str
    must: float | None
    """None: for information only, beside a row that has bounds."""
    aim: float | None
    lower_is_better: bool
    sides: Sides

    def reaches(self, value: float, bound: float | None) -> bool:
        if bound is None:
            return False
        return value <= bound if self.lower_is_better else value >= bound


@dataclass
class Result:
    measure: Measure
    reference: list[float] = field(default_factory=list)
    ours: list[float] = field(default_factory=list)
    missing: str = ""
    """Why there is no figure, where there is none."""

    @property
    def values(self) -> list[float]:
        """One value per round: the ratio, or what was measured where there is no reference."""
        if not self.reference:
            return self.ours
        return [ours / reference for reference, ours in zip(self.reference, self.ours, strict=True)]

    @property
    def value(self) -> float:
        return median(self.values)

    @property
    def verdict(self) -> str:
        if self.missing or not self.ours:
            return "not measured"
        if self.measure.must is None:
            return "for information"
        if self.measure.reaches(self.value, self.measure.aim):
            return "aim reached"
        return "must reached" if self.measure.reaches(self.value, self.measure.must) else "missed"


def run(measure: Measure, scale: Scale) -> Result:
    result = Result(measure)
    try:
        with measure.sides(scale) as (reference, ours):
            for _ in range(scale.rounds):
                if reference is not None:
                    result.reference.append(reference())
                result.ours.append(ours())
    except Unavailable as reason:
        return Result(measure, missing=str(reason))
    return result
