"""`python -m bench`: every measurement, as ratios to references of the same run.

    python -m bench                                  all rows, three rounds, a quarter of an hour on two cores
    python -m bench --only produce,fetch --rounds 5
    python -m bench --quick                          smaller samples, rows with bounds only

Exits with 1 when a row misses what it must reach or could not be measured.
"""

from __future__ import annotations

import argparse
import sys
import time

import psutil  # type: ignore[import-untyped]
from rich.console import Console
from rich.markup import escape

from bench import (
    comet,
    decode,
    embedded,
    fetch,
    flowmq,
    flume,
    flush,
    luxun,
    memory,
    peer,
    postgres_store,
    produce,
    queue,
    report,
    small_requests,
    spark_read,
    spark_session,
    spark_stream,
    spark_write,
    sqlite_store,
)
from bench.measure import Measure, Result, Scale, run

MODULES = (
    produce,
    fetch,
    small_requests,
    flush,
    peer,
    queue,
    flowmq,
    flume,
    luxun,
    comet,
    decode,
    embedded,
    memory,
    sqlite_store,
    postgres_store,
    spark_read,
    spark_stream,
    spark_write,
)
# Spark last: its session stays for all of its rows, and a JVM beside the others would be noise.
ROUNDS_MIN = 3
BUSY_PERCENT_MAX = 10.0
LOG_WIDTH = 160  # where there is no terminal to ask


def all_measures() -> list[Measure]:
    return [measure for module in MODULES for measure in module.MEASURES]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    keys = ", ".join(measure.key for measure in all_measures())
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure Millstream against its references.")
    parser.add_argument("--only", default="", help=f"comma-separated rows: {keys}")
    parser.add_argument("--rounds", type=int, default=ROUNDS_MIN, help=f"at least {ROUNDS_MIN}")
    parser.add_argument("--quick", action="store_true", help="smaller samples; noisier")
    options = parser.parse_args(arguments)
    options.only = {key.strip() for key in options.only.split(",") if key.strip()}
    unknown = options.only - {measure.key for measure in all_measures()}
    if unknown:
        parser.error(f"no such row: {', '.join(sorted(unknown))}; there are {keys}")
    if options.rounds < ROUNDS_MIN:
        parser.error(f"a median of fewer than {ROUNDS_MIN} rounds says nothing about noise")
    return options


def is_chosen(measure: Measure, only: set[str], quick: bool) -> bool:
    """Rows for information are left out of a quick run, unless they are asked for."""
    if only:
        return measure.key in only
    return measure.must is not None or not quick


def measure_one(measure: Measure, scale: Scale, console: Console) -> Result:
    start = time.monotonic()
    with console.status(measure.title):
        try:
            result = run(measure, scale)
        except Exception as error:  # one broken row must not cost the others; the table and the exit code say so
            result = Result(measure, missing=f"{type(error).__name__}: {error}")
    seconds = time.monotonic() - start
    console.print(f"{measure.key:>15}  {escape(report.line(result))}  [dim]({seconds:.0f} s)[/]", highlight=False)
    return result


def main() -> int:
    options = parse()
    console = Console() if sys.stdout.isatty() else Console(width=LOG_WIDTH)
    scale = Scale(options.rounds, options.quick)
    if (busy := psutil.cpu_percent(1.0)) > BUSY_PERCENT_MAX:
        console.print(
            f"[yellow]other programs use {busy:.0f} % of this machine: throughput and round trips will be off[/]"
        )
    chosen = [measure for measure in all_measures() if is_chosen(measure, options.only, options.quick)]
    try:
        results = [measure_one(measure, scale, console) for measure in chosen]
    finally:
        spark_session.close()
    report.write(results, scale, console)
    return int(any(result.verdict in ("missed", "not measured") for result in results))


if __name__ == "__main__":
    sys.exit(main())
