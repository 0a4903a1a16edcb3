"""The options of `format("millstream")`: the names of Spark's Kafka source and sink, so that a job moves by one word.

Spark ignores the case of option names, and so does this module. A client's setting may have `kafka.` in front of its
name. Unknown names, contradictions and unreadable values are refused at once, in one sentence that lists the known
names.

Other options of Spark's Kafka source and of Kafka's own clients fall into three kinds:

    no meaning here    CONSUMER_TUNING, PRODUCER_TUNING: accepted and ignored. They tune a client that is not used
                       here, and none of them changes the rows that are read or written.
    would change rows  REFUSED: a sentence names the replacement, as Spark's own source does for most of them.
    security           security.protocol other than PLAINTEXT, sasl.* and ssl.*: refused, because ignoring them would
                       silently send data unencrypted.

`minOffsetsPerTrigger` and `maxTriggerDelay` work as there. Two differences to Spark's source: only committed records
are read (its default is read_uncommitted), and offsets given as JSON need not name every partition.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from millstream.core.errors import MillstreamError
from millstream.wire.kafka.requests import EARLIEST, LATEST, TopicPartition


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


SOURCE_OPTIONS = (
    "subscribe",
    "subscribePattern",
    "assign",
    "startingOffsets",
    "endingOffsets",
    "startingTimestamp",
    "endingTimestamp",
    "startingOffsetsByTimestamp",
    "endingOffsetsByTimestamp",
    "startingOffsetsByTimestampStrategy",
    "maxOffsetsPerTrigger",
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
    "minPartitions",
    "maxRecordsPerPartition",
    "failOnDataLoss",
    "includeHeaders",
    "timestampSkewMs",
    "pushFilters",
)
SINK_OPTIONS = ("topic", "includeHeaders", "compression", "max.request.size")
FETCH_BYTES = 4 << 20
"""Per partition and request. Four times Kafka's default: a read of ten million records took a tenth less time."""
INT_MAX, LONG_MAX = 2**31 - 1, 2**63 - 1
"""The limits of Kafka's protocol."""
SKEW_MS_MAX = 1 << 60
SPARKS_OWN = ("path", "checkpointlocation", "queryname")
"""Spark's own options, which it also passes to a sink."""
CLIENT_OPTIONS = (
    "bootstrap.servers",
    "client.id",
    "group.id",
    "request.timeout.ms",
    "max.partition.fetch.bytes",
    "compression.type",
    "isolation.level",
    "security.protocol",
)
COMMON_TUNING = _words(
    """
    auto.include.jmx.reporter client.dns.lookup client.rack connections.max.idle.ms default.api.timeout.ms
    enable.metrics.push metadata.max.age.ms metadata.recovery.rebootstrap.trigger.ms metadata.recovery.strategy
    metric.reporters metrics.num.samples metrics.recording.level metrics.sample.window.ms receive.buffer.bytes
    reconnect.backoff.max.ms reconnect.backoff.ms retries retry.backoff.max.ms retry.backoff.ms send.buffer.bytes
    socket.connection.setup.timeout.max.ms socket.connection.setup.timeout.ms
    """
)
CONSUMER_TUNING = (
    "kafkaConsumer.pollTimeoutMs",
    "fetchOffset.numRetries",
    "fetchOffset.retryIntervalMs",
    "groupIdPrefix",
    *COMMON_TUNING,
    *_words(
        """
        allow.auto.create.topics check.crcs exclude.internal.topics fetch.max.bytes fetch.max.wait.ms fetch.min.bytes
        group.instance.id group.protocol group.remote.assignor heartbeat.interval.ms max.poll.interval.ms
        max.poll.records partition.assignment.strategy session.timeout.ms
        """
    ),
)
PRODUCER_TUNING = (
    *COMMON_TUNING,
    *_words(
        """
        acks batch.size buffer.memory compression.gzip.level compression.lz4.level compression.zstd.level
        delivery.timeout.ms enable.idempotence linger.ms max.block.ms max.in.flight.requests.per.connection
        metadata.max.idle.ms partitioner.adaptive.partitioning.enable partitioner.availability.timeout.ms
        transaction.timeout.ms
        """
    ),
)
REFUSED = {
    "auto.offset.reset": "startingOffsets selects the start",
    "enable.auto.commit": "with group.id the progress is committed automatically",
    "interceptor.classes": "no Java code runs here",
    "key.deserializer": "keys are bytes; decode them in the query",
    "value.deserializer": "values are bytes; decode them in the query",
    "key.serializer": "keys are bytes or text; encode them in the query",
    "value.serializer": "values are bytes or text; encode them in the query",
    "partitioner.class": "no Java code runs here; a column named partition chooses the partition",
    "partitioner.ignore.keys": "a column named partition chooses the partition",
    "transactional.id": "the sink is idempotent, not transactional",
}


