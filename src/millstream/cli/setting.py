"""Settings of topics and queues: parsing and changing."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from millstream.broker.settings import SETTINGS
from millstream.cli.connection import Connection
from millstream.cli.failure import Failure

if TYPE_CHECKING:
    from confluent_kafka.admin import ResourceType

ConfigOption = Annotated[
    list[str] | None,
    typer.Option("--config", "-c", metavar="KEY=VALUE", help="A setting, such as retention.ms=3600000; repeatable."),
]
UnsetOption = Annotated[
    list[str] | None, typer.Option(metavar="KEY", help="Put a setting back to its default; repeatable.")
]


def pairs(texts: Sequence[str] | None) -> dict[str, str]:
    found = {}
    for text in texts or []:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise typer.BadParameter(f"{text!r} is not KEY=VALUE, as in retention.ms=3600000")
        found[key] = value
    return found


def change_settings(
    connection: Connection, kind: ResourceType, name: str, changes: Mapping[str, str], unset: Sequence[str] = ()
) -> None:
    from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource

    entries = [
        ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET) for key, value in changes.items()
    ] + [ConfigEntry(key, None, incremental_operation=AlterConfigOpType.DELETE) for key in unset]
    if entries:
        resource = ConfigResource(kind, name, incremental_configs=entries)
        connection.settle(connection.admin.incremental_alter_configs([resource])[resource], name)


def _check_names(connection: Connection, kind: ResourceType, name: str, unset: Sequence[str]) -> None:
    from confluent_kafka.admin import ConfigResource

    resource = ConfigResource(kind, name)
    known = connection.settle(connection.admin.describe_configs([resource])[resource], name)
    for key in unset:
        if key not in known and key not in SETTINGS:  # topic settings unknown to Kafka are not listed
            likely = difflib.get_close_matches(key, known, n=1)
            raise Failure(
                f"{name} has no setting {key}; "
                + (f"did you mean {likely[0]}?" if likely else f"known are {', '.join(known)}")
            )


def alter_settings(
    connection: Connection, kind: ResourceType, name: str, changes: Mapping[str, str], unset: Sequence[str]
) -> None:
    """The same, and prints it. Kafka silently resets an unknown name to its default."""
    if unset:
        _check_names(connection, kind, name, unset)
    change_settings(connection, kind, name, changes, unset)
    for key, value in changes.items():
        print(f"{name}: {key} is {value} now")
    for key in unset:
        print(f"{name}: {key} is at its default now")
