"""The sending side of a connection: responses and messages in order, without blocking.

A large payload is its own chunk and is never copied here: a message for a hundred subscribers is in memory once,
however slowly they read.
"""

from __future__ import annotations

from collections import deque

from millstream.doors.transport import Transport

JOIN_BYTES_MAX = 64 * 1024
"""Chunks up to this total size are sent with one system call."""


class Outbox:
    __slots__ = ("_chunks", "_transport", "size")

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._chunks: deque[bytes | memoryview] = deque()
        self.size = 0
        """Bytes that wait to be sent."""

    def put(self, chunk: bytes) -> None:
        self._chunks.append(chunk)
        self.size += len(chunk)

    def send(self) -> int:
        """Sends as much as the transport takes and returns the count. Raises OSError if the peer is gone."""
        chunks = self._chunks
        sent = 0
        while chunks:
            data = chunks.popleft() if len(chunks) == 1 else self._take()
            try:
                count = self._transport.send(data)
            except (BlockingIOError, InterruptedError):
                count = 0
            sent += count
            if count < len(data):
                chunks.appendleft(memoryview(data)[count:])
                break
        self.size -= sent
        return sent

    def _take(self) -> bytes | memoryview:
        chunks = self._chunks
        first = chunks.popleft()
        size = len(first)
        if size + len(chunks[0]) > JOIN_BYTES_MAX:
            return first
        run = [first]
        while chunks and size + len(chunks[0]) <= JOIN_BYTES_MAX:
            run.append(chunks.popleft())
            size += len(run[-1])
        return b"".join(run)
