"""Requests that name very many things: other clients are served meanwhile, and every item is answered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from struct import pack
from typing import Any, NamedTuple
from uuid import UUID

import pytest

from millstream.core.errors import Code
from tests.compat import large_requests, raw
from tests.compat.large_requests import NAME, NUMBER
from tests.compat.raw import Raw
from tests.serving import ServedBroker

ITEMS = 99_990
"""Of the 100,000 that one request may have over all its arrays."""
PAIRS = 49_990
"""Of items that have another one inside."""
FEWER = 30_000
"""Of items that take long: enough to hold the event loop for a second if they were handled at once."""
BUSY_SECONDS_MAX = 0.1
SOME_ID = UUID(int=NUMBER)


class Row(NamedTuple):
    key: int
    version: int
    fields: Callable[[list[Any]], dict[str, Any]]
    """The request, made of its long list."""
    item: Any
    items: int = ITEMS


def listed(name: str = "topics", /, **more: Any) -> Callable[[list[Any]], dict[str, Any]]:
    return lambda items: {**more, name: items}


def inside(outer: str, inner: str, about: dict[str, Any], **more: Any) -> Callable[[list[Any]], dict[str, Any]]:
    """A list of one thing, which has the long list inside it."""
    return lambda items: {**more, outer: [{**about, inner: items}]}


def of_orders(inner: str = "partitions", topic: str = "name", **more: Any) -> Callable[[list[Any]], dict[str, Any]]:
    return inside("topics", inner, {topic: "orders"}, **more)


TIMED: dict[str, Any] = {"timeout": 1000}
TRIED: dict[str, Any] = {"timeout": 1000, "validate_only": True}
TOPIC: dict[str, Any] = {"name": NAME, "num_partitions": 1, "replication_factor": 1, "assignments": [], "configs": []}
FRESH: dict[str, Any] = {**TOPIC, "name": "fresh", "num_partitions": -1, "replication_factor": -1}
MEMBER: dict[str, Any] = {
    "generation_id_or_member_epoch": -1,
    "member_id": "",
    "group_instance_id": None,
    "group_id": "g",
}
COMMITTED = {"committed_offset": 0, "committed_leader_epoch": -1, "committed_metadata": ""}
LATEST: dict[str, Any] = {"replica_id": -1, "isolation_level": 0}
END = {"current_leader_epoch": -1, "leader_epoch": 0}
ACL = {"resource_name": NAME, "resource_pattern_type": 3, "principal": "User:a", "host": "*"}
ACLS = {"resource_name_filter": NAME, "pattern_type_filter": 3, "principal_filter": None, "host_filter": None}
ANY = {"operation": 3, "permission_type": 3}
SHOWN: dict[str, Any] = {"include_synonyms": True, "include_documentation": False}
JOIN: dict[str, Any] = {
    "session_timeout": 9000,
    "rebalance_timeout": 9000,
    "group_instance_id": "i",
    "protocol_type": "consumer",
}
BEAT: dict[str, Any] = {
    "group_id": "c",
    "member_id": "m",
    "instance_id": None,
    "rack_id": None,
    "rebalance_timeout": 9000,
}
SUBSCRIBED: dict[str, Any] = {"subscribed_topic_names": None, "subscribed_topic_regex": None, "server_assignor": None}
OURS = {"resource_type": 2, "resource_name": "orders"}
NAMED = {"resource_type": 2, "resource_name": NAME}
PRODUCED: dict[str, Any] = {"transactional_id": None, "acks": -1, "timeout": 9000}
BATCH = raw.batch(b"v")
FETCHED: dict[str, Any] = {
    "replica_id": -1,
    "max_wait": 0,
    "min_bytes": 1,
    "max_bytes": 1 << 20,
    "isolation_level": 0,
    "rack_id": "",
}
NO_SESSION: dict[str, Any] = {**FETCHED, "session_id": 0, "session_epoch": -1, "forgotten_topics_data": []}
SESSION: dict[str, Any] = {**FETCHED, "session_id": 0, "session_epoch": 0, "forgotten_topics_data": []}
FORGETS: dict[str, Any] = {**FETCHED, "session_id": 0, "session_epoch": 0, "topics": []}
READ = {"current_leader_epoch": -1, "fetch_offset": 0, "log_start_offset": -1, "partition_max_bytes": 1 << 20}
SHARE: dict[str, Any] = {
    "group_id": "s",
    "member_id": "m",
    "max_wait": 0,
    "min_bytes": 1,
    "max_bytes": 1 << 20,
    "max_records": 9,
}
SHARED: dict[str, Any] = {**SHARE, "batch_size": 9, "share_session_epoch": 0, "forgotten_topics_data": []}
ACKNOWLEDGED = {"first_offset": 0, "last_offset": 0, "acknowledge_types": [1]}

ROWS = {
    "produce": Row(
        0,
        9,
        inside("topic_data", "partition_data", {"name": "orders"}, **PRODUCED),
        {"index": 0, "records": BATCH},
        FEWER,
    ),
    "fetch": Row(1, 11, of_orders(topic="topic", **NO_SESSION), {"partition": 0, **READ}, FEWER),
    "list offsets": Row(2, 7, of_orders(**LATEST), {"partition_index": NUMBER, "timestamp": -1}),
    "metadata": Row(3, 5, listed(allow_auto_topic_creation=False), {"name": NAME}),
    "offset commit": Row(8, 7, of_orders(**MEMBER), {"partition_index": 0, **COMMITTED}),
    "offset fetch": Row(9, 5, of_orders("partition_indexes", group_id="g"), NUMBER),
    "offset fetch of groups": Row(9, 8, listed("groups", require_stable=False), {"group_id": NAME, "topics": None}),
    "join": Row(11, 5, listed("protocols", group_id="j", member_id="", **JOIN), {"name": NAME, "metadata": b""}),
    "leave": Row(13, 4, listed("members", group_id="g"), {"member_id": NAME, "group_instance_id": None}),
    "validate topics": Row(19, 5, listed(**TRIED), TOPIC, 2000),
    "validate a topic's settings": Row(19, 5, inside("topics", "configs", FRESH, **TRIED), {"name": NAME, "value": ""}),
    "describe configs by key": Row(32, 4, inside("resources", "configuration_keys", OURS, **SHOWN), NAME),
    "log directories of topics": Row(35, 2, listed(), {"topic": NAME, "partitions": [0]}, PAIRS),
    "elect leaders": Row(
        43, 2, listed("topic_partitions", election_type=0, timeout=9), {"topic": NAME, "partitions": [0]}, PAIRS
    ),
    "alter configs of one topic": Row(
        44,
        1,
        inside("resources", "configs", OURS, validate_only=True),
        {"name": NAME, "config_operation": 0, "value": "1"},
    ),
    "offset delete": Row(47, 0, of_orders(group_id="g"), {"partition_index": 0}),
    "describe share offsets": Row(
        90, 0, inside("groups", "topics", {"group_id": "s"}), {"topic_name": NAME, "partitions": [0]}, PAIRS
    ),
}
"""One of each way in which a list is gone through."""
MORE_ROWS = {
    "produce as much as possible": Row(
        0, 9, inside("topic_data", "partition_data", {"name": "orders"}, **PRODUCED), {"index": 0, "records": BATCH}
    ),
    "fetch as much as possible": Row(1, 11, of_orders(topic="topic", **NO_SESSION), {"partition": 0, **READ}),
    "produce to partitions that are not there": Row(
        0,
        9,
        inside("topic_data", "partition_data", {"name": "orders"}, **PRODUCED),
        {"index": NUMBER, "records": BATCH},
    ),
    "produce to topics": Row(
        0,
        7,
        listed("topic_data", **PRODUCED),
        {"name": NAME, "partition_data": [{"index": 0, "records": BATCH}]},
        PAIRS,
    ),
    "produce to no partition": Row(0, 9, listed("topic_data", **PRODUCED), {"name": NAME, "partition_data": []}),
    "fetch partitions that are not there": Row(
        1, 11, of_orders(topic="topic", **NO_SESSION), {"partition": NUMBER, **READ}
    ),
    "fetch topics": Row(1, 11, listed(**NO_SESSION), {"topic": NAME, "partitions": [{"partition": 0, **READ}]}, PAIRS),
    "fetch, and wait": Row(
        1,
        11,
        of_orders(topic="topic", **{**NO_SESSION, "max_wait": 2000, "min_bytes": 2 << 20}),
        {"partition": 0, **READ},
    ),
    "fetch in a session": Row(1, 11, of_orders(topic="topic", **SESSION), {"partition": NUMBER, **READ}, 20_000),
    "fetch in a session that is too large": Row(
        1, 11, of_orders(topic="topic", **SESSION), {"partition": NUMBER, **READ}
    ),
    "fetch, and forget": Row(
        1, 11, listed("forgotten_topics_data", **FORGETS), {"topic": NAME, "partitions": [0]}, PAIRS
    ),
    "share fetch": Row(
        78,
        1,
        inside("topics", "partitions", {"topic_id": SOME_ID}, **SHARED),
        {"partition_index": NUMBER, "acknowledgement_batches": []},
    ),
    "share fetch of partitions": Row(
        78,
        1,
        inside("topics", "partitions", {"topic_id": SOME_ID}, **SHARED),
        {"partition_index": NUMBER, "acknowledgement_batches": []},
        19_990,
    ),
    "share acknowledge": Row(
        79,
        1,
        inside("topics", "partitions", {"topic_id": SOME_ID}, group_id="s", member_id="m", share_session_epoch=1),
        {"partition_index": NUMBER, "acknowledgement_batches": [ACKNOWLEDGED]},
        PAIRS,
    ),
    "list offsets of topics": Row(
        2, 7, listed(**LATEST), {"name": NAME, "partitions": [{"partition_index": 0, "timestamp": -1}]}, PAIRS
    ),
    "list offsets of a time": Row(2, 7, of_orders(**LATEST), {"partition_index": 0, "timestamp": 5}),
    "metadata by id": Row(
        3,
        12,
        listed(allow_auto_topic_creation=False, include_topic_authorized_operations=False),
        {"name": None, "topic_id": SOME_ID},
    ),
    "offset commit of topics": Row(
        8, 7, listed(**MEMBER), {"name": NAME, "partitions": [{"partition_index": 0, **COMMITTED}]}, PAIRS
    ),
    "offset fetch of topics": Row(9, 5, listed(group_id="g"), {"name": NAME, "partition_indexes": [0]}, PAIRS),
    "find coordinators": Row(10, 4, listed("coordinator_keys", key_type=0), NAME),
    "sync": Row(
        14,
        3,
        listed("assignments", group_id="g", generation_id=1, member_id="m", group_instance_id=None),
        {"member_id": NAME, "assignment": b""},
    ),
    "describe groups": Row(15, 5, listed("groups", include_authorized_operations=False), NAME),
    "list groups": Row(16, 5, listed("states_filter", types_filter=[]), NAME),
    "create topics wrongly": Row(19, 5, listed(**TRIED), {**TOPIC, "replication_factor": 3}),
    "validate assignments": Row(
        19, 5, inside("topics", "assignments", FRESH, **TRIED), {"partition_index": NUMBER, "broker_ids": [1]}, PAIRS
    ),
    "delete topics": Row(20, 5, listed("topic_names", **TIMED), NAME),
    "delete topics by id": Row(20, 6, listed(**TIMED), {"name": None, "topic_id": SOME_ID}),
    "delete records": Row(21, 2, of_orders(**TIMED), {"partition_index": 0, "offset": 0}),
    "delete records of topics": Row(
        21, 2, listed(**TIMED), {"name": NAME, "partitions": [{"partition_index": 0, "offset": 0}]}, PAIRS
    ),
    "epoch ends": Row(23, 4, of_orders(topic="topic", replica_id=-1), {"partition": NUMBER, **END}),
    "epoch ends of topics": Row(
        23, 4, listed(replica_id=-1), {"topic": NAME, "partitions": [{"partition": 0, **END}]}, PAIRS
    ),
    "create acls": Row(30, 2, listed("creations"), {"resource_type": 2, **ACL, **ANY}),
    "delete acls": Row(31, 2, listed("filters"), {"resource_type_filter": 2, **ACLS, **ANY}),
    "describe configs": Row(32, 4, listed("resources", **SHOWN), {**NAMED, "configuration_keys": None}),
    "alter configs": Row(33, 1, listed("resources", validate_only=True), {**NAMED, "configs": []}),
    "alter configs incrementally": Row(44, 1, listed("resources", validate_only=True), {**NAMED, "configs": []}),
    "log directories": Row(35, 2, of_orders(topic="topic"), NUMBER),
    "create partitions": Row(37, 3, listed(**TRIED), {"name": NAME, "count": 3, "assignments": None}),
    "delete groups": Row(42, 2, listed("groups_names"), NAME),
    "reassign": Row(45, 0, of_orders(**TIMED), {"partition_index": 0, "replicas": [1]}, PAIRS),
    "list reassignments": Row(46, 0, of_orders("partition_indexes", **TIMED), NUMBER),
    "offset delete of topics": Row(
        47, 0, listed(group_id="g"), {"name": NAME, "partitions": [{"partition_index": 0}]}, PAIRS
    ),
    "describe quotas": Row(
        48, 1, listed("components", strict=False), {"entity_type": "user", "match_type": 0, "match": NAME}
    ),
    "describe credentials": Row(50, 0, listed("users"), {"name": NAME}),
    "describe quorum": Row(55, 1, of_orders(topic="topic_name"), {"partition_index": NUMBER}),
    "describe producers": Row(61, 0, of_orders("partition_indexes"), 0),
    "describe producers of topics": Row(61, 0, listed(), {"name": NAME, "partition_indexes": [0]}, PAIRS),
    "describe transactions": Row(65, 0, listed("transactional_ids"), NAME),
    "list transactions": Row(66, 0, listed("state_filters", producer_id_filters=[]), NAME),
    "consumer heartbeat": Row(
        68,
        1,
        listed("topic_partitions", member_epoch=1, **BEAT, **SUBSCRIBED),
        {"topic_id": SOME_ID, "partitions": [0]},
        PAIRS,
    ),
    "consumer heartbeat of a new member": Row(
        68,
        1,
        lambda items: {
            **BEAT,
            **SUBSCRIBED,
            "group_id": "c2",
            "member_epoch": 0,
            "topic_partitions": [],
            "subscribed_topic_names": items,
        },
        NAME,
        9_990,
    ),
    "describe consumer groups": Row(69, 1, listed("group_ids", include_authorized_operations=False), NAME),
    "list config resources": Row(74, 1, listed("resource_types"), 2),
    "describe topic partitions": Row(75, 0, listed(response_partition_limit=2000, cursor=None), {"name": NAME}),
    "share heartbeat": Row(
        76, 1, listed("subscribed_topic_names", group_id="s2", member_id="m", member_epoch=0, rack_id=None), NAME
    ),
    "describe share groups": Row(77, 1, listed("group_ids", include_authorized_operations=False), NAME),
    "describe share offsets of groups": Row(90, 0, listed("groups"), {"group_id": NAME, "topics": None}),
    "alter share offsets": Row(
        91, 0, of_orders(topic="topic_name", group_id="s"), {"partition_index": NUMBER, "start_offset": 0}
    ),
    "alter share offsets of topics": Row(
        91,
        0,
        listed(group_id="s"),
        {"topic_name": NAME, "partitions": [{"partition_index": 0, "start_offset": 0}]},
        PAIRS,
    ),
    "alter share offsets of no group": Row(
        91, 0, of_orders(topic="topic_name", group_id="none"), {"partition_index": NUMBER, "start_offset": 0}
    ),
    "delete share offsets": Row(92, 0, listed(group_id="s"), {"topic_name": NAME}),
}
"""Every other API with a list, and the other shapes of those above."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedBroker]:
    directory: Path = tmp_path_factory.mktemp("many")
    with ServedBroker(directory) as broker:
        raw.create_topic(broker.address, "orders")
        beat = {"group_id": "s", "member_id": "m", "rack_id": None, "subscribed_topic_names": ["orders"]}
        with Raw(broker.address) as client:  # a share group without members
            assert client.ask(raw.request(76, 1, {**beat, "member_epoch": 0})).error_code == 0
            assert client.ask(raw.request(76, 1, {**beat, "member_epoch": -1})).error_code == 0
            assert client.ask(raw.request(8, 7, one_commit())) is not None  # makes group g
        yield broker


