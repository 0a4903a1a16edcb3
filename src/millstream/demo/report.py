"""The output of the demo: a line for each step while it runs, and a table of records in and out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table

console = Console(highlight=False)


class Report:
    """The lines of the steps, and the table at the end."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, int, int]] = []

    @contextmanager
    def step(self, title: str) -> Iterator[Callable[[str], None]]:
        started = time.monotonic()
        outcome: list[str] = []
        with console.status(f"{title} ..."):
            yield outcome.append
        seconds = time.monotonic() - started
        console.print(f"  [green]✓[/] [bold]{title:<25}[/] [dim]{seconds:4.1f} s[/]  {''.join(outcome)}")

    def expect(self, what: str, put_in: int, came_out: int) -> None:
        self.rows.append((what, put_in, came_out))

    def show(self) -> bool:
        table = Table(title="\nRecords in and out", title_justify="left", title_style="bold")
        table.add_column("")
        for heading in ("in", "out", ""):
            table.add_column(heading, justify="right")
        for what, put_in, came_out in self.rows:
            same = put_in == came_out
            table.add_row(what, f"{put_in:,}", f"{came_out:,}", "[green]✓[/]" if same else "[red]✗[/]")
        console.print(table)
        return all(put_in == came_out for _, put_in, came_out in self.rows)
