"""A queue's place in one partition: gives records out to members, and takes their answers.

Rules
-----
1. An answer is settled when it is durable. A delivery is written down soon after, not before: what a crash forgets is
   at most the last moment's count, never an answer.
2. A member answers for what it has leased now. Late answers, and those for others' records, are refused.
3. A place that has ended gives nothing out and takes no answers: another broker may have it, and would know of neither.
4. Only what the log says is out of its range is gone from it. A read that fails in any other way changes nothing.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING

from millstream.broker.groups.queue_block import DONE, DYING, HELD, LEASED, READY, SIZE, WAITING, Block
from millstream.broker.groups.queue_keys import KeyOrder
from millstream.broker.groups.queue_settings import LEASES_GROUP_MAX, LEASES_MEMBER_MAX, OPEN_MAX
from millstream.broker.groups.queue_states import QueueStates, pieces
from millstream.broker.groups.queue_verbs import Answer, Member, Run, Taken, TakenRecord, Verb
from millstream.errors import Code, RequestError
from millstream.promise import Promise
from millstream.records.batch import BatchHeader
from millstream.stores.base import Delete

if TYPE_CHECKING:
    pass

READS_MAX = 32
"""Of one acquisition: records that came back lie scattered, and each place is a read of its own."""
ELSEWHERE = RequestError(Code.NOT_COORDINATOR, "another broker looks after the queue")
AGAIN_BYTES = 64 * 1024
"""To read at a place where something came back: the rest of a longer read would be records that are done."""


class QueuePartition(QueueStates):
    _seeks = 0
    _is_full = False
    """Whether somebody got nothing because too much is leased: to be called when that ends."""

    # Giving out

    @property
    def has_some(self) -> bool:
        """Whether it is worth asking for something."""
        return self._first() is not None

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
        for number, start, stop in pieces(base, base + count - 1):
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

    def _room(self, member: Member) -> int:
        if self._queue.owner(member.id) is not member:  # it left while something was read for it
            return 0
        room = self.settings.leases_max - self.leases
        if room <= 0:
            self._is_full = True
        return min(room, LEASES_MEMBER_MAX - member.leases, LEASES_GROUP_MAX - self._queue.leases)

    # Reading

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

    # Taking answers

    def answer(self, member: Member, answers: Sequence[Answer]) -> Promise[None]:
        """Settles when durable; raises `RequestError`, with nothing changed, unless all of them are the member's."""
        self.check()
        self._check(member, answers)
        until = self._clock.now_ms() + self.settings.lease_ms
        for each in answers:
            for number, start, stop in pieces(each.first, each.last):
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

    def give_back(self, member: Member, offsets: Container[int] | None = None) -> None:
        """Of what a member has leased, these (or all) were never looked at: they do not count as delivered."""
        if self.ended is not None:
            return
        for number, block in list(self._blocks.items()):
            for at in block.leased_by(member.id):
                if offsets is None or number * SIZE + at in offsets:
                    self._count_leases(member, -1)
                    self._keeper.changed.add(number)
                    block.uncount(at)
                    self._offer(number, block, at)
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
            for number, start, stop in pieces(each.first, each.last):
                block = self._blocks.get(number)
                if block is None or not block.is_leased(start, stop, member.id):
                    raise RequestError(
                        Code.INVALID_RECORD_STATE,
                        f"not all of the records {each.first} to {each.last} are leased to this member now",
                    )

    def _bury(self) -> None:
        self._queue.dead_letters.bury(self)

    # Beginning anew, and ending

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
        self.first = min(self.first, offset)
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
