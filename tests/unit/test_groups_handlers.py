"""The group APIs over their real bytes: a request written by `kio`, handled, and the answer read by `kio` again."""

from __future__ import annotations

import datetime
import importlib
import inspect
import io
import types
import uuid
from typing import Any

import pytest
from kio.index import load_request_schema, load_response_schema
from kio.serial import entity_reader, entity_writer

from millstream.broker.groups.stream.plan import decode_assignment, encode_assignment
from millstream.broker.session import Session
from millstream.cluster.base import Solo
from millstream.core.errors import Code
from millstream.doors.kafka.context import Context
from millstream.doors.kafka.sessions import FetchSessions
from millstream.security.rights import AllowAll
from millstream.wire.kafka import messages
from tests.unit.groups_kit import Bench, subscription

MODULES = [
    importlib.import_module(f"millstream.doors.kafka.{name}")
    for name in (
        "api_08_offset_commit",
        "api_09_offset_fetch",
        "api_10_find_coordinator",
        "api_11_join_group",
        "api_12_heartbeat",
        "api_13_leave_group",
        "api_14_sync_group",
        "api_15_describe_groups",
        "api_16_list_groups",
        "api_42_delete_groups",
        "api_47_offset_delete",
        "api_68_consumer_group_heartbeat",
        "api_69_consumer_group_describe",
    )
]
BY_KEY = {module.KEY: module for module in MODULES}
EVERY_VERSION = [(module.KEY, v) for module in MODULES for v in range(module.VERSIONS[0], module.VERSIONS[1] + 1)]


class Door:
    def __init__(self) -> None:
        self.bench = Bench()
        topic = self.bench.topics.get("orders")
        assert topic is not None
        self.topic_id = topic.id
        self.broker: Any = types.SimpleNamespace(
            groups=self.bench.groups,
            topics=self.bench.topics,
            node_id=7,
            advertised=lambda host, port: (host, port),
            cluster=Solo(7),
            authorizer=AllowAll(),
            clock=None,
            config=None,
            metrics=None,
        )

    async def ask(self, key: int, version: int, /, **fields: Any) -> Any:
        request = load_request_schema(key, version)
        buffer = io.BytesIO()
        entity_writer(request)(buffer, messages._build(request, fields))
        message = messages.decode_request(key, version, buffer.getvalue())
        context = Context(
            Session(self.broker, "kafka", "10.0.0.1", client_id="client"), FetchSessions(), "127.0.0.1", 9092, version
        )
        answer = BY_KEY[key].handle(message, context)
        if inspect.isawaitable(answer):
            answer = await answer
        encoded = messages.encode_response(key, version, answer)
        decoded, size = entity_reader(load_response_schema(key, version))(encoded, 0)
        assert size == len(encoded)
        return decoded

    async def join(self, version: int, member_id: str = "", **fields: Any) -> Any:
        return await self.ask(
            11,
            version,
            **{
                "group_id": "g",
                "session_timeout": 10_000,
                "rebalance_timeout": 60_000,
                "member_id": member_id,
                "protocol_type": "consumer",
                "protocols": [{"name": "range", "metadata": subscription("orders")}],
                **fields,
            },
        )

    async def stable(self) -> Any:
        joined = await self.join(3)
        await self.ask(
            14,
            3,
            group_id="g",
            generation_id=joined.generation_id,
            member_id=joined.member_id,
            assignments=[{"member_id": joined.member_id, "assignment": b"plan"}],
        )
        return joined

    async def commit(self, version: int, member_id: str = "", epoch: int = -1) -> Any:
        partitions = [{"partition_index": 0, "committed_offset": 5, "committed_metadata": None}]
        topic = {"name": "orders", "topic_id": self.topic_id, "partitions": partitions}
        return await self.ask(
            8, version, group_id="g", generation_id_or_member_epoch=epoch, member_id=member_id, topics=[topic]
        )

    async def beat(self, version: int, epoch: int = 0, **fields: Any) -> Any:
        if epoch == 0:
            fields = {
                "rebalance_timeout": 60_000,
                "subscribed_topic_names": ["orders"],
                "topic_partitions": [],
                **fields,
            }
        request = {"group_id": "g", "member_id": "m", "member_epoch": epoch, "topic_partitions": None, **fields}
        return await self.ask(68, version, **request)


