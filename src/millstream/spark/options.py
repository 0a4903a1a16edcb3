"""The options of `format("millstream")`: the names of Spark's Kafka source and sink, so that a job moves by one word.

Spark hands options over without regard to case, and so they are matched. A name may stand with or without `kafka.`
in front where it is a client's setting. Unknown names, contradictions and values that cannot be read are refused at
once, in one sentence that says what is known.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from millstream.errors import MillstreamError
from millstream.wire.kafka.requests import EARLIEST, LATEST, Place

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
    "minPartitions",
    "maxRecordsPerPartition",
    "failOnDataLoss",
    "includeHeaders",
    "timestampSkewMs",
)
SINK_OPTIONS = ("topic", "includeHeaders", "compression")
CLIENT_OPTIONS = (
    "bootstrap.servers",
    "client.id",
    "group.id",
    "request.timeout.ms",
    "max.partition.fetch.bytes",
    "compression.type",
)


class BadOption(MillstreamError):
    """An option that Spark was given and that cannot be."""


@dataclass(frozen=True)
class Positions:
    """Where to begin or end: by offset, by time, or at one of the ends; partitions that are not named use `rest`."""

    rest: int
    """EARLIEST, LATEST, or a time in milliseconds."""
    offsets: Mapping[Place, int] = field(default_factory=dict)
    """Offsets, or EARLIEST and LATEST."""
    times: Mapping[Place, int] = field(default_factory=dict)


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
    assigned: tuple[Place, ...] = ()
    starting: Positions = field(default_factory=lambda: Positions(EARLIEST))
    ending: Positions = field(default_factory=lambda: Positions(LATEST))
    strict_times: bool = True
    """A starting time behind the last record is an error, not the end."""
    rows_per_trigger_max: int | None = None
    partitions_min: int | None = None
    rows_per_partition_max: int = 2_000_000
    """Where a task's range is cut: a long partition is read by several tasks."""
    fail_on_data_loss: bool = True
    with_headers: bool = False
    timestamp_skew_ms: int = 3_600_000
    """How far a record's time may lie behind that of an earlier one, where a filter on time cuts off the end."""
    group: str | None = None
    fetch_bytes: int = 1 << 20


@dataclass(frozen=True)
class SinkOptions:
    client: ClientOptions
    topic: str | None = None
    compression: str = "none"


class _Given:
    """The options of one read or write, each taken out once; what is left over is not known."""

    def __init__(self, options: Mapping[str, str], known: tuple[str, ...]) -> None:
        self._known = (*known, *CLIENT_OPTIONS)
        names = {name.lower(): name for name in self._known}
        self._values: dict[str, str] = {}
        for name, value in options.items():
            plain = name.lower()
            if plain.removeprefix("kafka.") in {each.lower() for each in CLIENT_OPTIONS}:
                plain = plain.removeprefix("kafka.")
            if plain not in names:
                close = difflib.get_close_matches(plain, names, n=1)
                hint = f"; did you mean {names[close[0]]}?" if close else ""
                raise BadOption(f"option {name!r} is not known{hint} Known are: {', '.join(self._known)}")
            self._values[plain] = value

    def text(self, name: str) -> str | None:
        value = self._values.get(name.lower())
        return value.strip() if value is not None else None

    def given(self, *names: str) -> list[str]:
        return [name for name in names if name.lower() in self._values]

    def integer(self, name: str, low: int) -> int | None:
        text = self.text(name)
        if text is None:
            return None
        try:
            value = int(text)
        except ValueError:
            raise BadOption(f"{name}={text} is not a whole number") from None
        if value < low:
            raise BadOption(f"{name}={text} is less than {low}")
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
        timeout_ms = self.integer("request.timeout.ms", 1) or 30_000
        return ClientOptions(bootstrap, self.text("client.id") or "millstream-spark", timeout_ms / 1000)


def parse_source(options: Mapping[str, str], streaming: bool) -> SourceOptions:
    given = _Given(options, SOURCE_OPTIONS)
    which = given.given("subscribe", "subscribePattern", "assign")
    if len(which) != 1:
        raise BadOption(
            "say what to read with one of subscribe (topics with commas), subscribePattern (a regular expression) and "
            f"assign (JSON); given are {', '.join(which) or 'none'}"
        )
    if streaming and given.given("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp"):
        raise BadOption("a stream has no end: endingOffsets, endingTimestamp and their kin are for batch reads")
    starting = _positions(given, "starting", LATEST if streaming else EARLIEST)
    ending = _positions(given, "ending", LATEST)
    if not streaming and (starting.rest == LATEST or LATEST in starting.offsets.values()):
        raise BadOption("a batch read cannot start at the latest offset: it would read nothing")
    if ending.rest == EARLIEST or EARLIEST in ending.offsets.values():
        raise BadOption("a read cannot end at the earliest offset: it would read nothing")
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
    return SourceOptions(
        client=given.client(),
        topics=topics,
        pattern=pattern,
        assigned=_assigned(given.text("assign")),
        starting=starting,
        ending=ending,
        strict_times=strategy == "error",
        rows_per_trigger_max=given.integer("maxOffsetsPerTrigger", 1),
        partitions_min=given.integer("minPartitions", 1),
        rows_per_partition_max=_or(given.integer("maxRecordsPerPartition", 1), 2_000_000),
        fail_on_data_loss=given.boolean("failOnDataLoss", True),
        with_headers=given.boolean("includeHeaders", False),
        timestamp_skew_ms=_or(given.integer("timestampSkewMs", -1), 3_600_000),
        group=given.text("group.id") or None,
        fetch_bytes=_or(given.integer("max.partition.fetch.bytes", 1024), 1 << 20),
    )


def parse_sink(options: Mapping[str, str]) -> SinkOptions:
    given = _Given({name: value for name, value in options.items() if name.lower() != "path"}, SINK_OPTIONS)
    compression = given.text("compression") or given.text("compression.type") or "none"
    if compression not in ("none", "gzip", "snappy", "lz4", "zstd"):
        raise BadOption(f"compression={compression} is not known; use none, gzip, snappy, lz4 or zstd")
    return SinkOptions(given.client(), given.text("topic") or None, compression)


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def _positions(given: _Given, which: str, default: int) -> Positions:
    names = (f"{which}Offsets", f"{which}Timestamp", f"{which}OffsetsByTimestamp")
    # As with Spark's own source, the more precise one wins where several are given.
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


def _per_partition(name: str, text: str, low: int) -> dict[Place, int]:
    """`{"topic": {"0": 23, "1": -2}}`"""
    try:
        read = json.loads(text)
        places = {
            (topic, int(partition)): int(value)
            for topic, partitions in read.items()
            for partition, value in partitions.items()
        }
    except (ValueError, AttributeError, TypeError):
        raise BadOption(
            f'{name}={text} is neither earliest nor latest nor JSON like {{"topic": {{"0": 23}}}}'
        ) from None
    for place, value in places.items():
        if value < low:
            raise BadOption(f"{name}: {value} for {place[0]}-{place[1]} is not possible")
    return places


def _assigned(text: str | None) -> tuple[Place, ...]:
    if text is None:
        return ()
    try:
        places = tuple((topic, int(index)) for topic, indexes in json.loads(text).items() for index in indexes)
    except (ValueError, AttributeError, TypeError):
        raise BadOption(f'assign={text} is not JSON like {{"topic": [0, 1]}}') from None
    if not places:
        raise BadOption("assign names no partition")
    return places
