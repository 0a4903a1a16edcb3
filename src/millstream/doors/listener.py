"""A listening socket for doors that serve plain non-blocking connections on the event loop's readers.

It binds, accepts and makes transports; the door creates the connections, within the limits of `connections.py`. Without
free descriptors it evicts a connection for the new one. If there is none to evict, it pauses instead of spinning.

TCP keep-alive (RFC 9293) detects dead clients. Producers of Luxun and Flume keep one connection for their whole life.
If Luxun's producer sends a oneway item over a connection that the broker has closed, the item is lost without an error.
So these doors close no idle connection. Only a full door evicts a quiet connection for a new client (`connections.py`).
Kafka's clients reconnect, so that door closes idle connections. But a dead client may have a request that waits for
minutes, and only keep-alive detects that. Subscribers of FlowMQ may be silent for days.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from typing import Any

from millstream.config import Address
from millstream.core.errors import StartupError
from millstream.core.logs import Damped
from millstream.doors.connections import Connections
from millstream.doors.hangup import HangUps
from millstream.doors.transport import Transport, TransportFactory

failures = Damped(__name__)

BACKLOG = 1024
ACCEPTS_PER_TURN = 64
ACCEPT_PAUSE_SECONDS = 0.1
KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 4))
"""Detects a silently dead client within two minutes."""

Welcome = Callable[[Transport, str], None]
"""Takes a client's transport and address."""


class Listener:
    def __init__(
        self,
        door: str,
        clients: str,
        connections: Connections[Any],
        transport: TransportFactory,
        welcome: Welcome,
    ) -> None:
        """`door` is the name of its flag, `clients` names its clients in errors."""
        self._door = door
        self._clients = clients
        self._connections = connections
        self._transport = transport
        self._welcome = welcome
        self._loop = asyncio.get_running_loop()
        self.hang_ups = HangUps(self._loop)
        self._socket: socket.socket | None = None

    def start(self, address: Address) -> Address:
        """Listens and returns the bound address; port 0 binds a free port."""
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setblocking(False)
        try:
            listener.bind((address.host, address.port))
        except OSError as error:
            listener.close()
            raise StartupError(
                f"cannot listen on {address} for {self._clients} clients: {error.strerror or error}; "
                f"free the port, or choose another with --{self._door} HOST:PORT (port 0 takes a free one)"
            ) from error
        listener.listen(BACKLOG)
        self._socket = listener
        self._loop.add_reader(listener.fileno(), self.accept)
        return Address(address.host, listener.getsockname()[1])

    def close(self) -> None:
        if self._socket is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None

    def fileno(self) -> int:
        return -1 if self._socket is None else self._socket.fileno()

    def accept(self) -> None:
        """Accepts waiting clients, up to `ACCEPTS_PER_TURN`."""
        assert self._socket is not None
        for _ in range(ACCEPTS_PER_TURN):
            try:
                connected, peer = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                failures.error("cannot accept a connection: %s", error)
                if error.errno in (errno.EMFILE, errno.ENFILE) and self._connections.make_room():
                    continue
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._pause()
                return
            if not self._connections.have_room(peer[0]):
                connected.close()
                continue
            connected.setblocking(False)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in KEEPALIVE:
                connected.setsockopt(socket.IPPROTO_TCP, option, value)
            self._welcome(self._transport(connected, self.hang_ups), peer[0])

    def _pause(self) -> None:
        """Stops accepting for `ACCEPT_PAUSE_SECONDS`."""
        listener = self._socket
        assert listener is not None
        self._loop.remove_reader(listener.fileno())
        self._loop.call_later(
            ACCEPT_PAUSE_SECONDS,
            lambda: self._loop.add_reader(listener.fileno(), self.accept) if self._socket is listener else None,
        )
