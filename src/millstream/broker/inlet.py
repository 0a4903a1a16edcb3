"""Gathers single records into batches and appends them to a partition.

Doors whose protocols carry records instead of batches use it. Records that arrive in one turn of the event loop are
appended at its end, as one batch, and share one sync with other appends. A record that comes alone does not wait.

    put --> waiting --end of the turn--> one batch (or several, by size) --durable--> each promise settles, in order

The records of one request for a partition leave at once as one batch, or as several by size (`split`, `put_parts`).

A large record does not wait for the end of the turn: gathering it gains nothing and would copy its value. It is
appended at once, after the waiting records, in a batch of its own.

Backpressure: records that wait or are not durable count as `unsynced_bytes`; a door stops reading a client whose
partition `is_full`. An invalid record is refused at once and does not affect the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from millstream.broker.partition import Partition
from millstream.core.clock import Clock
from millstream.core.errors import RequestError
from millstream.core.metrics import Metrics
from millstream.core.promise import Promise
from millstream.log.answers import Appended
from millstream.records import codec
from millstream.records.batch import HEADER_BYTES, BatchHeader
from millstream.records.record import Headers, record_bytes_max

RECORDS_MAX = 10_000
"""Of one batch."""
LARGE_BYTES = 16 << 10
Row = tuple[int, int, bytes | None, bytes | None, Headers]
"""Input of the codec: 0 in place of the offset, timestamp, key, value, headers."""
Settled = Callable[[int, BaseException | None], None]
"""Called with the record's offset when it is durable, or with the error."""


