"""The engine of a connection: it reads, parks, sends and closes, whatever its protocol is.

    transport --> shared buffer, or a frame's own --> Protocol.take --> outbox --> transport

Receiving. All connections of a door share one buffer, which receives many small requests at once; the protocol handles
them in place. An incomplete frame moves into its own buffer (`assembly.py`). Handlers do not use a frame's bytes after
they return.

Parking. A protocol that cannot answer yet sets `is_parked`: no request is handled until `unpark`. The reader stays
until bytes arrive: most answers are ready before that, and removing and adding a reader costs two system calls.

Hang-up. A read end of the stream goes to `Protocol.ended`. While the connection is parked behind unread bytes,
`hangup.py` detects a hang-up, and `Protocol.hung_up` ends what waits for other clients.

Sending. A protocol puts answers into the outbox and calls `send`, at any time: a message needs no request. `stalled`
and `caught_up` tell a protocol that pushes messages when to pause.

Backpressure. The connection is not read while answers wait for the client, while it is parked with unread bytes, and
while the door has no memory. A frame larger than the door's `waiting_bytes_max` does not wait for memory: it would
hold its memory meanwhile, and several such frames would deadlock. Its connection is closed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from millstream.core.errors import ProtocolError
from millstream.doors.engine.assembly import Assembly
from millstream.doors.engine.protocol import CLOSED, Protocol
from millstream.doors.memory import Budget
from millstream.doors.outbox import Outbox
from millstream.doors.transport import Transport

if TYPE_CHECKING:
    from millstream.doors.engine.door import EngineDoor

logger = logging.getLogger(__name__)

HEADER_READ_BYTES = 4096
"""The first read if a large frame is expected: just its header; the rest goes into the frame's own buffer."""


