"""The FlowMQ door: its connections, and the dispatchers that feed their subscriptions."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Hashable
from functools import partial

from millstream.broker.session import Session, Sessions, Topic
from millstream.doors.engine.connection import Connection
from millstream.doors.engine.door import EngineDoor
from millstream.doors.flowmq.dispatcher import Dispatcher
from millstream.doors.flowmq.protocol import STUCK_SECONDS_MAX, FlowmqProtocol
from millstream.doors.flowmq.targets import Targets
from millstream.doors.memory import Budget, BufferPool
from millstream.doors.transport import PlainTransport, Transport, TransportFactory
from millstream.wire import flowmq as wire

logger = logging.getLogger(__name__)

IDLE_SECONDS_MAX = 600
EARLIEST = {"share.auto.offset.reset": "earliest"}
"""A new group starts at the earliest record: its workers also get jobs published before they joined."""
DEFAULTS = {"share.delivery.count.limit": "3"}
"""Defaults of queues that this door creates, from FlowMQ's document. Share groups of the Kafka door have 5."""


class FlowmqDoor(EngineDoor[Connection]):
    name = "flowmq"
    title = "FlowMQ"
    SHARED_BYTES = 64 * 1024
    waiting_bytes_max = BufferPool.LARGE
    reserves_whole = True
    counts_backlog = False

    def __init__(self, sessions: Sessions, transport: TransportFactory = PlainTransport) -> None:
        super().__init__(sessions, transport, Budget(sessions.config.inflight_bytes_max))
        self.window = sessions.config.flowmq_unacknowledged_max
        self._targets: dict[Hashable, Targets] = {}
        self._dispatchers: dict[tuple[str, uuid.UUID], Dispatcher] = {}

    def welcome(self, transport: Transport, peer: str) -> Connection:
        session = self.open_session(peer)
        return Connection(self, transport, peer, partial(FlowmqProtocol, self, session))

    def frame_size(self, beginning: memoryview | bytearray, head_bytes: int) -> int:
        return wire.frame_size(beginning, 0, self.frame_bytes_max)

    def targets_for(self, session: Session) -> Targets:
        """The partitions that the clients with this session's rights publish to."""
        targets = self._targets.get(session.scope)
        if targets is None:
            targets = self._targets[session.scope] = Targets(session, self.config)
        return targets

    def look_around(self) -> None:
        """Closes connections that are idle or stuck for too long."""
        for connection in list(self._connections):
            quiet = self.now - connection.last_used
            is_stuck = connection.hung_up or connection.is_inside_frame or connection.waits_for_memory
            if (quiet > STUCK_SECONDS_MAX and is_stuck) or (quiet > IDLE_SECONDS_MAX and connection.is_idle):
                logger.info("closing a connection that was idle for %d s", quiet)
                connection.close()
        for dispatcher in list(self._dispatchers.values()):
            dispatcher.pump()  # a subscriber that stopped reading may now count as late

    # -- subscriptions -----------------------------------------------------------------------------------------------

    async def join(self, topic: Topic, group: str, session: Session) -> Dispatcher:
        """The open dispatcher of a group, or a private one without a group. Adds one user."""
        if group:
            await session.coordinate(group)
        name = group or f"flowmq-{uuid.uuid4()}"  # unguessable, so no other client can join it
        key = (name, topic.id)
        queue = session.open_queue(
            name, durable=bool(group), settings=EARLIEST if group else None, door_defaults=DEFAULTS
        )
        dispatcher = self._dispatchers.get(key)
        if dispatcher is None or dispatcher.queue is not queue:
            dispatcher = self._dispatchers[key] = Dispatcher(self, session, queue, topic)
        dispatcher.users += 1
        try:
            await dispatcher.opened
        except BaseException:
            self.leave(dispatcher)
            raise
        return dispatcher

    def leave(self, dispatcher: Dispatcher) -> None:
        """Removes one user."""
        dispatcher.users -= 1
        if dispatcher.users == 0:
            dispatcher.close()
            key = (dispatcher.queue.id, dispatcher.topic.id)
            if self._dispatchers.get(key) is dispatcher:  # else the queue was lost and opened again
                del self._dispatchers[key]
