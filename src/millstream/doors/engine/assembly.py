"""Assembly of a frame that arrives in pieces.

The frame has its own buffer, which grows with the received bytes and never with the length in its head. The buffer
counts against the door's budget for frames, except the smallest size (`BufferPool.FREE`): many clients that send one
byte and stop must not use up the budget.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from millstream.core.errors import ProtocolError
from millstream.doors.transport import Transport

if TYPE_CHECKING:
    from millstream.doors.engine.door import EngineDoor

LARGE_BYTES = 64 * 1024
"""From this size on a frame does not wake the door for each piece."""


class Assembly:
    """One per connection; `buffer` is None between frames."""

    __slots__ = ("_door", "_expected", "_filled", "_head", "_transport", "began", "buffer", "expects_large")

    def __init__(self, door: EngineDoor[Any], transport: Transport, head_bytes: int) -> None:
        self._door = door
        self._transport = transport
        self._head = head_bytes
        self._filled = 0
        self._expected = 0
        """Size of the frame, or of its head until that is complete."""
        self.began = 0.0
        """Arrival time of its first bytes."""
        self.buffer: bytearray | None = None
        self.expects_large = False
        """Whether the last frame was large, which predicts a large next one."""

    def room_for(self, beginning: memoryview) -> int:
        """The memory that `start` needs."""
        pool = self._door.pool
        # After a large frame a client gets room for another at once; otherwise twice the bytes that it has sent.
        most = pool.LARGE if self.expects_large else len(beginning) * 2
        size = self._size(beginning)
        room = min(size, most)
        return pool.FREE if room <= pool.FREE else self._room_of(size, room)

    def start(self, beginning: memoryview, room: int) -> None:
        """The caller has reserved `room` bytes, if they are more than `FREE`."""
        self.began = self._door.clock.monotonic()
        self._expected = self._size(beginning)
        self._filled = len(beginning)
        self.buffer = self._door.pool.take(room)
        self.buffer[: self._filled] = beginning
        self._wake_at(self._expected - self._filled)

    def fill(self) -> int:
        """Receives available bytes and returns their count; 0 at the end of the stream."""
        buffer = self.buffer
        assert buffer is not None
        with memoryview(buffer)[self._filled : min(self._expected, len(buffer))] as room:
            count = self._transport.recv_into(room)
        self._filled += count
        if self._filled == self._expected == self._head:
            self._expected = self._size(buffer)  # the head is complete and gives the frame's size
        if self._filled < self._expected:
            if self._filled == len(buffer) and self._room_behind(buffer) > self._door.waiting_bytes_max:
                self._grow(buffer)
            self._wake_at(self._expected - self._filled)
        return count

    @property
    def room_wanted(self) -> int:
        """The memory that `move` needs when a buffer is full and the frame may wait for a larger one. Else 0."""
        buffer = self.buffer
        if buffer is None or self._filled < len(buffer) or self.is_whole:
            return 0
        return self._room_behind(buffer)

    def move(self, room: int) -> None:
        """Moves the frame into a buffer of `room` bytes, which the caller has reserved."""
        buffer = self.buffer
        assert buffer is not None
        if len(buffer) <= self._door.pool.FREE:  # until now it held no memory
            self.began = self._door.clock.monotonic()
        self._move(buffer, room)

    @property
    def is_whole(self) -> bool:
        return self._filled == self._expected

    @property
    def holds_memory(self) -> bool:
        return self.buffer is not None and len(self.buffer) > self._door.pool.FREE

    def finish(self) -> tuple[bytearray, int]:
        """The buffer and the frame's size. Return the buffer with `give`."""
        buffer, self.buffer = self.buffer, None
        assert buffer is not None
        self.expects_large = self._expected > self._door.pool.SMALL
        self._wake_at(1)
        return buffer, self._expected

    def give(self, buffer: bytearray) -> None:
        self._door.pool.give(buffer)
        if len(buffer) > self._door.pool.FREE:
            self._door.frames.give(len(buffer))

    def drop(self) -> None:
        buffer, self.buffer = self.buffer, None
        if buffer is not None:
            self.give(buffer)

    def _size(self, beginning: memoryview | bytearray) -> int:
        if len(beginning) < self._head:
            return self._head
        return self._door.frame_size(beginning, self._head)

    def _grow(self, buffer: bytearray) -> None:
        """At least doubles the buffer. Waiting for so much memory could deadlock several frames."""
        room = self._room_behind(buffer)
        if not self._door.frames.take(room):
            raise ProtocolError(f"no memory for a frame of {self._expected} bytes: other connections use it")
        self._move(buffer, room)

    def _room_behind(self, buffer: bytearray) -> int:
        return self._room_of(self._expected, min(self._expected, len(buffer) * 2))

    def _room_of(self, size: int, room: int) -> int:
        """The memory for `room` bytes of a frame, or for all of its bytes."""
        door = self._door
        return door.pool.size_for(size if door.reserves_whole and size <= door.waiting_bytes_max else room)

    def _move(self, buffer: bytearray, room: int) -> None:
        larger = self._door.pool.take(room)
        larger[: self._filled] = memoryview(buffer)[: self._filled]
        self.buffer = larger
        self.give(buffer)

    def _wake_at(self, count: int) -> None:
        self._transport.wake_at(count if self._expected > LARGE_BYTES else 1)
