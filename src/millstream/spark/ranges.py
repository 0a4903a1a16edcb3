"""The offsets to read: from options to ranges, and from ranges to tasks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from pyspark.sql.datasource import InputPartition

from millstream.client.cluster import KafkaCluster
from millstream.spark.options import BadOption, Positions, SourceOptions
from millstream.wire.kafka.requests import EARLIEST, LATEST, TopicPartition


@dataclass(frozen=True)
class OffsetRange:
    topic: str
    partition: int
    start: int
    end: int

    @property
    def place(self) -> TopicPartition:
        return self.topic, self.partition

    @property
    def size(self) -> int:
        return self.end - self.start


class RangePartition(InputPartition):
    """One task: a range of offsets, and whether it is the last one of its partition in this batch."""

    def __init__(self, range_: OffsetRange, is_last: bool = False) -> None:
        super().__init__(range_)
        self.range = range_
        self.is_last = is_last


def connect(options: SourceOptions) -> KafkaCluster:
    client = options.client
    return KafkaCluster(client.bootstrap, client.client_id, client.timeout_seconds)


def find_places(cluster: KafkaCluster, options: SourceOptions, *, must_exist: bool = True) -> list[TopicPartition]:
    """Every partition that the options select now. With `must_exist`, a named topic must exist."""
    if options.assigned:
        names = {topic for topic, _ in options.assigned}
        found = cluster.partitions(names)
        places = sorted((topic, index) for topic, index in set(options.assigned) if index in found.get(topic, ()))
        missing = sorted(set(options.assigned) - set(places))
        if missing and must_exist:
            topic, index = missing[0]
            raise BadOption(f"there is no partition {index} of topic {topic} at {options.client.bootstrap}")
        return places
    if options.pattern is not None:
        names = {topic for topic in cluster.topics() if re.fullmatch(options.pattern, topic)}
        found = cluster.partitions(names) if names else {}
    else:
        found = cluster.partitions(options.topics)
        absent = sorted(set(options.topics) - set(found))
        if absent and must_exist:
            raise BadOption(f"there is no topic {', '.join(absent)} at {options.client.bootstrap}")
    return sorted((topic, partition) for topic, partitions in found.items() for partition in partitions)


def find_starts(
    cluster: KafkaCluster, options: SourceOptions, places: Iterable[TopicPartition]
) -> dict[TopicPartition, int]:
    """The start of each partition. A given offset after its end is lost data: an error, or the end instead."""
    places = list(places)
    starts = resolve(cluster, options.starting, places, strict_times=options.strict_times)
    given = [place for place in places if options.starting.offsets.get(place, -1) >= 0]
    for place, end in (cluster.latest(given) if given else {}).items():
        if starts[place] > end and options.fail_on_data_loss:
            raise BadOption(
                f"{place[0]}-{place[1]} cannot start at offset {starts[place]}: it ends at {end}; "
                "set failOnDataLoss to false to start at its end"
            )
        starts[place] = min(starts[place], end)
    return starts


def resolve(
    cluster: KafkaCluster, positions: Positions, places: Iterable[TopicPartition], *, strict_times: bool = False
) -> dict[TopicPartition, int]:
    """The offset at which each partition begins or ends."""
    fixed: dict[TopicPartition, int] = {}
    times: dict[TopicPartition, int] = {}
    places = list(places)
    unknown = sorted({*positions.offsets, *positions.times} - set(places))
    if unknown:
        raise BadOption(f"offsets are given for {unknown[0][0]}-{unknown[0][1]}, which is not read")
    for place in places:
        given = positions.offsets.get(place)
        if given is not None and given >= 0:
            fixed[place] = given
        else:
            times[place] = given if given is not None else positions.times.get(place, positions.rest)
    found = cluster.offsets(times) if times else {}
    if strict_times:
        _check_times(cluster, times, found)
    return {**fixed, **found}


def _check_times(
    cluster: KafkaCluster, times: Mapping[TopicPartition, int], found: Mapping[TopicPartition, int]
) -> None:
    timed = {place for place, time in times.items() if time not in (EARLIEST, LATEST)}
    ends = cluster.latest(timed) if timed else {}
    for place in sorted(timed):
        if found[place] >= ends[place]:
            raise BadOption(
                f"{place[0]}-{place[1]} has no record at or after {times[place]}; "
                "startingOffsetsByTimestampStrategy=latest starts at the end instead"
            )


def split(ranges: list[OffsetRange], partitions_min: int | None, rows_max: int) -> list[OffsetRange]:
    """One task per partition, and more if `minPartitions` or `maxRecordsPerPartition` requires it."""
    ranges = [one for one in ranges if one.size > 0]
    total = sum(one.size for one in ranges)
    parts: list[OffsetRange] = []
    for one in ranges:
        pieces = 1
        if partitions_min is not None and partitions_min > len(ranges):
            pieces = max(1, round(one.size / total * partitions_min))
        pieces = min(max(pieces, -(-one.size // rows_max)), one.size)
        cuts = [one.start + one.size * at // pieces for at in range(pieces + 1)]
        parts += [OffsetRange(one.topic, one.partition, a, b) for a, b in pairwise(cuts)]
    return parts
