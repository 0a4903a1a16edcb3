"""The receiving side of a connection: reads frames from the socket and hands them to the handlers.

All connections share one buffer, which receives many small requests at once. An incomplete frame moves into its own
buffer. That buffer grows with the received bytes, so a forged length costs no memory. All but the smallest of these
buffers count against the door's memory. While that is used up, the connection waits and is not read. A frame that is
larger than any batch does not wait: it would hold its memory meanwhile, and several such frames would deadlock. Its
connection is closed.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from struct import Struct
from typing import TYPE_CHECKING

from millstream.core.errors import ProtocolError

if TYPE_CHECKING:
    from millstream.doors.kafka.door import KafkaDoor

HEADER_READ_BYTES = 4096
"""The first read if a large frame is expected: just its header; the rest goes into the frame's own buffer."""
LOW_WATER_BYTES_MAX = 256 * 1024
SIZE = Struct(">i")


class Receiving(ABC):
    __slots__ = (
        "_backlog",
        "_buffer",
        "_door",
        "_expected",
        "_filled",
        "_frame_is_large",
        "_granted",
        "_is_parked",
        "_leave_line",
        "_low_water",
        "_metrics",
        "_sends_large",
        "_socket",
        "closed",
        "frame_began",
        "last_used",
    )

    def __init__(self, door: KafkaDoor, connected: socket.socket) -> None:
        self._door = door
        self._metrics = door.metrics
        self._socket = connected
        self._buffer: bytearray | None = None
        """The incomplete frame: `_filled` of `_expected` bytes, including the length prefix."""
        self._filled = 0
        self._expected = 0
        self._frame_is_large = False
        self._sends_large = False
        self._low_water = 1
        self._granted = 0
        """Bytes of the door's budget, granted after a wait, for the next frame."""
        self._leave_line: Callable[[], None] | None = None
        """Set while the connection waits for memory."""
        self._backlog: bytes = b""
        """Bytes that were received but not handled before the connection was parked."""
        self._is_parked = False
        self.closed = False
        self.last_used = door.now
        self.frame_began = door.now
        """When the incomplete frame began."""

    @abstractmethod
    def _take(self, data: memoryview) -> None:
        """Handles every whole frame in `data`, and keeps the rest."""

    @abstractmethod
    def _handle(self, frame: memoryview) -> None: ...

    @abstractmethod
    def _after_handling(self) -> None:
        """Called once per read."""

    def _park(self) -> None:
        """Stops handling until `_unpark`."""
        self._is_parked = True

    @abstractmethod
    def _unpark(self) -> None: ...

    @abstractmethod
    def close(self) -> None: ...

    def _receive(self) -> None:
        if self._buffer is not None:
            self._fill_frame()
            return
        shared = self._door.shared
        view = shared[:HEADER_READ_BYTES] if self._frame_is_large else shared
        count = self._socket.recv_into(view)
        if count == 0:
            self.close()
            return
        self._metrics.bytes_in += count
        self._take(view[:count])
        self._after_handling()

    def _start_frame(self, beginning: memoryview) -> None:
        """Moves an incomplete frame into its own buffer."""
        size = SIZE.unpack_from(beginning)[0] + 4 if len(beginning) >= 4 else 4
        pool = self._door.pool
        # Clients that sent a large frame before get a large buffer at once; other clients, twice the received bytes.
        room = min(size, pool.LARGE if self._sends_large else len(beginning) * 2)
        room = pool.FREE if room <= pool.FREE else pool.size_for(room)
        if room > pool.FREE and not self._reserve(room):
            self._backlog = bytes(beginning)
            return
        self.frame_began = self._door.clock.monotonic()  # `now` may be as old as the last sweep
        self._frame_is_large = size > len(self._door.shared) // 4
        self._expected = size
        self._filled = len(beginning)
        self._buffer = self._door.pool.take(room)
        self._buffer[: self._filled] = beginning
        if self._frame_is_large:
            self._wake_at(size - self._filled)

    def _wake_at(self, count: int) -> None:
        """Has the kernel report `count` bytes (up to a limit) at once, not every piece of a large frame.

        A producer that compresses, or has many small records, sends a frame slower than the broker reads it. Otherwise
        each megabyte would take a dozen turns of the loop.
        """
        low_water = min(max(count, 1), LOW_WATER_BYTES_MAX)
        if low_water != self._low_water:
            self._low_water = low_water
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water)

    def _reserve(self, size: int) -> bool:
        """Takes bytes from the door's budget, or parks until they are free."""
        if self._granted == size:
            self._granted = 0
            return True
        if self._door.budget.take(size):
            return True
        self._park()

        def grant() -> None:
            self._leave_line = None
            self._granted = size
            self._unpark()

        self._leave_line = self._door.budget.wait(size, grant)
        self._door.look_for_memory()
        return False

    def _fill_frame(self) -> None:
        buffer = self._buffer
        assert buffer is not None
        end = min(self._expected, len(buffer))
        if self._filled < end:
            with memoryview(buffer)[self._filled : end] as room:
                count = self._socket.recv_into(room)
            if count == 0:
                self.close()
                return
            self._metrics.bytes_in += count
            self._filled += count
        self.last_used = self._door.now
        if self._filled == end == 4 == self._expected:
            # Only the length prefix had arrived. Now the size of the frame is known.
            (size,) = SIZE.unpack_from(buffer)
            if size <= 0 or size > self._door.frame_bytes_max:
                raise self._out_of_bounds(size)
            self._expected = size + 4
        elif self._filled == self._expected:
            self._finish_frame(buffer)
            return
        elif self._filled == end:
            self._grow(buffer)
        if self._low_water > 1:
            self._wake_at(self._expected - self._filled)

    def _finish_frame(self, buffer: bytearray) -> None:
        if self._low_water > 1:
            self._wake_at(1)
        self._sends_large = len(buffer) > self._door.pool.SMALL
        with memoryview(buffer)[4 : self._expected] as frame:
            self._buffer = None
            try:
                self._handle(frame)
            finally:
                self._door.give_buffer(buffer)
        self._after_handling()

    def _grow(self, buffer: bytearray) -> None:
        """At least doubles the buffer: memory follows the received bytes, not the claimed length."""
        room = self._door.pool.size_for(min(self._expected, len(buffer) * 2))
        if room > self._door.pool.LARGE and not self._door.budget.take(room):
            raise ProtocolError(f"no memory for a frame of {self._expected} bytes: other connections use it")
        if room <= self._door.pool.LARGE and not self._reserve(room):
            return
        larger = self._door.pool.take(room)
        larger[: self._filled] = memoryview(buffer)[: self._filled]
        self._buffer = larger
        self._door.give_buffer(buffer)

    @property
    def is_inside_frame(self) -> bool:
        return self._buffer is not None

    @property
    def holds_memory(self) -> bool:
        """Whether an incomplete frame of this client holds the door's memory."""
        return self._buffer is not None and len(self._buffer) > self._door.pool.FREE and self._leave_line is None

    def _out_of_bounds(self, size: int) -> ProtocolError:
        return ProtocolError(f"a frame of {size} bytes: at most {self._door.frame_bytes_max} are allowed")

    def _drop_frame(self) -> None:
        """Returns the door's buffer and memory."""
        if self._buffer is not None:
            self._door.give_buffer(self._buffer)
            self._buffer = None
        if self._leave_line is not None:
            self._leave_line()
            self._leave_line = None
        if self._granted:
            self._door.budget.give(self._granted)
            self._granted = 0
