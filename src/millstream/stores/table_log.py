"""One partition in a database: its cached state, and access to its rows.

    start     high_watermark = end
      |---- readers ----|-- in flight to the database --

Rules
-----
1. A committed batch is durable and readable: `high_watermark`, `counted` and `end` are one number. It follows the
   database and never leads it.
2. The cached state may be stale: other brokers append, and news takes time. So the log asks the database before it
   refuses an offset beyond the end.
3. News arrives by several ways and may overtake; the larger version of a state is newer.
4. Appends of one log are answered in order, because they are sent in one order (`group_commit.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from millstream.core.callbacks import tell
from millstream.core.errors import Code, LogReadOnly, RequestError
from millstream.core.promise import Promise, promised
from millstream.log.age_mark import AgeMark
from millstream.log.answers import Appended, TimedOffset
from millstream.log.config import LogConfig
from millstream.log.damage import Cause, Damage, DamagedOffset, DamagedRange
from millstream.log.epochs import Epochs
from millstream.log.producers import Producers
from millstream.log.slice import Slice
from millstream.records import codec
from millstream.records.aside import Aside
from millstream.records.batch import BatchHeader, CorruptBatch, read_header
from millstream.records.run import BatchRun, split
from millstream.stores.database import Append, LogState, Stored

if TYPE_CHECKING:
    from millstream.stores.table_store import TableLogStore

EXPIRE_ROWS = 500
"""How many batches retention reads and deletes at a time."""
CHECK_BYTES_MAX = 1 << 20
"""Larger reads are checked in a thread. A megabyte takes the event loop 0.1 ms, or 8 ms in the smallest batches."""
DAMAGE_ROWS = 500
"""How many batches the search for a damaged one reads at a time."""


class Waiting:
    """An append in flight."""

    __slots__ = ("append", "log", "promise", "size")

    def __init__(self, log: TableLog, append: Append, size: int) -> None:
        self.log = log
        self.append = append
        self.size = size
        self.promise: Promise[Appended] = Promise()


class TableLog:
    """Implements `stores.base.PartitionLog`."""

    __slots__ = (
        "_flushes", "_mark", "_state", "_store", "_wakers", "closed", "config", "counted", "damage", "end", "epochs",
        "high_watermark", "id", "name", "start", "unsynced_bytes",
    )  # fmt: skip

    def __init__(self, name: str, state: LogState, config: LogConfig, store: TableLogStore) -> None:
        self.name = name
        self.damage = Damage(name)
        self.epochs = Epochs()
        self.id = state.id
        self.config = config
        self.closed = False
        self.unsynced_bytes = 0
        self._state = state
        self.start = state.start
        self.high_watermark = self.counted = self.end = state.end
        self._store = store
        self._wakers: dict[Callable[[], None], None] = {}
        self._flushes: list[Promise[None]] = []
        self._mark = AgeMark()

    @property
    def failure(self) -> str | None:
        return self._store.database.failure

    @property
    def stable(self) -> int:
        """The high watermark: no transaction is open."""
        return self.high_watermark

    # -- appending ---------------------------------------------------------------------------------------------------

    def append(self, batch: memoryview, header: BatchHeader) -> Promise[Appended]:
        return self._append([bytearray(batch)], [header], len(batch))

    def append_run(self, run: BatchRun) -> Promise[Appended]:
        pieces = list(split(run.data))
        batches = [bytearray(batch) for batch, _ in pieces]
        return self._append(batches, [header for _, header in pieces], len(run.data))

    def lead(self, epoch: int) -> None:
        """Does nothing: the database assigns offsets, so any broker may append, and there is one epoch."""

    def follow(self, batch: memoryview, header: BatchHeader) -> Promise[Appended]:
        detail = f"{self.name} cannot be a replica: its database holds the only copy"
        return Promise.failed(RequestError(Code.INVALID_REQUEST, detail))

    def _append(self, batches: list[bytearray], headers: list[BatchHeader], size: int) -> Promise[Appended]:
        refusal = self._refusal()
        if refusal is None and not self._store.has_room(size):
            refusal = RequestError(Code.KAFKA_STORAGE_ERROR, "too many bytes wait for the database")
        if refusal is not None:
            self._store.refused(refusal)
            return Promise.failed(refusal)
        waiting = Waiting(self, Append(self.id, batches, headers, self.epochs.latest), size)
        self.unsynced_bytes += size
        self._store.put(waiting)
        return waiting.promise

    def _refusal(self) -> RequestError | None:
        if self.closed:
            return RequestError(Code.UNKNOWN_TOPIC_OR_PARTITION, f"{self.name} was deleted")
        failure = self.failure
        return LogReadOnly(self.name, failure) if failure is not None else None

    def landed(self, waiting: Waiting, outcome: Stored | RequestError) -> None:
        """Answers an append; its change is already learned."""
        self.unsynced_bytes -= waiting.size
        if isinstance(outcome, RequestError):
            waiting.promise.fail(outcome)
        else:
            waiting.promise.settle(Appended(outcome.base_offset, self.start, outcome.duplicate))
        if self.unsynced_bytes == 0 and self._flushes:
            flushes, self._flushes = self._flushes, []
            for flush in flushes:
                flush.settle(None)

    def flush(self) -> Promise[None]:
        done: Promise[None] = Promise()
        if self.unsynced_bytes == 0:
            done.settle(None)
        else:
            self._flushes.append(done)
        return done

    # -- news --------------------------------------------------------------------------------------------------------

    def learn(self, state: LogState) -> None:
        if state.version <= self._state.version:
            return
        grown = state.end > self.high_watermark
        self._state = state
        self.start = state.start
        self.high_watermark = self.counted = self.end = state.end
        if self.damage.ranges:
            self.damage.forget(self.start, self.end)
        if grown and self._wakers:
            self._wake()

    def refresh(self) -> Promise[None]:
        return promised(self._refresh())

    async def _refresh(self) -> None:
        states = await self._store.database.states([self.id])
        if not states:
            raise RequestError(Code.UNKNOWN_TOPIC_OR_PARTITION, f"{self.name} was deleted")
        self.learn(states[0])

    def wake(self, callback: Callable[[], None]) -> Callable[[], None]:
        self._wakers[callback] = None
        return lambda: self._wakers.pop(callback, None)

    def _wake(self) -> None:
        for waker in list(self._wakers):
            tell(waker)

    def abandon(self) -> None:
        """The topic is deleted: wakes waiting readers and refuses further appends."""
        self.closed = True
        self._wake()

    def size_bytes(self) -> int:
        return self._state.size_bytes

    # -- reading -----------------------------------------------------------------------------------------------------

    def read(self, offset: int, bytes_max: int, below: int | None = None) -> Promise[Slice]:
        if offset == self.high_watermark or (
            below is not None and max(below, self.start) <= offset < self.high_watermark
        ):
            return Promise.of(Slice(0, offset))
        if offset < self.start:
            return Promise.failed(self._out_of_range(offset))
        return promised(self._read(offset, bytes_max, below))

    async def _read(self, offset: int, bytes_max: int, below: int | None = None) -> Slice:
        if offset > self.high_watermark:
            await self._refresh()
            if not self.start <= offset <= self.high_watermark:
                raise self._out_of_range(offset)
        below = self.high_watermark if below is None else min(below, self.high_watermark)
        if self.damage.ranges:
            self.damage.check(offset)
            damaged = self.damage.behind(offset)
            below = min(below, damaged.first) if damaged is not None else below
        data, next_offset = await self._store.database.read(self.id, offset, below, bytes_max)
        if not data and offset < self.start:  # trimmed meanwhile
            raise self._out_of_range(offset)
        sound = await _sound_bytes(data, next_offset, offset)
        if sound < len(data):
            await self._refresh()  # another broker may have trimmed the batch that holds the offset
            if offset < self.start:
                raise self._out_of_range(offset)
            data, next_offset = data[:sound], await self._note_damage(offset, sound)
            self.damage.check(offset)
        return Slice(len(data), next_offset, data=data)

    async def _note_damage(self, offset: int, sound: int) -> int:
        """Registers the batch after `sound` bytes of a read; answers with its first offset."""
        while rows := await self._store.database.rows(self.id, offset, DAMAGE_ROWS):
            for row in rows:
                if row.size > sound:
                    first = max(row.base_offset, self.start)
                    where = f"the batch at offset {row.base_offset} in {self._store.location}"
                    self.damage.add(first, row.last_offset + 1, Cause.CHECKSUM, where)
                    return first
                sound -= row.size
            offset = rows[-1].last_offset + 1
        raise CorruptBatch(f"{self.name} cannot be read at offset {offset}: its rows changed during the read")

    def inspect(self, offset: int) -> Promise[DamagedRange | None]:
        return promised(self._inspect(offset))

    async def _inspect(self, offset: int) -> DamagedRange | None:
        known = self.damage.at(offset)
        if known is not None:
            data, next_offset = await self._store.database.read(self.id, offset, known.end, 1)
            if not data or await _sound_bytes(data, next_offset, offset) < len(data):
                return known
            self.damage.heal(offset, next_offset)
        try:
            await self._read(offset, 1)
        except DamagedOffset as error:
            return error.range
        return None

    def _out_of_range(self, offset: int) -> RequestError:
        detail = f"{self.name} holds offsets {self.start} to {self.end}, not {offset}"
        return RequestError(Code.OFFSET_OUT_OF_RANGE, detail)

    def find_time(self, timestamp: int) -> Promise[TimedOffset | None]:
        return promised(self._find_time(timestamp))

    async def _find_time(self, timestamp: int) -> TimedOffset | None:
        at, aside = self.start, Aside()
        while True:
            batch = await self._store.database.first_at(self.id, timestamp, at, self.high_watermark)
            if batch is None:
                return None
            found = await aside.run(codec.find_time, batch, timestamp, self.start)
            if found is not None:
                return TimedOffset(*found)
            # Only its trimmed records are as new: the batch spans the start.
            at = read_header(batch).next_offset

    def find_max_time(self) -> Promise[TimedOffset | None]:
        return promised(self._find_max_time())

    async def _find_max_time(self) -> TimedOffset | None:
        start = self.start
        newest = await self._store.database.newest_time(self.id, start, self.high_watermark)
        for row in await self._store.database.rows(self.id, start, 1):
            if row.base_offset < start and row.max_timestamp > newest:
                data, _ = await self._store.database.read(self.id, start, row.last_offset + 1, 0)
                newest = max(newest, await Aside().run(codec.newest_time, data, start))
        return await self._find_time(newest) if newest >= 0 else None

    def known_producers(self) -> Promise[Producers]:
        return promised(self._store.database.producers(self.id))

    # -- shrinking ---------------------------------------------------------------------------------------------------

    def trim(self, offset: int) -> Promise[int]:
        return promised(self._trim(offset))

    async def _trim(self, offset: int) -> int:
        if offset > self.high_watermark:
            await self._refresh()
        if offset > self.high_watermark or offset < 0:
            detail = f"{self.name} ends at {self.high_watermark}; it cannot be trimmed to {offset}"
            raise RequestError(Code.OFFSET_OUT_OF_RANGE, detail)
        if offset > self.start:
            self.learn(await self._store.database.trim(self.id, offset))
        return self.start

    def truncate(self, offset: int) -> Promise[int]:
        return promised(self._truncate(offset))

    async def _truncate(self, offset: int) -> int:
        if self.unsynced_bytes:
            raise RequestError(Code.INVALID_REQUEST, f"{self.name} has appends in flight")
        if offset < self.end:
            self.learn(await self._store.database.truncate(self.id, offset))
        return self.end

    async def expire(self, now_ms: int) -> None:
        """Retention by age and size: whole batches, oldest first, in steps."""
        config = self.config
        if self.closed or not config.delete or (config.retention_ms < 0 and config.retention_bytes < 0):
            return
        # Batches below the start count in the size until their deletion, so retention by size reads them too. Rows come
        # first: if the size did, a batch deleted in between would be counted and not seen.
        by_size = config.retention_bytes >= 0
        old_below = self._mark.old_below(self.end, now_ms, config.retention_ms)
        count = 1  # mostly the oldest batch stays, and with it the rest
        while self.size_bytes():
            rows = await self._store.database.rows(self.id, 0 if by_size else self.start, count)
            if by_size:
                await self._refresh()
            size, start = self.size_bytes(), self.start
            keep_from, is_done = start, len(rows) < count
            for row in rows:
                arrived_early = row.max_timestamp > now_ms and row.last_offset < old_below
                is_old = row.max_timestamp < now_ms - config.retention_ms
                too_old = config.retention_ms >= 0 and (is_old or arrived_early)
                too_much = 0 <= config.retention_bytes <= size - row.size
                if row.last_offset >= start and not (too_old or too_much):
                    is_done = True
                    break
                size -= row.size
                if row.max_timestamp >= 0 or too_much:  # without a timestamp: as old as the next with one
                    keep_from = max(keep_from, row.last_offset + 1)
            if keep_from > start or (rows and rows[0].last_offset < start):
                self.learn(await self._store.database.trim(self.id, keep_from))
            elif count == EXPIRE_ROWS:  # all lack a timestamp
                return
            if is_done:
                return
            count = EXPIRE_ROWS


async def _sound_bytes(data: bytes, behind: int, asked: int) -> int:
    """How many leading bytes of a read are sound. No offset may be missing: databases are not compacted."""
    if len(data) <= CHECK_BYTES_MAX:
        return codec.sound_bytes(data, 0, behind, asked, dense=True)
    return await asyncio.to_thread(codec.sound_bytes, data, 0, behind, asked, dense=True)
