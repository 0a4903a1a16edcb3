"""Queues: creating, finding and deleting their groups."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from typing import Any

from millstream.admin import pages
from millstream.admin.connection import Connection
from millstream.admin.failure import Failure
from millstream.admin.settings import change_settings
from millstream.admin.share_groups import ShareGroup, ShareGroups

RESET = "share.auto.offset.reset"


class Begin(enum.StrEnum):
    START = "start"
    END = "end"

    @property
    def reset(self) -> str:
        return "earliest" if self is Begin.START else "latest"


def create(connection: Connection, group: str, begin: Begin, settings: Mapping[str, str]) -> None:
    """Its start must be set before its first read."""
    if group in ShareGroups(connection).states():
        raise Failure(f"{group} exists already; `millstream queue set` changes it")
    _create(connection, group, {RESET: begin.reset, **settings})


def ensure(connection: Connection, group: str, begin: Begin) -> None:
    """Creates the queue if it is new."""
    if group not in ShareGroups(connection).states():
        _create(connection, group, {RESET: begin.reset})


def delete(connection: Connection, groups: list[str]) -> Iterator[str]:
    """All of them, or none if one is missing; yields each name when it is deleted."""
    there = ShareGroups(connection).states()
    for name in groups:
        if name not in there:
            raise _missing(name)
    yield from connection.settle_each(connection.admin.delete_consumer_groups(groups))


def require(connection: Connection, name: str) -> ShareGroup:
    group = ShareGroups(connection).group(name)
    if group is None:
        raise _missing(name)
    return group


def figures(connection: Connection, name: str) -> dict[str, Any]:
    """The broker's page about one queue."""
    for queue in pages.queues(connection):
        if queue["group"] == name:
            return queue
    raise _missing(name)


def settings(connection: Connection, name: str) -> dict[str, str]:
    """Those set explicitly."""
    from confluent_kafka.admin import ConfigResource, ResourceType

    entries = connection.settings(ConfigResource(ResourceType.GROUP, name))
    return {entry.name: str(entry.value) for entry in entries if not entry.is_default}


def _create(connection: Connection, group: str, settings: Mapping[str, str]) -> None:
    from confluent_kafka.admin import ResourceType

    change_settings(connection, ResourceType.GROUP, group, settings)


def _missing(group: str) -> Failure:
    return Failure(f"there is no queue {group}; `millstream queue list` shows the queues")
