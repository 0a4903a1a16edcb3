"""`millstream queue`: list, describe, create, set, seek, purge, peek, delete; and consume and redrive.

A queue is a group whose members share a topic record by record. Changes go through Kafka's protocol, under its rules:
a queue with members is neither moved nor deleted. That protocol has no fields for a queue's contents (available,
leased, waiting, done, dead, and since when), so `list`, `describe` and `peek` read them from the broker's page
`/queues`: all figures are from one place and of one moment, and add up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Any

import typer

from millstream.admin import pages, queues
from millstream.admin.failure import Failure
from millstream.admin.queues import Begin
from millstream.admin.seek import purge as admin_purge
from millstream.admin.seek import seek_queue
from millstream.cli import queue_consume, queue_peek, queue_redrive
from millstream.cli.connection import DEFAULT_BROKER, BrokerOption, Connection
from millstream.cli.output import Format, OutputOption, show_json, show_table
from millstream.cli.position import DryRunOption, PartitionOption, ToOption, TopicOption, parse_position, show_moves
from millstream.cli.setting import ConfigOption, UnsetOption, alter_settings, pairs

app = typer.Typer(help="Run jobs from topics; inspect queues and their dead letters.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="GROUP", show_default=False)]
COUNTS = ("available", "leased", "waiting", "done", "dead")


@app.command("list")
def list_queues(broker: BrokerOption = DEFAULT_BROKER, output: OutputOption = Format.TABLE) -> None:
    """List the queues and their record counts."""
    rows = [_summary(queue) for queue in pages.queues(Connection(broker))]
    rows.sort(key=lambda row: str(row["group"]))
    if output is Format.JSON:
        show_json(rows)
        return
    columns = {key: key.upper() for key in ("group", "members", "topics", *COUNTS, "oldest")}
    show_table(columns, [_readable(row) for row in rows], "no queues yet; `millstream queue consume` creates one")


@app.command()
def describe(name: Name, broker: BrokerOption = DEFAULT_BROKER, output: OutputOption = Format.TABLE) -> None:
    """Show a queue's record counts per partition, its members and its settings."""
    connection = Connection(broker)
    queue = queues.figures(connection, name)
    settings = queues.settings(connection, name)
    summary = _summary(queue)
    partitions = [
        {
            **{key: row[key] for key in ("topic", "partition", *COUNTS)},
            "redeliveries": row["redelivered"],
            "oldest_ms": row["age_ms"] if row["available"] else None,
            "low": row["low"],
            "end": row["end"],
        }
        for row in queue["partitions"]
    ]
    if output is Format.JSON:
        show_json({**summary, "partitions": partitions, "workers": queue["members"], "settings": settings})
        return
    said = ", ".join(f"{summary[key]} {key}" for key in COUNTS)
    print(f"{name} has {summary['members']} members: {said}\n")
    columns = {key: key.upper() for key in ("topic", "partition", *COUNTS, "redeliveries", "oldest", "low", "end")}
    show_table(columns, [_readable(row) for row in partitions], f"{name} has not read any topic yet")
    if queue["members"]:
        print()
        show_table({"member": "MEMBER", "leased": "LEASED"}, queue["members"], "")
    print()
    shown = [{"name": key, "value": value} for key, value in settings.items()]
    show_table({"name": "SETTING", "value": "VALUE"}, shown, "every setting is at its default")


@app.command()
def create(
    name: Name,
    from_: Annotated[Begin, typer.Option("--from", help="Where it starts in a topic.")] = Begin.START,
    config: ConfigOption = None,
    broker: BrokerOption = DEFAULT_BROKER,
) -> None:
    """Create a queue. Unlike a share group of Kafka, it starts at the beginning of a topic by default."""
    settings = pairs(config)
    queues.create(Connection(broker), name, from_, settings)
    print(f"Created {name}")


@app.command("set")
def set_(
    name: Name,
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE...", help="Such as share.delivery.count.limit=5.")
    ] = None,
    unset: UnsetOption = None,
    broker: BrokerOption = DEFAULT_BROKER,
) -> None:
    """Change a queue's settings; they take effect at once."""
    changes = pairs(settings)
    if not changes and not unset:
        raise typer.BadParameter("nothing to change: give KEY=VALUE or --unset KEY")
    connection = Connection(broker)
    from confluent_kafka.admin import ResourceType

    queues.require(connection, name)
    alter_settings(connection, ResourceType.GROUP, name, changes, unset or [])


@app.command()
def seek(
    name: Name,
    topic: TopicOption,
    to: ToOption,
    partition: PartitionOption = None,
    dry_run: DryRunOption = False,
    broker: BrokerOption = DEFAULT_BROKER,
    output: OutputOption = Format.TABLE,
) -> None:
    """Move a queue to a position and delete its record states. The queue must have no members."""
    target = parse_position(to)
    moves = seek_queue(Connection(broker), name, topic, target, partition=partition, dry_run=dry_run)
    show_moves(name, moves, dry_run, output)


@app.command()
def purge(
    topic: Annotated[str, typer.Argument(show_default=False)],
    group: Annotated[str, typer.Option("--group", "-g", help="The queue to empty.", show_default=False)],
    yes: Annotated[bool, typer.Option("--yes", help="Confirm: the current records will not be delivered.")] = False,
    broker: BrokerOption = DEFAULT_BROKER,
) -> None:
    """Mark all current records of a topic as done, including delayed ones. Other groups are not affected."""
    open_ = admin_purge(Connection(broker), group, topic, dry_run=not yes)
    if not yes:
        raise Failure(f"up to {open_:,} records of {topic} would never be delivered to {group}; add --yes to do it")
    print(f"Purged {topic} for {group}: skipped {open_:,} records")


@app.command()
def delete(
    groups: Annotated[list[str], typer.Argument(metavar="GROUP...", show_default=False)],
    broker: BrokerOption = DEFAULT_BROKER,
) -> None:
    """Delete queues and their record states. The records stay in their topics."""
    for name in queues.delete(Connection(broker), groups):
        print(f"Deleted {name}")


app.command("peek")(queue_peek.peek)
app.command("consume")(queue_consume.consume)
app.command("redrive")(queue_redrive.redrive)


def _summary(queue: dict[str, Any]) -> dict[str, Any]:
    partitions = queue["partitions"]
    total: Counter[str] = Counter()
    for row in partitions:
        total.update({key: row[key] for key in COUNTS})
    return {
        "group": queue["group"],
        "members": queue["member_count"],
        "topics": sorted({row["topic"] for row in partitions}),
        **{key: total[key] for key in COUNTS},
        "oldest_ms": _oldest(partitions),
    }


def _oldest(partitions: Iterable[dict[str, Any]]) -> int | None:
    return max((row["age_ms"] for row in partitions if row["available"]), default=None)


def _readable(row: dict[str, Any]) -> dict[str, Any]:
    topics = ", ".join(row["topics"]) if "topics" in row else None
    return {**row, "topics": topics, "oldest": _age(row["oldest_ms"])}


def _age(age_ms: int | None) -> str | None:
    """`90 ms`, `12 s`, `5 min`, `7 h`, `3 d`."""
    if age_ms is None:
        return None
    for unit, length in (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1000)):
        if age_ms >= 2 * length:
            return f"{age_ms // length} {unit}"
    return f"{age_ms} ms"
