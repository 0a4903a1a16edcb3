"""The streaming side of the source: offsets from batch to batch.

An offset of the stream has the format of Spark's Kafka source in its checkpoint: `{"topic": {"0": 23}}`, the next
record to read of each partition. A partition that is missing from the start offset of a batch is new and read from its
beginning.

The reader lives in a process of the driver as long as the query runs and keeps its connections; pickled copies go
to the tasks without them.

With `group.id`, the task that read a partition's last range commits the offset to the broker, and so does the driver
when Spark calls `commit`. Neither alone is enough: Spark calls `commit` for a batch only while it plans the next one,
and so never for the last batch of a run. The source never reads these offsets: it uses the checkpoint.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from millstream.client.cluster import ClusterError, KafkaCluster
from millstream.core.errors import MillstreamError
from millstream.spark.options import SourceOptions
from millstream.spark.ranges import OffsetRange, RangePartition, connect, find_places, find_starts, split
from millstream.spark.reading import read_range
from millstream.spark.schema import Shape
from millstream.wire.kafka.requests import TopicPartition

logger = logging.getLogger(__name__)

Offsets = dict[TopicPartition, int]


class StreamBroken(MillstreamError):
    """The checkpoint and the broker's data do not match."""


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._open: KafkaCluster | None = None
        self._target: Offsets | None = None
        self._latest: Offsets | None = None
        self._triggered: float | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": None, "_target": None, "_latest": None, "_triggered": None}

    @property
    def _cluster(self) -> KafkaCluster:
        if self._open is None:
            self._open = connect(self._options)
        return self._open

    # -- planning, on the driver -------------------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, dict[str, int]]:
        places = find_places(self._cluster, self._options)
        starts = find_starts(self._cluster, self._options, places)
        if self._target is not None:  # it was set before this call, and records may have arrived since
            self._target = {place: max(self._target.get(place, 0), start) for place, start in starts.items()}
        return pack(starts)

    def getDefaultReadLimit(self) -> ReadLimit:
        rows = self._options.rows_per_trigger_max
        return ReadAllAvailable() if rows is None else ReadMaxRows(rows)

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._ends()

    def latestOffset(self, start: dict[str, dict[str, int]], limit: ReadLimit) -> dict[str, dict[str, int]]:
        began = unpack(start)
        ends = self._target if self._target is not None else self._ends()
        is_first, self._latest = self._latest is None, ends
        ends = self._keep_lost(began, ends)
        if is_first and self._options.fail_on_data_loss:
            find_places(self._cluster, self._options)  # after a restart there may be names that were never read
        if not isinstance(limit, ReadMaxRows) and self._options.rows_per_trigger_min is None:
            return pack(ends)
        first = {**began, **self._first_offsets(began, ends)}
        if self._must_wait(sum(ends[place] - first[place] for place in ends)):
            return start
        return pack(ration(first, ends, limit.max_rows) if isinstance(limit, ReadMaxRows) else ends)

    def reportLatestOffset(self) -> dict[str, dict[str, int]] | None:
        return pack(self._latest) if self._latest is not None else None

    def partitions(self, start: dict[str, dict[str, int]], end: dict[str, dict[str, int]]) -> list[InputPartition]:
        began, ends = unpack(start), unpack(end)
        first = {**began, **self._first_offsets(began, ends)}
        self._check_new(began, ends, first)
        ranges = [OffsetRange(*place, first[place], offset) for place, offset in ends.items()]
        parts = split(ranges, self._options.partitions_min, self._options.rows_per_partition_max)
        return [RangePartition(part, is_last=part.end == ends[part.place]) for part in parts]

    def commit(self, end: dict[str, dict[str, int]]) -> None:
        if self._options.group is not None:
            self._tell(self._cluster, unpack(end))

    def stop(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    def _ends(self) -> Offsets:
        return self._cluster.latest(find_places(self._cluster, self._options, must_exist=False))

    def _first_offsets(self, began: Offsets, ends: Offsets) -> Offsets:
        """The start of partitions that are new, or recreated and end before the last offset read."""
        behind = [place for place, end in ends.items() if place not in began or began[place] > end]
        return self._cluster.earliest(behind) if behind else {}

    def _check_new(self, began: Offsets, ends: Offsets, first: Offsets) -> None:
        """The start of a new partition at planning time, perhaps by a crashed driver, is unknown: it must be 0."""
        short = sorted(place for place in ends if place not in began and first[place] > 0)
        if short and self._options.fail_on_data_loss:
            topic, partition = short[0]
            raise StreamBroken(
                f"{topic}-{partition} is new and starts at {first[short[0]]}: earlier records were deleted. Set "
                "failOnDataLoss to false to continue with the remaining records"
            )

    def _must_wait(self, rows: int) -> bool:
        """For `minOffsetsPerTrigger`, up to the delay limit, and not if no more records will come."""
        rows_min = self._options.rows_per_trigger_min
        now = time.monotonic()
        waited = now - self._triggered if self._triggered is not None else math.inf
        if rows_min is None or rows >= rows_min or waited > self._options.trigger_delay_seconds_max:
            self._triggered = now
            return False
        return self._target is None

    def _keep_lost(self, began: Offsets, ends: Offsets) -> Offsets:
        """Records lost since the last batch: an error, or skipped."""
        gone = sorted(began.keys() - ends.keys())
        back = sorted(place for place, offset in ends.items() if began.get(place, 0) > offset)
        if (gone or back) and self._options.fail_on_data_loss:
            topic, partition = (gone or back)[0]
            there = bool(gone) and partition in self._cluster.partitions([topic]).get(topic, ())
            lost = "is no longer read" if there else "no longer exists"
            what = lost if gone else f"ends at {ends[back[0]]}, before {began[back[0]]}"
            raise StreamBroken(
                f"{topic}-{partition} {what}, but the checkpoint has read it: the topic was recreated, or the query "
                "reads another topic now. Set failOnDataLoss to false to continue with the remaining records, or use a "
                "new checkpoint"
            )
        return {**{place: began[place] for place in gone}, **ends}

    # -- reading, in tasks -------------------------------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, RangePartition):
            return
        cluster = connect(self._options)
        try:
            yield from read_range(cluster, self._options, partition.range, Shape(self._schema))
            if partition.is_last and self._options.group is not None:
                self._tell(cluster, {partition.range.place: partition.range.end})
        finally:
            cluster.close()

    def _tell(self, cluster: KafkaCluster, offsets: Offsets) -> None:
        assert self._options.group is not None
        try:
            cluster.commit(self._options.group, offsets)
        except ClusterError as error:  # only lag monitoring needs it: no reason to stop
            logger.warning("the offsets of group %s are not committed: %s", self._options.group, error)


def ration(began: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int], rows_max: int) -> Offsets:
    """Ends with at most `rows_max` rows in all, for each partition in proportion to its unread rows."""
    sizes = {place: max(end - began[place], 0) for place, end in ends.items()}
    total = sum(sizes.values())
    if total <= rows_max:
        return dict(ends)
    left = rows_max
    rationed: Offsets = {}
    # Small ones first, each at least one row: rounding down would never advance them.
    for place in sorted(sizes, key=lambda place: (sizes[place], place)):
        share = min(sizes[place], max(1, sizes[place] * rows_max // total), left)
        rationed[place] = began[place] + share if sizes[place] else ends[place]
        left -= share
    return rationed


def pack(offsets: Mapping[TopicPartition, int]) -> dict[str, dict[str, int]]:
    packed: dict[str, dict[str, int]] = {}
    for (topic, partition), offset in sorted(offsets.items()):
        packed.setdefault(topic, {})[str(partition)] = offset
    return packed


def unpack(packed: Mapping[str, Mapping[str, int]]) -> Offsets:
    return {(topic, int(part)): offset for topic, parts in packed.items() for part, offset in parts.items()}
