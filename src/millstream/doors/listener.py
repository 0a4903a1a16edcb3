"""A listening socket for doors that serve plain non-blocking connections on the event loop's readers.

It binds and accepts; the door creates and limits the connections. Without free descriptors it makes the door evict a
connection for the new one. If the door evicts none, it pauses instead of spinning.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable

from millstream.config import Address
from millstream.core.errors import StartupError
from millstream.core.logs import Damped

failures = Damped(__name__)

BACKLOG = 1024
ACCEPTS_PER_TURN = 64
ACCEPT_PAUSE_SECONDS = 0.1

Welcome = Callable[[socket.socket, str], bool]
"""Takes a connected socket and its peer's address; returns whether there was room. If not, the listener closes the
socket.
"""


class Listener:
    def __init__(self, door: str, clients: str, welcome: Welcome, make_room: Callable[[], bool]) -> None:
        """`door` is the name of its flag, `clients` names its clients in errors. `make_room` evicts a connection and
        returns whether it could.
        """
        self._door = door
        self._clients = clients
        self._welcome = welcome
        self._make_room = make_room
        self._loop = asyncio.get_running_loop()
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
                if error.errno in (errno.EMFILE, errno.ENFILE) and self._make_room():
                    continue
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._pause()
                return
            connected.setblocking(False)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not self._welcome(connected, peer[0]):
                connected.close()

    def _pause(self) -> None:
        """Stops accepting for `ACCEPT_PAUSE_SECONDS`."""
        listener = self._socket
        assert listener is not None
        self._loop.remove_reader(listener.fileno())
        self._loop.call_later(
            ACCEPT_PAUSE_SECONDS,
            lambda: self._loop.add_reader(listener.fileno(), self.accept) if self._socket is listener else None,
        )
