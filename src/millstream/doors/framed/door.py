"""A door for protocols of length-prefixed frames: a listening socket and the connections behind it.

Subclasses of `connection.py` implement the protocol. The door holds their shared parts: admission, one receive buffer,
memory budgets, and the sweep that closes stuck connections.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from millstream.broker.broker import Broker
from millstream.broker.session import Session
from millstream.config import Address
from millstream.core.clock import Timer
from millstream.core.errors import ProtocolError
from millstream.core.logs import Damped
from millstream.doors.connections import Connections
from millstream.doors.hangup import HangUps
from millstream.doors.keepalive import keep_alive
from millstream.doors.listener import Listener
from millstream.doors.memory import Budget, BufferPool

if TYPE_CHECKING:
    from millstream.doors.framed.connection import FramedConnection

logger = logging.getLogger(__name__)
refusals = Damped(__name__)

SHARED_BYTES = 256 * 1024
SWEEP_SECONDS = 10
STUCK_SECONDS_MAX = 60
"""How long a client may pause within a frame, or while it takes a response."""
HUNG_UP_SECONDS_MAX = 10
"""How long a response may wait for other clients after its own hung up: it may still read, as `nc -N` does."""
CONTESTED_SECONDS_MAX = 10
"""Replaces `STUCK_SECONDS_MAX` while connections wait for memory, and then limits the time of a whole frame."""
CLOSE_SECONDS_MAX = 2.0
"""How long a closing door or connection waits for outstanding responses."""


class FramedDoor(ABC):
    """Subclasses set their name, as in `serve --NAME`, and create the connections of their protocol."""

    name = ""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.config = broker.config
        self.loop = asyncio.get_running_loop()
        self.clock = broker.clock
        self.metrics = broker.metrics
        self.frame_bytes_max = broker.config.frame_bytes_max
        self.shared = memoryview(bytearray(SHARED_BYTES))
        self.pool = BufferPool()
        self.frames = Budget(broker.config.inflight_bytes_max // 2)
        self.answers = Budget(broker.config.inflight_bytes_max // 2)
        """A separate budget, so that slow readers never block writers."""
        self.hang_ups = HangUps(self.loop)
        self._connections: Connections[FramedConnection] = Connections(broker.config, self.metrics, self.clock)
        self._listener = Listener(self.name, self.name.capitalize(), self._let_in, self._connections.make_room)
        self._sweeper: Timer | None = None
        self.is_closing = False
        """Whether reading has stopped on all connections."""
        self.now = self.clock.monotonic()
        """Time of the last sweep or new connection: exact enough for `last_used`."""

    @abstractmethod
    def welcome(self, connected: socket.socket, peer: str) -> FramedConnection: ...

    def open_session(self, peer: str, client_id: str = "") -> Session:
        return Session(self._broker, self.name, peer, client_id=client_id)

    def start(self, address: Address) -> Address:
        self._sweeper = self.clock.call_later(SWEEP_SECONDS, self._sweep)
        return self._listener.start(address)

    def _let_in(self, connected: socket.socket, peer: str) -> bool:
        self.now = self.clock.monotonic()
        if not self._connections.have_room(peer):
            return False
        keep_alive(connected)
        self._connections.add(self.welcome(connected, peer), peer)
        return True

    def check_size(self, size: int) -> None:
        """Checks the frame size from its head."""
        if not 0 <= size <= self.frame_bytes_max:
            raise ProtocolError(f"a frame of {size} bytes: at most {self.frame_bytes_max} are allowed")

    def forget(self, connection: FramedConnection) -> None:
        self._connections.discard(connection)

    def note_refusal(self, peer: str, error: ProtocolError) -> None:
        """Logs why a connection is closed."""
        self.metrics.request_errors += 1
        refusals.warning("closing the %s connection from %s: %s", self.name, peer, error)

    def _sweep(self) -> None:
        self.now = self.clock.monotonic()
        contested = self.frames.is_contested or self.answers.is_contested
        # `last_used` may be too early by up to one sweep interval.
        patience = SWEEP_SECONDS + (CONTESTED_SECONDS_MAX if contested else STUCK_SECONDS_MAX)
        for connection in list(self._connections):
            quiet = self.now - connection.last_used
            if (quiet > HUNG_UP_SECONDS_MAX and connection.is_abandoned) or (quiet > patience and connection.is_stuck):
                logger.info("closing a connection that was idle for %d s", quiet)
                connection.close()
        if self.frames.is_contested:
            self._take_memory_back(patience)
        self._sweeper = self.clock.call_later(SWEEP_SECONDS, self._sweep)

    def _take_memory_back(self, patience: float) -> None:
        """Closes connections that hold memory too long, longest first, until none waits."""
        holders = [(each.holds_since, each) for each in self._connections]
        slow = [(since, each) for since, each in holders if since is not None and self.now - since > patience]
        for since, connection in sorted(slow, key=lambda pair: pair[0]):
            if not self.frames.is_contested:
                return
            detail = f"{self.now - since:.0f} s for one request, while others wait for the memory that it holds"
            self.note_refusal(connection.peer, ProtocolError(detail))
            connection.close()

    async def close(self) -> None:
        """Stops accepting and reading, sends responses that wait for a sync, then closes all connections."""
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
