"""`memory:`: logs that live as long as the process. For tests, and for brokers that leave no trace."""

from __future__ import annotations

import contextlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator

from millstream.core.callbacks import tell
from millstream.core.clock import Clock
from millstream.core.errors import Code, Diverged, RequestError
from millstream.core.promise import Promise, begin
from millstream.log.age_mark import AgeMark
from millstream.log.answers import Appended, TimedOffset
from millstream.log.config import LogConfig
from millstream.log.damage import Damage, DamagedRange
from millstream.log.epochs import Epochs
from millstream.log.producers import Producers
from millstream.log.slice import Slice
from millstream.records import codec
from millstream.records.aside import Aside
from millstream.records.batch import NO_PRODUCER, BatchHeader, patch_offset, read_header
from millstream.records.run import BatchRun, split
from millstream.stores.base import MetaStore


class MemoryLog:
    """Implements `stores.base.PartitionLog`: one bytes object per batch."""

    __slots__ = (
        "_batches", "_clock", "_last_offsets", "_mark", "_store", "_wakers", "closed", "config", "counted", "damage",
        "end", "epochs", "failure", "high_watermark", "producers", "start", "unsynced_bytes",
    )  # fmt: skip

    def __init__(self, config: LogConfig, clock: Clock, store: MemoryLogStore) -> None:
        self._store = store
        self.config = config
        self.failure: str | None = None
        self.damage = Damage("a log in memory")
        self.closed = False
        self.start = self.high_watermark = self.counted = self.end = self.unsynced_bytes = 0
        self.epochs = Epochs()
        self._clock = clock
        self._batches: list[bytes] = []
        self._last_offsets: list[int] = []
        self._mark = AgeMark()
        self.producers = Producers()
        self._wakers: dict[Callable[[], None], None] = {}

    @property
    def stable(self) -> int:
        """The high watermark: no transaction is open."""
        return self.high_watermark

    def append(self, batch: memoryview, header: BatchHeader) -> Promise[Appended]:
        if self._store.bundle is not None:
            waiting: Promise[Appended] = Promise()
            self._store.bundle.append((self, bytearray(batch), header, waiting))
            return waiting
        answer = self.append_unseen(batch, header)
        self.tell_readers()
        return answer

    def append_unseen(self, batch: memoryview, header: BatchHeader) -> Promise[Appended]:
        """Appends without waking readers."""
        if self.closed:
            return Promise.failed(RequestError(Code.UNKNOWN_TOPIC_OR_PARTITION, "the log is closed"))
        if header.producer_id != NO_PRODUCER:
            try:
                repeated = self.producers.find_repeat(header)
            except RequestError as error:
                return Promise.failed(error)
            if repeated is not None:
                return Promise.of(Appended(repeated, self.start, True))
        patch_offset(batch, self.end, header.length, self.epochs.latest)
        return self._add(batch, header, self.end)

    def _add(self, batch: memoryview, header: BatchHeader, base: int) -> Promise[Appended]:
        self._batches.append(bytes(batch))
        self.end = self.counted = self.high_watermark = base + header.last_offset_delta + 1
        self._last_offsets.append(self.end - 1)
        self.producers.note(header, base, self._clock.now_ms())
        return Promise.of(Appended(base, self.start))

    def tell_readers(self) -> None:
        for waker in list(self._wakers):
            tell(waker)

    def undo_to(self, end: int, producers: Producers) -> None:
        """Takes back appends that no reader has seen."""
        keep = bisect_left(self._last_offsets, end)
        del self._batches[keep:], self._last_offsets[keep:]
        self.end = self.counted = self.high_watermark = end
        self.producers = producers

    def lead(self, epoch: int) -> None:
        self.epochs.begin(epoch, self.end)

    def follow(self, batch: memoryview, header: BatchHeader) -> Promise[Appended]:
        base = header.base_offset
        if base >= self.end and header.leader_epoch >= self.epochs.latest:
            self.epochs.begin(header.leader_epoch, base)
            answer = self._add(batch, header, base)
            self.tell_readers()
            return answer
        at = bisect_left(self._last_offsets, base)
        if base < self.end and at < len(self._batches) and read_header(self._batches[at])[:5] == header[:5]:
            return Promise.of(Appended(base, self.start, True))
        return Promise.failed(Diverged(f"the log has another batch at offset {base}"))

    def append_run(self, run: BatchRun) -> Promise[Appended]:
        answers = [self.append(batch, header) for batch, header in split(run.data)]
        return answers[0]

    def read(self, offset: int, bytes_max: int, below: int | None = None) -> Promise[Slice]:
        if offset < self.start or offset > self.end:
            detail = f"the log holds offsets {self.start} to {self.end}, not {offset}"
            return Promise.failed(RequestError(Code.OFFSET_OUT_OF_RANGE, detail))
        at = bisect_left(self._last_offsets, offset)
        stop = len(self._batches) if below is None else bisect_left(self._last_offsets, below)
        taken: list[bytes] = []
        size, next_offset = 0, offset
        while at < stop and (not taken or size + len(self._batches[at]) <= bytes_max):
            taken.append(self._batches[at])
            size += len(self._batches[at])
            next_offset = self._last_offsets[at] + 1
            at += 1
        return Promise.of(Slice(size, next_offset, data=taken[0] if len(taken) == 1 else b"".join(taken)))

    def inspect(self, offset: int) -> Promise[DamagedRange | None]:
        return Promise.of(None)  # memory is never damaged

    def find_time(self, timestamp: int) -> Promise[TimedOffset | None]:
        return begin(self._find_time(timestamp))

    async def _find_time(self, timestamp: int) -> TimedOffset | None:
        aside = Aside()
        for batch in list(self._batches):
            if read_header(batch).max_timestamp < timestamp:
                continue
            found = await aside.run(codec.find_time, batch, timestamp, self.start)
            if found is not None:
                return TimedOffset(*found)
        return None

    def find_max_time(self) -> Promise[TimedOffset | None]:
        return begin(self._find_max_time())

    async def _find_max_time(self) -> TimedOffset | None:
        newest = -1
        for batch in list(self._batches):
            newest = max(newest, await self._newest_time(batch))
        return await self._find_time(newest) if newest >= 0 else None

    async def _newest_time(self, batch: bytes) -> int:
        """Without trimmed records."""
        header = read_header(batch)
        if header.base_offset >= self.start:
            return header.max_timestamp
        return await Aside().run(codec.newest_time, batch, self.start)

    def trim(self, offset: int) -> Promise[int]:
        if offset > self.high_watermark or offset < 0:
            detail = f"the log ends at {self.high_watermark}; it cannot be trimmed to {offset}"
            return Promise.failed(RequestError(Code.OFFSET_OUT_OF_RANGE, detail))
        if offset > self.start:
            self.start = offset
            self.epochs.cut_below(offset)
            gone = bisect_left(self._last_offsets, offset)
            del self._batches[:gone], self._last_offsets[:gone]
        return Promise.of(self.start)

    def truncate(self, offset: int) -> Promise[int]:
        keep = bisect_right(self._last_offsets, offset - 1)
        del self._batches[keep:], self._last_offsets[keep:]
        if offset < self.end:
            self.end = self._last_offsets[-1] + 1 if self._last_offsets else self.start
            self.counted = self.high_watermark = self.end
            self.epochs.cut_from(self.end)
            self.producers.forget_from(self.end)
        return Promise.of(self.end)

    def flush(self) -> Promise[None]:
        return Promise.of(None)

    def wake(self, callback: Callable[[], None]) -> Callable[[], None]:
        self._wakers[callback] = None
        return lambda: self._wakers.pop(callback, None)

    def size_bytes(self) -> int:
        return sum(map(len, self._batches))

    def refresh(self) -> Promise[None]:
        return Promise.of(None)

    def known_producers(self) -> Promise[Producers]:
        return Promise.of(self.producers)

    def abandon(self) -> None:
        """The topic is deleted: wakes waiting readers and refuses further appends."""
        self.closed = True
        self.tell_readers()

    def expire(self) -> None:
        """Retention by age and size, batch by batch."""
        now = self._clock.now_ms()
        oldest = now - self.config.retention_ms
        old_below = self._mark.old_below(self.end, now, self.config.retention_ms)
        size, gone = self.size_bytes(), 0
        for number, batch in enumerate(self._batches if self.config.delete else (), 1):
            newest = read_header(batch).max_timestamp
            arrived_early = newest > now and self._last_offsets[number - 1] < old_below
            too_old = self.config.retention_ms >= 0 and (newest < oldest or arrived_early)
            too_much = 0 <= self.config.retention_bytes < size
            if not (too_old or too_much):
                break
            size -= len(batch)
            if newest >= 0 or too_much:  # without a timestamp: as old as the next with one
                gone = number
        if gone:
            self.trim(self._last_offsets[gone - 1] + 1)


