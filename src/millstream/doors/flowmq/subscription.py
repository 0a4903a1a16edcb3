"""One SUBSCRIBE of one connection, with its unacknowledged messages.

Rules
-----
1. At most `window` messages are unacknowledged. A message whose lease expired does not count: the broker has taken it
   back and refuses a late ack.
2. A subscriber whose lease expired is late until it acknowledges a message. It may have died silently, and would soon
   use up the attempts of every message. So late subscribers get messages only while no other subscriber of the group is
   on time. A subscriber that has not read for one lease time is not on time.
3. A late subscriber without unacknowledged messages could never recover. A late ack shows that it is alive and
   throttles it to one message at a time; a timely ack restores normal delivery.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from millstream.doors.flowmq.dispatcher import Dispatcher, Lane
    from millstream.doors.flowmq.protocol import FlowmqProtocol


class Sent(NamedTuple):
    """An unacknowledged message."""

    lane: Lane
    offset: int
    leased_ms: int
    """Start of the lease, never later than the queue's."""


class Subscription:
    __slots__ = (
        "_window_max",
        "client",
        "dispatcher",
        "group",
        "is_in_line",
        "is_late",
        "may_read",
        "unanswered",
        "window",
    )

    def __init__(self, client: FlowmqProtocol, dispatcher: Dispatcher, group: str, window: int) -> None:
        self.client = client
        self.dispatcher = dispatcher
        self.group = group
        """Empty for a private subscription."""
        self.window = self._window_max = window
        self.unanswered: dict[bytes, Sent] = {}
        """By message id, oldest lease first."""
        self.is_late = False
        self.may_read = True
        self.is_in_line = False
        """Whether it is in the dispatcher's line."""

    @property
    def room(self) -> int:
        """The number of messages that it may get now."""
        return self.window - len(self.unanswered) if self.client.takes_messages and self.may_read else 0

    def answered_in_time(self) -> None:
        """A timely ack or nack."""
        self.is_late = False
        self.window = self._window_max

    def take_up(self, message_id: bytes, sent: Sent) -> None:
        """An ack was refused: the message is unacknowledged again, in lease order."""
        self.unanswered[message_id] = sent
        self.unanswered = dict(sorted(self.unanswered.items(), key=lambda item: item[1].leased_ms))

    def answered_late(self) -> None:
        """A late ack. If it has unacknowledged messages, their acks decide."""
        if self.is_late and not self.unanswered:
            self.is_late = False
            self.window = 1

    def forget_expired(self, leased_until_ms: int) -> None:
        """Drops messages leased at that time or earlier."""
        unanswered = self.unanswered
        while unanswered:
            message_id, sent = next(iter(unanswered.items()))
            if sent.leased_ms > leased_until_ms:
                return
            del unanswered[message_id]
            self.is_late = True
