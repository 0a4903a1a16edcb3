"""The broker's counters, and their conversion to Prometheus text at a scrape.

The hot path only adds to plain integers (`metrics.bytes_in += n`), without labels, locks or formatting. At a scrape a
collector reads them, pulls the broker's state (offsets, groups) through callables, and `prometheus_client` writes the
text. That library is imported at the first scrape: a broker without scrapes does not carry its 5 MB.

There are two families of names: `millstream_...` for our own metrics, and the names and labels of kafka_exporter
(`kafka_...`) for offsets and lag, so that existing dashboards and alerts work without a change. As there, "current" is
the high watermark, so lag counts the records that a group could have read.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

API_KEYS = 128
"""Kafka's keys are far below. Unknown keys are refused and not counted, so hostile ones cost nothing."""

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


_BOUNDS = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class Histogram:
    """Counts in fixed buckets from 50 µs (a sync on NVMe) to 10 s (a sync on a failing disk)."""

    __slots__ = ("counts", "sum")

    def __init__(self) -> None:
        self.counts = [0] * (len(_BOUNDS) + 1)
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(_BOUNDS, seconds)] += 1
        self.sum += seconds

    def observe_all(self, seconds: float, count: int) -> None:
        """Adds `count` equal times."""
        self.counts[bisect_left(_BOUNDS, seconds)] += count
        self.sum += seconds * count

    @property
    def count(self) -> int:
        return sum(self.counts)

    def buckets(self) -> Iterator[tuple[str, float]]:
        """Cumulative, as in Prometheus."""
        total = 0
        for bound, count in zip((*map(str, _BOUNDS), "+Inf"), self.counts, strict=True):
            total += count
            yield bound, total


class Metrics:
    """One per broker; belongs to its event loop."""

    __slots__ = (
        "batches_in",
        "bytes_in",
        "bytes_out",
        "commit_seconds",
        "connections_active",
        "connections_closed",
        "connections_evicted",
        "connections_opened",
        "connections_refused",
        "fetch_seconds",
        "fetch_waits",
        "latencies",
        "loop_busy_seconds_max",
        "produce_seconds",
        "records_in",
        "recovered_bytes",
        "recovered_logs",
        "request_errors",
        "requests",
        "scrub_rounds",
        "stall_seconds",
        "sync_seconds",
        "syncs",
        "torn_bytes",
        "torn_logs",
        "verified_bytes",
    )

    def __init__(self) -> None:
        self.connections_opened = 0
        self.connections_closed = 0
        self.connections_active = 0
        self.connections_refused = 0
        self.connections_evicted = 0
        self.requests = [0] * API_KEYS
        """Indexed by API key."""
        self.request_errors = 0
        self.bytes_in = 0
        self.bytes_out = 0
        self.records_in = 0
        """From the batch headers, without decoding."""
        self.batches_in = 0
        self.fetch_waits = 0
        """Fetches that found no records and waited."""
        self.syncs = 0
        self.sync_seconds = Histogram()
        self.produce_seconds = Histogram()
        """From the whole request to its response, including the sync."""
        self.fetch_seconds = Histogram()
        """The same, without the long poll: that time measures the topic's traffic, not the broker."""
        self.commit_seconds = Histogram()
        """Offset commits, until they are durable."""
        self.latencies: list[Histogram | None] = [None] * API_KEYS
        """Indexed by API key."""
        for key, histogram in ((0, self.produce_seconds), (1, self.fetch_seconds), (8, self.commit_seconds)):
            self.latencies[key] = histogram
        self.stall_seconds = Histogram()
        """Lateness of the event loop's beats (`core/loop_watch.py`)."""
        self.loop_busy_seconds_max = 0.0
        self.recovered_logs = 0
        """Logs that recovery scanned after an unclean shutdown."""
        self.recovered_bytes = 0
        self.torn_logs = 0
        """Logs with a torn tail."""
        self.torn_bytes = 0
        self.verified_bytes = 0
        self.scrub_rounds = 0


