"""`millstream group`: list, describe, seek, delete."""

from __future__ import annotations

from typing import Annotated

import typer

from millstream.admin import groups
from millstream.admin.seek import seek_group
from millstream.admin.share_groups import ShareGroups
from millstream.cli.connection import DEFAULT_BROKER, BrokerOption, Connection
from millstream.cli.output import Format, OutputOption, show_json, show_table
from millstream.cli.position import DryRunOption, PartitionOption, ToOption, TopicOption, parse_position, show_moves

app = typer.Typer(help="List, describe, move and delete consumer groups and share groups.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(show_default=False)]


@app.command("list")
def list_groups(broker: BrokerOption = DEFAULT_BROKER, output: OutputOption = Format.TABLE) -> None:
    """List the groups and their states."""
    rows = groups.list_groups(Connection(broker))
    if output is Format.JSON:
        show_json(rows)
    else:
        columns = {"group": "GROUP", "state": "STATE", "protocol": "PROTOCOL"}
        show_table(columns, rows, "no groups yet; `millstream consume TOPIC --group NAME` creates one")


@app.command()
def describe(name: Name, broker: BrokerOption = DEFAULT_BROKER, output: OutputOption = Format.TABLE) -> None:
    """Show how far a group is in each partition, and its members."""
    connection = Connection(broker)
    shared = ShareGroups(connection).group(name)
    group = groups.describe(connection, name) if shared is None else shared.describe()
    if output is Format.JSON:
        show_json(group)
        return
    partitions, members = group["partitions"], group["members"]
    if shared is None:
        print(f"{name} is {group['state']}, {len(members)} members, {group['lag']} records behind\n")
        headings = {key: key.upper() for key in ("topic", "partition", "committed", "end", "lag", "member")}
        show_table(headings, partitions, f"{name} has committed no offsets")
    else:
        behind = f"{group['lag']} records not done"
        print(f"{name} is {group['state']}, a share group with {len(members)} members, {behind}\n")
        headings = {key: key.upper() for key in ("topic", "partition", "start", "lag")}
        show_table(headings, partitions, "it has read nothing")
    if members:
        print()
        last = "partitions" if shared is None else "topics"
        show_table({key: key.upper() for key in ("member", "client", "host", last)}, members, "")


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
    """Move a group's committed offsets, or where a share group begins. Its consumers must be stopped."""
    target = parse_position(to)
    moves = seek_group(Connection(broker), name, topic, target, partition=partition, dry_run=dry_run)
    show_moves(name, moves, dry_run, output)


@app.command()
def delete(
    names: Annotated[list[str], typer.Argument(show_default=False)],
    broker: BrokerOption = DEFAULT_BROKER,
) -> None:
    """Delete groups, with their committed offsets or record states."""
    connection = Connection(broker)
    for name in connection.settle_each(connection.admin.delete_consumer_groups(names)):
        print(f"Deleted {name}")
