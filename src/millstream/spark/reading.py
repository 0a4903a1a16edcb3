"""A task's work: one range of offsets, from the broker into Arrow batches.

A few megabytes at a time. While one response is decoded and handed to Spark, the next fetch is in flight: the
batch headers give the next offset without decoding.

Records outside the range are cut off: a broker returns whole batches. Control batches and records of
aborted transactions never appear. Deleted or trimmed offsets are an error if `failOnDataLoss` is set,
and skipped if it is not.

Well compressed batches of that size may hold gigabytes. A response that decodes to more than `DECODED_BYTES_MAX` is
decoded in halves, down to single batches, so that memory is bounded.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import pyarrow as pa

from millstream.client.cluster import ClusterError, KafkaCluster
from millstream.core.errors import Code, MillstreamError
from millstream.records import codec
from millstream.records.batch import HEADER_BYTES, TRANSACTIONAL, CorruptBatch, read_header
from millstream.records.columns import DATA_BYTES_MAX, Columns, ColumnsTooLarge
from millstream.spark.options import SourceOptions
from millstream.spark.ranges import OffsetRange
from millstream.spark.schema import Shape
from millstream.wire.kafka.requests import Fetched

WAIT_MS_MAX = 500
EMPTY_ANSWERS_MAX = 20
"""The number of empty responses before the high watermark after which records count as lost."""
DECODED_BYTES_MAX = 64 << 20
FORMAT = 2
"""Of record batches; brokers have converted older formats to it for years."""


class DataLost(MillstreamError):
    """Offsets that Spark reads are gone."""

    def __init__(self, wanted: OffsetRange, at: int, why: str) -> None:
        super().__init__(
            f"{wanted.topic}-{wanted.partition}: offsets {at} to {wanted.end - 1} cannot be read, {why}; set "
            "failOnDataLoss to false to continue without them"
        )


class Damaged(MillstreamError):
    """A broker returned data that is not a record batch."""

    def __init__(self, wanted: OffsetRange, at: int, why: str) -> None:
        super().__init__(
            f"{wanted.topic}-{wanted.partition}: the batch at offset {at} cannot be read: {why}; to continue without "
            "it, start after it"
        )


@dataclass(frozen=True)
class _Run:
    """The whole batches of one response, and the end of each in `data`."""

    data: memoryview
    ends: list[int]
    first: int
    next_offset: int


def read_range(
    cluster: KafkaCluster, options: SourceOptions, wanted: OffsetRange, shape: Shape
) -> Iterator[pa.RecordBatch]:
    return _Reading(cluster, options, wanted, shape).batches()


class _Reading:
    def __init__(self, cluster: KafkaCluster, options: SourceOptions, wanted: OffsetRange, shape: Shape) -> None:
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
                try:
                    fetched = pending.result()
                except ClusterError as error:
                    if error.code != Code.UNKNOWN_TOPIC_OR_PARTITION:
                        raise
                    self._lost(offset, "the partition no longer exists")
                    return
                if fetched.error == Code.OFFSET_OUT_OF_RANGE:
                    offset = self._skip_lost(offset, fetched)
                    if offset < self._wanted.end:
                        pending = self._ask(thread, offset)
                    continue
                run = self._whole_batches(fetched, offset)
                if run.next_offset == offset:
                    empty += 1
                    end = self._end(fetched, offset)
                    if end <= offset or empty > EMPTY_ANSWERS_MAX:
                        self._lost(offset, f"the partition ends at {end}")
                        return
                else:
                    empty = 0
                before, offset = offset, run.next_offset
                if offset < self._wanted.end:
                    pending = self._ask(thread, offset)
                yield from self._decode(run, before)

    def _ask(self, thread: ThreadPoolExecutor, offset: int) -> Future[Fetched]:
        return thread.submit(self._cluster.fetch, self._wanted.place, offset, self._options.fetch_bytes, WAIT_MS_MAX)

    def _end(self, fetched: Fetched, offset: int) -> int:
        """A broker that shares its store may lag behind the one that planned the range: a request refreshes it."""
        place = self._wanted.place
        return fetched.high_watermark if fetched.high_watermark > offset else self._cluster.latest([place])[place]

    def _skip_lost(self, offset: int, fetched: Fetched) -> int:
        start = self._cluster.earliest([self._wanted.place])[self._wanted.place]
        self._lost(offset, f"the partition starts at {start} and ends at {fetched.high_watermark}")
        return min(start, self._wanted.end) if start > offset else self._wanted.end

    def _lost(self, offset: int, why: str) -> None:
        if self._options.fail_on_data_loss:
            raise DataLost(self._wanted, offset, why)

    def _whole_batches(self, fetched: Fetched, offset: int) -> _Run:
        """Omits aborted transactions, and a batch that is cut off at the end."""
        records = fetched.records
        kept: list[memoryview] = []
        ends: list[int] = []
        position, first, next_offset = 0, -1, offset
        starts = sorted(fetched.aborted, key=lambda entry: entry[1])
        while position + HEADER_BYTES <= len(records) and next_offset < self._wanted.end:
            header = read_header(records, position)
            if header.magic != FORMAT or header.size < HEADER_BYTES:
                raise Damaged(self._wanted, next_offset, f"it has format {header.magic} and {header.size} bytes")
            if position + header.size > len(records):
                break
            while starts and starts[0][1] <= header.last_offset:
                self._aborted.add(starts.pop(0)[0])
            if header.is_control:
                self._aborted.discard(header.producer_id)
            elif not (header.attributes & TRANSACTIONAL and header.producer_id in self._aborted):
                kept.append(records[position : position + header.size])
                ends.append(header.size + (ends[-1] if ends else 0))
                first = header.base_offset if first < 0 else first
            position += header.size
            next_offset = max(next_offset, header.next_offset)
        is_whole = not ends or ends[-1] == position
        data = records[:position] if is_whole else memoryview(b"".join(kept))
        return _Run(data, ends, first, next_offset)

    def _decode(self, run: _Run, offset: int) -> Iterator[pa.RecordBatch]:
        must_cut = run.first < offset or run.next_offset > self._wanted.end
        wanted = self._shape.decoded | {"offset"} if must_cut or not self._shape.decoded else self._shape.decoded
        for columns in self._columns(run.data, run.ends, wanted):
            first, rows = 0, columns.rows
            if must_cut:
                offsets = array("q")
                assert columns.offset is not None
                offsets.frombytes(columns.offset)
                first = bisect_left(offsets, offset)
                rows = bisect_left(offsets, self._wanted.end) - first
            if rows > 0:
                yield self._shape.batch(columns, *self._wanted.place, first, rows)

    def _columns(self, data: memoryview, ends: list[int], wanted: frozenset[str]) -> Iterator[Columns]:
        if not ends:
            return
        bytes_max = DECODED_BYTES_MAX if len(ends) > 1 else DATA_BYTES_MAX
        try:
            columns = codec.decode_columns(data, columns=wanted, bytes_max=bytes_max)
        except (ColumnsTooLarge, CorruptBatch) as error:  # the second also if a single batch is too large
            if len(ends) == 1:
                raise Damaged(self._wanted, read_header(data).base_offset, str(error)) from error
        else:
            yield columns
            return
        half = len(ends) // 2
        middle = ends[half - 1]
        yield from self._columns(data[:middle], ends[:half], wanted)
        yield from self._columns(data[middle:], [end - middle for end in ends[half:]], wanted)
