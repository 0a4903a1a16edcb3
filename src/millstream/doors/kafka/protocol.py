"""One client's Kafka protocol: frames in, answers out, in request order.

Small requests are handled in place in the receive buffer, many at a time (`doors/engine/`).

Every request in flight has a slot in line; an answer leaves after all answers before it. Produce requests overlap
while they wait for a sync. Any other answer that is not ready at once parks the connection: the broker does not read it
until the answer is ready. That gives backpressure and the order that clients expect.

If a client hangs up while its connection is parked, the wait ends: a fetch returns the available records, a join closes
the connection. Requests sent before are still handled, above all produce requests with acks=0. An end of stream that is
read closes the connection, as in Kafka.

A client can send thousands of small requests at once. After `TURN_SECONDS` of them the connection parks, and waits in
the door's line for a later turn of the event loop, so that other clients get theirs (`turn_line.py`).

Backpressure also parks the connection while answers accumulate in the outbox or behind a produce request, while too
many requests are in flight, and while the produced partitions have too many unsynced bytes.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import deque
from functools import partial
from struct import Struct
from time import monotonic
from typing import TYPE_CHECKING, Any

from millstream.core.errors import Code, ProtocolError, RequestError
from millstream.core.promise import Promise
from millstream.doors.engine.connection import Connection
from millstream.doors.engine.protocol import LENGTH, Protocol
from millstream.doors.kafka import api_00_produce, api_18_api_versions
from millstream.doors.kafka.api_00_produce import append
from millstream.doors.kafka.apis import APIS, Api
from millstream.doors.kafka.context import Context
from millstream.doors.kafka.known_produce import KnownProduce
from millstream.doors.kafka.produce_run import ProduceRun, append_part
from millstream.doors.kafka.turns import LIGHT_BYTES, aside, is_large
from millstream.doors.outbox import Chunk
from millstream.log.answers import Appended
from millstream.records.batch import LOG_APPEND_TIME, NO_TIMESTAMP
from millstream.wire.kafka import header, messages, refusal
from millstream.wire.kafka.messages import Fields
from millstream.wire.kafka.runs import Request

if TYPE_CHECKING:
    from millstream.doors.kafka.door import KafkaDoor

logger = logging.getLogger(__name__)

IN_LINE_MAX = 1000
OUTBOX_BYTES_MAX = 1 << 20
"""No request is handled while more bytes are unsent: a short request can ask for a long answer."""
COPIED_BYTES_MAX = 4096
"""Up to this size a lone produce request is handled as a run of one: to copy its batch is cheaper than to check it in
place.
"""

_ANSWER_HEAD = Struct(">ii")
_PRODUCE = api_00_produce.KEY
_API_VERSIONS = api_18_api_versions.KEY


class _Slot:
    """A request's slot in the order of answers, and its answer once that is ready."""

    __slots__ = ("chunks", "is_write")

    def __init__(self, is_write: bool = False) -> None:
        self.chunks: list[Chunk] | None = None
        self.is_write = is_write
        """Whether its records wait for a sync."""