def versions(key: int) -> pytest.MarkDecorator:
    low, high = BY_KEY[key].VERSIONS
    return pytest.mark.parametrize("version", range(low, high + 1))


@pytest.mark.parametrize(("key", "version"), EVERY_VERSION)
def test_every_version_has_a_schema_and_the_docstring_names_the_range(key: int, version: int) -> None:
    load_request_schema(key, version)
    module = BY_KEY[key]
    assert f"(key {key})" in str(module.__doc__)
    assert "Gaps:" in str(module.__doc__)


@versions(8)
async def test_commit_answers_per_partition(version: int) -> None:
    door = Door()
    answer = await door.commit(version)
    assert int(answer.topics[0].partitions[0].error_code) == Code.NONE
    refused = await door.commit(version, "ghost", 3)
    assert int(refused.topics[0].partitions[0].error_code) == Code.UNKNOWN_MEMBER_ID
    assert door.bench.committed() == 5


@versions(9)
async def test_fetch_answers_what_was_committed_and_minus_one_for_the_rest(version: int) -> None:
    door = Door()
    await door.commit(9)
    asked = [{"name": "orders", "topic_id": door.topic_id, "partition_indexes": [0, 1]}]
    unknown = [{"name": "nowhere", "topic_id": uuid.uuid4(), "partition_indexes": [0]}]
    group = {"group_id": "g", "topics": asked + unknown}
    answer = await door.ask(9, version, **(group if version < 8 else {"groups": [group]}))
    topics = answer.topics if version < 8 else answer.groups[0].topics
    assert [each.committed_offset for each in topics[0].partitions] == [5, -1]
    assert topics[1].partitions[0].committed_offset == -1
    assert int(topics[1].partitions[0].error_code) == (Code.UNKNOWN_TOPIC_ID if version >= 10 else Code.NONE)


@pytest.mark.parametrize("version", range(2, 11))
async def test_fetch_of_null_topics_answers_with_all(version: int) -> None:
    door = Door()
    await door.commit(9)
    group = {"group_id": "g", "topics": None}
    answer = await door.ask(9, version, **(group if version < 8 else {"groups": [group]}))
    topics = answer.topics if version < 8 else answer.groups[0].topics
    assert [each.committed_offset for topic in topics for each in topic.partitions] == [5]


@pytest.mark.parametrize("version", [9, 10])
async def test_fetch_refuses_a_stale_member(version: int) -> None:
    door = Door()
    await door.beat(1)
    group = {"group_id": "g", "member_id": "m", "member_epoch": 9, "topics": None}
    answer = await door.ask(9, version, groups=[group])
    assert int(answer.groups[0].error_code) == Code.STALE_MEMBER_EPOCH


@versions(10)
async def test_the_coordinator_is_this_broker(version: int) -> None:
    door = Door()
    if version < 4:
        found = await door.ask(10, version, key="g")
    else:
        [found] = (await door.ask(10, version, coordinator_keys=["g"])).coordinators
        assert found.key == "g"
    assert (found.node_id, found.host, found.port) == (7, "127.0.0.1", 9092)


async def test_an_unknown_kind_of_coordinator_is_refused() -> None:
    answer = await Door().ask(10, 4, key_type=9, coordinator_keys=["g"])
    assert int(answer.coordinators[0].error_code) == Code.INVALID_REQUEST


@versions(11)
async def test_join_gives_a_generation(version: int) -> None:
    door = Door()
    joined = await door.join(version)
    if version >= 4:
        assert int(joined.error_code) == Code.MEMBER_ID_REQUIRED
        joined = await door.join(version, joined.member_id)
    assert int(joined.error_code) == Code.NONE
    assert (joined.generation_id, joined.protocol_name, joined.leader) == (1, "range", joined.member_id)
    assert [member.metadata for member in joined.members] == [subscription("orders")]


@versions(11)
async def test_join_refuses(version: int) -> None:
    refused = await Door().join(version, session_timeout=1)
    assert int(refused.error_code) == Code.INVALID_SESSION_TIMEOUT


