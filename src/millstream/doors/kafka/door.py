"""The Kafka door: a listening socket and its connections.

It uses plain non-blocking sockets on the event loop's readers, not streams or protocols. That halves the work per
request, and each connection controls when it is read.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from millstream.broker.session import Session
from millstream.config import Address
from millstream.core.clock import Timer
from millstream.core.errors import ProtocolError
from millstream.core.logs import Damped
from millstream.doors.connections import Connections
from millstream.doors.hangup import HangUps
from millstream.doors.kafka.connection import Connection
from millstream.doors.kafka.context import Context
from millstream.doors.kafka.known_produce import KnownProduces
from millstream.doors.kafka.sessions import FetchSessions
from millstream.doors.kafka.share_sessions import ShareSessions
from millstream.doors.kafka.unread import Unread
from millstream.doors.keepalive import keep_alive
from millstream.doors.listener import Listener
from millstream.doors.memory import Budget, BufferPool

if TYPE_CHECKING:
    from millstream.broker.broker import Broker

logger = logging.getLogger(__name__)
refusals = Damped(__name__)

SHARED_BYTES = 256 * 1024
SWEEP_SECONDS = 10
IDLE_SECONDS_MAX = 600
FRAME_SECONDS_MAX = 60
"""How long a client may pause inside a frame."""
CONTESTED_SECONDS_MAX = 10
"""How long a client may take for a frame while other connections wait for memory."""
CLOSE_SECONDS_MAX = 2.0


class KafkaDoor:
    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.loop = asyncio.get_running_loop()
        self.clock = broker.clock
        self.metrics = broker.metrics
        self.frame_bytes_max = broker.config.frame_bytes_max
        self.shared = memoryview(bytearray(SHARED_BYTES))
        self.pool = BufferPool()
        self.budget = Budget(broker.config.inflight_bytes_max)
        self.unread = Unread(broker.config.inflight_bytes_max)
        self._known: WeakValueDictionary[Hashable, KnownProduces] = WeakValueDictionary()
        self.shares = ShareSessions()
        self.hang_ups = HangUps(self.loop)
        self._sessions = FetchSessions()
        self._connections: Connections[Connection] = Connections(broker.config, self.metrics, self.clock)
        self._listener = Listener("kafka", "Kafka", self._let_in, self._connections.make_room)
        self._sweeper: Timer | None = None
        self._is_looking_for_memory = False
        self.is_closing = False
        """Reading has stopped on every connection."""
        self.faults: Callable[[int, int, memoryview], tuple[bytes, bytes] | None] | None = None
        """For tests: maps key, version and frame of a request to the tags and body of an injected answer."""
        self.now: float = self.clock.monotonic()
        """The time of the last sweep or new connection: exact enough for a connection's `last_used`."""

    def start(self, address: Address) -> Address:
        self._sweeper = self.clock.call_later(SWEEP_SECONDS, self._sweep)
        return self._listener.start(address)

    def _let_in(self, connected: socket.socket, peer: str) -> bool:
        self.now = self.clock.monotonic()
        if not self._connections.have_room(peer):
            return False
        keep_alive(connected)
        local_host, local_port = connected.getsockname()[:2]
        context = Context(
            Session(self.broker, "kafka", peer),
            self._sessions,
            local_host,
            local_port,
            shares=self.shares,
            unread=self.unread,
            budget=self.budget,
        )
        self._connections.add(Connection(self, connected, context), peer)
        return True

    def known_for(self, session: Session) -> KnownProduces:
        """The known produce requests of the clients with this session's rights."""
        authorizer = self.broker.authorizer
        scope = authorizer.scope(session.principal, session.host)
        known = self._known.get(scope)
        if known is None:
            known = self._known[scope] = KnownProduces(self.broker.topics, self.clock, authorizer)
        return known

    def forget(self, connection: Connection) -> None:
        self._connections.discard(connection)

    def give_buffer(self, buffer: bytearray) -> None:
        self.pool.give(buffer)
        if len(buffer) > self.pool.FREE:
            self.budget.give(len(buffer))

    def wait_for_reader(self, connection: Connection, size: int) -> None:
        """A client does not read its answers; `size` bytes of them are in memory."""
        self.unread.wait(connection, size)
        if self.unread.is_over:
            self.loop.call_soon(self._shed)

    def _shed(self) -> None:
        while self.unread.is_over:
            connection = self.unread.longest
            size = self.unread.done(connection)
            self.note_refusal(connection.host, ProtocolError(f"it does not read its answers: {size} bytes wait"))
            connection.close()

    def look_for_memory(self) -> None:
        """Called when a connection waits for memory."""
        if not self._is_looking_for_memory:
            self._is_looking_for_memory = True
            self.loop.call_soon(self._take_memory_back)

    def _take_memory_back(self) -> None:
        """Closes connections with a frame that takes too long, oldest first, until none waits for memory."""
        self._is_looking_for_memory = False
        self.now = self.clock.monotonic()
        slow = [connection for connection in self._connections if connection.holds_memory]
        for connection in sorted(slow, key=lambda each: each.frame_began):
            seconds = self.now - connection.frame_began
            if not self.budget.is_contested or seconds <= CONTESTED_SECONDS_MAX:
                return
            detail = f"{seconds:.0f} s for one frame, while other connections wait for the memory that it holds"
            self.note_refusal(connection.host, ProtocolError(detail))
            connection.close()

    def note_refusal(self, host: str, error: ProtocolError) -> None:
        """Logs why a connection is closed."""
        refusals.warning("closing the connection from %s: %s", host, error)

    def _sweep(self) -> None:
        """Closes connections that were idle, inside a frame or with unread answers for too long."""
        self.now = self.clock.monotonic()
        for known in self._known.values():
            known.note_time()
        for connection in list(self._connections):
            quiet = self.now - connection.last_used
            limit = FRAME_SECONDS_MAX if connection.is_inside_frame else IDLE_SECONDS_MAX
            if connection.is_idle and quiet > limit:
                logger.info("closing a connection that was idle for %d s", quiet)
                connection.close()
        if self.budget.is_contested:
            self.look_for_memory()
        self._sweeper = self.clock.call_later(SWEEP_SECONDS, self._sweep)

    async def close(self) -> None:
        """Stops accepting and reading, answers the writes in flight, then closes every connection."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        self._listener.close()
        self.is_closing = True
        for connection in self._connections:
            connection.stop_reading()
        deadline = self.loop.time() + CLOSE_SECONDS_MAX
        while any(each.is_owed or each.is_unread for each in self._connections) and self.loop.time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        for connection in list(self._connections):
            connection.close()
        self.hang_ups.close()

    def abort(self) -> None:
        """Closes everything at once, like the end of the process: no client gets an answer."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        self._listener.close()
        for connection in list(self._connections):
            connection.close()
        self.hang_ups.close()
