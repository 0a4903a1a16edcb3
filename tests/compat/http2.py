"""HTTP/2 without a client (RFC 9113): frames over a plain socket, for what no gRPC client would send."""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple, Self

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, PING, GOAWAY = 0, 1, 4, 6, 7
END_STREAM, ACK, END_HEADERS = 1, 1, 4
CONCURRENT_STREAMS, INITIAL_WINDOW = 3, 4
TIMEOUT_SECONDS = 20.0


class Frame(NamedTuple):
    kind: int
    flags: int
    stream: int
    body: bytes


class Http2:
    def __init__(self, address: str, **settings: int) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), TIMEOUT_SECONDS)
        self._data = b""
        names = {"initial_window": INITIAL_WINDOW}
        body = b"".join(struct.pack(">HI", names[name], value) for name, value in settings.items())
        self.socket.sendall(PREFACE + frame(SETTINGS, 0, 0, body))

    def open(self, stream: int, method: str, *, end: bool = False) -> None:
        """Begins a call of a method of Comet's service."""
        fields = {
            ":method": "POST",
            ":scheme": "http",
            ":path": f"/comet.v1.BrokerService/{method}",
            ":authority": "localhost",
            "te": "trailers",
            "content-type": "application/grpc",
        }
        # RFC 7541, literals without indexing and without Huffman codes
        block = b"".join(b"\0%c%s%c%s" % (len(n), n.encode(), len(v), v.encode()) for n, v in fields.items())
        self.socket.sendall(frame(HEADERS, END_HEADERS | (END_STREAM if end else 0), stream, block))

    def send(self, stream: int, message: bytes, *, size: int | None = None) -> None:
        """A message; with `size` only its beginning, and the call goes on."""
        whole = struct.pack(">BI", 0, len(message) if size is None else size) + message
        for start in range(0, len(whole), 16_384):
            is_last = size is None and start + 16_384 >= len(whole)
            self.socket.sendall(frame(DATA, END_STREAM if is_last else 0, stream, whole[start : start + 16_384]))

    def receive(self) -> Frame | None:
        """The next frame; None at the end of the connection."""
        head = self._take(9)
        if head is None:
            return None
        size, kind, flags, stream = int.from_bytes(head[:3]), head[3], head[4], int.from_bytes(head[5:])
        body = self._take(size)
        return None if body is None else Frame(kind, flags, stream, body)

    def receive_until(self, kind: int, stream: int = 0) -> Frame:
        while (found := self.receive()) is not None:
            if (found.kind, found.stream) == (kind, stream):
                return found
        raise AssertionError(f"the connection ended before a frame of type {kind}")

    def has_ended(self) -> bool:
        """Reads to the end of the connection; whether it comes in time."""
        try:
            while self.receive() is not None:
                pass
        except TimeoutError:
            return False
        except ConnectionError:
            return True
        return True

    def _take(self, size: int) -> bytes | None:
        while len(self._data) < size:
            received = self.socket.recv(1 << 16)
            if not received:
                return None
            self._data += received
        taken, self._data = self._data[:size], self._data[size:]
        return taken

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    return len(body).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + body
