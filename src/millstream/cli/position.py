"""Positions in partitions: as an argument of a command, and the moves to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from millstream.admin.failure import Failure
from millstream.admin.position import Position
from millstream.cli.output import Format, show_json, show_table

if TYPE_CHECKING:
    from millstream.admin.seek import Move


TopicOption = Annotated[str, typer.Option(metavar="TOPIC", help="The topic whose offsets to move.", show_default=False)]
ToOption = Annotated[
    str,
    typer.Option(metavar="POSITION", help="start, end, an offset, a time (ISO or @ms), or +N or -N records from here."),
]
PartitionOption = Annotated[int | None, typer.Option(min=0, help="Only this partition.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Show what would change without changing it.")]


def parse_position(text: str) -> Position:
    try:
        return Position.parse(text)
    except Failure as error:
        raise typer.BadParameter(str(error)) from None


def show_moves(group: str, moves: Sequence[Move], dry_run: bool, output: Format) -> None:
    rows = [dict(zip(("topic", "partition", "from", "to"), move, strict=True)) for move in moves]
    if output is Format.JSON:
        show_json({"group": group, "dry_run": dry_run, "partitions": rows})
        return
    show_table({key: key.upper() for key in ("topic", "partition", "from", "to")}, rows, "")
    if dry_run:
        print("\nnothing was changed (--dry-run)")