@pytest.mark.parametrize("what", [*ROWS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_ROWS)])
def test_a_request_about_very_many_things_holds_up_no_other_client(served: ServedBroker, what: str) -> None:
    row = {**ROWS, **MORE_ROWS}[what]
    with Raw(served.address) as client:
        client.socket.settimeout(100)
        client.send(large_requests.request(*row))
        assert client.receive()
    busy = served.busy_seconds_max()
    assert busy <= BUSY_SECONDS_MAX, f"the event loop was held for {busy:.3f} s"


@pytest.mark.parametrize(("what", "path"), [("offset fetch", "topics"), ("offset delete", "topics")])
def test_a_list_that_is_gone_through_in_steps_is_answered_as_one(served: ServedBroker, what: str, path: str) -> None:
    row = ROWS[what]._replace(items=2500)
    with Raw(served.address) as client:
        (topic,) = getattr(client.ask(large_requests.request(*row)), path)
    assert topic.name == "orders" and len(topic.partitions) == 2500


def produced(count: int, acks: int = -1, index: int = 0, topic: str = "lined-up") -> bytes:
    fields = inside("topic_data", "partition_data", {"name": topic}, **{**PRODUCED, "acks": acks})
    return large_requests.request(0, 9, fields, {"index": index, "records": BATCH}, count)


