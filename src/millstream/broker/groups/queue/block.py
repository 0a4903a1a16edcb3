"""The states of 128 consecutive records of a queue.

    DONE      accepted, dead, or not in the log; the initial state of every entry
    READY     available
    LEASED    leased to the member in `owners` until `when`
    WAITING   delayed or in backoff until `when`
    DYING     dead, its dead letter not written yet
    HELD      waits for an earlier record of its key
    ACCEPTED  leased, and its acceptance is being written
    ANSWERED  leased, and a release, reject or renewal is being written: `answers` holds its outcome

A block has four arrays and no object per record: about 14 bytes each. Changes work on runs, at the speed of `bytes`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from struct import Struct
from typing import NamedTuple

SIZE = 128
DONE, READY, LEASED, WAITING, DYING, HELD, ACCEPTED, ANSWERED = range(8)
OUT = (LEASED, ACCEPTED, ANSWERED)
"""The states of a record in flight."""
NEVER = 1 << 62

_READY = bytes([READY])
_ACCEPTED = bytes([ACCEPTED]) * SIZE
_ONE_MORE = bytes([*range(1, 256), 255])
_STORED = bytes([DONE, READY, READY, WAITING, DYING, READY, DONE, READY]) + bytes(248)
"""The stored form of each state. Leases end with the broker, a restart restores the key order, and an acknowledgement
is stored as if it were durable already."""
_TIME = Struct(">q")


class Step(NamedTuple):
    """A run of records in one block with the same attempt."""

    start: int
    stop: int
    attempt: int


class Outcome(NamedTuple):
    """The next state of a leased record."""

    state: int
    """LEASED (renewed), READY, WAITING or DYING."""
    when: int = 0


class Block:
    __slots__ = ("alarm", "answers", "attempts", "due", "is_listed", "open", "owners", "ready", "states", "when")

    def __init__(self) -> None:
        self.states = bytearray(SIZE)
        self.attempts = bytearray(SIZE)
        self.owners = array("I", bytes(4 * SIZE))
        self.when = array("q", bytes(8 * SIZE))
        self.open = 0
        """The number of records that are not done."""
        self.ready = 0
        self.due = NEVER
        """No lease or wait ends before this time."""
        self.alarm = NEVER
        """When the partition checks the block; never later than `due`."""
        self.is_listed = False
        """Whether the partition's heap of blocks with ready records holds it."""
        self.answers: dict[int, Outcome] = {}
        """The outcomes of ANSWERED records."""

    def fill(self, start: int, stop: int, state: int) -> None:
        """Gives new records their first state."""
        self.states[start:stop] = bytes([state]) * (stop - start)
        self.open += stop - start
        if state == READY:
            self.ready += stop - start

    def lease(self, start: int, stop: int, count_max: int, owner: int, until: int) -> Iterator[Step]:
        """Leases the ready records of a range, lowest offset first."""
        states = self.states
        while count_max > 0:
            start = states.find(_READY, start, stop)
            if start < 0:
                return
            part = states[start : min(stop, start + count_max)]
            attempt = self.attempts[start]
            count = len(part) - len(part.lstrip(_READY))
            before = self.attempts[start : start + count]
            count -= len(before.lstrip(bytes([attempt])))
            end = start + count
            states[start:end] = bytes([LEASED]) * count
            self.attempts[start:end] = self.attempts[start:end].translate(_ONE_MORE)
            self.owners[start:end] = array("I", [owner]) * count
            self.when[start:end] = array("q", [until]) * count
            self.ready -= count
            self.due = min(self.due, until)
            yield Step(start, end, attempt + 1)
            start, count_max = end, count_max - count

    def lease_new(self, start: int, stop: int, owner: int, until: int) -> None:
        """Gives new records their first state, which is LEASED."""
        for at in range(start, stop):
            self.states[at] = LEASED
            self.attempts[at] = 1
            self.owners[at] = owner
            self.when[at] = until
        self.open += stop - start
        if until < self.due:
            self.due = until

    def is_leased(self, start: int, stop: int, owner: int) -> bool:
        count = stop - start
        return (
            self.states[start:stop] == bytes([LEASED]) * count
            and self.owners[start:stop] == array("I", [owner]) * count
        )

    def answer(self, at: int, outcome: Outcome) -> None:
        """Notes the outcome of a leased record; it is not durable yet."""
        self.states[at] = ANSWERED
        self.answers[at] = outcome

    def accept(self, start: int, stop: int) -> None:
        """Marks leased records as accepted; not durable yet."""
        self.states[start:stop] = _ACCEPTED[: stop - start]

    def is_accepted(self, start: int, stop: int) -> bool:
        return self.states[start:stop] == _ACCEPTED[: stop - start]

    def refuse(self, start: int, stop: int) -> list[int]:
        """Acknowledgements were not written: returns their records to LEASED."""
        refused = [at for at in range(start, stop) if self.states[at] in (ACCEPTED, ANSWERED)]
        for at in refused:
            self.states[at] = LEASED
            self.answers.pop(at, None)
            self.due = min(self.due, self.when[at])
        return refused

    def uncount(self, at: int) -> None:
        """Does not count a record's last attempt."""
        self.attempts[at] = max(self.attempts[at] - 1, 0)

    def finish(self, start: int, stop: int) -> None:
        """Moves a range of leased or dying records to DONE."""
        self.states[start:stop] = bytes(stop - start)
        self.attempts[start:stop] = bytes(stop - start)
        self.open -= stop - start

    def renew(self, start: int, stop: int, until: int) -> None:
        self.when[start:stop] = array("q", [until]) * (stop - start)

    def shorten(self, until: int) -> bool:
        """Caps the end of every lease; returns whether it changed one."""
        late = [at for at in range(SIZE) if self.states[at] == LEASED and self.when[at] > until]
        for at in late:
            self.when[at] = until
        self.due = min(self.due, until) if late else self.due
        return bool(late)

    def put(self, at: int, state: int, when: int = 0) -> None:
        """Moves one open record to another state except DONE."""
        self.ready += (state == READY) - (self.states[at] == READY)
        self.states[at] = state
        self.when[at] = when
        if state == WAITING:
            self.due = min(self.due, when)

    def drop(self, at: int) -> None:
        """Moves one record from any state to DONE."""
        self.ready -= self.states[at] == READY
        self.open -= self.states[at] != DONE
        self.states[at] = DONE
        self.attempts[at] = 0
        self.answers.pop(at, None)

    def overdue(self, now: int) -> list[int]:
        """Records whose lease or wait is over. Sets `due` to the next such time."""
        found = []
        due = NEVER
        states, when = self.states, self.when
        for at in range(SIZE):
            if states[at] in (LEASED, WAITING):
                if when[at] <= now:
                    found.append(at)
                elif when[at] < due:
                    due = when[at]
        self.due = due
        return found

    def all_in(self, state: int) -> list[int]:
        return [at for at in range(SIZE) if self.states[at] == state]

    def leased_by(self, owner: int) -> list[int]:
        if owner not in self.owners:
            return []
        return [at for at in range(SIZE) if self.owners[at] == owner and self.states[at] == LEASED]

    def first_open(self) -> int:
        return SIZE - len(self.states.lstrip(b"\0"))

    def encode(self) -> bytes:
        stored = self.states.translate(_STORED)
        when = self.when
        if self.answers:
            when = array("q", when)
            for at, outcome in self.answers.items():
                stored[at], when[at] = _STORED[outcome.state], outcome.when
        times = b"".join(_TIME.pack(when[at]) for at in range(SIZE) if stored[at] == WAITING)
        return bytes(stored + self.attempts) + times

    @classmethod
    def decode(cls, value: bytes) -> Block:
        block = cls()
        block.states[:] = value[:SIZE]
        pairs = zip(block.states, value[SIZE : 2 * SIZE], strict=True)
        block.attempts[:] = bytes(attempts if state != DONE else 0 for state, attempts in pairs)
        block.open = SIZE - block.states.count(DONE)
        block.ready = block.states.count(READY)
        waiting = (at for at in range(SIZE) if block.states[at] == WAITING)
        for at, (when,) in zip(waiting, _TIME.iter_unpack(value[2 * SIZE :]), strict=True):
            block.when[at] = when
            block.due = min(block.due, when)
        return block
