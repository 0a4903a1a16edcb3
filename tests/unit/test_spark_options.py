"""What `format("millstream")` is told, and how it refuses what cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from millstream.spark.options import (
    CONSUMER_TUNING,
    PRODUCER_TUNING,
    REFUSED,
    SOURCE_OPTIONS,
    BadOption,
    Positions,
    SourceOptions,
    parse_sink,
    parse_source,
)
from millstream.wire.kafka.requests import EARLIEST, LATEST

NEEDED = {"bootstrap.servers": "one:9092", "subscribe": "clicks"}


def parse(streaming: bool = False, **options: str) -> SourceOptions:
    return parse_source({**NEEDED, **options}, streaming)


def refusal(options: dict[str, str], streaming: bool = False) -> str:
    with pytest.raises(BadOption) as caught:
        parse_source({**NEEDED, **options}, streaming)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_the_least_that_is_needed_reads_everything_in_a_batch_and_only_news_in_a_stream() -> None:
    batch, stream = parse(), parse(streaming=True)
    assert (batch.client.bootstrap, batch.topics, batch.fail_on_data_loss) == ("one:9092", ("clicks",), True)
    assert (batch.starting, batch.ending) == (Positions(EARLIEST), Positions(LATEST))
    assert (stream.starting, stream.ending) == (Positions(LATEST), Positions(LATEST))
    assert not batch.with_headers and batch.group is None and batch.rows_per_trigger_max is None


def test_names_are_matched_without_regard_to_case_and_with_or_without_kafka_in_front() -> None:
    options = parse_source(
        {
            "KAFKA.Bootstrap.Servers": "one:9092, two:9092",
            "subscribepattern": "a-.*",
            "MAXOFFSETSPERTRIGGER": "7",
            "kafka.group.id": "g",
            "Kafka.Client.Id": "me",
            "kafka.request.timeout.ms": "1500",
            "kafka.isolation.level": "read_committed",
            "kafka.security.protocol": "plaintext",
        },
        streaming=True,
    )
    assert options.client.bootstrap == "one:9092, two:9092"
    assert (options.pattern, options.rows_per_trigger_max, options.group) == ("a-.*", 7, "g")
    assert (options.client.client_id, options.client.timeout_seconds) == ("me", 1.5)


def test_every_number_and_switch_arrives_where_it_belongs() -> None:
    options = parse(
        streaming=True,
        subscribe=" a , b,,",
        minPartitions="8",
        maxRecordsPerPartition="1000",
        maxOffsetsPerTrigger="50",
        minOffsetsPerTrigger="20",
        maxTriggerDelay="2 min",
        failOnDataLoss="FALSE",
        includeHeaders="true",
        timestampSkewMs="-1",
        startingOffsetsByTimestampStrategy="latest",
        **{"max.partition.fetch.bytes": "4096"},
    )
    assert options.topics == ("a", "b")
    assert (options.partitions_min, options.rows_per_partition_max, options.fetch_bytes) == (8, 1000, 4096)
    assert (options.rows_per_trigger_max, options.rows_per_trigger_min) == (50, 20)
    assert options.trigger_delay_seconds_max == 120
    assert (options.fail_on_data_loss, options.with_headers) == (False, True)
    assert (options.timestamp_skew_ms, options.strict_times) == (-1, False)


@pytest.mark.parametrize(
    ("options", "starting"),
    [
        ({"startingOffsets": "latest"}, Positions(LATEST)),
        ({"startingOffsets": " Earliest "}, Positions(EARLIEST)),
        (
            {"startingOffsets": '{"clicks": {"0": 23, "1": -1, "2": -2}}'},
            Positions(LATEST, {("clicks", 0): 23, ("clicks", 1): LATEST, ("clicks", 2): EARLIEST}),
        ),
        ({"startingTimestamp": "1700000000000"}, Positions(1_700_000_000_000)),
        ({"startingOffsetsByTimestamp": '{"clicks": {"0": 5}}'}, Positions(LATEST, {}, {("clicks", 0): 5})),
        (
            {"startingOffsets": "earliest", "startingOffsetsByTimestamp": '{"clicks": {"0": 5}}'},
            Positions(LATEST, {}, {("clicks", 0): 5}),
        ),
        ({"startingTimestamp": "9", "startingOffsetsByTimestamp": '{"clicks": {"0": 5}}'}, Positions(9)),
    ],
)
def test_positions_are_read_and_the_same_one_wins_as_with_sparks_kafka_source(
    options: dict[str, str], starting: Positions
) -> None:
    assert parse(streaming=True, **options).starting == starting


def test_assign_names_partitions() -> None:
    options = parse_source({"bootstrap.servers": "one:9092", "assign": '{"a": [0, 2], "b": [1]}'}, streaming=False)
    assert options.assigned == (("a", 0), ("a", 2), ("b", 1))


def test_settings_of_a_kafka_client_that_have_no_meaning_here_are_accepted() -> None:
    for name in CONSUMER_TUNING:
        plain: dict[str, Any] = {name: "anything"}
        prefixed: dict[str, Any] = {f"kafka.{name}": "anything"}
        assert parse(**plain) == parse(**prefixed) == parse()
    for name in PRODUCER_TUNING:
        assert parse_sink({"bootstrap.servers": "one:9092", f"kafka.{name}": "anything"}).client.bootstrap == "one:9092"


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_would_change_rows_are_refused_with_what_to_do_instead(name: str) -> None:
    assert refusal({f"kafka.{name}": "x"}) == f"option 'kafka.{name}' is not possible: {REFUSED[name]}"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kafka.security.protocol", "SASL_SSL"),
        ("security.protocol", "ssl"),
        ("kafka.sasl.mechanism", "PLAIN"),
        ("kafka.sasl.jaas.config", "..."),
        ("kafka.ssl.truststore.location", "/etc/trust.jks"),
    ],
)
def test_security_that_is_not_spoken_is_refused_and_never_ignored(name: str, value: str) -> None:
    assert "encryption and logins are not supported here" in refusal({name: value})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"subscribePattern": "a.*"}, "given are subscribe, subscribePattern"),
        ({"assign": '{"clicks": [0]}'}, "given are subscribe, assign"),
        ({"startingOffsets": "latest"}, "a batch read cannot start at the latest offset"),
        ({"startingOffsets": '{"clicks": {"0": -1}}'}, "a batch read cannot start at the latest offset"),
        ({"endingOffsets": "earliest"}, "a read cannot end at the earliest offset"),
        ({"endingOffsets": '{"clicks": {"0": -2}}'}, "a read cannot end at the earliest offset"),
        (
            {"startingOffsets": '{"clicks": {"0": 9}}', "endingOffsets": '{"clicks": {"0": 8}}'},
            "clicks-0 would start at offset 9 and end before it, at 8",
        ),
        (
            {"startingOffsetsByTimestamp": '{"clicks": {"0": 9}}', "endingOffsetsByTimestamp": '{"clicks": {"0": 8}}'},
            "clicks-0 would start at time 9 and end before it, at 8",
        ),
        ({"startingTimestamp": "9", "endingTimestamp": "8"}, "startingTimestamp=9 is after endingTimestamp=8"),
        ({"minOffsetsPerTrigger": "9", "maxOffsetsPerTrigger": "8"}, "minOffsetsPerTrigger=9 is more than"),
        ({"kafka.bootstrap.servers": "two:9092"}, "bootstrap.servers is given twice, as one:9092 and as two:9092"),
        ({"kafka.isolation.level": "read_uncommitted"}, "only committed records are read"),
    ],
)
def test_contradictions_are_refused(options: dict[str, str], text: str) -> None:
    assert text in refusal(options)


@pytest.mark.parametrize("name", ["endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp"])
def test_a_stream_has_no_end(name: str) -> None:
    assert refusal({name: "5"}, streaming=True).startswith("a stream has no end")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"subscribe": " , "}, "subscribe names no topic"),
        ({"bootstrap.servers": " "}, "bootstrap.servers is missing: name a broker, as in 127.0.0.1:9092"),
        ({"maxOffsetsPerTrigger": "many"}, "maxOffsetsPerTrigger=many is not a whole number"),
        ({"minPartitions": "0"}, "minPartitions=0 is less than 1"),
        ({"includeHeaders": "yes"}, "includeHeaders=yes is neither true nor false"),
        ({"maxTriggerDelay": "soon"}, "maxTriggerDelay=soon is not a time like 500ms, 30s or 15m"),
        ({"maxTriggerDelay": "5 weeks"}, "is not a time"),
        ({"startingOffsetsByTimestampStrategy": "guess"}, "is neither error nor latest"),
        ({"startingOffsets": "first"}, 'startingOffsets=first is neither earliest nor latest nor JSON like {"topic"'),
        ({"startingOffsets": '{"clicks": 5}'}, "startingOffsets="),
        ({"startingOffsets": '{"clicks": {"zero": 5}}'}, "startingOffsets="),
        ({"startingOffsets": '{"clicks": {"0": -3}}'}, "startingOffsets: -3 for clicks-0 is not possible"),
        ({"startingTimestamp": "-5"}, "startingTimestamp=-5 is less than 0"),
        ({"startingTimestamp": str(2**63)}, f"startingTimestamp={2**63} is more than {2**63 - 1}"),
        ({"timestampSkewMs": str(2**62)}, f"timestampSkewMs={2**62} is more than"),
        ({"max.partition.fetch.bytes": str(2**31)}, f"max.partition.fetch.bytes={2**31} is more than {2**31 - 1}"),
        ({"startingOffsets": f'{{"clicks": {{"0": {2**63}}}}}'}, f"startingOffsets: {2**63} for clicks-0"),
        ({"startingOffsets": '{"clicks": {"0": 1.5}}'}, "startingOffsets="),
    ],
)
def test_values_that_cannot_be_read_are_refused(options: dict[str, str], text: str) -> None:
    assert text in refusal(options)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"subscribePattern": "a("}, "subscribePattern=a( is not a regular expression"),
        ({"assign": "[1]"}, "assign=[1] is not JSON like"),
        ({"assign": "{}"}, "assign names no partition"),
        ({}, "given are none"),
    ],
)
def test_what_to_read_must_make_sense(given: dict[str, str], text: str) -> None:
    with pytest.raises(BadOption) as caught:
        parse_source({"bootstrap.servers": "one:9092", **given}, streaming=False)
    assert text in str(caught.value)


def test_an_unknown_option_is_refused_with_the_nearest_and_all_that_are_known() -> None:
    text = refusal({"startingOffset": "earliest"})
    assert text.startswith("option 'startingOffset' is not known; did you mean startingOffsets? Known are: ")
    assert all(name in text for name in SOURCE_OPTIONS)
    assert refusal({"path": "clicks"}).startswith("option 'path' is not known")
    assert "option 'zzz' is not known. Known are: subscribe, " in refusal({"zzz": "1"})
    assert "did you mean session.timeout.ms?" in refusal({"kafka.session.timeout.msec": "1"})
