"""A door: a listening transport, its connections, and what they share.

It uses non-blocking transports on the event loop's readers, not asyncio's streams or protocols. That halves the work
per request, and each connection controls when it is read.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import ClassVar, Generic, Protocol, TypeVar

from millstream.broker.session import Session, Sessions
from millstream.config import Address
from millstream.core.clock import Timer
from millstream.core.errors import ProtocolError
from millstream.core.logs import Damped
from millstream.doors.connections import Client, Connections
from millstream.doors.engine.protocol import LENGTH
from millstream.doors.engine.unread import Unread
from millstream.doors.listener import Listener
from millstream.doors.memory import Budget, BufferPool
from millstream.doors.transport import Transport, TransportFactory

refusals = Damped(__name__)

SWEEP_SECONDS = 10
CLOSE_SECONDS_MAX = 2.0
"""How long a closing door or connection waits for outstanding answers."""


class Served(Client, Protocol):
    peer: str

    @property
    def is_unread(self) -> bool: ...

    def stop_reading(self) -> None: ...


C = TypeVar("C", bound=Served)


class EngineDoor(ABC, Generic[C]):
    name: ClassVar[str]
    """As in `serve --NAME`."""
    title: ClassVar[str] = ""
    """The protocol's name, where it is not the capitalized `name`."""
    SHARED_BYTES: ClassVar[int] = 256 * 1024
    """Size of the receive buffer of all connections."""
    FRAME_BYTES_MIN: ClassVar[int] = 0
    waiting_bytes_max: ClassVar[int] = BufferPool.SMALL
    """The largest buffer that an incomplete frame waits for (`engine/connection.py`)."""
    reserves_whole: ClassVar[bool] = False
    """Whether such a frame reserves all of its memory at once, and so holds none while it waits: otherwise frames that
    wait for a larger buffer could hold the memory that each of them waits for.
    """

    counts_backlog: ClassVar[bool] = True
    """Whether `frames` counts bytes that wait behind a parked request."""

    def __init__(self, sessions: Sessions, transport: TransportFactory, frames: Budget) -> None:
        self._open_session = sessions.open
        self.config = sessions.config
        self.loop = asyncio.get_running_loop()
        self.clock = sessions.clock
        self.metrics = sessions.metrics
        self.frame_bytes_max = sessions.config.frame_bytes_max
        self.shared = memoryview(bytearray(self.SHARED_BYTES))
        self.pool = BufferPool()
        self.frames = frames
        self.unread: Unread[C] = Unread(sessions.config.inflight_bytes_max)
        self._connections: Connections[C] = Connections(sessions.config, self.metrics, self.clock)
        self._listener = Listener(
            self.name, self.title or self.name.capitalize(), self._connections, transport, self._let_in
        )
        self._sweeper: Timer | None = None
        self.is_closing = False
        """Whether reading has stopped on all connections."""
        self.now: float = self.clock.monotonic()
        """The time of the last sweep or new connection: exact enough for a connection's `last_used`."""

    def open_session(self, peer: str, client_id: str = "") -> Session:
        return self._open_session(self.name, peer, client_id)

    @abstractmethod
    def welcome(self, transport: Transport, peer: str) -> C: ...

    def note_refusal(self, peer: str, error: ProtocolError) -> None:
        """Logs why a connection is closed."""
        refusals.warning("closing the connection from %s to the %s door: %s", peer, self.name, error)

    @abstractmethod
    def look_around(self) -> None:
        """Closes connections that are quiet for too long."""

    def start(self, address: Address) -> Address:
        self._sweeper = self.clock.call_later(SWEEP_SECONDS, self._sweep)
        return self._listener.start(address)

    def _let_in(self, transport: Transport, peer: str) -> None:
        self.now = self.clock.monotonic()
        self._connections.add(self.welcome(transport, peer), peer)

    def forget(self, connection: C) -> None:
        self._connections.discard(connection)

    def frame_size(self, beginning: memoryview | bytearray, head_bytes: int) -> int:
        """The size of the frame that begins with this head, and with it."""
        (size,) = LENGTH.unpack_from(beginning, head_bytes - LENGTH.size)
        self.check_size(size)
        return head_bytes + int(size)

    def check_size(self, size: int) -> None:
        """Checks the frame size from its head."""
        if not self.FRAME_BYTES_MIN <= size <= self.frame_bytes_max:
            raise ProtocolError(f"a frame of {size} bytes: at most {self.frame_bytes_max} are allowed")

    def look_for_memory(self) -> None:
        """Called when a connection waits for memory. By default the next sweep takes memory back."""

    def wait_for_reader(self, connection: C, size: int) -> None:
        """A client does not read its answers; `size` bytes of them are in memory. At the limit of all such clients, the
        one that has read nothing for longest loses its connection.
        """
        self.unread.wait(connection, size)
        if self.unread.is_over:
            self.loop.call_soon(self._shed)

    def _shed(self) -> None:
        while self.unread.is_over:
            connection = self.unread.longest
            size = self.unread.done(connection)
            detail = f"the client does not read its answers: {size} bytes are unsent"
            self.note_refusal(connection.peer, ProtocolError(detail))
            connection.close()

    def _sweep(self) -> None:
        self.now = self.clock.monotonic()
        self.look_around()
        self._sweeper = self.clock.call_later(SWEEP_SECONDS, self._sweep)

    async def close(self) -> None:
        """Stops accepting and reading, sends answers that wait for a sync, then closes all connections."""
        self._stop()
        for connection in self._connections:
            connection.stop_reading()
        deadline = self.loop.time() + CLOSE_SECONDS_MAX
        while any(each.is_owed or each.is_unread for each in self._connections) and self.loop.time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        self._close_all()

    def abort(self) -> None:
        """Closes everything at once, like the end of the process: no client gets an answer."""
        self._stop()
        self._close_all()

    def _stop(self) -> None:
        self.is_closing = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        self._listener.close()

    def _close_all(self) -> None:
        for connection in list(self._connections):
            connection.close()
        self._listener.hang_ups.close()
