"""What the wire carries where Kafka's own clients are strict: null against empty, defaults, error codes.

The Java client and its tools fail on a null list or an unknown API, so each answer here is what Apache Kafka 4.1 sends.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest

from millstream.core.errors import Code
from millstream.records import codec
from tests.compat import raw
from tests.compat.raw import Raw
from tests.serving import ServedBroker

Unique = Callable[[str], str]
NO_OPERATIONS = -(1 << 31)
TOPIC_OPERATIONS = 0b1101_1111_1000
"""READ, WRITE, CREATE, DELETE, ALTER, DESCRIBE, DESCRIBE_CONFIGS and ALTER_CONFIGS, by their AclOperation codes."""
CLUSTER_OPERATIONS = 0b1_1111_1010_0000
GROUP_OPERATIONS = 0b1101_0100_1000


@pytest.fixture
def topic(broker: ServedBroker, unique: Unique) -> str:
    name = unique("answers")
    raw.create_topic(broker.address, name, 2)
    return name


def ask(link: Raw, key: int, version: int, /, **fields: Any) -> Any:
    return link.ask(raw.request(key, version, fields))


def describe_topics(link: Raw, *names: str) -> Any:
    topics = [{"name": name} for name in names]
    return ask(link, 75, 0, topics=topics, response_partition_limit=2000, cursor=None).topics


def metadata(link: Raw, version: int, *names: str, operations: bool = False) -> Any:
    topics = [{"topic_id": None, "name": name} for name in names]
    return ask(
        link,
        3,
        version,
        topics=topics,
        allow_auto_topic_creation=False,
        include_topic_authorized_operations=operations,
        include_cluster_authorized_operations=operations,
    )


# -- null against empty ------------------------------------------------------------------------------------------------


def test_described_partitions_have_empty_lists_of_eligible_leaders(link: Raw, topic: str) -> None:
    """`Admin.describeTopics` of the Java client iterates over both lists (KIP-966)."""
    [described] = describe_topics(link, topic)
    assert [(each.eligible_leader_replicas, each.last_known_elr) for each in described.partitions] == [((), ())] * 2


@pytest.mark.parametrize(("version", "message"), [(1, "NONE"), (3, "NONE"), (4, ""), (6, "")])
def test_a_found_coordinator_has_a_message_that_is_not_null(link: Raw, version: int, message: str) -> None:
    asked = {"key": "g"} if version < 4 else {"coordinator_keys": ["g"]}
    answer = ask(link, 10, version, key_type=0, **asked)
    found = answer if version < 4 else answer.coordinators[0]
    assert (found.error_code, found.error_message) == (0, message)


def test_a_member_without_a_pattern_has_an_empty_one(link: Raw, topic: str, unique: Unique) -> None:
    group, member = unique("group"), str(uuid.uuid4())
    beat = {
        "group_id": group,
        "member_id": member,
        "member_epoch": 0,
        "instance_id": None,
        "rack_id": None,
        "rebalance_timeout": 5000,
        "subscribed_topic_names": [topic],
        "subscribed_topic_regex": None,
        "server_assignor": None,
        "topic_partitions": [],
    }
    assert ask(link, 68, 1, **beat).error_code == 0
    [described] = ask(link, 69, 1, group_ids=[group], include_authorized_operations=True).groups
    assert described.members[0].subscribed_topic_regex == ""
    assert described.members[0].client_host == "/127.0.0.1", "as Java prints an address"
    assert described.authorized_operations == GROUP_OPERATIONS
    left = ask(link, 68, 1, **{**beat, "member_epoch": -1})
    assert (left.member_epoch, left.heartbeat_interval.total_seconds()) == (-1, 0)


def test_groups_that_do_not_exist_are_described_as_kafka_does(link: Raw) -> None:
    consumer = ask(link, 69, 1, group_ids=["nowhere", ""], include_authorized_operations=True).groups
    assert [each.error_code for each in consumer] == [Code.GROUP_ID_NOT_FOUND, Code.INVALID_GROUP_ID]
    [share] = ask(link, 77, 1, group_ids=["nowhere"], include_authorized_operations=True).groups
    assert (share.error_code, share.group_state) == (Code.GROUP_ID_NOT_FOUND, "")
    assert {each.authorized_operations for each in (*consumer, share)} == {NO_OPERATIONS}


def test_a_share_group_that_does_not_exist_has_no_offsets(link: Raw, topic: str) -> None:
    """`Admin.listShareGroupOffsets` answers with an empty map; DescribeShareGroupOffsets has no error for it."""
    everything = {"group_id": "nowhere", "topics": None}
    [group] = ask(link, 90, 0, groups=[everything]).groups
    assert (group.error_code, group.error_message, group.topics) == (0, None, ())
    named = {"group_id": "nowhere", "topics": [{"topic_name": topic, "partitions": [1]}]}
    [group] = ask(link, 90, 0, groups=[named]).groups
    [partition] = group.topics[0].partitions
    assert (partition.start_offset, partition.error_code) == (-1, 0)


def test_listed_groups_have_their_type_in_lower_case(link: Raw, topic: str, unique: Unique) -> None:
    group = unique("group")
    partition = {"partition_index": 0, "committed_offset": 0, "committed_leader_epoch": -1, "committed_metadata": None}
    commit = {
        "group_id": group,
        "generation_id_or_member_epoch": -1,
        "member_id": "",
        "group_instance_id": None,
        "topics": [{"name": topic, "partitions": [partition]}],
    }
    ask(link, 8, 9, **commit)
    listed = ask(link, 16, 5, states_filter=[], types_filter=["classic"]).groups
    assert [each.group_type for each in listed if each.group_id == group] == ["classic"]


# -- internal topics ---------------------------------------------------------------------------------------------------


def test_only_kafkas_own_topics_are_internal(broker: ServedBroker, link: Raw, unique: Unique) -> None:
    """Debezium's heartbeat topics begin with two underscores, and `listTopics()` has to show them."""
    heartbeat = unique("__debezium-heartbeat.x")
    raw.create_topic(broker.address, heartbeat)
    assert not describe_topics(link, heartbeat)[0].is_internal
    for version in (1, 9, 12):
        assert not metadata(link, version, heartbeat).topics[0].is_internal
    for name in ("__consumer_offsets", "__transaction_state", "__share_group_state"):
        raw.create_topic(broker.address, name)
        assert describe_topics(link, name)[0].is_internal
        assert metadata(link, 9, name).topics[0].is_internal
        ask(link, 20, 1, topic_names=[name], timeout=1000)