class Connection:
    __slots__ = (
        "_assembly",
        "_backlog",
        "_is_read",
        "_leave_line",
        "closed",
        "door",
        "held",
        "hung_up",
        "is_ending",
        "is_parked",
        "is_resuming",
        "is_written",
        "last_used",
        "outbox",
        "peer",
        "protocol",
        "room",
        "transport",
    )

    def __init__(
        self, door: EngineDoor[Connection], transport: Transport, peer: str, serve: Callable[[Connection], Protocol]
    ) -> None:
        self.door = door
        self.transport = transport
        self.peer = peer
        self.outbox = Outbox(transport)
        self._backlog: memoryview | None = None
        """Bytes that were received but not handled before the connection was parked; in a buffer of their own."""
        self._leave_line: Callable[[], None] | None = None
        """Set while the connection waits for memory."""
        self._is_read = True
        self.is_parked = False
        self.is_written = False
        """Whether answers wait for the client to read them."""
        self.is_resuming = False
        """Whether the protocol takes the backlog."""
        self.is_ending = False
        """The client sends no more; it still gets its answers."""
        self.held = 0
        """Bytes of the door's memory for the backlog, if the door counts it."""
        self.room = 0
        """Bytes of the door's memory for answers, reserved by the protocol, which gives them back in `sent`."""
        self.hung_up = False
        """Whether the client has ended its stream."""
        self.closed = False
        self.last_used = door.now
        self.protocol: Protocol = serve(self)
        self._assembly = Assembly(door, transport, self.protocol.HEAD_BYTES)
        transport.start_reading(self._on_readable)
        transport.watch_hang_up(self._on_hang_up)

    # -- receiving ---------------------------------------------------------------------------------------------------

    def _on_readable(self) -> None:
        try:
            if self.is_parked:
                self._look_while_parked()
            elif self._assembly.buffer is None:
                self._receive()
            else:
                self._fill_frame()
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.close()
        except ProtocolError as error:
            self.protocol.refused(error)
        except Exception:
            self._fail()

    def _look_while_parked(self) -> None:
        """Detects the end of the stream. If there are bytes, stops reading until the answer is ready."""
        if self.transport.is_at_end():
            self.protocol.ended()
            return
        self.stop_reading()
        if self.hung_up:
            self.protocol.hung_up()

    def _on_hang_up(self, is_reset: bool) -> None:
        self.hung_up = True
        if self._is_read:
            self._on_readable()
        elif is_reset:
            self.close()
        else:
            self.protocol.hung_up()

    def _receive(self) -> None:
        door = self.door
        if door.counts_backlog and door.frames.free <= 0:
            self.await_memory(door.frames, 1, lambda: door.frames.give(1))
            return
        shared = door.shared
        view = shared[:HEADER_READ_BYTES] if self._assembly.expects_large else shared
        count = self.transport.recv_into(view)
        if count == 0:
            self.protocol.ended()
            return
        door.metrics.bytes_in += count
        self.last_used = door.now
        taken = self.protocol.take(view[:count])
        if taken < count:
            self._keep(view[taken:count])
        elif self._assembly.expects_large:
            self._assembly.expects_large = False
        if self.outbox.size and not self.closed:
            self.send()

    def _fill_frame(self) -> None:
        assembly = self._assembly
        count = assembly.fill()
        if count == 0:
            self.protocol.ended()
            return
        self.door.metrics.bytes_in += count
        self.last_used = self.door.now
        if not assembly.is_whole:
            if room := assembly.room_wanted:
                self._reserve(room, lambda: assembly.move(room))
            return
        buffer, size = assembly.finish()
        try:
            with memoryview(buffer)[:size] as frame:
                taken = self.protocol.take(frame)
                if taken < size:
                    self._keep(frame[taken:])
        finally:
            assembly.give(buffer)
        if self.outbox.size and not self.closed:
            self.send()

    def _keep(self, rest: memoryview, is_backlog: bool = False) -> None:
        """Keeps bytes that the protocol did not take: as the backlog, or as the beginning of a frame."""
        if self.closed:
            return
        if self.is_parked or self.is_written:
            if not is_backlog:
                rest = memoryview(bytearray(rest))
                if self.door.counts_backlog:
                    # These bytes are here already. The budget may become negative; then no connection reads.
                    self.held += len(rest)
                    self.door.frames.free -= len(rest)
            self._backlog = rest
            return
        assembly = self._assembly
        room = assembly.room_for(rest)
        if room <= self.door.pool.FREE or self.door.frames.take(room):
            assembly.start(rest, room)
        else:
            rest = memoryview(bytes(rest))
            self.await_memory(self.door.frames, room, lambda: assembly.start(rest, room))

    # -- memory ------------------------------------------------------------------------------------------------------

    def _reserve(self, size: int, go_on: Callable[[], None]) -> None:
        """For a frame that waits for its memory, if it has to."""
        if self.door.frames.take(size):
            go_on()
        else:
            self.await_memory(self.door.frames, size, go_on)

    def await_memory(self, budget: Budget, size: int, go_on: Callable[[], None]) -> None:
        """Parks until `size` bytes are reserved, then calls `go_on`."""
        if size > budget.limit:
            raise ProtocolError(f"one request needs {size} bytes; the door's limit for all is {budget.limit}")
        self.is_parked = True

        def granted() -> None:
            self._leave_line = None
            self.last_used = self.door.now  # from now on the connection waits for its client
            try:
                go_on()
            except ProtocolError as error:
                self.protocol.refused(error)
            except Exception:
                self._fail()
            if not self.closed and self.protocol.may_resume:
                self.is_parked = False
                self.send()
                self._go_on()

        self._leave_line = budget.wait(size, granted)
        self.door.look_for_memory()

    @property
    def waits_for_memory(self) -> bool:
        return self._leave_line is not None

    @property
    def is_inside_frame(self) -> bool:
        return self._assembly.buffer is not None

    @property
    def holds_memory(self) -> bool:
        """Whether an incomplete frame of this client holds the door's memory."""
        return self._assembly.holds_memory and self._leave_line is None

    @property
    def frame_began(self) -> float:
        """When the incomplete frame began."""
        return self._assembly.began

    # -- sending -----------------------------------------------------------------------------------------------------

    def has_sent(self) -> bool:
        """Sends the outbox; whether all of it was sent."""
        self.send()
        return not (self.is_written or self.closed)

    def send(self) -> None:
        """Sends as much of the outbox as the transport takes."""
        if self.is_written or self.closed:
            return
        try:
            self.door.metrics.bytes_out += self.outbox.send()
        except OSError:
            self.close()
            return
        if self.outbox.size:
            # Backpressure: a slow client's requests wait in the transport until it has read these answers.
            self.is_written = True
            self.transport.start_writing(self._on_writable)
            self.stop_reading()
            self.door.wait_for_reader(self, self.outbox.held)
            self.protocol.stalled()
        elif self.room:
            self.protocol.sent()

    def _on_writable(self) -> None:
        try:
            self.door.metrics.bytes_out += self.outbox.send()
        except OSError:
            self.close()
            return
        self.last_used = self.door.now
        if self.outbox:
            self.door.unread.has_taken(self)
            return
        self.door.unread.done(self)
        self.transport.stop_writing()
        self.is_written = False
        if self.room:
            self.protocol.sent()
        if self.is_parked:
            self._start_reading()
        else:
            self._go_on()
        if not self.is_written:
            self.protocol.caught_up()

    # -- resuming ----------------------------------------------------------------------------------------------------

    def unpark(self) -> None:
        self.is_parked = False
        self._go_on()

    def _go_on(self) -> None:
        """Handles the backlog, then resumes reading."""
        backlog, self._backlog = self._backlog, None
        if backlog is not None and not self.closed:
            self._take_backlog(backlog)
        if self.closed or self.is_written:
            return
        if not self.is_parked and self.is_ending:
            self.protocol.ended()
        elif not self.is_parked or self.hung_up:
            self._start_reading()

    def _take_backlog(self, backlog: memoryview) -> None:
        self.is_resuming = True
        self.last_used = self.door.now
        try:
            taken = self.protocol.take(backlog)
            if taken < len(backlog):
                self._keep(backlog[taken:], is_backlog=True)
        except ProtocolError as error:
            self.protocol.refused(error)
        except Exception:
            self._fail()
        finally:
            self.is_resuming = False
        if self._backlog is None and not self.closed:
            self._give_back(backlog)
        if self.outbox.size:
            self.send()

    def _give_back(self, backlog: memoryview) -> None:
        if self.door.counts_backlog:
            size = len(backlog.obj)  # type: ignore[arg-type]  # a bytearray of ours
            self.held -= size
            self.door.frames.give(size)

    def stop_reading(self) -> None:
        if self._is_read:
            self._is_read = False
            self.transport.stop_reading()

    def _start_reading(self) -> None:
        if not (self._is_read or self.is_ending or self.door.is_closing):
            self._is_read = True
            self.transport.start_reading(self._on_readable)

    # -- the end -----------------------------------------------------------------------------------------------------

    @property
    def has_backlog(self) -> bool:
        return self._backlog is not None

    @property
    def is_idle(self) -> bool:
        """Whether the broker waits for the client: for a request, for the rest of a frame (which may wait for memory),
        or for the client to read its answers.
        """
        return self.is_written or (self.protocol.is_idle and (not self.is_parked or self._leave_line is not None))

    @property
    def is_owed(self) -> bool:
        """Whether writes are in flight. Unread answers do not count."""
        return self.protocol.is_owed

    @property
    def is_unread(self) -> bool:
        return self.is_written

    @property
    def is_stuck(self) -> bool:
        """Whether it waits for the client to finish a frame or to read."""
        return self.is_written or (self.is_inside_frame and self._leave_line is None)

    def drop(self) -> None:
        """Forgets what was received and not handled."""
        self._assembly.drop()
        if self._leave_line is not None:
            self._leave_line()
            self._leave_line = None
        backlog, self._backlog = self._backlog, None
        if backlog is not None:
            self._give_back(backlog)

    def _fail(self) -> None:
        logger.exception("a request from %s failed; its connection is closed", self.peer)
        self.close()

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self.door.unread.done(self)
        self.stop_reading()
        if self.is_written:
            self.transport.stop_writing()
        self.protocol.closed()
        self.protocol = CLOSED
        self.transport.close()
        self._backlog = None
        if self._leave_line is not None:
            self._leave_line()
            self._leave_line = None
        self._assembly.drop()
        self.door.forget(self)
        held, self.held = self.held, 0
        self.door.frames.give(held)
