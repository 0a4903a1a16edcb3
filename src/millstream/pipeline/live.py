"""The display of a running pipeline: a live table on a terminal, a JSON line per batch elsewhere.

Both sum their reports (`Tally`), so that the final numbers are those of the whole run.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, TextIO

from millstream.pipeline.spec import DEAD_LETTERS

if TYPE_CHECKING:
    from rich.console import Console, Group

    from millstream.pipeline.run import BatchReport

DRAWN_PER_SECOND = 4
PARTITIONS_SHOWN_MAX = 6
"""The partitions with the most lag; a topic may have hundreds."""


@dataclass
class SinkTally:
    batches: int = 0
    rows: int = 0
    late: int = 0
    last: BatchReport | None = None

    @property
    def lag(self) -> int | None:
        return sum(self.last.lag.values()) if self.last is not None else None


@dataclass
class Tally:
    """The reports so far, by sink."""

    pipeline: str
    sinks: dict[str, SinkTally]
    began: float = field(default_factory=time.monotonic)

    def take(self, report: BatchReport) -> None:
        sink = self.sinks.setdefault(report.sink, SinkTally())
        sink.batches += 1
        sink.rows += report.rows
        sink.late += sum(report.late.values())
        sink.last = report

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def dead_letters(self) -> int:
        return self.sinks[DEAD_LETTERS].rows if DEAD_LETTERS in self.sinks else 0


class View(Protocol):
    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def say(self, state: str) -> None:
        """The state as a whole: starting, running, stopping."""
        ...

    def take(self, report: BatchReport) -> None: ...

    def sum_up(self) -> None:
        """The run is over, without errors."""
        ...


def view_for(pipeline: str, sinks: Iterable[str]) -> View:
    tally = Tally(pipeline, {name: SinkTally() for name in sinks})
    return LiveView(tally) if sys.stdout.isatty() else JsonLines(tally, sys.stdout)


class JsonLines:
    def __init__(self, tally: Tally, out: TextIO) -> None:
        self._tally = tally
        self._out = out

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def say(self, state: str) -> None:
        pass

    def take(self, report: BatchReport) -> None:
        self._tally.take(report)
        self._write(
            {
                "pipeline": self._tally.pipeline,
                "sink": report.sink,
                "batch": report.batch,
                "rows": report.rows,
                "rows_per_second": round(report.rows_per_second, 1),
                "seconds": round(report.seconds, 3),
                "lag": report.lag,
                "rows_dropped_by_watermark": report.late,
            }
        )

    def sum_up(self) -> None:
        sinks = {
            name: {"batches": sink.batches, "rows": sink.rows, "rows_dropped_by_watermark": sink.late}
            for name, sink in self._tally.sinks.items()
        }
        self._write({"pipeline": self._tally.pipeline, "seconds": round(self._tally.seconds, 3), "total": sinks})

    def _write(self, line: dict[str, Any]) -> None:
        print(json.dumps(line, ensure_ascii=False), file=self._out, flush=True)


class LiveView:
    def __init__(self, tally: Tally, console: Console | None = None) -> None:
        from rich.console import Console
        from rich.live import Live

        self._tally = tally
        self._state = "starting"
        self._live = Live(
            console=console or Console(highlight=False),
            get_renderable=self.render,
            refresh_per_second=DRAWN_PER_SECOND,
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._state = "failed" if issubclass(kind, Exception) else "interrupted"
        self._live.stop()

    def say(self, state: str) -> None:
        self._state = state

    def take(self, report: BatchReport) -> None:
        self._tally.take(report)

    def sum_up(self) -> None:
        """The last table stays on the screen, with the totals."""
        self._state = "done"

    def render(self) -> Group:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        tally = self._tally
        head = Text.assemble((tally.pipeline, "bold"), f"  {self._state}  up {_clock(tally.seconds)}")
        if tally.dead_letters:
            head.append(f"  {tally.dead_letters:,} dead letter{'s' * (tally.dead_letters != 1)}", "yellow")
        table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
        for heading in ("SINK", "BATCH", "ROWS", "ROWS/S", "BATCH TIME", "LATE", "LAG", "LARGEST LAG"):
            table.add_column(heading, justify="left" if heading in ("SINK", "LARGEST LAG") else "right")
        for name, sink in tally.sinks.items():
            table.add_row(*(Text(cell) for cell in _cells(name, sink)))
        return Group(head, table)


def _cells(name: str, sink: SinkTally) -> tuple[str, ...]:
    last = sink.last
    if last is None:
        return name, "-", "0", "-", "-", "-", "-", ""
    return (
        name,
        str(last.batch),
        f"{sink.rows:,}",
        f"{last.rows_per_second:,.0f}",
        f"{last.seconds:.1f} s",
        f"{sink.late:,}" if last.late else "-",
        f"{sink.lag:,}",
        _behind(last.lag),
    )


def _behind(lag: dict[str, int]) -> str:
    worst = sorted(((count, place) for place, count in lag.items() if count), key=lambda each: (-each[0], each[1]))
    shown = ", ".join(f"{place} {count:,}" for count, place in worst[:PARTITIONS_SHOWN_MAX])
    more = len(worst) - PARTITIONS_SHOWN_MAX
    return f"{shown}, {more} more" if more > 0 else shown


def _clock(seconds: float) -> str:
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
