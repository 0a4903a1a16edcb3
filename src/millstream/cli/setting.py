"""Settings of topics, queues and Spark, as arguments of a command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from millstream.admin.connection import Connection
from millstream.admin.settings import change_settings

if TYPE_CHECKING:
    from confluent_kafka.admin import ResourceType

ConfigOption = Annotated[
    list[str] | None,
    typer.Option("--config", "-c", metavar="KEY=VALUE", help="A setting, such as retention.ms=3600000; repeatable."),
]
UnsetOption = Annotated[
    list[str] | None, typer.Option(metavar="KEY", help="Put a setting back to its default; repeatable.")
]


def pairs(texts: Sequence[str] | None, example: str = "retention.ms=3600000") -> dict[str, str]:
    found = {}
    for text in texts or []:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise typer.BadParameter(f"{text!r} is not KEY=VALUE, as in {example}")
        found[key] = value
    return found


def alter_settings(
    connection: Connection, kind: ResourceType, name: str, changes: Mapping[str, str], unset: Sequence[str]
) -> None:
    """Changes settings, and prints it."""
    change_settings(connection, kind, name, changes, unset)
    for key, value in changes.items():
        print(f"{name}: {key} is now {value}")
    for key in unset:
        print(f"{name}: {key} is now at its default")
