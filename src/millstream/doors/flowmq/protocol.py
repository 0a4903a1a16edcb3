"""One client's FlowMQ protocol: frames in, responses and messages out.

Responses keep the order of the requests. PUBLISH, ACK and NACK overlap while they wait for their sync: each gets a
place in line, and a response is sent after all before it. A request that changes topics or subscriptions waits until
all requests before it are answered, and later requests wait for it. Messages are pushed at any time; the response to a
SUBSCRIBE is sent before its first message.

Backpressure: the connection is also parked while too many requests are in flight, and while a partition has too many
unsynced bytes. A client that does not read gets no messages.

Hang-up. Requests that the client sent before are handled; an end of stream that is read closes the connection.

An invalid frame gets an ERROR response. If the frames behind it cannot be decoded, the ERROR ends the broker's stream.
The door then reads and discards what the client sends, so that the client can read the ERROR: closing a connection with
unread bytes resets it.
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
from millstream.core.clock import Timer
from millstream.core.errors import Code, ProtocolError, RequestError
from millstream.core.promise import Promise
from millstream.doors.engine.connection import Connection
from millstream.doors.engine.protocol import Protocol
from millstream.doors.flowmq import answers, message_id
from millstream.doors.flowmq.subscription import Subscription
from millstream.security.rights import Kind, Operation
from millstream.wire import flowmq as wire
from millstream.wire.flowmq import Command

if TYPE_CHECKING:
    from millstream.doors.flowmq.door import FlowmqDoor

logger = logging.getLogger(__name__)

IN_LINE_MAX = 1000
OUTBOX_BYTES_MAX = 256 * 1024
SUBSCRIPTIONS_MAX = 1000
COPY_BYTES_MAX = 16 * 1024
"""A payload up to this size is cheaper to copy behind its head than to send separately."""
DISCARDED_BYTES_MAX = 1 << 20
"""Bytes that are read and discarded after a final ERROR."""
STUCK_SECONDS_MAX = 60
"""How long a client may pause within a frame, or take to read a final ERROR."""

_PUBLISH, _ACK, _NACK, _PING = map(int, (Command.PUBLISH, Command.ACK, Command.NACK, Command.PING))
_NACK_REASON = "refused by its subscriber"


class _Place:
    """A request's place in line, with its response once that is known."""

    __slots__ = ("answer",)

    def __init__(self, answer: bytes | None = None) -> None:
        self.answer = answer


