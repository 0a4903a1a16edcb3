"""Settings of topics, brokers, loggers and groups as Kafka's tools set and read them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from millstream.core.errors import Code
from tests.compat import raw
from tests.compat.raw import Raw
from tests.serving import ServedBroker

Unique = Callable[[str], str]
TOPIC, BROKER, LOGGER, GROUP = 2, 4, 8, 32
SET, DELETE, APPEND, SUBTRACT = range(4)
FROM_TOPIC, DYNAMIC_BROKER, DYNAMIC_DEFAULT, STATIC, DEFAULT, FROM_LOGGER, FROM_GROUP = 1, 2, 3, 4, 5, 6, 8

TAKEN = {
    "compression.gzip.level": "9",
    "compression.lz4.level": "17",
    "compression.type": "gzip",
    "compression.zstd.level": "-5",
    "file.delete.delay.ms": "1000",
    "flush.messages": "100",
    "flush.ms": "1000",
    "follower.replication.throttled.replicas": "*",
    "leader.replication.throttled.replicas": "0:1,1:1",
    "local.retention.bytes": "1000",
    "local.retention.ms": "1000",
    "max.compaction.lag.ms": "3600000",
    "min.insync.replicas": "2",
    "preallocate": "true",
    "remote.log.copy.disable": "true",
    "remote.log.delete.on.disable": "true",
    "remote.storage.enable": "false",
    "segment.index.bytes": "1048576",
    "segment.jitter.ms": "1000",
    "unclean.leader.election.enable": "true",
}


@pytest.fixture
def topic(broker: ServedBroker, unique: Unique) -> str:
    name = unique("configured")
    raw.create_topic(broker.address, name)
    return name


def describe(link: Raw, kind: int, name: str, keys: list[str] | None = None) -> Any:
    resource = {"resource_type": kind, "resource_name": name, "configuration_keys": keys}
    fields = {"resources": [resource], "include_synonyms": True, "include_documentation": True}
    [result] = link.ask(raw.request(32, 4, fields)).results
    return result


def configs(link: Raw, kind: int, name: str, keys: list[str] | None = None) -> dict[str, Any]:
    result = describe(link, kind, name, keys)
    assert (result.error_code, result.error_message) == (0, "")
    return {each.name: each for each in result.configs}


def alter(link: Raw, kind: int, name: str, *changes: tuple[str, int, str | None], validate_only: bool = False) -> Any:
    entries = [{"name": key, "config_operation": how, "value": value} for key, how, value in changes]
    resource = {"resource_type": kind, "resource_name": name, "configs": entries}
    [response] = link.ask(raw.request(44, 1, {"resources": [resource], "validate_only": validate_only})).responses
    return response


def synonyms(entry: Any) -> list[tuple[str, str | None, int]]:
    return [(each.name, each.value, each.source) for each in entry.synonyms]


# -- topics ------------------------------------------------------------------------------------------------------------


def test_a_topic_can_be_made_with_every_setting_of_kafka(broker: ServedBroker, link: Raw, unique: Unique) -> None:
    name = unique("everything")
    raw.create_topic(broker.address, name, **{key.replace(".", "_"): value for key, value in TAKEN.items()})
    found = configs(link, TOPIC, name)
    assert {key: found[key].value for key in TAKEN} == TAKEN
    assert {found[key].config_source for key in TAKEN} == {FROM_TOPIC}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("compression.type", "none"),
        ("compression.gzip.level", "0"),
        ("max.compaction.lag.ms", "0"),
        ("min.insync.replicas", "0"),
        ("leader.replication.throttled.replicas", "x"),
        ("remote.storage.enable", "true"),
        ("preallocate", "yes"),
    ],
)
def test_values_that_kafka_refuses_are_refused(link: Raw, topic: str, key: str, value: str) -> None:
    refused = alter(link, TOPIC, topic, (key, SET, value), validate_only=True)
    assert refused.error_code == Code.INVALID_CONFIG and key in refused.error_message


def test_lags_of_compaction_that_contradict_are_refused(link: Raw, topic: str) -> None:
    lags = ("min.compaction.lag.ms", SET, "100"), ("max.compaction.lag.ms", SET, "50")
    assert alter(link, TOPIC, topic, *lags).error_code == Code.INVALID_CONFIG


def test_a_topics_settings_are_kafkas_and_those_that_are_set(broker: ServedBroker, link: Raw, unique: Unique) -> None:
    plain, own = unique("plain"), unique("own")
    raw.create_topic(broker.address, plain)
    raw.create_topic(broker.address, own, flush="os", group_share_delivery_count_limit="9")
    kafkas = configs(link, TOPIC, plain)
    assert set(TAKEN) < set(kafkas)
    assert not [name for name in kafkas if name == "flush" or name.startswith(("group.", "millstream."))]
    assert set(configs(link, TOPIC, own)) - set(kafkas) == {"flush", "group.share.delivery.count.limit"}
    assert set(configs(link, TOPIC, plain, ["flush", "retention.ms"])) == {"flush", "retention.ms"}


@pytest.mark.parametrize("kind", [TOPIC, BROKER, LOGGER, GROUP])
def test_an_empty_list_of_names_asks_for_all_settings(link: Raw, topic: str, kind: int) -> None:
    """Clients that are made from the protocol's schema send an empty list where others send null."""
    name = {TOPIC: topic, GROUP: "a group"}.get(kind, "1")
    everything = configs(link, kind, name)
    assert everything and configs(link, kind, name, []).keys() == everything.keys()


