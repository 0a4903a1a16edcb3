"""One client's connection: frames in, answers out, in the order of the requests.

Receiving. Small requests are read many at a time into one buffer that all connections share, and handled where they
lie. A frame that is not complete there moves into a buffer of its own, which grows with what really arrives, so that
a large length in a header costs nothing. Handlers are done with a frame's bytes when they return.

Answering. Every request gets a place in line; answers leave when all before them have left. Produce requests overlap
while they wait for their sync. Any other answer that is not there at once parks the connection: it is not read until
the answer is, which is both backpressure and the order that clients expect.

The connection is also not read while its answers pile up in the outbox or behind a produce request, while too many
of its requests wait, while the partitions it produces to have too much unsynced, and while the door's memory is used
up. Only a frame that is larger than any batch does not wait for memory: it would hold what it has, and with a few
others of its kind all would wait for each other. It costs its connection.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import socket
from collections import deque
from collections.abc import Callable
from functools import partial
from struct import Struct
from typing import TYPE_CHECKING, Any

from millstream.doors.kafka import api_00_produce, api_18_api_versions
from millstream.doors.kafka.api_00_produce import append
from millstream.doors.kafka.apis import APIS, Api
from millstream.doors.kafka.context import Context
from millstream.doors.kafka.known_produce import KnownProduce
from millstream.doors.kafka.produce_run import ProduceRun, append_part
from millstream.doors.outbox import Chunk, Outbox
from millstream.errors import Code, ProtocolError, RequestError
from millstream.log.answers import Appended
from millstream.promise import Promise
from millstream.records.batch import LOG_APPEND_TIME, NO_TIMESTAMP
from millstream.wire.kafka import header, messages
from millstream.wire.kafka.runs import Request

if TYPE_CHECKING:
    from millstream.doors.kafka.door import KafkaDoor

logger = logging.getLogger(__name__)

IN_LINE_MAX = 1000
OUTBOX_BYTES_MAX = 1 << 20
"""No further request is handled while so much waits to be sent: a few bytes can ask for a long answer."""
HEADER_READ_BYTES = 4096
"""How much is read at once where a large frame is expected: just enough for its header, the rest goes where it
belongs.
"""
LOW_WATER_BYTES_MAX = 256 * 1024
COPIED_BYTES_MAX = 4096
"""Up to here a produce request that comes alone is taken as a run of one: its batch is copied, and that is cheaper than
to look at it where it lies.
"""

_SIZE = Struct(">i")
_ANSWER_HEAD = Struct(">ii")
_PRODUCE = api_00_produce.KEY
_API_VERSIONS = api_18_api_versions.KEY


class _Place:
    """A request's place in line: what to send for it, once that is known."""

    __slots__ = ("chunks",)

    def __init__(self) -> None:
        self.chunks: list[Chunk] | None = None