class Inlet:
    """One per partition that takes single records; made by `Broker.inlet`."""

    __slots__ = (
        "_bytes",
        "_clock",
        "_has_hurried",
        "_loop",
        "_metrics",
        "_partition",
        "_rows",
        "_settling",
        "_unsynced_max",
        "is_full",
        "leaving",
    )

    def __init__(self, partition: Partition, clock: Clock, metrics: Metrics, unsynced_bytes_max: int) -> None:
        self._partition = partition
        self._clock = clock
        self._metrics = metrics
        self._unsynced_max = unsynced_bytes_max
        self._rows: list[Row] = []
        self._settling: list[Settled] = []
        self._bytes = 0
        self._loop = asyncio.get_running_loop()
        self.is_full = False
        """Whether an append waits for a sync of more than `unsynced_bytes_max`."""
        self._has_hurried = False
        self.leaving: tuple[int, Sequence[Row]] | None = None
        """The batch in flight and its first offset: a queue that waits for it need not read the log."""

    def put(
        self,
        value: bytes | memoryview | None,
        key: bytes | None = None,
        headers: Headers = (),
        timestamp: int | None = None,
    ) -> Promise[int]:
        """Settles with the offset when durable, or fails with `RequestError`. The caller may reuse a view."""
        promise: Promise[int] = Promise()

        def settled(offset: int, error: BaseException | None) -> None:
            if error is None:
                promise.settle(offset)
            else:
                promise.fail(error)

        self.put_then(settled, value, key, headers, timestamp)
        return promise

    def put_then(
        self,
        settled: Settled,
        value: bytes | memoryview | None,
        key: bytes | None = None,
        headers: Headers = (),
        timestamp: int | None = None,
    ) -> None:
        """A faster `put`: calls back with the offset, or with an error, possibly before it returns."""
        size = record_bytes_max(value, key, headers)
        settings = self._partition.settings
        time_ms = now_ms = self._clock.now_ms()
        try:
            if size + HEADER_BYTES > settings.message_bytes_max:
                alone, _ = codec.encode_own([(0, now_ms, key, value, headers)])
                self._partition.check_size(len(alone))
            self._partition.check_record(key, timestamp, now_ms)
        except RequestError as refusal:
            settled(-1, refusal)
            return
        if timestamp is not None:
            time_ms = timestamp
        rows = self._rows
        if rows and (len(rows) == RECORDS_MAX or self._bytes + size + HEADER_BYTES > settings.message_bytes_max):
            self._leave()
            rows = self._rows
        if size >= LARGE_BYTES and value is not None and not headers and time_ms >= 0:
            self._leave()
            self.leaving = None
            self._append([settled], codec.encode_one, value, key, time_ms)
            return
        if not rows:
            self._loop.call_soon(self._turn_ends)
        rows.append((0, time_ms, key, bytes(value) if type(value) is memoryview else value, headers))
        self._settling.append(settled)
        self._bytes += size

    def split(self, rows: Sequence[Row], bytes_max: int) -> Sequence[Sequence[Row]]:
        """The records of as few batches as possible, for `put_parts`; raises `RequestError` if one is invalid.

        `bytes_max` is an upper bound of the bytes of keys and values. The rows have the broker's time and no headers.
        """
        settings = self._partition.settings
        if settings.needs_more_checks:
            for row in rows:
                self._partition.check_record(row[2], None, row[1])
        if bytes_max + len(rows) * record_bytes_max(None, None, ()) + HEADER_BYTES <= settings.message_bytes_max:
            return (rows,)
        return list(_parted(rows, self._partition))

    def put_parts(self, parts: Sequence[Sequence[Row]]) -> list[tuple[int, Promise[Appended]]]:
        """Appends each part at once, as a batch; returns their numbers of records and their promises."""
        self._leave()
        self.leaving = None
        appended = []
        for part in parts:
            batch, header = codec.encode_own(part)
            appended.append((len(part), self._partition.append_own(batch, header, self._clock)))
            self._metrics.batches_in += 1
            self._metrics.records_in += len(part)
        return appended

    def hurry(self) -> None:
        """Appends a record that came alone at once, if no sync follows each batch.

        Once per turn: later records of the turn are gathered.
        """
        if len(self._rows) == 1 and not self._has_hurried and self._partition.log.config.flush.batches != 1:
            self._has_hurried = True
            self._leave()

    def _turn_ends(self) -> None:
        self._has_hurried = False
        self._leave()

    def _leave(self) -> None:
        if not self._rows:  # the turn's records are already appended: they were too many for one batch
            return
        rows, self._rows = self._rows, []
        settling, self._settling = self._settling, []
        self._bytes = 0
        self.leaving = (self._partition.log.end, rows)
        self._append(settling, codec.encode_own, rows)

    def _append(
        self, settling: list[Settled], encode: Callable[..., tuple[memoryview, BatchHeader]], *what: Any
    ) -> None:
        partition = self._partition
        try:
            batch, header = encode(*what)
            appended = partition.append_own(batch, header, self._clock)
        except Exception as error:  # a refusal, or a bug that must not leave a caller waiting
            self.leaving = None
            for settled in settling:
                settled(-1, error)
            return
        self._metrics.batches_in += 1
        self._metrics.records_in += len(settling)
        if appended.done:
            self.leaving = None
            self._settle(settling, appended)
        else:
            leaving = self.leaving
            if leaving is not None and partition.log.end != leaving[0] + len(leaving[1]):
                leaving = self.leaving = None  # a database assigns the offsets later
            self.is_full = partition.log.unsynced_bytes > self._unsynced_max
            appended.then(lambda done: self._left(leaving, settling, done))

    def _left(
        self, leaving: tuple[int, Sequence[Row]] | None, settling: Sequence[Settled], done: Promise[Appended]
    ) -> None:
        if self.leaving is leaving:
            self.leaving = None
        self._settle(settling, done)

    def _settle(self, settling: Sequence[Settled], done: Promise[Appended]) -> None:
        if self.is_full:
            self.is_full = self._partition.log.unsynced_bytes > self._unsynced_max
        if done.error is not None:
            for settled in settling:
                settled(-1, done.error)
            return
        offset = done.value().base_offset
        for settled in settling:
            settled(offset, None)
            offset += 1


def _parted(rows: Sequence[Row], partition: Partition) -> Iterator[Sequence[Row]]:
    """Rows in parts whose batches the topic accepts; raises MESSAGE_TOO_LARGE."""
    limit = partition.settings.message_bytes_max
    first, total = 0, HEADER_BYTES
    for at, row in enumerate(rows):
        size = record_bytes_max(row[3], row[2], row[4])
        if size + HEADER_BYTES > limit:
            alone, _ = codec.encode_own([row])
            partition.check_size(len(alone))
        if at > first and total + size > limit:
            yield rows[first:at]
            first, total = at, HEADER_BYTES
        total += size
    yield rows[first:]