def test_asking_for_an_internal_topic_does_not_create_it(link: Raw) -> None:
    """Offsets are not in a topic here. A monitor that reads `__consumer_offsets` would wait for records in vain."""
    topics = [{"name": "__consumer_offsets"}]
    [found] = ask(link, 3, 4, topics=topics, allow_auto_topic_creation=True).topics
    assert found.error_code == Code.UNKNOWN_TOPIC_OR_PARTITION


# -- producer ids ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [3, 4, 5])
@pytest.mark.parametrize("sent", [(-1, -1), (0, 0), (7, 3)])
def test_a_producer_without_a_transactional_id_gets_an_id_of_its_own(
    link: Raw, version: int, sent: tuple[int, int]
) -> None:
    """kafka-go leaves both fields zero. An id that is taken from the request would be every producer's id."""
    fields = {"transactional_id": None, "transaction_timeout": 0, "producer_id": sent[0], "producer_epoch": sent[1]}
    answers = [ask(link, 22, version, **fields) for _ in range(3)]
    assert [(each.error_code, each.producer_epoch) for each in answers] == [(0, 0)] * 3
    assert len({each.producer_id for each in answers}) == 3


def test_an_id_with_half_of_its_fields_is_refused(link: Raw) -> None:
    for producer_id, epoch in ((-1, 3), (3, -1)):
        fields = {"transactional_id": None, "transaction_timeout": 0}
        answer = ask(link, 22, 4, **fields, producer_id=producer_id, producer_epoch=epoch)
        assert answer.error_code == Code.INVALID_REQUEST


# -- authorized operations ---------------------------------------------------------------------------------------------


