"""Reading a partition of an embedded broker: positions, batches, records."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Generic, TypeVar

from millstream.broker.batches import decode, read_batches
from millstream.broker.session import Session, Topic
from millstream.client.iterators import Reading, ReadOptions
from millstream.client.records import Record, user_record
from millstream.client.signal import Signal
from millstream.core.errors import Code, OutOfRange, RequestError, UnknownTopic, refusal
from millstream.records.aside import Aside
from millstream.records.batch import BatchHeader
from millstream.records.record import Record as StoredRecord
from millstream.security.rights import Kind, Operation

if TYPE_CHECKING:
    from millstream.client.embedded import Embedded

V = TypeVar("V")
READ_BYTES = 256 * 1024
"""Per read, from one partition. One batch is decoded at a time."""


class Cursor(Generic[V]):
    """A position in one partition, and the records of the batch there."""

    __slots__ = (
        "_aside", "_at", "_batches", "_records", "_session", "given", "log", "next", "place", "processed", "topic",
    )  # fmt: skip

    def __init__(self, session: Session, topic: Topic, index: int, offset: int) -> None:
        self._session = session
        self.topic = topic
        self.place = topic.name, index
        self.log = topic.partitions[index].log
        self.next = offset
        """The first offset not yet given to the caller."""
        self.given = -1
        """The last offset given to the caller, perhaps not processed yet."""
        self.processed = offset
        self._batches: Iterator[tuple[BatchHeader, memoryview]] = iter(())
        self._records: list[StoredRecord] = []
        self._at = 0
        self._aside = Aside()

    @property
    def has_more(self) -> bool:
        return self._at < len(self._records) or self.next < self.log.high_watermark or self.log.damage.lost is not None

    @property
    def is_inside_batch(self) -> bool:
        return self._at < len(self._records)

    def check(self) -> None:
        self._check_lost()
        if not self._session.has(self.topic):
            raise UnknownTopic(Code.UNKNOWN_TOPIC_OR_PARTITION, f"there is no topic {self.topic.name} any more")
        if self.log.failure is not None:
            raise refusal(Code.KAFKA_STORAGE_ERROR, f"{self.place[0]}-{self.place[1]} failed: {self.log.failure}")

    def _check_lost(self) -> None:
        if self.log.damage.lost is not None:
            raise refusal(self.log.damage.lost.code, self.log.damage.lost.detail)

    def take(self) -> StoredRecord | None:
        """The next record of the current batch."""
        if self._at == len(self._records):
            return None
        record = self._records[self._at]
        self._at += 1
        self.given = record.offset
        self.next = record.offset + 1
        return record

    def left(self) -> list[StoredRecord]:
        """The records of the current batch not yet given."""
        return self._records[self._at :] if self._at else self._records

    def went(self, offset: int) -> None:
        """Marks the next record as given."""
        self._at += 1
        self.given = offset
        self.next = offset + 1

    async def load(self, limit: int | None = None) -> bool:
        """Decodes the next batch, and reads if needed; False at the end."""
        self._check_lost()
        while True:
            batches = self._batches
            for header, batch in batches:
                if header.last_offset < self.next:
                    continue
                if header.is_control:
                    self.next = header.next_offset
                    continue
                records = await self._decode(header, batch)
                if self._batches is not batches:  # a seek happened during the read
                    break
                if header.base_offset < self.next:
                    records = [record for record in records if record.offset >= self.next]
                if records:
                    self._records, self._at = records, 0
                    return True
                self.next = header.next_offset
            if self.next >= self.log.high_watermark or (limit is not None and self.next >= limit):
                return False
            self._batches = iter(await self._read())

    async def _read(self) -> list[tuple[BatchHeader, memoryview]]:
        try:
            self._session.check(Operation.READ, Kind.TOPIC, self.topic.name)
            sound, next_offset = await read_batches(self.log, self.next, READ_BYTES)
        except RequestError as error:
            raise refusal(error.code, error.detail) from None
        if not sound:
            self.next = max(self.next, next_offset)
        return sound

    async def _decode(self, header: BatchHeader, batch: memoryview) -> list[StoredRecord]:
        try:
            return await decode(header, batch, self._aside)
        except RequestError as error:
            self._batches = iter(())  # the next call finds the same batch
            raise refusal(error.code, f"{self.place[0]}-{self.place[1]}: {error.detail}") from None

    def seek(self, offset: int) -> None:
        self._batches = iter(())
        self._records, self._at = [], 0
        self.next = self.processed = offset


class Rotation(Generic[V]):
    """Takes records from the cursors of one member, a batch from each in turn."""

    def __init__(self, may_take: Callable[[Cursor[V]], bool], skip: Callable[[Cursor[V], OutOfRange], None]) -> None:
        """`may_take` is asked again after a read; `skip` moves a cursor, or raises the error."""
        self._may_take = may_take
        self._skip = skip
        self._turn = 0
        self._last: Cursor[V] | None = None

    async def take(self, cursors: Iterable[Cursor[V]]) -> tuple[Cursor[V], StoredRecord] | None:
        last = self._last
        if last is not None and self._may_take(last) and (found := last.take()) is not None:
            return last, found
        ring = list(cursors)
        for at in [(self._turn + step) % len(ring) for step in range(len(ring))]:
            cursor = ring[at]
            if not self._may_take(cursor):
                continue
            found = cursor.take()
            if found is None and cursor.has_more:
                try:
                    await cursor.load()
                except OutOfRange as error:
                    self._skip(cursor, error)
                except RequestError:  # the next call serves the other partitions
                    self._turn = at + 1
                    raise
                if not self._may_take(cursor):
                    continue
                found = cursor.take()
            if found is not None:
                self._turn, self._last = at + 1, cursor
                return cursor, found
        return None


class EmbeddedReading(Reading[V]):
    _owner: Embedded

    def __init__(self, owner: Embedded, options: ReadOptions) -> None:
        super().__init__(owner, options)
        self._cursor: Cursor[V] | None = None
        self._signal = Signal(owner.clock)
        self._unwake: Callable[[], None] | None = None

    async def _start(self) -> None:
        session = self._owner.session
        try:
            topic = session.find(self._topic, Operation.READ)
            if topic is None or self._partition >= topic.partition_count:
                topic = await session.follow(self._topic, Operation.READ)
            log = session.partition(self._topic, self._partition, Operation.READ).log
            await log.refresh()
        except RequestError as error:
            raise refusal(error.code, error.detail) from None
        assert topic is not None
        offset = self._offset
        if self._time is not None:
            found = await log.find_time(self._time)
            offset = log.high_watermark if found is None else found.offset
        elif offset == "start":
            offset = log.start
        elif offset == "end":
            offset = log.high_watermark
        assert isinstance(offset, int)
        if not log.start <= offset <= log.high_watermark:
            detail = f"{self._topic}-{self._partition} holds offsets {log.start} to {log.high_watermark}, not {offset}"
            raise OutOfRange(Code.OFFSET_OUT_OF_RANGE, detail)
        self._limit = None if self._follow else log.high_watermark
        self._cursor = Cursor(session, topic, self._partition, offset)
        self._unwake = log.wake(self._signal.set)

    async def __aiter__(self) -> AsyncGenerator[Record[V], None]:
        """The loop of `Consuming`, with fewer steps per record."""
        try:
            while not self.is_closed:
                first = await self.receive()
                if first is None:
                    return
                yield first
                cursor = self._cursor
                assert cursor is not None
                topic, index = cursor.place
                if self._decode is not None or self._limit is not None:
                    continue
                for offset, timestamp, key, value, headers in cursor.left():
                    if offset < cursor.next:
                        break  # another task used this reading in the meantime
                    cursor.went(offset)
                    yield Record(topic, index, offset, timestamp, key, value, headers)  # type: ignore[arg-type]
                    if self.is_closed:
                        return
        finally:
            if not self._is_held:
                await self.close(clean=False)

    async def _next(self, timeout: float | None) -> Record[V] | None:
        cursor = self._cursor
        assert cursor is not None
        while not self.is_closed:
            if self._limit is not None and cursor.next >= self._limit:
                self.is_over = True
                return None
            found = cursor.take()
            if found is not None:
                return user_record(self._topic, self._partition, found, self._decode)
            if await cursor.load(self._limit):
                continue
            if self._limit is not None and cursor.next >= self._limit:
                continue
            cursor.check()
            if self.is_closed or not await self._signal.wait(timeout):
                return None
        return None

    async def _shut(self, clean: bool) -> None:
        if self._unwake is not None:
            self._unwake()
        self._signal.set()