def test_a_setting_without_a_value_is_refused(link: Raw, topic: str, unique: Unique) -> None:
    """As Kafka's controller does when a topic is made, and its brokers when one is altered."""
    missing = "leader.replication.throttled.replicas"
    name = unique("null")
    wanted = {
        "name": name,
        "num_partitions": 1,
        "replication_factor": 1,
        "assignments": [],
        "configs": [{"name": missing, "value": None}, {"name": "retention.ms", "value": "1000"}],
    }
    request = raw.request(19, 5, {"topics": [wanted], "timeout": 10_000, "validate_only": False})
    made = link.ask(request).topics[0]
    assert (made.error_code, made.error_message) == (
        Code.INVALID_CONFIG,
        f"null value not supported for topic configs: {missing}",
    )
    assert describe(link, TOPIC, name).error_code == Code.UNKNOWN_TOPIC_OR_PARTITION
    told = alter(link, TOPIC, topic, (missing, 0, None))
    assert (told.error_code, told.error_message) == (Code.INVALID_REQUEST, f"null value not supported for: {missing}")
    resource = {"resource_type": TOPIC, "resource_name": topic, "configs": [{"name": missing, "value": None}]}
    (told,) = link.ask(raw.request(33, 1, {"resources": [resource], "validate_only": False})).responses
    assert (told.error_code, told.error_message) == (Code.INVALID_REQUEST, f"null value not supported for: {missing}")


def test_a_created_topic_comes_with_the_settings_that_describing_it_shows(link: Raw, unique: Unique) -> None:
    made_name = unique("made")
    wanted = {
        "name": made_name,
        "num_partitions": 1,
        "replication_factor": 1,
        "assignments": [],
        "configs": [{"name": "retention.ms", "value": "5000"}],
    }
    fields = {"topics": [wanted], "timeout": 1000, "validate_only": False}
    [made] = link.ask(raw.request(19, 7, fields)).topics
    described = configs(link, TOPIC, made_name)
    assert {each.name: (each.value, each.config_source) for each in made.configs} == {
        name: (entry.value, entry.config_source) for name, entry in described.items()
    }
    assert synonyms(described["retention.ms"]) == [
        ("retention.ms", "5000", FROM_TOPIC),
        ("log.retention.ms", "604800000", DEFAULT),
    ]


# -- brokers -----------------------------------------------------------------------------------------------------------


