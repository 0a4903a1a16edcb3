"""A queue's place in one partition: which record is in which state, and who moves it on.

                       acquire                     accept
    (never seen) ----> LEASED ------------------------------------------> DONE
                        |  ^                                                ^
        release, or     v  | acquire                                       | dead letter written
        the lease ends  READY / WAITING (backoff, delay) / HELD (key)      |
                        |                                                  |
                        +--- rejected, or failed too often ---> DYING -----+

Rules
-----
1. Records are looked at in order of offset, up to `next`; what lies before `next` and in no block is done. Memory and
   disk are bounded by the records that are not done, however long the log.
2. An answer is settled when it is durable. A delivery is written down soon after, not before: what a crash forgets is
   at most the last moment's count, never an answer.
3. Leases do not outlive the broker, attempts do. A delivery that a restart cut short counts, but never as the last one:
   the record gets one more.
4. A record that is given up is DYING, durably and with the reason, before its dead letter is written, and done only
   when that is durable. After a crash in between it is looked for among the dead letters: there is one, whatever
   happens.
5. A member answers for what it has leased now. Late answers, and those for others' records, are refused.
6. A place that has ended gives nothing out and takes no answers: another broker may have it, and would know of neither.
7. Only what the log says is out of its range is gone from it. A read that fails in any other way changes nothing.
"""

from __future__ import annotations

import heapq
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from millstream.broker.groups.deadline import Deadline
from millstream.broker.groups.queue_block import DONE, DYING, HELD, LEASED, NEVER, READY, SIZE, WAITING, Block
from millstream.broker.groups.queue_calendar import Calendar
from millstream.broker.groups.queue_figures import QueueFigures
from millstream.broker.groups.queue_keeper import Keeper
from millstream.broker.groups.queue_keys import KeyOrder
from millstream.broker.groups.queue_reading import Reading, first_due
from millstream.broker.groups.queue_settings import LEASES_GROUP_MAX, LEASES_MEMBER_MAX, OPEN_MAX, QueueSettings
from millstream.broker.groups.queue_shelf import Grave, Head, Shelf, Stored
from millstream.broker.groups.queue_verbs import Answer, Member, Run, Taken, TakenRecord, Verb
from millstream.broker.topics import Topic
from millstream.errors import Code, RequestError
from millstream.promise import Promise
from millstream.records.batch import BatchHeader
from millstream.stores.base import Delete

if TYPE_CHECKING:
    from millstream.broker.groups.queue import Queue

logger = logging.getLogger(__name__)

READS_MAX = 32
"""Of one acquisition: records that came back lie scattered, and each place is a read of its own."""
REASON_CHARS_MAX = 1000
RETRY_MS = 1_000
"""Before a grave that could not be written down is again."""
ELSEWHERE = RequestError(Code.NOT_COORDINATOR, "another broker looks after the queue")
AGAIN_BYTES = 64 * 1024
"""To read at a place where something came back: the rest of a longer read would be records that are done."""


