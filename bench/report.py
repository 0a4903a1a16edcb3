"""Results as a table on the terminal, a JSON file and a chart."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.measure import Measure, Result, Scale

RESULTS = Path(__file__).parent / "results"
COLOURS = {
    "aim reached": "green",
    "must reached": "yellow",
    "missed": "red",
    "not measured": "magenta",
    "for information": "dim",
}


def figure(value: float) -> str:
    """Three digits that mean something, whatever the size."""
    if value >= 1000:
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def bound(measure: Measure, value: float | None) -> str:
    if value is None:
        return ""
    unit = "" if measure.reference else f" {measure.unit}"
    return f"{'≤' if measure.lower_is_better else '≥'} {value:g}{unit}"


def line(result: Result) -> str:
    """What one row measured, in its own unit: the ratio alone would hide a reference that went wrong."""
    if not result.ours:
        return result.missing
    unit, ours = result.measure.unit, figure(median(result.ours))
    if not result.reference:
        return f"{ours} {unit}"
    return f"{ours} {unit} to {figure(median(result.reference))}: {figure(result.value)}"


def table(results: list[Result], scale: Scale) -> Table:
    kind = "quick, " if scale.quick else ""
    out = Table(title=f"Millstream against its references ({kind}{scale.rounds} rounds, median)", title_justify="left")
    for heading in ("measure", "reference", "ratio", "noise", "must reach", "aim", "verdict"):
        right = heading in ("ratio", "noise")
        out.add_column(heading, justify="right" if right else "left", no_wrap=heading not in ("measure", "reference"))
    for result in results:
        measure, verdict = result.measure, result.verdict
        value, noise = "-", ""
        if result.ours:
            value = figure(result.value) + ("" if measure.reference else f" {measure.unit}")
            noise = f"{figure(min(result.values))}..{figure(max(result.values))}"
        colour = COLOURS[verdict]
        row = (measure.title, measure.reference, f"[bold {colour}]{value}[/]", noise)
        out.add_row(*row, bound(measure, measure.must), bound(measure, measure.aim), f"[{colour}]{verdict}[/]")
    return out


def _commit() -> str:
    here = Path(__file__).parent
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def as_json(results: list[Result], scale: Scale) -> dict[str, Any]:
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "machine": {
            "cpus": os.cpu_count(),
            "kernel": platform.release(),
            "python": platform.python_version(),
            "load_average": os.getloadavg(),
        },
        "rounds": scale.rounds,
        "quick": scale.quick,
        "results": [
            {
                "key": result.measure.key,
                "measure": result.measure.title,
                "reference": result.measure.reference or None,
                "unit": result.measure.unit,
                "value": result.value if result.ours else None,
                "min": min(result.values, default=None),
                "max": max(result.values, default=None),
                "must": result.measure.must,
                "aim": result.measure.aim,
                "lower_is_better": result.measure.lower_is_better,
                "verdict": result.verdict,
                "missing": result.missing or None,
                "samples": {"reference": result.reference, "ours": result.ours},
            }
            for result in results
        ],
    }


def _score(measure: Measure, value: float) -> float:
    """How far past its bound a value is, so that all rows share one axis: above 1 is better than `must`."""
    assert measure.must is not None
    return measure.must / value if measure.lower_is_better else value / measure.must


def draw(results: list[Result], path: Path) -> bool:
    """One bar a row, in multiples of what it must reach. False where matplotlib is not installed."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot, ticker
    except ImportError:
        return False
    shown = [result for result in reversed(results) if result.ours and result.measure.must is not None]
    if not shown:
        return False
    palette = {"aim reached": "#2e7d32", "must reached": "#f9a825", "missed": "#c62828"}
    figure_, axes = pyplot.subplots(figsize=(11, 1.2 + 0.6 * len(shown)), layout="constrained")
    for row, result in enumerate(shown):
        measure = result.measure
        scores = [_score(measure, value) for value in result.values]
        middle = _score(measure, result.value)
        errors = [[max(0.0, middle - min(scores))], [max(0.0, max(scores) - middle)]]
        axes.barh(
            row, middle - 1, left=1, xerr=errors, color=palette[result.verdict], height=0.6, capsize=4, ecolor="#444444"
        )
        assert measure.aim is not None
        aim = _score(measure, measure.aim)
        axes.plot([aim, aim], [row - 0.36, row + 0.36], color="black", linewidth=2)
        unit = "" if measure.reference else f" {measure.unit}"
        label = (
            f" {figure(result.value)}{unit}  (must {bound(measure, measure.must)}, aim {bound(measure, measure.aim)})"
        )
        axes.text(max([middle, aim, *scores]) * 1.03, row, label, va="center", fontsize=8)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axes.xaxis.set_minor_formatter(ticker.NullFormatter())
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.axvline(1, color="black", linestyle=":", linewidth=1)
    axes.set_yticks(range(len(shown)), [result.measure.title.replace(", ", ",\n", 1) for result in shown], fontsize=8)
    axes.set_xlabel("times better than it must be (dotted: must, bar across: aim, whiskers: all rounds)")
    axes.margins(x=0.35)
    axes.spines[["top", "right"]].set_visible(False)
    figure_.savefig(path, dpi=130)
    pyplot.close(figure_)
    return True


def write(results: list[Result], scale: Scale, console: Console) -> None:
    RESULTS.mkdir(exist_ok=True)
    stem = RESULTS / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    json_path, chart_path = stem.with_suffix(".json"), stem.with_suffix(".png")
    json_path.write_text(json.dumps(as_json(results, scale), indent=2) + "\n")
    console.print(table(results, scale))
    console.print(f"figures: {json_path}", highlight=False, soft_wrap=True)
    if draw(results, chart_path):
        console.print(f"chart:   {chart_path}", highlight=False, soft_wrap=True)
