"""A queue keeps the defaults of the door that made it, whichever doors work on it afterwards, across restarts."""

from __future__ import annotations

import uuid
from pathlib import Path

from tests.compat import raw
from tests.compat.client_flowmq import FlowmqClient
from tests.compat.raw import Raw
from tests.in_thread import BrokerInThread

LIMIT = "share.delivery.count.limit"
GROUP = 32
DEFAULT, FROM_GROUP = 5, 8


def share_join(broker: BrokerInThread, group: str) -> None:
    """A ShareGroupHeartbeat, as the first of a Java `KafkaShareConsumer`."""
    fields = {
        "group_id": group,
        "member_id": str(uuid.uuid4()),
        "member_epoch": 0,
        "rack_id": None,
        "subscribed_topic_names": ["jobs"],
    }
    with Raw(broker.address("kafka")) as link:
        assert link.ask(raw.request(76, 1, fields)).error_code == 0


def subscribe(broker: BrokerInThread, group: str) -> None:
    client = FlowmqClient(broker.address("flowmq"))
    client.subscribe("jobs", group)
    client.close()


def described(broker: BrokerInThread, group: str) -> tuple[str, int]:
    """Value and source, as DescribeConfigs tells."""
    resource = {"resource_type": GROUP, "resource_name": group, "configuration_keys": [LIMIT]}
    fields = {"resources": [resource], "include_synonyms": True, "include_documentation": False}
    with Raw(broker.address("kafka")) as link:
        [result] = link.ask(raw.request(32, 4, fields)).results
    [entry] = result.configs
    return entry.value, entry.config_source


def set_limit(broker: BrokerInThread, group: str, value: str | None) -> None:
    change = {"name": LIMIT, "config_operation": 0 if value else 1, "value": value}
    resource = {"resource_type": GROUP, "resource_name": group, "configs": [change]}
    with Raw(broker.address("kafka")) as link:
        [response] = link.ask(raw.request(44, 1, {"resources": [resource], "validate_only": False})).responses
    assert response.error_code == 0


def in_force(broker: BrokerInThread, group: str) -> int:
    def ask(server: object) -> int:
        queue, topic = server.broker.queues.get(group), server.broker.topics.get("jobs")  # type: ignore[attr-defined]
        return int(queue.settings_for(topic).attempts_max)

    return broker.ask(ask)


def start(directory: Path) -> BrokerInThread:
    return BrokerInThread(directory, flowmq="127.0.0.1:0")


def test_a_flowmq_subscriber_does_not_change_the_delivery_limit_of_a_share_group(tmp_path: Path) -> None:
    with start(tmp_path) as broker:
        raw.create_topic(broker.address("kafka"), "jobs")
        share_join(broker, "kafkas")
        subscribe(broker, "kafkas")
        assert (in_force(broker, "kafkas"), described(broker, "kafkas")) == (5, ("5", DEFAULT))
    with start(tmp_path) as broker:
        subscribe(broker, "kafkas")
        assert in_force(broker, "kafkas") == 5


def test_a_flowmq_queue_keeps_its_delivery_limit_when_only_kafka_clients_use_it(tmp_path: Path) -> None:
    with start(tmp_path) as broker:
        raw.create_topic(broker.address("kafka"), "jobs")
        subscribe(broker, "workers")
        share_join(broker, "workers")
        assert (in_force(broker, "workers"), described(broker, "workers")) == (3, ("3", DEFAULT))
    with start(tmp_path) as broker:
        share_join(broker, "workers")
        assert (in_force(broker, "workers"), described(broker, "workers")) == (3, ("3", DEFAULT))


def test_setting_and_unsetting_the_limit_of_a_flowmq_queue_brings_the_doors_default_back(tmp_path: Path) -> None:
    with start(tmp_path) as broker:
        raw.create_topic(broker.address("kafka"), "jobs")
        subscribe(broker, "workers")
        set_limit(broker, "workers", "7")
    with start(tmp_path) as broker:
        assert (in_force(broker, "workers"), described(broker, "workers")) == (7, ("7", FROM_GROUP))
        set_limit(broker, "workers", None)
    with start(tmp_path) as broker:
        assert (in_force(broker, "workers"), described(broker, "workers")) == (3, ("3", DEFAULT))
