"""One client's connection: frames in, responses and messages out.

Responses keep the order of the requests. PUBLISH, ACK and NACK overlap while they wait for their sync: each gets a
place in line, and a response is sent after all before it. A request that changes topics or subscriptions waits until
all requests before it are answered, and later requests wait for it. Messages are pushed at any time; the response to a
SUBSCRIBE is sent before its first message.

Backpressure: the connection is not read while output waits for the client, while too many requests are in flight, while
a partition has too many unsynced bytes, and while the door has no memory for more of a large frame. A client that does
not read gets no messages. It is disconnected if the unread output of all clients exceeds the limit.

While the connection is not read, `hangup.py` detects a hang-up. Requests sent before it are still handled; without
progress the connection is closed after `STUCK_SECONDS_MAX`.

An invalid frame gets an ERROR response. It ends the connection if the frames behind it cannot be decoded either.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from millstream.broker.groups.queue.verbs import Verb
from millstream.broker.session import Inlet, Session
from millstream.core.errors import Code, RequestError
from millstream.core.promise import Promise
from millstream.doors.flowmq import answers, message_id
from millstream.doors.flowmq.frame_memory import FrameMemory
from millstream.doors.flowmq.outbox import Outbox
from millstream.doors.flowmq.subscription import Subscription
from millstream.doors.transport import Transport
from millstream.security.rights import Kind, Operation
from millstream.wire import flowmq as wire
from millstream.wire.flowmq import Command, Frame

if TYPE_CHECKING:
    from millstream.doors.flowmq.door import FlowmqDoor

logger = logging.getLogger(__name__)

IN_LINE_MAX = 1000
OUTBOX_BYTES_MAX = 256 * 1024
SUBSCRIPTIONS_MAX = 1000
COPY_BYTES_MAX = 16 * 1024
"""A payload up to this size is cheaper to copy behind its head than to send separately."""
DISCARDED_BYTES_MAX = 1 << 20
"""Bytes that are read and discarded after a final ERROR, so that the client can read it."""
IDLE_SECONDS_MAX = 600
STUCK_SECONDS_MAX = 60
"""How long a client may pause within a frame."""

_PUBLISH, _ACK, _NACK, _PING = map(int, (Command.PUBLISH, Command.ACK, Command.NACK, Command.PING))
_NACK_REASON = "refused by its subscriber"


class _Place:
    """A request's place in line, with its response once that is known."""

    __slots__ = ("answer",)

    def __init__(self, answer: bytes | None = None) -> None:
        self.answer = answer


