"""The FlowMQ door: a listening socket, the connections behind it, and the dispatchers that feed their subscriptions."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Hashable
from functools import partial

from millstream.broker.session import Session, Sessions, Topic
from millstream.config import Address
from millstream.core.clock import Timer
from millstream.core.logs import Damped
from millstream.doors.connections import Connections
from millstream.doors.flowmq.connection import Connection
from millstream.doors.flowmq.dispatcher import Dispatcher
from millstream.doors.flowmq.targets import Targets
from millstream.doors.listener import Listener
from millstream.doors.memory import Budget
from millstream.doors.transport import PlainTransport, Transport, TransportFactory

logger = logging.getLogger(__name__)
refusals = Damped(__name__)

SHARED_BYTES = 64 * 1024
SWEEP_SECONDS = 10
CLOSE_SECONDS_MAX = 2.0
EARLIEST = {"share.auto.offset.reset": "earliest"}
"""A new group starts at the earliest record: its workers also get jobs published before they joined."""
DEFAULTS = {"share.delivery.count.limit": "3"}
"""Defaults of queues that this door creates, from FlowMQ's document. Share groups of the Kafka door have 5."""


class FlowmqDoor:
    def __init__(self, sessions: Sessions, transport: TransportFactory = PlainTransport) -> None:
        self._config = sessions.config
        self.clock = sessions.clock
        self.metrics = sessions.metrics
        self.loop = asyncio.get_running_loop()
        self.window = sessions.config.flowmq_unacknowledged_max
        self.frame_bytes_max = sessions.config.frame_bytes_max
        self.shared = memoryview(bytearray(SHARED_BYTES))
        """Receive buffer of all connections; a read is handled before the next one."""
        self.budget = Budget(sessions.config.inflight_bytes_max)
        """For frames that arrive in pieces."""
        self.unread_bytes = 0
        """Output that waits for slow clients, over all connections."""
        self.unread_bytes_max = sessions.config.inflight_bytes_max
        self._targets: dict[Hashable, Targets] = {}
        self.now = self.clock.monotonic()
        """Time of the last sweep or new connection: exact enough for `last_used`."""
        self._connections: Connections[Connection] = Connections(sessions.config, self.metrics, self.clock)
        self._dispatchers: dict[tuple[str, uuid.UUID], Dispatcher] = {}
        self._listener = Listener("flowmq", "FlowMQ", self._connections, transport, self._welcome)
        self._sweeper: Timer | None = None
        self._open_session = partial(sessions.open, "flowmq")

    def start(self, address: Address) -> Address:
        bound = self._listener.start(address)
        self._sweeper = self.clock.call_later(SWEEP_SECONDS, self._sweep)
        return bound

    def _welcome(self, transport: Transport, peer: str) -> None:
        self.now = self.clock.monotonic()
        self._connections.add(Connection(self, transport, self._open_session(peer)), peer)

    def targets_for(self, session: Session) -> Targets:
        """The partitions that the clients with this session's rights publish to."""
        targets = self._targets.get(session.scope)
        if targets is None:
            targets = self._targets[session.scope] = Targets(session, self._config)
        return targets

    def forget(self, connection: Connection) -> None:
        self._connections.discard(connection)

    def note_refusal(self, host: str, reason: str) -> None:
        """Logs why a connection is closed."""
        refusals.warning("closing the connection from %s: %s", host, reason)

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

    # -- closing -----------------------------------------------------------------------------------------------------

    def _sweep(self) -> None:
        """Closes connections that are idle or stuck for too long."""
        self.now = self.clock.monotonic()
        for connection in list(self._connections):
            quiet = self.now - connection.last_used
            if quiet > connection.quiet_seconds_max:
                logger.info("closing a connection that was idle for %d s", quiet)
                connection.close()
        for dispatcher in list(self._dispatchers.values()):
            dispatcher.pump()  # a subscriber that stopped reading may now count as late
        self._sweeper = self.clock.call_later(SWEEP_SECONDS, self._sweep)

    async def close(self) -> None:
        """Stops accepting and reading, sends responses that wait for a sync, then closes all connections."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        self._listener.close()
        for connection in self._connections:
            connection.stop()
        deadline = self.loop.time() + CLOSE_SECONDS_MAX
        while any(connection.is_owed for connection in self._connections) and self.loop.time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        for connection in list(self._connections):
            connection.close()
        self._listener.hang_ups.close()
