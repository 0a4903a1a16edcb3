"""One client's connection: length-prefixed frames in, responses out, in the order of the requests.

    bytes --> frames --> handle --> response, at once or later --> line --> outbox --> bytes

Receiving. One read takes many small requests into a buffer that all connections of the door share, and they are handled
in place. An incomplete frame moves into its own buffer, which grows with the received bytes, so a large length in a
head costs nothing. Handlers do not use a frame's bytes after they return.

Responding. Every request gets a place in line; a response is sent after all before it. Requests that only append
(`overlaps`, and `reserve` their place) are handled while earlier appends wait for their sync. Any other request is
handled when all before it are answered: a client that pipelines "write, read" reads its own write.

Hang-up. A client that stops sending still gets its responses. While the connection is parked behind unread bytes,
`hangup.py` detects a hang-up. If a response then waits for other clients, as a join does, the door closes the
connection after `HUNG_UP_SECONDS_MAX`.

Backpressure. The connection is not read while responses wait for the client, while too many requests are in line, while
a partition has too many unsynced bytes of appends (`slow_down`), and while the door's memory is used up. A request with
a possibly large response returns `Large` and waits for memory. A frame waits too, before it holds any memory. A frame
that cannot grow later closes its connection: incomplete frames that wait for each other would deadlock.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar, NamedTuple

from millstream.core.errors import ProtocolError
from millstream.core.promise import Promise
from millstream.doors.framed.assembly import LENGTH, Assembly
from millstream.doors.framed.door import CLOSE_SECONDS_MAX, FramedDoor
from millstream.doors.memory import Budget
from millstream.doors.outbox import Outbox

logger = logging.getLogger(__name__)

IN_LINE_MAX = 1000
OUTBOX_BYTES_MAX = 1 << 20
"""No request is handled while more output than this waits: a small request can have a long response."""


class Large(NamedTuple):
    """A response of up to `room` bytes; `make` is called when that memory is reserved."""

    room: int
    make: Callable[[], bytes | Promise[bytes]]


Answer = bytes | Promise[bytes] | Large | None
"""`b""`: the protocol has no response, but the request keeps its place in line. None: see `reserve`."""


Place = list[bytes]
"""A request's place in line: empty until its response is known."""