COUNTERS = {
    "connections_opened": "Connections accepted.",
    "connections_closed": "Connections closed, by either side.",
    "connections_refused": "Connections refused, because their peer or the door had too many.",
    "connections_evicted": "Idle connections closed to make room for new ones.",
    "request_errors": "Requests answered with an error.",
    "bytes_in": "Bytes received from clients.",
    "bytes_out": "Bytes sent to clients.",
    "records_in": "Records appended.",
    "batches_in": "Record batches appended.",
    "fetch_waits": "Fetches that had to wait for records.",
    "syncs": "Syncs of log files.",
    "recovered_logs": "Logs scanned at start because they were not closed cleanly.",
    "recovered_bytes": "Bytes scanned at start because their log was not closed cleanly.",
    "torn_logs": "Logs whose torn tail was cut at start.",
    "torn_bytes": "Bytes of torn tails cut at start.",
    "verified_bytes": "Stored bytes that the scrub and `log verify` have checked.",
    "scrub_rounds": "Completed rounds of the scrub over all stored batches.",
}


class PartitionFigures(NamedTuple):
    topic: str
    partition: int
    start: int
    high_watermark: int
    """Readers see only offsets below it."""
    end: int
    size_bytes: int


class DamageFigures(NamedTuple):
    """The damage in one partition; omitted if it never had any."""

    topic: str
    partition: int
    ranges: int
    offsets: int
    """Offsets that the ranges cover."""
    found: int
    """Damage found since the start."""


class Committed(NamedTuple):
    group: str
    topic: str
    partition: int
    offset: int


class GroupFigures(NamedTuple):
    group: str
    state: str
    members: int


class QueueShare(NamedTuple):
    """A queue's state in one partition."""

    group: str
    topic: str
    partition: int
    available: int
    leased: int
    waiting: int
    done: int
    dead: int
    redelivered: int
    age_ms: int
    """Age of the oldest available record."""


QUEUE_GAUGES: dict[str, tuple[str, Callable[[QueueShare], float]]] = {
    "available": ("Records that are ready for delivery.", lambda share: share.available),
    "leased": ("Records that are leased to workers.", lambda share: share.leased),
    "waiting": ("Records that are delayed or in backoff.", lambda share: share.waiting),
    "oldest_available_seconds": ("Age of the oldest available record.", lambda share: share.age_ms / 1000),
}
QUEUE_COUNTERS: dict[str, tuple[str, Callable[[QueueShare], float]]] = {
    "done": ("Records that workers accepted.", lambda share: share.done),
    "dead": ("Records that became dead: rejected, or failed too often.", lambda share: share.dead),
    "redeliveries": ("Redeliveries: deliveries of a record after its first.", lambda share: share.redelivered),
}


class Snapshot(NamedTuple):
    """The results of the callables at one moment, so that another thread can write the text."""

    partitions: list[PartitionFigures]
    committed: list[Committed]
    groups: list[GroupFigures]
    queues: list[QueueShare]
    brokers: int
    damage: list[DamageFigures]
    room: tuple[int, int]
    """Size and free bytes of the logs' disk; -1 if unknown."""


COMMITTED_A_TURN = 10_000
"""Offsets that are collected before the event loop goes on: some 3 ms."""


class Scrape:
    """The text of `/metrics`. `snapshot` runs on the event loop; its callables may return plain tuples."""

    def __init__(
        self,
        metrics: Metrics,
        topics: Callable[[], Iterable[tuple[str, int, int, int, int, int]]],
        committed: Callable[[], Iterable[tuple[str, str, int, int]]],
        groups: Callable[[], Iterable[tuple[str, str, int]]],
        queues: Callable[[], Iterable[QueueShare]] = tuple,
        api_name: Callable[[int], str] = str,
        brokers: Callable[[], int] = lambda: 1,
        damage: Callable[[], Iterable[DamageFigures]] = tuple,
        room: Callable[[], tuple[int, int]] = lambda: (-1, -1),
    ) -> None:
        self._metrics = metrics
        self._topics = topics
        self._committed = committed
        self._groups = groups
        self._queues = queues
        self._brokers = brokers
        self._damage = damage
        self._room = room
        self._api_name = api_name

    async def gather(self) -> list[Committed]:
        """The committed offsets, of which there may be hundreds of thousands, `COMMITTED_A_TURN` at a time."""
        found: list[Committed] = []
        for figures in self._committed():
            found.append(Committed._make(figures))
            if len(found) % COMMITTED_A_TURN == 0:
                await asyncio.sleep(0)
        return found

    def snapshot(self, committed: list[Committed] | None = None) -> Snapshot:
        return Snapshot(
            [PartitionFigures._make(figures) for figures in self._topics()],
            [Committed._make(figures) for figures in self._committed()] if committed is None else committed,
            [GroupFigures._make(figures) for figures in self._groups()],
            list(self._queues()),
            self._brokers(),
            list(self._damage()),
            self._room(),
        )

    def text(self, snapshot: Snapshot | None = None) -> bytes:
        from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

        # Not the library's global registry: two brokers in one process (tests, notebooks) must not collide.
        registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=registry)
        registry.register(_Collector(self._metrics, snapshot or self.snapshot(), self._api_name))
        return generate_latest(registry)