def offsets(answer: Any) -> list[int]:
    return [each.base_offset for each in answer.responses[0].partition_responses]


def test_batches_behind_a_large_produce_request_are_appended_behind_its_own(served: ServedBroker) -> None:
    raw.create_topic(served.address, "lined-up")
    with Raw(served.address) as client:
        client.send(b"".join(produced(count, acks) for count, acks in ((1, -1), (2500, -1), (1, -1))))
        answers = [offsets(client.answer(0, 9)) for _ in range(3)]
        assert answers == [[0], list(range(1, 2501)), [2501]]
        client.send(produced(2500, 0) + produced(1))  # the first is not answered
        assert offsets(client.answer(0, 9)) == [5002]


def test_a_large_produce_request_that_fails_with_acks_0_costs_its_connection(served: ServedBroker) -> None:
    with Raw(served.address) as client:
        assert client.ask(produced(2500, 0, index=7, topic="orders")) is None
    with Raw(served.address) as client:
        (topic,) = client.ask(produced(2500, 5, topic="orders")).responses
        assert {each.error_code for each in topic.partition_responses} == {Code.INVALID_REQUIRED_ACKS}


def test_a_large_session_is_fetched_from_as_a_small_one(served: ServedBroker) -> None:
    raw.create_topic(served.address, "spread")
    fields = inside("topics", "partitions", {"topic": "spread"}, **SESSION)
    with Raw(served.address) as client:
        opened = client.ask(large_requests.request(1, 11, fields, {"partition": NUMBER, **READ}, 2500))
        assert [each.partition_index for each in opened.responses[0].partitions] == list(range(2500))
        again = client.ask(raw.fetch("", 0, session=(opened.session_id, 1), is_named=False))
        assert len(again.responses[0].partitions) == 2499, "errors are told again, and there is no news of the other"
        forgotten = [{"topic": "spread", "partitions": list(range(1, 2500))}]
        last = client.ask(raw.fetch("", 0, session=(opened.session_id, 2), is_named=False, forgotten=forgotten))
        assert last.error_code == 0 and last.responses == ()


