"""Two throw-away transports: TLS, which has nothing of a socket but bytes, and one in memory, without a socket."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Callable

from millstream.core.disk import OpenFile
from millstream.doors.hangup import HangUps, Noticed
from millstream.doors.transport import PlainTransport

RANGE_BYTES_MAX = 64 * 1024


class TlsTransport(PlainTransport):
    """TLS keeps decrypted bytes to itself, has no `sendfile`, and cannot look at a byte without taking it."""

    def __init__(self, context: ssl.SSLContext, connected: socket.socket, hang_ups: HangUps) -> None:
        self._tls = context.wrap_socket(connected, server_side=True, do_handshake_on_connect=False)
        super().__init__(self._tls, hang_ups)
        self._taken = b""
        self._on_readable: Callable[[], None] | None = None
        self.recv_into = self._recv_into
        self.send = self._send

    def _recv_into(self, view: memoryview) -> int:
        assert len(view), "a buffer without room"
        if self._taken:
            view[:1], self._taken = self._taken, b""
            return 1
        try:
            return self._tls.recv_into(view)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError from error

    def _send(self, data: bytes | memoryview) -> int:
        try:
            return self._tls.send(data)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError from error

    def send_more(self, data: bytes | memoryview) -> int:
        return self._send(data)

    def send_range(self, file: OpenFile, position: int, size: int) -> int:
        return self._send(os.pread(file.fd, min(size, RANGE_BYTES_MAX), position))

    def is_at_end(self) -> bool:
        byte = bytearray(1)
        count = self._recv_into(memoryview(byte))
        self._taken = bytes(byte[:count])
        return count == 0

    def wake_at(self, count: int) -> None: ...

    def start_reading(self, on_readable: Callable[[], None]) -> None:
        self._on_readable = on_readable
        super().start_reading(self._read)
        self._read_on()

    def stop_reading(self) -> None:
        self._on_readable = None
        super().stop_reading()

    def _read(self) -> None:
        if self._on_readable is not None:
            self._on_readable()
            self._read_on()

    def _read_on(self) -> None:
        """The event loop does not report bytes that are decrypted already."""
        if self._on_readable is not None and (self._taken or self._tls.pending()):
            self._loop.call_soon(self._read)


class MemoryTransport:
    """The client's end is `put`, `put_end` and `taken`. It takes `room` bytes, and more as `room` is raised."""

    def __init__(self, room: int = 1 << 30) -> None:
        self._loop = asyncio.get_running_loop()
        self._arrived = bytearray()
        self._is_ended = False
        self._on_readable: Callable[[], None] | None = None
        self._on_writable: Callable[[], None] | None = None
        self._noticed: Noticed | None = None
        self._room = room
        self.taken = bytearray()
        self.is_closed = False

    def put(self, data: bytes) -> None:
        self._arrived += data
        self._wake()

    def put_end(self) -> None:
        self._is_ended = True
        if self._noticed is not None:
            self._noticed(False)
        self._wake()

    def give_room(self, size: int) -> None:
        self._room += size
        self._loop.call_soon(self._write)

    @property
    def is_read(self) -> bool:
        return self._on_readable is not None

    @property
    def unread(self) -> int:
        return len(self._arrived)

    def _wake(self) -> None:
        self._loop.call_soon(self._read)

    def _read(self) -> None:
        if self._on_readable is not None and (self._arrived or self._is_ended):
            self._on_readable()
            self._wake()

    def _write(self) -> None:
        if self._on_writable is not None and self._room:
            self._on_writable()
            self._loop.call_soon(self._write)

    def recv_into(self, view: memoryview) -> int:
        assert len(view), "a buffer without room"
        if not (self._arrived or self._is_ended):
            raise BlockingIOError
        count = min(len(view), len(self._arrived))
        view[:count] = self._arrived[:count]
        del self._arrived[:count]
        return count

    def send(self, data: bytes | memoryview) -> int:
        if not self._room:
            raise BlockingIOError
        count = min(len(data), self._room)
        self._room -= count
        self.taken += data[:count]
        return count

    def send_more(self, data: bytes | memoryview) -> int:
        return self.send(data)

    def send_range(self, file: OpenFile, position: int, size: int) -> int:
        return self.send(os.pread(file.fd, size, position))

    def start_reading(self, on_readable: Callable[[], None]) -> None:
        self._on_readable = on_readable
        self._wake()

    def stop_reading(self) -> None:
        self._on_readable = None

    def start_writing(self, on_writable: Callable[[], None]) -> None:
        self._on_writable = on_writable
        self._loop.call_soon(self._write)

    def stop_writing(self) -> None:
        self._on_writable = None

    def is_at_end(self) -> bool:
        if not (self._arrived or self._is_ended):
            raise BlockingIOError
        return not self._arrived

    def wake_at(self, count: int) -> None: ...

    def watch_hang_up(self, noticed: Noticed) -> None:
        self._noticed = noticed

    def end(self) -> None: ...

    def close(self) -> None:
        assert self._on_readable is None and self._on_writable is None
        self._noticed = None
        self.is_closed = True

    def local_address(self) -> tuple[str, int]:
        return "127.0.0.1", 9092

    def fileno(self) -> int:
        return -1

    def unread_bytes(self) -> int:
        return len(self._arrived)

    def acknowledge(self) -> None: ...