class Connection:
    def __init__(self, door: FlowmqDoor, transport: Transport, session: Session) -> None:
        self._door = door
        self._transport = transport
        self.session = session
        self._host = session.host
        self._targets = door.targets_for(session)
        self._reader = wire.FrameReader(door.frame_bytes_max)
        self._outbox = Outbox(transport)
        self._in_line: deque[_Place] = deque()
        self._in_line_bytes = 0
        self._backlog: list[Frame] = []
        """Frames received before the connection was parked, not handled yet."""
        self.subscriptions: dict[bytes, Subscription] = {}
        """By the topic part of a message id."""
        self._inlet: Inlet | None = None
        """The inlet of the last PUBLISH in this read."""
        self._answering: dict[Subscription, None] = {}
        """Subscriptions with an ACK or NACK in this read: they have room for more messages after it."""
        self._running: asyncio.Task[None] | None = None
        self._drained: Promise[None] | None = None
        self._waits_for_line = False
        self._memory = FrameMemory(door.budget, self._go_on)
        self._unread = 0
        self._is_handling = False
        self._is_flush_due = False
        self._is_read = True
        self._is_written = False
        self._is_ending = False
        self._is_stopped = False
        self._discarded = 0
        self.takes_messages = True
        """Whether the client reads its output."""
        self.unread_since_ms: float = math.inf
        """Since when output waits for the client."""
        self.closed = False
        self.hung_up = False
        """Whether the client has ended its stream."""
        self.last_used = door.now
        transport.start_reading(self._on_readable)
        transport.watch_hang_up(self._on_hang_up)

    # -- receiving ---------------------------------------------------------------------------------------------------

    def _on_readable(self) -> None:
        shared = self._door.shared
        try:
            count = self._transport.recv_into(shared)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            count = 0
        if count == 0:
            self.close()
            return
        self._door.metrics.bytes_in += count
        if self._is_ending:
            self._discarded += count
            if self._discarded > DISCARDED_BYTES_MAX:
                self.close()
            return
        self.last_used = self._door.now
        try:
            self._handle_all(self._reader.feed(shared[:count]))
        except Exception:
            logger.exception("a request from %s failed; its connection is closed", self._host)
            self.close()

    def _handle_all(self, frames: list[Frame]) -> None:
        """Handles frames in order until the connection has to wait. It is not parked at the start."""
        self._is_handling = True
        for at, (command, payload) in enumerate(frames):
            if at and (self._is_parked or (self._outbox.size > OUTBOX_BYTES_MAX and not self._has_sent())):
                self._backlog = frames[at:]
                break
            self._handle(command, payload)
        if self._inlet is not None:
            if len(frames) == 1:
                self._inlet.hurry()
            self._inlet = None
        self._is_handling = False
        while self._answering:
            subscription, _ = self._answering.popitem()
            subscription.dispatcher.has_room(subscription)
        reader, memory = self._reader, self._memory
        if (reader.held or memory.reserved) and not self.closed:
            memory.follow(reader)
        if reader.broken is not None and not self._backlog and self._running is None:
            self._refuse(reader.broken)
        if self._outbox.size or self._is_ending:
            self.flush()
        if not self._is_read or self._is_parked:
            self._look_where_to_read()

    def _go_on(self) -> None:
        """Continues with the backlog, then with the socket."""
        if self._is_handling or self.closed or self._is_parked or self._is_written:
            return
        frames, self._backlog = self._backlog, []
        try:
            self._handle_all(frames)
        except Exception:
            logger.exception("a request from %s failed; its connection is closed", self._host)
            self.close()

    @property
    def _is_parked(self) -> bool:
        return self._running is not None or self._waits_for_line or self._memory.leave_line is not None or self.closed

    def _look_where_to_read(self) -> None:
        wanted = not (self._is_parked or self._is_written or self._is_stopped)
        if wanted != self._is_read and not self.closed:
            self._is_read = wanted
            if wanted:
                self._transport.start_reading(self._on_readable)
            else:
                self._transport.stop_reading()

    def _on_hang_up(self, is_reset: bool) -> None:
        self.hung_up = True
        if self._is_read:
            self._on_readable()
        elif is_reset:
            self.close()

    # -- requests ----------------------------------------------------------------------------------------------------

    def _handle(self, command: int, payload: bytes) -> None:
        try:
            if command == _PUBLISH:
                self._publish(payload)
            elif command == _ACK:
                self._answer(payload, Verb.ACCEPT)
            elif command == _NACK:
                self._answer(payload, Verb.RELEASE, _NACK_REASON)
            elif command == _PING:
                self._reply(wire.frame(Command.PONG, payload))
            elif command == Command.LIST_TOPICS:
                names = ",".join(sorted(topic.name for topic in self.session.topics()))
                self._reply(wire.frame(Command.SUCCESS, names.encode()))
            elif command == Command.SUBSCRIBE:
                self._start(self._subscribe(payload))
            elif command == Command.CREATE_TOPIC:
                self._start(self._create_topic(payload))
            elif command == Command.DELETE_TOPIC:
                self._start(self._delete_topic(payload))
            else:
                raise RequestError(Code.INVALID_REQUEST, f"{wire.name_of(command)} is not for a broker")
        except RequestError as error:
            self._fail(error)

    def _publish(self, payload: bytes) -> None:
        name, message = wire.split_publish(payload)
        target = self._targets.find(name)
        if target is None:
            self._start(self._publish_to_new(name, message))
            return
        inlet = target.inlet
        self._inlet = inlet
        promise = inlet.put(message)
        place = _Place()
        self._in_line.append(place)
        promise.then(lambda done: self._fill(place, answers.published(target, done)))
        if inlet.is_full or len(self._in_line) > IN_LINE_MAX:
            self._waits_for_line = bool(self._in_line)

    async def _publish_to_new(self, name: bytes, message: bytes) -> bytes:
        await self._targets.ensure(wire.text_of(name, "topic"), Operation.WRITE)
        target = self._targets.find(name)
        if target is None:
            raise RequestError(Code.UNKNOWN_TOPIC_OR_PARTITION, "the topic was deleted")
        return wire.frame(Command.SUCCESS, target.prefix + b"%d" % await target.inlet.put(message))

    def _answer(self, name: bytes, verb: Verb, reason: str = "") -> None:
        subscription = self.subscriptions.get(name[: message_id.TOPIC_BYTES])
        if subscription is None:
            raise RequestError(Code.INVALID_RECORD_STATE, answers.not_leased(name))
        dispatcher = subscription.dispatcher
        dispatcher.forget_expired(subscription)  # some of it is not redelivered: it is a dead letter by now
        if name not in subscription.unanswered:
            if subscription.is_late:
                subscription.answered_late()
                self._answering[subscription] = None
            raise RequestError(Code.INVALID_RECORD_STATE, answers.not_leased(name))
        promise = dispatcher.answer(subscription, name, verb, reason)
        if promise.done and not self._in_line:
            self._reply(answers.answered(name, promise))
        else:
            place = _Place()
            self._in_line.append(place)
            promise.then(lambda done: self._fill(place, answers.answered(name, done)))
            self._waits_for_line = len(self._in_line) > IN_LINE_MAX
        self._answering[subscription] = None

    async def _create_topic(self, payload: bytes) -> bytes:
        await self._targets.create(wire.text_of(payload, "topic"))
        return wire.frame(Command.SUCCESS, payload)

    async def _delete_topic(self, payload: bytes) -> bytes:
        await self.session.admin.delete_topic(wire.text_of(payload, "topic"))
        return wire.frame(Command.SUCCESS, payload)

    async def _subscribe(self, payload: bytes) -> bytes:
        name, group = wire.split_subscribe(payload)
        if group:
            self.session.check(Operation.READ, Kind.GROUP, group)
        topic = await self._targets.ensure(name, Operation.READ)
        if all(partition.log.damage.lost for partition in topic.partitions):
            topic.partitions[0].log.damage.check_lost()
        part = message_id.topic_part(topic.id)
        known = self.subscriptions.get(part)
        if known is not None and known.group == group:
            return answers.SUCCESS
        if known is not None:
            as_what = f"in group {known.group}" if known.group else "without a group"
            detail = f"this connection is subscribed to {name} already, {as_what}; use another connection"
            raise RequestError(Code.INVALID_REQUEST, detail)
        if len(self.subscriptions) >= SUBSCRIPTIONS_MAX:
            raise RequestError(Code.POLICY_VIOLATION, f"a connection has at most {SUBSCRIPTIONS_MAX} subscriptions")
        dispatcher = await self._door.join(topic, group, self.session)
        if self.closed or dispatcher.is_closed:
            self._door.leave(dispatcher)
            raise dispatcher.lost or RequestError(Code.UNKNOWN_TOPIC_OR_PARTITION, f"topic {name} was deleted")
        subscription = Subscription(self, dispatcher, group, self._door.window)
        self.subscriptions[part] = subscription
        self._reply(answers.SUCCESS)
        dispatcher.add(subscription)
        return b""

    def end(self, subscription: Subscription) -> None:
        """Ends a subscription silently, for example when its topic is deleted."""
        dispatcher = subscription.dispatcher
        if self.subscriptions.pop(dispatcher.topic_part, None) is not None:
            dispatcher.remove(subscription)
            self._door.leave(dispatcher)

    def lose(self, subscription: Subscription, reason: str) -> None:
        """Another broker owns the queue. Sends an ERROR and ends the connection: the client would wait for ever."""
        self.end(subscription)
        self._backlog = []
        self._reader.give_up(reason)
        if self._running is None:
            self._refuse(reason)
            self.flush()

    # -- responses and messages --------------------------------------------------------------------------------------

    def _start(self, work: Coroutine[Any, Any, bytes]) -> None:
        """Runs a request after all before it are answered. The connection is parked meanwhile."""
        self._running = asyncio.ensure_future(self._run(work))

    async def _run(self, work: Coroutine[Any, Any, bytes]) -> None:
        try:
            if self._in_line:
                self._drained = Promise()
                await self._drained
            if self.closed:
                work.close()
                return
            answer = await work
            if answer:
                self._reply(answer)
        except RequestError as error:
            self._fail(error)
        except Exception:
            logger.exception("a request from %s failed", self._host)
            self._fail(RequestError(Code.UNKNOWN_SERVER_ERROR))
        finally:
            self._running = None
        self.flush()
        self._go_on()

    def _reply(self, answer: bytes) -> None:
        """Puts an immediate response into the outbox, or behind the responses in line."""
        if self._in_line:
            self._in_line.append(_Place(answer))
            self._in_line_bytes += len(answer)
            self._waits_for_line = self._in_line_bytes > OUTBOX_BYTES_MAX or len(self._in_line) > IN_LINE_MAX
        else:
            self._outbox.put(answer)

    def _fail(self, error: RequestError) -> None:
        self._door.metrics.request_errors += 1
        self._reply(wire.error(error.detail))

    def _refuse(self, reason: str) -> None:
        """Sends an ERROR and ends the connection: later frames cannot be decoded or served."""
        if self._is_ending:
            return
        self._is_ending = True
        self.takes_messages = False
        self._door.metrics.request_errors += 1
        self._door.note_refusal(self._host, reason)
        self._reply(wire.error(reason))

    def _fill(self, place: _Place, answer: bytes) -> None:
        """Sets the response of a place in line."""
        if self.closed:
            return
        place.answer = answer
        line = self._in_line
        while line and line[0].answer is not None:
            self._outbox.put(line.popleft().answer or b"")
        if not line:
            self._in_line_bytes = 0
            self._waits_for_line = False
            if self._drained is not None:
                drained, self._drained = self._drained, None
                drained.settle(None)
        if self._is_handling:
            return
        if not line:
            self.flush()
            if not self._is_read:
                self._go_on()
        elif not self._is_flush_due:  # later responses often come in the same turn: one send takes them all
            self._is_flush_due = True
            self._door.loop.call_soon(self._flush_soon)

    def _flush_soon(self) -> None:
        self._is_flush_due = False
        self.flush()

    def push(self, name: bytes, payload: bytes) -> None:
        """Queues a message; `flush` sends it."""
        if len(payload) <= COPY_BYTES_MAX:
            self._outbox.put(wire.message_head(name, len(payload)) + payload)
        else:
            self._outbox.put(wire.message_head(name, len(payload)))
            self._outbox.put(payload)

    def flush(self) -> None:
        """Sends as much of the outbox as the socket takes."""
        if self._is_written or self.closed:
            return
        if self._outbox.size:
            try:
                self._door.metrics.bytes_out += self._outbox.send()
            except OSError:
                self.close()
                return
            if self._outbox.size:
                self._wait_for_reader()
                return
        if self._is_ending and not self._in_line:
            self._say_goodbye()

    def _has_sent(self) -> bool:
        self.flush()
        return not (self._is_written or self.closed)

    def _wait_for_reader(self) -> None:
        self._unread = self._outbox.size
        self._door.unread_bytes += self._unread
        self._is_written = True
        self.takes_messages = False
        self.unread_since_ms = self._door.clock.now_ms()
        self._transport.start_writing(self._on_writable)
        for subscription in self.subscriptions.values():
            subscription.dispatcher.has_no_room(subscription)
        self._look_where_to_read()
        if self._door.unread_bytes > self._door.unread_bytes_max:
            self._door.note_refusal(self._host, f"it does not read its answers: {self._unread} bytes wait")
            self.close()

    def _on_writable(self) -> None:
        try:
            sent = self._outbox.send()
        except OSError:
            self.close()
            return
        self._door.metrics.bytes_out += sent
        self.last_used = self._door.now
        if self._outbox.size:
            return
        self._transport.stop_writing()
        self._is_written = False
        self.unread_since_ms = math.inf
        self.takes_messages = not (self._is_ending or self._is_stopped)
        self._door.unread_bytes -= self._unread
        self._unread = 0
        self.flush()
        self._go_on()
        for subscription in list(self.subscriptions.values()):
            subscription.dispatcher.has_room(subscription)

    # -- ending ------------------------------------------------------------------------------------------------------

    def _say_goodbye(self) -> None:
        """Ends the stream behind the ERROR. A plain close would discard output that the client has not read."""
        self._end_subscriptions()
        try:
            self._transport.end()
        except OSError:
            self.close()

    @property
    def quiet_seconds_max(self) -> float:
        """How long the connection may be idle before it is closed."""
        if self._is_ending or self.hung_up or self._reader.held or self._memory.leave_line is not None:
            return STUCK_SECONDS_MAX
        if self._is_written:
            return IDLE_SECONDS_MAX
        return float("inf") if self.subscriptions or self._in_line or self._running is not None else IDLE_SECONDS_MAX

    @property
    def is_owed(self) -> bool:
        """Whether responses are due soon."""
        return bool(self._in_line or self._running is not None or (self._outbox.size and not self._is_written))

    def stop(self) -> None:
        """Stops reading and message delivery."""
        self._is_stopped = True
        self.takes_messages = False
        self._look_where_to_read()

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self.takes_messages = False
        if self._is_read:
            self._transport.stop_reading()
        if self._is_written:
            self._transport.stop_writing()
            self._door.unread_bytes -= self._unread
        self._transport.close()
        self._in_line.clear()
        self._backlog = []
        if self._drained is not None:
            drained, self._drained = self._drained, None
            drained.settle(None)
        self._memory.close()
        self._door.forget(self)
        self._end_subscriptions()

    def _end_subscriptions(self) -> None:
        for subscription in list(self.subscriptions.values()):
            self.end(subscription)
