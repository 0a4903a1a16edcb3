"""Finds or creates a queue's group: the first step of several `millstream queue` commands."""

from __future__ import annotations

import enum

from millstream.cli.connection import Connection
from millstream.cli.failure import Failure
from millstream.cli.setting import change_settings
from millstream.cli.share import ShareGroup, ShareGroups

RESET = "share.auto.offset.reset"


class Begin(enum.StrEnum):
    START = "start"
    END = "end"

    @property
    def reset(self) -> str:
        return "earliest" if self is Begin.START else "latest"


def ensure(connection: Connection, group: str, begin: Begin) -> None:
    """Creates the queue if it is new. Its start must be set before its first read."""
    if group not in ShareGroups(connection).states():
        from confluent_kafka.admin import ResourceType

        change_settings(connection, ResourceType.GROUP, group, {RESET: begin.reset})


def require(connection: Connection, name: str) -> ShareGroup:
    group = ShareGroups(connection).group(name)
    if group is None:
        raise missing(name)
    return group


def missing(group: str) -> Failure:
    return Failure(f"there is no queue {group}; `millstream queue list` shows the queues there are")
