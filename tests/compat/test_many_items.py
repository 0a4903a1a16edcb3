"""Requests that name very many things: other clients are served meanwhile, and every item is answered."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.compat import raw
from tests.compat.raw import Raw
from tests.serving import ServedBroker

COUNT = 40_000
BUSY_SECONDS_MAX = 0.1
NAMES = [f"n{number}" for number in range(COUNT)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedBroker]:
    directory: Path = tmp_path_factory.mktemp("many")
    with ServedBroker(directory) as broker:
        raw.create_topic(broker.address, "orders")
        yield broker


def partitions(**fields: Any) -> list[dict[str, Any]]:
    return [{"name": "orders", "partitions": [{"partition_index": number, **fields} for number in range(COUNT)]}]


def resources(**fields: Any) -> list[dict[str, Any]]:
    return [{"resource_type": 2, "resource_name": name, **fields} for name in NAMES]


def topic(name: str) -> dict[str, Any]:
    return {"name": name, "num_partitions": 1, "replication_factor": 1, "assignments": [], "configs": []}


def growth(name: str) -> dict[str, Any]:
    return {"name": name, "count": 3, "assignments": None}


MEMBER = {"generation_id_or_member_epoch": -1, "member_id": "", "group_instance_id": None}
COMMITTED = {"committed_offset": 0, "committed_leader_epoch": -1, "committed_metadata": ""}
EPOCHS = [{"partition": number, "current_leader_epoch": -1, "leader_epoch": 0} for number in range(COUNT)]
REQUESTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "list offsets": (2, 7, {"replica_id": -1, "isolation_level": 0, "topics": partitions(timestamp=-1)}),
    "metadata": (3, 5, {"topics": [{"name": name} for name in NAMES], "allow_auto_topic_creation": False}),
    "offset fetch": (9, 5, {"group_id": "g", "topics": [{"name": "orders", "partition_indexes": list(range(COUNT))}]}),
    "offset commit": (8, 7, {**MEMBER, "group_id": "g", "topics": partitions(**COMMITTED)}),
    "find coordinators": (10, 4, {"key_type": 0, "coordinator_keys": NAMES}),
    "delete records": (21, 2, {"topics": partitions(offset=0), "timeout": 1000}),
    "epoch ends": (23, 4, {"replica_id": -1, "topics": [{"topic": "orders", "partitions": EPOCHS}]}),
    "create partitions": (37, 3, {"topics": [*map(growth, NAMES)], "timeout": 1000, "validate_only": True}),
    "offset delete": (47, 0, {"group_id": "g", "topics": partitions()}),
    "describe consumer groups": (69, 1, {"group_ids": NAMES, "include_authorized_operations": False}),
    "describe share groups": (77, 1, {"group_ids": NAMES, "include_authorized_operations": False}),
    "describe groups": (15, 5, {"groups": NAMES, "include_authorized_operations": False}),
    "validate topics": (19, 5, {"topics": [*map(topic, NAMES[:2000])], "timeout": 1000, "validate_only": True}),
    "delete topics": (20, 5, {"topic_names": NAMES, "timeout": 1000}),
    "describe configs": (32, 4, {"resources": resources(configuration_keys=None), "include_synonyms": True}),
    "alter configs": (33, 1, {"resources": resources(configs=[]), "validate_only": True}),
    "alter configs incrementally": (44, 1, {"resources": resources(configs=[]), "validate_only": True}),
    "delete groups": (42, 2, {"groups_names": NAMES}),
}


@pytest.mark.parametrize("what", REQUESTS)
def test_a_request_about_very_many_things_holds_up_no_other_client(served: ServedBroker, what: str) -> None:
    key, version, fields = REQUESTS[what]
    with Raw(served.address) as client:
        client.socket.settimeout(100)
        assert client.ask(raw.request(key, version, {"include_documentation": False, **fields})) is not None
    busy = served.busy_seconds_max()
    assert busy <= BUSY_SECONDS_MAX, f"the event loop was held for {busy:.3f} s"


def test_of_many_new_topics_the_first_come_with_their_settings(served: ServedBroker) -> None:
    key, version, fields = REQUESTS["validate topics"]
    with Raw(served.address) as client:
        topics = client.ask(raw.request(key, version, fields)).topics
    assert {each.error_code for each in topics} == {0} and [each.name for each in topics] == NAMES[:2000]
    assert [bool(each.configs) for each in topics] == [True] * 500 + [False] * 1500


def test_a_large_request_that_is_none_costs_its_connection_and_is_no_failure(served: ServedBroker) -> None:
    with Raw(served.address) as client:
        assert client.ask(raw.frame(15, 5, b"\xff" * 50_000)) is None
    assert "Traceback" not in served.errors() and "closing the connection" in served.errors()
