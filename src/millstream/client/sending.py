"""Buffered sending: records gather per partition and leave together.

    send --> a partition's heap --count, bytes or time--> one batch --durable--> reported, in order

Rules
-----
1. `buffer_bytes_max` bounds the buffered records and those in flight together. When the buffer is full `send` waits
   or raises `BufferFull`, as asked; a record larger than the buffer goes alone.
2. Records of one partition keep their order. A batch leaves when it has `records_max` records or `bytes_max` bytes,
   when the next record would make it larger than that, or `linger` seconds after its first record.
3. Each record has its own result. `send` refuses an invalid record; a record that the broker refuses does not fail
   the others of its batch.
4. `flush` and `close` return when every record taken before is durable. Failed records are reported to `on_sent`, and
   the next `flush` or `close` raises `SendFailed`: nothing is lost silently. Exceptions of `on_sent` are logged, and
   change nothing: all failures of a batch are counted before the first report.
5. A cancelled `close` loses nothing; it can be called again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from millstream.client import partitioners
from millstream.client.arguments import check_partition, check_topic, checked
from millstream.client.closing import close_after
from millstream.client.partitioners import Partitioner
from millstream.client.records import Message, Sent
from millstream.core.clock import Timer
from millstream.core.errors import BufferFull, Closed, MillstreamError, SendFailed
from millstream.core.promise import Promise
from millstream.records.compression import Codec
from millstream.records.record import Headers

if TYPE_CHECKING:
    from millstream.client.api import Batch, Millstream, Row

RECORD_BYTES = 64
"""A record's size besides its key, value and headers."""
FAILURES_MAX = 100
"""Kept for `SendFailed`; the rest is only counted."""
OnSent = Callable[[Message, Sent | BaseException], None]

logger = logging.getLogger(__name__)


class Heap:
    """Records that wait for one partition."""

    __slots__ = ("batch", "bytes")

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.bytes = 0


