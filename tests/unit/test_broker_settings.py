"""The table of topic settings: what is known, what fits, and where a value comes from."""

from __future__ import annotations

import pytest

from millstream.broker.settings import SETTINGS, TopicSettings, check_overrides
from millstream.errors import Code, RequestError

BAD = {
    "cleanup.policy": ["", "keep", "delete,burn"],
    "compression.type": ["gzip", ""],
    "delete.retention.ms": ["-1", "x"],
    "flush": ["sometimes", "every=0", ""],
    "group.errors.deadletterqueue.topic.name": ["", "a/b", ".."],
    "group.millstream.key.order": ["yes", ""],
    "group.millstream.retry.backoff.max.ms": ["-1"],
    "group.millstream.retry.backoff.ms": ["-1", "1s"],
    "group.share.auto.offset.reset": ["none", ""],
    "group.share.delivery.count.limit": ["0", "26"],
    "group.share.heartbeat.interval.ms": ["0"],
    "group.share.partition.max.record.locks": ["0", "1000001"],
    "group.share.record.lock.duration.ms": ["0", "x"],
    "group.share.session.timeout.ms": ["0"],
    "index.interval.bytes": ["0", "1.5"],
    "max.message.bytes": ["-1", str(1 << 31)],
    "message.timestamp.type": ["createtime", ""],
    "millstream.delay.ms": ["-1"],
    "millstream.retention.done.ms": ["-2"],
    "min.cleanable.dirty.ratio": ["-0.1", "1.1", "nan"],
    "min.compaction.lag.ms": ["-1"],
    "min.insync.replicas": ["0", "2"],
    "retention.bytes": ["-2", str(1 << 63)],
    "retention.ms": ["-2", "1 day"],
    "segment.bytes": ["10", "-1"],
    "segment.ms": ["0"],
}


@pytest.mark.parametrize("name", SETTINGS)
def test_every_default_fits_its_own_check(name: str) -> None:
    check_overrides({name: SETTINGS[name].default})


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in BAD.items() for text in texts])
def test_a_value_that_does_not_fit_is_refused_with_its_name(name: str, text: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_overrides({name: text})
    assert caught.value.code == Code.INVALID_CONFIG
    assert caught.value.detail.startswith(f"{name}={text} is not valid: ")


def test_every_setting_has_values_that_are_refused() -> None:
    assert set(BAD) == set(SETTINGS)


def test_a_setting_without_a_value_is_refused() -> None:
    for name in SETTINGS:
        with pytest.raises(RequestError):
            check_overrides({name: None})


def test_an_unknown_name_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(RequestError, match=r"retention.hours is not a topic setting; known are .*retention.ms"):
        check_overrides({"retention.hours": "1"})


def test_what_was_likely_meant_is_said_first() -> None:
    """librdkafka keeps 512 bytes of a broker's sentence, and not all names are in them."""
    with pytest.raises(RequestError, match=r"known are group\.share\.record\.lock\.duration\.ms, "):
        check_overrides({"group.share.lock.duration.ms": "1"})


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("retention.ms", "must be a whole number"), ("min.cleanable.dirty.ratio", "must be a number between 0 and 1")],
)
def test_what_is_no_number_is_told_in_our_words(name: str, sentence: str) -> None:
    with pytest.raises(RequestError, match=f"{name}=1d is not valid: {sentence}$"):
        check_overrides({name: "1d"})


def test_a_topics_own_value_goes_over_the_brokers_and_that_over_the_default() -> None:
    settings = TopicSettings({"retention.ms": "5"}, {"retention.ms": "7", "segment.ms": "9"})
    assert settings.value("retention.ms") == "5" and settings.default("retention.ms") == "7"
    assert settings.log.retention_ms == 5
    assert settings.log.segment_ms == 9
    assert settings.log.retention_bytes == -1


def test_segments_are_smaller_where_a_topic_may_hold_less_than_one() -> None:
    def segment_bytes(**overrides: str) -> int:
        defaults = {"segment.bytes": "1073741824"}
        return TopicSettings(
            {name.replace("_", "."): text for name, text in overrides.items()}, defaults
        ).log.segment_bytes

    assert segment_bytes() == segment_bytes(retention_bytes="-1") == 1 << 30
    assert segment_bytes(retention_bytes=str(1 << 40)) == 1 << 30
    assert segment_bytes(retention_bytes="1000000000") == 500_000_000
    assert segment_bytes(retention_bytes="1000") == 1_048_588, "still one for the largest batch"
    assert segment_bytes(retention_bytes="1000", max_message_bytes="100") == 1 << 20
    assert segment_bytes(retention_bytes="1000", segment_bytes="5000000") == 5_000_000, "the topic says so itself"
    assert segment_bytes(retention_bytes="1000", cleanup_policy="compact") == 1 << 30, "nothing goes by size"
    assert not TopicSettings({"retention.bytes": "1000"}, {}).needs_more_checks


def test_segments_end_sooner_where_a_topic_keeps_records_for_less_than_one() -> None:
    def segment_ms(**overrides: str) -> int:
        defaults = {"segment.ms": "86400000"}
        return TopicSettings(
            {name.replace("_", "."): text for name, text in overrides.items()}, defaults
        ).log.segment_ms

    assert segment_ms() == segment_ms(retention_ms="-1") == 86_400_000
    assert segment_ms(retention_ms="3600000") == 1_800_000
    assert segment_ms(retention_ms="1000") == 60_000
    assert segment_ms(retention_ms="3600000", segment_ms="7200000") == 7_200_000, "the topic says so itself"
    assert segment_ms(retention_ms="3600000", cleanup_policy="compact") == 86_400_000, "nothing goes by age"


def test_compaction_and_deletion_can_be_chosen_together() -> None:
    for text, delete, compact in (("delete", True, False), ("compact", False, True), ("compact, delete", True, True)):
        log = TopicSettings({"cleanup.policy": text}, {}).log
        assert (log.delete, log.compact) == (delete, compact)