class FlowmqProtocol(Protocol):
    __slots__ = (
        "_answering",
        "_connection",
        "_discarded",
        "_door",
        "_drained",
        "_farewell",
        "_in_line",
        "_in_line_bytes",
        "_inlet",
        "_is_flush_due",
        "_is_handling",
        "_is_refused",
        "_lost",
        "_outbox",
        "_running",
        "_targets",
        "session",
        "subscriptions",
        "takes_messages",
        "unread_since_ms",
    )

    HEAD_BYTES = wire.HEAD_BYTES

    def __init__(self, door: FlowmqDoor, session: Session, connection: Connection) -> None:
        self._door = door
        self._connection = connection
        self._outbox = connection.outbox
        self.session = session
        self._targets = door.targets_for(session)
        self._in_line: deque[_Place] = deque()
        self._in_line_bytes = 0
        self.subscriptions: dict[bytes, Subscription] = {}
        """By the topic part of a message id."""
        self._inlet: Inlet | None = None
        """The inlet of the last PUBLISH in this read."""
        self._answering: dict[Subscription, None] = {}
        """Subscriptions with an ACK or NACK in this read: they have room for more messages after it."""
        self._running: asyncio.Task[None] | None = None
        self._drained: Promise[None] | None = None
        self._is_handling = False
        self._is_flush_due = False
        self._lost: ProtocolError | None = None
        """Why this broker cannot serve the client any longer; set while a request runs."""
        self._is_refused = False
        """Whether a final ERROR was answered."""
        self._discarded = 0
        self._farewell: Timer | None = None
        """Ends the time that the client has to read a final ERROR."""
        self.takes_messages = True
        """Whether the client reads its output."""
        self.unread_since_ms: float = math.inf
        """Since when output waits for the client."""

    # -- the engine's calls ------------------------------------------------------------------------------------------

    def take(self, data: memoryview) -> int:
        if self._is_refused:
            return self._discard(data)
        connection, outbox, bytes_max = self._connection, self._outbox, self._door.frame_bytes_max
        position = count = 0
        self._is_handling = True
        try:
            while not (connection.is_parked or connection.is_written or connection.closed):
                if outbox.size > OUTBOX_BYTES_MAX and not connection.has_sent():
                    break
                found = wire.next_frame(data, position, bytes_max)
                if found is None:
                    break
                (command, payload), position = found
                count += 1
                self._handle(command, payload)
            if self._inlet is not None and count == 1:
                self._inlet.hurry()
        finally:
            self._inlet = None
            self._is_handling = False
            while self._answering:
                subscription, _ = self._answering.popitem()
                subscription.dispatcher.has_room(subscription)
        if connection.is_parked and self._may_unpark:  # the last response came at once
            connection.is_parked = False
            return position + self.take(data[position:])
        return position

    def _discard(self, data: memoryview) -> int:
        self._discarded += len(data)
        if self._discarded > DISCARDED_BYTES_MAX:
            self._connection.close()
        return len(data)

    def refused(self, error: ProtocolError) -> None:
        """Sends an ERROR and ends the connection: later frames cannot be decoded or served."""
        if self._is_refused:
            return
        connection = self._connection
        self._is_refused = True
        self.takes_messages = False
        self._door.metrics.request_errors += 1
        self._door.note_refusal(connection.peer, error)
        connection.drop()
        self._reply(wire.error(str(error)))
        self.flush()
        self._unpark()
        if not connection.closed:
            self._farewell = self._door.clock.call_later(STUCK_SECONDS_MAX, connection.close)

    def ended(self) -> None:
        connection = self._connection
        if connection.is_parked:  # until the requests in progress are answered
            connection.hung_up = True
            connection.stop_reading()
        else:
            connection.close()

    def hung_up(self) -> None:
        """The client may still read, as `nc -N` does."""

    def stalled(self) -> None:
        self.takes_messages = False
        self.unread_since_ms = self._door.clock.now_ms()
        for subscription in self.subscriptions.values():
            subscription.dispatcher.has_no_room(subscription)

    def caught_up(self) -> None:
        self.takes_messages = not self._is_refused
        self.unread_since_ms = math.inf
        self.flush()
        for subscription in list(self.subscriptions.values()):
            subscription.dispatcher.has_room(subscription)

    def closed(self) -> None:
        self.takes_messages = False
        if self._farewell is not None:
            self._farewell.cancel()
        self._in_line.clear()
        if self._drained is not None:
            drained, self._drained = self._drained, None
            drained.settle(None)
        self._end_subscriptions()

    @property
    def is_idle(self) -> bool:
        """Whether the client is sent nothing unless it asks."""
        return not (self.subscriptions or self._is_busy)

    @property
    def _is_busy(self) -> bool:
        return bool(self._in_line) or self._running is not None

    @property
    def is_owed(self) -> bool:
        """Whether responses are due soon."""
        return self._is_busy or bool(self._outbox.size and not self._connection.is_written)

    waits_for_others = False

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
                raise RequestError(Code.INVALID_REQUEST, f"{wire.name_of(command)} is not a request")
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
            self._park_in_line()

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
            if len(self._in_line) > IN_LINE_MAX:
                self._park_in_line()
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
            detail = f"this connection is already subscribed to {name} {as_what}; use another connection"
            raise RequestError(Code.INVALID_REQUEST, detail)
        if len(self.subscriptions) >= SUBSCRIPTIONS_MAX:
            raise RequestError(Code.POLICY_VIOLATION, f"a connection has at most {SUBSCRIPTIONS_MAX} subscriptions")
        dispatcher = await self._door.join(topic, group, self.session)
        if self._connection.closed or dispatcher.is_closed:
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
        lost = ProtocolError(reason)
        if self._running is None:
            self.refused(lost)
        else:
            self._lost = lost
            self._connection.drop()

    # -- responses and messages --------------------------------------------------------------------------------------

    def _start(self, work: Coroutine[Any, Any, bytes]) -> None:
        """Runs a request after all before it are answered. The connection is parked meanwhile."""
        self._running = asyncio.ensure_future(self._run(work))
        self._connection.is_parked = True

    async def _run(self, work: Coroutine[Any, Any, bytes]) -> None:
        try:
            if self._in_line:
                self._drained = Promise()
                await self._drained
            if self._connection.closed:
                work.close()
                return
            answer = await work
            if answer:
                self._reply(answer)
        except RequestError as error:
            self._fail(error)
        except Exception:
            logger.exception("a request from %s failed", self._connection.peer)
            self._fail(RequestError(Code.UNKNOWN_SERVER_ERROR))
        finally:
            self._running = None
        if self._lost is not None:
            self.refused(self._lost)
        self.flush()
        self._unpark()

    def _park_in_line(self) -> None:
        """Parks until all requests in line are answered."""
        self._connection.is_parked = bool(self._in_line)

    @property
    def _may_unpark(self) -> bool:
        return not (self._is_busy or self._connection.waits_for_memory)

    def _unpark(self) -> None:
        if self._connection.is_parked and self._may_unpark:
            self._connection.unpark()

    def _reply(self, answer: bytes) -> None:
        """Puts an immediate response into the outbox, or behind the responses in line."""
        if self._in_line:
            self._in_line.append(_Place(answer))
            self._in_line_bytes += len(answer)
            if self._in_line_bytes > OUTBOX_BYTES_MAX or len(self._in_line) > IN_LINE_MAX:
                self._park_in_line()
        else:
            self._outbox.put(answer)

    def _fail(self, error: RequestError) -> None:
        self._door.metrics.request_errors += 1
        self._reply(wire.error(error.detail))

    def _fill(self, place: _Place, answer: bytes) -> None:
        """Sets the response of a place in line."""
        if self._connection.closed:
            return
        place.answer = answer
        line = self._in_line
        while line and line[0].answer is not None:
            self._outbox.put(line.popleft().answer or b"")
        if not line:
            self._in_line_bytes = 0
            if self._drained is not None:
                drained, self._drained = self._drained, None
                drained.settle(None)
        if self._is_handling:
            return
        if not line:
            self.flush()
            self._unpark()
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
            self._outbox.put_shared(payload)

    def flush(self) -> None:
        """Sends as much of the outbox as the transport takes."""
        self._connection.send()
        if self._is_refused and not (self._in_line or self._outbox or self._connection.closed):
            self._say_goodbye()

    def _say_goodbye(self) -> None:
        """Ends the stream behind the ERROR. A plain close would discard output that the client has not read."""
        self._end_subscriptions()
        try:
            self._connection.transport.end()
        except OSError:
            self._connection.close()

    def _end_subscriptions(self) -> None:
        for subscription in list(self.subscriptions.values()):
            self.end(subscription)
