"""Filters of a query, pushed into the ranges of a batch read: a query over an hour reads an hour.

Only with the option `pushFilters`, for a DataFrame that is used once: Spark plans its reads with the first filters.

Every filter is also handed back to Spark: a planned range may hold more rows than the filter passes, never fewer. That
is exact for topic, partition and offset, and for the lower bound of timestamp. Its upper bound cannot be: producers
choose timestamps, and a record may be older than earlier records. Records that are up to `timestampSkewMs` out of order
are found (default: an hour; a negative number reads to the end).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

from millstream.client.cluster import KafkaCluster
from millstream.spark.ranges import OffsetRange
from millstream.spark.source import BatchReader
from millstream.wire.kafka.requests import TopicPartition

ALL = (-(1 << 62), 1 << 62)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MILLISECOND = timedelta(milliseconds=1)


@dataclass(frozen=True)
class Bounds:
    """The values of each column that pass a conjunction of filters; numbers as first and last, both inclusive."""

    topics: frozenset[str] | None = None
    numbers: dict[str, tuple[int, int]] = field(default_factory=dict)
    partitions: frozenset[int] | None = None

    def of(self, column: str) -> tuple[int, int]:
        return self.numbers.get(column, ALL)

    def narrowed(self, filter_: Filter) -> Bounds:
        attribute: tuple[str, ...] = getattr(filter_, "attribute", ())
        value = getattr(filter_, "value", None)
        if len(attribute) != 1 or value is None:
            return self
        column = attribute[0].lower()
        if column == "topic":
            return self._topics(filter_, value)
        if column == "partition" and isinstance(filter_, In):
            wanted = frozenset(value)
            return replace(self, partitions=wanted if self.partitions is None else self.partitions & wanted)
        if column not in ("partition", "offset", "timestamp"):
            return self
        first, last = self.of(column)
        if isinstance(filter_, In):
            known = [_number(each) for each in value if each is not None]
            low, high = (min(known), max(known)) if known else (1, 0)
        else:
            low, high = _span(filter_, value)
        return replace(self, numbers={**self.numbers, column: (max(first, low), min(last, high))})

    def _topics(self, filter_: Filter, value: Any) -> Bounds:
        if isinstance(filter_, EqualTo | EqualNullSafe):
            wanted = frozenset([value])
        elif isinstance(filter_, In):
            wanted = frozenset(value)
        else:
            return self
        return replace(self, topics=wanted if self.topics is None else self.topics & wanted)

    def has(self, place: TopicPartition) -> bool:
        topic, partition = place
        first, last = self.of("partition")
        return (
            (self.topics is None or topic in self.topics)
            and (self.partitions is None or partition in self.partitions)
            and first <= partition <= last
        )


class FilteringReader(BatchReader):
    bounds = Bounds()

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        for filter_ in filters:
            self.bounds = self.bounds.narrowed(filter_)
        return filters

    def _ranges(self, cluster: KafkaCluster) -> list[OffsetRange]:
        ranges = [one for one in super()._ranges(cluster) if self.bounds.has(one.place)]
        first, last = self.bounds.of("offset")
        ranges = [replace(one, start=max(one.start, first), end=min(one.end, last + 1)) for one in ranges]
        return self._between_times(cluster, [one for one in ranges if one.size > 0])

    def _between_times(self, cluster: KafkaCluster, ranges: list[OffsetRange]) -> list[OffsetRange]:
        first, last = self.bounds.of("timestamp")
        skew = self._options.timestamp_skew_ms
        places = [one.place for one in ranges]
        if first > ALL[0] and places:
            starts = cluster.offsets(dict.fromkeys(places, max(first, 0)))
            ranges = [replace(one, start=max(one.start, starts[one.place])) for one in ranges]
        if last < ALL[1] and places and skew >= 0:
            ends = cluster.offsets(dict.fromkeys(places, max(last + skew + 1, 0)))
            ranges = [replace(one, end=min(one.end, ends[one.place])) for one in ranges]
        return ranges


def _span(filter_: Filter, value: Any) -> tuple[int, int]:
    """First and last integer that the filter may pass."""
    if not isinstance(filter_, EqualTo | EqualNullSafe | GreaterThan | GreaterThanOrEqual | LessThan | LessThanOrEqual):
        return ALL
    number = _number(value)
    if isinstance(filter_, GreaterThan):
        return number + 1, ALL[1]
    if isinstance(filter_, GreaterThanOrEqual):
        return number, ALL[1]
    if isinstance(filter_, LessThan) and isinstance(value, int):  # a time was rounded down, and may itself pass
        return ALL[0], number - 1
    if isinstance(filter_, LessThan | LessThanOrEqual):
        return ALL[0], number
    return number, number


def _number(value: Any) -> int:
    """Times as milliseconds, rounded down: a record has no microseconds."""
    if isinstance(value, datetime):
        whole = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
        return (whole - EPOCH) // MILLISECOND
    return int(value)