def test_acknowledging_very_many_partitions_in_a_session_holds_up_no_other_client(served: ServedBroker) -> None:
    about = {"group_id": "s4", "member_id": "m"}
    beat = {**about, "rack_id": None, "subscribed_topic_names": ["orders"], "member_epoch": 0}
    row = MORE_ROWS["share acknowledge"]
    fields = inside("topics", "partitions", {"topic_id": SOME_ID}, **about, share_session_epoch=1)
    with Raw(served.address) as client:
        assert client.ask(raw.request(76, 1, beat)).error_code == 0
        assert client.ask(raw.request(78, 1, {**SHARED, **about, "topics": []})).error_code == 0
        answer = client.ask(large_requests.request(79, 1, fields, row.item, 19_990))
    assert answer.error_code == 0
    assert {each.error_code for each in answer.responses[0].partitions} == {Code.UNKNOWN_TOPIC_ID}
    assert len(answer.responses[0].partitions) == 19_990
    assert served.busy_seconds_max() <= BUSY_SECONDS_MAX


@pytest.mark.parametrize("what", ["share fetch", "share acknowledge"])
def test_a_share_request_for_more_partitions_than_a_session_holds_is_refused(served: ServedBroker, what: str) -> None:
    with Raw(served.address) as client:
        assert client.ask(large_requests.request(*MORE_ROWS[what])).error_code == Code.INVALID_REQUEST


