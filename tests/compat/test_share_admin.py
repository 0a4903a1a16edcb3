"""Share groups from outside: listed, described, moved, configured, deleted."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import (
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ConfigSource,
    ResourceType,
)

from millstream.core.errors import Code
from tests.compat import raw, share_workers
from tests.compat.raw import Raw
from tests.compat.share_frames import ACCEPT, RELEASE, Bare, codes, leases, topic_id
from tests.serving import ServedBroker

Unique = Callable[[str], str]


class Place:
    """A topic with ten records in each of two partitions, a group, and a connection to ask about them."""

    def __init__(self, broker: ServedBroker, unique: Unique) -> None:
        self.address = broker.address
        self.topic, self.group = unique("jobs"), unique("workers")
        raw.create_topic(self.address, self.topic, 2)
        share_workers.configure(self.address, self.group)
        self.id = topic_id(self.address, self.topic)
        self.raw = Raw(self.address)
        batch = raw.batch(*(b"%d" % number for number in range(10)), timestamp_ms=int(time.time() * 1000))
        for partition in (0, 1):
            assert self.raw.ask(raw.produce(self.topic, batch, partition=partition)).responses

    def member(self, **more: Any) -> Bare:
        return Bare(self.address, self.group, self.topic, **more)

    def listed(self, **filters: Any) -> dict[str, Any]:
        fields = {"states_filter": [], "types_filter": [], **filters}
        return {each.group_id: each for each in self.raw.ask(raw.request(16, 5, fields)).groups}

    def describe(self, group: str | None = None) -> Any:
        fields = {"group_ids": [group or self.group], "include_authorized_operations": False}
        [described] = self.raw.ask(raw.request(77, 1, fields)).groups
        return described

    def offsets(self, topics: Any = None, group: str | None = None, version: int = 1) -> Any:
        asked = {"group_id": group or self.group, "topics": topics}
        [described] = self.raw.ask(raw.request(90, version, {"groups": [asked]})).groups
        return described

    def progress(self) -> dict[int, tuple[int, int]]:
        return {
            each.partition_index: (each.start_offset, each.lag)
            for topic in self.offsets().topics
            for each in topic.partitions
        }

    def alter(self, index: int, offset: int, topic: str | None = None) -> Any:
        partitions = [{"partition_index": index, "start_offset": offset}]
        topics = [{"topic_name": topic or self.topic, "partitions": partitions}]
        return self.raw.ask(raw.request(91, 0, {"group_id": self.group, "topics": topics}))

    def delete_offsets(self, topic: str) -> Any:
        return self.raw.ask(raw.request(92, 0, {"group_id": self.group, "topics": [{"topic_name": topic}]}))

    def delete(self) -> int:
        [result] = self.raw.ask(raw.request(42, 2, {"groups_names": [self.group]})).results
        return int(result.error_code)


@pytest.fixture
def place(broker: ServedBroker, unique: Unique) -> Place:
    return Place(broker, unique)


def test_a_share_group_is_listed_and_described(place: Place) -> None:
    empty = place.listed()[place.group]
    assert (empty.group_type, empty.group_state, empty.protocol_type) == ("share", "Empty", "share")
    assert place.describe().members == ()
    with place.member() as member:
        assert place.group in place.listed(types_filter=["share"], states_filter=["stable"])
        assert place.group not in place.listed(types_filter=["classic", "consumer"])
        described = place.describe()
        assert (described.error_code, described.group_state) == (0, "Stable")
        assert described.group_epoch == described.assignment_epoch == member.epoch
        [one] = described.members
        assert (one.member_id, one.client_id, one.member_epoch) == (member.member, "raw", member.epoch)
        assert list(one.subscribed_topic_names) == [place.topic]
        [assigned] = one.assignment.topic_partitions
        assert (assigned.topic_id, assigned.topic_name, list(assigned.partitions)) == (place.id, place.topic, [0, 1])
    assert place.describe("nobody-at-all").error_code == Code.GROUP_ID_NOT_FOUND


def test_offsets_are_described_altered_and_deleted(place: Place) -> None:
    assert place.progress() == {}
    with place.member() as member:
        member.fetch(0, {(place.id, 0): (), (place.id, 1): ()})
        acks = {(place.id, 0): [(0, 3, [ACCEPT]), (5, 5, [ACCEPT])], (place.id, 1): [(0, 9, [ACCEPT])]}
        assert codes(member.acknowledge(1, acks)) == {0: 0, 1: 0}
        assert place.progress() == {0: (4, 5), 1: (10, 0)}
        assert place.alter(0, 0).error_code == Code.NON_EMPTY_GROUP
        assert place.delete_offsets(place.topic).error_code == Code.NON_EMPTY_GROUP
        assert member.acknowledge(-1, {}).error_code == 0
        assert member.beat(-1).error_code == 0
    [altered] = place.alter(1, 7).responses
    assert (altered.topic_id, altered.partitions[0].error_code) == (place.id, 0)
    assert place.progress() == {0: (4, 5), 1: (7, 3)}
    [deleted] = place.delete_offsets(place.topic).responses
    assert (deleted.topic_id, deleted.error_code) == (place.id, 0)
    assert place.progress() == {}
    with place.member() as member:
        assert leases(member.fetch(0, {(place.id, 1): ()})) == {1: [(0, 9, 1)]}, "it starts over"


def test_named_partitions_are_described_whether_they_were_read_or_not(place: Place) -> None:
    topics = [
        {"topic_name": place.topic, "partitions": [1, 1, 7]},
        {"topic_name": "nowhere", "partitions": [0]},
    ]
    for version in (0, 1):
        known, unknown = place.offsets(topics, version=version).topics
        found = [(each.partition_index, each.start_offset, each.error_code) for each in known.partitions]
        assert found == [(1, -1, 0), (7, -1, Code.UNKNOWN_TOPIC_OR_PARTITION)]
        assert unknown.partitions[0].error_code == Code.UNKNOWN_TOPIC_OR_PARTITION


def test_offsets_that_cannot_be_are_refused(place: Place) -> None:
    for index, offset, code in (
        (0, 11, Code.OFFSET_OUT_OF_RANGE),
        (0, -1, Code.OFFSET_OUT_OF_RANGE),
        (2, 0, Code.UNKNOWN_TOPIC_OR_PARTITION),
        (-1, 0, Code.UNKNOWN_TOPIC_OR_PARTITION),
    ):
        [topic] = place.alter(index, offset).responses
        assert topic.partitions[0].error_code == code
    [topic] = place.alter(0, 0, topic="nowhere").responses
    assert topic.partitions[0].error_code == Code.UNKNOWN_TOPIC_OR_PARTITION
    [topic] = place.delete_offsets("nowhere").responses
    assert topic.error_code == Code.UNKNOWN_TOPIC_OR_PARTITION
    place.group = "nobody-at-all"
    assert place.alter(0, 0).error_code == Code.GROUP_ID_NOT_FOUND
    assert place.delete_offsets(place.topic).error_code == Code.GROUP_ID_NOT_FOUND


def test_a_deleted_group_forgets_everything(place: Place) -> None:
    with place.member() as member:
        member.fetch(0, {(place.id, 0): ()})
        assert codes(member.acknowledge(1, {(place.id, 0): [(0, 8, [ACCEPT]), (9, 9, [RELEASE])]})) == {0: 0}
        assert place.delete() == Code.NON_EMPTY_GROUP
        assert member.acknowledge(-1, {}).error_code == 0
        assert member.beat(-1).error_code == 0
    assert place.delete() == 0
    assert place.group not in place.listed()
    assert place.delete() == Code.GROUP_ID_NOT_FOUND
    share_workers.configure(place.address, place.group)
    with place.member() as member:
        assert leases(member.fetch(0, {(place.id, 0): ()})) == {0: [(0, 9, 1)]}


def test_other_consumers_cannot_use_a_share_groups_name(place: Place) -> None:
    with place.member():
        beat = {
            "group_id": place.group,
            "member_id": "m",
            "member_epoch": 0,
            "instance_id": None,
            "rack_id": None,
            "rebalance_timeout": 1000,
            "subscribed_topic_names": [place.topic],
            "subscribed_topic_regex": None,
            "server_assignor": None,
            "topic_partitions": [],
        }
        assert place.raw.ask(raw.request(68, 1, beat)).error_code == Code.GROUP_ID_NOT_FOUND


def test_settings_of_a_group_are_described_set_and_taken_back(place: Place) -> None:
    client = share_workers.admin(place.address)

    def found() -> dict[str, tuple[str, int]]:
        resource = ConfigResource(ResourceType.GROUP, place.group)
        entries = client.describe_configs([resource])[resource].result(20)
        return {name: (entry.value, entry.source) for name, entry in entries.items()}

    def change(name: str, value: str | None, operation: AlterConfigOpType) -> None:
        entry = ConfigEntry(name, value, incremental_operation=operation)
        resource = ConfigResource(ResourceType.GROUP, place.group, incremental_configs=[entry])
        client.incremental_alter_configs([resource])[resource].result(20)

    name = "share.record.lock.duration.ms"
    assert found()[name] == ("30000", ConfigSource.DEFAULT_CONFIG.value)
    change("group." + name, "60000", AlterConfigOpType.SET)
    assert found()[name] == ("60000", ConfigSource.GROUP_CONFIG.value)
    assert found()["share.auto.offset.reset"] == ("earliest", ConfigSource.GROUP_CONFIG.value)
    with place.member() as member:
        assert member.fetch(0, {(place.id, 0): ()}).acquisition_lock_timeout.total_seconds() == 60
    change(name, None, AlterConfigOpType.DELETE)
    assert found()[name] == ("30000", ConfigSource.DEFAULT_CONFIG.value)
    for bad_name, bad in ((name, "soon"), (name, "1"), ("retention.ms", "1000"), ("share.nonsense", "1")):
        with pytest.raises(KafkaException) as refused:
            change(bad_name, bad, AlterConfigOpType.SET)
        assert refused.value.args[0].code() == Code.INVALID_CONFIG
    replacing = ConfigResource(ResourceType.GROUP, place.group, set_config={"share.delivery.count.limit": "7"})
    client.alter_configs([replacing])[replacing].result(20)
    assert found()["share.delivery.count.limit"] == ("7", ConfigSource.GROUP_CONFIG.value)
    assert found()["share.auto.offset.reset"] == ("latest", ConfigSource.DEFAULT_CONFIG.value)
