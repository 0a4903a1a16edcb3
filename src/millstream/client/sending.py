"""Buffered sending: records gather per partition and leave together.

    send --> a partition's heap --count, bytes or time--> one batch --durable--> answered, in order

Rules
-----
1. What is buffered and what is on its way are bounded together, by `buffer_bytes_max`. When that is full `send` waits
   or raises `BufferFull`, as asked; a record larger than the buffer goes alone.
2. Records of one partition keep their order. A batch leaves when it has `records_max` records or `bytes_max` bytes, or
   `linger` seconds after its first record came.
3. `flush` and `close` return when everything taken before is durable. What could not be stored is told to `on_sent`,
   and the next `flush` or `close` raises `SendFailed`: nothing is lost silently.
4. A `close` that is cancelled has lost nothing either; it can be called again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from millstream.client import partitioners
from millstream.client.partitioners import Partitioner
from millstream.client.records import Message, Sent
from millstream.clock import Timer
from millstream.errors import BufferFull, Closed, MillstreamError, SendFailed
from millstream.records.compression import Codec
from millstream.records.record import Headers

if TYPE_CHECKING:
    from millstream.client.api import Batch, Millstream

RECORD_BYTES = 64
"""What a record takes besides its key, value and headers."""
FAILURES_MAX = 100
"""Kept for `SendFailed`; the others are counted."""


class Heap:
    """What waits for one partition."""

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
        on_sent: Callable[[Message, Sent | BaseException], None] | None,
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
        """The partition of topics that have only one."""
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
        await self.close()

    @property
    def buffered_bytes(self) -> int:
        """Taken and not durable yet."""
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
        if type(data) is not bytes and data is not None:
            data = _bytes(data)
        size = RECORD_BYTES if data is None else RECORD_BYTES + len(data)
        if key is not None:
            size += len(key)
        if headers:
            size += sum(len(each) + len(content or b"") for each, content in headers)
        if self._buffered + size > self._buffer_bytes_max and self._buffered:
            await self._wait_for_room(size)
        if partition is None:
            partition = self._alone.get(name)
            if partition is None:
                partition = await self._place(name, key)
        place = name, partition
        heap = self._heaps.get(place)
        if heap is None:
            heap = self._open(name, partition)
        rows = heap.batch.rows
        rows.append((0, timestamp, key, data, headers))
        heap.bytes += size
        self._buffered += size
        if len(rows) >= self._records_max or heap.bytes >= self._bytes_max:
            self._leave(place)

    async def _place(self, topic: str, key: bytes | None) -> int:
        count = self._counts.get(topic)
        if count is None:
            count = self._counts[topic] = await self._owner.partition_count(topic)
            if count == 1 and isinstance(self._partitioner, partitioners.ByKey):
                self._alone[topic] = 0  # there is nothing to choose
        return partitioners.place(self._partitioner, key, count)

    async def flush(self) -> None:
        """Returns when all that was taken before is durable; raises `SendFailed` for what is not."""
        for place in list(self._heaps):
            self._leave(place)
        while self._underway:
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
            self.on_close(self)
            raise
        self.on_close(self)

    def _open(self, topic: str, partition: int) -> Heap:
        from millstream.client.api import Batch

        if self.is_closed:  # while this record waited for room
            raise Closed("the sender is closed")
        heap = self._heaps[topic, partition] = Heap(Batch(topic, partition, []))
        if self._timer is None:
            self._timer = self._owner.clock.call_later(self._linger, self._time_is_over)
        return heap

    def _time_is_over(self) -> None:
        """One timer for all partitions: a batch leaves at most two lingers after its first record."""
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
        """Hands a heap over, now: batches of one partition are appended in the order in which they are handed over."""
        heap = self._heaps.pop(place)
        appended = self._owner.append([heap.batch], self._codec)
        before = self._underway.get(place)
        task = asyncio.ensure_future(self._settle(heap, appended, before))
        self._underway[place] = task
        task.add_done_callback(lambda done: self._underway.pop(place) if self._underway.get(place) is done else None)

    async def _settle(
        self, heap: Heap, appended: Awaitable[list[Sequence[int]]], before: asyncio.Task[None] | None
    ) -> None:
        error: BaseException | None = None
        offsets: Sequence[int] = ()
        try:
            [offsets] = await appended
        except Exception as failure:
            error = failure
        if before is not None and not before.done():
            await asyncio.wait([before])  # answers come in order, too
        self._buffered -= heap.bytes
        waiting, self._waiting = self._waiting, deque()
        for future in waiting:
            if not future.done():
                future.set_result(None)
        if error is not None:
            self._counts.pop(heap.batch.topic, None)  # the topic may not be what it was
            self._alone.pop(heap.batch.topic, None)
        if error is not None or self._on_sent is not None:
            self._tell(heap, offsets, error)

    def _tell(self, heap: Heap, offsets: Sequence[int], error: BaseException | None) -> None:
        topic, partition, rows = heap.batch
        for at, (_, timestamp, key, value, headers) in enumerate(rows):
            message = Message(topic, value, key, headers, partition, timestamp)
            if error is not None:
                self._failed += 1
                if len(self._failures) < FAILURES_MAX:
                    self._failures.append((message, error))
            if self._on_sent is not None:
                self._on_sent(message, error if error is not None else Sent(topic, partition, offsets[at]))


def _bytes(data: Any) -> bytes:
    if isinstance(data, bytes | bytearray | memoryview):
        return bytes(data)
    raise MillstreamError(f"a value is bytes or None, not {type(data).__name__}: give an encoder for it (encode=...)")
