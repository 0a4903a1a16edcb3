"""A protocol of length-prefixed frames: responses leave in the order of the requests.

    bytes --> frames --> handle --> response, at once or later --> line --> outbox --> bytes

Every request gets a slot in line; a response is sent after all before it. Requests that only append (`overlaps`, and
`reserve` their slot) are handled while earlier appends wait for their sync. Any other request is handled when all
before it are answered: a client that pipelines "write, read" reads its own write.

Hang-up. A client that stops sending still gets its responses. If a response then waits for other clients, as a join
does, the door closes the connection after `HUNG_UP_SECONDS_MAX`.

Backpressure. The connection is parked while too many requests are in line, while a partition has too many unsynced
bytes of appends (`slow_down`), and while the door's memory is used up. A request with a possibly large response returns
`Large` and waits for memory.
"""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

from millstream.core.errors import ProtocolError
from millstream.core.promise import Promise
from millstream.doors.engine.connection import Connection
from millstream.doors.engine.door import CLOSE_SECONDS_MAX
from millstream.doors.engine.protocol import LENGTH, Protocol
from millstream.doors.framed.door import FramedDoor

logger = logging.getLogger(__name__)

IN_LINE_MAX = 1000
OUTBOX_BYTES_MAX = 1 << 20
"""No request is handled while more output than this waits: a small request can have a long response."""


class Large(NamedTuple):
    """A response of up to `room` bytes; `make` is called when that memory is reserved."""

    room: int
    make: Callable[[], bytes | Promise[bytes]]


Answer = bytes | Promise[bytes] | Large | None
"""`b""`: the protocol has no response, but the request keeps its slot in line. None: see `reserve`."""


Slot = list[bytes]
"""A request's slot in the order of responses: empty until its response is known."""


