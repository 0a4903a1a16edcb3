"""The format of lists and descriptions: a table for people, JSON for programs."""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer


class Format(enum.StrEnum):
    TABLE = "table"
    JSON = "json"


OutputOption = Annotated[Format, typer.Option("--output", "-o", help="How to show it.")]


def show_json(value: object) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def show_table(columns: Mapping[str, str], rows: Sequence[Mapping[str, object]], empty: str) -> None:
    """`columns` maps a row's keys to headings; `empty` is printed if there is no row, and hints at the next step."""
    if not rows:
        print(empty, file=sys.stderr)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for key, heading in columns.items():
        numeric = all(isinstance(row[key], int) or row[key] is None for row in rows)
        table.add_column(heading, justify="right" if numeric else "left", no_wrap=not sys.stdout.isatty())
    for row in rows:
        # Text, not markup: Rich would interpret a topic named `[red]`.
        table.add_row(*(Text(_cell(row[key])) for key in columns))
    # Without a terminal there is no width limit: truncated names would break scripts.
    console = Console(width=None if sys.stdout.isatty() else 10_000, highlight=False)
    console.print(table)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