class FramedConnection(ABC):
    LENGTH_AT: ClassVar[int] = 0
    """Position of the length in a frame's head: 4 bytes, which count the bytes after them."""

    __slots__ = (
        "_assembly",
        "_backlog",
        "_door",
        "_held",
        "_in_line",
        "_is_ending",
        "_is_parked",
        "_is_read",
        "_is_taking",
        "_is_written",
        "_leave_line",
        "_only_overlapping",
        "_outbox",
        "_room",
        "_socket",
        "_tasks",
        "closed",
        "hung_up",
        "last_used",
        "peer",
        "received",
        "slow_down",
    )

    def __init__(self, door: FramedDoor, connected: socket.socket, peer: str) -> None:
        self._door = door
        self._socket = connected
        self.peer = peer
        self._outbox = Outbox(connected)
        self._in_line: deque[Place] = deque()
        self._only_overlapping = True
        """Whether all requests in line are appends, so that further appends may be handled."""
        self._assembly = Assembly(door, connected, self.LENGTH_AT + LENGTH.size)
        self._backlog: memoryview | None = None
        """Received bytes that are not handled yet."""
        self._held = 0
        """Bytes of the frame budget for the backlog."""
        self._room = 0
        """Bytes of the response budget for responses in flight."""
        self._leave_line: Callable[[], None] | None = None
        """Set while the connection waits for a budget."""
        self._is_parked = False
        self._is_read = True
        self._is_written = False
        self._is_taking = False
        self._is_ending = False
        """The client sends no more; it still gets its responses."""
        self._tasks: set[asyncio.Task[None]] = set()
        self.slow_down = False
        """Set by a handler for backpressure: no request is handled until all in line are answered."""
        self.closed = False
        self.hung_up = False
        """Whether the client has ended its stream."""
        self.received = 0
        """In bytes."""
        self.last_used = door.now
        door.loop.add_reader(connected.fileno(), self._on_readable)
        door.hang_ups.watch(connected, self._on_hang_up)

    # -- for protocols -----------------------------------------------------------------------------------------------

    @abstractmethod
    def overlaps(self, frame: memoryview) -> bool:
        """Whether the request only appends, and may be handled before earlier appends are answered."""

    @abstractmethod
    def handle(self, frame: memoryview) -> Answer:
        """Handles one complete frame, head included. A `ProtocolError` closes the connection."""

    def reserve(self) -> Place:
        """Reserves the place in line of an append; `fill` sets its response, and `handle` returns None.

        Meanwhile further appends are handled. Behind any other request in line no request is.
        """
        place: Place = []
        if not self._in_line:
            self._only_overlapping = True
        self._in_line.append(place)
        return place

    def fill(self, place: Place, answer: bytes) -> None:
        """Sets the response of a place in line."""
        if self.closed:
            return
        line = self._in_line
        if line[0] is not place:
            place.append(answer)
            return
        if len(line) == 1 and not self._outbox.size and answer:
            line.clear()
            try:
                sent = self._socket.send(answer)
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError:
                self.close()
                return
            self._door.metrics.bytes_out += sent
            if sent < len(answer):
                self._outbox.put(answer[sent:])
                self._send()
            elif self._room:
                self._give_room()
        else:
            place.append(answer)
            self._drain_line()
            self._send()
        if self._is_parked and not line and self._leave_line is None:
            self._is_parked = False
            self._go_on()
        elif self._is_ending and not self._is_taking:
            self._end()

    def run(self, work: Coroutine[Any, Any, bytes]) -> Promise[bytes]:
        """Runs a coroutine that makes a response."""
        promise: Promise[bytes] = Promise()

        async def finish() -> None:
            try:
                answer = await work
            except Exception as error:
                promise.fail(error)
            else:
                promise.settle(answer)

        task = asyncio.ensure_future(finish())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return promise

    # -- receiving ---------------------------------------------------------------------------------------------------

    def _on_readable(self) -> None:
        try:
            if self._is_parked:
                self._look_while_parked()
            elif self._assembly.buffer is not None:
                self._fill_frame()
            else:
                self._receive()
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.close()
        except ProtocolError as error:
            self._refuse(error)
        except Exception:
            self._fail()

    def _look_while_parked(self) -> None:
        """Detects a hang-up. If there are bytes, stops reading until the response is sent."""
        if self._socket.recv(1, socket.MSG_PEEK):
            self.stop_reading()
        else:
            self._end()

    def _on_hang_up(self, is_reset: bool) -> None:
        self.hung_up = True
        if self._is_read:
            self._on_readable()
        elif is_reset:
            self.close()

    def _receive(self) -> None:
        if self._door.frames.free <= 0:
            self._await_memory(self._door.frames, 1, lambda: self._door.frames.give(1))
            return
        shared = self._door.shared
        # Of an expected large frame only the beginning is read here; the rest goes into its own buffer.
        view = shared[: len(shared) // 64] if self._assembly.sends_large else shared
        count = self._socket.recv_into(view)
        if count == 0:
            self._end()
            return
        self._door.metrics.bytes_in += count
        self.received += count
        self._take(view[:count])
        self._after_handling()

    def _take(self, data: memoryview, is_backlog: bool = False) -> None:
        """Handles every complete frame in `data`, and keeps the rest."""
        position, end, head = 0, len(data), self.LENGTH_AT + 4
        self.last_used = self._door.now
        while end - position >= head:
            (size,) = LENGTH.unpack_from(data, position + head - 4)
            if not 0 <= size <= self._door.frame_bytes_max:
                self._door.check_size(size)
            after = position + head + size
            if after > end:
                break
            frame = data if after - position == end else data[position:after]
            if (self._in_line or self._is_parked or self._outbox.size) and not self._may_handle(frame):
                self._keep(data[position:], is_backlog)
                return
            answer = self.handle(frame)
            if answer is not None:
                self._answer(answer)
            elif self.slow_down or len(self._in_line) > IN_LINE_MAX:
                self._park_in_line()
            position = after
            if self.closed:
                return
        if position == end:
            self._assembly.sends_large = False
        elif self._is_parked or self._is_written:
            self._keep(data[position:], is_backlog)
        else:
            self._start_frame(data[position:])

    def _may_handle(self, frame: memoryview) -> bool:
        """Whether this frame may be handled; if not, the connection is parked or waits for the socket."""
        if self._is_parked or (self._outbox.size > OUTBOX_BYTES_MAX and not self._has_sent()):
            return False
        if self._in_line and not (self._only_overlapping and self.overlaps(frame)):
            self._is_parked = True
            return False
        return True

    def _keep(self, data: memoryview, is_backlog: bool) -> None:
        """Keeps bytes as the backlog. Bytes in the shared buffer are copied; an earlier backlog is not."""
        if self.closed:  # by a failed send: the memory would never be released
            return
        if not is_backlog:
            data = memoryview(bytearray(data))
            self._hold(len(data))
        self._backlog = data

    def _start_frame(self, beginning: memoryview) -> None:
        """Moves an incomplete frame into its own buffer, or waits for memory."""
        room = self._assembly.room_for(beginning)
        if room <= self._door.pool.FREE or self._door.frames.take(room):
            self._assembly.start(beginning, room)
        else:
            rest = memoryview(bytes(beginning))
            self._await_memory(self._door.frames, room, lambda: self._assembly.start(rest, room))

    def _fill_frame(self) -> None:
        assembly = self._assembly
        count = assembly.fill()
        if count == 0:
            self._end()
            return
        self._door.metrics.bytes_in += count
        self.received += count
        self.last_used = self._door.now
        if not assembly.is_whole:
            if room := assembly.room_wanted:
                self._make_room(room)
            return
        buffer, size = assembly.finish()
        try:
            with memoryview(buffer)[:size] as frame:
                if self._may_handle(frame):
                    self._handle(frame)
                else:
                    self._keep(frame, is_backlog=False)
        finally:
            assembly.give(buffer)
        self._after_handling()

    def _make_room(self, room: int) -> None:
        """For a frame that holds no budget yet: while it waits, no other frame waits for it."""
        if self._door.frames.take(room):
            self._assembly.move(room)
        else:
            self._await_memory(self._door.frames, room, lambda: self._assembly.move(room))

    # -- handling and responding -------------------------------------------------------------------------------------

    def _handle(self, frame: memoryview) -> None:
        answer = self.handle(frame)
        if answer is not None:
            self._answer(answer)
        elif self.slow_down or len(self._in_line) > IN_LINE_MAX:
            self._park_in_line()

    def _park_in_line(self) -> None:
        """Parks until all requests in line are answered."""
        self.slow_down = False
        self._is_parked = bool(self._in_line)

    def _answer(self, answer: bytes | Promise[bytes] | Large) -> None:
        line = self._in_line
        if not line and type(answer) is bytes:
            if answer:
                self._outbox.put(answer)
            return
        place: Place = []
        line.append(place)
        self._only_overlapping = False
        if isinstance(answer, Large):
            self._make(place, answer)
        else:
            self._settle(place, answer)

    def _make(self, place: Place, answer: Large) -> None:
        answers = self._door.answers
        room = min(answer.room, answers.limit)

        def make() -> None:
            self._room += room
            self._settle(place, answer.make())

        if answers.take(room):
            make()
        else:
            self._await_memory(answers, room, make)

    def _settle(self, place: Place, answer: bytes | Promise[bytes]) -> None:
        if isinstance(answer, Promise) and not answer.done:
            answer.then(lambda done: self._settled(place, done))
        else:
            place.append(answer.value() if isinstance(answer, Promise) else answer)
            self._drain_line()

    def _settled(self, place: Place, done: Promise[bytes]) -> None:
        if self.closed:
            return
        if done.error is not None:
            logger.error("a request from %s failed; its connection is closed", self.peer, exc_info=done.error)
            self.close()
            return
        self.fill(place, done.value())

    def _drain_line(self) -> None:
        line = self._in_line
        while line and line[0]:
            (answer,) = line.popleft()
            if answer:
                self._outbox.put(answer)

    def _has_sent(self) -> bool:
        """Sends the outbox; returns whether all of it was sent."""
        self._send()
        return not (self._is_written or self.closed)

    def _after_handling(self) -> None:
        if self._outbox.size and not self.closed:
            self._send()

    def _send(self) -> None:
        if self._is_written or self.closed:
            return
        try:
            self._door.metrics.bytes_out += self._outbox.send()
        except OSError:
            self.close()
            return
        if self._outbox:
            # Backpressure: a slow reader's requests wait in the socket until it has taken these responses.
            self._is_written = True
            self._door.loop.add_writer(self._socket.fileno(), self._on_writable)
            self.stop_reading()
        else:
            self._give_room()

    def _on_writable(self) -> None:
        before = self._door.metrics.bytes_out
        try:
            self._door.metrics.bytes_out += self._outbox.send()
        except OSError:
            self.close()
            return
        if self._door.metrics.bytes_out > before:
            self.last_used = self._door.now
        if not self._outbox:
            self._door.loop.remove_writer(self._socket.fileno())
            self._is_written = False
            self._give_room()
            if not self._is_parked:
                self._go_on()
            elif not self._is_ending:
                self._start_reading()

    # -- resuming ----------------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Continues with the backlog, then with the socket."""
        backlog, self._backlog = self._backlog, None
        try:
            if backlog is not None:
                self._is_taking = True
                try:
                    self._take(backlog, is_backlog=True)
                finally:
                    self._is_taking = False
                if self._backlog is None:
                    self._release(len(backlog.obj))  # type: ignore[arg-type]  # a bytearray of ours
                self._after_handling()
        except ProtocolError as error:
            self._refuse(error)
        except Exception:
            self._fail()
        if self.closed or self._is_parked or self._is_written:
            return
        if self._is_ending:
            self._end()
        else:
            self._start_reading()

    def _start_reading(self) -> None:
        if not self._is_read and not self._door.is_closing:
            self._is_read = True
            self._door.loop.add_reader(self._socket.fileno(), self._on_readable)

    def stop_reading(self) -> None:
        if self._is_read:
            self._is_read = False
            self._door.loop.remove_reader(self._socket.fileno())

    def _end(self) -> None:
        """Stops reading; requests in line still get their responses."""
        self._is_ending = self.hung_up = True
        self.stop_reading()
        if not (self._in_line or self._outbox or self._backlog is not None):
            self.close()

    @property
    def is_idle(self) -> bool:
        return not (self._in_line or self._outbox)

    @property
    def is_stuck(self) -> bool:
        """Whether it waits for the client to finish a frame or to read."""
        return self._is_written or (self._assembly.buffer is not None and self._leave_line is None)

    @property
    def is_abandoned(self) -> bool:
        """Whether the client hung up while a response waits for more than a sync."""
        return self.hung_up and bool(self._in_line) and not self._only_overlapping

    @property
    def holds_since(self) -> float | None:
        """Since when it holds the door's memory for an incomplete frame, or for requests behind one that waits for
        other clients, as a join does.
        """
        if self._assembly.holds_memory:
            return self._assembly.began
        return self.last_used if self._held and self._in_line and not self._only_overlapping else None

    @property
    def is_owed(self) -> bool:
        """Whether appends wait for their responses. Other requests wait for more than a sync, and finished responses
        wait for the client.
        """
        return bool(self._in_line) and self._only_overlapping

    @property
    def is_unread(self) -> bool:
        """Whether responses wait for the client to read them."""
        return self._is_written

    # -- memory ------------------------------------------------------------------------------------------------------

    def _hold(self, size: int) -> None:
        """Counts bytes already received. The budget may become negative; then no connection reads."""
        self._held += size
        self._door.frames.free -= size

    def _release(self, size: int) -> None:
        if not self.closed:
            self._held -= size
            self._door.frames.give(size)

    def _give_room(self) -> None:
        if self._room and not self._in_line:
            room, self._room = self._room, 0
            self._door.answers.give(room)

    def _await_memory(self, budget: Budget, size: int, go_on: Callable[[], None]) -> None:
        """Parks until `size` bytes are reserved, then calls `go_on`."""
        self._is_parked = True

        def granted() -> None:
            self._leave_line = None
            self.last_used = self._door.now  # the connection waits for the client from now on
            try:
                go_on()
            except ProtocolError as error:
                self._refuse(error)
            except Exception:
                self._fail()
            if not self._in_line and not self.closed:
                self._is_parked = False
                self._send()
                self._go_on()

        if size > budget.limit:
            raise ProtocolError(f"one request needs {size} bytes; the door's limit for all is {budget.limit}")
        self._leave_line = budget.wait(size, granted)

    # -- the end -----------------------------------------------------------------------------------------------------

    def _refuse(self, error: ProtocolError) -> None:
        self._door.note_refusal(self.peer, error)
        # Requests before the invalid bytes were handled; their responses are still sent.
        self._assembly.drop()
        self._backlog = None
        self._send()
        self._end()
        if not self.closed:
            self._door.clock.call_later(CLOSE_SECONDS_MAX, self.close)

    def _fail(self) -> None:
        logger.exception("a request from %s failed; its connection is closed", self.peer)
        self.close()

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self.stop_reading()
        if self._is_written:
            self._door.loop.remove_writer(self._socket.fileno())
        self._door.hang_ups.forget(self._socket)
        self._socket.close()
        if self._leave_line is not None:
            self._leave_line()
            self._leave_line = None
        self._assembly.drop()
        self._in_line.clear()
        self._backlog = None
        held, self._held = self._held, 0
        room, self._room = self._room, 0
        self._door.forget(self)
        self._door.frames.give(held)
        self._door.answers.give(room)