def test_the_broker_is_described_under_kafkas_names(broker: ServedBroker, link: Raw) -> None:
    found = configs(link, BROKER, "1")
    expected = {
        "num.partitions": "1",
        "default.replication.factor": "1",
        "auto.create.topics.enable": "true",
        "message.max.bytes": "1048588",
        "log.cleanup.policy": "delete",
        "min.insync.replicas": "1",
        "advertised.listeners": f"PLAINTEXT://{broker.address}",
        "listeners": f"PLAINTEXT://{broker.address}",
        "node.id": "1",
        "broker.id": "1",
        "log.retention.ms": "604800000",
        "log.retention.hours": "168",
        "log.segment.bytes": "1073741824",
        "offsets.retention.minutes": "10080",
        "group.max.session.timeout.ms": "1800000",
    }
    assert {name: found[name].value for name in expected} == expected
    assert [name for name in expected if not found[name].read_only] == [
        "message.max.bytes", "log.cleanup.policy", "min.insync.replicas", "log.retention.ms", "log.segment.bytes",
    ]  # fmt: skip
    assert (found["auto.create.topics.enable"].config_type, found["num.partitions"].config_type) == (1, 3)
    assert (found["node.id"].config_source, found["num.partitions"].config_source) == (STATIC, DEFAULT)
    assert found["luxun_password"].is_sensitive and found["luxun_password"].value is None
    assert configs(link, BROKER, "") == {}, "nothing was altered for every broker"
    assert describe(link, BROKER, "7").error_code == Code.INVALID_REQUEST


def test_defaults_of_topics_change_while_the_broker_runs_and_stay(own_broker: ServedBroker) -> None:
    raw.create_topic(own_broker.address, "mine", retention_ms="5000")
    raw.create_topic(own_broker.address, "plain")
    with Raw(own_broker.address) as link:
        assert alter(link, BROKER, "", ("log.retention.ms", SET, "900000")).error_code == 0
        assert alter(link, BROKER, "1", ("log.retention.ms", SET, "800000")).error_code == 0
        assert alter(link, BROKER, "", ("message.max.bytes", SET, "2000")).error_code == 0
        assert alter(link, BROKER, "", ("log.cleanup.policy", APPEND, "compact")).error_code == 0
    own_broker.kill()
    own_broker.start()
    with Raw(own_broker.address) as link:
        found = configs(link, TOPIC, "plain")
        assert synonyms(found["retention.ms"]) == [
            ("log.retention.ms", "800000", DYNAMIC_BROKER),
            ("log.retention.ms", "900000", DYNAMIC_DEFAULT),
            ("log.retention.ms", "604800000", DEFAULT),
        ]
        assert (found["retention.ms"].value, found["cleanup.policy"].value) == ("800000", "delete,compact")
        assert configs(link, TOPIC, "mine")["retention.ms"].value == "5000"
        assert {name: each.value for name, each in configs(link, BROKER, "").items()} == {
            "log.cleanup.policy": "delete,compact",
            "log.retention.ms": "900000",
            "message.max.bytes": "2000",
        }
        large = raw.batch(bytes(3000), key=b"k")
        [answer] = link.ask(raw.produce("plain", large)).responses
        assert answer.partition_responses[0].error_code == Code.MESSAGE_TOO_LARGE
        assert alter(link, BROKER, "", ("message.max.bytes", DELETE, None)).error_code == 0
        [answer] = link.ask(raw.produce("plain", large)).responses
        assert answer.partition_responses[0].error_code == 0


def test_what_cannot_change_while_the_broker_runs_is_refused(link: Raw) -> None:
    for name, value in (("num.partitions", "3"), ("advertised.listeners", "x"), ("log.retention.ms", "soon")):
        for resource in ("", "1"):
            refused = alter(link, BROKER, resource, (name, SET, value), validate_only=True)
            assert refused.error_code == Code.INVALID_REQUEST and name in refused.error_message
    assert alter(link, BROKER, "", ("unheard.of", SET, "1")).error_code == Code.INVALID_CONFIG
    assert alter(link, BROKER, "7", ("log.retention.ms", SET, "1")).error_code == Code.INVALID_REQUEST
    assert alter(link, BROKER, "1", ("log.retention.ms", SET, "1000"), validate_only=True).error_code == 0
    assert configs(link, BROKER, "1")["log.retention.ms"].value == "604800000"


# -- loggers -----------------------------------------------------------------------------------------------------------