def blob(topics: int, owned: int) -> bytes:
    """The metadata of a consumer that subscribes to so many topics and owns so many partitions."""
    names = pack(">i", topics) + (b"\0\6orders" if topics == 1 else b"\0\0" * topics)
    partitions = pack(">i", 1) + b"\0\6orders" + pack(f">i{owned}i", owned, *range(owned))
    return pack(">h", 1) + names + pack(">i", -1) + partitions


@pytest.mark.parametrize(
    ("topics", "owned", "error"),
    [
        (1, 49_000, Code.NONE),
        (1, 1_000_000, Code.INCONSISTENT_GROUP_PROTOCOL),
        (500_000, 1, Code.INCONSISTENT_GROUP_PROTOCOL),
    ],
)
def test_a_blob_that_names_very_many_things_holds_up_no_other_client(
    served: ServedBroker, topics: int, owned: int, error: Code
) -> None:
    group = {"group_id": f"blobs-{topics}-{owned}", "member_id": "m", "member_epoch": 0}
    subscribed = {**SUBSCRIBED, "subscribed_topic_names": ["orders"], "topic_partitions": []}
    join = {"group_id": group["group_id"], "member_id": "", **JOIN}
    with Raw(served.address) as client, Raw(served.address) as newer:
        assert newer.ask(raw.request(68, 1, {**BEAT, **group, **subscribed})).error_code == 0
        served.busy_seconds_max()
        row = listed("protocols", **join)
        answer = client.ask(raw.request(11, 5, row([{"name": "range", "metadata": blob(topics, owned)}])))
        assert answer.error_code == error
        assert newer.ask(raw.request(68, 1, {**BEAT, **group, "member_epoch": -1, **subscribed})).error_code == 0
    assert served.busy_seconds_max() <= BUSY_SECONDS_MAX


