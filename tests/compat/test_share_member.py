"""Our own member of a share group against a real broker: answers one by one, late ones, sessions that are gone."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator

import pytest
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from millstream.client.link import Link, LinkBroken
from millstream.client.share import ACCEPT, REJECT, RELEASE, Delivery, Reply, ShareError, ShareMember
from tests.command_line import Cli
from tests.compat import raw
from tests.serving import ServedBroker


class Workplace:
    def __init__(self, broker: ServedBroker) -> None:
        self.cli = Cli(broker.address)
        self.topic = f"jobs-{uuid.uuid4().hex[:12]}"
        self.group = f"workers-{self.topic}"
        self.links: list[Link] = []
        host, _, port = broker.address.rpartition(":")
        self._address = host, int(port)
        raw.create_topic(broker.address, self.topic)
        reset = ConfigEntry("share.auto.offset.reset", "earliest", incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ResourceType.GROUP, self.group, incremental_configs=[reset])
        admin = AdminClient({"bootstrap.servers": broker.address})
        admin.incremental_alter_configs([resource])[resource].result(10)

    def member(self, name: str = "") -> ShareMember:
        self.links.append(Link(*self._address, "test", 10.0))
        member = ShareMember(self.links[-1], self.group, [self.topic], name or str(uuid.uuid4()))
        member.beat()
        return member


@pytest.fixture
def place(broker: ServedBroker) -> Iterator[Workplace]:
    made = Workplace(broker)
    yield made
    for link in made.links:
        link.close()


def take(member: ShareMember, count: int) -> list[Delivery]:
    taken, late = member.fetch(count, 2000, {})
    assert late == []
    return taken


def test_no_more_is_leased_than_was_asked_for(place: Workplace) -> None:
    place.cli("produce", place.topic, stdin=b"a\nb\nc\nd\ne\n")  # one batch
    member, other = place.member(), place.member()
    assert [each.record.value for each in take(member, 2)] == [b"a", b"b"]
    assert [each.record.value for each in take(other, 9)] == [b"c", b"d", b"e"]
    member.leave()
    assert [(each.record.value, each.attempt) for each in take(other, 9)] == [(b"a", 1), (b"b", 1)]


def test_an_answer_that_is_too_late_does_not_spoil_the_others(place: Workplace) -> None:
    place.cli("produce", place.topic, *"abc")
    member = place.member()
    first, second, third = take(member, 3)
    assert member.answer({first.lease: Reply(ACCEPT)}) == []
    assert member.answer({first.lease: Reply(ACCEPT), second.lease: Reply(RELEASE)}) == [first.lease]
    (again,) = take(member, 3)
    assert (again.record.value, again.attempt) == (b"b", 2)
    taken, late = member.fetch(
        1, 0, {first.lease: Reply(ACCEPT), again.lease: Reply(REJECT), third.lease: Reply(ACCEPT)}
    )
    assert (taken, late) == ([], [first.lease])


def test_a_member_whose_session_is_gone_begins_another(place: Workplace) -> None:
    place.cli("produce", place.topic, "a")
    member = place.member("one")
    (taken,) = take(member, 1)
    assert take(place.member("one"), 0) == []  # takes over under the same name
    assert member.answer({taken.lease: Reply(ACCEPT)}) == [taken.lease]
    (again,) = take(member, 1)
    assert again.attempt == 2 and member.answer({again.lease: Reply(ACCEPT)}) == []


def test_a_member_that_the_group_has_forgotten_joins_again(place: Workplace) -> None:
    member = place.member("one")
    place.member("one").leave()
    member._next_beat = time.monotonic()
    member.beat()
    place.cli("produce", place.topic, "a")
    assert [each.record.value for each in take(member, 1)] == [b"a"]


def test_what_is_refused_and_what_is_broken_are_different_errors(place: Workplace) -> None:
    member = place.member()
    take(member, 0)
    place.cli("topic", "delete", place.topic)
    with pytest.raises(ShareError):
        member.fetch(1, 0, {})
    place.links[-1].close()
    with pytest.raises(LinkBroken):
        member.fetch(1, 0, {})
