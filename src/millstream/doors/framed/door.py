"""A door for protocols of length-prefixed frames: its memory budgets, and the sweep that closes stuck connections.

Subclasses of `protocol.py` implement the protocol.
"""

from __future__ import annotations

import logging

from millstream.broker.session import Sessions
from millstream.core.errors import ProtocolError
from millstream.doors.engine.connection import Connection
from millstream.doors.engine.door import SWEEP_SECONDS, EngineDoor
from millstream.doors.memory import Budget
from millstream.doors.transport import PlainTransport, TransportFactory

logger = logging.getLogger(__name__)

STUCK_SECONDS_MAX = 60
"""How long a client may pause within a frame, or while it takes a response."""
HUNG_UP_SECONDS_MAX = 10
"""How long a response may wait for other clients after its own hung up: it may still read, as `nc -N` does."""
CONTESTED_SECONDS_MAX = 10
"""Replaces `STUCK_SECONDS_MAX` while connections wait for memory, and then limits the time of a whole frame."""


class FramedDoor(EngineDoor[Connection]):
    """Subclasses set their name and create the connections of their protocol."""

    def __init__(self, sessions: Sessions, transport: TransportFactory = PlainTransport) -> None:
        super().__init__(sessions, transport, Budget(sessions.config.inflight_bytes_max // 2))
        self.answers = Budget(sessions.config.inflight_bytes_max // 2)
        """A separate budget, so that slow readers never block writers."""

    def look_around(self) -> None:
        contested = self.frames.is_contested or self.answers.is_contested
        # `last_used` may be too early by up to one sweep interval.
        patience = SWEEP_SECONDS + (CONTESTED_SECONDS_MAX if contested else STUCK_SECONDS_MAX)
        for connection in list(self._connections):
            quiet = self.now - connection.last_used
            is_abandoned = connection.hung_up and connection.protocol.waits_for_others
            if (quiet > HUNG_UP_SECONDS_MAX and is_abandoned) or (quiet > patience and connection.is_stuck):
                logger.info("closing a connection that was idle for %d s", quiet)
                connection.close()
        if self.frames.is_contested:
            self._take_memory_back(patience)

    def _take_memory_back(self, patience: float) -> None:
        """Closes connections that hold memory too long, longest first, until none waits."""
        holders = [(holds_since(each), each) for each in self._connections]
        slow = [(since, each) for since, each in holders if since is not None and self.now - since > patience]
        for since, connection in sorted(slow, key=lambda pair: pair[0]):
            if not self.frames.is_contested:
                return
            detail = f"one request took {self.now - since:.0f} s, and other connections wait for its memory"
            self.note_refusal(connection.peer, ProtocolError(detail))
            connection.close()


def holds_since(connection: Connection) -> float | None:
    """Since when it holds the door's memory for an incomplete frame, or for requests behind one that waits for other
    clients, as a join does.
    """
    if connection.holds_memory:
        return connection.frame_began
    return connection.last_used if connection.held and connection.protocol.waits_for_others else None
