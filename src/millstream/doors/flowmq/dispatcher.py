"""Delivers the records of one group and topic to the group's subscribers on this broker, one by one, round robin.

    log grows, lease ends ──> lane is awake ──┐
    subscriber has room ──────────────────────┴──> pump: acquire as many as there is room for, deliver in turn

To the queue a dispatcher is one member of the group; only the dispatcher knows which subscriber has which record. So
one acquisition serves all subscribers.

Rules
-----
1. A record is acquired only for a subscriber that has room for it: no record is leased and unsent here.
2. A subscriber that has no room, or does not read its output, is not in line. It costs other subscribers nothing.
3. When a subscriber leaves, its unacknowledged records are released at once.
4. A deleted topic ends its subscriptions; a topic that grows gets further lanes.
5. If another broker gets the queue, the connections of its subscribers end, with the reason. The protocol has no other
   way to tell the clients, and no message would ever arrive here again.
6. A partition that cannot be read is retried after `RETRY_SECONDS`.
7. A subscriber without the right to read gets no message, and can acknowledge none.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from millstream.broker.groups.queue.verbs import Answer, TakenRecord, Verb
from millstream.broker.session import Queue, QueuePartition, Session, Topic
from millstream.core.errors import LogLost, RequestError
from millstream.core.promise import Promise, begin
from millstream.doors.flowmq import message_id
from millstream.doors.flowmq.subscription import Sent, Subscription

if TYPE_CHECKING:
    from millstream.doors.flowmq.door import FlowmqDoor
    from millstream.doors.flowmq.protocol import FlowmqProtocol

logger = logging.getLogger(__name__)

TAKEN_MAX = 256
"""Records per acquisition."""
TAKEN_BYTES_MAX = 256 * 1024
"""Bytes per acquisition; the last record may exceed it."""
RETRY_SECONDS = 1.0
LEFT = "its subscriber disconnected"


class Lane:
    """One partition of the topic."""

    __slots__ = ("cancel", "is_awake", "partition", "prefix", "rests", "seen")

    def __init__(self, partition: QueuePartition, prefix: bytes) -> None:
        self.partition = partition
        self.prefix = prefix
        """Prefix of its message ids."""
        self.is_awake = False
        """Whether records may be available."""
        self.rests = False
        """Whether the last read failed."""
        self.seen = partition.log.high_watermark
        """High watermark at the last wake-up."""
        self.cancel: Callable[[], None] = lambda: None


class Dispatcher:
    def __init__(self, door: FlowmqDoor, session: Session, queue: Queue, topic: Topic) -> None:
        self._door = door
        self._session = session
        self._changes = session.changes
        """The rights of the subscribers are known as of this change."""
        self.queue = queue
        self.topic = topic
        self.topic_part = message_id.topic_part(topic.id)
        self._member = queue.join(f"flowmq-{topic.name}")
        self._lanes: list[Lane] = []
        self._awake: deque[Lane] = deque()
        self.subscriptions: list[Subscription] = []
        self._line: deque[Subscription] = deque()
        """Subscriptions with room, the next one first."""
        self._is_pumping = False
        self._is_pump_due = False
        self._no_lease_ends_before = 0
        self.is_closed = False
        self.lost: RequestError | None = None
        """Why this broker lost the queue, if it did."""
        self.users = 0
        """Subscriptions, including those that are starting."""
        self._is_opening = False
        self._unwatch = session.watch_topics(self._on_topics_changed)
        self.opened = begin(self._open(self.topic.partition_count))

    async def _open(self, first_count: int) -> None:
        """Opens missing lanes. Its promise settles turns after the last check: hence the flag."""
        self._is_opening = True
        try:
            await self._open_lanes(first_count)
        finally:
            self._is_opening = False

    async def _open_lanes(self, first_count: int) -> None:
        while len(self._lanes) < self.topic.partition_count:
            index = len(self._lanes)
            partition = await self.queue.partition(self.topic, index)
            if index >= first_count and not self.queue.is_durable:
                await partition.seek(0)  # new partition: all its records follow the subscription
            if self.is_closed:
                return
            partition.check()
            lane = Lane(partition, message_id.prefix(self.topic.id, index))
            lane.cancel = partition.wake(partial(self._on_awake, lane))
            self._lanes.append(lane)
            self._on_awake(lane)

    # -- subscribers -------------------------------------------------------------------------------------------------

    def add(self, subscription: Subscription) -> None:
        self.subscriptions.append(subscription)
        self._check_right(subscription)
        self.has_room(subscription)

    def remove(self, subscription: Subscription) -> None:
        """Releases its unacknowledged messages as failed deliveries."""
        self.subscriptions.remove(subscription)
        self.has_no_room(subscription)
        self.forget_expired(subscription)
        unanswered, subscription.unanswered = subscription.unanswered, {}
        self._release(unanswered.values(), LEFT)
        self._line_up()
        self.pump()

    def _check_rights(self) -> None:
        """Topics or rights have changed."""
        self._changes = self._session.changes
        could_all_read = all(subscription.may_read for subscription in self.subscriptions)
        for subscription in self.subscriptions:
            self._check_right(subscription)
        if not could_all_read:
            self._line_up()

    def _check_right(self, subscription: Subscription) -> None:
        subscription.may_read = False
        with contextlib.suppress(RequestError):
            subscription.client.session.check_lease(self.queue, self.topic)
            subscription.may_read = True
        if not subscription.may_read:
            self.has_no_room(subscription)

    def has_room(self, subscription: Subscription) -> None:
        """The subscriber may have room for messages now."""
        if subscription.room > 0 and not subscription.is_in_line:
            self._join_line(subscription)
        if self._awake:
            self.pump()

    def has_no_room(self, subscription: Subscription) -> None:
        """The subscriber does not read its output, or has left."""
        if subscription.is_in_line:
            self._line.remove(subscription)
            subscription.is_in_line = False

    def forget_expired(self, subscription: Subscription) -> None:
        """Drops messages whose lease expired."""
        if subscription.unanswered:
            subscription.forget_expired(self._door.clock.now_ms() - self._lease_ms)

    def answer(self, subscription: Subscription, name: bytes, verb: Verb, reason: str = "") -> Promise[None]:
        """Settles when the ACK or NACK is durable. After a `RequestError` the client may retry."""
        subscription.client.session.check_lease(self.queue, self.topic)
        sent = subscription.unanswered.pop(name)
        subscription.answered_in_time()
        try:
            answered = sent.lane.partition.answer(self._member, [Answer(sent.offset, sent.offset, verb, reason=reason)])
        except RequestError as error:
            return Promise.failed(error)
        answered.then(lambda done: self._take_up(subscription, name, sent) if done.error is not None else None)
        return answered

    def _take_up(self, subscription: Subscription, name: bytes, sent: Sent) -> None:
        """An ACK or NACK was not written: its message is unacknowledged again."""
        if subscription in self.subscriptions:
            subscription.take_up(name, sent)
        else:
            self._release([sent], LEFT)

    def _join_line(self, subscription: Subscription) -> None:
        self._line.append(subscription)
        subscription.is_in_line = True

    def _line_up(self) -> None:
        """Puts all subscriptions with room into line. `_room` skips late ones unless all are late."""
        for subscription in self.subscriptions:
            if not subscription.is_in_line and subscription.room > 0:
                self._join_line(subscription)

    # -- delivery ----------------------------------------------------------------------------------------------------

    def _on_awake(self, lane: Lane) -> None:
        """New records are delivered at once. Redeliveries become available one by one, each with its own call: they
        wait for the end of this turn, so that they are delivered together and in order.
        """
        if lane.partition.ended is not None:
            self._door.loop.call_soon(self._end, lane.partition.ended)
            return
        if lane.rests:
            return
        if not lane.is_awake:
            lane.is_awake = True
            self._awake.append(lane)
        durable = lane.partition.log.high_watermark
        if durable > lane.seen:
            lane.seen = durable
            self.pump()
        elif not self._is_pump_due:
            self._is_pump_due = True
            self._door.loop.call_soon(self._pump_soon)

    def _stay_awake(self, lane: Lane) -> None:
        if not lane.is_awake:
            lane.is_awake = True
            self._awake.append(lane)

    def _pump_soon(self) -> None:
        self._is_pump_due = False
        self.pump()

    def pump(self) -> None:
        """Delivers available records until there are no more, or no subscriber has room.

        The log calls this while it appends, so no exception may escape.
        """
        if self._is_pumping or self._door.is_closing:
            return
        self._is_pumping = True
        try:
            if self._changes != self._session.changes:
                self._check_rights()
            while self._awake and not self.is_closed:
                now_ms = self._door.clock.now_ms()
                room = self._room(now_ms)
                if room == 0:
                    break
                lane = self._awake.popleft()
                lane.is_awake = False
                partition = lane.partition
                fresh = partition.take_fresh(self._member, room)
                if fresh is not None:
                    if partition.next < partition.log.high_watermark:
                        self._stay_awake(lane)
                    self._hand_out(lane, fresh, now_ms)
                    continue
                taken = begin(partition.take(self._member, room, TAKEN_BYTES_MAX))
                if not taken.done:
                    taken.then(partial(self._go_on, lane, now_ms))
                    return
                self._have_taken(lane, now_ms, taken)
        except Exception:
            logger.exception("unexpected error while delivering %s to group %s", self.topic.name, self.queue.id)
        self._is_pumping = False

    def _go_on(self, lane: Lane, now_ms: int, taken: Promise[list[TakenRecord]]) -> None:
        """The records have been read."""
        try:
            self._have_taken(lane, now_ms, taken)
        finally:
            self._is_pumping = False
        self.pump()

    def _have_taken(self, lane: Lane, now_ms: int, taken: Promise[list[TakenRecord]]) -> None:
        if lane.partition.ended is not None:
            return  # `_on_awake` has been called
        if isinstance(taken.error, LogLost):
            lane.rests = True  # until a restart; the broker logged the loss at start
        elif taken.error is not None:
            what = logger.warning if isinstance(taken.error, RequestError) else logger.error
            what("group %s cannot read %s-%d: %r", self.queue.id, self.topic.name, lane.partition.index, taken.error)
            lane.rests = True
            self._door.clock.call_later(RETRY_SECONDS, partial(self._try_again, lane))
        elif records := taken.value():
            self._stay_awake(lane)  # there may be more
            for record, attempt in records:
                if attempt > 1:
                    self._take_back(lane.prefix + b"%d" % record.offset)
            self._hand_out(lane, [(record.offset, record.value) for record, _ in records], now_ms)

    def _take_back(self, name: bytes) -> None:
        """Before a redelivery: to the queue all subscribers are one member, so the previous subscriber must not
        acknowledge the message for the next one.
        """
        for subscription in self.subscriptions:
            if subscription.unanswered.pop(name, None) is not None:
                subscription.is_late = True

    def _try_again(self, lane: Lane) -> None:
        lane.rests = False
        if not self.is_closed:
            self._stay_awake(lane)
            self.pump()

    def _room(self, now_ms: int) -> int:
        """The number of messages to acquire, up to `TAKEN_MAX`; 0 if no subscriber has room."""
        line = self._line
        if not line:
            self._look_for_expired(now_ms)
        all_late: bool | None = None
        while line:
            first = line[0]
            if first.unanswered:
                first.forget_expired(now_ms - self._lease_ms)
            if first.is_late and all_late is None:
                stuck_ms = now_ms - self._lease_ms
                all_late = all(
                    subscription.is_late or not subscription.may_read or subscription.client.unread_since_ms <= stuck_ms
                    for subscription in self.subscriptions
                )
                if all_late:
                    self._line_up()
            room = first.room
            if room > 0 and not (first.is_late and not all_late):
                break
            line.popleft()
            first.is_in_line = False
        else:
            return 0
        if len(line) > 1:
            for other in line:
                if room >= TAKEN_MAX:
                    break
                room += other.room if other is not first else 0
        return min(room, TAKEN_MAX)

    def _look_for_expired(self, now_ms: int) -> None:
        """The line is empty: subscribers with expired leases have room again."""
        if now_ms < self._no_lease_ends_before:
            return
        oldest = now_ms
        for subscription in self.subscriptions:
            subscription.forget_expired(now_ms - self._lease_ms)
            for sent in subscription.unanswered.values():
                oldest = min(oldest, sent.leased_ms)
                break
        self._no_lease_ends_before = oldest + self._lease_ms
        self._line_up()

    def _hand_out(self, lane: Lane, records: list[tuple[int, bytes | None]], now_ms: int) -> None:
        """Delivers offsets and values round robin; a null value is an empty message."""
        line = self._line
        touched: dict[FlowmqProtocol, None] = {}
        for at, (offset, value) in enumerate(records):
            subscription = line.popleft() if line else self._stand_in()
            if subscription is None:  # they left while the records were read
                left = (Sent(lane, left, now_ms) for left, _ in records[at:])
                self._release(left, LEFT)
                break
            name = lane.prefix + b"%d" % offset
            unanswered = subscription.unanswered
            unanswered.pop(name, None)  # a redelivery to the same subscriber is its newest lease
            unanswered[name] = Sent(lane, offset, now_ms)
            client = subscription.client
            client.push(name, value or b"")
            touched[client] = None
            subscription.is_in_line = len(unanswered) < subscription.window
            if subscription.is_in_line:
                line.append(subscription)
        for client in touched:
            client.flush()

    def _stand_in(self) -> Subscription | None:
        """A subscriber for a record whose intended subscribers left during the read."""
        return next(
            (other for other in self.subscriptions if other.may_read and len(other.unanswered) < other.window), None
        )

    # -- releases ----------------------------------------------------------------------------------------------------

    def _release(self, left: Iterable[Sent], reason: str) -> None:
        by_lane: dict[Lane, set[int]] = {}
        for sent in left:
            by_lane.setdefault(sent.lane, set()).add(sent.offset)
        for lane, offsets in by_lane.items():
            lane.partition.release(self._member, reason, offsets)

    @property
    def _lease_ms(self) -> int:
        return self.queue.settings_for(self.topic).lease_ms

    # -- topics ------------------------------------------------------------------------------------------------------

    def _on_topics_changed(self) -> None:
        if self.is_closed:
            return
        if not self._session.has(self.topic):
            self.close()
            for subscription in list(self.subscriptions):
                subscription.client.end(subscription)
        else:
            self._open_more()

    def _open_more(self) -> None:
        if not self.is_closed and not self._is_opening and len(self._lanes) < self.topic.partition_count:
            self.opened = begin(self._open(len(self._lanes)))
            self.opened.then(self._opened_more)

    def _opened_more(self, done: Promise[None]) -> None:
        if done.error is not None and not self.is_closed:
            logger.warning("group %s cannot open all of %s; retrying: %r", self.queue.id, self.topic.name, done.error)
            self._door.clock.call_later(RETRY_SECONDS, self._open_more)

    def _end(self, reason: RequestError) -> None:
        """This broker lost the queue. A deleted topic has closed the dispatcher before."""
        if self.is_closed:
            return
        self.lost = RequestError(reason.code, reason.detail)
        self.close()
        for subscription in list(self.subscriptions):
            subscription.client.lose(
                subscription, f"{reason.detail}: reconnect and subscribe to {self.topic.name} again"
            )

    def close(self) -> None:
        """Leaves the group, which releases its subscribers' unacknowledged records."""
        if self.is_closed:
            return
        self.is_closed = True
        self._unwatch()
        for lane in self._lanes:
            lane.cancel()
        self.queue.leave(self._member)
