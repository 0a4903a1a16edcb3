"""`millstream log verify`: the broker checks its stored data now, and reports damage."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any

import typer

from millstream.admin import verify as admin
from millstream.cli.connection import DEFAULT_BROKER, BrokerOption, Connection
from millstream.cli.output import Format, OutputOption, show_json, show_table
from millstream.cli.progress import Progress

MB = 1_000_000


def verify(
    topic: Annotated[str | None, typer.Argument(show_default="every topic")] = None,
    broker: BrokerOption = DEFAULT_BROKER,
    output: OutputOption = Format.TABLE,
) -> None:
    """Check every stored batch against its checksum. Exits with 1 where something is damaged."""
    connection = Connection(broker)
    started = time.monotonic()
    with Progress(topic or "every topic", None, unit="MB") as progress:

        def on_progress(report: dict[str, Any]) -> None:
            done, seconds = report["bytes_done"], time.monotonic() - started
            progress.update(done // MB, done, seconds, report["bytes_total"])

        report = admin.verify(connection, topic, on_progress=on_progress)
    _show(report, output)
    if report["damaged"] or report["unread"]:
        raise typer.Exit(1)


def _show(report: dict[str, Any], output: Format) -> None:
    if output is Format.JSON:
        show_json(report)
        return
    partitions = report["partitions_done"]
    print(f"Verified {report['bytes_done']:,} bytes in {partitions} partition{'s' * (partitions != 1)}")
    for sentence in report["unread"]:
        print(f"millstream: {sentence}", file=sys.stderr)
    if not report["damaged"]:
        print("Nothing is damaged")
        return
    columns = {key: key.upper() for key in ("topic", "partition", "first", "end", "cause", "where")}
    show_table(columns, report["damaged"], "")
