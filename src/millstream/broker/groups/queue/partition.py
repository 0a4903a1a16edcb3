"""A queue's state in one partition: leases records to members. `answers.py` handles their acknowledgements.

Rules
-----
1. A delivery is stored within `SAVE_MS`, not before it happens: a crash forgets at most the attempts of that time.
2. A closed partition refuses leases and acknowledgements: another broker may own it, and would know of neither.
3. Only records outside the log's range count as deleted. Only damaged or undecodable records become dead without a
   delivery. Any other failed read changes nothing.
"""

from __future__ import annotations

from millstream.broker.groups.queue.answers import QueueAnswers
from millstream.broker.groups.queue.block import DONE, DYING, HELD, OUT, READY, SIZE, WAITING, Block
from millstream.broker.groups.queue.key_order import KeyOrder
from millstream.broker.groups.queue.settings import LEASES_GROUP_MAX, LEASES_MEMBER_MAX, OPEN_MAX
from millstream.broker.groups.queue.states import pieces
from millstream.broker.groups.queue.verbs import Answer, Member, Run, Taken, TakenRecord, Verb
from millstream.core.errors import Code, RequestError
from millstream.log.damage import UnreadableOffset
from millstream.records.batch import BatchHeader
from millstream.stores.base import Delete

READS_MAX = 32
"""Reads per acquisition: redeliveries are scattered, and each one needs its own read."""
ELSEWHERE = RequestError(Code.NOT_COORDINATOR, "another broker coordinates the queue")
AGAIN_BYTES = 64 * 1024
"""Read size for redeliveries: a longer read would return records that are done."""