class _Collector:
    """The collector of one scrape, for `prometheus_client`."""

    def __init__(self, metrics: Metrics, snapshot: Snapshot, api_name: Callable[[int], str]) -> None:
        self._metrics = metrics
        self._snapshot = snapshot
        self._api_name = api_name

    def describe(self) -> Iterable[Metric]:
        """Empty, or `prometheus_client` would collect once just to learn the names."""
        return ()

    def collect(self) -> Iterator[Metric]:
        yield from self._counted()
        ends: dict[tuple[str, int], int] = {}
        yield from self._partitions(ends)
        yield from self._lag(ends)
        yield from self._members()
        yield from self._queues()
        yield from self._damage()

    def _counted(self) -> Iterator[Metric]:
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        metrics = self._metrics
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(f"millstream_{name}", text, value=getattr(metrics, name))
        yield GaugeMetricFamily("millstream_connections", "Connections open now.", value=metrics.connections_active)
        requests = CounterMetricFamily("millstream_requests", "Requests by API.", labels=["api"])
        for key, count in enumerate(metrics.requests):
            if count:
                requests.add_metric([self._api_name(key)], count)
        yield requests
        for name, text, histogram in (
            ("sync_seconds", "Duration of syncs of log files.", metrics.sync_seconds),
            (
                "produce_seconds",
                "Time from receiving a Produce request to answering it, including the sync.",
                metrics.produce_seconds,
            ),
            (
                "fetch_seconds",
                "Time from receiving a Fetch request to answering it, without the wait for records.",
                metrics.fetch_seconds,
            ),
            (
                "commit_seconds",
                "Time from receiving an OffsetCommit request to answering it, including the sync.",
                metrics.commit_seconds,
            ),
            (
                "event_loop_stall_seconds",
                "Delay of a periodic timer on the event loop.",
                metrics.stall_seconds,
            ),
        ):
            yield HistogramMetricFamily(
                f"millstream_{name}", text, buckets=list(histogram.buckets()), sum_value=histogram.sum
            )
        yield GaugeMetricFamily(
            "millstream_event_loop_busy_seconds_max",
            "Longest CPU time for which a callback blocked the event loop since the start.",
            value=metrics.loop_busy_seconds_max,
        )
        yield GaugeMetricFamily("kafka_brokers", "Brokers in the cluster.", value=self._snapshot.brokers)
        size, free = self._snapshot.room
        if size >= 0:
            yield GaugeMetricFamily(
                "millstream_storage_size_bytes", "Bytes of the disk that holds the logs.", value=size
            )
            yield GaugeMetricFamily("millstream_storage_free_bytes", "Bytes free on that disk.", value=free)

    def _partitions(self, ends: dict[tuple[str, int], int]) -> Iterator[Metric]:
        from prometheus_client.metrics_core import GaugeMetricFamily

        labels = ["topic", "partition"]
        current = GaugeMetricFamily("kafka_topic_partition_current_offset", "Offset of the next record.", labels=labels)
        oldest = GaugeMetricFamily("kafka_topic_partition_oldest_offset", "Offset of the oldest record.", labels=labels)
        size = GaugeMetricFamily("millstream_partition_size_bytes", "Size of the partition's log.", labels=labels)
        unsynced = GaugeMetricFamily(
            "millstream_partition_unsynced_records", "Records appended but not yet durable.", labels=labels
        )
        partitions: Counter[str] = Counter()
        for figures in self._snapshot.partitions:
            where = [figures.topic, str(figures.partition)]
            partitions[figures.topic] += 1
            ends[figures.topic, figures.partition] = figures.high_watermark
            current.add_metric(where, figures.high_watermark)
            oldest.add_metric(where, figures.start)
            size.add_metric(where, figures.size_bytes)
            unsynced.add_metric(where, figures.end - figures.high_watermark)
        count = GaugeMetricFamily("kafka_topic_partitions", "Partitions of the topic.", labels=["topic"])
        for topic, number in partitions.items():
            count.add_metric([topic], number)
        yield from (count, current, oldest, size, unsynced)

    def _lag(self, ends: dict[tuple[str, int], int]) -> Iterator[Metric]:
        from prometheus_client.metrics_core import GaugeMetricFamily

        labels = ["consumergroup", "topic", "partition"]
        offset = GaugeMetricFamily("kafka_consumergroup_current_offset", "Offset the group committed.", labels=labels)
        lag = GaugeMetricFamily("kafka_consumergroup_lag", "Records that the group has not consumed.", labels=labels)
        offset_sum: Counter[tuple[str, str]] = Counter()
        lag_sum: Counter[tuple[str, str]] = Counter()
        for committed in self._snapshot.committed:
            end = ends.get((committed.topic, committed.partition))
            if end is None:  # the topic is deleted, its offsets not yet
                continue
            where = [committed.group, committed.topic, str(committed.partition)]
            behind = max(0, end - committed.offset)
            offset.add_metric(where, committed.offset)
            lag.add_metric(where, behind)
            offset_sum[committed.group, committed.topic] += committed.offset
            lag_sum[committed.group, committed.topic] += behind
        yield from (offset, lag)
        for name, text, sums in (
            ("kafka_consumergroup_current_offset_sum", "Committed offsets of the group, summed by topic.", offset_sum),
            ("kafka_consumergroup_lag_sum", "Lag of the group, summed by topic.", lag_sum),
        ):
            family = GaugeMetricFamily(name, text, labels=labels[:2])
            for (group, topic), total in sums.items():
                family.add_metric([group, topic], total)
            yield family

    def _members(self) -> Iterator[Metric]:
        from prometheus_client.metrics_core import GaugeMetricFamily

        members = GaugeMetricFamily("kafka_consumergroup_members", "Members of the group.", labels=["consumergroup"])
        states: Counter[str] = Counter()
        for figures in self._snapshot.groups:
            members.add_metric([figures.group], figures.members)
            states[figures.state] += 1
        by_state = GaugeMetricFamily("millstream_groups", "Groups by state.", labels=["state"])
        for state, number in states.items():
            by_state.add_metric([state], number)
        yield from (members, by_state)

    def _queues(self) -> Iterator[Metric]:
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

        for kind, table in ((GaugeMetricFamily, QUEUE_GAUGES), (CounterMetricFamily, QUEUE_COUNTERS)):
            for name, (text, value) in table.items():
                family = kind(f"millstream_queue_{name}", text, labels=["group", "topic", "partition"])
                for share in self._snapshot.queues:
                    family.add_metric([share.group, share.topic, str(share.partition)], value(share))
                yield family

    def _damage(self) -> Iterator[Metric]:
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

        labels = ["topic", "partition"]
        ranges = GaugeMetricFamily("millstream_damaged_ranges", "Damaged ranges of offsets.", labels=labels)
        offsets = GaugeMetricFamily("millstream_damaged_offsets", "Offsets in damaged ranges.", labels=labels)
        found = 0
        for topic, partition, range_count, offset_count, found_count in self._snapshot.damage:
            found += found_count
            if range_count:
                ranges.add_metric([topic, str(partition)], range_count)
                offsets.add_metric([topic, str(partition)], offset_count)
        yield from (ranges, offsets)
        yield CounterMetricFamily("millstream_damage_found", "Damaged ranges found in stored logs.", value=found)
