"""A group changes its protocol while its members work (KIP-848), with clients of both protocols in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient

from tests.compat import clients, raw
from tests.compat.client_confluent import Confluent, ConfluentMember
from tests.compat.clients import HEARTBEAT_MS, REQUEST_MS, Member, Sent, settle, shared_evenly, wait_for
from tests.compat.raw import Raw
from tests.serving import ServedBroker

Unique = Callable[[str], str]
PARTITIONS = 4
QUIET_MS = 30_000
"""The session of members: none of them is to expire, however slow this machine is."""


def hear_soon(broker: ServedBroker, group: str) -> None:
    """Lets members of the consumer protocol hear of a change within half a second."""
    config = {"name": "consumer.heartbeat.interval.ms", "config_operation": 0, "value": "500"}
    resource = {"resource_type": 32, "resource_name": group, "configs": [config]}
    with Raw(broker.address) as client:
        (result,) = client.ask(raw.request(44, 1, {"resources": [resource], "validate_only": False})).responses
    assert result.error_code == 0


class Rolling:
    """One group on its way: what was produced, what its members saw, and which of them owns a partition now."""

    def __init__(self, broker: ServedBroker, topic: str, group: str) -> None:
        self.broker, self.topic, self.group = broker, topic, group
        self.client = Confluent(broker.address)
        self.client.create_topic(topic, PARTITIONS)
        self.owners: dict[int, Owner] = {}
        self.members: list[Owner] = []
        self.gone: list[Owner] = []
        self._sent = 0
        hear_soon(broker, group)

    def start(self, assignor: str | None) -> Owner:
        """With an assignor: a member of the classic protocol."""
        timeouts = {"session.timeout.ms": QUIET_MS, "heartbeat.interval.ms": HEARTBEAT_MS}
        classic = {"group.protocol": "classic", "partition.assignment.strategy": assignor, **timeouts}
        member = Owner(self, classic if assignor else {"group.protocol": "consumer"})
        self.members.append(member)
        return member

    def stop(self, member: Owner) -> None:
        member.commit()
        member.close()
        self.members.remove(member)
        self.gone.append(member)

    def deliver(self) -> None:
        """All members share the partitions; ten more records in each are seen by them, once."""
        settle(self.members, shared_evenly(PARTITIONS))
        values = range(self._sent, self._sent + 10)
        self.client.produce(self.topic, [Sent(b"%d" % n, partition=p) for p in range(PARTITIONS) for n in values])
        self._sent += 10
        wanted = self._sent * PARTITIONS
        wait_for(lambda: ([each.poll(0.02) for each in self.members], len(self.seen) >= wanted)[1], f"{wanted} records")
        assert set(self.seen.values()) == {1}, "each record once"
        assert self.seen.keys() == {(p, offset) for p in range(PARTITIONS) for offset in range(self._sent)}

    @property
    def seen(self) -> Counter[tuple[int, int]]:
        return Counter((one.partition, one.offset) for each in self.members + self.gone for one in each.seen)

    def kind(self) -> str:
        admin = AdminClient({"bootstrap.servers": self.broker.address})
        listing = admin.list_consumer_groups().result(REQUEST_MS / 1000)
        return next(str(each.type.name) for each in listing.valid if each.group_id == self.group)


class Owner(ConfluentMember):
    """Commits what it has seen before it gives partitions up, and takes none that another member owns."""

    def __init__(self, rolling: Rolling, config: dict[str, Any]) -> None:
        self.rolling = rolling
        super().__init__(rolling.broker.address, rolling.group, rolling.topic, config)

    def _on_assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        for each in partitions:
            assert self.rolling.owners.setdefault(each.partition, self) is self, f"{each.partition} has two owners"

    def _on_revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        ends = {one.partition: one.offset + 1 for one in self.seen}
        done = [
            TopicPartition(each.topic, each.partition, ends[each.partition])
            for each in partitions
            if each.partition in ends
        ]
        if done:
            consumer.commit(offsets=done, asynchronous=False)
        self._give_up(partitions)

    def _on_lost(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self.lost += 1
        self._give_up(partitions)

    def _give_up(self, partitions: list[TopicPartition]) -> None:
        for each in partitions:
            del self.rolling.owners[each.partition]


def test_members_are_restarted_one_by_one_into_the_other_protocol_and_back(
    broker: ServedBroker, unique: Unique
) -> None:
    """Side by side: members of the consumer protocol hear of a change with their next heartbeat."""
    assignors = ("range", "cooperative-sticky")
    with ThreadPoolExecutor(len(assignors)) as pool:
        list(pool.map(lambda each: up_and_down(Rolling(broker, unique("rolling"), unique(each)), each), assignors))


def up_and_down(rolling: Rolling, assignor: str) -> None:
    first, second = rolling.start(assignor), rolling.start(assignor)
    rolling.deliver()
    assert rolling.kind() == "CLASSIC"
    for old in (first, second):
        rolling.stop(old)
        rolling.start(None)
        rolling.deliver()
        assert rolling.kind() == "CONSUMER"
    for old in rolling.members[:]:
        rolling.stop(old)
        rolling.start(assignor)
        rolling.deliver()
    assert rolling.kind() == "CLASSIC"
    assert [each.lost for each in rolling.members + rolling.gone] == [0] * 6
    for each in rolling.members:
        each.seen.clear()  # nothing to commit: the second may be rejoining because of the first
        each.close()


def test_eager_members_of_other_clients_share_a_group_with_the_consumer_protocol(
    broker: ServedBroker, unique: Unique
) -> None:
    kinds = (("aiokafka", "roundrobin"), ("kafka-python", "range"))
    with ThreadPoolExecutor(len(kinds)) as pool:
        for sharing in [pool.submit(share_a_group, name, assignor, broker, unique) for name, assignor in kinds]:
            sharing.result()


def share_a_group(name: str, assignor: str, broker: ServedBroker, unique: Unique) -> None:
    client, topic, group = Confluent(broker.address), unique("mixed"), unique(name)
    client.create_topic(topic, PARTITIONS)
    hear_soon(broker, group)
    with clients.load(broker.address)[name].member(group, topic, assignor=assignor) as classic:
        settle([classic], shared_evenly(PARTITIONS))
        client.produce(topic, [Sent(b"before", partition=each) for each in range(PARTITIONS)])
        classic.read(PARTITIONS)
        classic.commit()
        with ConfluentMember(broker.address, group, topic, {"group.protocol": "consumer"}) as newer:
            members: list[Member] = [classic, newer]
            settle(members, shared_evenly(PARTITIONS))
            client.produce(topic, [Sent(b"shared", partition=each) for each in range(PARTITIONS)])
            wait_for(lambda: [each.poll(0.05) for each in members] and seen(b"shared", *members), "its half each")
            for each in members:
                each.commit()
            assert {one.value for one in newer.seen} == {b"shared"}, "it begins where the group was"
        settle([classic], shared_evenly(PARTITIONS))
        client.produce(topic, [Sent(b"after", partition=each) for each in range(PARTITIONS)])
        wait_for(lambda: (classic.poll(0.05), seen(b"after", classic))[1], "all that comes after")
        assert Counter(one.value for one in classic.seen) == {b"before": 4, b"shared": 2, b"after": 4}


def seen(value: bytes, *members: Member) -> bool:
    """One of each partition."""
    return {one.partition for each in members for one in each.seen if one.value == value} == set(range(PARTITIONS))


def test_a_group_of_both_protocols_goes_on_after_its_broker_was_killed(own_broker: ServedBroker) -> None:
    """The broker that comes back knows the group's epoch and offsets, and no members: each joins again."""
    client = Confluent(own_broker.address)
    client.create_topic("orders", PARTITIONS)
    newer = ConfluentMember(own_broker.address, "readers", "orders", {"group.protocol": "consumer"})
    with client.member("readers", "orders", assignor="cooperative-sticky") as classic, newer:
        members: list[Member] = [classic, newer]
        settle(members, shared_evenly(PARTITIONS))
        read_by(members, client, b"before")
        own_broker.kill()
        own_broker.start()
        wait_for(lambda: [each.poll(0.05) for each in members] and newer.lost, "the news that it is no member")
        settle(members, shared_evenly(PARTITIONS))
        read_by(members, client, b"after")


def read_by(members: list[Member], client: Confluent, value: bytes) -> None:
    client.produce("orders", [Sent(value, partition=each) for each in range(PARTITIONS)])
    wait_for(lambda: [each.poll(0.05) for each in members] and seen(value, *members), f"the records {value!r}")
