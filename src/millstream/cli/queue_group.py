"""A queue as a group that is there, or is made: what several commands of `millstream queue` begin with."""

from __future__ import annotations

import enum

from millstream.cli.connection import Connection
from millstream.cli.failure import Failure, refused
from millstream.cli.setting import change_settings

RESET = "share.auto.offset.reset"


class Begin(enum.StrEnum):
    START = "start"
    END = "end"

    @property
    def reset(self) -> str:
        return "earliest" if self is Begin.START else "latest"


def names(connection: Connection) -> dict[str, str]:
    """The queues there are, and their states, in Kafka's words."""
    from millstream.client import share
    from millstream.client.link import LinkBroken

    try:
        return share.groups(connection.link())
    except LinkBroken as error:
        raise Failure(f"{error}; queues need a broker with share groups") from error
    except share.ShareError as error:
        raise refused(error, connection.address) from error


def ensure(connection: Connection, group: str, begin: Begin) -> None:
    """Makes the queue if it is new. Where it is to begin has to be known before it has read anything."""
    if group not in names(connection):
        from confluent_kafka.admin import ResourceType

        change_settings(connection, ResourceType.GROUP, group, {RESET: begin.reset})


def require(connection: Connection, group: str) -> None:
    if group not in names(connection):
        raise missing(group)


def missing(group: str) -> Failure:
    return Failure(f"there is no queue {group}; `millstream queue list` shows the queues there are")