class QueuePartition:
    def __init__(
        self,
        queue: Queue,
        topic: Topic,
        index: int,
        shelf: Shelf | None,
        stored: Stored | None,
        is_alone: bool = False,
    ) -> None:
        self.group_id = queue.id
        self.topic = topic
        self.index = index
        self._partition = topic.partitions[index]
        self.log = self._partition.log
        self.next = 0
        """The first record that was never looked at."""
        self.done = self.dead = self.redelivered = 0
        self.leases = 0
        self._queue = queue
        self._clock = queue.clock
        self._keeper = Keeper(shelf, queue.journal, queue.clock, self, self._dead_end)
        self.reading = Reading(self.log)
        self._blocks: OrderedDict[int, Block] = OrderedDict()
        self._open = 0
        self._listed: list[int] = []
        """A heap of blocks that may have something ready."""
        self._calendar = Calendar(self._clock, self._look_at_due)
        self._digging = Deadline(self._clock, self._dig)
        self._seeks = 0
        self._is_full = False
        """Whether somebody got nothing because too much is leased: to be called when that ends."""
        self._keys: KeyOrder | None = None
        self.ended: RequestError | None = None
        """Why nobody gets anything here any more."""
        self._wakers: dict[int, Callable[[], None]] = {}
        self._next_waker = 0
        self._restore(stored, is_alone)
        self._unwake = self.log.wake(self._wake)

    @property
    def settings(self) -> QueueSettings:
        return self._queue.settings_for(self.topic)

    @property
    def low(self) -> int:
        """All below is done."""
        for number, block in self._blocks.items():
            if block.open:
                return number * SIZE + block.first_open()
        return self.next

    def wake(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Calls back when something may have become available; the answer ends it."""
        number = self._next_waker
        self._next_waker += 1
        self._wakers[number] = callback
        return lambda: self._wakers.pop(number, None) and None

    def figures(self) -> QueueFigures:
        blocks = self._blocks.values()
        leased, waiting, dying, held = (
            sum(block.states.count(state) for block in blocks) for state in (LEASED, WAITING, DYING, HELD)
        )
        fresh = max(self.log.durable - max(self.next, self.log.start), 0)
        available = sum(block.ready for block in blocks) + held + fresh
        first = self._first()
        oldest = None if first is None else self.reading.timestamp_at(first)
        age_ms = 0 if oldest is None else max(self._clock.now_ms() - oldest, 0)
        counts = self.done, self.dead, dying, self.redelivered
        return QueueFigures(available, leased, waiting, *counts, age_ms, self.low, self.next)

    def ahead(self, runs_max: int) -> list[tuple[int, int]]:
        """First and last of neighbours that would be given out next. Records never looked at may turn out delayed."""
        runs: list[tuple[int, int]] = []
        for number, block in self._blocks.items():
            if len(runs) > runs_max:
                break
            for at in block.all_in(READY) if block.ready else ():
                _extend(runs, number * SIZE + at, number * SIZE + at)
        fresh = max(self.next, self.log.start)
        if fresh < self.log.durable:
            _extend(runs, fresh, self.log.durable - 1)
        return runs[:runs_max]

    # Giving out

    async def acquire(self, member: Member, records_max: int, bytes_max: int, *, whole_batches: bool = False) -> Taken:
        """Leases what is available now, and answers with the batches it is in; empty if there is nothing.

        With `whole_batches` the last batch is leased to its end although that is more than asked for: a client that
        has to be sent the batch anyway may as well work on it. But a batch that alone has more than was asked for is
        shared: one worker would otherwise get ten thousand jobs at once, and the others none.
        """
        chunks: list[bytes] = []
        runs: list[Run] = []
        count = size = 0
        self.check()
        for _ in range(READS_MAX):
            first = self._first()
            if first is None or count >= records_max or size >= bytes_max or self._room(member) <= 0:
                break
            batches = await self._read(first, bytes_max - size, is_first=not runs)
            if batches is None:
                break
            for header, batch in batches:
                if count >= records_max or (chunks and size + len(batch) > bytes_max):
                    break
                wanted = self._room(member)
                if not whole_batches or header.count > records_max:
                    wanted = min(wanted, records_max - count)
                if wanted <= 0:  # looking at a batch without taking anything of it would pass it over
                    break
                self._look_at(header, batch, wanted)
                leased = self._lease(member, header.base_offset, header.last_offset, wanted)
                if leased:
                    chunks.append(bytes(batch))
                    size += len(batch)
                    count += sum(run.last - run.first + 1 for run in leased)
                    runs += leased
        return Taken(b"".join(chunks), runs)

    async def take(self, member: Member, records_max: int, bytes_max: int) -> list[TakenRecord]:
        """The same as records, for doors that hand them out one by one. What is missing in the log is done."""
        taken: list[TakenRecord] = []
        size = 0
        self.check()
        for _ in range(READS_MAX):
            first = self._first()
            if first is None or len(taken) >= records_max or size >= bytes_max or self._room(member) <= 0:
                break
            batches = await self._read(first, AGAIN_BYTES, is_first=not taken)
            if batches is None:
                break
            for header, batch in batches:
                if len(taken) >= records_max or size >= bytes_max:
                    break
                records = self.reading.records(header, batch)
                wanted = min(self._room(member), records_max - len(taken))
                if wanted <= 0:
                    break
                self._look_at(header, batch, wanted)
                for run in self._lease(member, header.base_offset, header.last_offset, wanted):
                    for offset in range(run.first, run.last + 1):
                        record = records.get(offset)
                        if record is None:
                            self.answer(member, [Answer(offset, offset, Verb.GAP)])
                            continue
                        taken.append(TakenRecord(record, run.attempt))
                        size += len(record.value or b"")
        return taken

    @property
    def has_some(self) -> bool:
        """Whether it is worth asking for something."""
        return self._first() is not None

    def take_fresh(self, member: Member, records_max: int) -> list[tuple[int, bytes | None]] | None:
        """What is just being appended by those who bring single records, from their hands: offsets and values.

        For the usual case that a queue has given out all it had. None: it must be read, with `take`.
        """
        inlet = self._partition.inlet
        if inlet is None or inlet.leaving is None or self.ended is not None:
            return None
        base, rows = inlet.leaving
        count, settings, queue = len(rows), self.settings, self._queue
        if base != self.next or base + count > self.log.durable or (self._listed and self._first() != base):
            return None
        if settings.key_order or settings.delay_ms or count > records_max or self._open + count > OPEN_MAX:
            return None
        if (
            self.leases + count > settings.leases_max
            or member.leases + count > LEASES_MEMBER_MAX
            or queue.leases + count > LEASES_GROUP_MAX
        ):
            return None
        taken = []
        for offset, row in enumerate(rows, base):
            if row[4]:  # a header may delay it
                return None
            taken.append((offset, row[3]))
        until = self._clock.now_ms() + settings.lease_ms
        for number, start, stop in _pieces(base, base + count - 1):
            block = self._block(number)
            block.lease_new(start, stop, member.id, until)
            self._keeper.changed.add(number)
            if block.due < block.alarm:
                self._calendar.watch(number, block)
        self.next = base + count
        self._open += count
        self.leases += count
        queue.leases += count
        member.leases += count
        self._keeper.save_soon()
        return taken

    def _first(self) -> int | None:
        """The lowest offset that may be given out."""
        while self._listed:
            number = self._listed[0]
            block = self._blocks.get(number)
            if block is not None and block.ready:
                return number * SIZE + block.states.find(READY)
            heapq.heappop(self._listed)
            if block is not None:
                block.is_listed = False
        return self.next if self.next < self.log.durable and self._open < OPEN_MAX else None

    def _room(self, member: Member) -> int:
        if self._queue.owner(member.id) is not member:  # it left while something was read for it
            return 0
        room = self.settings.leases_max - self.leases
        if room <= 0:
            self._is_full = True
        return min(room, LEASES_MEMBER_MAX - member.leases, LEASES_GROUP_MAX - self._queue.leases)

    async def _read(self, first: int, bytes_max: int, is_first: bool) -> list[tuple[BatchHeader, memoryview]] | None:
        """Batches from the one that holds `first`, or the next there is; what is gone from the log is done.

        Fails if the log cannot be read. Where something was leased before (`is_first` is false) the answer is None
        instead: whoever asks must be given that.
        """
        seeks = self._seeks
        try:
            batches = await self._batches(first, bytes_max)
        except RequestError:
            self.check()
            if is_first:
                raise
            return None
        self.check()  # it may have ended meanwhile
        return batches if seeks == self._seeks else []

    async def _batches(self, first: int, bytes_max: int) -> list[tuple[BatchHeader, memoryview]]:
        if first < self.log.start:
            self._pass_over(self.log.start)
            first = max(self._first() or self.next, self.log.start)
        if self.settings.key_order and self._keys is None:
            await self._restore_keys()
        batches = await self.reading.batches(first, bytes_max if first >= self.next else min(bytes_max, AGAIN_BYTES))
        if batches and batches[0][0].base_offset > first:
            self._pass_over(batches[0][0].base_offset, first)
        return batches

    def _look_at(self, header: BatchHeader, batch: memoryview, count_max: int) -> None:
        """Gives records that were never seen their first state: as many as are wanted, where they are alike."""
        first, last = max(header.base_offset, self.next), header.last_offset
        if last < self.next:
            return
        settings = self.settings
        is_plain = header.count == last - header.base_offset + 1 and not settings.key_order and not settings.delay_ms
        if header.is_control:
            self._go_on(last + 1)
        elif is_plain and not self.reading.has_delays(batch):
            last = min(last, first + count_max - 1)
            for number, start, stop in _pieces(first, last):
                block = self._block(number)
                block.fill(start, stop, READY)
                self._open += stop - start
                self._keeper.changed.add(number)
                self._list(number, block)
            self._go_on(last + 1)
        else:
            self._look_at_each(header, batch, first)
            self._go_on(last + 1)

    def _go_on(self, offset: int) -> None:
        number, self.next = self.next // SIZE, offset
        block = self._blocks.get(number)
        if block is not None:
            self._tidy(number, block)

    def _look_at_each(self, header: BatchHeader, batch: memoryview, first: int) -> None:
        settings = self.settings
        now = self._clock.now_ms()
        for offset, record in self.reading.records(header, batch).items():
            if offset < first:
                continue
            number, at = divmod(offset, SIZE)
            block = self._block(number)
            block.fill(at, at + 1, READY)
            self._open += 1
            self._keeper.changed.add(number)
            due = first_due(record, settings.delay_ms)
            if due > now:
                self._wait(number, at, due)
                if self._keys is not None:
                    self._keys.delay(offset, record.key)
            elif self._keys is not None and not self._keys.join(offset, record.key):
                block.put(at, HELD)
            else:
                self._list(number, block)

    def _lease(self, member: Member, first: int, last: int, count_max: int) -> list[Run]:
        until = self._clock.now_ms() + self.settings.lease_ms
        runs: list[Run] = []
        for number, start, stop in _pieces(first, last):
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
                self._keeper.changed.add(number)
            self._calendar.watch(number, block)
            if count_max <= 0:
                break
        if runs:
            self._keeper.save_soon()
        return runs

    def _count_leases(self, member: Member | None, count: int) -> None:
        self.leases += count
        self._queue.leases += count
        if member is not None:
            member.leases += count

    # Taking answers

    def answer(self, member: Member, answers: Sequence[Answer]) -> Promise[None]:
        """Settles when durable; raises `RequestError`, with nothing changed, unless all of them are the member's."""
        self.check()
        self._check(member, answers)
        until = self._clock.now_ms() + self.settings.lease_ms
        for each in answers:
            for number, start, stop in _pieces(each.first, each.last):
                block = self._blocks[number]
                if each.verb == Verb.RENEW:
                    block.renew(start, stop, until)
                    continue
                self._count_leases(member, start - stop)
                self._keeper.changed.add(number)
                if each.verb in (Verb.ACCEPT, Verb.GAP):
                    self._finish(number, block, start, stop)
                else:
                    for at in range(start, stop):
                        self._fail(number, block, at, each.delay_ms, each.reason, each.verb == Verb.REJECT)
        if all(each.verb == Verb.RENEW for each in answers):
            return Promise.of(None)
        saved = self.save()
        if self._is_full and self.leases < self.settings.leases_max:
            self._is_full = False
            self._wake()
        return saved

    def has_leased(self, member: Member, offset: int, attempt: int) -> bool:
        """Whether a record is still out with a member, and has not been given out again since."""
        block, at = self._blocks.get(offset // SIZE), offset % SIZE
        return block is not None and block.is_leased(at, at + 1, member.id) and block.attempts[at] == min(attempt, 255)

    def release(self, member: Member, reason: str) -> None:
        """The member is gone: what it had leased may be given out again."""
        if self.ended is not None:
            return
        for number, block in list(self._blocks.items()):
            for at in block.leased_by(member.id):
                self._count_leases(member, -1)
                self._keeper.changed.add(number)
                self._fail(number, block, at, 0, reason)
        if self._keeper.changed:
            self.save()

    def _check(self, member: Member, answers: Sequence[Answer]) -> None:
        after = -1
        for each in answers:
            if not after < each.first <= each.last:
                raise RequestError(Code.INVALID_REQUEST, "the offsets of an acknowledgement must rise")
            after = each.last
            if each.last - each.first > OPEN_MAX:
                raise RequestError(Code.INVALID_RECORD_STATE, "so many records cannot be leased")
            for number, start, stop in _pieces(each.first, each.last):
                block = self._blocks.get(number)
                if block is None or not block.is_leased(start, stop, member.id):
                    raise RequestError(
                        Code.INVALID_RECORD_STATE,
                        f"not all of the records {each.first} to {each.last} are leased to this member now",
                    )

    def _finish(self, number: int, block: Block, start: int, stop: int) -> None:
        block.finish(start, stop)
        self._open -= stop - start
        self.done += stop - start
        if self._keys is not None:
            for at in range(start, stop):
                self._let_follow(number * SIZE + at)
        self._tidy(number, block)

    def _fail(self, number: int, block: Block, at: int, delay_ms: int, reason: str, is_final: bool = False) -> None:
        """A delivery did not end in an acceptance. The caller has counted the lease off."""
        settings = self.settings
        attempts = block.attempts[at]
        if is_final or attempts >= settings.attempts_max:
            block.put(at, DYING)
            reason = reason[:REASON_CHARS_MAX] or ("rejected" if is_final else "released")
            grave = Grave(number * SIZE + at, attempts, reason, self._clock.now_ms(), settings.dead_topic)
            self._keeper.graves[grave.offset] = grave
            self._dig()
            return
        rest_ms = max(delay_ms, settings.rest_ms(attempts))
        if rest_ms > 0:
            self._wait(number, at, self._clock.now_ms() + rest_ms)
        else:
            self._offer(number, block, at)

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
                self._keeper.changed.add(number)
                if block.states[at] == LEASED:
                    self._count_leases(self._queue.owner(block.owners[at]), -1)
                    self._fail(number, block, at, 0, "its lease ran out")
                elif self._keys is not None and not self._keys.due(number * SIZE + at):
                    block.put(at, HELD)
                else:
                    self._offer(number, block, at)
            self._calendar.watch(number, block)
        if self._keeper.changed:
            self._keeper.save_soon()

    def _shorten_leases(self, until: int) -> None:
        """The machine's clock was set back: what was leased by the old time would be out for so much longer."""
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
        """A record is done; the one of its key that it held may go."""
        follower = self._keys.leave(offset) if self._keys is not None else None
        if follower is not None:
            number, at = divmod(follower, SIZE)
            block = self._blocks[number]
            if block.states[at] == HELD:
                self._offer(number, block, at)

    def _wake(self) -> None:
        for waker in list(self._wakers.values()):
            waker()

    # Blocks

    def _block(self, number: int) -> Block:
        block = self._blocks.get(number)
        if block is None:
            block = self._blocks[number] = Block()
        return block

    def _tidy(self, number: int, block: Block) -> None:
        """Lets go of a block that is done. The last one stays: more records are about to come to it."""
        if not block.open and (number + 1) * SIZE <= self.next:
            del self._blocks[number]

    def _pass_over(self, stop: int, start: int = 0) -> None:
        """Records in a range are no longer in the log: retention or compaction took them. They are done."""
        for number, block in list(self._blocks.items()):
            if number * SIZE >= stop:
                break
            for at in range(max(start - number * SIZE, 0), min(stop - number * SIZE, SIZE)):
                state = block.states[at]
                if state in (DONE, DYING):
                    continue
                if state == LEASED:
                    self._count_leases(self._queue.owner(block.owners[at]), -1)
                block.drop(at)
                self._open -= 1
                self._keeper.changed.add(number)
                self._let_follow(number * SIZE + at)
            self._tidy(number, block)
        if start <= self.next < stop:
            self._go_on(stop)

    # Keeping

    def save(self) -> Promise[None]:
        return self._keeper.save()

    def head(self) -> Head:
        return Head(self.topic.id.hex, self.next, self.done, self.dead, self.redelivered)

    def block(self, number: int) -> Block | None:
        return self._blocks.get(number)

    def _restore(self, stored: Stored | None, is_alone: bool) -> None:
        head = stored.head if stored is not None else None
        if stored is None or head is None or head.topic_id != self.topic.id.hex:
            from_end = self._keeper.is_private or self.settings.reset == "latest"
            self.next = self.log.durable if from_end else self.log.start
            return
        self.next, self.done, self.dead, self.redelivered = head[1:]
        self._keeper.restore(set(stored.blocks), stored.graves)
        last_chance = self.settings.attempts_max - 1
        for number, block in sorted(stored.blocks.items()):
            block.attempts[:] = bytes(min(attempts, last_chance) for attempts in block.attempts)
            self._blocks[number] = block
            self._open += block.open
            self._list(number, block)
            self._calendar.watch(number, block)
        for number, block in self._blocks.items():
            for at in block.all_in(DYING):
                if number * SIZE + at not in self._keeper.graves:  # cannot be: both are written together
                    block.put(at, READY)
        if self.next > self.log.end:
            logger.error("queue %s is ahead of %s-%d: records are gone", self._queue.id, self.topic.name, self.index)
            if is_alone:
                self._fall_back(self.log.end)
        if self._keeper.graves:
            self._bury()

    def _fall_back(self, end: int) -> None:
        """The machine stopped before the log's last records were on disk (`flush=os`): others will have their offsets,
        and whatever is known of the lost ones must not be taken for theirs.
        """
        for offset in [offset for offset in self._keeper.graves if offset >= end]:
            self._keeper.forget_grave(offset)
            block, at = self._blocks.get(offset // SIZE), offset % SIZE
            if block is not None and block.states[at] == DYING:
                block.put(at, READY)
        self._pass_over(self.next, end)
        self.next = end
        self._keeper.changed.add(end // SIZE)

    async def _restore_keys(self) -> None:
        """Order by key was switched on, or the broker was restarted: open records find their places again.

        Reading takes time in which records may be done or others looked at, and may fail. So states change only when
        all keys are known, in one step.
        """
        known: dict[int, bytes | None] = {}
        seen = -1
        while seen != self.next:
            seen = self.next
            for number, block in list(self._blocks.items()):
                if block.open:
                    await self._read_keys(known, number * SIZE + block.first_open(), min((number + 1) * SIZE, seen))
        if self._keys is not None:  # somebody else was faster
            return
        self._keys = keys = KeyOrder()
        for offset in sorted(known):
            found = self._blocks.get(offset // SIZE)
            if found is not None:
                _restore_key(keys, found, offset, known[offset])

    async def _read_keys(self, known: dict[int, bytes | None], offset: int, end: int) -> None:
        while offset < end:
            offset = max(offset, self.log.start)
            batches = await self.reading.batches(offset, AGAIN_BYTES)
            if not batches and self.log.start <= offset:
                return
            for header, batch in batches:
                for at, record in self.reading.records(header, batch).items():
                    if offset <= at < end:
                        known[at] = record.key
                offset = max(offset, header.next_offset)

    # The dead

    def _dig(self) -> None:
        self.save().then(self._dug)

    def _dug(self, done: Promise[None]) -> None:
        if done.error is None:
            self._bury()
        elif self.ended is None:
            self._digging.push(RETRY_MS)

    def _bury(self) -> None:
        self._queue.dead_letters.bury(self)

    def _dead_end(self, grave: Grave) -> Grave:
        return self._queue.dead_letters.place(grave, self.index)

    def graves(self) -> list[Grave]:
        """Records that are durably given up, and not done yet."""
        return self._keeper.durable_graves()

    def buried(self, graves: Sequence[Grave]) -> Promise[None]:
        """Their dead letters are durable."""
        for grave in graves:
            self._keeper.forget_grave(grave.offset)
            number, at = divmod(grave.offset, SIZE)
            block = self._blocks.get(number)
            if block is None or block.states[at] != DYING:
                continue
            block.drop(at)
            self._open -= 1
            self._keeper.changed.add(number)
            self.dead += 1
            self._let_follow(grave.offset)
            self._tidy(number, block)
        return self.save()

    async def seek(self, offset: int) -> None:
        """For administrators: forgets everything and begins at an offset."""
        if self.leases:
            raise RequestError(Code.NON_EMPTY_GROUP, "records are leased; stop the group's members first")
        if self._keeper.graves:
            raise RequestError(Code.NON_EMPTY_GROUP, "records are on their way to the dead-letter topic; try again")
        self._keeper.changed |= set(self._blocks)
        self._blocks.clear()
        self._open = 0
        self._listed = []
        self._calendar.clear()
        self._keys = None
        self._seeks += 1
        self.next = offset
        await self.save()
        self._wake()

    def stop(self) -> None:
        """Gives nothing out any more."""
        self._calendar.clear()
        self._digging.stop()
        self._keeper.stop()
        self._unwake()
        self._wake()

    def end(self, reason: RequestError) -> None:
        """From now on whoever asks or answers is refused, and nothing is written; nobody is told yet."""
        if self.ended is None:
            self.ended = reason
            self._keeper.end(reason)
            for block in self._blocks.values():
                for at in block.all_in(LEASED):
                    self._count_leases(self._queue.owner(block.owners[at]), -1)

    def close(self, reason: RequestError = ELSEWHERE) -> None:
        """Ends, and calls all who wait, to hear it."""
        self.end(reason)
        self.stop()

    def check(self) -> None:
        """Raises `RequestError` if it has ended."""
        if self.ended is not None:
            raise RequestError(self.ended.code, self.ended.detail)

    @property
    def is_private(self) -> bool:
        return self._keeper.is_private

    @property
    def is_closed(self) -> bool:
        return self.ended is not None

    def removal(self) -> list[Delete]:
        """What deletes all that is kept of it."""
        return self._keeper.removal()

    async def flush(self) -> None:
        """Before a clean stop: what was counted is written."""
        if self._keeper.changed and self.ended is None:
            await self.save()


def _restore_key(keys: KeyOrder, block: Block, offset: int, key: bytes | None) -> None:
    at = offset % SIZE
    state = block.states[at]
    if state == WAITING and not block.attempts[at]:
        keys.delay(offset, key)
    elif state not in (DONE, DYING) and not keys.join(offset, key) and state == READY:
        block.put(at, HELD)


def _extend(runs: list[tuple[int, int]], first: int, last: int) -> None:
    if runs and runs[-1][1] == first - 1:
        runs[-1] = (runs[-1][0], last)
    else:
        runs.append((first, last))


def _pieces(first: int, last: int) -> Iterator[tuple[int, int, int]]:
    """A range of offsets, block by block: the block's number, and where in it."""
    while first <= last:
        number, start = divmod(first, SIZE)
        stop = min(SIZE, start + last - first + 1)
        yield number, start, stop
        first += stop - start
