"""Administration with the clients that have it: confluent-kafka's AdminClient and kafka-python's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from confluent_kafka import (
    Consumer,
    ConsumerGroupState,
    ConsumerGroupTopicPartitions,
    ConsumerGroupType,
    KafkaError,
    KafkaException,
    Producer,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ConfigSource,
    NewPartitions,
    NewTopic,
    OffsetSpec,
    ResourceType,
)
from kafka import KafkaAdminClient
from kafka import TopicPartition as PythonPartition
from kafka import errors as python_errors
from kafka.admin import ConfigResource as PythonResource
from kafka.admin import ConfigResourceType as PythonResourceType
from kafka.admin import NewPartitions as PythonNewPartitions
from kafka.admin import NewTopic as PythonNewTopic

from tests.compat.client_confluent import ConfluentMember
from tests.compat.clients import HEARTBEAT_MS, SESSION_MS, settle, shared_evenly
from tests.serving import ServedBroker

Unique = Callable[[str], str]
SECONDS = 15


@pytest.fixture
def admin(broker: ServedBroker) -> AdminClient:
    return AdminClient({"bootstrap.servers": broker.address})


@pytest.fixture
def python_admin(broker: ServedBroker) -> Iterator[KafkaAdminClient]:
    with KafkaAdminClient(bootstrap_servers=broker.address) as client:
        yield client


@pytest.fixture
def topic(admin: AdminClient, unique: Unique) -> str:
    name = unique("admin")
    created(admin, NewTopic(name, 3, 1))
    return name


def created(admin: AdminClient, topic: NewTopic, **options: Any) -> None:
    admin.create_topics([topic], **options)[topic.topic].result(SECONDS)


def refusal(ask: Callable[[], Any]) -> tuple[int, str]:
    with pytest.raises(KafkaException) as caught:
        ask()
    error = caught.value.args[0]
    return error.code(), error.str()


def fill(broker: ServedBroker, topic: str, count: int, partition: int = 0, first_ms: int = 0) -> None:
    producer = Producer({"bootstrap.servers": broker.address})
    for number in range(count):
        producer.produce(topic, b"%d" % number, partition=partition, timestamp=first_ms + number)
    assert producer.flush(SECONDS) == 0


def partition_count(admin: AdminClient, topic: str) -> int:
    return len(admin.list_topics(topic, SECONDS).topics[topic].partitions)


# -- confluent-kafka: topics -------------------------------------------------------------------------------------------


def test_topics_are_created_listed_described_and_deleted(admin: AdminClient, unique: Unique) -> None:
    name = unique("life")
    created(admin, NewTopic(name, 5, 1, config={"retention.ms": "60000"}))
    assert partition_count(admin, name) == 5
    described = admin.describe_topics(TopicCollection([name]))[name].result(SECONDS)
    assert [one.id for one in described.partitions] == [0, 1, 2, 3, 4]
    assert len({one.leader.id for one in described.partitions}) == 1
    admin.delete_topics([name])[name].result(SECONDS)
    assert name not in admin.list_topics(timeout=SECONDS).topics


def test_a_topic_that_exists_or_cannot_exist_is_refused(admin: AdminClient, topic: str, unique: Unique) -> None:
    code, text = refusal(lambda: created(admin, NewTopic(topic, 3, 1)))
    assert code == KafkaError.TOPIC_ALREADY_EXISTS and topic in text
    name = unique("never")
    refused = {
        KafkaError.INVALID_PARTITIONS: NewTopic(name, 0, 1),
        KafkaError.INVALID_REPLICATION_FACTOR: NewTopic(name, 1, 3),
        KafkaError.INVALID_CONFIG: NewTopic(name, 1, 1, config={"retention.ms": "soon"}),
        KafkaError.TOPIC_EXCEPTION: NewTopic("no spaces please", 1, 1),
        KafkaError.POLICY_VIOLATION: NewTopic(name, 50_000, 1),
    }
    for expected, wanted in refused.items():
        code, text = refusal(lambda wanted=wanted: created(admin, wanted))  # type: ignore[misc]
        assert code == expected and text, text
    assert refusal(lambda: created(admin, NewTopic(name, 1, 1, config={"no.such.setting": "1"})))[0] == (
        KafkaError.INVALID_CONFIG
    )
    assert name not in admin.list_topics(timeout=SECONDS).topics


def test_validate_only_creates_nothing(admin: AdminClient, unique: Unique) -> None:
    name = unique("perhaps")
    created(admin, NewTopic(name, 2, 1), validate_only=True)
    assert name not in admin.list_topics(timeout=SECONDS).topics


def test_a_topic_that_does_not_exist_cannot_be_deleted_or_grown(admin: AdminClient, unique: Unique) -> None:
    name = unique("nowhere")
    code, _ = refusal(lambda: admin.delete_topics([name])[name].result(SECONDS))
    assert code == KafkaError.UNKNOWN_TOPIC_OR_PART
    code, _ = refusal(lambda: admin.create_partitions([NewPartitions(name, 4)])[name].result(SECONDS))
    assert code == KafkaError.UNKNOWN_TOPIC_OR_PART


def test_partitions_can_be_added_and_never_taken_away(admin: AdminClient, topic: str) -> None:
    admin.create_partitions([NewPartitions(topic, 6)])[topic].result(SECONDS)
    assert partition_count(admin, topic) == 6
    for count in (6, 2):
        code, _ = refusal(
            lambda count=count: admin.create_partitions([NewPartitions(topic, count)])[topic].result(SECONDS)  # type: ignore[misc]
        )
        assert code == KafkaError.INVALID_PARTITIONS
    assert partition_count(admin, topic) == 6


# -- confluent-kafka: configuration ------------------------------------------------------------------------------------


def configs(admin: AdminClient, topic: str) -> dict[str, Any]:
    resource = ConfigResource(ResourceType.TOPIC, topic)
    return dict(admin.describe_configs([resource])[resource].result(SECONDS))


def test_settings_are_described_with_where_they_come_from(admin: AdminClient, unique: Unique) -> None:
    name = unique("described")
    created(admin, NewTopic(name, 1, 1, config={"cleanup.policy": "compact"}))
    found = configs(admin, name)
    assert found["cleanup.policy"].value == "compact"
    assert found["cleanup.policy"].source == ConfigSource.DYNAMIC_TOPIC_CONFIG.value
    assert found["retention.ms"].value == "604800000"
    assert found["retention.ms"].source != ConfigSource.DYNAMIC_TOPIC_CONFIG.value
    assert not any(entry.is_sensitive for entry in found.values())


def test_the_brokers_settings_are_described_and_its_own_are_read_only(admin: AdminClient) -> None:
    resource = ConfigResource(ResourceType.BROKER, "1")
    found = admin.describe_configs([resource])[resource].result(SECONDS)
    assert found["default_partitions"].is_read_only and found["num.partitions"].is_read_only
    assert not found["log.retention.ms"].is_read_only


def test_settings_change_one_by_one(admin: AdminClient, topic: str) -> None:
    def change(name: str, value: str | None, how: AlterConfigOpType) -> None:
        entry = ConfigEntry(name, value, incremental_operation=how)
        resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
        admin.incremental_alter_configs([resource])[resource].result(SECONDS)

    change("retention.ms", "120000", AlterConfigOpType.SET)
    change("cleanup.policy", "compact", AlterConfigOpType.APPEND)
    found = configs(admin, topic)
    assert found["retention.ms"].value == "120000"
    assert set(found["cleanup.policy"].value.split(",")) == {"delete", "compact"}
    change("cleanup.policy", "delete,compact", AlterConfigOpType.APPEND)
    assert configs(admin, topic)["cleanup.policy"].value == found["cleanup.policy"].value
    change("cleanup.policy", "compact, delete", AlterConfigOpType.SET)
    change("cleanup.policy", "delete", AlterConfigOpType.SUBTRACT)
    change("retention.ms", None, AlterConfigOpType.DELETE)
    found = configs(admin, topic)
    assert found["cleanup.policy"].value == "compact" and found["retention.ms"].value == "604800000"
    for name, value in (("retention.ms", "soon"), ("segment.bytes", "1"), ("unheard.of", "1")):
        code, text = refusal(lambda name=name, value=value: change(name, value, AlterConfigOpType.SET))  # type: ignore[misc]
        assert code == KafkaError.INVALID_CONFIG and name in text
    code, _ = refusal(lambda: change("cleanup.policy", "compact,delete", AlterConfigOpType.SUBTRACT))
    assert code == KafkaError.INVALID_CONFIG, "a topic needs one of them"
    assert configs(admin, topic)["retention.ms"].value == "604800000"


def test_settings_are_replaced_as_a_whole(admin: AdminClient, topic: str) -> None:
    first = ConfigResource(ResourceType.TOPIC, topic, set_config={"retention.ms": "1000", "segment.ms": "5000"})
    admin.alter_configs([first])[first].result(SECONDS)
    second = ConfigResource(ResourceType.TOPIC, topic, set_config={"segment.ms": "7000"})
    admin.alter_configs([second])[second].result(SECONDS)
    found = configs(admin, topic)
    assert (found["retention.ms"].value, found["segment.ms"].value) == ("604800000", "7000")


def test_the_configuration_of_nothing_is_refused(admin: AdminClient, unique: Unique) -> None:
    resource = ConfigResource(ResourceType.TOPIC, unique("nothing"))
    code, _ = refusal(lambda: admin.describe_configs([resource])[resource].result(SECONDS))
    assert code == KafkaError.UNKNOWN_TOPIC_OR_PART


# -- confluent-kafka: records, cluster, groups -------------------------------------------------------------------------


def test_offsets_are_listed_by_place_and_by_time(broker: ServedBroker, admin: AdminClient, topic: str) -> None:
    first_ms = int(time.time() * 1000) - 10_000
    fill(broker, topic, 100, first_ms=first_ms)

    def offset(spec: OffsetSpec) -> int:
        place = TopicPartition(topic, 0)
        return int(admin.list_offsets({place: spec})[place].result(SECONDS).offset)

    spec: Any = OffsetSpec  # whose methods have no types
    assert offset(spec.earliest()) == 0
    assert offset(spec.latest()) == 100
    assert offset(spec.max_timestamp()) == 99
    assert offset(spec.for_timestamp(first_ms + 40)) == 40
    assert offset(OffsetSpec.for_timestamp(first_ms + 10_000_000)) == -1


def test_records_are_deleted_up_to_an_offset(broker: ServedBroker, admin: AdminClient, topic: str) -> None:
    fill(broker, topic, 50)
    place = TopicPartition(topic, 0, 20)
    assert admin.delete_records([place])[place].result(SECONDS).low_watermark == 20
    consumer = Consumer({"bootstrap.servers": broker.address, "group.id": "x"})
    assert consumer.get_watermark_offsets(TopicPartition(topic, 0), SECONDS) == (20, 50)
    consumer.close()
    beyond = TopicPartition(topic, 0, 51)
    code, _ = refusal(lambda: admin.delete_records([beyond])[beyond].result(SECONDS))
    assert code == KafkaError.OFFSET_OUT_OF_RANGE


def test_the_cluster_is_this_broker(broker: ServedBroker, admin: AdminClient) -> None:
    cluster = admin.describe_cluster().result(SECONDS)
    assert cluster.controller.id == 1 and cluster.cluster_id
    assert [f"{node.host}:{node.port}" for node in cluster.nodes] == [broker.address]


@pytest.fixture(params=["classic", "consumer"])
def group(request: pytest.FixtureRequest, broker: ServedBroker, topic: str, unique: Unique) -> Iterator[Any]:
    """A group with one member that has read and committed 10 records."""
    fill(broker, topic, 10)
    classic = {"session.timeout.ms": SESSION_MS, "heartbeat.interval.ms": HEARTBEAT_MS}
    config = classic if request.param == "classic" else {"group.protocol": "consumer"}
    member = ConfluentMember(broker.address, unique(f"{request.param}-group"), topic, config)
    settle([member], shared_evenly(3))
    member.read(10)
    member.commit()
    yield member
    member.close()


def test_groups_are_listed_and_described(admin: AdminClient, group: ConfluentMember, topic: str) -> None:
    listed = {one.group_id: one for one in admin.list_consumer_groups().result(SECONDS).valid}
    assert listed[group.group].state == ConsumerGroupState.STABLE
    kind = ConsumerGroupType.CLASSIC if group.group.startswith("classic") else ConsumerGroupType.CONSUMER
    assert listed[group.group].type == kind
    described = admin.describe_consumer_groups([group.group])[group.group].result(SECONDS)
    assert described.state == ConsumerGroupState.STABLE
    (member,) = described.members
    assert {(one.topic, one.partition) for one in member.assignment.topic_partitions} == {
        (topic, 0),
        (topic, 1),
        (topic, 2),
    }


def test_groups_are_filtered_by_state_and_type(admin: AdminClient, group: ConfluentMember) -> None:
    def names(**filters: Any) -> set[str]:
        return {one.group_id for one in admin.list_consumer_groups(**filters).result(SECONDS).valid}

    mine, other = ConsumerGroupType.CLASSIC, ConsumerGroupType.CONSUMER
    if group.group.startswith("consumer"):
        mine, other = other, mine
    assert group.group in names(states={ConsumerGroupState.STABLE}, types={mine})
    assert group.group not in names(states={ConsumerGroupState.EMPTY})
    assert group.group not in names(types={other})


def test_offsets_of_an_empty_group_are_altered_and_deleted_with_it(
    admin: AdminClient, group: ConfluentMember, topic: str
) -> None:
    name = group.group

    def offsets() -> dict[int, int]:
        asked = [ConsumerGroupTopicPartitions(name)]
        answer = admin.list_consumer_group_offsets(asked)[name].result(SECONDS)
        return {one.partition: one.offset for one in answer.topic_partitions}

    assert offsets()[0] == 10
    moved = [ConsumerGroupTopicPartitions(name, [TopicPartition(topic, 0, 4), TopicPartition(topic, 1, 7)])]
    with pytest.raises(KafkaException):  # while members are there, only they may commit
        answer = admin.alter_consumer_group_offsets(moved)[name].result(SECONDS)
        raise KafkaException(answer.topic_partitions[0].error)
    code, _ = refusal(lambda: admin.delete_consumer_groups([name])[name].result(SECONDS))
    assert code == KafkaError.NON_EMPTY_GROUP
    group.close()
    answer = admin.alter_consumer_group_offsets(moved)[name].result(SECONDS)
    assert all(one.error is None for one in answer.topic_partitions)
    assert (offsets()[0], offsets()[1]) == (4, 7)
    admin.delete_consumer_groups([name])[name].result(SECONDS)
    assert name not in {one.group_id for one in admin.list_consumer_groups().result(SECONDS).valid}
    code, _ = refusal(lambda: admin.delete_consumer_groups([name])[name].result(SECONDS))
    assert code == KafkaError.GROUP_ID_NOT_FOUND


# -- kafka-python ------------------------------------------------------------------------------------------------------


def test_kafka_python_creates_grows_describes_and_deletes_topics(
    python_admin: KafkaAdminClient, unique: Unique
) -> None:
    name = unique("python")
    python_admin.create_topics([PythonNewTopic(name, 2, 1)])
    with pytest.raises(python_errors.TopicAlreadyExistsError):
        python_admin.create_topics([PythonNewTopic(name, 2, 1)])
    python_admin.create_partitions({name: PythonNewPartitions(4)})
    (described,) = python_admin.describe_topics([name])
    assert len(described["partitions"]) == 4
    with pytest.raises(python_errors.InvalidPartitionsError):
        python_admin.create_partitions({name: PythonNewPartitions(1)})
    assert name in python_admin.list_topics()
    python_admin.delete_topics([name])
    assert name not in python_admin.list_topics()
    with pytest.raises(python_errors.UnknownTopicOrPartitionError):
        python_admin.delete_topics([name])


def test_kafka_python_changes_and_describes_settings(python_admin: KafkaAdminClient, topic: str) -> None:
    resource = PythonResource(PythonResourceType.TOPIC, topic, configs={"retention.ms": "90000"})
    python_admin.alter_configs([resource])
    found = python_admin.describe_configs([PythonResource(PythonResourceType.TOPIC, topic)], config_filter="all")
    assert "90000" in str(found) and "cleanup.policy" in str(found)
    bad = PythonResource(PythonResourceType.TOPIC, topic, configs={"retention.ms": "soon"})
    assert "soon" in str(python_admin.alter_configs([bad]))
    assert "90000" in str(python_admin.describe_configs([PythonResource(PythonResourceType.TOPIC, topic)]))


def test_kafka_python_describes_the_cluster_and_its_directories(
    broker: ServedBroker, python_admin: KafkaAdminClient, topic: str
) -> None:
    fill(broker, topic, 5)
    cluster = python_admin.describe_cluster()
    assert cluster["controller_id"] == 1 and len(cluster["brokers"]) == 1
    assert topic in str(python_admin.describe_log_dirs())


def test_kafka_python_deletes_records_and_lists_offsets(
    broker: ServedBroker, python_admin: KafkaAdminClient, topic: str
) -> None:
    fill(broker, topic, 30)
    place = PythonPartition(topic, 0)
    python_admin.delete_records({place: 12})
    assert "12" in str(python_admin.list_partition_offsets({place: -2}))


def test_kafka_python_manages_groups(python_admin: KafkaAdminClient, group: ConfluentMember, topic: str) -> None:
    name = group.group
    assert name in str(python_admin.list_groups())
    if name.startswith("classic"):
        assert "Stable" in str(python_admin.describe_groups([name]))
    place = PythonPartition(topic, 0)
    assert "offset=10" in str(python_admin.list_group_offsets([name]))
    group.close()
    python_admin.delete_group_offsets(name, [place])
    assert "offset=10" not in str(python_admin.list_group_offsets([name]))
    python_admin.delete_groups([name])
    assert name not in str(python_admin.list_groups())
