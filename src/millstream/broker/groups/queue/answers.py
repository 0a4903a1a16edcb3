"""Acknowledgements of leased records: the queue checks them, writes them, then applies them.

    LEASED --acknowledge--> ACCEPTED, ANSWERED --durable--> done, available, waiting, renewed, or dying
       ^                          |
       +------ not written -------+

Rules
-----
1. A member acknowledges records that it leases now. Acknowledgements that are late or of other records are refused.
2. An acknowledgement takes effect when it is durable. Until then the record stays leased: the lease does not expire,
   and no member gets the record or the next record of its key.
3. An acknowledgement that cannot be written (full disk, database unavailable) is refused. The lease and its expiry stay
   unchanged, and the member may retry. If the member has left, the delivery has failed.
4. An expired lease or a departed member takes effect at once. The next successful write stores it; a crash before that
   write causes a redelivery.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set

from millstream.broker.groups.queue.block import ACCEPTED, ANSWERED, LEASED, SIZE, Block, Outcome
from millstream.broker.groups.queue.settings import OPEN_MAX
from millstream.broker.groups.queue.states import QueueStates, pieces
from millstream.broker.groups.queue.storage import DeadRecord
from millstream.broker.groups.queue.verbs import Answer, Member, Verb
from millstream.broker.groups.queue.writer import Settlement
from millstream.core.errors import Code, RequestError
from millstream.core.promise import Promise

LEFT = "its consumer disconnected"


class QueueAnswers(QueueStates):
    _is_full = False
    """Whether a member got nothing at `leases_max`; `settle` then wakes the waiters below the limit."""

    def answer(self, member: Member, answers: Sequence[Answer]) -> Promise[None]:
        """Settles when durable. Raises `RequestError` and changes nothing unless the member leases all the records.

        A failed promise changes nothing either.
        """
        self.check()
        self._check(member, answers)
        until = self._clock.now_ms() + self.settings.lease_ms
        if all(each.verb == Verb.RENEW for each in answers):
            self._renew(answers, until)
            return Promise.of(None)
        settlements = []
        for each in answers:
            for number, start, stop in pieces(each.first, each.last):
                dead_records: Sequence[DeadRecord] = ()
                block = self._blocks[number]
                if each.verb in (Verb.ACCEPT, Verb.GAP):
                    block.accept(start, stop)
                elif each.verb == Verb.RENEW:
                    for at in range(start, stop):
                        block.answer(at, Outcome(LEASED, until))
                else:
                    dead_records = self._note_failures(number, block, range(start, stop), each)
                self._writer.changed.add(number)
                settlements.append(Settlement(member, number, start, stop, dead_records))
        return self._writer.save(settlements)

    def _renew(self, answers: Sequence[Answer], until: int) -> None:
        """Leases are not stored, so a renewal writes nothing."""
        for each in answers:
            for number, start, stop in pieces(each.first, each.last):
                self._blocks[number].renew(start, stop, until)

    def _note_failures(self, number: int, block: Block, places: Iterable[int], answer: Answer) -> list[DeadRecord]:
        """Marks released or rejected records as ANSWERED; returns the dead records among them."""
        dead_records = []
        for at in places:
            is_final = answer.verb == Verb.REJECT
            outcome, dead = self._failed(number, block, at, answer.reason, answer.delay_ms, is_final)
            block.answer(at, outcome)
            if dead is not None:
                dead_records.append(dead)
        return dead_records

    def _check(self, member: Member, answers: Sequence[Answer]) -> None:
        after = -1
        for each in answers:
            if not after < each.first <= each.last:
                raise RequestError(Code.INVALID_REQUEST, "the offsets of an acknowledgement must ascend")
            after = each.last
            if each.last - each.first > OPEN_MAX:
                raise RequestError(Code.INVALID_RECORD_STATE, "the acknowledgement has more records than can be leased")
            for number, start, stop in pieces(each.first, each.last):
                block = self._blocks.get(number)
                if block is None or not block.is_leased(start, stop, member.id):
                    raise RequestError(
                        Code.INVALID_RECORD_STATE,
                        f"not all of the records {each.first} to {each.last} are leased to this member now",
                    )

    # After the write

    def settle(self, settlements: Sequence[Settlement], is_durable: bool) -> None:
        if self.ended is not None:
            return
        for each in settlements:
            block = self._blocks.get(each.number)
            if block is None:  # retention deleted its records
                continue
            if not is_durable:
                self._take_back(each, block)
            elif block.is_accepted(each.start, each.stop):
                self._count_leases(each.member, each.start - each.stop)
                self._finish(each.number, block, each.start, each.stop)
            else:
                for at in range(each.start, each.stop):
                    self._carry_out(each.member, each.number, block, at)
        if is_durable and any(each.dead_records for each in settlements):
            self._queue.dead_letters.write_letters(self)
        if self._is_full and self.leases < self.settings.leases_max:
            self._is_full = False
            self._wake()

    def _carry_out(self, member: Member, number: int, block: Block, at: int) -> None:
        if block.states[at] == ACCEPTED:
            self._count_leases(member, -1)
            self._finish(number, block, at, at + 1)
        elif block.states[at] == ANSWERED:
            outcome = block.answers.pop(at)
            if outcome.state == LEASED:
                block.due = min(block.due, outcome.when)
            else:
                self._count_leases(member, -1)
            self._become(number, block, at, outcome)
            self._calendar.watch(number, block)

    def _take_back(self, settlement: Settlement, block: Block) -> None:
        """An acknowledgement was not written: restores the lease, unless its member has left."""
        member, number = settlement.member, settlement.number
        refused = block.refuse(settlement.start, settlement.stop)
        if self._queue.owner(member.id) is not member:
            for at in refused:
                self._count_leases(member, -1)
                self._fail(number, block, at, LEFT)
            self._writer.save_soon()
        self._calendar.watch(number, block)

    # Without an acknowledgement

    def release(self, member: Member, reason: str, offsets: Set[int] | None = None) -> None:
        """Ends a member's leases on these offsets (or all) as failed deliveries."""
        self._end_leases(member, offsets, lambda number, block, at: self._fail(number, block, at, reason))

    def give_back(self, member: Member, offsets: Set[int] | None = None) -> None:
        """Ends a member's leases on these offsets (or all) without counting the attempt."""

        def offer(number: int, block: Block, at: int) -> None:
            block.uncount(at)
            self._offer(number, block, at)

        self._end_leases(member, offsets, offer)

    def _end_leases(self, member: Member, offsets: Set[int] | None, end: Callable[[int, Block, int], None]) -> None:
        if self.ended is not None:
            return
        for number in list(self._blocks) if offsets is None else sorted({offset // SIZE for offset in offsets}):
            block = self._blocks.get(number)
            if block is None:
                continue
            for at in block.leased_by(member.id):
                if offsets is None or number * SIZE + at in offsets:
                    self._count_leases(member, -1)
                    self._writer.changed.add(number)
                    end(number, block, at)
        if self._writer.changed:
            self._writer.save()