class QueuePartition(QueueAnswers):
    _seeks = 0

    # Leasing

    @property
    def has_some(self) -> bool:
        """Whether records may be available."""
        return self._first() is not None

    async def acquire(self, member: Member, records_max: int, bytes_max: int, *, whole_batches: bool = False) -> Taken:
        """Leases available records and returns their batches; empty if no record is available.

        With `whole_batches` the lease covers the last batch to its end, beyond `records_max`: the client receives the
        batch anyway. A batch that alone has more than `records_max` records is shared: otherwise one worker would get
        ten thousand jobs at once, and the other workers none.

        Raises `UnreadableOffset` at a damaged batch, once: the queue then continues behind it.
        """
        chunks: list[bytes] = []
        runs: list[Run] = []
        count = size = 0
        self.check()
        self.log.damage.check_lost()
        for _ in range(READS_MAX):
            first = self._first()
            if first is None or count >= records_max or size >= bytes_max or self._room(member) <= 0:
                break
            batches = await self._read(first, bytes_max - size, is_first=not runs, tells_damage=True)
            if batches is None:
                break
            for header, batch in batches:
                if count >= records_max or (chunks and size + len(batch) > bytes_max):
                    break
                wanted = self._room(member)
                if not whole_batches or header.count > records_max:
                    wanted = min(wanted, records_max - count)
                if wanted <= 0:  # `_look_at` without a lease would skip the batch
                    break
                try:
                    self._look_at(header, batch, wanted)
                except UnreadableOffset as error:
                    self._give_up(error.first, error.next_offset, error.detail)
                    continue
                leased = self._lease(member, header.base_offset, header.last_offset, wanted)
                if leased:
                    chunks.append(bytes(batch))
                    size += len(batch)
                    count += sum(run.last - run.first + 1 for run in leased)
                    runs += leased
        return Taken(b"".join(chunks), runs)

    async def take(self, member: Member, records_max: int, bytes_max: int) -> list[TakenRecord]:
        """Like `acquire`, but decoded, for doors that deliver single records. Records missing in the log are done."""
        taken: list[TakenRecord] = []
        size = 0
        self.check()
        self.log.damage.check_lost()
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
                try:
                    records = self.reading.records(header, batch)
                except UnreadableOffset as error:
                    self._give_up(error.first, error.next_offset, error.detail)
                    continue
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
        """Leases the single records that the inlet appends now, without a read: offsets and values.

        This is the usual case: the queue has leased all earlier records. None: call `take`, which reads.
        """
        inlet = self._partition.inlet
        if inlet is None or inlet.leaving is None or self.ended is not None:
            return None
        base, rows = inlet.leaving
        count, settings, queue = len(rows), self.settings, self._queue
        if base != self.next or base + count > self.log.high_watermark or (self._listed and self._first() != base):
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
            self._writer.changed.add(number)
            if block.due < block.alarm:
                self._calendar.watch(number, block)
        self.next = base + count
        self._open += count
        self.leases += count
        queue.leases += count
        member.leases += count
        self._writer.save_soon()
        return taken

    def _room(self, member: Member) -> int:
        if self._queue.owner(member.id) is not member:  # it left during the read
            return 0
        room = self.settings.leases_max - self.leases
        if room <= 0:
            self._is_full = True
        return min(room, LEASES_MEMBER_MAX - member.leases, LEASES_GROUP_MAX - self._queue.leases)

    # Reading

    async def _read(
        self, first: int, bytes_max: int, is_first: bool, *, tells_damage: bool = False
    ) -> list[tuple[BatchHeader, memoryview]] | None:
        """Batches from the one that holds `first`, or the next one; records deleted from the log are done.

        Raises if the log cannot be read. After an earlier lease (`is_first` is false) it returns None instead: the
        caller must deliver that lease.
        """
        seeks = self._seeks
        try:
            batches = await self._batches(first, bytes_max)
        except UnreadableOffset as error:
            self.check()
            if tells_damage and not is_first:  # the next acquisition raises it
                return None
            if seeks == self._seeks:
                self._give_up(error.first, error.next_offset, error.detail)
            if tells_damage:
                raise
            return []
        except RequestError:
            self.check()
            if is_first:
                raise
            return None
        self.check()  # it may have ended during the read
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
        """Restores the key order of open records after a restart, or after order by key is switched on.

        During the reads records may become done or open, and a read may fail. So states change in one step, when all
        keys are known.
        """
        known: dict[int, bytes | None] = {}
        seen = -1
        while seen != self.next:
            seen = self.next
            for number, block in list(self._blocks.items()):
                if block.open:
                    await self._read_keys(known, number * SIZE + block.first_open(), min((number + 1) * SIZE, seen))
        if self._keys is not None:  # a concurrent call was faster
            return
        self._keys = keys = KeyOrder()
        for offset in sorted(known):
            found = self._blocks.get(offset // SIZE)
            if found is not None:
                _restore_key(keys, found, offset, known[offset])

    async def _read_keys(self, known: dict[int, bytes | None], offset: int, end: int) -> None:
        while offset < end:
            offset = max(offset, self.log.start)
            try:
                batches = await self.reading.batches(offset, AGAIN_BYTES)
                if not batches and self.log.start <= offset:
                    return
                for header, batch in batches:
                    for at, record in self.reading.records(header, batch).items():
                        if offset <= at < end:
                            known[at] = record.key
                    offset = max(offset, header.next_offset)
            except UnreadableOffset as error:  # a later acquisition gives these records up
                offset = max(offset, error.next_offset)

    # Seek and close

    async def seek(self, offset: int) -> None:
        """For administrators: drops all states and restarts at an offset."""
        if self.leases:
            raise RequestError(Code.NON_EMPTY_GROUP, "records are leased; stop the group's members first")
        if self._writer.dead_records:
            raise RequestError(Code.NON_EMPTY_GROUP, "the queue is writing dead letters; try again")
        self._writer.changed |= set(self._blocks)
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
        """Stops all timers and wakes waiting fetches."""
        self._calendar.clear()
        self._writer.stop()
        self._unwake()
        self._wake()

    def end(self, reason: RequestError) -> None:
        """Refuses leases, acknowledgements and writes from now on; wakes no waiter yet."""
        if self.ended is None:
            self.ended = reason
            self._writer.end(reason)
            for block in self._blocks.values():
                for at in [at for state in OUT for at in block.all_in(state)]:
                    self._count_leases(self._queue.owner(block.owners[at]), -1)

    def close(self, reason: RequestError = ELSEWHERE) -> None:
        """Ends, and wakes all waiters."""
        self.end(reason)
        self.stop()

    def removal(self) -> list[Delete]:
        """The operations that delete its stored state."""
        return self._writer.removal()

    async def flush(self) -> None:
        """Writes pending changes before a clean stop."""
        if self._writer.changed and self.ended is None:
            await self.save()


def _restore_key(keys: KeyOrder, block: Block, offset: int, key: bytes | None) -> None:
    at = offset % SIZE
    state = block.states[at]
    if state == WAITING and not block.attempts[at]:
        keys.delay(offset, key)
    elif state not in (DONE, DYING) and not keys.join(offset, key) and state == READY:
        block.put(at, HELD)