def test_loggers_are_listed_and_set(link: Raw) -> None:
    found = configs(link, LOGGER, "1")
    assert found["root"].config_source == FROM_LOGGER and found["millstream.broker.broker"].value == "INFO"
    name = "millstream.broker.broker"
    for level in ("TRACE", "DEBUG", "WARN", "ERROR", "FATAL"):
        assert alter(link, LOGGER, "1", (name, SET, level)).error_code == 0
        assert configs(link, LOGGER, "1", [name])[name].value == level
    assert alter(link, LOGGER, "1", (name, DELETE, None)).error_code == 0
    assert configs(link, LOGGER, "1")[name].value == "INFO"


def test_levels_that_cannot_be_set_are_refused(link: Raw) -> None:
    def refused(*change: Any, resource: str = "1") -> Any:
        return alter(link, LOGGER, resource, change).error_code

    assert refused("millstream.broker.broker", SET, "LOUD") == Code.INVALID_CONFIG
    assert refused("no.such.logger", SET, "INFO") == Code.INVALID_CONFIG
    assert refused("millstream.broker.broker", APPEND, "INFO") == Code.INVALID_REQUEST
    assert refused("root", DELETE, None) == Code.INVALID_REQUEST
    assert refused("root", SET, "INFO", resource="7") == Code.INVALID_REQUEST
    assert describe(link, LOGGER, "").error_code == Code.INVALID_REQUEST
    assert "no.such.logger" not in configs(link, LOGGER, "1")


# -- groups ------------------------------------------------------------------------------------------------------------


def beat(group: str, topic: str, member: str, epoch: int) -> bytes:
    fields = {
        "group_id": group,
        "member_id": member,
        "member_epoch": epoch,
        "instance_id": None,
        "rack_id": None,
        "rebalance_timeout": 5000,
        "subscribed_topic_names": [topic],
        "subscribed_topic_regex": None,
        "server_assignor": None,
        "topic_partitions": [],
    }
    return raw.request(68, 1, fields)


def test_a_consumer_group_has_its_own_intervals(link: Raw, topic: str, unique: Unique) -> None:
    """`kafka-configs --entity-type groups` sets them, also before the group exists."""
    group, member = unique("intervals"), "e2b7a1f0-2d7f-4b0c-9c6c-6a2f3c1d0e11"
    session, heartbeat = "consumer.session.timeout.ms", "consumer.heartbeat.interval.ms"
    assert configs(link, GROUP, group)[session].value == "45000"
    assert alter(link, GROUP, group, (session, SET, "9000"), (heartbeat, SET, "700")).error_code == 0
    found = configs(link, GROUP, group)
    assert (found[session].value, found[session].config_source) == ("9000", FROM_GROUP)
    listed = link.ask(raw.request(74, 1, {"resource_types": [GROUP]})).config_resources
    assert group in {each.resource_name for each in listed}
    joined = link.ask(beat(group, topic, member, 0))
    assert (joined.error_code, joined.heartbeat_interval.total_seconds()) == (0, 0.7), "it did not become a queue"
    assert alter(link, GROUP, group, (heartbeat, DELETE, None)).error_code == 0
    assert link.ask(beat(group, topic, member, 1)).heartbeat_interval.total_seconds() == 5
    link.ask(beat(group, topic, member, -1))


def test_intervals_of_groups_that_cannot_be_are_refused(link: Raw, unique: Unique) -> None:
    group = unique("refused")
    for name, value in (
        ("consumer.session.timeout.ms", "1"),
        ("consumer.heartbeat.interval.ms", "60000"),
        ("consumer.unheard.of", "1"),
    ):
        assert alter(link, GROUP, group, (name, SET, value)).error_code == Code.INVALID_CONFIG
    assert alter(link, GROUP, "", ("consumer.session.timeout.ms", SET, "9000")).error_code == Code.INVALID_REQUEST
    assert group not in {
        each.group_id for each in link.ask(raw.request(16, 5, {"states_filter": [], "types_filter": []})).groups
    }


def test_a_share_group_gives_a_record_up_after_kafkas_five_deliveries(link: Raw, unique: Unique) -> None:
    """FlowMQ's groups have three: `test_flowmq_door.py`."""
    assert configs(link, GROUP, unique("workers"))["share.delivery.count.limit"].value == "5"
    assert configs(link, BROKER, "1")["group.share.delivery.count.limit"].value == "5"
