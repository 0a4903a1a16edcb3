"""Moves a group between the classic and the consumer protocol while it has members (KIP-848).

    classic group --a member of the consumer protocol joins--> consumer group (`mixed.py`)
    consumer group --its last member of the consumer protocol leaves--> classic group

So clients can be upgraded or downgraded by a rolling restart. `group.consumer.migration.policy` allows the direction:

    policy          upgrade   downgrade
    bidirectional   yes       yes         the default
    upgrade         yes       no
    downgrade       no        yes
    disabled        no        no

The policy applies to conversions. Classic members may join a consumer group under any policy; if it forbids the
downgrade, they stay in the consumer group.

Rules
-----
1. Epochs continue: a generation becomes the group epoch and the member epochs, and the epoch becomes the generation.
   A member with an earlier epoch that has not rejoined since keeps it, through several conversions. So a commit in
   flight during the conversion is fenced by its member's own epoch. No epoch is used twice: as always, the next one is
   durable before a member sees it.
2. Ownership continues. A classic member owns its last assignment from the leader, and the partitions that it listed as
   owned in its last JoinGroup: a cooperative member may still be revoking them.
3. A JoinGroup that waits in the old group continues in the new one (`Converted`): some clients fail on an error there.
   A waiting SyncGroup gets REBALANCE_IN_PROGRESS.
4. A classic group can be upgraded if the broker can assign for its members: the protocol type is `consumer`, metadata
   and assignments can be decoded, assignments do not overlap and carry no custom assignor's user data (Kafka Streams
   needs its own), and no member is planned (`plan.py`). Otherwise the group stays classic, and the new member gets
   GROUP_ID_NOT_FOUND, also if the members name over `ITEMS_MAX` topics and partitions together: the conversion is one
   step. So does a member with the assignor `exclusive`: it would leave the others no partitions.
5. A downgraded group rebalances at once: its leader assigns from then on. Until a member rejoins, it may commit with
   its epoch, and its heartbeat returns REBALANCE_IN_PROGRESS.

A conversion is not stored by itself. The record of the group's next epoch has the new type. A crash before it leaves an
empty group of the old type, which converts again when its members rejoin.
"""

from __future__ import annotations

import logging
from enum import StrEnum

from millstream.broker.groups.kinds import Kinds
from millstream.broker.groups.record import GroupRecord
from millstream.broker.groups.settings import GroupSettings
from millstream.broker.groups.stream.assignors import EXCLUSIVE, Partition
from millstream.broker.groups.stream.classic import CONSUMER, ClassicGroup
from millstream.broker.groups.stream.classic_member import Converted, Join, Member
from millstream.broker.groups.stream.consumer_member import Beat
from millstream.broker.groups.stream.mixed import MixedGroup, Seat
from millstream.broker.groups.stream.plan import decode_assignment
from millstream.broker.groups.stream.subscription import decode_subscription
from millstream.core.errors import Code, RequestError

_STANDARD_ASSIGNORS = frozenset({"range", "roundrobin", "sticky", "cooperative-sticky"})
"""Their members ignore user data in an assignment. librdkafka copies the subscription's user data there."""

ITEMS_MAX = 100_000
"""Topics and partitions that the members of a group name: some 50 ms of work."""

_log = logging.getLogger(__name__)


class Policy(StrEnum):
    BIDIRECTIONAL = "bidirectional"
    UPGRADE = "upgrade"
    DOWNGRADE = "downgrade"
    DISABLED = "disabled"

    @property
    def upgrades(self) -> bool:
        return self in (Policy.BIDIRECTIONAL, Policy.UPGRADE)

    @property
    def downgrades(self) -> bool:
        return self in (Policy.BIDIRECTIONAL, Policy.DOWNGRADE)


class Migration:
    def __init__(self, kinds: Kinds, settings: GroupSettings) -> None:
        self._kinds = kinds
        self._members_max = settings.members_max
        self.policy = Policy(settings.consumer_migration_policy)

    def upgrade(self, classic: ClassicGroup, beat: Beat) -> MixedGroup:
        """Returns the consumer group for a member's first heartbeat, and closes the classic one."""
        mixed = self._kinds.consumer(classic.id, _record(MixedGroup.type, classic.generation))
        mixed.check(beat)
        if not self.policy.upgrades:
            raise _refused(classic, "group_consumer_migration_policy does not allow the upgrade")
        if classic.protocol_type != CONSUMER:
            raise _refused(classic, f"its members' protocol type is {classic.protocol_type}, not {CONSUMER}")
        if beat.assignor == EXCLUSIVE:
            raise _refused(classic, "the new member needs the assignor exclusive, which classic members do not have")
        if len(classic.members) >= self._members_max:
            raise RequestError(Code.GROUP_MAX_SIZE_REACHED)
        mixed.take_over(_seats(classic, mixed))
        for member in classic.members.values():
            member.refuse(Converted(member.id))
        classic.close(RequestError(Code.REBALANCE_IN_PROGRESS))
        _log.info("group %s: converted from classic to consumer, members=%d", mixed.id, len(mixed.members))
        return mixed

    def downgrade(self, mixed: MixedGroup) -> ClassicGroup | None:
        """Returns a classic group with the same members and closes this one; None if the policy forbids it."""
        if not self.policy.downgrades:
            return None
        classic = self._kinds.classic(mixed.id, _record(ClassicGroup.type, mixed.epoch))
        members = mixed.members.values()
        classic.take_over([(each.classic, mixed.assignment(each), each.epoch) for each in members if each.classic])
        mixed.is_converted = True
        mixed.close(RequestError(Code.REBALANCE_IN_PROGRESS))
        _log.info("group %s: converted from consumer to classic, members=%d", classic.id, len(classic.members))
        return classic


def _seats(classic: ClassicGroup, mixed: MixedGroup) -> list[Seat]:
    seats: list[Seat] = []
    taken: set[Partition] = set()
    room = ITEMS_MAX
    for member in classic.members.values():
        subscription = decode_subscription(member.protocols[0][1])
        assignment = decode_assignment(member.assignment)
        if member.planned or subscription is None or assignment is None:
            raise _refused(classic, "the broker cannot assign partitions for all of its members")
        room -= len(subscription.topics) + len(subscription.owned) + len(assignment[0])
        if room < 0:
            raise _refused(classic, f"its members name over {ITEMS_MAX} topics and partitions")
        assigned = mixed.partitions(assignment[0])
        if (assignment[1] and classic.protocol_name not in _STANDARD_ASSIGNORS) or assigned & taken:
            raise _refused(classic, "a custom assignor made its assignments")
        taken |= assigned
        owned, epoch = mixed.partitions(subscription.owned), classic.generation_of(member)
        seats.append(Seat(_join(classic, member), subscription, epoch, assigned, owned))
    unfinished = []
    for seat in seats:
        unfinished.append(seat._replace(revoking=seat.revoking - taken))
        taken |= seat.revoking
    return unfinished


def _join(classic: ClassicGroup, member: Member) -> Join:
    return Join(
        classic.id,
        member.id,
        member.instance_id,
        member.client_id,
        member.client_host,
        member.session_ms,
        member.rebalance_ms,
        CONSUMER,
        member.protocols,
        principal=member.principal,
    )


def _record(kind: str, epoch: int) -> GroupRecord:
    return GroupRecord(kind, epoch, CONSUMER)


def _refused(classic: ClassicGroup, reason: str) -> RequestError:
    detail = f"group {classic.id} cannot be upgraded to a consumer group: {reason}"
    _log.info("%s", detail)
    return RequestError(Code.GROUP_ID_NOT_FOUND, detail)