def test_operations_are_listed_where_the_client_asks(link: Raw, topic: str) -> None:
    """A broker without an authorizer allows everything, and says so."""
    for version in (8, 10):
        asked = metadata(link, version, topic, operations=True)
        assert asked.topics[0].topic_authorized_operations == TOPIC_OPERATIONS
        assert asked.cluster_authorized_operations == CLUSTER_OPERATIONS
        plain = metadata(link, version, topic)
        assert plain.topics[0].topic_authorized_operations == plain.cluster_authorized_operations == NO_OPERATIONS
    assert metadata(link, 13, topic, operations=True).topics[0].topic_authorized_operations == TOPIC_OPERATIONS
    assert describe_topics(link, topic)[0].topic_authorized_operations == TOPIC_OPERATIONS
    for wanted, operations in ((True, CLUSTER_OPERATIONS), (False, NO_OPERATIONS)):
        cluster = ask(link, 60, 1, include_cluster_authorized_operations=wanted, endpoint_type=1)
        assert cluster.cluster_authorized_operations == operations
    [group] = ask(link, 15, 5, groups=["nowhere"], include_authorized_operations=True).groups
    assert group.authorized_operations == GROUP_OPERATIONS
    [group] = ask(link, 15, 6, groups=["nowhere"], include_authorized_operations=True).groups
    assert group.authorized_operations == NO_OPERATIONS


# -- what this broker has nothing of -----------------------------------------------------------------------------------

ANY_ACL = {
    "resource_type_filter": 1,
    "resource_name_filter": None,
    "pattern_type_filter": 1,
    "principal_filter": None,
    "host_filter": None,
    "operation": 1,
    "permission_type": 1,
}
AN_ACL = {
    "resource_type": 2,
    "resource_name": "t",
    "resource_pattern_type": 3,
    "principal": "User:a",
    "host": "*",
    "operation": 3,
    "permission_type": 3,
}


def test_access_control_is_disabled(link: Raw) -> None:
    described = ask(link, 29, 3, **ANY_ACL)
    assert (described.error_code, described.resources) == (Code.SECURITY_DISABLED, ())
    [created] = ask(link, 30, 3, creations=[AN_ACL]).results
    [deleted] = ask(link, 31, 3, filters=[ANY_ACL]).filter_results
    assert created.error_code == deleted.error_code == Code.SECURITY_DISABLED


def test_there_are_no_quotas_credentials_and_transactions(link: Raw) -> None:
    quotas = ask(link, 48, 1, components=[{"entity_type": "user", "match_type": 2, "match": None}], strict=False)
    assert (quotas.error_code, quotas.error_message, quotas.entries) == (0, "", ())
    bad = ask(link, 48, 1, components=[{"entity_type": "planet", "match_type": 2, "match": None}], strict=False)
    assert (bad.error_code, bad.entries) == (Code.UNSUPPORTED_VERSION, None)
    everyone = ask(link, 50, 0, users=None)
    assert (everyone.error_code, everyone.error_message, everyone.results) == (0, "", ())
    named = ask(link, 50, 0, users=[{"name": "a"}, {"name": "b"}, {"name": "b"}]).results
    assert [(each.user, each.error_code) for each in named] == [
        ("a", Code.RESOURCE_NOT_FOUND),
        ("b", Code.DUPLICATE_RESOURCE),
    ]
    listed = ask(link, 66, 1, state_filters=["Ongoing", "Sleeping"], producer_id_filters=[], duration_filter=-1)
    assert (listed.error_code, listed.unknown_state_filters, listed.transaction_states) == (0, ("Sleeping",), ())
    states = ask(link, 65, 0, transactional_ids=["t", ""]).transaction_states
    assert [each.error_code for each in states] == [Code.TRANSACTIONAL_ID_NOT_FOUND, Code.INVALID_REQUEST]


def test_leaders_need_no_election(link: Raw, topic: str) -> None:
    wanted = [{"topic": topic, "partitions": [0, 9]}, {"topic": "nowhere", "partitions": [0]}]
    for version in (0, 2):
        answer = ask(link, 43, version, election_type=0, topic_partitions=wanted, timeout=1000)
        assert [[each.error_code for each in one.partition_result] for one in answer.replica_election_results] == [
            [Code.ELECTION_NOT_NEEDED, Code.UNKNOWN_TOPIC_OR_PARTITION],
            [Code.UNKNOWN_TOPIC_OR_PARTITION],
        ]
    everything = ask(link, 43, 2, election_type=0, topic_partitions=None, timeout=1000)
    assert (everything.error_code, everything.replica_election_results) == (0, ())
    assert ask(link, 43, 2, election_type=9, topic_partitions=wanted, timeout=1).error_code == Code.INVALID_REQUEST


