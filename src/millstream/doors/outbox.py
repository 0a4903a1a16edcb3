"""The sending side of a connection: bytes and file ranges, in order, without blocking and without copying files.

Chunks of bytes are joined and sent with one call. A memoryview is sent on its own and never copied: the rest of a chunk
that was sent in part, and a large payload that many connections share. It is in memory once, however slowly they read.
"""

from __future__ import annotations

from collections import deque

from millstream.doors.transport import Transport
from millstream.log.slice import Slice

COPY_BYTES_MAX = 16 * 1024
"""A range up to this size is cheaper to copy next to its header than to send with a separate system call."""
Chunk = bytes | Slice


class Outbox:
    __slots__ = ("_chunks", "_done", "_transport", "size")

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._chunks: deque[Chunk | memoryview] = deque()
        self._done = 0
        """Sent bytes of the first chunk, if it is a file range."""
        self.size = 0
        """Bytes put in since it was last empty."""

    def __bool__(self) -> bool:
        return bool(self._chunks)

    @property
    def held(self) -> int:
        """Waiting bytes that are in memory."""
        return sum(len(chunk) for chunk in self._chunks if not isinstance(chunk, Slice))

    def put(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)
        self.size += len(chunk) if type(chunk) is bytes else chunk.size  # type: ignore[union-attr]

    def put_shared(self, chunk: bytes) -> None:
        self._chunks.append(memoryview(chunk))
        self.size += len(chunk)

    def send(self) -> int:
        """Sends as much as the transport takes and returns the count. Raises OSError if the peer is gone."""
        chunks = self._chunks
        if len(chunks) == 1 and type(data := chunks[0]) is bytes:
            # Fast path for the common case: one response, and room for it.
            try:
                count = self._transport.send(data)
            except (BlockingIOError, InterruptedError):
                return 0
            if count == len(data):
                chunks.clear()
                self.size = 0
            else:
                chunks[0] = memoryview(data)[count:]
            return count
        sent = 0
        while chunks:
            first = chunks[0]
            count = self._send_range(first) if isinstance(first, Slice) else self._send_bytes()
            if count < 0:
                return sent
            sent += count
        self.size = 0
        return sent

    def _send_bytes(self) -> int:
        """Sends the byte chunks at the front with one call; -1 if there is no room."""
        chunks = self._chunks
        data = chunks.popleft()
        assert not isinstance(data, Slice)
        if chunks and type(data) is bytes:
            run = [data]
            while chunks and type(chunks[0]) is bytes:
                run.append(chunks.popleft())  # type: ignore[arg-type]
            data = b"".join(run)
        try:
            count = self._transport.send_more(data) if chunks else self._transport.send(data)
        except (BlockingIOError, InterruptedError):
            self._chunks.appendleft(data)
            return -1
        if count < len(data):
            self._chunks.appendleft(memoryview(data)[count:])
        return count

    def _send_range(self, chunk: Slice) -> int:
        assert chunk.file is not None
        try:
            count = self._transport.send_range(chunk.file, chunk.position + self._done, chunk.size - self._done)
        except (BlockingIOError, InterruptedError):
            return -1
        if count == 0:
            raise ConnectionAbortedError(f"segment file {chunk.file.path} truncated while it was being sent")
        self._done += count
        if self._done == chunk.size:
            self._chunks.popleft()
            self._done = 0
        return count


def pieces(chunk: Slice) -> Chunk:
    """The cheapest form to send: bytes for small slices and slices in memory."""
    if chunk.file is None or chunk.size <= COPY_BYTES_MAX:
        data = chunk.to_bytes()
        if len(data) < chunk.size:
            raise ConnectionAbortedError("segment file truncated while it was being sent")
        return data
    return chunk
