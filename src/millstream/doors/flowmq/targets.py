"""The partitions that published messages go to, and the creation of topics through this door.

A topic that FlowMQ's clients create has one partition, so that its messages have one order as in FlowMQ. It keeps
records for 60 s after all groups are done with them, and accepts a message of 1 MiB. An operator may add partitions and
change settings; messages then go to its partitions round robin. `__dlq__` is different: a client may subscribe to it
before the first message fails, and it gets the broker's retention, so dead letters stay after a group reads them.
"""

from __future__ import annotations

import itertools

from millstream.broker.groups.queue.dead_letters import RETENTION_MS
from millstream.broker.session import Inlet, Session, Topic
from millstream.broker.settings import GROUP_SETTINGS
from millstream.config import Config
from millstream.core.errors import Code, RequestError
from millstream.doors.flowmq import message_id
from millstream.doors.message_size import one_mebibyte
from millstream.security.rights import Operation
from millstream.wire import flowmq as wire

DEAD_TOPIC = GROUP_SETTINGS["errors.deadletterqueue.topic.name"].default
PARTITIONS = 1
DONE_RETENTION_MS = 60_000


class Target:
    """One partition of a topic, as publishers see it."""

    __slots__ = ("inlet", "prefix")

    def __init__(self, inlet: Inlet, prefix: bytes) -> None:
        self.inlet = inlet
        self.prefix = prefix
        """Prefix of its message ids."""


class Targets:
    """Shared by the sessions of one scope."""

    def __init__(self, session: Session, config: Config) -> None:
        self._session = session
        self._config = config
        self._known: dict[bytes, itertools.cycle[Target]] = {}
        self._changes = -1

    def find(self, name: bytes) -> Target | None:
        """The target of the next message to a topic; None if the topic does not exist."""
        if self._changes != self._session.changes:
            self._changes = self._session.changes
            self._known.clear()
        known = self._known.get(name)
        if known is None:
            topic = self._session.find(wire.text_of(name, "topic"), Operation.WRITE)
            if topic is None:
                return None
            known = self._known[name] = itertools.cycle(
                [
                    Target(self._session.inlet(partition), message_id.prefix(topic.id, partition.index))
                    for partition in topic.partitions
                ]
            )
        return next(known)

    async def create(self, name: str) -> None:
        await self._session.admin.create_topic(name, PARTITIONS, self._settings(name), validate_only=False)

    def _settings(self, name: str) -> dict[str, str]:
        if name == DEAD_TOPIC:
            overrides = {"retention.ms": str(RETENTION_MS)}
        else:
            overrides = {"millstream.retention.done.ms": str(DONE_RETENTION_MS)}
        return overrides | one_mebibyte(self._config)

    async def ensure(self, name: str, operation: Operation) -> Topic:
        """The topic, created if it is missing and auto-creation is on."""
        if not self._config.auto_create_topics and self._session.find(name, operation) is None:
            raise RequestError(
                Code.UNKNOWN_TOPIC_OR_PARTITION, f"there is no topic {name}; make it with CREATE_TOPIC first"
            )
        return await self._session.ensure_topic(name, operation, PARTITIONS, self._settings(name))
