"""Settings of topics and groups: changing them, and resetting them to their defaults."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from millstream.admin.connection import Connection
from millstream.admin.failure import Failure
from millstream.broker.settings import SETTINGS

if TYPE_CHECKING:
    from confluent_kafka.admin import ResourceType


def change_settings(
    connection: Connection, kind: ResourceType, name: str, changes: Mapping[str, str], unset: Sequence[str] = ()
) -> None:
    from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource

    if unset:
        _check_names(connection, kind, name, unset)
    entries = [
        ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET) for key, value in changes.items()
    ] + [ConfigEntry(key, None, incremental_operation=AlterConfigOpType.DELETE) for key in unset]
    if entries:
        resource = ConfigResource(kind, name, incremental_configs=entries)
        connection.settle(connection.admin.incremental_alter_configs([resource])[resource], name)


def _check_names(connection: Connection, kind: ResourceType, name: str, unset: Sequence[str]) -> None:
    """Kafka silently resets an unknown name to its default."""
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
