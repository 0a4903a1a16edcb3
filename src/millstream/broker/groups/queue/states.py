"""The state of every record of a partition for one queue, and its transitions.

                       acquire                     accept
    (never seen) ----> LEASED ------------------------------------------> DONE
                        |  ^                                                ^
        release, or     v  | acquire                                       | dead letter written
        the lease ends  READY / WAITING (backoff, delay) / HELD (key)      |
                        |                                                  |
                        +--- rejected, or failed too often ---> DYING -----+

Rules
-----
1. The queue reads records in offset order, up to `next`. Records below `next` and in no block are done. The records
   that are not done bound memory and disk, however long the log is.
2. Leases do not outlive the broker, attempts do. A delivery that a restart interrupts counts, but never as the last
   attempt: the record gets one more.
3. A dead record is durably DYING, with the reason, before its dead letter is written. It is done when the letter is
   durable. After a crash in between the broker searches for the letter before it writes one: there is exactly one.
   `DeadLetters` takes all three steps.
4. A damaged or undecodable batch is given up as a whole: one dead letter without a value covers its records and holds
   the reason. Records of the batch that are already leased stay leased.

`QueueAnswers` handles acknowledgements and `QueuePartition` leases records, by these states.
"""

from __future__ import annotations

import abc
import heapq
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from millstream.broker.groups.queue.block import (
    DONE,
    DYING,
    HELD,
    LEASED,
    NEVER,
    OUT,
    READY,
    SIZE,
    WAITING,
    Block,
    Outcome,
)
from millstream.broker.groups.queue.calendar import Calendar
from millstream.broker.groups.queue.figures import QueueFigures
from millstream.broker.groups.queue.key_order import KeyOrder
from millstream.broker.groups.queue.reading import Reading, first_due
from millstream.broker.groups.queue.settings import OPEN_MAX, QueueSettings
from millstream.broker.groups.queue.storage import DeadRecord, Head, QueueStorage, Stored
from millstream.broker.groups.queue.verbs import Member, Run
from millstream.broker.groups.queue.writer import Settlement, StateWriter
from millstream.broker.topics import Topic
from millstream.core.errors import RequestError
from millstream.core.promise import Promise
from millstream.records.batch import BatchHeader

if TYPE_CHECKING:
    from millstream.broker.groups.queue.queue import Queue

logger = logging.getLogger(__name__)

LOOK_RECORDS_MAX = 10_000
"""Records whose keys or delays are checked in one turn of the event loop."""

REASON_CHARS_MAX = 1000


