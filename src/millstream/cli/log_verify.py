"""`millstream log verify`: the broker checks its stored data now, and reports damage.

The broker reads, because only it can access its store; this command polls and shows its progress.
"""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any
from urllib.parse import quote

import typer

from millstream.cli import pages
from millstream.cli.connection import DEFAULT_BROKER, BrokerOption, Connection
from millstream.cli.failure import Failure
from millstream.cli.output import Format, OutputOption, show_json, show_table
from millstream.cli.progress import Progress

POLL_SECONDS = 0.2
MB = 1_000_000


def verify(
    topic: Annotated[str | None, typer.Argument(show_default="every topic")] = None,
    broker: BrokerOption = DEFAULT_BROKER,
    output: OutputOption = Format.TABLE,
) -> None:
    """Check every stored batch against its checksum. Exits with 1 where something is damaged."""
    connection = Connection(broker)
    if topic is not None:
        connection.topic(topic)
    node = min(connection.metadata().brokers)
    started = time.monotonic()
    report = _start(connection, node, topic)
    with Progress(topic or "every topic", report["bytes_total"], unit="MB") as progress:
        while report["state"] == "running":
            time.sleep(POLL_SECONDS)
            report = pages.ask(node, "verify", connection)
            progress.update(report["bytes_done"] // MB, report["bytes_done"], time.monotonic() - started)
    _show(report, output)
    if report["damaged"] or report["unread"]:
        raise typer.Exit(1)


def _start(connection: Connection, node: int, topic: str | None) -> dict[str, Any]:
    page = "verify" if topic is None else f"verify?topic={quote(topic)}"
    try:
        found = pages.ask(node, page, connection, method="POST")
    except pages.Refusal as refusal:
        if refusal.status != 409:
            raise
        raise Failure("the broker verifies already; try again when it is done") from None
    assert isinstance(found, dict)
    return found


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
