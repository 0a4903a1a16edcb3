"""`python -m bench.against CHECKOUT`: did a change make a row slower?

    python -m bench.against ../before --only produce,fetch,requests
    python -m bench.against ../before --only flush --rounds 40 --quick

CHECKOUT is another work tree of Millstream that `make setup` has prepared, usually the commit before. Each round
starts both trees' servers and measures our side of a row twice in each, in the order old, new, new, old or the other
way round, so that both meet the same conditions. Each round has its own processes: the same two trees gave 0.93 with
one pair of processes and 1.07 with the next (`requests`, 15 rounds each), and rounds that share a pair would take that
for a change. The figure is the cost of this tree as a multiple of the other one's. The median over the rounds comes
with a confidence interval that assumes nothing about the noise: the true median lies between two order statistics with
at least 95 % probability.

A row is `slower` when the whole interval lies above the tolerance, `within` when the whole interval lies below it, and
`open` when the noise does not decide: run more rounds. Exits with 1 when a row is slower.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from math import comb
from pathlib import Path
from statistics import median
from typing import NamedTuple

from bench.__main__ import all_measures
from bench.measure import Measure

HERE = Path(__file__).resolve().parent
ROWS = "produce,produce-small,fetch,requests,round-trip,flush,queue,sqlite-append,postgres-append,postgres-read"
"""The hot path of every store."""
ROUNDS_MIN = 6
"""With fewer, no interval between two samples has 95 %."""
CONFIDENCE = 0.95

Sample = Callable[[], float]


class Comparison(NamedTuple):
    low: float
    middle: float
    high: float

    def verdict(self, tolerance: float) -> str:
        if self.low > 1 + tolerance:
            return "slower"
        return "within" if self.high <= 1 + tolerance else "open"


def compare(costs: list[float]) -> Comparison:
    """The median of the ratios, between the two order statistics that enclose it with 95 % probability."""
    ordered = sorted(costs)
    count = len(ordered)
    outside = 0.0
    cut = 0
    while True:
        outside += 2 * comb(count, cut) / 2**count
        if outside > 1 - CONFIDENCE:
            break
        cut += 1
    if cut == 0:
        raise ValueError(f"at least {ROUNDS_MIN} rounds are needed for a confidence interval, not {count}")
    return Comparison(ordered[cut - 1], median(ordered), ordered[count - cut])


@contextmanager
def sampling(checkout: Path, key: str, quick: bool) -> Iterator[Sample]:
    """A process in a checkout that measures a row whenever it is asked."""
    command = [checkout / ".venv/bin/python", "-P", HERE / "sampler.py", key, "quick" if quick else "full"]
    with subprocess.Popen(
        command,
        cwd=checkout,
        env={"PATH": "/usr/local/bin:/usr/bin:/bin", "PYTHONPATH": str(checkout)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None

        def answer(word: str) -> str:
            for line in process.stdout or ():
                if line.startswith(word):
                    return line.removeprefix(word)
            raise RuntimeError(f"{checkout}: {key} could not be measured")

        def sample() -> float:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
            return float(answer("sample "))

        answer("ready")
        yield sample
        process.stdin.close()


def costs_of(measure: Measure, checkouts: tuple[Path, Path], rounds: int, quick: bool) -> list[float]:
    """Per round, what the new tree costs as a multiple of the old one: above 1 is slower."""
    ratios = []
    for _ in range(rounds):
        with ExitStack() as stack:
            old, new = (stack.enter_context(sampling(checkout, measure.key, quick)) for checkout in checkouts)
            first, second = (old, new) if random.random() < 0.5 else (new, old)
            # There and back: a machine that slows down evenly during a round costs both trees the same.
            turns = [(one, one()) for one in (first, second, second, first)]
        before, after = (sum(value for one, value in turns if one is side) for side in (old, new))
        ratios.append(after / before if measure.lower_is_better else before / after)
    return ratios


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.against", description="Compare this checkout with another.")
    parser.add_argument("checkout", type=Path, help="another work tree, prepared by `make setup`")
    parser.add_argument("--only", default=ROWS, help=f"comma-separated rows (default: {ROWS})")
    parser.add_argument("--rounds", type=int, default=20, help=f"at least {ROUNDS_MIN}")
    parser.add_argument("--tolerance", type=float, default=5.0, help="percent (default: 5)")
    parser.add_argument("--quick", action="store_true", help="smaller samples: noisier, so ask for more rounds")
    options = parser.parse_args(arguments)
    options.checkout = options.checkout.resolve()
    if not (options.checkout / ".venv/bin/python").exists():
        parser.error(f"{options.checkout} has no .venv: run `make setup` there first")
    if options.rounds < ROUNDS_MIN:
        parser.error(f"--rounds {options.rounds} gives no confidence interval: at least {ROUNDS_MIN}")
    measures = {measure.key: measure for measure in all_measures()}
    keys = [key.strip() for key in options.only.split(",") if key.strip()]
    if unknown := [key for key in keys if key not in measures]:
        parser.error(f"no such row: {', '.join(unknown)}; there are {', '.join(measures)}")
    options.measures = [measures[key] for key in keys]
    return options


def main() -> int:
    options = parse()
    slower = False
    for measure in options.measures:
        checkouts = (options.checkout, HERE.parent)
        result = compare(costs_of(measure, checkouts, options.rounds, options.quick))
        verdict = result.verdict(options.tolerance / 100)
        slower = slower or verdict == "slower"
        span = f"{result.low:.3f} to {result.high:.3f}"
        print(f"{measure.key:>15}  cost {result.middle:.3f} ({span}, {options.rounds} rounds)  {verdict}", flush=True)
    return int(slower)


if __name__ == "__main__":
    sys.exit(main())