class FramedProtocol(Protocol):
    __slots__ = (
        "_connection",
        "_door",
        "_in_line",
        "_only_overlapping",
        "_outbox",
        "_tasks",
        "peer",
        "slow_down",
    )

    def __init__(self, door: FramedDoor, connection: Connection) -> None:
        self._door = door
        self._connection = connection
        self._outbox = connection.outbox
        self.peer = connection.peer
        self._in_line: deque[Slot] = deque()
        self._only_overlapping = True
        """Whether all requests in line are appends, so that further appends may be handled."""
        self._tasks: set[asyncio.Task[None]] = set()
        self.slow_down = False
        """Set by a handler for backpressure: no request is handled until all in line are answered."""

    # -- for protocols -----------------------------------------------------------------------------------------------

    @abstractmethod
    def overlaps(self, frame: memoryview) -> bool:
        """Whether the request only appends, and may be handled before earlier appends are answered."""

    @abstractmethod
    def handle(self, frame: memoryview) -> Answer:
        """Handles one complete frame, head included. A `ProtocolError` closes the connection."""

    def reserve(self) -> Slot:
        """Reserves the slot of an append in line; `fill` sets its response, and `handle` returns None.

        Further appends are handled before that. Any other request waits until the line is empty.
        """
        slot: Slot = []
        if not self._in_line:
            self._only_overlapping = True
        self._in_line.append(slot)
        return slot

    def fill(self, slot: Slot, answer: bytes) -> None:
        """Sets the response of a slot."""
        connection = self._connection
        if connection.closed:
            return
        line = self._in_line
        if line[0] is not slot:
            slot.append(answer)
            return
        if len(line) == 1 and not self._outbox.size and answer:
            line.clear()
            try:
                sent = connection.transport.send(answer)
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError:
                connection.close()
                return
            self._door.metrics.bytes_out += sent
            if sent < len(answer):
                self._outbox.put(answer[sent:])
                connection.send()
            elif connection.room:
                self.sent()
        else:
            slot.append(answer)
            self._drain_line()
            connection.send()
        if connection.is_parked and not line and not connection.waits_for_memory:
            connection.unpark()
        elif connection.is_ending and not connection.is_resuming:
            self.ended()

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

    # -- the engine's calls ------------------------------------------------------------------------------------------

    def take(self, data: memoryview) -> int:
        position, end, head, connection = 0, len(data), self.HEAD_BYTES, self._connection
        while end - position >= head:
            (size,) = LENGTH.unpack_from(data, position + head - 4)
            if not 0 <= size <= self._door.frame_bytes_max:
                self._door.check_size(size)
            after = position + head + size
            if after > end:
                break
            frame = data if after - position == end else data[position:after]
            if (self._in_line or connection.is_parked or self._outbox.size) and not self._may_handle(frame):
                break
            answer = self.handle(frame)
            if answer is not None:
                self._answer(answer)
            elif self.slow_down or len(self._in_line) > IN_LINE_MAX:
                self._park_in_line()
            position = after
            if connection.closed:
                break
        return position

    def _may_handle(self, frame: memoryview) -> bool:
        """Whether this frame may be handled; if not, the connection is parked or waits for the socket."""
        connection = self._connection
        if connection.is_parked or (self._outbox.size > OUTBOX_BYTES_MAX and not connection.has_sent()):
            return False
        if self._in_line and not (self._only_overlapping and self.overlaps(frame)):
            connection.is_parked = True
            return False
        return True

    def refused(self, error: ProtocolError) -> None:
        """Requests before the invalid bytes were handled; their responses are still sent."""
        connection = self._connection
        self._door.metrics.request_errors += 1
        self._door.note_refusal(self.peer, error)
        connection.drop()
        connection.send()
        self.ended()
        if not connection.closed:
            self._door.clock.call_later(CLOSE_SECONDS_MAX, connection.close)

    def ended(self) -> None:
        """Stops reading; requests in line still get their responses."""
        connection = self._connection
        connection.is_ending = connection.hung_up = True
        connection.stop_reading()
        if not (self._in_line or self._outbox or connection.has_backlog):
            connection.close()

    def hung_up(self) -> None:
        """The client may still read, as `nc -N` does."""

    def sent(self) -> None:
        """Gives the memory of sent responses back."""
        connection = self._connection
        if not self._in_line:
            room, connection.room = connection.room, 0
            self._door.answers.give(room)

    def closed(self) -> None:
        self._in_line.clear()
        self.sent()

    @property
    def is_idle(self) -> bool:
        return not self._in_line

    @property
    def is_owed(self) -> bool:
        """Whether appends wait for their responses. Other requests wait for more than a sync."""
        return bool(self._in_line) and self._only_overlapping

    @property
    def waits_for_others(self) -> bool:
        return bool(self._in_line) and not self._only_overlapping

    @property
    def may_resume(self) -> bool:
        return not self._in_line

    # -- handling and responding -------------------------------------------------------------------------------------

    def _park_in_line(self) -> None:
        """Parks until all requests in line are answered."""
        self.slow_down = False
        self._connection.is_parked = bool(self._in_line)

    def _answer(self, answer: bytes | Promise[bytes] | Large) -> None:
        line = self._in_line
        if not line and type(answer) is bytes:
            if answer:
                self._outbox.put(answer)
            return
        slot: Slot = []
        line.append(slot)
        self._only_overlapping = False
        if isinstance(answer, Large):
            self._make(slot, answer)
        else:
            self._settle(slot, answer)

    def _make(self, slot: Slot, answer: Large) -> None:
        answers = self._door.answers
        room = min(answer.room, answers.limit)

        def make() -> None:
            self._connection.room += room
            self._settle(slot, answer.make())

        if answers.take(room):
            make()
        else:
            self._connection.await_memory(answers, room, make)

    def _settle(self, slot: Slot, answer: bytes | Promise[bytes]) -> None:
        if isinstance(answer, Promise) and not answer.done:
            answer.then(lambda done: self._settled(slot, done))
        else:
            slot.append(answer.value() if isinstance(answer, Promise) else answer)
            self._drain_line()

    def _settled(self, slot: Slot, done: Promise[bytes]) -> None:
        if self._connection.closed:
            return
        if done.error is not None:
            logger.error("a request from %s failed; its connection is closed", self.peer, exc_info=done.error)
            self._connection.close()
            return
        self.fill(slot, done.value())

    def _drain_line(self) -> None:
        line = self._in_line
        while line and line[0]:
            (answer,) = line.popleft()
            if answer:
                self._outbox.put(answer)
