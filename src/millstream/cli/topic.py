"""`millstream topic`: create, list, describe, alter, trim, delete."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from millstream.admin.pages import damage, lost_partitions
from millstream.admin.position import resolve, spans
from millstream.cli.connection import DEFAULT_BROKER, BrokerOption, Connection
from millstream.cli.output import Format, OutputOption, show_json, show_table
from millstream.cli.position import PartitionOption, parse_position
from millstream.cli.setting import ConfigOption, UnsetOption, alter_settings, pairs

if TYPE_CHECKING:
    from confluent_kafka.admin import ConfigEntry

app = typer.Typer(help="Create, list, describe, alter, trim and delete topics.", no_args_is_help=True)

PARTITIONS_MAX = 100_000
"""The client's limit."""

Name = Annotated[str, typer.Argument(show_default=False)]


@app.command()
def create(
    name: Name,
    partitions: Annotated[
        int | None,
        typer.Option(
            "--partitions", "-p", min=1, max=PARTITIONS_MAX, show_default="the broker's default", help="How many."
        ),
    ] = None,
    config: ConfigOption = None,
    broker: BrokerOption = DEFAULT_BROKER,
) -> None:
    """Create a topic."""
    settings = pairs(config)
    connection = Connection(broker)
    from confluent_kafka.admin import NewTopic

    topic = NewTopic(name, num_partitions=partitions or -1, replication_factor=-1, config=settings)
    connection.settle(connection.admin.create_topics([topic])[name], name)
    count = len(connection.topic(name).partitions)
    print(f"Created {name} with {count} partition{'s' * (count != 1)}")


@app.command("list")
def list_topics(broker: BrokerOption = DEFAULT_BROKER, output: OutputOption = Format.TABLE) -> None:
    """List the topics, with how many records they hold."""
    connection = Connection(broker)
    topics = connection.metadata().topics
    held = spans(connection, [(name, number) for name, topic in topics.items() for number in topic.partitions])
    rows = [
        {
            "topic": name,
            "partitions": len(topics[name].partitions),
            "records": sum(end - start for (topic, _), (start, end) in held.items() if topic == name),
        }
        for name in sorted(topics)
    ]
    if output is Format.JSON:
        show_json(rows)
    else:
        columns = {"topic": "TOPIC", "partitions": "PARTITIONS", "records": "RECORDS"}
        show_table(columns, rows, "no topics yet; `millstream topic create NAME` creates one")


@app.command()
def describe(
    name: Name,
    every: Annotated[bool, typer.Option("--all", help="Show all settings, also those at their defaults.")] = False,
    broker: BrokerOption = DEFAULT_BROKER,
    output: OutputOption = Format.TABLE,
) -> None:
    """Show a topic's partitions, offsets, damage and settings."""
    connection = Connection(broker)
    topic = connection.topic(name)
    damaged = damage(connection, name)
    lost = lost_partitions(damaged)
    held = spans(connection, [(name, number) for number in topic.partitions if number not in lost])
    partitions = [
        {
            "partition": number,
            "leader": partition.leader,
            "replicas": list(partition.replicas),
            "in_sync": list(partition.isrs),
            **_extent(held.get((name, number))),
        }
        for number, partition in sorted(topic.partitions.items())
    ]
    settings = [
        {"name": entry.name, "value": entry.value, "source": _source(entry), "default": entry.is_default}
        for entry in _settings(connection, name)
    ]
    if output is Format.JSON:
        show_json({"topic": name, "partitions": partitions, "damage": damaged, "settings": settings})
        return
    headings = {key: key.upper() for key in ("partition", "leader", "start", "end", "records")}
    show_table(headings, partitions, f"{name} has no partitions")
    for number, directory in sorted(lost.items()):
        print(
            f"\npartition {number} is lost: its directory {directory} is missing; restore it and restart the broker, "
            "or delete the topic"
        )
    damaged = [row for row in damaged or () if row["partition"] not in lost]
    if damaged:
        print(f"\n{name} has damaged data: these offsets cannot be read; readers continue at END")
        show_table({key: key.upper() for key in ("partition", "first", "end", "cause", "where")}, damaged, "")
    shown = settings if every else [row for row in settings if not row["default"]]
    print()
    show_table(
        {"name": "SETTING", "value": "VALUE", "source": "FROM"},
        shown,
        "every setting is at its default; --all shows them",
    )


def _extent(span: tuple[int, int] | None) -> dict[str, int | None]:
    start, end = span or (None, None)
    return {"start": start, "end": end, "records": None if start is None or end is None else end - start}


def _settings(connection: Connection, name: str) -> list[ConfigEntry]:
    from confluent_kafka.admin import ConfigResource, ResourceType

    return connection.settings(ConfigResource(ResourceType.TOPIC, name))


def _source(entry: ConfigEntry) -> str:
    from confluent_kafka.admin import ConfigSource

    names = {ConfigSource.DYNAMIC_TOPIC_CONFIG: "topic", ConfigSource.DEFAULT_CONFIG: "default"}
    return names.get(ConfigSource(entry.source), "broker")


@app.command()
def alter(
    name: Name,
    partitions: Annotated[
        int | None,
        typer.Option("--partitions", "-p", min=1, max=PARTITIONS_MAX, help="Raise the number of partitions to this."),
    ] = None,
    config: ConfigOption = None,
    unset: UnsetOption = None,
    broker: BrokerOption = DEFAULT_BROKER,
) -> None:
    """Change a topic's settings, or give it more partitions."""
    changes = pairs(config)
    if partitions is None and not changes and not unset:
        raise typer.BadParameter("nothing to change: give --partitions, --config or --unset")
    connection = Connection(broker)
    from confluent_kafka.admin import NewPartitions, ResourceType

    connection.topic(name)
    if partitions is not None:
        connection.settle(connection.admin.create_partitions([NewPartitions(name, partitions)])[name], name)
        print(f"{name} has {partitions} partitions now; keys may go to other partitions than before")
    alter_settings(connection, ResourceType.TOPIC, name, changes, unset or [])


@app.command()
def trim(
    name: Name,
    before: Annotated[
        str, typer.Option(metavar="POSITION", help="Delete records before this: end, an offset, a time (ISO or @ms).")
    ],
    partition: PartitionOption = None,
    broker: BrokerOption = DEFAULT_BROKER,
) -> None:
    """Delete the oldest records of a topic."""
    position = parse_position(before)
    connection = Connection(broker)
    from confluent_kafka import TopicPartition

    wanted = [(name, number) for number in connection.partitions(name, partition)]
    offsets = resolve(connection, position, wanted)
    request = [TopicPartition(name, number, offset) for (_, number), offset in sorted(offsets.items())]
    for where, future in connection.admin.delete_records(request).items():
        mark = connection.settle(future, f"{name} partition {where.partition}").low_watermark
        print(f"{name} partition {where.partition} starts at offset {mark} now")


@app.command()
def delete(
    names: Annotated[list[str], typer.Argument(show_default=False)],
    broker: BrokerOption = DEFAULT_BROKER,
) -> None:
    """Delete topics and everything in them."""
    connection = Connection(broker)
    for name in connection.settle_each(connection.admin.delete_topics(names)):
        print(f"Deleted {name}")
