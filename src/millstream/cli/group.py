"""`millstream group`: list, describe, seek, delete."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from millstream.cli.connection import DEFAULT_BROKER, BrokerOption, Connection
from millstream.cli.failure import Failure, explain
from millstream.cli.output import Format, OutputOption, show_json, show_table
from millstream.cli.position import Partition, Position, resolve, spans
from millstream.cli.share import ShareGroups

if TYPE_CHECKING:
    from confluent_kafka.admin import ConsumerGroupDescription

app = typer.Typer(help="List, describe, move and delete consumer groups and share groups.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(show_default=False)]


@app.command("list")
def list_groups(broker: BrokerOption = DEFAULT_BROKER, output: OutputOption = Format.TABLE) -> None:
    """List the groups and their states."""
    connection = Connection(broker)
    listing = connection.settle(connection.admin.list_consumer_groups())
    rows = [
        {"group": group.group_id, "state": _word(group, "state"), "protocol": _word(group, "type")}
        for group in listing.valid
    ]
    rows += [
        {"group": name, "state": state, "protocol": "share"} for name, state in ShareGroups(connection).states().items()
    ]
    rows.sort(key=lambda row: row["group"])
    if output is Format.JSON:
        show_json(rows)
    else:
        columns = {"group": "GROUP", "state": "STATE", "protocol": "PROTOCOL"}
        show_table(columns, rows, "no groups yet; `millstream consume TOPIC --group NAME` makes one")


def _word(group: Any, attribute: str) -> str:
    """`ConsumerGroupState.PREPARING_REBALANCING` as `preparing-rebalancing`; older clients may lack the attribute."""
    value = getattr(group, attribute, None)
    return value.name.lower().replace("_", "-") if value is not None else "unknown"


@app.command()
def describe(name: Name, broker: BrokerOption = DEFAULT_BROKER, output: OutputOption = Format.TABLE) -> None:
    """Show how far a group is in each partition, and its members."""
    connection = Connection(broker)
    shared = ShareGroups(connection).group(name)
    if shared is not None:
        shared.show(output is Format.JSON)
        return
    group = _description(connection, name)
    committed = _committed(connection, name)
    owners = {
        (where.topic, where.partition): member
        for member in group.members
        for where in member.assignment.topic_partitions
    }
    held = spans(connection, _existing(connection, sorted({*committed, *owners})))
    lags = {where: max(0, end - committed[where]) for where, (_, end) in held.items() if where in committed}
    partitions = [
        {
            "topic": where[0],
            "partition": where[1],
            "committed": committed.get(where),
            "end": end,
            "lag": lags.get(where),
            "member": owners[where].member_id if where in owners else None,
        }
        for where, (_, end) in sorted(held.items())
    ]
    members = [
        {
            "member": member.member_id,
            "client": member.client_id,
            "host": member.host.removeprefix("/"),
            "instance": member.group_instance_id,
            "partitions": len(member.assignment.topic_partitions),
        }
        for member in group.members
    ]
    summary = {
        "group": name,
        "state": _word(group, "state"),
        "protocol": _word(group, "type"),
        "assignor": group.partition_assignor or None,
        "lag": sum(lags.values()),
    }
    if output is Format.JSON:
        show_json({**summary, "partitions": partitions, "members": members})
        return
    print(f"{name} is {summary['state']}, {len(members)} members, {summary['lag']} records behind\n")
    headings = {key: key.upper() for key in ("topic", "partition", "committed", "end", "lag", "member")}
    show_table(headings, partitions, f"{name} has committed no offsets")
    if members:
        print()
        show_table({key: key.upper() for key in ("member", "client", "host", "partitions")}, members, "")


@app.command()
def seek(
    name: Name,
    topic: Annotated[str, typer.Option(metavar="TOPIC", help="The topic in which to move.", show_default=False)],
    to: Annotated[
        str,
        typer.Option(
            metavar="POSITION", help="start, end, an offset, a time (ISO or @ms), or +N or -N records from here."
        ),
    ],
    partition: Annotated[int | None, typer.Option(min=0, help="Only this partition.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would change, change nothing.")] = False,
    broker: BrokerOption = DEFAULT_BROKER,
    output: OutputOption = Format.TABLE,
) -> None:
    """Move a group's committed offsets, or where a share group begins. Its consumers must be stopped."""
    position = Position.parse(to)
    connection = Connection(broker)
    from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition

    numbers = connection.topic(topic).partitions
    if partition is not None and partition not in numbers:
        raise Failure(f"{topic} has no partition {partition}; it has {len(numbers)}, counted from 0")
    shared = ShareGroups(connection).group(name)
    if shared is not None:
        committed = {where: start for where, (start, _) in shared.offsets().items()}
    else:
        committed = _committed(connection, name)
    wanted = [(topic, number) for number in sorted(numbers) if partition in (None, number)]
    targets = resolve(connection, position, wanted, base=committed)
    rows = [
        {"topic": where[0], "partition": where[1], "from": committed.get(where), "to": targets[where]}
        for where in wanted
    ]
    if shared is not None and not dry_run:
        shared.seek(targets)
    elif not dry_run:
        offsets = [TopicPartition(*where, offset) for where, offset in targets.items()]
        request = ConsumerGroupTopicPartitions(name, offsets)
        answer = connection.settle(connection.admin.alter_consumer_group_offsets([request])[name], name)
        for where in answer.topic_partitions:
            if where.error is not None:
                raise explain(where.error, broker, f"{name} in {topic} partition {where.partition}")
    if output is Format.JSON:
        show_json({"group": name, "dry_run": dry_run, "partitions": rows})
        return
    show_table({key: key.upper() for key in ("topic", "partition", "from", "to")}, rows, "")
    if dry_run:
        print("\nnothing was changed (--dry-run)")


@app.command()
def delete(
    names: Annotated[list[str], typer.Argument(show_default=False)],
    broker: BrokerOption = DEFAULT_BROKER,
) -> None:
    """Delete groups and their committed offsets, or what they know of records."""
    connection = Connection(broker)
    for name, future in connection.admin.delete_consumer_groups(names).items():
        connection.settle(future, name)
        print(f"Deleted {name}")


def _description(connection: Connection, name: str) -> ConsumerGroupDescription:
    listing = connection.settle(connection.admin.list_consumer_groups())
    # A broker describes a missing group as dead; a user who mistyped the name needs to know that.
    if name not in {group.group_id for group in listing.valid}:
        raise Failure(f"there is no group {name}; `millstream group list` shows the groups there are")
    group: ConsumerGroupDescription = connection.settle(connection.admin.describe_consumer_groups([name])[name], name)
    return group


def _committed(connection: Connection, name: str) -> dict[Partition, int]:
    from confluent_kafka import ConsumerGroupTopicPartitions

    request = ConsumerGroupTopicPartitions(name)
    answer = connection.settle(connection.admin.list_consumer_group_offsets([request])[name], name)
    return {(where.topic, where.partition): where.offset for where in answer.topic_partitions if where.offset >= 0}


def _existing(connection: Connection, partitions: list[Partition]) -> list[Partition]:
    """Without partitions of deleted topics, for which the group may still have offsets."""
    topics = connection.metadata().topics
    return [where for where in partitions if where[0] in topics and where[1] in topics[where[0]].partitions]