class QueueStates(abc.ABC):
    def __init__(
        self,
        queue: Queue,
        topic: Topic,
        index: int,
        storage: QueueStorage | None,
        stored: Stored | None,
        is_alone: bool = False,
    ) -> None:
        self.group_id = queue.id
        self.topic = topic
        self.index = index
        self._partition = topic.partitions[index]
        self.log = self._partition.log
        self.next = 0
        """The first record that was never read."""
        self.first = 0
        """The start of a private queue: it says nothing about records below."""
        self.done = self.dead = self.redelivered = 0
        self.leases = 0
        self._queue = queue
        self._clock = queue.clock
        self._writer = StateWriter(storage, queue.journal, queue.clock, self)
        self.reading = Reading(self.log)
        self._blocks: OrderedDict[int, Block] = OrderedDict()
        self._open = 0
        self._listed: list[int] = []
        """A heap of blocks that may have ready records."""
        self._calendar = Calendar(self._clock, self._look_at_due)
        self._keys: KeyOrder | None = None
        self.ended: RequestError | None = None
        """Why the partition refuses all requests."""
        self._wakers: dict[int, Callable[[], None]] = {}
        self._next_waker = 0
        self._restore(stored, is_alone)
        self._unwake = self.log.wake(self._wake)

    @property
    def settings(self) -> QueueSettings:
        return self._queue.settings_for(self.topic)

    @property
    def is_private(self) -> bool:
        return self._writer.is_private

    @property
    def is_closed(self) -> bool:
        return self.ended is not None

    def check(self) -> None:
        """Raises `RequestError` if the partition has ended."""
        if self.ended is not None:
            raise RequestError(self.ended.code, self.ended.detail)

    @property
    def low(self) -> int:
        """All records below are done."""
        for number, block in self._blocks.items():
            if block.open:
                return number * SIZE + block.first_open()
        return self.next

    def wake(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Calls back when records may be available; returns a function that ends it."""
        number = self._next_waker
        self._next_waker += 1
        self._wakers[number] = callback
        return lambda: self._wakers.pop(number, None) and None

    def _wake(self) -> None:
        for waker in list(self._wakers.values()):
            waker()

    async def date(self) -> None:
        """Call before `figures` for the age of the oldest available record in every store."""
        first = self._first()
        if first is not None:
            await self.reading.date(max(first, self.log.start))

    def figures(self) -> QueueFigures:
        blocks = self._blocks.values()
        waiting, dying, held, *leased = (
            sum(block.states.count(state) for block in blocks) for state in (WAITING, DYING, HELD, *OUT)
        )
        fresh = max(self.log.high_watermark - max(self.next, self.log.start), 0)
        available = sum(block.ready for block in blocks) + held + fresh
        first = self._first()
        oldest = self.reading.timestamp_at(None if first is None else max(first, self.log.start))
        age_ms = 0 if oldest is None else max(self._clock.now_ms() - oldest, 0)
        counts = self.done, self.dead, dying, self.redelivered
        return QueueFigures(available, sum(leased), waiting, *counts, age_ms, self.low, self.next)

    def ahead(self, runs_max: int) -> list[tuple[int, int]]:
        """The next available runs: first and last offset. Records not read yet may turn out delayed."""
        runs: list[tuple[int, int]] = []
        for number, block in self._blocks.items():
            if len(runs) > runs_max:
                break
            for at in block.all_in(READY) if block.ready else ():
                _extend(runs, number * SIZE + at, number * SIZE + at)
        fresh = max(self.next, self.log.start)
        if fresh < self.log.high_watermark:
            _extend(runs, fresh, self.log.high_watermark - 1)
        return runs[:runs_max]

    # The first state, and the next

    def _first(self) -> int | None:
        """The lowest offset that may be available."""
        while self._listed:
            number = self._listed[0]
            block = self._blocks.get(number)
            if block is not None and block.ready:
                return number * SIZE + block.states.find(READY)
            heapq.heappop(self._listed)
            if block is not None:
                block.is_listed = False
        return self.next if self.next < self.log.high_watermark and self._open < OPEN_MAX else None

    def _look_at(self, header: BatchHeader, batch: memoryview, count_max: int) -> None:
        """Gives new records their first state: up to `count_max` of a plain batch."""
        first, last = max(header.base_offset, self.next), header.last_offset
        if last < self.next:
            return
        settings = self.settings
        is_plain = header.count == last - header.base_offset + 1 and not settings.key_order and not settings.delay_ms
        if header.is_control:
            self._go_on(last + 1)
        elif is_plain and not self.reading.has_delays(header):
            last = min(last, first + count_max - 1)
            for number, start, stop in pieces(first, last):
                block = self._block(number)
                block.fill(start, stop, READY)
                self._open += stop - start
                self._writer.changed.add(number)
                self._list(number, block)
            self._go_on(last + 1)
        else:
            self._go_on(self._look_at_each(header, batch, first))

    def _go_on(self, offset: int) -> None:
        number, self.next = self.next // SIZE, offset
        block = self._blocks.get(number)
        if block is not None:
            self._tidy(number, block)

    def _look_at_each(self, header: BatchHeader, batch: memoryview, first: int) -> int:
        """The next offset: behind the batch, or within it after `LOOK_RECORDS_MAX` records."""
        settings = self.settings
        now = self._clock.now_ms()
        looked = 0
        for offset, record in self.reading.records(header, batch).items():
            if offset < first:
                continue
            if looked == LOOK_RECORDS_MAX:
                return offset
            looked += 1
            number, at = divmod(offset, SIZE)
            block = self._block(number)
            block.fill(at, at + 1, READY)
            self._open += 1
            self._writer.changed.add(number)
            due = first_due(record, settings.delay_ms)
            if due > now:
                self._wait(number, at, due)
                if self._keys is not None:
                    self._keys.delay(offset, record.key)
            elif self._keys is not None and not self._keys.join(offset, record.key):
                block.put(at, HELD)
            else:
                self._list(number, block)
        return header.last_offset + 1

    def _lease(self, member: Member, first: int, last: int, count_max: int) -> list[Run]:
        until = self._clock.now_ms() + self.settings.lease_ms
        runs: list[Run] = []
        for number, start, stop in pieces(first, last):
            block = self._blocks.get(number)
            if block is None or not block.ready:
                continue
            base = number * SIZE
            for step in list(block.lease(start, stop, count_max, member.id, until)):
                count = step.stop - step.start
                count_max -= count
                self._count_leases(member, count)
                if step.attempt > 1:
                    self.redelivered += count
                if runs and runs[-1].last == base + step.start - 1 and runs[-1].attempt == step.attempt:
                    runs[-1] = runs[-1]._replace(last=base + step.stop - 1)
                else:
                    runs.append(Run(base + step.start, base + step.stop - 1, step.attempt))
                self._writer.changed.add(number)
            self._calendar.watch(number, block)
            if count_max <= 0:
                break
        if runs:
            self._writer.save_soon()
        return runs

    def _count_leases(self, member: Member | None, count: int) -> None:
        self.leases += count
        self._queue.leases += count
        if member is not None:
            member.leases += count

    def has_leased(self, member: Member, offset: int, attempt: int) -> bool:
        """Whether a member still holds this lease on a record, without a redelivery since."""
        block, at = self._blocks.get(offset // SIZE), offset % SIZE
        return block is not None and block.is_leased(at, at + 1, member.id) and block.attempts[at] == min(attempt, 255)

    def _finish(self, number: int, block: Block, start: int, stop: int) -> None:
        block.finish(start, stop)
        self._open -= stop - start
        self.done += stop - start
        if self._keys is not None:
            for at in range(start, stop):
                self._let_follow(number * SIZE + at)
        self._tidy(number, block)

    def _fail(self, number: int, block: Block, at: int, reason: str, *, is_final: bool = False) -> None:
        """A delivery ended without an acknowledgement. The caller has already counted the lease off."""
        outcome, dead = self._failed(number, block, at, reason, is_final=is_final)
        self._become(number, block, at, outcome)
        if dead is not None:
            self._writer.add_dead_record(dead)
            self._queue.dead_letters.write_letters(self)

    def _failed(
        self, number: int, block: Block, at: int, reason: str, delay_ms: int = 0, is_final: bool = False
    ) -> tuple[Outcome, DeadRecord | None]:
        """The next state of a record whose delivery failed, and the dead record if the queue gives it up."""
        settings = self.settings
        attempts, now = block.attempts[at], self._clock.now_ms()
        if is_final or (attempts >= settings.attempts_max and not self._queue.is_stopping):
            reason, to = reason[:REASON_CHARS_MAX] or ("rejected" if is_final else "released"), settings.dead_topic
            end = self._queue.dead_letters.end(to, self.index)
            return Outcome(DYING), DeadRecord(number * SIZE + at, attempts, reason, now, to, *end)
        rest_ms = max(delay_ms, settings.rest_ms(attempts))
        return (Outcome(WAITING, now + rest_ms) if rest_ms > 0 else Outcome(READY)), None

    def _become(self, number: int, block: Block, at: int, outcome: Outcome) -> None:
        if outcome.state == WAITING:
            self._wait(number, at, outcome.when)
        elif outcome.state == READY:
            self._offer(number, block, at)
        else:
            block.put(at, outcome.state, outcome.when)

    # Time

    def _wait(self, number: int, at: int, until: int) -> None:
        block = self._blocks[number]
        block.put(at, WAITING, until)
        self._calendar.watch(number, block)

    def _look_at_due(self) -> None:
        now = self._clock.now_ms()
        numbers = self._calendar.take_due(now)
        if not numbers and self._calendar.is_early(now):
            self._shorten_leases(now + self.settings.lease_ms)
        for number in numbers:
            block = self._blocks.get(number)
            if block is None:
                continue
            block.alarm = NEVER
            for at in block.overdue(now):
                self._writer.changed.add(number)
                if block.states[at] == LEASED:
                    self._count_leases(self._queue.owner(block.owners[at]), -1)
                    self._fail(number, block, at, "its lease expired")
                elif self._keys is not None and not self._keys.due(number * SIZE + at):
                    block.put(at, HELD)
                else:
                    self._offer(number, block, at)
            self._calendar.watch(number, block)
        if self._writer.changed:
            self._writer.save_soon()

    def _shorten_leases(self, until: int) -> None:
        """The machine's clock was set back: leases by the old time would last longer by the same amount."""
        for number, block in self._blocks.items():
            if block.shorten(until):
                self._calendar.watch(number, block)

    def _offer(self, number: int, block: Block, at: int) -> None:
        block.put(at, READY)
        self._list(number, block)
        self._wake()

    def _list(self, number: int, block: Block) -> None:
        if not block.is_listed:
            block.is_listed = True
            heapq.heappush(self._listed, number)

    def _let_follow(self, offset: int) -> None:
        """A record is done: the next record of its key becomes available."""
        follower = self._keys.leave(offset) if self._keys is not None else None
        if follower is not None:
            number, at = divmod(follower, SIZE)
            block = self._blocks[number]
            if block.states[at] == HELD:
                self._offer(number, block, at)

    # Blocks

    def _block(self, number: int) -> Block:
        block = self._blocks.get(number)
        if block is None:
            block = self._blocks[number] = Block()
        return block

    def _tidy(self, number: int, block: Block) -> None:
        """Drops a block that is done. The last block stays: it gets the next records."""
        if not block.open and (number + 1) * SIZE <= self.next:
            del self._blocks[number]

    def _give_up(self, start: int, stop: int, reason: str) -> None:
        """Gives up a range of unreadable records. The first undelivered one becomes the dead letter of them all."""
        logger.error(
            "queue %s: %s-%d: offsets %d to %d are dead: %s",
            self._queue.id, self.topic.name, self.index, start, stop - 1, reason,
        )  # fmt: skip
        found = self._unread(start, stop)
        if found is not None:
            number, at = divmod(found, SIZE)
            block = self._block(number)
            if found >= self.next:
                block.fill(at, at + 1, READY)
                self._open += 1
                self._go_on(found + 1)
            self._writer.changed.add(number)
            self._fail(number, block, at, reason, is_final=True)
        self._pass_over(stop, start, keep_leased=True)
        self._writer.save_soon()

    def _unread(self, start: int, stop: int) -> int | None:
        """The first record of a range that is neither in flight nor done."""
        for number, block in self._blocks.items():
            base = number * SIZE
            for at in range(max(start - base, 0), min(stop - base, SIZE)):
                if block.states[at] in (READY, WAITING, HELD):
                    return base + at
        return max(start, self.next) if self.next < stop else None

    def _pass_over(self, stop: int, start: int = 0, *, keep_leased: bool = False) -> None:
        """Marks a range as done: retention or compaction deleted its records."""
        for number, block in list(self._blocks.items()):
            if number * SIZE >= stop:
                break
            for at in range(max(start - number * SIZE, 0), min(stop - number * SIZE, SIZE)):
                state = block.states[at]
                if state in (DONE, DYING) or (keep_leased and state in OUT):
                    continue
                if state in OUT:
                    self._count_leases(self._queue.owner(block.owners[at]), -1)
                block.drop(at)
                self._open -= 1
                self._writer.changed.add(number)
                self._let_follow(number * SIZE + at)
            self._tidy(number, block)
        if start <= self.next < stop:
            self._go_on(stop)

    # Storing

    def save(self) -> Promise[None]:
        return self._writer.save()

    def head(self, accepted: int) -> Head:
        return Head(self.topic.id.hex, self.next, self.done + accepted, self.dead, self.redelivered)

    def block(self, number: int) -> Block | None:
        return self._blocks.get(number)

    def _restore(self, stored: Stored | None, is_alone: bool) -> None:
        head = stored.head if stored is not None else None
        if stored is None or head is None or head.topic_id != self.topic.id.hex:
            from_end = self.is_private or self.settings.reset == "latest"
            self.next = self.log.high_watermark if from_end else self.log.start
            self.first = self.next if self.is_private else 0
            return
        self.next, self.done, self.dead, self.redelivered = head[1:]
        self._writer.restore(set(stored.blocks), stored.dead_records)
        last_chance = self.settings.attempts_max - 1
        for number, block in sorted(stored.blocks.items()):
            block.attempts[:] = bytes(min(attempts, last_chance) for attempts in block.attempts)
            self._blocks[number] = block
            self._open += block.open
            self._list(number, block)
            self._calendar.watch(number, block)
        for number, block in self._blocks.items():
            for at in block.all_in(DYING):
                if number * SIZE + at not in self._writer.dead_records:  # impossible: both are written together
                    block.put(at, READY)
        if self.next > self.log.end and self.log.damage.lost is None:
            logger.error("queue %s is ahead of %s-%d: records are lost", self._queue.id, self.topic.name, self.index)
            if is_alone:
                self._fall_back(self.log.end)
        if self._writer.dead_records:
            self._queue.dead_letters.write_letters(self)

    def _fall_back(self, end: int) -> None:
        """The machine stopped before the log's last records were on disk (`flush=os`). New records get their offsets
        and must not inherit the states of the lost records.
        """
        for offset in [offset for offset in self._writer.dead_records if offset >= end]:
            self._writer.remove_dead_record(offset)
            block, at = self._blocks.get(offset // SIZE), offset % SIZE
            if block is not None and block.states[at] == DYING:
                block.put(at, READY)
        self._pass_over(self.next, end)
        self.next = end
        self._writer.changed.add(end // SIZE)

    @abc.abstractmethod
    def settle(self, settlements: Sequence[Settlement], is_durable: bool) -> None:
        """Applies durable acknowledgements, or reverts refused ones."""

    # Dead records

    def dead_records(self) -> list[DeadRecord]:
        """Dead records that are not done yet."""
        return list(self._writer.dead_records.values())

    def save_dead_records(self) -> Promise[None]:
        """Settles when all of them are durable."""
        return self._writer.save_dead_records()

    def letters_written(self, dead_records: Sequence[DeadRecord]) -> Promise[None]:
        """Their dead letters are durable."""
        for dead in dead_records:
            self._writer.remove_dead_record(dead.offset)
            number, at = divmod(dead.offset, SIZE)
            block = self._blocks.get(number)
            if block is None or block.states[at] != DYING:
                continue
            block.drop(at)
            self._open -= 1
            self._writer.changed.add(number)
            self.dead += 1
            self._let_follow(dead.offset)
            self._tidy(number, block)
        return self.save()


def _extend(runs: list[tuple[int, int]], first: int, last: int) -> None:
    if runs and runs[-1][1] == first - 1:
        runs[-1] = (runs[-1][0], last)
    else:
        runs.append((first, last))


def pieces(first: int, last: int) -> Iterator[tuple[int, int, int]]:
    """Splits a range of offsets by block: block number, start and stop."""
    while first <= last:
        number, start = divmod(first, SIZE)
        stop = min(SIZE, start + last - first + 1)
        yield number, start, stop
        first += stop - start
