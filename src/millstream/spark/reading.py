"""A task's work: one range of offsets, from the broker into Arrow batches.

About a megabyte at a time. While one answer is decoded and handed to Spark, the next is already on its way: the
headers of the batches tell where to go on, so nothing has to be decoded for that.

What does not belong to the range is cut off: a broker answers with whole batches. Control batches and records of
aborted transactions never appear. Offsets that are gone (deleted, trimmed) are an error if `failOnDataLoss` is set,
and skipped if it is not.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import pyarrow as pa

from millstream.client.cluster import Cluster
from millstream.errors import Code, MillstreamError
from millstream.records import codec
from millstream.records.batch import HEADER_BYTES, TRANSACTIONAL, read_header
from millstream.spark.options import SourceOptions
from millstream.spark.ranges import OffsetRange
from millstream.spark.schema import Shape
from millstream.wire.kafka.requests import Fetched

WAIT_MS_MAX = 500
EMPTY_ANSWERS_MAX = 20
"""How often a broker may answer with nothing although its end lies further on, before that counts as lost."""


class DataLost(MillstreamError):
    """Offsets that Spark wants to read are gone."""

    def __init__(self, wanted: OffsetRange, at: int, why: str) -> None:
        super().__init__(
            f"{wanted.topic}-{wanted.partition}: offsets {at} to {wanted.end - 1} cannot be read, {why}; "
            "set failOnDataLoss to false to read on without them"
        )


@dataclass(frozen=True)
class _Run:
    """The whole batches of one answer."""

    data: memoryview
    first: int
    next_offset: int


def read_range(cluster: Cluster, options: SourceOptions, wanted: OffsetRange, shape: Shape) -> Iterator[pa.RecordBatch]:
    return _Reading(cluster, options, wanted, shape).batches()


class _Reading:
    def __init__(self, cluster: Cluster, options: SourceOptions, wanted: OffsetRange, shape: Shape) -> None:
        self._cluster = cluster
        self._options = options
        self._wanted = wanted
        self._shape = shape
        self._aborted: set[int] = set()

    def batches(self) -> Iterator[pa.RecordBatch]:
        with ThreadPoolExecutor(1, thread_name_prefix="fetch") as thread:
            offset, empty = self._wanted.start, 0
            pending = self._ask(thread, offset)
            while offset < self._wanted.end:
                fetched = pending.result()
                if fetched.error == Code.OFFSET_OUT_OF_RANGE:
                    offset = self._skip_lost(offset, fetched)
                    pending = self._ask(thread, offset)
                    continue
                run = self._whole_batches(fetched, offset)
                if run.next_offset == offset:
                    empty += 1
                    if fetched.high_watermark <= offset or empty > EMPTY_ANSWERS_MAX:
                        self._lost(offset, f"the partition ends at {fetched.high_watermark}")
                        return
                else:
                    empty = 0
                before, offset = offset, run.next_offset
                if offset < self._wanted.end:
                    pending = self._ask(thread, offset)
                yield from self._decode(run, before)

    def _ask(self, thread: ThreadPoolExecutor, offset: int) -> Future[Fetched]:
        return thread.submit(self._cluster.fetch, self._wanted.place, offset, self._options.fetch_bytes, WAIT_MS_MAX)

    def _skip_lost(self, offset: int, fetched: Fetched) -> int:
        start = self._cluster.earliest([self._wanted.place])[self._wanted.place]
        self._lost(offset, f"the partition starts at {start} and ends at {fetched.high_watermark}")
        return min(start, self._wanted.end) if start > offset else self._wanted.end

    def _lost(self, offset: int, why: str) -> None:
        if self._options.fail_on_data_loss:
            raise DataLost(self._wanted, offset, why)

    def _whole_batches(self, fetched: Fetched, offset: int) -> _Run:
        """Leaves out what a transaction took back, and a batch that the answer cuts off."""
        records = fetched.records
        kept: list[memoryview] = []
        position, first, next_offset = 0, -1, offset
        starts = sorted(fetched.aborted, key=lambda entry: entry[1])
        while position + HEADER_BYTES <= len(records) and next_offset < self._wanted.end:
            header = read_header(records, position)
            if position + header.size > len(records):
                break
            while starts and starts[0][1] <= header.last_offset:
                self._aborted.add(starts.pop(0)[0])
            if header.is_control:
                self._aborted.discard(header.producer_id)
            elif not (header.attributes & TRANSACTIONAL and header.producer_id in self._aborted):
                kept.append(records[position : position + header.size])
                first = header.base_offset if first < 0 else first
            position += header.size
            next_offset = max(next_offset, header.next_offset)
        whole = sum(map(len, kept)) == position
        data = records[:position] if whole else memoryview(b"".join(kept))
        return _Run(data, first, next_offset)

    def _decode(self, run: _Run, offset: int) -> Iterator[pa.RecordBatch]:
        if not run.data:
            return
        must_cut = run.first < offset or run.next_offset > self._wanted.end
        wanted = self._shape.decoded | {"offset"} if must_cut or not self._shape.decoded else self._shape.decoded
        columns = codec.decode_columns(run.data, columns=wanted)
        first, rows = 0, columns.rows
        if must_cut:
            offsets = array("q")
            assert columns.offset is not None
            offsets.frombytes(columns.offset)
            first = bisect_left(offsets, offset)
            rows = bisect_left(offsets, self._wanted.end) - first
        if rows > 0:
            yield self._shape.batch(columns, *self._wanted.place, first, rows)
