"""Groups beyond the table of clients: the consumer protocol (KIP-848), and who may still commit."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from millstream.core.errors import Code
from tests.compat import clients, raw
from tests.compat.client_confluent import Confluent, ConfluentMember
from tests.compat.clients import HEARTBEAT_MS, Sent, by_partition, settle, shared_evenly, wait_for
from tests.compat.raw import Raw
from tests.serving import ServedBroker

Unique = Callable[[str], str]
ASSIGNORS = ("range", "uniform")


def numbered(first: int, count: int, partitions: int) -> list[Sent]:
    return [
        Sent(b"%d" % number, partition=partition)
        for partition in range(partitions)
        for number in range(first, first + count)
    ]


def newer(broker: ServedBroker, group: str, topic: str, assignor: str = "uniform", **more: Any) -> ConfluentMember:
    config = {"group.protocol": "consumer", "group.remote.assignor": assignor, **more}
    return ConfluentMember(broker.address, group, topic, config)


def test_members_of_the_consumer_protocol_share_leave_commit_and_resume(broker: ServedBroker, unique: Unique) -> None:
    """Both assignors side by side: the heartbeat interval is 5 s, and each step of a rebalance may take as long."""
    with ThreadPoolExecutor(len(ASSIGNORS)) as pool:
        list(pool.map(lambda assignor: share_leave_commit_and_resume(assignor, broker, unique), ASSIGNORS))


def share_leave_commit_and_resume(assignor: str, broker: ServedBroker, unique: Unique) -> None:
    client, topic, group = Confluent(broker.address), unique("newer"), unique(f"newer-{assignor}")
    client.create_topic(topic, 4)
    client.produce(topic, numbered(0, 20, 4))
    with newer(broker, group, topic, assignor) as first:
        settle([first], shared_evenly(4))
        first.read(80)
        first.commit()
        with newer(broker, group, topic, assignor) as second:
            settle([first, second], shared_evenly(4))
            client.produce(topic, numbered(20, 20, 4))
            wait_for(
                lambda: (first.poll(0.05), second.poll(0.05)) and len(first.seen) + len(second.seen) >= 160,
                "what was produced for two",
            )
            first.commit()
            second.commit()
            assert {record.partition for record in second.seen} == second.assignment
        settle([first], shared_evenly(4))
        client.produce(topic, numbered(40, 5, 4))
        first.read(180 - len(second.seen))
        first.commit()
    found = by_partition(first.seen + second.seen)
    for partition in range(4):
        assert [record.offset for record in sorted(found[partition])] == list(range(45))
    client.produce(topic, numbered(45, 5, 4))
    with newer(broker, group, topic, assignor) as resumed:
        resumed.read(20)
        assert sorted(record.offset for record in resumed.seen) == sorted(list(range(45, 50)) * 4)


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_a_member_of_the_consumer_protocol_goes_on_after_a_restart(how: str, own_broker: ServedBroker) -> None:
    client = Confluent(own_broker.address)
    client.create_topic("orders", 2)
    client.produce("orders", numbered(0, 50, 2))
    with newer(own_broker, "readers", "orders") as member:
        member.read(100)
        member.commit()
        getattr(own_broker, how)()
        own_broker.start()
        client.produce("orders", numbered(50, 50, 2))
        wait_for(lambda: (member.poll(0.1), len({(one.partition, one.offset) for one in member.seen}) == 200)[1], "200")
    with newer(own_broker, "readers", "orders") as another:
        wait_for(lambda: (another.poll(0.1), another.assignment == {0, 1})[1], "its partitions")


def test_a_group_changes_to_the_consumer_protocol_and_keeps_its_offsets(broker: ServedBroker, unique: Unique) -> None:
    client, topic, group = Confluent(broker.address), unique("moves"), unique("moving")
    client.create_topic(topic, 2)
    client.produce(topic, numbered(0, 10, 2))
    with client.member(group, topic) as classic:
        classic.read(20)
        classic.commit()
    client.produce(topic, numbered(10, 5, 2))
    with newer(broker, group, topic) as member:
        member.read(10)
        assert {record.offset for record in member.seen} == set(range(10, 15))
        member.commit()
    client.produce(topic, numbered(15, 5, 2))
    with client.member(group, topic) as back:
        back.read(10)
        assert {record.offset for record in back.seen} == set(range(15, 20))


def test_an_assignor_that_the_broker_does_not_have_is_refused(broker: ServedBroker, unique: Unique) -> None:
    topic = unique("strange")
    Confluent(broker.address).create_topic(topic, 1)
    with newer(broker, unique("strange-group"), topic, "astrology") as member:
        wait_for(lambda: (member.poll(0.1), "assignor" in " ".join(map(str, member.errors)))[1], "a refusal")
        assert member.assignment == set()


def test_a_static_member_of_the_consumer_protocol_gets_its_partitions_back(
    broker: ServedBroker, unique: Unique
) -> None:
    client, topic, group = Confluent(broker.address), unique("static"), unique("static-newer")
    client.create_topic(topic, 2)
    with newer(broker, group, topic, **{"group.instance.id": "a"}) as stays:
        goes = newer(broker, group, topic, **{"group.instance.id": "b"})
        settle([stays, goes], shared_evenly(2))
        owned, rebalances = goes.assignment, stays.rebalances
        goes.close()
        with newer(broker, group, topic, **{"group.instance.id": "b"}) as returned:
            settle([stays, returned], shared_evenly(2))
            assert returned.assignment == owned
            assert stays.rebalances == rebalances


# -- who may still commit ----------------------------------------------------------------------------------------------


def test_a_member_that_was_silent_too_long_may_not_commit(broker: ServedBroker, unique: Unique) -> None:
    """A zombie: its process slept through its session, the other took over, then it wakes up and commits."""
    client, topic, group = Confluent(broker.address), unique("zombie"), unique("zombies")
    client.create_topic(topic, 1)
    client.produce(topic, numbered(0, 10, 1))
    with Raw(broker.address) as zombie, client.member(group, topic, assignor="range") as member:
        settle([member], shared_evenly(1))
        member.read(10)
        member.commit()
        for member_id, generation, code in (
            ("somebody", 1, Code.UNKNOWN_MEMBER_ID),
            (member.consumer.memberid(), 99, Code.ILLEGAL_GENERATION),
            (member.consumer.memberid(), 0, Code.ILLEGAL_GENERATION),
            ("", -1, Code.UNKNOWN_MEMBER_ID),
        ):
            assert commit(zombie, group, topic, member_id, generation) == code, (member_id, generation)
        committed = member.consumer.committed([TopicPartition(topic, 0)], timeout=10)
        assert committed[0].offset == 10


def commit(
    wire: Raw, group: str, topic: str, member: str, epoch: int, instance: str | None = None, offset: int = 3
) -> int:
    partition = {
        "partition_index": 0,
        "committed_offset": offset,
        "committed_leader_epoch": -1,
        "committed_metadata": "",
    }
    fields = {
        "group_id": group,
        "generation_id_or_member_epoch": epoch,
        "member_id": member,
        "group_instance_id": instance,
        "topics": [{"name": topic, "partitions": [partition]}],
    }
    return int(wire.ask(raw.request(8, 8, fields)).topics[0].partitions[0].error_code)


def test_the_commit_of_a_member_that_lost_its_place_is_refused_by_the_client_too(
    broker: ServedBroker, unique: Unique
) -> None:
    client, topic, group = Confluent(broker.address), unique("late"), unique("late-group")
    client.create_topic(topic, 1)
    client.produce(topic, numbered(0, 10, 1))
    late = ConfluentMember(
        broker.address,
        group,
        topic,
        {"session.timeout.ms": 6_000, "heartbeat.interval.ms": HEARTBEAT_MS, "max.poll.interval.ms": 6_000},
    )
    late.read(10)
    # It stops polling: librdkafka leaves the group for it, and what it read belongs to the next member.
    with client.member(group, topic) as next_one:
        wait_for(lambda: next_one.poll(0.1) and next_one.assignment == {0}, "the partition")
        next_one.read(10)
        next_one.commit()
        with pytest.raises(KafkaException) as caught:
            late.consumer.commit(offsets=[TopicPartition(topic, 0, 2)], asynchronous=False)
        assert caught.value.args[0].code() in (
            KafkaError.UNKNOWN_MEMBER_ID,
            KafkaError.ILLEGAL_GENERATION,
            KafkaError.REBALANCE_IN_PROGRESS,
            KafkaError._MAX_POLL_EXCEEDED,
        )
        checked = Consumer({"bootstrap.servers": broker.address, "group.id": group})
        assert checked.committed([TopicPartition(topic, 0)], timeout=10)[0].offset == 10
        checked.close()
    late.close()


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
@pytest.mark.parametrize("more", [{}, {"group.instance.id": "one"}])
def test_whoever_assigns_partitions_to_itself_may_commit(
    protocol: str, more: dict[str, str], broker: ServedBroker, unique: Unique
) -> None:
    """It joins no group. Its commit names an instance or a member all the same, and -1 for the generation."""
    topic = unique("assigned")
    raw.create_topic(broker.address, topic)
    consumer = Consumer(
        {
            "bootstrap.servers": broker.address,
            "group.id": unique("assigned"),
            "group.protocol": protocol,
            "enable.auto.commit": False,
            **more,
        }
    )
    try:
        place = TopicPartition(topic, 0, 7)
        consumer.assign([place])
        consumer.commit(offsets=[place], asynchronous=False)
        assert consumer.committed([place], timeout=10)[0].offset == 7
    finally:
        consumer.close()


def test_a_static_instance_that_was_replaced_is_fenced(broker: ServedBroker, unique: Unique) -> None:
    client, topic, group = Confluent(broker.address), unique("fenced"), unique("fenced-group")
    client.create_topic(topic, 1)
    first = client.member(group, topic, instance="a")
    assert isinstance(first, ConfluentMember)
    settle([first], shared_evenly(1))
    old_id = first.consumer.memberid()
    with client.member(group, topic, instance="a") as second:
        settle([second], shared_evenly(1))
        with Raw(broker.address) as wire:
            assert commit(wire, group, topic, old_id, 1, instance="a") == Code.FENCED_INSTANCE_ID
        wait_for(lambda: (first.poll(0.1), "fenced" in " ".join(map(str, first.errors)))[1], "to be fenced")
    first.close()


def test_the_commit_of_a_stale_epoch_is_refused(broker: ServedBroker, unique: Unique) -> None:
    topic, group = unique("stale"), unique("stale-group")
    raw.create_topic(broker.address, topic, 2)
    with Raw(broker.address) as wire:
        one, two = str(uuid.uuid4()), str(uuid.uuid4())
        assert wire.ask(raw.request(10, 3, {"key": group, "key_type": 0})).error_code == 0  # as every client does
        joined = heartbeat(wire, group, one, 0, topic)
        assert joined.error_code == 0 and joined.member_epoch > 0
        assert commit_newer(wire, group, topic, one, joined.member_epoch) == Code.NONE
        old = joined.member_epoch
        heartbeat(wire, group, two, 0, topic)

        # The first is told to give up one of its two partitions, confirms, and reaches the next epoch.
        def reached() -> bool:
            told = heartbeat(wire, group, one, epoch[0])
            epoch[0] = told.member_epoch
            if told.assignment is not None:
                owned[:] = told.assignment.topic_partitions
            confirmed = heartbeat(wire, group, one, epoch[0], owned=owned)
            epoch[0] = confirmed.member_epoch
            return bool(epoch[0] > old)

        epoch, owned = [old], list(joined.assignment.topic_partitions)
        wait_for(reached, "the next epoch")
        assert commit_newer(wire, group, topic, one, old) == Code.STALE_MEMBER_EPOCH
        assert commit_newer(wire, group, topic, one, epoch[0]) == Code.NONE
        assert commit_newer(wire, group, topic, "somebody", epoch[0]) == Code.UNKNOWN_MEMBER_ID
        assert heartbeat(wire, group, one, old + 50).error_code == Code.FENCED_MEMBER_EPOCH


def heartbeat(
    wire: Raw, group: str, member: str, epoch: int, topic: str | None = None, owned: list[Any] | None = None
) -> Any:
    is_join = epoch == 0
    partitions = [{"topic_id": one.topic_id, "partitions": one.partitions} for one in owned or ()]
    fields = {
        "group_id": group,
        "member_id": member,
        "member_epoch": epoch,
        "instance_id": None,
        "rack_id": None,
        "rebalance_timeout": 60_000 if is_join else -1,
        "subscribed_topic_names": [topic] if topic else None,
        "subscribed_topic_regex": None,
        "server_assignor": None,
        "topic_partitions": [] if is_join else partitions if owned is not None else None,
    }
    return wire.ask(raw.request(68, 1, fields))


def commit_newer(wire: Raw, group: str, topic: str, member: str, epoch: int) -> int:
    partition = {"partition_index": 0, "committed_offset": 0, "committed_leader_epoch": -1, "committed_metadata": ""}
    fields = {
        "group_id": group,
        "generation_id_or_member_epoch": epoch,
        "member_id": member,
        "group_instance_id": None,
        "topics": [{"name": topic, "partitions": [partition]}],
    }
    return int(wire.ask(raw.request(8, 9, fields)).topics[0].partitions[0].error_code)


def test_clients_of_different_kinds_share_one_group(broker: ServedBroker, unique: Unique) -> None:
    """They speak the same protocol of assignment, `range`, each with code of its own."""
    everyone = clients.load(broker.address)
    topic, group = unique("mixed"), unique("mixed-group")
    everyone["confluent-kafka"].create_topic(topic, 4)
    # confluent-kafka last: it takes part in a rebalance only while it is polled.
    names = ("kcat", "kafka-python", "aiokafka", "confluent-kafka")
    members = [everyone[name].member(group, topic, assignor="range") for name in names]
    try:
        settle(members, shared_evenly(4))
        everyone["aiokafka"].produce(topic, numbered(0, 10, 4))
        wait_for(lambda: [member.poll(0.05) for member in members] and sum(len(m.seen) for m in members) >= 40, "40")
        found = by_partition(record for member in members for record in member.seen)
        assert all([record.offset for record in found[partition]] == list(range(10)) for partition in range(4))
        assert all(len(member.seen) == 10 for member in members)
    finally:
        for member in reversed(members):
            member.close()
