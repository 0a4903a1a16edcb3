"""The transport of a connection: what carries a client's bytes.

A door's engine receives, sends, watches and closes through a `Transport` only. `PlainTransport` is a TCP socket. A
transport that encrypts has no `sendfile` and may hold received bytes that the kernel does not know of.

Rules
-----
1. No method blocks. `recv_into` and the send methods raise `BlockingIOError` if nothing can be moved now, and another
   `OSError` if the connection is broken.
2. `recv_into` returns 0 at the end of the stream only, so it never gets an empty buffer.
3. While it is read, a transport calls back in every turn of the event loop in which bytes or the end of the stream
   wait, wherever they wait.
4. `recv_into` and `send` are attributes: an engine calls the socket's own methods, without a call in between.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import sys
import termios
from collections.abc import Callable
from typing import Protocol

from millstream.core.disk import OpenFile
from millstream.doors.hangup import HangUps, Noticed

LOW_WATER_BYTES_MAX = 256 * 1024
_QUICK_ACK = getattr(socket, "TCP_QUICKACK", None)


class Transport(Protocol):
    @property
    def recv_into(self) -> Callable[[memoryview], int]: ...

    @property
    def send(self) -> Callable[[bytes | memoryview], int]:
        """Sends the beginning of the bytes and returns its length."""

    def send_more(self, data: bytes | memoryview) -> int:
        """`send`, when further bytes follow at once."""

    def send_range(self, file: OpenFile, position: int, size: int) -> int:
        """Sends the beginning of a file's range; 0 if the file is too short."""

    def start_reading(self, on_readable: Callable[[], None]) -> None: ...

    def stop_reading(self) -> None: ...

    def start_writing(self, on_writable: Callable[[], None]) -> None:
        """Calls back while there is room to send."""

    def stop_writing(self) -> None: ...

    def is_at_end(self) -> bool:
        """Whether the client's stream has ended, without reading. Raises like `recv_into`."""

    def wake_at(self, count: int) -> None:
        """A hint to call back when so many bytes wait (up to a limit), not for each piece of a large frame."""

    def watch_hang_up(self, noticed: Noticed) -> None:
        """Reports a hang-up although the transport is not read (`hangup.py`)."""

    def end(self) -> None:
        """Ends the broker's stream behind the sent bytes; the client's goes on."""

    def close(self) -> None:
        """Call after `stop_reading` and `stop_writing`."""

    def local_address(self) -> tuple[str, int]:
        """The address that the client connected to."""

    def fileno(self) -> int:
        """For a poller: readable if the kernel has bytes."""

    def unread_bytes(self) -> int:
        """How many bytes wait in the kernel."""

    def acknowledge(self) -> None:
        """A hint to acknowledge received bytes at once, not 40 ms later (delayed ACK)."""


TransportFactory = Callable[[socket.socket, HangUps], Transport]
"""Takes an accepted, non-blocking socket."""


class PlainTransport:
    __slots__ = ("_hang_ups", "_loop", "_low_water", "_socket", "recv_into", "send")

    def __init__(self, connected: socket.socket, hang_ups: HangUps) -> None:
        self._socket = connected
        self._hang_ups = hang_ups
        self._loop = hang_ups.loop
        self._low_water = 1
        self.recv_into: Callable[[memoryview], int] = connected.recv_into
        self.send: Callable[[bytes | memoryview], int] = connected.send

    def send_more(self, data: bytes | memoryview) -> int:
        return self._socket.send(data, socket.MSG_MORE)

    def send_range(self, file: OpenFile, position: int, size: int) -> int:
        return os.sendfile(self._socket.fileno(), file.fd, position, size)

    def start_reading(self, on_readable: Callable[[], None]) -> None:
        self._loop.add_reader(self._socket.fileno(), on_readable)

    def stop_reading(self) -> None:
        self._loop.remove_reader(self._socket.fileno())

    def start_writing(self, on_writable: Callable[[], None]) -> None:
        self._loop.add_writer(self._socket.fileno(), on_writable)

    def stop_writing(self) -> None:
        self._loop.remove_writer(self._socket.fileno())

    def is_at_end(self) -> bool:
        return not self._socket.recv(1, socket.MSG_PEEK)

    def wake_at(self, count: int) -> None:
        """A producer that compresses, or has many small records, sends a frame slower than the broker reads it.
        Otherwise each megabyte would take a dozen turns of the loop.
        """
        low_water = min(max(count, 1), LOW_WATER_BYTES_MAX)
        if low_water != self._low_water:
            self._low_water = low_water
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water)

    def watch_hang_up(self, noticed: Noticed) -> None:
        self._hang_ups.watch(self._socket.fileno(), noticed)

    def end(self) -> None:
        self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._hang_ups.forget(self._socket.fileno())
        self._socket.close()

    def local_address(self) -> tuple[str, int]:
        host, port = self._socket.getsockname()[:2]
        return host, port

    def fileno(self) -> int:
        return self._socket.fileno()

    def unread_bytes(self) -> int:
        return int.from_bytes(fcntl.ioctl(self._socket.fileno(), termios.FIONREAD, bytes(4)), sys.byteorder)

    def acknowledge(self) -> None:
        if _QUICK_ACK is not None:
            with contextlib.suppress(OSError):
                self._socket.setsockopt(socket.IPPROTO_TCP, _QUICK_ACK, 1)