def test_partitions_are_where_they_are(link: Raw, topic: str) -> None:
    listed = ask(link, 46, 0, timeout=1000, topics=None)
    assert (listed.error_code, listed.error_message, listed.topics) == (0, None, ())
    partitions = [
        {"partition_index": 0, "replicas": [1]},
        {"partition_index": 1, "replicas": [2]},
        {"partition_index": 1, "replicas": None},
        {"partition_index": 9, "replicas": [1]},
    ]
    topics = [{"name": topic, "partitions": partitions}]
    answer = ask(link, 45, 1, timeout=1000, allow_replication_factor_change=True, topics=topics)
    assert answer.allow_replication_factor_change
    assert [each.error_code for each in answer.responses[0].partitions] == [
        Code.NONE,
        Code.INVALID_REPLICA_ASSIGNMENT,
        Code.NO_REASSIGNMENT_IN_PROGRESS,
        Code.UNKNOWN_TOPIC_OR_PARTITION,
    ]


def test_the_quorum_is_the_controller(broker: ServedBroker, link: Raw) -> None:
    asked = [{"topic_name": "__cluster_metadata", "partitions": [{"partition_index": 0}]}]
    answer = ask(link, 55, 2, topics=asked)
    [partition] = answer.topics[0].partitions
    assert (partition.error_code, partition.leader_id, partition.observers) == (0, 1, ())
    assert [each.replica_id for each in partition.current_voters] == [1]
    [listener] = answer.nodes[0].listeners
    assert f"{listener.host}:{listener.port}" == broker.address


def test_everything_that_has_settings_is_listed(link: Raw, topic: str) -> None:
    listed = ask(link, 74, 1, resource_types=[]).config_resources
    found = {(each.resource_type, each.resource_name) for each in listed}
    assert {(2, topic), (4, "1"), (8, "1")} <= found
    assert {each.resource_type for each in ask(link, 74, 1, resource_types=[4]).config_resources} == {4}
    assert ask(link, 74, 1, resource_types=[99]).error_code == Code.UNSUPPORTED_VERSION
    assert ask(link, 74, 0).config_resources == ()


def test_an_api_that_is_not_served_is_answered_where_its_errors_go(link: Raw, topic: str) -> None:
    """For clients that do not ask for ApiVersions first: a closed connection tells them nothing."""
    ops = [{"key": "producer_byte_rate", "value": 1.0, "remove": False}]
    entry = {"entity": [{"entity_type": "user", "entity_name": "a"}], "ops": ops}
    [quota] = ask(link, 49, 1, entries=[entry], validate_only=False).entries
    [user] = ask(link, 51, 0, deletions=[{"name": "a", "mechanism": 1}], upsertions=[]).results
    dirs = [{"path": "/elsewhere", "topics": [{"name": topic, "partitions": [0]}]}]
    ask(link, 34, 2, dirs=dirs)
    features = ask(link, 57, 1, timeout=1000, feature_updates=[], validate_only=True)
    assert quota.error_code == user.error_code == features.error_code == Code.UNSUPPORTED_VERSION
    assert quota.error_message and features.error_message


def test_of_many_bad_records_the_first_hundred_are_named(broker: ServedBroker, link: Raw, unique: Unique) -> None:
    """The answer to a small request has a bound. A producer sends what is not named again, and hears of the next."""
    name = unique("compacted")
    raw.create_topic(broker.address, name, cleanup_policy="compact")
    good = [(0, 1_700_000_000_000, b"key", b"value")]
    bad = [(0, 1_700_000_000_000, None, b"value")]
    for records, indexes in (
        (good * 2 + bad * 250, range(2, 102)),
        (bad * 100 + good, range(100)),
        (good * 200 + bad, [200]),
    ):
        answer = link.ask(raw.produce(name, bytes(codec.encode(records)))).responses[0].partition_responses[0]
        assert answer.error_code == Code.INVALID_RECORD and "without a key" in answer.error_message
        assert [each.batch_index for each in answer.record_errors] == list(indexes)
        assert all("without a key" in each.batch_index_error_message for each in answer.record_errors)
    assert not link.ask(raw.fetch(name, 0)).responses[0].partitions[0].records


