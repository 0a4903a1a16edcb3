"""Single records on their way into a partition, gathered into batches.

Doors whose protocols carry one record per request hand them here. What arrives in one turn of the event loop leaves
together at its end, as one batch, and waits for one sync with whatever else does. One record alone waits for nobody.

    put --> waiting --end of the turn--> one batch (or several, by size) --durable--> each promise settles, in order

Bounds: what waits and what is not durable yet are `unsynced_bytes`; a door stops reading a client whose partition
`is_full`. A record that could never be stored is refused at once and costs the others nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from millstream.broker.partition import Partition
from millstream.clock import Clock
from millstream.errors import Code, RequestError
from millstream.log.answers import Appended
from millstream.metrics import Metrics
from millstream.promise import Promise
from millstream.records import codec
from millstream.records.batch import HEADER_BYTES, read_header
from millstream.records.record import Headers

RECORDS_MAX = 10_000
"""Of one batch."""
RECORD_OVERHEAD_BYTES = 40
"""At most what a record's lengths, deltas and attributes take; each header takes up to ten more."""


Row = tuple[int, int, bytes | None, bytes | None, Headers]
"""As the codec takes it: a place for the offset, timestamp, key, value, headers."""


class Inlet:
    """One per partition that single records come to; made by `Broker.inlet`."""

    __slots__ = (
        "_bytes",
        "_clock",
        "_has_hurried",
        "_metrics",
        "_partition",
        "_rows",
        "_settling",
        "_unsynced_max",
        "leaving",
    )

    def __init__(self, partition: Partition, clock: Clock, metrics: Metrics, unsynced_bytes_max: int) -> None:
        self._partition = partition
        self._clock = clock
        self._metrics = metrics
        self._unsynced_max = unsynced_bytes_max
        self._rows: list[Row] = []
        self._settling: list[Promise[int]] = []
        self._bytes = 0
        self._has_hurried = False
        self.leaving: tuple[int, Sequence[Row]] | None = None
        """The last batch and its first offset while it is appended: a queue that waits for it need not read it."""

    @property
    def is_full(self) -> bool:
        return self._bytes + self._partition.log.unsynced_bytes > self._unsynced_max

    def put(
        self,
        value: bytes | None,
        key: bytes | None = None,
        headers: Headers = (),
        timestamp: int | None = None,
    ) -> Promise[int]:
        """Settles with the record's offset when it is durable, or fails with `RequestError`."""
        size = len(value or b"") + len(key or b"") + RECORD_OVERHEAD_BYTES
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
        if not self._rows:
            asyncio.get_running_loop().call_soon(self._turn_ends)
        promise: Promise[int] = Promise()
        self._rows.append((0, self._clock.now_ms() if timestamp is None else timestamp, key, value, headers))
        self._settling.append(promise)
        self._bytes += size
        return promise

    def hurry(self) -> None:
        """A record that came alone leaves at once, where no sync is waited for that it could share.

        Once in a turn: what else comes in it is gathered.
        """
        if len(self._rows) == 1 and not self._has_hurried and self._partition.log.config.flush.batches != 1:
            self._has_hurried = True
            self._leave()

    def _turn_ends(self) -> None:
        self._has_hurried = False
        if self._rows:  # else they have left already: one in a hurry, or too many for one batch
            self._leave()

    def _leave(self) -> None:
        rows, self._rows = self._rows, []
        settling, self._settling = self._settling, []
        self._bytes = 0
        try:
            batch = codec.encode(rows)
            leaving = self.leaving = (self._partition.log.end, rows)
            appended = self._append(memoryview(batch))
        except Exception as error:  # a refusal, or a mistake of ours that must not leave anybody waiting
            self.leaving = None
            for promise in settling:
                promise.fail(error)
            return
        self._metrics.batches_in += 1
        self._metrics.records_in += len(rows)
        appended.then(lambda done: self._left(leaving, settling, done))

    def _append(self, batch: memoryview) -> Promise[Appended]:
        if self._partition.settings.needs_more_checks:
            return self._partition.append(batch, self._clock)[1]
        return self._partition.log.append(batch, read_header(batch))  # it was made here: there is nothing to check

    def _left(
        self, leaving: tuple[int, Sequence[Row]], settling: Sequence[Promise[int]], done: Promise[Appended]
    ) -> None:
        if self.leaving is leaving:
            self.leaving = None
        _settle(settling, done)


def _settle(settling: Sequence[Promise[int]], done: Promise[Appended]) -> None:
    if done.error is not None:
        for promise in settling:
            promise.fail(done.error)
        return
    base = done.value().base_offset
    for at, promise in enumerate(settling):
        promise.settle(base + at)
