"""The Kafka door: its connections, the memory of their frames and unread answers, and what they know in common."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from functools import partial
from weakref import WeakValueDictionary

from millstream.broker.session import Session, Sessions
from millstream.core.errors import ProtocolError
from millstream.doors.engine.connection import Connection
from millstream.doors.engine.door import EngineDoor
from millstream.doors.kafka.context import Context
from millstream.doors.kafka.known_produce import KnownProduces
from millstream.doors.kafka.protocol import KafkaProtocol
from millstream.doors.kafka.sessions import FetchSessions
from millstream.doors.kafka.share_sessions import ShareSessions
from millstream.doors.kafka.turn_line import TurnLine
from millstream.doors.memory import Budget, BufferPool
from millstream.doors.transport import PlainTransport, Transport, TransportFactory

logger = logging.getLogger(__name__)

IDLE_SECONDS_MAX = 600
FRAME_SECONDS_MAX = 60
"""How long a client may pause inside a frame."""
CONTESTED_SECONDS_MAX = 10
"""How long a client may take for a frame while other connections wait for memory."""


class KafkaDoor(EngineDoor[Connection]):
    name = "kafka"
    FRAME_BYTES_MIN = 1
    waiting_bytes_max = BufferPool.LARGE
    counts_backlog = False

    def __init__(self, sessions: Sessions, transport: TransportFactory = PlainTransport) -> None:
        super().__init__(sessions, transport, Budget(sessions.config.inflight_bytes_max))
        self._known: WeakValueDictionary[Hashable, KnownProduces] = WeakValueDictionary()
        self.shares = ShareSessions()
        self.turns = TurnLine(self.loop)
        self._sessions = FetchSessions()
        self._is_looking_for_memory = False
        self.faults: Callable[[int, int, memoryview], tuple[bytes, bytes] | None] | None = None
        """For tests: maps key, version and frame of a request to the tags and body of an injected answer."""

    def welcome(self, transport: Transport, peer: str) -> Connection:
        context = Context(
            self.open_session(peer),
            self._sessions,
            *transport.local_address(),
            shares=self.shares,
            unread=self.unread,
            budget=self.frames,
        )
        return Connection(self, transport, peer, partial(KafkaProtocol, self, context))

    def known_for(self, session: Session) -> KnownProduces:
        """The known produce requests of the clients with this session's rights."""
        known = self._known.get(session.scope)
        if known is None:
            topics, authorizer = session.counts
            known = self._known[session.scope] = KnownProduces(topics, self.clock, authorizer)
        return known

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
            if not self.frames.is_contested or seconds <= CONTESTED_SECONDS_MAX:
                return
            detail = f"one frame took {seconds:.0f} s, and other connections wait for its memory"
            self.note_refusal(connection.peer, ProtocolError(detail))
            connection.close()

    def look_around(self) -> None:
        """Closes connections that were idle, inside a frame or with unread answers for too long."""
        for known in self._known.values():
            known.note_time()
        for connection in list(self._connections):
            quiet = self.now - connection.last_used
            limit = FRAME_SECONDS_MAX if connection.is_inside_frame else IDLE_SECONDS_MAX
            if connection.is_idle and quiet > limit:
                logger.info("closing a connection that was idle for %d s", quiet)
                connection.close()
        if self.frames.is_contested:
            self.look_for_memory()