class KafkaProtocol(Protocol):
    __slots__ = ("_connection", "_context", "_door", "_in_line", "_known", "_metrics", "_outbox", "_running")

    def __init__(self, door: KafkaDoor, context: Context, connection: Connection) -> None:
        self._door = door
        self._metrics = door.metrics
        self._context = context
        self._connection = connection
        self._outbox = connection.outbox
        self._known = door.known_for(context.session)
        self._in_line: deque[_Slot] = deque()
        self._running: asyncio.Task[None] | None = None

    # -- the engine's calls ------------------------------------------------------------------------------------------

    def take(self, data: memoryview) -> int:
        position, end, door, connection = 0, len(data), self._door, self._connection
        while end - position >= 4:
            if connection.is_parked or (self._outbox.size > OUTBOX_BYTES_MAX and not connection.has_sent()):
                break
            (size,) = LENGTH.unpack_from(data, position)
            if size <= 0 or size > door.frame_bytes_max:
                door.check_size(size)
            after = position + 4 + size
            if after > end:
                break
            if (size < COPIED_BYTES_MAX or end - after > 4) and door.faults is None:
                began = monotonic()
                requests: list[Request[KnownProduce]] = []
                taken = self._known.take(data, position, requests)
                if taken > position:
                    self._handle_taken(requests, began)
                    position = taken
                    continue
            if not self._handle(data[position + 4 : after]):
                break
            position = after
            if end - position >= 4 and not connection.is_parked and door.turns.is_over(self._context.began):
                connection.is_parked = True
                door.turns.wait(self._next_turn)
        return position

    def _next_turn(self) -> None:
        connection = self._connection
        if connection.is_parked and not (self._in_line or connection.waits_for_memory or connection.closed):
            connection.unpark()

    def refused(self, error: ProtocolError) -> None:
        self._metrics.request_errors += 1
        self._door.note_refusal(self._connection.peer, error)
        self._connection.close()

    def ended(self) -> None:
        """Closes the connection, as Kafka does. Requests that the client sent before are still handled."""
        connection = self._connection
        if connection.is_parked and connection.has_backlog:
            connection.hung_up = True
            connection.stop_reading()
            self.hung_up()
        else:
            connection.close()

    def hung_up(self) -> None:
        """Ends a long poll or a wait for other members. Waits for a sync or for memory go on."""
        wait, self._context.wait = self._context.wait, None
        if wait is None:
            return
        if wait.finish is None:
            wait.cancel()
            self._connection.close()
        else:
            wait.finish()

    def closed(self) -> None:
        if self._context.wait is not None:
            self._context.wait.cancel()
            self._context.wait = None
        self._context.shares.disconnected(self._context)
        self._in_line.clear()

    @property
    def is_idle(self) -> bool:
        return not self._in_line

    @property
    def is_owed(self) -> bool:
        """Produce requests are first in line; or a request waits for neither records nor other members."""
        return bool(self._in_line) and (self._in_line[0].is_write or self._context.wait is None)

    @property
    def waits_for_others(self) -> bool:
        return self._context.wait is not None

    # -- handling ----------------------------------------------------------------------------------------------------

    def _handle(self, frame: memoryview) -> bool:
        """Whether it was handled; else the connection is parked, and it is handled later."""
        key, version, correlation_id = header.peek(frame)
        if self._door.faults is not None and (fault := self._door.faults(key, version, frame)) is not None:
            self._put(_frame(correlation_id, fault[0], [fault[1]]))
            return True
        self._context.began = monotonic()
        if key == _PRODUCE and self._handle_known(frame, version, correlation_id):
            return True
        api = APIS.get(key)
        if api is None or not api.low <= version <= api.high:
            self._handle_unserved(key, version, correlation_id, frame)
            return True
        if api.handle is not None and not messages.is_loaded(key, version):
            self._load_first(key, version)
            return False
        self._metrics.requests[key] += 1
        context = self._context
        context.version = version
        flexible = version >= api.flexible_from if api.flexible_from is not None else messages.is_flexible(key, version)
        context.session.client_id, reader = header.skip_client(frame, flexible)
        tags = b"\0" if flexible and key != _API_VERSIONS else b""
        if api.answer is None:
            self._handle_message(api, version, correlation_id, tags, bytes(reader.buffer[reader.position :]))
            return True
        answer = api.answer(reader, context)
        if key == _API_VERSIONS:
            self._known = self._door.known_for(context.session)  # a proven peer speaks for its client from now on
        if context.single is not None:
            self._known.learn(frame, context.single, context)
            context.single = None
        if answer is None:
            return True
        if isinstance(answer, Promise) and not answer.done:
            if key == _PRODUCE:
                answer.then(partial(self._fill_produce, self._reserve(True), correlation_id, tags, context.began))
                self._park_if_behind()
            else:
                answer.then(partial(self._fill_parked, self._reserve(), key, correlation_id, tags))
                self._connection.is_parked = True
            return True
        context.wait = None
        self._observe(key, context.began)
        self._put(_frame(correlation_id, tags, answer.value() if isinstance(answer, Promise) else answer))
        return True

    def _load_first(self, key: int, version: int) -> None:
        """Imports `kio` and the API's schema before the first request of a kind. That takes 100 ms."""
        self._connection.is_parked = True
        self._running = asyncio.ensure_future(self._load(key, version, self._reserve()))

    async def _load(self, key: int, version: int, slot: _Slot) -> None:
        try:
            await aside(messages.load, key, version)
        except Exception:
            logger.exception("cannot load the schema of API %d (version %d); the connection is closed", key, version)
            self._connection.close()
        finally:
            self._running = None
        if self._connection.closed:
            return
        self._in_line.remove(slot)
        if not self._in_line:
            self._connection.unpark()

    def _observe(self, key: int, began: float) -> None:
        histogram = self._metrics.latencies[key]
        if histogram is not None:
            histogram.observe(monotonic() - began)

    def _handle_known(self, frame: memoryview, version: int, correlation_id: int) -> bool:
        """The fast path for a produce request of a known shape; False if it does not apply."""
        found = self._known.find(frame, version)
        if found is None:
            return False
        known, records = found
        try:
            batch, promise = append(known.partition, records, self._context)
        except RequestError:
            return False  # nothing was written; the general path reports the error
        self._metrics.requests[_PRODUCE] += 1
        append_time = batch.max_timestamp if batch.attributes & LOG_APPEND_TIME else NO_TIMESTAMP
        self._answer_known(known, correlation_id, append_time, promise, self._context.began)
        return True

    def _answer_known(
        self, known: KnownProduce, correlation_id: int, append_time: int, promise: Promise[Appended], began: float
    ) -> None:
        if promise.done:
            self._metrics.produce_seconds.observe(monotonic() - began)
            answer = known.settled(correlation_id, append_time, promise)
            if self._in_line:
                self._put([answer])
            else:
                self._outbox.put(answer)
        else:
            promise.then(partial(self._fill_known, self._reserve(True), known, correlation_id, append_time, began))
            self._park_if_behind()

    def _fill_known(
        self,
        slot: _Slot,
        known: KnownProduce,
        correlation_id: int,
        append_time: int,
        began: float,
        done: Promise[Appended],
    ) -> None:
        self._metrics.produce_seconds.observe(monotonic() - began)
        self._fill(slot, [known.settled(correlation_id, append_time, done)])

    def _handle_taken(self, requests: list[Request[KnownProduce]], began: float) -> None:
        """Produce requests whose batches are stored unchanged: one, or a run (`produce_run.py`)."""
        if len(requests) == 1:
            known, correlation_id, part, _, append_time = requests[0]
            promise = append_part(known.partition, part, self._context)
            self._metrics.requests[_PRODUCE] += 1
            self._answer_known(known, correlation_id, append_time, promise, began)
        else:
            self._handle_run(ProduceRun(requests), began)

    def _handle_run(self, run: ProduceRun, began: float) -> None:
        promise = run.append(self._context)
        self._metrics.requests[_PRODUCE] += run.count
        if promise.done:
            self._metrics.produce_seconds.observe_all(monotonic() - began, run.count)
            self._put(run.answers())
        else:
            promise.then(partial(self._fill_run, self._reserve(True), run, began))
            self._park_if_behind()

    def _fill_run(self, slot: _Slot, run: ProduceRun, began: float, _: Promise[None]) -> None:
        self._metrics.produce_seconds.observe_all(monotonic() - began, run.count)
        self._fill(slot, run.answers())

    def _reserve(self, is_write: bool = False) -> _Slot:
        slot = _Slot(is_write)
        self._in_line.append(slot)
        return slot

    def _put(self, chunks: list[Chunk]) -> None:
        """Puts a ready answer into the outbox, or in line behind earlier requests."""
        if self._in_line:
            self._reserve().chunks = chunks
            self._connection.is_parked = True
        else:
            for chunk in chunks:
                self._outbox.put(chunk)

    def _park_if_behind(self) -> None:
        if self._context.slow_down or len(self._in_line) > IN_LINE_MAX:
            self._context.slow_down = False
            self._connection.is_parked = True

    def _handle_message(self, api: Api, version: int, correlation_id: int, tags: bytes, body: bytes) -> None:
        assert api.handle is not None
        if len(body) > LIGHT_BYTES:
            fields: Any = self._handle_large(api, version, body)
        else:
            fields = api.handle(messages.decode_request(api.key, version, body), self._context)
        slot = self._reserve()
        if inspect.isawaitable(fields) or is_large(fields):
            self._connection.is_parked = True
            self._running = asyncio.ensure_future(self._finish(slot, api, version, correlation_id, tags, fields))
        else:
            slot.chunks = _frame(correlation_id, tags, [messages.encode_response(api.key, version, fields)])
            self._observe(api.key, self._context.began)
            self._drain_line_or_park()

    async def _handle_large(self, api: Api, version: int, body: bytes) -> Fields:
        request = await aside(messages.decode_request, api.key, version, body)
        assert api.handle is not None
        if api.is_pure:
            return await aside(api.handle, request, self._context)
        fields: Any = api.handle(request, self._context)
        if self._connection.hung_up:  # during the decoding
            self.hung_up()
        answer: Fields = await fields if inspect.isawaitable(fields) else fields
        return answer

    async def _finish(self, slot: _Slot, api: Api, version: int, correlation_id: int, tags: bytes, fields: Any) -> None:
        try:
            if inspect.isawaitable(fields):
                fields = await fields
            if is_large(fields):
                body = await aside(messages.encode_response, api.key, version, fields)
            else:
                body = messages.encode_response(api.key, version, fields)
        except asyncio.CancelledError:
            raise
        except ProtocolError as error:
            self.refused(error)
            return
        except Exception:
            logger.exception("%s (version %d) failed; its connection is closed", api.name, version)
            self._connection.close()
            return
        finally:
            self._running = None
        self._end_parked(slot, api.key, _frame(correlation_id, tags, [body]))

    def _handle_unserved(self, key: int, version: int, correlation_id: int, frame: memoryview) -> None:
        self._metrics.request_errors += 1
        if key == _API_VERSIONS:
            self._context.version = version
            _, reader = header.skip_client(frame, flexible=False)
            answer = api_18_api_versions.answer(reader, self._context)
            chunks = _frame(correlation_id, b"", answer)
        else:
            messages.require(key, version)
            is_flexible = messages.is_flexible(key, version)
            _, reader = header.skip_client(frame, is_flexible)
            body = refusal.answer(key, version, reader.buffer[reader.position :], Code.UNSUPPORTED_VERSION)
            chunks = _frame(correlation_id, b"\0" if is_flexible else b"", [body])
        self._reserve().chunks = chunks
        self._drain_line_or_park()

    # -- answering ---------------------------------------------------------------------------------------------------

    def _fill(self, slot: _Slot, chunks: list[Chunk]) -> None:
        """Called when an awaited answer is ready."""
        if self._connection.closed:
            return
        slot.chunks = chunks
        self._drain_line()
        connection = self._connection
        connection.send()
        if connection.is_parked and not self._in_line and not connection.waits_for_memory:
            connection.unpark()

    def _fill_produce(
        self, slot: _Slot, correlation_id: int, tags: bytes, began: float, done: Promise[list[Chunk] | None]
    ) -> None:
        """A value of None means no answer (acks=0)."""
        self._observe(_PRODUCE, began)
        if done.error is not None:
            self._fail(done.error)
            return
        chunks = done.value()
        self._fill(slot, [] if chunks is None else _frame(correlation_id, tags, chunks))

    def _fill_parked(self, slot: _Slot, key: int, correlation_id: int, tags: bytes, done: Promise[list[Chunk]]) -> None:
        if done.error is not None:  # of a request decoded in a thread
            self._fail(done.error)
            return
        self._end_parked(slot, key, _frame(correlation_id, tags, done.value()))

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, ProtocolError):
            self.refused(error)
            return
        host = self._connection.peer
        logger.error("a request from %s failed; its connection is closed", host, exc_info=error)
        self._connection.close()

    def _end_parked(self, slot: _Slot, key: int, chunks: list[Chunk]) -> None:
        """Ends the parked request. No other was handled since, so the context's wait and start time belong to it."""
        self._context.wait = None
        self._observe(key, self._context.began)
        self._fill(slot, chunks)

    def _drain_line(self) -> None:
        line, outbox = self._in_line, self._outbox
        while line and line[0].chunks is not None:
            for chunk in line.popleft().chunks or ():
                outbox.put(chunk)

    def _drain_line_or_park(self) -> None:
        self._drain_line()
        if self._in_line:
            self._connection.is_parked = True


def _frame(correlation_id: int, tags: bytes, chunks: list[Chunk]) -> list[Chunk]:
    """Puts length and header before the chunks of an answer."""
    if len(chunks) == 1 and isinstance(chunks[0], bytes):
        body = chunks[0]
        return [_ANSWER_HEAD.pack(4 + len(tags) + len(body), correlation_id) + tags + body]
    size = sum(len(chunk) if isinstance(chunk, bytes) else chunk.size for chunk in chunks)
    return [_ANSWER_HEAD.pack(4 + len(tags) + size, correlation_id) + tags, *chunks]
