"""Share sessions, acknowledgements and offsets frame by frame: what clients may send and what they should not."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from millstream.core.errors import Code
from tests.compat import raw
from tests.compat.raw import Raw
from tests.compat.share_frames import ACCEPT, REJECT, RELEASE, RENEW, Bare, codes, leases, records, topic_id
from tests.compat.share_workers import configure
from tests.serving import ServedBroker

Unique = Callable[[str], str]


class Place:
    """A topic with batches of ten records, and a group that reads it from its start."""

    def __init__(
        self, broker: ServedBroker, unique: Unique, batches: int = 1, partitions: int = 1, **settings: str
    ) -> None:
        self.address = broker.address
        self.topic, self.group = unique("jobs"), unique("workers")
        raw.create_topic(self.address, self.topic, partitions, **settings)
        configure(self.address, self.group)
        self.id = topic_id(self.address, self.topic)
        for partition in range(partitions):
            for number in range(batches):
                self.produce(*(b"%d" % (10 * number + each) for each in range(10)), partition=partition)

    def produce(self, *values: bytes, partition: int = 0) -> None:
        with Raw(self.address) as connection:
            now_ms = int(time.time() * 1000)
            data = raw.produce(self.topic, raw.batch(*values, timestamp_ms=now_ms), partition=partition)
            assert connection.ask(data).responses[0].partition_responses[0].error_code == 0

    def member(self, **more: Any) -> Bare:
        return Bare(self.address, self.group, self.topic, **more)

    def at(self, index: int = 0, *acks: tuple[int, int, list[int]]) -> dict[Any, Any]:
        return {(self.id, index): acks}


@pytest.fixture
def place(broker: ServedBroker, unique: Unique) -> Place:
    return Place(broker, unique)


def test_a_session_is_opened_used_and_closed(place: Place) -> None:
    with place.member() as member:
        opened = member.fetch(0, place.at())
        assert leases(opened) == {0: [(0, 9, 1)]} and records(opened) == [b"%d" % number for number in range(10)]
        assert opened.acquisition_lock_timeout.total_seconds() == 30
        assert member.fetch(1).responses == ()
        place.produce(b"more")
        assert leases(member.fetch(2)) == {0: [(10, 10, 1)]}
        assert codes(member.fetch(3, place.at(0, (0, 9, [ACCEPT])))) == {0: 0}
        assert member.acknowledge(-1, {}).error_code == 0
        assert member.fetch(4).error_code == Code.SHARE_SESSION_NOT_FOUND
        assert leases(member.fetch(0, place.at())) == {0: [(10, 10, 1)]}, "closing gave back what was left"


def test_epochs_out_of_line_are_refused(place: Place) -> None:
    with place.member() as member:
        assert member.fetch(1).error_code == Code.SHARE_SESSION_NOT_FOUND
        assert member.fetch(-1).error_code == Code.SHARE_SESSION_NOT_FOUND
        assert member.acknowledge(1, {}).error_code == Code.SHARE_SESSION_NOT_FOUND
        assert member.acknowledge(0, {}).error_code == Code.INVALID_SHARE_SESSION_EPOCH
        member.fetch(0, place.at())
        for epoch in (2, 7, -2, 0x7FFF_FFFF):
            assert member.fetch(epoch).error_code == Code.INVALID_SHARE_SESSION_EPOCH
            assert member.acknowledge(epoch, {}).error_code == Code.INVALID_SHARE_SESSION_EPOCH
        assert member.fetch(1).error_code == 0
        assert member.fetch(1).error_code == Code.INVALID_SHARE_SESSION_EPOCH
        assert member.acknowledge(2, {}).error_code == 0
        assert member.fetch(3).error_code == 0


def test_a_new_session_has_nothing_to_acknowledge_and_releases_what_the_old_one_had(place: Place) -> None:
    with place.member() as member:
        assert leases(member.fetch(0, place.at())) == {0: [(0, 9, 1)]}
        refused = member.fetch(0, place.at(0, (0, 9, [ACCEPT])))
        assert refused.error_code == Code.INVALID_REQUEST
        assert leases(member.fetch(0, place.at())) == {0: [(0, 9, 2)]}


def test_a_group_or_member_that_is_missing_is_refused(place: Place, unique: Unique) -> None:
    with place.member() as member:
        member.group = unique("nobody")
        assert member.fetch(0, place.at()).error_code == Code.GROUP_ID_NOT_FOUND
        member.group = ""
        assert member.fetch(0, place.at()).error_code == Code.INVALID_REQUEST
        member.group, member.member = place.group, ""
        assert member.fetch(0, place.at()).error_code == Code.INVALID_REQUEST


def test_partitions_are_added_and_forgotten(broker: ServedBroker, unique: Unique) -> None:
    place = Place(broker, unique, partitions=3)
    with place.member() as member:
        assert leases(member.fetch(0, place.at(0))) == {0: [(0, 9, 1)]}
        assert leases(member.fetch(1, place.at(1))) == {1: [(0, 9, 1)]}
        # Its last records are acknowledged with the same request that forgets it.
        last = member.fetch(2, place.at(0, (0, 9, [RELEASE])), forgotten=[(place.id, 0)])
        assert codes(last) == {0: 0} and leases(last) == {}
        assert leases(member.fetch(3)) == {}
        assert leases(member.fetch(4, place.at(0))) == {0: [(0, 9, 2)]}


def test_unknown_topics_and_partitions_are_told_one_by_one(place: Place) -> None:
    nowhere = uuid.uuid4()
    with place.member() as member:
        answer = member.fetch(0, {(nowhere, 0): (), (place.id, 5): (), (place.id, 0): ()})
        told = {
            (topic.topic_id, one.partition_index): one.error_code
            for topic in answer.responses
            for one in topic.partitions
        }
        assert told == {
            (nowhere, 0): Code.UNKNOWN_TOPIC_ID,
            (place.id, 5): Code.UNKNOWN_TOPIC_OR_PARTITION,
            (place.id, 0): Code.NONE,
        }
        answer = member.acknowledge(1, {(nowhere, 0): [(0, 1, [ACCEPT])], (place.id, 0): [(0, 9, [ACCEPT])]})
        assert [topic.partitions[0].error_code for topic in answer.responses] == [Code.UNKNOWN_TOPIC_ID, 0]


@pytest.mark.parametrize(
    ("acks", "code"),
    [
        ([(5, 4, [ACCEPT])], Code.INVALID_REQUEST),
        ([(-1, 4, [ACCEPT])], Code.INVALID_REQUEST),
        ([(0, 4, [])], Code.INVALID_REQUEST),
        ([(0, 4, [ACCEPT, ACCEPT])], Code.INVALID_REQUEST),
        ([(0, 4, [5])], Code.INVALID_REQUEST),
        ([(0, 4, [-1])], Code.INVALID_REQUEST),
        ([(0, 4, [RENEW])], Code.INVALID_REQUEST),
        ([(0, 4, [ACCEPT]), (3, 6, [ACCEPT])], Code.INVALID_REQUEST),
        ([(5, 6, [ACCEPT]), (0, 1, [ACCEPT])], Code.INVALID_REQUEST),
        ([(0, 10, [ACCEPT])], Code.INVALID_RECORD_STATE),
        ([(0, 0x7FFF_FFFF_FFFF_FFFF, [ACCEPT])], Code.INVALID_RECORD_STATE),
        ([(0, 4, [ACCEPT]), (40, 41, [ACCEPT])], Code.INVALID_RECORD_STATE),
    ],
)
def test_acknowledgements_that_make_no_sense_change_nothing(place: Place, acks: Any, code: Code) -> None:
    with place.member() as member:
        member.fetch(0, place.at())
        assert codes(member.acknowledge(1, place.at(0, *acks))) == {0: code}
        assert codes(member.fetch(2, place.at(0, *acks))) == {0: code}
        assert codes(member.acknowledge(3, place.at(0, (0, 9, [ACCEPT])))) == {0: 0}
        assert codes(member.acknowledge(4, place.at(0, (0, 9, [ACCEPT])))) == {0: Code.INVALID_RECORD_STATE}


def test_each_record_may_have_a_type_of_its_own(place: Place) -> None:
    with place.member() as member:
        member.fetch(0, place.at())
        types = [ACCEPT, RELEASE, RELEASE, 0, ACCEPT, REJECT, RELEASE, ACCEPT, ACCEPT, RELEASE]
        answer = member.fetch(1, place.at(0, (0, 9, types)), record_limit=True)
        assert codes(answer) == {0: 0}
        assert leases(answer) == {0: [(1, 2, 2), (6, 6, 2), (9, 9, 2)]}


def test_another_members_records_are_not_mine_to_acknowledge(place: Place) -> None:
    with place.member() as member, place.member() as other:
        member.fetch(0, place.at())
        assert leases(other.fetch(0, place.at())) == {}
        assert codes(other.acknowledge(1, place.at(0, (0, 9, [ACCEPT])))) == {0: Code.INVALID_RECORD_STATE}
        assert codes(member.acknowledge(1, place.at(0, (0, 9, [ACCEPT])))) == {0: 0}


def test_a_limit_on_records_is_kept_when_it_must_be(broker: ServedBroker, unique: Unique) -> None:
    place = Place(broker, unique, batches=3)
    with place.member() as member:
        assert leases(member.fetch(0, place.at(), records_max=4, record_limit=True)) == {0: [(0, 3, 1)]}
        assert leases(member.fetch(1, records_max=3, version=1)) == {0: [(4, 6, 1)]}, "the batch alone has more"
        assert leases(member.fetch(2, records_max=11, version=1)) == {0: [(7, 19, 1)]}, "to the end of the batch"
        assert leases(member.fetch(3, records_max=0)) == {}
        assert leases(member.fetch(4, records_max=11, version=1)) == {0: [(20, 29, 1)]}


def test_leases_are_renewed_and_nothing_is_fetched_meanwhile(place: Place) -> None:
    with place.member() as member:
        member.fetch(0, place.at())
        place.produce(b"more")
        renewed = member.fetch(1, place.at(0, (0, 4, [RENEW]), (5, 9, [ACCEPT])), renew=True)
        assert codes(renewed) == {0: 0} and leases(renewed) == {}
        answer = member.acknowledge(2, place.at(0, (0, 4, [RENEW])), renew=True)
        assert codes(answer) == {0: 0} and answer.acquisition_lock_timeout.total_seconds() == 30
        assert codes(member.acknowledge(3, place.at(0, (5, 9, [RENEW])), renew=True)) == {0: Code.INVALID_RECORD_STATE}


def test_every_answer_tells_the_lease_that_the_topic_sets(broker: ServedBroker, unique: Unique) -> None:
    """A worker that is told a longer one while it has records renews them too late, and they are worked on twice."""
    place = Place(broker, unique, group_share_record_lock_duration_ms="7000")
    with place.member() as member:
        opened = member.fetch(0, place.at())
        assert leases(opened) == {0: [(0, 9, 1)]} and opened.acquisition_lock_timeout.total_seconds() == 7
        nothing_new = member.fetch(1)
        assert leases(nothing_new) == {} and nothing_new.acquisition_lock_timeout.total_seconds() == 7
        renewed = member.acknowledge(2, place.at(0, (0, 9, [RENEW])), renew=True)
        assert codes(renewed) == {0: 0} and renewed.acquisition_lock_timeout.total_seconds() == 7
        configure(place.address, place.group, share__record__lock__duration__ms="9000")
        assert member.fetch(3).acquisition_lock_timeout.total_seconds() == 9, "the group's own goes before the topic's"


def test_a_session_moves_with_its_client_to_another_connection(place: Place) -> None:
    with place.member() as member:
        member.fetch(0, place.at())
        with Bare(place.address, place.group, member=member.member, join=False) as again:
            assert again.fetch(1).error_code == 0
            member.close()
            with place.member() as other:
                assert leases(other.fetch(0, place.at(), wait_ms=300)) == {}, "the session lives on"
            assert codes(again.acknowledge(2, place.at(0, (0, 9, [ACCEPT])))) == {0: 0}


def test_who_leaves_the_group_may_still_send_its_last_acknowledgements(place: Place) -> None:
    with place.member() as member, place.member() as other:
        member.fetch(0, place.at())
        assert member.beat(-1).member_epoch == -1
        assert codes(member.acknowledge(-1, place.at(0, (0, 4, [ACCEPT])))) == {0: 0}
        assert leases(other.fetch(0, place.at())) == {0: [(5, 9, 1)]}, "the rest, as if it had not been delivered"


def test_a_connection_opens_so_many_sessions_and_no_more(place: Place) -> None:
    with place.member() as member:
        for number in range(16):
            member.member = f"member-{number}"
            assert member.fetch(0, place.at()).error_code == 0
        member.member = "one-too-many"
        assert member.fetch(0, place.at()).error_code == Code.SHARE_SESSION_LIMIT_REACHED
        member.member = "member-3"
        assert member.acknowledge(-1, {}).error_code == 0
        member.member = "one-too-many"
        assert member.fetch(0, place.at()).error_code == 0


def test_a_topic_that_is_deleted_meanwhile_is_told(place: Place) -> None:
    with place.member() as member:
        member.fetch(0, place.at())
        request = {"topics": [{"topic_id": None, "name": place.topic}], "timeout": 5000}
        assert member.raw.ask(raw.request(20, 6, request)).responses[0].error_code == 0
        [topic] = member.fetch(1).responses
        assert topic.partitions[0].error_code == Code.UNKNOWN_TOPIC_ID
        assert codes(member.acknowledge(2, place.at(0, (0, 9, [ACCEPT])))) == {0: Code.UNKNOWN_TOPIC_ID}


@pytest.fixture
def own_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedBroker]:
    with ServedBroker(tmp_path_factory.mktemp("share")) as served:
        yield served


def test_a_member_comes_back_before_its_next_heartbeat_after_a_restart(
    own_broker: ServedBroker, unique: Unique
) -> None:
    place = Place(own_broker, unique)
    with place.member() as member:
        member.fetch(0, place.at())
        own_broker.kill()
        own_broker.start()
        with Bare(place.address, place.group, member=member.member, join=False) as again:
            assert again.fetch(1).error_code == Code.SHARE_SESSION_NOT_FOUND
            [(first, last, _)] = leases(again.fetch(0, place.at()))[0]
            assert (first, last) == (0, 9), "a restart ends all leases"
            assert again.beat(member.epoch).error_code == Code.UNKNOWN_MEMBER_ID
            assert again.beat(0, [place.topic]).member_epoch > member.epoch
            assert codes(again.acknowledge(1, place.at(0, (0, 9, [ACCEPT])))) == {0: 0}
