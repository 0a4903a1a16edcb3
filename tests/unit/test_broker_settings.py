"""The table of topic settings: what is known, what fits, and where a value comes from."""

from __future__ import annotations

from typing import Any

import pytest

from millstream.broker.broker_settings import PREFIX, TOPIC_DEFAULTS, BrokerSettings
from millstream.broker.settings import SETTINGS, TopicSettings, check_overrides, check_topic, is_kafkas
from millstream.config import Config
from millstream.core.errors import Code, RequestError
from millstream.stores.base import Put
from millstream.stores.keys import MemoryMeta

BAD = {
    "cleanup.policy": ["", "keep", "delete,burn"],
    "compression.gzip.level": ["0", "10"],
    "compression.lz4.level": ["0", "18"],
    "compression.type": ["none", ""],
    "compression.zstd.level": ["23"],
    "delete.retention.ms": ["-1", "x"],
    "file.delete.delay.ms": ["-1"],
    "flush.messages": ["0"],
    "flush.ms": ["-1"],
    "follower.replication.throttled.replicas": ["x", "0:1,2"],
    "flush": ["sometimes", "every=0", ""],
    "group.errors.deadletterqueue.topic.name": ["", "a/b", ".."],
    "group.millstream.key.order": ["yes", ""],
    "group.millstream.retry.backoff.max.ms": ["-1"],
    "group.millstream.retry.backoff.ms": ["-1", "1s"],
    "group.share.auto.offset.reset": ["none", ""],
    "group.share.delivery.count.limit": ["0", "26"],
    "group.share.heartbeat.interval.ms": ["0"],
    "group.share.isolation.level": ["none"],
    "group.share.partition.max.record.locks": ["0", "1000001"],
    "group.share.record.lock.duration.ms": ["0", "x"],
    "group.share.session.timeout.ms": ["0"],
    "index.interval.bytes": ["0", "1.5"],
    "leader.replication.throttled.replicas": ["0-1"],
    "local.retention.bytes": ["-3"],
    "local.retention.ms": ["-3"],
    "max.compaction.lag.ms": ["0"],
    "max.message.bytes": ["-1", str(1 << 31)],
    "message.timestamp.after.max.ms": ["-1", str(1 << 63), "1h"],
    "message.timestamp.before.max.ms": ["-1", str(1 << 63), ""],
    "message.timestamp.type": ["createtime", ""],
    "millstream.delay.ms": ["-1"],
    "millstream.retention.done.ms": ["-2"],
    "min.cleanable.dirty.ratio": ["-0.1", "1.1", "nan"],
    "min.compaction.lag.ms": ["-1"],
    "min.insync.replicas": ["0"],
    "preallocate": ["yes"],
    "remote.log.copy.disable": ["1"],
    "remote.log.delete.on.disable": [""],
    "remote.storage.enable": ["true", "x"],
    "retention.bytes": ["-2", str(1 << 63)],
    "retention.ms": ["-2", "1 day", "1_000"],
    "segment.bytes": ["10", "-1"],
    "segment.index.bytes": ["3"],
    "segment.jitter.ms": ["-1"],
    "segment.ms": ["0"],
    "unclean.leader.election.enable": ["maybe"],
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
    for name, setting in SETTINGS.items():
        if setting.default:
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


def test_flush_messages_and_flush_ms_only_tighten_the_flush_policy() -> None:
    def flush(**overrides: str) -> tuple[bool, int | None, int | None, int | None]:
        policy = TopicSettings({name.replace("_", "."): text for name, text in overrides.items()}, {}).log.flush
        return policy.always, policy.batches, policy.ms, policy.records

    always, loose = (True, 1, None, None), {"flush": "every=100,500ms"}
    assert flush(flush_messages="50", flush_ms="1000") == always, "a sync before each answer stays one"
    assert flush(flush="os", flush_messages="50") == (False, None, None, 50)
    assert flush(flush="os", flush_ms="200") == (False, None, 200, None)
    assert flush(**loose, flush_ms="200", flush_messages="10") == (False, 100, 200, 10)
    assert flush(**loose, flush_ms="900") == (False, 100, 500, None)
    assert flush(flush="os", flush_messages="1") == flush(flush="os", flush_ms="0") == always


def test_a_compacted_topic_closes_segments_within_the_largest_lag() -> None:
    def segment_ms(**overrides: str) -> int:
        named = {name.replace("_", "."): text for name, text in overrides.items()}
        return TopicSettings(named, {}).log.segment_ms

    assert segment_ms(cleanup_policy="compact", max_compaction_lag_ms="5000") == 5000
    assert segment_ms(cleanup_policy="compact,delete", max_compaction_lag_ms="5000", segment_ms="900") == 900
    assert segment_ms(max_compaction_lag_ms="5000") == 86_400_000


def test_a_smallest_lag_above_the_largest_is_refused() -> None:
    with pytest.raises(RequestError, match=r"min\.compaction\.lag\.ms=100 is larger than max\.compaction\.lag\.ms=50"):
        check_topic({"min.compaction.lag.ms": "100", "max.compaction.lag.ms": "50"}, {})


def test_brokers_have_a_default_for_every_setting_of_kafkas_topics() -> None:
    of_topics_only = {name for name in SETTINGS if name.startswith("remote.") or name.endswith("throttled.replicas")}
    assert set(TOPIC_DEFAULTS.values()) == {name for name in SETTINGS if is_kafkas(name)} - of_topics_only


async def test_what_is_altered_for_every_broker_reaches_those_that_run() -> None:
    meta = MemoryMeta()
    defaults: dict[str, Any] = {}
    first, second = (BrokerSettings(Config(node_id=node), meta) for node in (1, 2))
    await first.start(lambda given: None)
    await second.start(defaults.update)
    await first.configure(None, {"log.retention.ms": "1000"})
    assert defaults["retention.ms"] == "1000"
    await first.configure(1, {"log.retention.ms": "2000"})
    assert first.topic_defaults()["retention.ms"] == "2000" and defaults["retention.ms"] == "1000"
    await first.configure(None, {})
    assert defaults["retention.ms"] == str(Config().retention_ms)


async def test_a_stored_setting_that_this_version_does_not_know_does_not_stop_the_start() -> None:
    meta = MemoryMeta()
    await meta.transact(
        Put(PREFIX + "default", b'{"log.new.thing": "1", "log.retention.ms": "-7", "log.roll.ms": "9"}')
    )
    settings = BrokerSettings(Config(), meta)
    await settings.start(lambda given: None)
    assert settings.altered(None) == {"log.roll.ms": "9"}