def test_records_of_a_topic_that_is_only_compacted_cannot_be_deleted(
    broker: ServedBroker, link: Raw, unique: Unique
) -> None:
    for policy, code in (("compact", Code.POLICY_VIOLATION), ("compact,delete", Code.NONE)):
        name = unique("compacted")
        raw.create_topic(broker.address, name, cleanup_policy=policy)
        wanted = [{"name": name, "partitions": [{"partition_index": 0, "offset": 0}]}]
        [answer] = ask(link, 21, 2, topics=wanted, timeout=1000).topics
        assert answer.partitions[0].error_code == code


@pytest.mark.parametrize(
    ("version", "supported"),
    [
        (3, [("metadata.version", 7, 27)]),
        (4, [("group.version", 0, 1), ("metadata.version", 7, 27), ("share.version", 0, 1)]),
    ],
)
def test_features_are_those_of_kafka_that_are_true_here(
    link: Raw, version: int, supported: list[tuple[str, int, int]]
) -> None:
    """`Admin.describeFeatures`. Clients up to version 3 fail on a lowest level of 0."""
    answer = ask(link, 18, version, client_software_name="apache-kafka-java", client_software_version="4.1.1")
    assert [(each.name, each.min_version, each.max_version) for each in answer.supported_features] == supported
    levels = {each.name: (each.min_version_level, each.max_version_level) for each in answer.finalized_features}
    assert levels == {"group.version": (1, 1), "metadata.version": (27, 27), "share.version": (1, 1)}
    assert answer.finalized_features_epoch == 0


# -- what the Java client's admin calls showed -------------------------------------------------------------------------


def test_a_commit_of_nothing_makes_no_group(link: Raw, unique: Unique) -> None:
    """`kafka-consumer-groups --reset-offsets --all-topics --execute` sends it for a group that does not exist."""
    group = unique("nothing")
    member = {"member_id": "", "group_instance_id": None, "generation_id_or_member_epoch": -1}
    assert ask(link, 8, 9, group_id=group, topics=[], **member).topics == ()
    [deleted] = ask(link, 42, 2, groups_names=[group]).results
    assert deleted.error_code == Code.GROUP_ID_NOT_FOUND


def test_a_setting_is_named_once_in_a_request(link: Raw, topic: str) -> None:
    twice = [{"name": "retention.ms", "config_operation": 0, "value": value} for value in ("1000000", "2000000")]
    resource = {"resource_type": 2, "resource_name": topic, "configs": twice}
    [answer] = ask(link, 44, 1, resources=[resource], validate_only=False).responses
    assert answer.error_code == Code.INVALID_REQUEST and "named twice" in answer.error_message


def test_a_name_that_no_topic_can_have_is_told_from_a_missing_topic(link: Raw) -> None:
    assert [each.error_code for each in describe_topics(link, "bad name", "missing")] == [
        Code.INVALID_TOPIC_EXCEPTION,
        Code.UNKNOWN_TOPIC_OR_PARTITION,
    ]
    resources = [{"resource_type": 2, "resource_name": name, "configuration_keys": None} for name in ("a b", "")]
    answers = ask(link, 32, 4, resources=resources, include_synonyms=False, include_documentation=False).results
    assert [each.error_code for each in answers] == [Code.INVALID_TOPIC_EXCEPTION] * 2


def test_there_are_no_client_metrics_to_describe(link: Raw) -> None:
    resource = {"resource_type": 16, "resource_name": "basic", "configuration_keys": None}
    [answer] = ask(link, 32, 4, resources=[resource], include_synonyms=False, include_documentation=False).results
    assert (answer.error_code, answer.configs) == (Code.NONE, ())


def test_a_refused_reset_of_share_offsets_is_told_for_every_partition(link: Raw, topic: str) -> None:
    """Kafka's Java client (4.1) reads no other code than those of the partitions."""
    partitions = [{"partition_index": index, "start_offset": 0} for index in range(2)]
    answer = ask(link, 91, 0, group_id="no-such-group", topics=[{"topic_name": topic, "partitions": partitions}])
    assert answer.error_code == Code.GROUP_ID_NOT_FOUND
    codes = [each.error_code for named in answer.responses for each in named.partitions]
    assert codes == [Code.GROUP_ID_NOT_FOUND] * 2
