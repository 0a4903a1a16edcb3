"""Single records on their way into a partition, gathered into batches.

Doors whose protocols carry one record per request hand them here. What arrives in one turn of the event loop leaves
together at its end, as one batch, and waits for one sync with whatever else does. One record alone waits for nobody.

    put --> waiting --end of the turn--> one batch (or several, by size) --durable--> each promise settles, in order

A large record does not wait for the end of the turn: nothing is gained by gathering it, and its value would have to be
copied to be kept. It leaves at once, behind what waits, in a batch of its own.

Bounds: what waits and what is not durable yet are `unsynced_bytes`; a door stops reading a client whose partition
`is_full`. A record that could never be stored is refused at once and costs the others nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from millstream.broker.partition import Partition
from millstream.clock import Clock
from millstream.errors import Code, RequestError
from millstream.log.answers import Appended
from millstream.metrics import Metrics
from millstream.promise import Promise
from millstream.records import codec
from millstream.records.batch import HEADER_BYTES
from millstream.records.record import Headers

RECORDS_MAX = 10_000
"""Of one batch."""
RECORD_OVERHEAD_BYTES = 40
"""At most what a record's lengths, deltas and attributes take; each header takes up to ten more."""
LARGE_BYTES = 16 << 10


class Inlet:
    """One per partition that single records come to; made by `Broker.inlet`."""

    __slots__ = ("_bytes", "_clock", "_metrics", "_partition", "_rows", "_settling", "_unsynced_max")

    def __init__(self, partition: Partition, clock: Clock, metrics: Metrics, unsynced_bytes_max: int) -> None:
        self._partition = partition
        self._clock = clock
        self._metrics = metrics
        self._unsynced_max = unsynced_bytes_max
        self._rows: list[tuple[int, int, bytes | None, bytes | None, Headers]] = []
        self._settling: list[Promise[int]] = []
        self._bytes = 0

    @property
    def is_full(self) -> bool:
        return self._bytes + self._partition.log.unsynced_bytes > self._unsynced_max

    def put(
        self,
        value: bytes | memoryview | None,
        key: bytes | None = None,
        headers: Headers = (),
        timestamp: int | None = None,
    ) -> Promise[int]:
        """Settles with the record's offset when it is durable, or fails with `RequestError`. A view is done with."""
        size = RECORD_OVERHEAD_BYTES + (len(value) if value is not None else 0) + (len(key) if key is not None else 0)
        if headers:
            size += sum(len(name) * 3 + len(content or b"") + 10 for name, content in headers)
        settings = self._partition.settings
        if size + HEADER_BYTES > settings.message_bytes_max:
            detail = f"the record has {size} bytes, the topic's max.message.bytes is {settings.message_bytes_max}"
            return Promise.failed(RequestError(Code.MESSAGE_TOO_LARGE, detail))
        if key is None and settings.log.compact:
            detail = "a record without a key cannot go to a compacted topic"
            return Promise.failed(RequestError(Code.INVALID_RECORD, detail))
        if self._rows and (
            len(self._rows) == RECORDS_MAX or self._bytes + size + HEADER_BYTES > settings.message_bytes_max
        ):
            self._leave()
        time_ms = self._clock.now_ms() if timestamp is None else timestamp
        if value is not None and len(value) >= LARGE_BYTES and not headers and time_ms >= 0:
            return self._leave_alone(value, key, time_ms)
        if not self._rows:
            asyncio.get_running_loop().call_soon(self._leave)
        promise: Promise[int] = Promise()
        value = bytes(value) if type(value) is memoryview else value
        self._rows.append((0, time_ms, key, value, headers))
        self._settling.append(promise)
        self._bytes += size
        return promise

    def _leave_alone(self, value: bytes | memoryview, key: bytes | None, time_ms: int) -> Promise[int]:
        self._leave()
        promise: Promise[int] = Promise()
        self._append([promise], codec.encode_one, value, key, time_ms)
        return promise

    def _leave(self) -> None:
        if not self._rows:  # the turn's records have left already, because there were too many for one batch
            return
        rows, self._rows = self._rows, []
        settling, self._settling = self._settling, []
        self._bytes = 0
        self._append(settling, codec.encode, rows)

    def _append(self, settling: list[Promise[int]], encode: Callable[..., bytearray], *what: Any) -> None:
        try:
            appended = self._partition.append_own(memoryview(encode(*what)), self._clock)
        except Exception as error:  # a refusal, or a mistake of ours that must not leave anybody waiting
            for promise in settling:
                promise.fail(error)
            return
        self._metrics.batches_in += 1
        self._metrics.records_in += len(settling)
        if appended.done:
            _settle(settling, appended)
        else:
            appended.then(lambda done: _settle(settling, done))


def _settle(settling: Sequence[Promise[int]], done: Promise[Appended]) -> None:
    if done.error is not None:
        for promise in settling:
            promise.fail(done.error)
        return
    base = done.value().base_offset
    for at, promise in enumerate(settling):
        promise.settle(base + at)