def one_commit() -> dict[str, Any]:
    return {**MEMBER, "topics": [{"name": "orders", "partitions": [{"partition_index": 0, **COMMITTED}]}]}


def test_of_many_new_topics_the_first_come_with_their_settings(served: ServedBroker) -> None:
    with Raw(served.address) as client:
        topics = client.ask(large_requests.request(*ROWS["validate topics"])).topics
    assert {each.error_code for each in topics} == {0}
    assert [each.name for each in topics] == [f"n{number:05d}" for number in range(2000)]
    assert [bool(each.configs) for each in topics] == [True] * 500 + [False] * 1500


def test_a_topic_of_thousands_of_partitions_is_made_grown_and_deleted_beside_other_clients(tmp_path: Path) -> None:
    grown = {"topics": [{"name": "wide", "count": 9000, "assignments": None}], "timeout": 10_000}
    with ServedBroker(tmp_path) as alone, Raw(alone.address) as client:
        raw.create_topic(alone.address, "wide", 5000)
        client.socket.settimeout(60)
        assert client.ask(raw.request(37, 3, {**grown, "validate_only": False})).results[0].error_code == 0
        (topic,) = client.ask(
            raw.request(3, 7, {"topics": [{"name": "wide"}], "allow_auto_topic_creation": False})
        ).topics
        assert [each.partition_index for each in topic.partitions] == list(range(9000))
        assert client.ask(raw.request(20, 4, {"topic_names": ["wide"], "timeout": 10_000})).responses[0].error_code == 0
        assert alone.busy_seconds_max() <= BUSY_SECONDS_MAX


def test_a_large_request_that_is_none_costs_its_connection_and_is_no_failure(served: ServedBroker) -> None:
    with Raw(served.address) as client:
        assert client.ask(raw.frame(15, 5, b"\xff" * 50_000)) is None
    assert "Traceback" not in served.errors() and "closing the connection" in served.errors()
