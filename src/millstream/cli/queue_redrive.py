"""`millstream queue redrive`: sends dead letters back to their original topics."""

from __future__ import annotations

import re
import time
from typing import Annotated

import typer

from millstream.admin import redrive as admin
from millstream.cli.connection import DEFAULT_BROKER, BrokerOption, Connection
from millstream.cli.moment import past_ms
from millstream.cli.output import Format, OutputOption, show_json, show_table
from millstream.cli.progress import Progress


def redrive(
    from_: Annotated[str, typer.Option("--from", metavar="TOPIC", help="The dead-letter topic.")] = admin.DEAD_LETTERS,
    topic: Annotated[str | None, typer.Option(help="Only dead letters from this topic.")] = None,
    group: Annotated[str | None, typer.Option("--group", "-g", help="Only dead letters of this queue.")] = None,
    reason: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Only dead letters whose reason contains this text.")
    ] = None,
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help="Only records that died since: ISO, @ms, or 2h for 2 hours ago.")
    ] = None,
    until: Annotated[str | None, typer.Option(metavar="TIME", help="Only records that died before this time.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", "-n", min=1, help="At most this many.")] = None,
    rate: Annotated[
        str | None, typer.Option(metavar="N/s", help="At most this many per second.", show_default="no limit")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be sent without sending it.")] = False,
    broker: BrokerOption = DEFAULT_BROKER,
    output: OutputOption = Format.TABLE,
) -> None:
    """Send dead letters back to the topics they came from; each of them once."""
    now_ms = int(time.time() * 1000)
    selection = admin.Selection(
        topic,
        group,
        reason,
        None if since is None else past_ms(since, "--since", now_ms),
        None if until is None else past_ms(until, "--until", now_ms),
    )
    per_second = None if rate is None else parse_rate(rate)
    try:
        with Progress(from_, None, wanted=not dry_run) as progress:
            report = admin.redrive(
                Connection(broker),
                selection,
                dead_letters=from_,
                limit=limit,
                per_second=per_second,
                dry_run=dry_run,
                on_progress=lambda each: progress.update(each.sent, each.read, each.seconds, each.total),
            )
    except admin.RedriveFailed as failure:
        _show(failure.report, dry_run, output)
        raise
    _show(report, dry_run, output)


def parse_rate(text: str) -> float:
    match = re.fullmatch(r"([0-9]{1,7}(?:\.[0-9]{1,3})?)(?:/s)?", text)
    if match is None or float(match[1]) <= 0:
        raise typer.BadParameter(f"--rate {text} is not a number of records a second, as in 50/s")
    return float(match[1])


def _show(report: admin.Report, dry_run: bool, output: Format) -> None:
    rows = [
        {"topic": topic, "group": group, "reason": reason, "records": count}
        for (topic, group, reason), count in sorted(report.selected.items())
    ]
    skipped = {reason: count for reason, count in report.skipped.items() if count}
    if output is Format.JSON:
        show_json({"dry_run": dry_run, "sent": report.sent, "letters": rows, "skipped": skipped})
        return
    if rows:
        show_table({key: key.upper() for key in ("topic", "group", "reason", "records")}, rows, "")
        print()
    if skipped:
        print("skipped: " + ", ".join(f"{count:,} {reason}" for reason, count in skipped.items()))
    if dry_run:
        print(f"{sum(report.selected.values()):,} would be sent back (--dry-run)")
    else:
        print(f"{report.sent:,} sent back")
