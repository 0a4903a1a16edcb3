"""Queues over several brokers with one store: unmodified share consumers fetch from the leader of a partition, and one
broker alone knows what is leased.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import ConfigResource, ResourceType

import millstream
from tests import stores
from tests.command_line import Cli
from tests.compat.share_workers import (
    RELEASE,
    Worker,
    admin,
    configure,
    create_topic,
    explicit,
    produce,
    values,
    wait_for,
)
from tests.serving import ServedBroker

TOPIC, GROUP, PARTITIONS, RECORDS = "jobs", "workers", 4, 400
LEASE_MS = 30_000
SHORT_LEASE_MS = 4000
"""Of a broker in the cluster: so long the others wait for one that died."""


@pytest.fixture
def lease_ms() -> int:
    return LEASE_MS


@pytest.fixture(params=["sqlite", "postgresql"])
def pair(request: pytest.FixtureRequest, tmp_path: Path, lease_ms: int) -> Iterator[tuple[ServedBroker, ServedBroker]]:
    """The first broker coordinates all groups, because it started alone. Both lead partitions."""
    url = stores.store_url(request.param, tmp_path, request)
    config = tmp_path / "config.toml"
    config.write_text(f"lease_ms = {lease_ms}\n")
    flags = ("--config", str(config), "--node-id")
    with (
        ServedBroker(tmp_path / "1", *flags, "1", store=url) as one,
        ServedBroker(tmp_path / "2", *flags, "2", store=url) as two,
    ):
        create_topic(one.address, TOPIC, PARTITIONS)
        configure(one.address, GROUP)
        wait_for(lambda: len(leaders(one)) == len(leaders(two)) == 2, "the topic, led by both")
        yield one, two
        assert "Traceback" not in one.errors() + two.errors()


def leaders(broker: ServedBroker) -> set[int]:
    topic = admin(broker.address).list_topics(timeout=10).topics.get(TOPIC)
    return {partition.leader for partition in topic.partitions.values()} if topic is not None else set()


def numbers(first: int = 0) -> list[bytes]:
    return [b"%06d" % number for number in range(first, first + RECORDS)]


def test_every_record_goes_to_one_worker_wherever_it_and_its_partition_are(
    pair: tuple[ServedBroker, ServedBroker],
) -> None:
    one, two = pair
    produce(one.address, TOPIC, numbers(), PARTITIONS)
    produce(two.address, TOPIC, numbers(RECORDS), PARTITIONS)
    with Worker(one.address, GROUP, TOPIC) as here, Worker(two.address, GROUP, TOPIC) as there:
        wait_for(lambda: here.poll(0.1) + there.poll(0.1) == [] and len(here.seen + there.seen) >= 2 * RECORDS, "all")
        assert values(here.seen + there.seen) == numbers() + numbers(RECORDS)
        partitions = Counter(message.partition() for message in here.seen + there.seen)
        assert len(partitions) == PARTITIONS, "those that either broker leads"
    with Worker(two.address, GROUP, TOPIC) as late:
        assert [late.poll(0.3) for _ in range(3)] == [[], [], []], "what was accepted stays so"


def test_what_is_released_through_a_leader_comes_again(pair: tuple[ServedBroker, ServedBroker]) -> None:
    _, two = pair
    produce(two.address, TOPIC, numbers(), PARTITIONS)
    with explicit(two.address, GROUP, TOPIC) as worker:

        def came_again_from_everywhere() -> bool:
            messages = worker.poll(0.2)
            worker.answer(messages, RELEASE)
            worker.commit()
            again = {message.partition() for message in worker.seen if message.delivery_count() == 2}
            return again == set(range(PARTITIONS))

        wait_for(came_again_from_everywhere, "a second delivery of what either broker leads")


def test_a_worker_that_leaves_gives_back_what_it_had_through_either_broker(
    pair: tuple[ServedBroker, ServedBroker],
) -> None:
    one, two = pair
    produce(one.address, TOPIC, numbers(), PARTITIONS)
    with explicit(two.address, GROUP, TOPIC) as hoarder:
        held = hoarder.take(1)
        assert held
    with Worker(one.address, GROUP, TOPIC) as worker:
        wait_for(lambda: worker.poll(0.1) == [] and len(worker.seen) >= RECORDS, "all")
        assert values(worker.seen) == numbers()
        assert {message.delivery_count() for message in worker.seen} == {1}, "what is given back was not delivered"


@pytest.mark.parametrize("lease_ms", [SHORT_LEASE_MS])
def test_when_the_coordinator_dies_the_other_goes_on_and_nothing_is_lost(
    pair: tuple[ServedBroker, ServedBroker],
) -> None:
    one, two = pair
    produce(one.address, TOPIC, numbers(), PARTITIONS)
    with Worker(two.address, GROUP, TOPIC) as worker:
        worker.take(1)
        worker.poll(0.2)
        one.kill()
        produce(two.address, TOPIC, numbers(RECORDS), PARTITIONS)

        def all_came() -> bool:
            worker.poll(0.2)
            return len({message.value() for message in worker.seen}) == 2 * RECORDS

        wait_for(all_came, "all records")
    owners = {json.loads(stores.stored_key(two.store, f"coordinators/{shard}"))[0] for shard in range(64)}
    assert owners == {2}


def test_the_command_line_works_on_a_queue_through_any_broker(pair: tuple[ServedBroker, ServedBroker]) -> None:
    _, two = pair
    produce(two.address, TOPIC, numbers(), PARTITIONS)
    cli = Cli(two.address)
    cli("queue", "consume", TOPIC, "--group", GROUP, "--count", "20", "--jobs", "4", "--", "true")
    (queue,) = cli.json("queue", "list")
    assert queue["group"] == GROUP and queue["done"] == 20


@pytest.fixture
def other_controller(tmp_path: Path) -> Iterator[ServedBroker]:
    """The second of two brokers, which coordinates no group: as after a restart of the one with the lowest number, whom
    Kafka's admin clients take for the controller.
    """
    url = f"sqlite:{tmp_path / 'store.db'}"
    with (
        ServedBroker(tmp_path / "2", "--node-id", "2", store=url) as first,
        ServedBroker(tmp_path / "1", "--node-id", "1", store=url) as second,
    ):
        create_topic(first.address, TOPIC, PARTITIONS)
        wait_for(lambda: len(leaders(first)) == len(leaders(second)) == 2, "the topic, led by both")
        yield second


async def test_a_new_queue_works_though_another_broker_looks_after_it_than_the_controller(
    other_controller: ServedBroker,
) -> None:
    async with millstream.connect(other_controller.address) as ms:
        await ms.send(TOPIC, b"job")
        async with ms.queue(TOPIC, group=GROUP, settings={"share.delivery.count.limit": "5"}) as jobs:
            job = await jobs.receive(20)
            assert job is not None
            await job.accept()
        with pytest.raises(millstream.RequestError, match=r"no\.such is not a group setting"):
            await ms.queue(TOPIC, group=f"{GROUP}-bad", settings={"no.such": "1"}).receive(1)


def test_settings_of_a_group_are_set_and_told_by_any_broker(other_controller: ServedBroker) -> None:
    client = admin(other_controller.address)
    name = "share.delivery.count.limit"
    resource = ConfigResource(ResourceType.GROUP, GROUP)

    def told() -> str:
        return str(client.describe_configs([resource])[resource].result(20)[name].value)

    configure(other_controller.address, GROUP, **{name: "7"})
    assert told() == "7"
    replacing = ConfigResource(ResourceType.GROUP, GROUP, set_config={name: "6"})
    client.alter_configs([replacing])[replacing].result(20)
    assert told() == "6"
    with pytest.raises(KafkaException, match=r"no\.such is not a group setting"):
        configure(other_controller.address, GROUP, **{"no.such": "7"})


def test_the_command_line_makes_a_queue_through_any_broker(other_controller: ServedBroker) -> None:
    cli = Cli(other_controller.address)
    cli("produce", TOPIC, "a")
    cli("queue", "consume", TOPIC, "--group", GROUP, "--count", "1", "--", "true")
    cli("queue", "set", GROUP, "share.delivery.count.limit=7")
    (queue,) = cli.json("queue", "list")
    assert queue["group"] == GROUP and queue["done"] == 1
