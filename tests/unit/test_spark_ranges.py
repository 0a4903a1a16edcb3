"""From options to ranges of offsets, and from ranges to tasks."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from millstream.client.cluster import KafkaCluster
from millstream.spark.options import BadOption, SourceOptions, parse_source
from millstream.spark.ranges import OffsetRange, RangePartition, connect, find_places, find_starts, resolve, split
from millstream.spark.schema import full_schema
from millstream.spark.stream import StreamBroken, StreamReader, pack, ration, unpack
from millstream.wire.kafka.requests import TopicPartition
from tests.serving import ServedBroker
from tests.spark.topics import Sent, Topics

SEEDS = range(25)
NOW = time.time_ns() // 1_000_000 - 60_000


# -- tasks -----------------------------------------------------------------------------------------------------------


def test_a_partition_is_one_task_unless_more_are_asked_for() -> None:
    ranges = [OffsetRange("t", 0, 0, 100), OffsetRange("t", 1, 50, 50), OffsetRange("t", 2, 10, 5)]
    assert split(ranges, None, 1000) == [ranges[0]]
    assert split([], 10, 1000) == []


def test_min_partitions_shares_tasks_out_by_size() -> None:
    parts = split([OffsetRange("t", 0, 0, 900), OffsetRange("t", 1, 0, 100)], 10, 10_000)
    assert [part.partition for part in parts] == [0] * 9 + [1]
    assert len(split([OffsetRange("t", 0, 0, 3)], 100, 10_000)) == 3  # never a task without an offset
    assert len(split([OffsetRange("t", index, 0, 5) for index in range(4)], 2, 10_000)) == 4


@pytest.mark.parametrize("seed", SEEDS)
def test_parts_are_the_ranges_again_and_none_is_too_long(seed: int) -> None:
    pick = random.Random(seed)
    starts = [pick.randrange(1 << 40) for _ in range(pick.randrange(1, 6))]
    ranges = [OffsetRange("t", index, at, at + pick.randrange(5000)) for index, at in enumerate(starts)]
    rows_max = pick.randrange(1, 2000)
    parts = split(ranges, pick.choice((None, 1, 3, 50)), rows_max)
    assert all(0 < part.size <= rows_max for part in parts)
    for whole in ranges:
        mine = [part for part in parts if part.place == whole.place]
        assert sum(part.size for part in mine) == whole.size
        assert all(a.end == b.start for a, b in itertools.pairwise(mine))
        assert not mine or (mine[0].start, mine[-1].end) == (whole.start, whole.end)


# -- a batch of a stream ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_rations_are_never_too_large_and_come_to_an_end(seed: int) -> None:
    pick = random.Random(seed)
    began = {("t", index): pick.randrange(1000) for index in range(pick.randrange(1, 30))}
    ends = {place: at + pick.choice((0, 1, pick.randrange(10_000))) for place, at in began.items()}
    rows_max = pick.randrange(1, 3000)
    batches = 0
    while began != ends:
        rationed = ration(began, ends, rows_max)
        moved = {place: rationed[place] - began[place] for place in began}
        assert all(began[place] <= rationed[place] <= ends[place] for place in began)
        assert 0 < sum(moved.values()) <= rows_max
        began = rationed
        batches += 1
        assert batches < 40_000


def test_a_large_partition_gets_the_larger_share_and_a_small_one_is_not_forgotten() -> None:
    began = {("t", 0): 0, ("t", 1): 0, ("t", 2): 0}
    rationed = ration(began, {("t", 0): 9_000, ("t", 1): 990, ("t", 2): 1}, 100)
    assert rationed == {("t", 0): 90, ("t", 1): 9, ("t", 2): 1}


def test_offsets_are_written_as_sparks_kafka_source_writes_them() -> None:
    offsets = {("b", 10): 7, ("a", 0): 1, ("b", 2): 5}
    assert pack(offsets) == {"a": {"0": 1}, "b": {"2": 5, "10": 7}}
    assert unpack(pack(offsets)) == offsets


class Grown:
    """A cluster whose topic has got a second partition."""

    start = 0

    def partitions(self, topics: Iterable[str]) -> dict[str, list[int]]:
        return {"t": [0, 1]}

    def earliest(self, places: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        return dict.fromkeys(places, self.start)

    def latest(self, places: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        return dict.fromkeys(places, 100)


def test_a_new_partition_that_has_lost_its_beginning_fails_a_stream_or_is_read_from_what_is_left() -> None:
    cluster, began = Grown(), {"t": {"0": 100}}

    def starts(**given: str) -> list[int]:
        reader = StreamReader(options("none:1", streaming=True, subscribe="t", **given), full_schema(False))
        reader._open = cluster  # type: ignore[assignment]
        parts = reader.partitions(began, reader.latestOffset(began, ReadAllAvailable()))
        return [part.range.start for part in parts if isinstance(part, RangePartition)]

    assert starts() == [0]
    cluster.start = 50
    with pytest.raises(StreamBroken, match="t-1 is new and starts at 50: earlier records were deleted"):
        starts()
    assert starts(failOnDataLoss="false") == [50]


# -- what the broker says --------------------------------------------------------------------------------------------


@pytest.fixture
def topics(broker: ServedBroker) -> Topics:
    return Topics(broker.address)


@pytest.fixture
def cluster(broker: ServedBroker) -> Iterator[KafkaCluster]:
    made = KafkaCluster(broker.address, timeout_seconds=10)
    yield made
    made.close()


def options(cluster_at: str, streaming: bool = False, **given: str) -> SourceOptions:
    return parse_source({"bootstrap.servers": cluster_at, **given}, streaming)


def test_partitions_are_found_by_name_by_pattern_and_by_hand(topics: Topics, unique: Callable[[str], str]) -> None:
    one, two = topics.create(unique("found-one"), 2), topics.create(unique("found-two"))
    other = topics.create(unique("xfound"))

    def find(must_exist: bool = True, **given: Any) -> list[tuple[str, int]]:
        wanted = options(topics.address, **given)
        cluster = connect(wanted)
        try:
            return find_places(cluster, wanted, must_exist=must_exist)
        finally:
            cluster.close()

    assert find(subscribe=f"{two},{one},{two}") == [(one, 0), (one, 1), (two, 0)]
    assert find(subscribePattern=f"{one}|{two}|no-such") == [(one, 0), (one, 1), (two, 0)]
    assert (other, 0) not in find(subscribePattern="found-.*")  # the whole name has to match
    assert find(subscribePattern="no-such-topic-.*") == []
    assert find(assign=f'{{"{one}": [1, 1], "{two}": [0]}}') == [(one, 1), (two, 0)]
    with pytest.raises(BadOption, match=f"there is no topic gone, lost at {topics.address}"):
        find(subscribe=f"lost,{one},gone")
    with pytest.raises(BadOption, match=f"there is no partition 2 of topic {one} at {topics.address}"):
        find(assign=f'{{"{one}": [0, 2]}}')
    assert find(must_exist=False, subscribe=f"lost,{two}") == [(two, 0)]
    assert find(must_exist=False, assign=f'{{"{one}": [0, 2]}}') == [(one, 0)]


def test_positions_become_offsets(cluster: KafkaCluster, topics: Topics, unique: Callable[[str], str]) -> None:
    topic = topics.create(unique("positions"), 3)
    records = [Sent(b"", partition=index, timestamp_ms=NOW + 10 * at) for index in (0, 1) for at in range(20)]
    topics.produce(topic, records)
    topics.trim(topic, {0: 5})
    places = [(topic, index) for index in range(3)]

    def where(**given: str) -> list[int]:
        wanted = options(topics.address, streaming=True, subscribe=topic, **given)
        found = find_starts(cluster, wanted, places)
        return [found[place] for place in places]

    assert where(startingOffsets="earliest") == [5, 0, 0]
    assert where(startingOffsets="latest") == [20, 20, 0]
    assert where(startingOffsets=f'{{"{topic}": {{"0": 7, "1": -2}}}}') == [7, 0, 0]
    late = {"startingOffsetsByTimestampStrategy": "latest"}
    assert where(startingTimestamp=str(NOW + 95), **late) == [10, 10, 0]
    assert where(startingOffsetsByTimestamp=f'{{"{topic}": {{"1": {NOW}}}}}', startingOffsets="latest") == [20, 0, 0]
    with pytest.raises(BadOption, match=f"{topic}-2 has no record at or after {NOW}; startingOffsetsByTimestampStra"):
        where(startingTimestamp=str(NOW))
    with pytest.raises(BadOption, match=f"offsets are given for {topic}-7, which is not read"):
        where(startingOffsets=f'{{"{topic}": {{"7": 1}}}}')
    beyond = {"startingOffsets": f'{{"{topic}": {{"1": 99}}}}'}
    with pytest.raises(BadOption, match=f"{topic}-1 cannot start at offset 99: it ends at 20; set failOnDataLoss to"):
        where(**beyond)
    assert where(**beyond, failOnDataLoss="false") == [20, 20, 0]
    ending = options(topics.address, subscribe=topic, endingTimestamp=str(NOW + 50)).ending
    assert resolve(cluster, ending, places) == {(topic, 0): 5, (topic, 1): 5, (topic, 2): 0}
