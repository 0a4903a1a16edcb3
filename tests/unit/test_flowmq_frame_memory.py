"""Memory for FlowMQ's frames that arrive in pieces: whoever waits for some has none that others wait for."""

from __future__ import annotations

from millstream.doors.flowmq.frame_memory import FrameMemory
from millstream.doors.memory import Budget
from millstream.wire.flowmq import HEAD, Command, FrameReader

SMALL, LARGE = 600_000, 1_000_000


class Sender:
    """A connection, as far as its memory goes."""

    def __init__(self, budget: Budget) -> None:
        self.granted = 0
        self.reader = FrameReader(1 << 30)
        self.memory = FrameMemory(budget, self._go_on)

    def _go_on(self) -> None:
        self.granted += 1

    def receive(self, data: bytes) -> None:
        self.reader.feed(data)
        self.memory.follow(self.reader)


def test_who_begins_a_larger_frame_does_not_wait_with_the_memory_of_the_last_one() -> None:
    budget = Budget(1_300_000)
    small, large = HEAD.pack(Command.PUBLISH, SMALL) + bytes(SMALL), HEAD.pack(Command.PUBLISH, LARGE) + bytes(LARGE)
    one, two = Sender(budget), Sender(budget)
    for sender in (one, two):
        sender.receive(small[:-10])
    assert budget.free < LARGE - SMALL
    for sender in (one, two):
        sender.receive(small[-10:] + large[:20_000])
    waiting = [sender for sender in (one, two) if sender.memory.leave_line is not None]
    assert len(waiting) < 2, "each waits for what the other has"
    for sender in (one, two):
        sender.receive(large[20_000:])
    assert (one.granted, two.granted) == (1, 1) and budget.free == budget.limit


def test_what_is_given_back_is_enough_for_who_gave_it() -> None:
    budget = Budget(LARGE + 5)
    sender = Sender(budget)
    sender.receive((HEAD.pack(Command.PUBLISH, SMALL) + bytes(SMALL))[:-10])
    other = Sender(budget)
    other.receive(HEAD.pack(Command.PUBLISH, LARGE) + bytes(20_000))
    assert other.memory.leave_line is not None
    other.memory.close()
    sender.receive(bytes(10) + HEAD.pack(Command.PUBLISH, LARGE) + bytes(20_000))
    assert sender.memory.leave_line is None and budget.free == 0


def test_who_is_closed_while_it_gives_back_takes_nothing_more() -> None:
    """Who gets the memory handles what it has received: that may send something to the one that gave it."""
    budget = Budget(SMALL + LARGE)
    giver, other = Sender(budget), Sender(budget)
    giver.receive((HEAD.pack(Command.PUBLISH, SMALL) + bytes(SMALL))[:-10])
    taken = budget.free
    assert budget.take(taken)
    other.receive(HEAD.pack(Command.PUBLISH, 100_000) + bytes(20_000))
    assert other.memory.leave_line is not None
    other.memory._on_granted = giver.memory.close
    giver.receive(bytes(10) + HEAD.pack(Command.PUBLISH, LARGE) + bytes(20_000))
    other.memory.close()
    budget.give(taken)
    assert budget.free == budget.limit and not budget.is_contested