@versions(12)
async def test_heartbeat_answers_with_a_code(version: int) -> None:
    door = Door()
    joined = await door.stable()
    good = await door.ask(12, version, group_id="g", generation_id=1, member_id=joined.member_id)
    bad = await door.ask(12, version, group_id="g", generation_id=1, member_id="ghost")
    assert (int(good.error_code), int(bad.error_code)) == (Code.NONE, Code.UNKNOWN_MEMBER_ID)


@versions(13)
async def test_leave_takes_members_out(version: int) -> None:
    door = Door()
    joined = await door.stable()
    if version < 3:
        answer = await door.ask(13, version, group_id="g", member_id=joined.member_id)
        assert int((await door.ask(13, version, group_id="g", member_id="ghost")).error_code) == Code.UNKNOWN_MEMBER_ID
    else:
        members = [{"member_id": joined.member_id}, {"member_id": "ghost"}]
        answer = await door.ask(13, version, group_id="g", members=members)
        assert [int(each.error_code) for each in answer.members] == [Code.NONE, Code.UNKNOWN_MEMBER_ID]
    assert int(answer.error_code) == Code.NONE
    assert int((await door.ask(13, version, group_id="", member_id="", members=[])).error_code) == Code.INVALID_GROUP_ID


@versions(14)
async def test_sync_hands_the_plan_out(version: int) -> None:
    door = Door()
    joined = await door.join(3)
    fields = {"group_id": "g", "generation_id": 1, "member_id": joined.member_id}
    plan = [{"member_id": joined.member_id, "assignment": b"plan"}]
    answer = await door.ask(14, version, **fields, protocol_type="consumer", protocol_name="range", assignments=plan)
    assert (int(answer.error_code), answer.assignment) == (Code.NONE, b"plan")
    refused = await door.ask(14, version, **{**fields, "generation_id": 9}, assignments=[])
    assert int(refused.error_code) == Code.ILLEGAL_GENERATION


@versions(15)
async def test_describe_shows_classic_groups_and_calls_others_dead(version: int) -> None:
    door = Door()
    joined = await door.stable()
    fields = {"groups": ["g", "nothing"], "include_authorized_operations": False}
    group, nothing = (await door.ask(15, version, **fields)).groups
    assert (group.group_state, group.protocol_type, group.protocol_data) == ("Stable", "consumer", "range")
    [member] = group.members
    assert (member.member_id, member.client_id, member.client_host) == (joined.member_id, "client", "/10.0.0.1")
    assert (member.member_metadata, member.member_assignment) == (subscription("orders"), b"plan")
    assert nothing.group_state == "Dead"
    assert int(nothing.error_code) == (Code.GROUP_ID_NOT_FOUND if version >= 6 else Code.NONE)


@versions(16)
async def test_list_shows_groups(version: int) -> None:
    door = Door()
    await door.stable()
    [group] = (await door.ask(16, version)).groups
    assert (group.group_id, group.protocol_type) == ("g", "consumer")
    if version >= 4:
        assert group.group_state == "Stable"
        assert (await door.ask(16, version, states_filter=["Empty"])).groups == ()
    if version >= 5:
        assert group.group_type == "classic"
        assert (await door.ask(16, version, types_filter=["consumer"])).groups == ()


@versions(42)
async def test_delete_groups_answers_per_group(version: int) -> None:
    door = Door()
    await door.commit(9)
    answer = await door.ask(42, version, groups_names=["g", "nothing"])
    assert [int(each.error_code) for each in answer.results] == [Code.NONE, Code.GROUP_ID_NOT_FOUND]


async def test_offset_delete_answers_per_partition() -> None:
    door = Door()
    topics = [{"name": "orders", "partitions": [{"partition_index": 0}]}]
    assert int((await door.ask(47, 0, group_id="g", topics=topics)).error_code) == Code.GROUP_ID_NOT_FOUND
    await door.commit(9)
    answer = await door.ask(47, 0, group_id="g", topics=topics)
    assert int(answer.topics[0].partitions[0].error_code) == Code.NONE
    assert door.bench.committed() is None