class Connection:
    __slots__ = (
        "_backlog",
        "_buffer",
        "_context",
        "_door",
        "_expected",
        "_filled",
        "_frame_is_large",
        "_granted",
        "_in_line",
        "_is_parked",
        "_is_read",
        "_is_written",
        "_leave_line",
        "_low_water",
        "_metrics",
        "_outbox",
        "_running",
        "_sends_large",
        "_socket",
        "closed",
        "frame_began",
        "last_used",
    )

    def __init__(self, door: KafkaDoor, connected: socket.socket, context: Context) -> None:
        self._door = door
        self._metrics = door.metrics
        self._socket = connected
        self._context = context
        self._outbox = Outbox(connected)
        self._in_line: deque[_Place] = deque()
        self._buffer: bytearray | None = None
        """The frame that is being put together, `_filled` of `_expected` bytes, its length prefix included."""
        self._filled = 0
        self._expected = 0
        self._frame_is_large = False
        self._sends_large = False
        self._low_water = 1
        self._granted = 0
        """Bytes of the door's budget that came after waiting, for the frame to come."""
        self._leave_line: Callable[[], None] | None = None
        """Set while this waits for the door's memory."""
        self._backlog: bytes = b""
        """What was received before the connection was parked, and not handled yet."""
        self._is_parked = False
        self._is_read = True
        self._is_written = False
        self._running: asyncio.Task[None] | None = None
        self.closed = False
        self.last_used = door.now
        self.frame_began = door.now
        """When the frame that is being put together was begun."""
        door.loop.add_reader(connected.fileno(), self._on_readable)

    # -- receiving ---------------------------------------------------------------------------------------------------

    def _on_readable(self) -> None:
        if self._is_parked:
            self._on_readable_while_parked()
            return
        try:
            self._receive()
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.close()
        except ProtocolError as error:
            self._refuse(error)
        except Exception:
            logger.exception("a request from %s failed; its connection is closed", self._context.client_host)
            self.close()

    def _on_readable_while_parked(self) -> None:
        """Notices a client that went away; otherwise stops looking until the answer is out."""
        try:
            if self._socket.recv(1, socket.MSG_PEEK):
                self.stop_reading()
            else:
                self.close()
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.close()

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

    def _take(self, data: memoryview) -> None:
        """Handles every whole frame in `data`, and keeps what is left over."""
        position, end = 0, len(data)
        self.last_used = self._door.now
        while end - position >= 4:
            if self._is_parked or (self._outbox.size > OUTBOX_BYTES_MAX and not self._has_sent()):
                self._backlog = bytes(data[position:])
                return
            (size,) = _SIZE.unpack_from(data, position)
            if size <= 0 or size > self._door.frame_bytes_max:
                raise ProtocolError(f"a frame of {size} bytes: at most {self._door.frame_bytes_max} are taken")
            after = position + 4 + size
            if after > end:
                break
            if (size < COPIED_BYTES_MAX or end - after > 4) and self._door.faults is None:
                requests: list[Request[KnownProduce]] = []
                taken = self._door.known.take(data, position, requests)
                if taken > position:
                    self._handle_taken(requests)
                    position = taken
                    continue
            self._handle(data[position + 4 : after])
            position = after
        if self.closed or position == end:
            return
        if self._is_parked:
            self._backlog = bytes(data[position:])
            return
        self._start_frame(data[position:])

    def _start_frame(self, beginning: memoryview) -> None:
        """Moves an incomplete frame into a buffer of its own."""
        size = _SIZE.unpack_from(beginning)[0] + 4 if len(beginning) >= 4 else 4
        pool = self._door.pool
        # Only who has sent a large frame before gets the room for one at once; others get as much as they have sent.
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
        """Has the kernel wake us when so many bytes are there, and not for every piece of a large frame.

        A producer that compresses or makes many small records sends a frame slower than we read it: without this, each
        megabyte would be a dozen turns of the loop.
        """
        low_water = min(max(count, 1), LOW_WATER_BYTES_MAX)
        if low_water != self._low_water:
            self._low_water = low_water
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water)

    def _reserve(self, size: int) -> bool:
        """Takes bytes out of the door's budget, or parks until there are some."""
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
            # Only the length prefix had arrived; now it is known how much follows.
            (size,) = _SIZE.unpack_from(buffer)
            if size <= 0 or size > self._door.frame_bytes_max:
                raise ProtocolError(f"a frame of {size} bytes: at most {self._door.frame_bytes_max} are taken")
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
        """At least doubles the buffer: memory follows what arrives, not what a header claims."""
        room = self._door.pool.size_for(min(self._expected, len(buffer) * 2))
        if room > self._door.pool.LARGE and not self._door.budget.take(room):
            raise ProtocolError(f"no memory for a frame of {self._expected} bytes while others use it")
        if room <= self._door.pool.LARGE and not self._reserve(room):
            return
        larger = self._door.pool.take(room)
        larger[: self._filled] = memoryview(buffer)[: self._filled]
        self._buffer = larger
        self._door.give_buffer(buffer)

    # -- handling ----------------------------------------------------------------------------------------------------

    def _handle(self, frame: memoryview) -> None:
        key, version, correlation_id = header.peek(frame)
        if self._door.faults is not None and (fault := self._door.faults(key, version, frame)) is not None:
            self._put(_frame(correlation_id, fault[0], [fault[1]]))
            return
        if key == _PRODUCE and self._handle_known(frame, version, correlation_id):
            return
        api = APIS.get(key)
        if api is None or not api.low <= version <= api.high:
            self._handle_unserved(key, version, correlation_id, frame)
            return
        self._metrics.requests[key] += 1
        context = self._context
        context.version = version
        flexible = version >= api.flexible_from if api.flexible_from is not None else messages.is_flexible(key, version)
        context.client_id, reader = header.skip_client(frame, flexible)
        tags = b"\0" if flexible and key != _API_VERSIONS else b""
        if api.answer is None:
            self._handle_message(api, version, correlation_id, tags, bytes(reader.buffer[reader.position :]))
            return
        answer = api.answer(reader, context)
        if context.single is not None:
            self._door.known.learn(frame, context.single, context)
            context.single = None
        if answer is None:
            return
        if isinstance(answer, Promise) and not answer.done:
            place = self._take_place()
            answer.then(lambda done: self._fill(place, _frame(correlation_id, tags, done.value())))
            if key != _PRODUCE:
                self._park()
            else:
                self._park_if_behind()
            return
        self._put(_frame(correlation_id, tags, answer.value() if isinstance(answer, Promise) else answer))

    def _handle_known(self, frame: memoryview, version: int, correlation_id: int) -> bool:
        """The short way for a produce request whose shape is known; False if it is not to be gone."""
        found = self._door.known.find(frame, version)
        if found is None:
            return False
        known, records = found
        try:
            batch, promise = append(known.partition, records, self._context)
        except RequestError:
            return False  # nothing was written; the general way says what is wrong
        self._metrics.requests[_PRODUCE] += 1
        append_time = batch.max_timestamp if batch.attributes & LOG_APPEND_TIME else NO_TIMESTAMP
        self._answer_known(known, correlation_id, append_time, promise)
        return True

    def _answer_known(
        self, known: KnownProduce, correlation_id: int, append_time: int, promise: Promise[Appended]
    ) -> None:
        if promise.done:
            answer = known.settled(correlation_id, append_time, promise)
            if self._in_line:
                self._put([answer])
            else:
                self._outbox.put(answer)
        else:
            promise.then(partial(self._fill_known, self._take_place(), known, correlation_id, append_time))
            self._park_if_behind()

    def _fill_known(
        self, place: _Place, known: KnownProduce, correlation_id: int, append_time: int, done: Promise[Appended]
    ) -> None:
        self._fill(place, [known.settled(correlation_id, append_time, done)])

    def _handle_taken(self, requests: list[Request[KnownProduce]]) -> None:
        """Produce requests whose batches are stored just so: one, or several that arrived together as one append."""
        if len(requests) == 1:
            known, correlation_id, part, _, append_time = requests[0]
            promise = append_part(known.partition, part, self._context)
            self._metrics.requests[_PRODUCE] += 1
            self._answer_known(known, correlation_id, append_time, promise)
        else:
            self._handle_run(ProduceRun(requests))

    def _handle_run(self, run: ProduceRun) -> None:
        promise = run.append(self._context)
        self._metrics.requests[_PRODUCE] += run.count
        if promise.done:
            self._put(run.answers())
        else:
            place = self._take_place()
            promise.then(lambda _: self._fill(place, run.answers()))
            self._park_if_behind()

    def _take_place(self) -> _Place:
        place = _Place()
        self._in_line.append(place)
        return place

    def _put(self, chunks: list[Chunk]) -> None:
        """An answer that is there at once: straight into the outbox, unless others are in line before it."""
        if self._in_line:
            self._take_place().chunks = chunks
            self._park()
        else:
            for chunk in chunks:
                self._outbox.put(chunk)

    def _park_if_behind(self) -> None:
        if self._context.slow_down or len(self._in_line) > IN_LINE_MAX:
            self._context.slow_down = False
            self._park()

    def _handle_message(self, api: Api, version: int, correlation_id: int, tags: bytes, body: bytes) -> None:
        request = messages.decode_request(api.key, version, body)
        assert api.handle is not None
        fields = api.handle(request, self._context)
        place = self._take_place()
        if inspect.isawaitable(fields):
            self._park()
            self._running = asyncio.ensure_future(self._finish(place, api, version, correlation_id, tags, fields))
        else:
            place.chunks = _frame(correlation_id, tags, [messages.encode_response(api.key, version, fields)])
            self._drain_line_or_park()

    async def _finish(
        self, place: _Place, api: Api, version: int, correlation_id: int, tags: bytes, awaitable: Any
    ) -> None:
        try:
            body = messages.encode_response(api.key, version, await awaitable)
        except asyncio.CancelledError:
            raise
        except Exception:
            logger.exception("%s (version %d) failed; its connection is closed", api.name, version)
            self.close()
            return
        finally:
            self._running = None
        self._fill(place, _frame(correlation_id, tags, [body]))

    def _handle_unserved(self, key: int, version: int, correlation_id: int, frame: memoryview) -> None:
        self._metrics.request_errors += 1
        if key == _API_VERSIONS:
            self._context.version = version
            _, reader = header.skip_client(frame, flexible=False)
            answer = api_18_api_versions.answer(reader, self._context)
            chunks = _frame(correlation_id, b"", answer)
        else:
            tags, body = messages.encode_refusal(key, version, Code.UNSUPPORTED_VERSION)
            chunks = _frame(correlation_id, tags, [body])
        self._take_place().chunks = chunks
        self._drain_line_or_park()

    def _refuse(self, error: ProtocolError) -> None:
        self._metrics.request_errors += 1
        self._door.note_refusal(self._context.client_host, error)
        self.close()

    # -- answering ---------------------------------------------------------------------------------------------------

    def _fill(self, place: _Place, chunks: list[Chunk]) -> None:
        """An answer that was waited for is there."""
        if self.closed:
            return
        place.chunks = chunks
        self._context.cancel = None
        self._drain_line()
        self._send()
        if self._is_parked and not self._in_line and self._leave_line is None:
            self._unpark()

    def _drain_line(self) -> None:
        line, outbox = self._in_line, self._outbox
        while line and line[0].chunks is not None:
            for chunk in line.popleft().chunks or ():
                outbox.put(chunk)

    def _drain_line_or_park(self) -> None:
        self._drain_line()
        if self._in_line:
            self._park()

    def _has_sent(self) -> bool:
        """Sends what there is; whether all of it went."""
        self._send()
        return not (self._is_written or self.closed)

    def _after_handling(self) -> None:
        if self._outbox and not self.closed:
            self._send()

    def _send(self) -> None:
        if self._is_written:
            return
        try:
            self._metrics.bytes_out += self._outbox.send()
        except OSError:
            self.close()
            return
        if self._outbox:
            # A slow reader gets no further answers: its requests wait in the socket until it has taken these.
            self._is_written = True
            self._door.loop.add_writer(self._socket.fileno(), self._on_writable)
            self.stop_reading()
            self._door.wait_for_reader(self, self._outbox.held)

    def _on_writable(self) -> None:
        try:
            self._metrics.bytes_out += self._outbox.send()
        except OSError:
            self.close()
            return
        self.last_used = self._door.now
        if self._outbox:
            self._door.unread.has_taken(self)
        else:
            self._door.unread.done(self)
            self._door.loop.remove_writer(self._socket.fileno())
            self._is_written = False
            if not self._is_parked:
                self._go_on()

    # -- parking -----------------------------------------------------------------------------------------------------

    def _park(self) -> None:
        self._is_parked = True

    def _unpark(self) -> None:
        self._is_parked = False
        if not self.closed:
            self._go_on()

    def _go_on(self) -> None:
        """With what was received before the connection stopped to be read, then with the socket."""
        backlog, self._backlog = self._backlog, b""
        if backlog:
            # In a buffer of its own: this may run while another connection's frame lies in the shared one.
            try:
                self._take(memoryview(bytearray(backlog)))
            except ProtocolError as error:
                self._refuse(error)
                return
            except Exception:
                logger.exception("a request from %s failed; its connection is closed", self._context.client_host)
                self.close()
                return
            self._after_handling()
        if not self._is_parked and not self._is_written and not self.closed:
            self._start_reading()

    def stop_reading(self) -> None:
        if self._is_read:
            self._is_read = False
            self._door.loop.remove_reader(self._socket.fileno())

    def _start_reading(self) -> None:
        if not self._is_read:
            self._is_read = True
            self._door.loop.add_reader(self._socket.fileno(), self._on_readable)

    @property
    def is_idle(self) -> bool:
        """Whether the next step is the client's: to send, to send the rest of a frame for which there may be no memory
        yet, or to take what it was answered.
        """
        return self._is_written or not (self._in_line or (self._is_parked and self._leave_line is None))

    @property
    def is_owed(self) -> bool:
        """Whether produce requests wait for their answers. A parked connection waits for something else."""
        return bool(self._in_line or self._outbox) and not self._is_parked

    @property
    def is_inside_frame(self) -> bool:
        return self._buffer is not None

    @property
    def holds_memory(self) -> bool:
        """Whether the door's memory is kept for a frame that the client has yet to send the rest of."""
        return self._buffer is not None and len(self._buffer) > self._door.pool.FREE and self._leave_line is None

    @property
    def host(self) -> str:
        return self._context.client_host

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._door.unread.done(self)
        self.stop_reading()
        if self._is_written:
            self._door.loop.remove_writer(self._socket.fileno())
        self._socket.close()
        if self._context.cancel is not None:
            self._context.cancel()
            self._context.cancel = None
        self._context.shares.disconnected(self._context)
        if self._buffer is not None:
            self._door.give_buffer(self._buffer)
            self._buffer = None
        if self._leave_line is not None:
            self._leave_line()
            self._leave_line = None
        if self._granted:
            self._door.budget.give(self._granted)
            self._granted = 0
        self._in_line.clear()
        self._door.forget(self)


def _frame(correlation_id: int, tags: bytes, chunks: list[Chunk]) -> list[Chunk]:
    """The chunks of an answer behind their length and header."""
    if len(chunks) == 1 and isinstance(chunks[0], bytes):
        body = chunks[0]
        return [_ANSWER_HEAD.pack(4 + len(tags) + len(body), correlation_id) + tags + body]
    size = sum(len(chunk) if isinstance(chunk, bytes) else chunk.size for chunk in chunks)
    return [_ANSWER_HEAD.pack(4 + len(tags) + size, correlation_id) + tags, *chunks]