class Sender:
    """Made by `Millstream.sender`."""

    def __init__(
        self,
        owner: Millstream,
        topic: str | None,
        *,
        records_max: int,
        bytes_max: int,
        linger: float,
        buffer_bytes_max: int,
        when_full: Literal["wait", "raise"],
        partitioner: Partitioner,
        codec: Codec,
        encode: Callable[[Any], bytes] | None,
        on_sent: OnSent | None,
    ) -> None:
        if when_full not in ("wait", "raise"):
            raise MillstreamError(f"when_full is wait or raise, not {when_full!r}")
        if min(records_max, bytes_max, buffer_bytes_max) < 1 or linger < 0:
            raise MillstreamError("the bounds of a sender are at least 1, and its linger is not negative")
        self.on_close: Callable[[Sender], None] = lambda sender: None
        self.is_closed = False
        self._owner = owner
        self._topic = topic
        self._records_max = records_max
        self._bytes_max = bytes_max
        self._linger = linger
        self._buffer_bytes_max = buffer_bytes_max
        self._when_full = when_full
        self._partitioner = partitioner
        self._codec = codec
        self._encode = encode
        self._on_sent = on_sent
        self._counts: dict[str, int] = {}
        self._alone: dict[str, int] = {}
        """The partition of topics with only one."""
        self._heaps: dict[tuple[str, int], Heap] = {}
        self._buffered = 0
        self._underway: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._timer: Timer | None = None
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._failures: list[tuple[object, BaseException]] = []
        self._failed = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await close_after(error, self.close())

    @property
    def buffered_bytes(self) -> int:
        """Bytes taken and not durable yet."""
        return self._buffered

    async def send(
        self,
        value: Any,
        *,
        topic: str | None = None,
        key: bytes | None = None,
        headers: Headers = (),
        partition: int | None = None,
        timestamp: int | None = None,
    ) -> None:
        """Takes a record; returns when it is buffered."""
        name = topic or self._topic
        if self.is_closed or name is None:
            raise Closed("the sender is closed") if self.is_closed else MillstreamError("name the record's topic")
        data = value if self._encode is None or value is None else self._encode(value)
        is_plain = type(data) is bytes and timestamp is None and headers == () and (key is None or type(key) is bytes)
        if not is_plain:
            timestamp, key, data, headers = checked(timestamp, key, data, headers)
        size = RECORD_BYTES if data is None else RECORD_BYTES + len(data)
        if key is not None:
            size += len(key)
        if headers:
            size += sum(3 * len(each) + len(content or b"") for each, content in headers)
        if partition is None:
            partition = self._alone.get(name)
            if partition is None:
                partition = partitioners.place(self._partitioner, key, await self._count(name))
        else:
            check_partition(partition)
            if name not in self._counts:
                await self._count(name)
        if self._buffered + size > self._buffer_bytes_max and self._buffered:
            await self._wait_for_room(size)  # no await between this and taking the record
        place = name, partition
        heap = self._heaps.get(place)
        if heap is not None and heap.bytes + size > self._bytes_max:
            self._leave(place)
            heap = None
        if heap is None:
            heap = self._open(name, partition)
        rows = heap.batch.rows
        rows.append((0, timestamp, key, data, headers))
        heap.bytes += size
        self._buffered += size
        if len(rows) >= self._records_max or heap.bytes >= self._bytes_max:
            self._leave(place)

    async def _count(self, topic: str) -> int:
        count = self._counts.get(topic)
        if count is None:
            check_topic(topic)
            count = self._counts[topic] = await self._owner.partition_count(topic)
            if count == 1 and isinstance(self._partitioner, partitioners.ByKey):
                self._alone[topic] = 0  # a single partition: no choice
        return count

    async def flush(self) -> None:
        """Returns when every record taken before is durable; raises `SendFailed` for the others."""
        for place in list(self._heaps):
            self._leave(place)
        if self._underway:  # the last batch of each partition waits for those before it
            await asyncio.wait(list(self._underway.values()))
        if self._failed:
            failures, count = self._failures, self._failed
            self._failures, self._failed = [], 0
            raise SendFailed(failures, count)

    async def close(self) -> None:
        """Takes nothing more, and flushes."""
        self.is_closed = True
        try:
            await self.flush()
        except SendFailed:
            self._end()
            raise
        self._end()

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.on_close(self)

    def _open(self, topic: str, partition: int) -> Heap:
        from millstream.client.api import Batch

        if self.is_closed:  # while this record waited for room
            raise Closed("the sender is closed")
        self._owner.check_open()
        heap = self._heaps[topic, partition] = Heap(Batch(topic, partition, []))
        if self._timer is None:
            self._timer = self._owner.clock.call_later(self._linger, self._time_is_over)
        return heap

    def _time_is_over(self) -> None:
        """One timer for all partitions: a batch leaves at most one linger after its first record."""
        self._timer = None
        for place in list(self._heaps):
            self._leave(place)

    async def _wait_for_room(self, size: int) -> None:
        if self._when_full == "raise":
            raise BufferFull(
                f"{self._buffered} of {self._buffer_bytes_max} bytes are buffered and {size} more do not fit"
            )
        while self._buffered and self._buffered + size > self._buffer_bytes_max:
            for place in list(self._heaps):
                self._leave(place)
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            try:
                await future
            finally:
                if future in self._waiting:
                    self._waiting.remove(future)

    def _leave(self, place: tuple[str, int]) -> None:
        """Hands a heap over, now: batches of one partition are appended in the order of these calls."""
        heap = self._heaps.pop(place)
        appended: Awaitable[Sequence[int | BaseException]]
        try:
            appended = self._owner.append_each(heap.batch, self._codec)
        except Exception as error:  # any error: only this code knows the records
            appended = Promise.failed(error)
        before = self._underway.get(place)
        task = asyncio.ensure_future(self._settle(heap, appended, before))
        self._underway[place] = task
        task.add_done_callback(lambda done: self._underway.pop(place) if self._underway.get(place) is done else None)

    async def _settle(
        self, heap: Heap, appended: Awaitable[Sequence[int | BaseException]], before: asyncio.Task[None] | None
    ) -> None:
        results: Sequence[int | BaseException]
        try:
            results = await appended
        except Exception as error:
            results = [error] * len(heap.batch.rows)
        if before is not None and not before.done():
            await asyncio.wait([before])  # results are reported in order, too
        self._buffered -= heap.bytes
        waiting, self._waiting = self._waiting, deque()
        for future in waiting:
            if not future.done():
                future.set_result(None)
        if type(results) is not range:  # else all are stored
            self._count_failures(heap.batch, results)
        if self._on_sent is not None:
            self._tell(self._on_sent, heap.batch, results)

    def _count_failures(self, batch: Batch, results: Sequence[int | BaseException]) -> None:
        for row, result in zip(batch.rows, results, strict=True):
            if isinstance(result, BaseException):
                self._counts.pop(batch.topic, None)  # the topic may have changed
                self._alone.pop(batch.topic, None)
                self._failed += 1
                if len(self._failures) < FAILURES_MAX:
                    self._failures.append((_message(batch, row), result))

    def _tell(self, on_sent: OnSent, batch: Batch, results: Sequence[int | BaseException]) -> None:
        raised = 0
        for row, result in zip(batch.rows, results, strict=True):
            sent = result if isinstance(result, BaseException) else Sent(batch.topic, batch.partition, result)
            try:
                on_sent(_message(batch, row), sent)
            except Exception:
                raised += 1
                if raised == 1:
                    logger.exception("on_sent failed")
        if raised > 1:
            logger.error("on_sent failed for %d records of a batch of %d", raised, len(batch.rows))


def _message(batch: Batch, row: Row) -> Message:
    _, timestamp, key, value, headers = row
    return Message(batch.topic, value, key, headers, batch.partition, timestamp)
