"""Every API of the Kafka door refuses a principal without rights, with Kafka's error, and changes nothing."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Hashable, Iterator
from typing import Any

import pytest

from millstream.broker.groups.groups import PartitionCommit, ShareBeat, TopicCommit
from millstream.broker.session import Session
from millstream.config import Config
from millstream.core.errors import Code
from millstream.doors.kafka.apis import APIS
from millstream.security.principal import ANONYMOUS, Principal
from millstream.security.rights import Kind, Operation
from millstream.server import Server
from millstream.wire.kafka import messages
from tests.compat import raw
from tests.compat.random_messages import read_response

TOPIC, GROUP, CLUSTER, TRANSACTIONAL_ID = (
    Code.TOPIC_AUTHORIZATION_FAILED,
    Code.GROUP_AUTHORIZATION_FAILED,
    Code.CLUSTER_AUTHORIZATION_FAILED,
    Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
)
MEMBER = {"group_id": "g", "member_id": "m", "group_instance_id": None}
SET = {"name": "retention.ms", "config_operation": 0, "value": "1"}
ALWAYS_ANSWERED = {18, 60}
"""ApiVersions and DescribeCluster: Kafka answers them without a right."""
EMPTY = {16: "groups", 66: "transaction_states"}
"""What lists nothing to a principal without rights."""


def resource(kind: int, name: str, **more: Any) -> dict[str, Any]:
    return {"resource_type": kind, "resource_name": name, **more}


def altered(kind: int, name: str) -> dict[str, Any]:
    configs = [{"name": "root", "config_operation": 0, "value": "INFO"}] if kind == 8 else [SET]
    return {"resources": [resource(kind, name, configs=configs)], "validate_only": False}


def replaced(kind: int, name: str) -> dict[str, Any]:
    configs = [{"name": "retention.ms", "value": "1"}]
    return {"resources": [resource(kind, name, configs=configs)], "validate_only": False}


def described(kind: int, name: str) -> dict[str, Any]:
    resources = [resource(kind, name, configuration_keys=None)]
    return {"resources": resources, "include_synonyms": False, "include_documentation": False}


OFFSETS = {"partition_index": 0, "committed_offset": 1, "committed_leader_epoch": -1, "committed_metadata": None}
CREATED = {"name": "new", "num_partitions": 1, "replication_factor": 1, "assignments": [], "configs": []}
LISTED = {"partition_index": 0, "current_leader_epoch": -1, "timestamp": -1}
EPOCHS = {"partition": 0, "current_leader_epoch": -1, "leader_epoch": 0}
JOINED = {
    **MEMBER,
    "member_id": "",
    "session_timeout": 10_000,
    "rebalance_timeout": 10_000,
    "protocol_type": "consumer",
    "protocols": [{"name": "range", "metadata": b""}],
}
SYNCED: dict[str, Any] = {**MEMBER, "generation_id": 1, "protocol_type": None, "protocol_name": None, "assignments": []}
BEAT = {"group_id": "g", "member_id": "m", "member_epoch": 0, "rack_id": None, "subscribed_topic_names": ["orders"]}
CONSUMED = {
    **BEAT,
    "instance_id": None,
    "rebalance_timeout": 1000,
    "subscribed_topic_regex": None,
    "server_assignor": None,
    "topic_partitions": [],
}
ACL = {
    "resource_type": 2,
    "resource_name": "orders",
    "resource_pattern_type": 3,
    "principal": "User:a",
    "host": "*",
    "operation": 2,
    "permission_type": 3,
}
FILTER = {
    "resource_type_filter": 1,
    "resource_name_filter": None,
    "pattern_type_filter": 1,
    "principal_filter": None,
    "host_filter": None,
    "operation": 1,
    "permission_type": 1,
}
SHARED = {"group_id": "g", "member_id": "m", "share_session_epoch": 0, "topics": []}
FETCHED = {
    "max_wait": 0,
    "min_bytes": 1,
    "max_bytes": 1000,
    "max_records": 10,
    "batch_size": 10,
    "forgotten_topics_data": [],
}
COMMITTED = {
    **MEMBER,
    "generation_id_or_member_epoch": -1,
    "topics": [{"name": "orders", "partitions": [OFFSETS]}],
}
ASKED = {
    "group_id": "g",
    "member_id": None,
    "member_epoch": -1,
    "topics": [{"name": "orders", "partition_indexes": [0]}],
}
CASES: list[tuple[int, int, dict[str, Any], Code]] = [
    (2, 7, {"replica_id": -1, "isolation_level": 0, "topics": [{"name": "orders", "partitions": [LISTED]}]}, TOPIC),
    (8, 9, COMMITTED, GROUP),
    (9, 9, {"groups": [ASKED], "require_stable": False}, GROUP),
    (10, 6, {"key_type": 0, "coordinator_keys": ["g"]}, GROUP),
    (10, 6, {"key_type": 1, "coordinator_keys": ["t"]}, TRANSACTIONAL_ID),
    (10, 6, {"key_type": 2, "coordinator_keys": ["g:orders:0"]}, CLUSTER),
    (11, 9, {**JOINED, "reason": None}, GROUP),
    (12, 4, {**MEMBER, "generation_id": 1}, GROUP),
    (13, 5, {"group_id": "g", "members": [{"member_id": "m", "group_instance_id": None, "reason": None}]}, GROUP),
    (14, 5, SYNCED, GROUP),
    (15, 6, {"groups": ["g"], "include_authorized_operations": True}, GROUP),
    (19, 7, {"topics": [CREATED], "timeout": 1000, "validate_only": False}, TOPIC),
    (20, 5, {"topic_names": ["orders"], "timeout": 1000}, TOPIC),
    (
        21,
        2,
        {"topics": [{"name": "orders", "partitions": [{"partition_index": 0, "offset": -1}]}], "timeout": 1},
        TOPIC,
    ),
    (22, 4, {"transactional_id": None, "transaction_timeout": 1, "producer_id": -1, "producer_epoch": -1}, CLUSTER),
    (23, 4, {"replica_id": -1, "topics": [{"topic": "orders", "partitions": [EPOCHS]}]}, TOPIC),
    (29, 3, FILTER, CLUSTER),
    (30, 3, {"creations": [ACL]}, CLUSTER),
    (31, 3, {"filters": [FILTER]}, CLUSTER),
    *(
        (32, 4, described(*one), code)
        for one, code in (((2, "orders"), TOPIC), ((4, "0"), CLUSTER), ((8, "0"), CLUSTER))
    ),
    *((32, 4, described(*one), code) for one, code in (((16, "m"), CLUSTER), ((32, "g"), GROUP))),
    *((33, 2, replaced(*one), code) for one, code in (((2, "orders"), TOPIC), ((4, "0"), CLUSTER), ((32, "g"), GROUP))),
    *((44, 1, altered(*one), code) for one, code in (((2, "orders"), TOPIC), ((4, "0"), CLUSTER), ((32, "g"), GROUP))),
    (44, 1, altered(8, "0"), CLUSTER),
    (35, 4, {"topics": None}, CLUSTER),
    (
        37,
        3,
        {"topics": [{"name": "orders", "count": 5, "assignments": None}], "timeout": 1, "validate_only": False},
        TOPIC,
    ),
    (42, 2, {"groups_names": ["g"]}, GROUP),
    (43, 2, {"election_type": 0, "topic_partitions": [{"topic": "orders", "partitions": [0]}], "timeout": 1}, CLUSTER),
    (45, 0, {"timeout": 1, "topics": []}, CLUSTER),
    (46, 0, {"timeout": 1, "topics": None}, CLUSTER),
    (47, 0, {"group_id": "g", "topics": [{"name": "orders", "partitions": [{"partition_index": 0}]}]}, GROUP),
    (48, 1, {"components": [], "strict": False}, CLUSTER),
    (50, 0, {"users": None}, CLUSTER),
    (55, 2, {"topics": []}, CLUSTER),
    (61, 0, {"topics": [{"name": "orders", "partition_indexes": [0]}]}, TOPIC),
    (65, 0, {"transactional_ids": ["t"]}, TRANSACTIONAL_ID),
    (68, 1, CONSUMED, GROUP),
    (69, 1, {"group_ids": ["g"], "include_authorized_operations": True}, GROUP),
    (74, 1, {"resource_types": []}, CLUSTER),
    (75, 0, {"topics": [{"name": "orders"}], "response_partition_limit": 10, "cursor": None}, TOPIC),
    (76, 1, BEAT, GROUP),
    (77, 1, {"group_ids": ["g"], "include_authorized_operations": True}, GROUP),
    (78, 1, {**SHARED, **FETCHED}, GROUP),
    (79, 1, {**SHARED, "share_session_epoch": 1}, GROUP),
    (90, 1, {"groups": [{"group_id": "g", "topics": None}]}, GROUP),
    (
        91,
        0,
        {
            "group_id": "g",
            "topics": [{"topic_name": "orders", "partitions": [{"partition_index": 0, "start_offset": 0}]}],
        },
        GROUP,
    ),
    (92, 0, {"group_id": "g", "topics": [{"topic_name": "orders"}]}, GROUP),
]
ONLY_GROUP = {8, 9, 47, 68, 76}
"""APIs that ask for a group first, and for each topic then."""


class Nothing:
    """Allows what it is told to, and nothing else."""

    is_open = False
    changes = 0

    def __init__(self, *kinds: Kind) -> None:
        self._kinds = kinds
        self.asked: set[tuple[Principal, str]] = set()

    def allows(self, principal: Principal, host: str, operation: Operation, kind: Kind, name: str) -> bool:
        self.asked.add((principal, host))
        return kind in self._kinds

    def allows_any(self, principal: Principal, host: str, operation: Operation, kind: Kind) -> bool:
        return kind in self._kinds

    def scope(self, principal: Principal, host: str) -> Hashable:
        return principal


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server(Config(store="memory:", kafka="127.0.0.1:0", http="off"))
    await server.start()
    await server.broker.topics.create("orders", 2, {})
    session = Session(server.broker, "kafka", "10.0.0.1")
    await session.commit("g", "", None, -1, [TopicCommit("orders", [PartitionCommit(0, 1)])])
    yield server
    await server.stop()


async def ask(server: Server, frame: bytes) -> Any:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.addresses["kafka"].port)
    writer.write(frame)
    data = await reader.readexactly(int.from_bytes(await reader.readexactly(4)))
    writer.close()
    key, version = (int.from_bytes(frame[at : at + 2]) for at in (4, 6))
    return read_response(key, version, data[4 + messages.is_flexible(key, version) :])


def state(server: Server) -> tuple[Any, ...]:
    broker = server.broker
    logs = [(each.log.start, each.log.end) for topic in broker.topics for each in topic.partitions]
    settings = [(topic.name, dict(topic.settings.overrides)) for topic in broker.topics]
    return broker._meta.revision, logs, settings, broker.groups.list(), sorted(broker.queues.names())  # type: ignore[attr-defined]


def codes(answer: Any) -> Iterator[Code]:
    """All error codes of an answer."""
    for field in dataclasses.fields(answer):
        value = getattr(answer, field.name)
        if field.name == "error_code":
            yield Code(int(value))  # type: ignore[call-arg]  # a member by its number
        for each in value if isinstance(value, tuple) else (value,):
            if dataclasses.is_dataclass(each):
                yield from codes(each)


def test_every_api_is_here() -> None:
    assert {key for key, *_ in CASES} | {0, 1, 3} | ALWAYS_ANSWERED | EMPTY.keys() == APIS.keys()


@pytest.mark.parametrize(("key", "version", "fields", "refusal"), CASES)
async def test_a_principal_without_rights_is_refused(
    server: Server, key: int, version: int, fields: dict[str, Any], refusal: Code
) -> None:
    before = state(server)
    server.broker.authorizer = Nothing()
    found = set(codes(await ask(server, raw.request(key, version, fields))))
    assert refusal in found and found <= {refusal, Code.NONE}
    assert state(server) == before


@pytest.mark.parametrize(("key", "version", "fields"), [case[:3] for case in CASES if case[0] in ONLY_GROUP])
async def test_the_right_to_a_group_is_none_to_its_topics(
    server: Server, key: int, version: int, fields: dict[str, Any]
) -> None:
    before = state(server)
    server.broker.authorizer = Nothing(Kind.GROUP)
    found = set(codes(await ask(server, raw.request(key, version, fields))))
    assert TOPIC in found and found <= {TOPIC, Code.NONE}
    assert state(server) == before


@pytest.mark.parametrize("frame", [raw.produce("orders", raw.batch(b"x")), raw.fetch("orders", 0)])
async def test_records_are_refused(server: Server, frame: bytes) -> None:
    before = state(server)
    server.broker.authorizer = Nothing()
    assert TOPIC in set(codes(await ask(server, frame)))
    assert state(server) == before


@pytest.mark.parametrize("key", EMPTY)
async def test_lists_leave_out_what_may_not_be_described(server: Server, key: int) -> None:
    server.broker.authorizer = Nothing()
    fields = {"states_filter": [], "types_filter": []} if key == 16 else {
        "state_filters": [], "producer_id_filters": [], "duration_filter": -1
    }  # fmt: skip
    assert getattr(await ask(server, raw.request(key, APIS[key].low if key == 66 else 5, fields)), EMPTY[key]) == ()


def metadata(*names: str, create: bool = True) -> bytes:
    topics = [{"topic_id": None, "name": name} for name in names] or None
    return raw.request(
        3,
        12,
        {"topics": topics, "allow_auto_topic_creation": create, "include_topic_authorized_operations": True},
    )


async def test_metadata_hides_topics_and_creates_none(server: Server) -> None:
    server.broker.authorizer = Nothing()
    named = await ask(server, metadata("orders", "new"))
    assert [(each.error_code, each.topic_id) for each in named.topics] == [(TOPIC, None)] * 2
    assert (await ask(server, metadata())).topics == ()
    assert sorted(server.broker.topics.names()) == ["orders"]


class Describing(Nothing):
    def allows(self, principal: Principal, host: str, operation: Operation, kind: Kind, name: str) -> bool:
        return operation == Operation.DESCRIBE


async def test_metadata_creates_a_topic_only_with_the_right_to(server: Server) -> None:
    server.broker.authorizer = Describing()
    known, missing = (await ask(server, metadata("orders", "new"))).topics
    assert (known.error_code, known.topic_authorized_operations) == (0, 1 << Operation.DESCRIBE)
    assert missing.error_code == TOPIC
    assert sorted(server.broker.topics.names()) == ["orders"]


async def test_the_right_to_write_anywhere_allows_idempotence(server: Server) -> None:
    server.broker.authorizer = Nothing(Kind.TOPIC)
    fields = {"transactional_id": None, "transaction_timeout": 1, "producer_id": -1, "producer_epoch": -1}
    assert (await ask(server, raw.request(22, 4, fields))).error_code == 0


async def test_a_share_member_reads_only_topics_that_it_may_read(server: Server) -> None:
    session = Session(server.broker, "kafka", "10.0.0.1", principal=ANONYMOUS)
    await session.share_heartbeat(ShareBeat("q", "m", 0, topics=frozenset({"orders"})))
    server.broker.authorizer = Nothing(Kind.GROUP)
    topic = server.broker.topics.get("orders")
    assert topic is not None
    partitions = [{"partition_index": 0, "acknowledgement_batches": []}]
    topics = [{"topic_id": topic.id, "partitions": partitions}]
    fields = {**SHARED, **FETCHED, "group_id": "q", "topics": topics}
    (answered,) = (await ask(server, raw.request(78, 1, fields))).responses
    assert [each.error_code for each in answered.partitions] == [TOPIC]
