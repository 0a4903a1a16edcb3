"""The partitions that published messages go to, and the creation of topics through this door.

A topic that FlowMQ's clients create has one partition, so that its messages have one order as in FlowMQ. It keeps
records for 60 s after all groups are done with them, and accepts a message of 1 MiB. An operator may add partitions and
change settings; messages then go to its partitions round robin. `__dlq__` is different: a client may subscribe to it
before the first message fails, and it gets the broker's retention, so dead letters stay after a group reads them.
"""

from __future__ import annotations

import itertools

from millstream.broker.broker import Broker
from millstream.broker.groups.queue.dead_letters import RETENTION_MS
from millstream.broker.inlet import Inlet
from millstream.broker.settings import GROUP_SETTINGS
from millstream.broker.topics import Topic
from millstream.core.errors import Code, RequestError
from millstream.doors.flowmq import message_id
from millstream.doors.message_size import one_mebibyte
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
    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._topics = broker.topics
        self._known: dict[bytes, itertools.cycle[Target]] = {}
        self._changes = -1

    def find(self, name: bytes) -> Target | None:
        """The target of the next message to a topic; None if the topic does not exist."""
        if self._changes != self._topics.changes:
            self._changes = self._topics.changes
            self._known.clear()
        known = self._known.get(name)
        if known is None:
            topic = self._topics.get(wire.text_of(name, "topic"))
            if topic is None:
                return None
            known = self._known[name] = itertools.cycle(
                [
                    Target(self._broker.inlet(partition), message_id.prefix(topic.id, partition.index))
                    for partition in topic.partitions
                ]
            )
        return next(known)

    async def create(self, name: str) -> Topic:
        if name == DEAD_TOPIC:
            overrides = {"retention.ms": str(RETENTION_MS)}
        else:
            overrides = {"millstream.retention.done.ms": str(DONE_RETENTION_MS)}
        overrides |= one_mebibyte(self._broker.config)
        return await self._topics.create(name, PARTITIONS, overrides)

    async def ensure(self, name: str) -> Topic:
        """The topic, created if it is missing and auto-creation is on."""
        topic = self._topics.get(name)
        if topic is not None:
            return topic
        if not self._topics.auto_create:
            raise RequestError(
                Code.UNKNOWN_TOPIC_OR_PARTITION, f"there is no topic {name}; make it with CREATE_TOPIC first"
            )
        try:
            return await self.create(name)
        except RequestError as error:
            if error.code != Code.TOPIC_ALREADY_EXISTS:
                raise
            # Another client created it first, perhaps at another broker whose change is not visible here yet.
            topic = self._topics.get(name) or await self._topics.follow(name)
            if topic is None:
                raise
            return topic