class BadOption(MillstreamError):
    """An invalid option."""


@dataclass(frozen=True)
class Positions:
    """Start or end positions: by offset, by time, or at one of the ends; unnamed partitions use `rest`."""

    rest: int
    """EARLIEST, LATEST, or a time in milliseconds."""
    offsets: Mapping[TopicPartition, int] = field(default_factory=dict)
    """Offsets, or EARLIEST and LATEST."""
    times: Mapping[TopicPartition, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ClientOptions:
    bootstrap: str
    client_id: str = "millstream-spark"
    timeout_seconds: float = 30.0


@dataclass(frozen=True)
class SourceOptions:
    client: ClientOptions
    topics: tuple[str, ...] = ()
    pattern: str | None = None
    assigned: tuple[TopicPartition, ...] = ()
    starting: Positions = field(default_factory=lambda: Positions(EARLIEST))
    ending: Positions = field(default_factory=lambda: Positions(LATEST))
    strict_times: bool = True
    """A start time after the last record is an error, not the end."""
    rows_per_trigger_max: int | None = None
    rows_per_trigger_min: int | None = None
    trigger_delay_seconds_max: float = 900.0
    """The longest wait of a batch for `rows_per_trigger_min`."""
    partitions_min: int | None = None
    rows_per_partition_max: int = 2_000_000
    """The size limit of a task's range: several tasks read a long partition."""
    fail_on_data_loss: bool = True
    with_headers: bool = False
    timestamp_skew_ms: int = 3_600_000
    """How much older a record may be than an earlier one, for the upper bound of a filter on time."""
    push_filters: bool = False
    """Whether a query's filters limit the fetches. Spark plans a DataFrame's reads once: other queries of
    the same DataFrame get the same ranges.
    """
    group: str | None = None
    fetch_bytes: int = FETCH_BYTES


@dataclass(frozen=True)
class SinkOptions:
    client: ClientOptions
    topic: str | None = None
    compression: str = "none"
    batch_bytes: int = 1_000_000
    """Of a batch before compression. A little below the brokers' default limit, 1 MiB."""


class _Given:
    """The options of one read or write, each taken out once; the rest is unknown."""

    def __init__(self, options: Mapping[str, str], known: tuple[str, ...], tuning: tuple[str, ...] = ()) -> None:
        self._known = (*known, *CLIENT_OPTIONS)
        names = {name.lower(): name for name in (*tuning, *self._known)}
        self._values: dict[str, str] = {}
        for name, value in options.items():
            plain = name.lower()
            if plain not in names:
                plain = plain.removeprefix("kafka.")
            _refuse_what_changes_rows_or_hides(name, plain)
            if plain not in names:
                close = difflib.get_close_matches(plain, names, n=1)
                hint = f"; did you mean {names[close[0]]}?" if close else "."
                raise BadOption(f"option {name!r} is not known{hint} Known are: {', '.join(self._known)}")
            if self._values.get(plain, value) != value:
                raise BadOption(f"{names[plain]} is given twice, as {self._values[plain]} and as {value}")
            self._values[plain] = value
        self._check_client()

    def _check_client(self) -> None:
        protocol = self.text("security.protocol") or "PLAINTEXT"
        if protocol.upper() != "PLAINTEXT":
            raise BadOption(_no_security(f"security.protocol={protocol}"))
        level = self.text("isolation.level") or "read_committed"
        if level.lower() != "read_committed":
            raise BadOption(f"isolation.level={level} is not possible: only committed records are read")

    def text(self, name: str) -> str | None:
        value = self._values.get(name.lower())
        return value.strip() if value is not None else None

    def given(self, *names: str) -> list[str]:
        return [name for name in names if name.lower() in self._values]

    def integer(self, name: str, low: int, high: int = LONG_MAX) -> int | None:
        text = self.text(name)
        if text is None:
            return None
        try:
            value = int(text)
        except ValueError:
            raise BadOption(f"{name}={text} is not a whole number") from None
        if value < low:
            raise BadOption(f"{name}={text} is less than {low}")
        if value > high:
            raise BadOption(f"{name}={text} is more than {high}")
        return value

    def boolean(self, name: str, default: bool) -> bool:
        text = self.text(name)
        if text is None:
            return default
        if text.lower() not in ("true", "false"):
            raise BadOption(f"{name}={text} is neither true nor false")
        return text.lower() == "true"

    def client(self) -> ClientOptions:
        bootstrap = self.text("bootstrap.servers")
        if not bootstrap:
            raise BadOption("bootstrap.servers is missing: name a broker, as in 127.0.0.1:9092")
        timeout_ms = self.integer("request.timeout.ms", 1, INT_MAX) or 30_000
        return ClientOptions(bootstrap, self.text("client.id") or "millstream-spark", timeout_ms / 1000)


def _refuse_what_changes_rows_or_hides(name: str, plain: str) -> None:
    if plain in REFUSED:
        raise BadOption(f"option {name!r} is not possible: {REFUSED[plain]}")
    if plain.startswith(("sasl.", "ssl.", "security.provider")):
        raise BadOption(_no_security(name))


def _no_security(what: str) -> str:
    return f"{what}: encryption and logins are not supported here; use a listener without them and leave the option out"


def parse_source(options: Mapping[str, str], streaming: bool) -> SourceOptions:
    given = _Given(options, SOURCE_OPTIONS, CONSUMER_TUNING)
    which = given.given("subscribe", "subscribePattern", "assign")
    if len(which) != 1:
        raise BadOption(
            "choose one of subscribe (topics with commas), subscribePattern (a regular expression) and "
            f"assign (JSON); given are {', '.join(which) or 'none'}"
        )
    if streaming and given.given("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp"):
        raise BadOption("a stream has no end: endingOffsets, endingTimestamp and similar options are for batch reads")
    starting = _positions(given, "starting", LATEST if streaming else EARLIEST)
    ending = _positions(given, "ending", LATEST)
    if not streaming and (starting.rest == LATEST or LATEST in starting.offsets.values()):
        raise BadOption("a batch read cannot start at the latest offset: it would read nothing")
    if ending.rest == EARLIEST or EARLIEST in ending.offsets.values():
        raise BadOption("a read cannot end at the earliest offset: it would read nothing")
    _check_order(starting, ending)
    pattern = given.text("subscribePattern")
    if pattern is not None:
        try:
            re.compile(pattern)
        except re.error as error:
            raise BadOption(f"subscribePattern={pattern} is not a regular expression: {error}") from error
    strategy = given.text("startingOffsetsByTimestampStrategy") or "error"
    if strategy not in ("error", "latest"):
        raise BadOption(f"startingOffsetsByTimestampStrategy={strategy} is neither error nor latest")
    topics = tuple(topic.strip() for topic in (given.text("subscribe") or "").split(",") if topic.strip())
    if which == ["subscribe"] and not topics:
        raise BadOption("subscribe names no topic")
    rows_min, rows_max = given.integer("minOffsetsPerTrigger", 1), given.integer("maxOffsetsPerTrigger", 1)
    if rows_min is not None and rows_max is not None and rows_min > rows_max:
        raise BadOption(f"minOffsetsPerTrigger={rows_min} is more than maxOffsetsPerTrigger={rows_max}")
    return SourceOptions(
        client=given.client(),
        topics=topics,
        pattern=pattern,
        assigned=_assigned(given.text("assign")),
        starting=starting,
        ending=ending,
        strict_times=strategy == "error",
        rows_per_trigger_max=rows_max,
        rows_per_trigger_min=rows_min,
        trigger_delay_seconds_max=_seconds("maxTriggerDelay", given.text("maxTriggerDelay") or "15m"),
        partitions_min=given.integer("minPartitions", 1),
        rows_per_partition_max=_or(given.integer("maxRecordsPerPartition", 1), 2_000_000),
        fail_on_data_loss=given.boolean("failOnDataLoss", True),
        with_headers=given.boolean("includeHeaders", False),
        timestamp_skew_ms=_or(given.integer("timestampSkewMs", -1, SKEW_MS_MAX), 3_600_000),
        push_filters=given.boolean("pushFilters", False),
        group=given.text("group.id") or None,
        fetch_bytes=_or(given.integer("max.partition.fetch.bytes", 1024, INT_MAX), FETCH_BYTES),
    )


def parse_sink(options: Mapping[str, str]) -> SinkOptions:
    given = _Given(
        {name: value for name, value in options.items() if name.lower() not in SPARKS_OWN},
        SINK_OPTIONS,
        PRODUCER_TUNING,
    )
    compression = given.text("compression") or given.text("compression.type") or "none"
    if compression not in ("none", "gzip", "snappy", "lz4", "zstd"):
        raise BadOption(f"compression={compression} is not known; use none, gzip, snappy, lz4 or zstd")
    batch_bytes = _or(given.integer("max.request.size", 1024, INT_MAX), SinkOptions.batch_bytes)
    return SinkOptions(given.client(), given.text("topic") or None, compression, batch_bytes)


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def _positions(given: _Given, which: str, default: int) -> Positions:
    names = (f"{which}Offsets", f"{which}Timestamp", f"{which}OffsetsByTimestamp")
    # If several are given, the same one wins as with Spark's own source.
    by_time = given.text(names[2])
    time = given.integer(names[1], 0)
    if time is not None:
        return Positions(time)
    if by_time is not None:
        return Positions(default, times=_per_partition(names[2], by_time, 0))
    text = given.text(names[0])
    if text is None:
        return Positions(default)
    if text.lower() in ("earliest", "latest"):
        return Positions(EARLIEST if text.lower() == "earliest" else LATEST)
    return Positions(default, _per_partition(names[0], text, EARLIEST))


def _check_order(starting: Positions, ending: Positions) -> None:
    """The given start and end of a partition must be in order."""
    if starting.rest >= 0 and 0 <= ending.rest < starting.rest:
        raise BadOption(f"startingTimestamp={starting.rest} is after endingTimestamp={ending.rest}")
    for kind, starts, ends in (("offset", starting.offsets, ending.offsets), ("time", starting.times, ending.times)):
        for place in sorted(starts.keys() & ends.keys()):
            if 0 <= ends[place] < starts[place]:
                raise BadOption(
                    f"{place[0]}-{place[1]} would start at {kind} {starts[place]} and end before it, at {ends[place]}"
                )


def _seconds(name: str, text: str) -> float:
    """A time in Spark's notation: 500ms, 15m, 2h; plain numbers are milliseconds."""
    units = {"us": 1e-6, "ms": 1e-3, "": 1e-3, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
    match = re.fullmatch(r"(\d+)\s*([a-z]*)", text.lower())
    if match is None or match[2] not in units:
        raise BadOption(f"{name}={text} is not a time like 500ms, 30s or 15m")
    return int(match[1]) * units[match[2]]


def _per_partition(name: str, text: str, low: int) -> dict[TopicPartition, int]:
    """`{"topic": {"0": 23, "1": -2}}`"""
    try:
        read = json.loads(text)
        places = {
            (topic, int(partition)): _whole(value)
            for topic, partitions in read.items()
            for partition, value in partitions.items()
        }
    except (ValueError, AttributeError, TypeError):
        raise BadOption(
            f'{name}={text} is neither earliest nor latest nor JSON like {{"topic": {{"0": 23}}}}'
        ) from None
    for place, value in places.items():
        if not low <= value <= LONG_MAX:
            raise BadOption(f"{name}: {value} for {place[0]}-{place[1]} is not possible")
    return places


def _whole(value: object) -> int:
    """A JSON number, or one in quotes, without a fraction."""
    if isinstance(value, int | str) and not isinstance(value, bool):
        return int(value)
    raise ValueError(value)


def _assigned(text: str | None) -> tuple[TopicPartition, ...]:
    if text is None:
        return ()
    try:
        places = tuple((topic, int(index)) for topic, indexes in json.loads(text).items() for index in indexes)
    except (ValueError, AttributeError, TypeError):
        raise BadOption(f'assign={text} is not JSON like {{"topic": [0, 1]}}') from None
    if not places:
        raise BadOption("assign names no partition")
    return places