@versions(68)
async def test_consumer_heartbeat_joins_lives_and_leaves(version: int) -> None:
    door = Door()
    joined = await door.beat(version)
    assert (int(joined.error_code), joined.member_id, joined.member_epoch) == (Code.NONE, "m", 1)
    assert joined.heartbeat_interval == datetime.timedelta(seconds=5)
    [assigned] = joined.assignment.topic_partitions
    assert (assigned.topic_id, assigned.partitions) == (door.topic_id, (0, 1, 2, 3))
    owned = [{"topic_id": door.topic_id, "partitions": [0, 1, 2, 3]}]
    lives = await door.beat(version, 1, topic_partitions=owned)
    assert (lives.member_epoch, lives.assignment) == (1, None)
    fenced = await door.beat(version, 5)
    assert (int(fenced.error_code), bool(fenced.error_message)) == (Code.FENCED_MEMBER_EPOCH, True)
    assert (await door.beat(version, -1)).member_epoch == -1


@versions(69)
async def test_consumer_describe_shows_what_members_have_and_should_have(version: int) -> None:
    door = Door()
    await door.beat(1, subscribed_topic_regex="ord.*", instance_id="i", rack_id="r")
    fields = {"group_ids": ["g", "nothing"], "include_authorized_operations": False}
    group, nothing = (await door.ask(69, version, **fields)).groups
    assert (group.group_state, group.group_epoch, group.assignment_epoch) == ("Stable", 1, 1)
    [member] = group.members
    assert (member.instance_id, member.rack_id, member.subscribed_topic_regex) == ("i", "r", "ord.*")
    for assignment in (member.assignment, member.target_assignment):
        [topic] = assignment.topic_partitions
        assert (topic.topic_name, topic.partitions) == ("orders", (0, 1, 2, 3))
    assert int(nothing.error_code) == Code.GROUP_ID_NOT_FOUND


async def test_a_group_of_both_protocols_is_served_and_described() -> None:
    door = Door()
    classic = await door.join(3)
    plan = encode_assignment([("orders", number) for number in range(4)])
    member = {"group_id": "g", "member_id": classic.member_id}
    await door.ask(14, 3, **member, generation_id=1, assignments=[{"member_id": classic.member_id, "assignment": plan}])
    newer = await door.beat(1)
    assert (int(newer.error_code), newer.member_epoch) == (Code.NONE, 2)
    told = await door.ask(12, 4, **member, generation_id=1)
    assert int(told.error_code) == Code.REBALANCE_IN_PROGRESS
    joined = await door.join(9, classic.member_id)
    assert (joined.generation_id, joined.protocol_type, joined.protocol_name) == (2, "consumer", "range")
    assert (joined.leader, joined.skip_assignment, joined.members) == ("", False, ())
    protocol = {"protocol_type": "consumer", "protocol_name": "range", "assignments": []}
    synced = await door.ask(14, 5, **member, generation_id=2, **protocol)
    assert decode_assignment(synced.assignment) == ({("orders", 0), ("orders", 1)}, b"")
    assert int((await door.commit(9, classic.member_id, 1)).topics[0].partitions[0].error_code) == (
        Code.ILLEGAL_GENERATION
    )
    [described] = (await door.ask(69, 1, group_ids=["g"], include_authorized_operations=False)).groups
    types = {each.member_id: (each.member_type, each.member_epoch) for each in described.members}
    assert types == {classic.member_id: (0, 2), "m": (1, 2)}
    [dead] = (await door.ask(15, 6, groups=["g"], include_authorized_operations=False)).groups
    assert (int(dead.error_code), dead.group_state) == (Code.GROUP_ID_NOT_FOUND, "Dead")
    [listed] = (await door.ask(16, 5, states_filter=[], types_filter=["consumer"])).groups
    assert (listed.group_id, listed.protocol_type, listed.group_type) == ("g", "consumer", "consumer")
    await door.beat(1, -1)
    [described] = (await door.ask(15, 6, groups=["g"], include_authorized_operations=False)).groups
    assert (described.group_state, [each.member_id for each in described.members]) == (
        "PreparingRebalance",
        [classic.member_id],
    )