class MemoryLogStore:
    atomic = True
    tells_loss = False
    can_follow = True

    def __init__(self, clock: Clock) -> None:
        self.location = "memory"
        self._clock = clock
        self._logs: dict[tuple[str, int], MemoryLog] = {}
        self.bundle: list[tuple[MemoryLog, bytearray, BatchHeader, Promise[Appended]]] | None = None
        """The appends that `together` has gathered."""

    async def start(self) -> None:
        return None

    async def match(self, meta: MetaStore) -> None:
        return None

    def prepare(self, topic_id: str, partitions: int) -> Promise[None]:
        return Promise.of(None)

    async def create(self, topic: str, topic_id: str, partitions: range) -> None:
        return None

    def open(self, topic: str, topic_id: str, partition: int, config: LogConfig, created: bool = False) -> MemoryLog:
        return self._logs.setdefault((topic_id, partition), MemoryLog(config, self._clock, self))

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        self.bundle = []
        refusal: Exception | None = None
        try:
            yield
        except BaseException:
            refusal = RequestError(Code.OPERATION_NOT_ATTEMPTED)
            raise
        finally:
            bundle, self.bundle = self.bundle, None
            refusal = refusal or self._append_all(bundle)
            if refusal is not None:
                for *_, waiting in bundle:
                    waiting.fail(refusal)

    def _append_all(
        self, bundle: list[tuple[MemoryLog, bytearray, BatchHeader, Promise[Appended]]]
    ) -> Exception | None:
        """Stores all appends of a bundle, or none and returns the first refusal."""
        before: dict[MemoryLog, tuple[int, Producers]] = {}
        answers: list[Promise[Appended]] = []
        for log, batch, header, _ in bundle:
            before.setdefault(log, (log.end, Producers.from_state(log.producers.to_state())))
            answers.append(log.append_unseen(memoryview(batch), header))
            if isinstance(answers[-1].error, Exception):
                for each, state in before.items():
                    each.undo_to(*state)
                return answers[-1].error
        for log in before:
            log.tell_readers()
        for (*_, waiting), answer in zip(bundle, answers, strict=True):
            waiting.settle(answer.value())
        return None

    def opened_all(self) -> None:
        return None

    def room(self) -> tuple[int, int]:
        return -1, -1

    async def discard(self, topic: str, topic_id: str) -> None:
        for key in [key for key in self._logs if key[0] == topic_id]:
            self._logs.pop(key).abandon()

    async def housekeep(self) -> None:
        for log in self._logs.values():
            log.expire()

    async def close(self) -> None:
        return None
