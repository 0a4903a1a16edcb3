"""Where published messages go, and how topics are made through this door.

A topic that FlowMQ's clients make has one partition, so that its messages have one order as they do in FlowMQ, keeps
what all groups are done with for 60 s, and takes a message of 1 MiB. It is a topic like any other: more partitions and
other settings can be given to it, and then messages go to its partitions in turn. Only `__dlq__`, which somebody may
subscribe to before the first message has failed, is made as the broker makes it: dead letters stay when they were read.
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
        """Of the ids of its messages."""


class Targets:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._topics = broker.topics
        self._known: dict[bytes, itertools.cycle[Target]] = {}
        self._changes = -1

    def find(self, name: bytes) -> Target | None:
        """Where the next message to a topic goes; None if there is no such topic."""
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
        """The topic, made if it is missing and topics may be made by asking for them."""
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
            # Somebody else was faster: here, or at another broker, of whose doing we may not have heard yet.
            topic = self._topics.get(name) or await self._topics.follow(name)
            if topic is None:
                raise
            return topic
