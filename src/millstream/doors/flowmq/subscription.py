"""One SUBSCRIBE of one connection: what it was sent and has not answered.

Rules
-----
1. At most `window` messages are unanswered. One whose lease ran out does not count any more: the broker has taken it
   back, and an answer to it is refused.
2. A subscriber that let a lease run out is late until it answers a message again. It may have died without a word, and
   a few turns later everything would have failed because of it; so late ones get messages only while no other
   subscriber of the group is on time. One that has not read for the time of a lease is not.
3. Late ones that have nothing left to answer could not answer again. An answer that came too late shows that they live:
   they get one message at a time, until they answer one of those in time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from millstream.doors.flowmq.connection import Connection
    from millstream.doors.flowmq.dispatcher import Dispatcher, Lane


class Sent(NamedTuple):
    """A message on its way to being answered."""

    lane: Lane
    offset: int
    leased_ms: int
    """When, and not later than the engine's lease began."""


class Subscription:
    __slots__ = ("_window_max", "connection", "dispatcher", "group", "is_in_line", "is_late", "unanswered", "window")

    def __init__(self, connection: Connection, dispatcher: Dispatcher, group: str, window: int) -> None:
        self.connection = connection
        self.dispatcher = dispatcher
        self.group = group
        """Empty where it is for itself."""
        self.window = self._window_max = window
        self.unanswered: dict[bytes, Sent] = {}
        """By message id, oldest lease first."""
        self.is_late = False
        self.is_in_line = False
        """Whether the dispatcher has it among those that take messages."""

    @property
    def room(self) -> int:
        """How many more messages may be sent now."""
        return self.window - len(self.unanswered) if self.connection.takes_messages else 0

    def answered_in_time(self) -> None:
        """It answers a message."""
        self.is_late = False
        self.window = self._window_max

    def take_up(self, message_id: bytes, sent: Sent) -> None:
        """An answer was refused: the message waits for another one, in its place among the leases."""
        self.unanswered[message_id] = sent
        self.unanswered = dict(sorted(self.unanswered.items(), key=lambda item: item[1].leased_ms))

    def answered_late(self) -> None:
        """It answers one that is no longer its own. Where it has others, they will tell."""
        if self.is_late and not self.unanswered:
            self.is_late = False
            self.window = 1

    def forget_expired(self, leased_until_ms: int) -> None:
        """Drops what was leased at that time or earlier."""
        unanswered = self.unanswered
        while unanswered:
            message_id, sent = next(iter(unanswered.items()))
            if sent.leased_ms > leased_until_ms:
                return
            del unanswered[message_id]
            self.is_late = True
