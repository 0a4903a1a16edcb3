"""A consumer group that also has members of the classic protocol (KIP-848, "upgrading to the consumer group protocol").

The broker assigns for all members. A classic member's generation is its member epoch. The metadata of its JoinGroup has
its subscription and owned partitions, and its SyncGroup returns its partitions:

    Heartbeat    REBALANCE_IN_PROGRESS while the member must rejoin, see below
    JoinGroup    carries subscription and owned partitions; moves towards the target; returns the epoch, no leader
    SyncGroup    returns its partitions, as the leader of a classic group would have encoded them
    OffsetCommit its generation must be its member epoch

    must rejoin:  the target is newer than its epoch
                  it has partitions to revoke
                  it lacks partitions of its target, and all of them are free

Rules
-----
1. A JoinGroup is the truth about the partitions that its member owns: clients revoke before they send it. An eager
   member owns nothing then, and may get its new target at once. A cooperative member keeps its listed partitions:
   SyncGroup omits those to revoke, the member revokes and rejoins (KIP-429), and only then moves to the new epoch.
2. A member that must rejoin and does not, or joins and does not sync, is fenced after its rebalance timeout. A silent
   member is fenced after its session timeout.
3. All classic members have one protocol in common, so that the group can become a classic group at any time. It does
   not matter here which one: each member gets its own first protocol.
4. A member with the same instance id replaces a static member at once, across protocols: the classic protocol has no
   request for a temporary leave. The old member id is fenced.
5. A group whose assignor is `exclusive` takes no classic members: as a classic group it would share the partitions.
6. When only classic members are left, the group becomes a classic group (`migration.py`), if the policy allows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from millstream.broker.groups.context import GroupContext
from millstream.broker.groups.record import GroupRecord
from millstream.broker.groups.stream.assignors import EXCLUSIVE, Partition
from millstream.broker.groups.stream.classic_member import (
    Converted,
    Join,
    Joined,
    Synced,
    check_protocol,
    new_member_id,
)
from millstream.broker.groups.stream.consumer import ConsumerGroup
from millstream.broker.groups.stream.consumer_member import MEMBER_ID_CHARS_MAX, ConsumerMember
from millstream.broker.groups.stream.plan import encode_assignment
from millstream.broker.groups.stream.subscription import ITEMS_MAX, Subscription, decode_subscription
from millstream.core.errors import Code, RequestError
from millstream.core.promise import Promise


class Seat(NamedTuple):
    """A classic member that a consumer group takes over."""

    request: Join
    subscription: Subscription
    epoch: int
    """Its generation."""
    assigned: set[Partition]
    revoking: set[Partition]
    """Others that it may still read."""


class MixedGroup(ConsumerGroup):
    def __init__(
        self,
        group_id: str,
        context: GroupContext,
        record: GroupRecord | None,
        downgrade: Callable[[MixedGroup], bool],
    ) -> None:
        super().__init__(group_id, context, record)
        self._downgrade = downgrade
        """Converts to a classic group if the policy allows it; returns whether it did."""
        self.is_converted = False

    # Classic requests

    async def join(self, request: Join) -> Joined:
        self._check_open()
        subscription = self._check_join(request)
        if not request.member_id and request.instance_id is None and request.id_required:
            return Joined(new_member_id(request.client_id), error=Code.MEMBER_ID_REQUIRED)
        member = self._enter(request)
        self._update(member, request, subscription)
        self._release(member, (member.assigned | member.revoking) - self.partitions(subscription.owned))
        if self._is_classic_only and self._downgrade(self):
            raise Converted(member.id)
        if self._stale:
            await self._advance_for(member, request.session_ms)
            if self.is_converted:
                raise Converted(member.id)
            if self.members.get(member.id) is not member:
                raise RequestError(Code.UNKNOWN_MEMBER_ID)
        self._reconcile(member)
        member.revocation.push(member.rebalance_ms)
        return Joined(member.id, member.epoch, self.protocol_type, request.protocols[0][0])

    def sync(
        self,
        member_id: str,
        instance_id: str | None,
        generation: int,
        protocol: tuple[str | None, str | None],
        assignments: Mapping[str, bytes],
    ) -> Promise[Synced]:
        """There is no leader: `assignments` are ignored."""
        member, terms = self._find_classic(member_id, instance_id, generation)
        name = terms.protocols[0][0]
        check_protocol(protocol, (self.protocol_type, name))
        member.session.push(terms.session_ms)
        if member.epoch < self.target_epoch and not member.revoking:
            raise self._rejoin(member)
        if not member.revoking:
            member.revocation.stop()
        return Promise.of(Synced(self.protocol_type, name, self.assignment(member)))

    def heartbeat(self, member_id: str, instance_id: str | None, generation: int) -> None:
        member, terms = self._find_classic(member_id, instance_id, generation)
        member.session.push(terms.session_ms)
        if self._stale:  # the write of an epoch failed
            self._advance()
        if self._must_rejoin(member):
            raise self._rejoin(member)

    def fence(self, member_id: str, instance_id: str | None, epoch: int) -> None:
        super().fence(member_id, instance_id, epoch)
        member = self.members.get(member_id)
        if member is not None and member.classic is not None:
            member.session.push(member.classic.session_ms)

    # Conversion

    def take_over(self, seats: Iterable[Seat]) -> None:
        """Starts with the members of a classic group."""
        for request, subscription, epoch, assigned, revoking in seats:
            member = self._new_member(request.member_id, request.instance_id)
            self._update(member, request, subscription)
            member.epoch = member.previous_epoch = epoch
            member.assigned, member.revoking = assigned, revoking
            self.target[member.id] = set(assigned)
            self.owners.update(dict.fromkeys(assigned | revoking, member.id))
        self._stale = True

    def partitions(self, named: Iterable[tuple[str, int]]) -> set[Partition]:
        """The ones that exist."""
        found = ((self._topics.get(name), number) for name, number in named)
        return {(topic.id, number) for topic, number in found if topic and 0 <= number < topic.partition_count}

    def assignment(self, member: ConsumerMember) -> bytes:
        found = ((self._topics.by_id(topic_id), number) for topic_id, number in member.assigned)
        return encode_assignment([(topic.name, number) for topic, number in found if topic is not None])

    # Members

    @property
    def _is_classic_only(self) -> bool:
        return bool(self.members) and all(member.classic is not None for member in self.members.values())

    def _check_join(self, request: Join) -> Subscription:
        exclusive = self._assignor_name() == EXCLUSIVE
        if exclusive or request.planned or request.protocol_type != self.protocol_type:
            raise RequestError(Code.INCONSISTENT_GROUP_PROTOCOL, "the group's members use the consumer protocol")
        common = {name for name, _ in request.protocols}
        for member in self.members.values():
            same_instance = request.instance_id is not None and member.instance_id == request.instance_id
            if member.classic is not None and member.id != request.member_id and not same_instance:
                common.intersection_update(name for name, _ in member.classic.protocols)
        subscription = decode_subscription(request.protocols[0][1])
        if not common or subscription is None:
            malformed = f"the subscription is malformed, or names over {ITEMS_MAX} topics and partitions"
            detail = malformed if common else "the members have no assignor in common"
            raise RequestError(Code.INCONSISTENT_GROUP_PROTOCOL, detail)
        return subscription

    def _enter(self, request: Join) -> ConsumerMember:
        """The member that joins. An unknown id is new, or the one that a client was told to use (KIP-394)."""
        holder = self._static.get(request.instance_id or "")
        if holder is not None and not request.member_id:
            return self._replace(self.members[holder], new_member_id(str(request.instance_id)))
        self._check_instance(request.member_id, request.instance_id)
        known = self.members.get(request.member_id)
        if known is not None:
            return known
        static = request.instance_id is not None
        if (static and request.member_id) or len(request.member_id) > MEMBER_ID_CHARS_MAX:
            raise RequestError(Code.UNKNOWN_MEMBER_ID)
        member_id = request.member_id or new_member_id(request.instance_id or request.client_id)
        return self._admit(member_id, request.instance_id)

    def _update(self, member: ConsumerMember, request: Join, subscription: Subscription) -> None:
        before = (member.topics, member.pattern, member.assignor)
        member.classic = request._replace(member_id=member.id)
        member.client_id, member.client_host = request.client_id, request.client_host
        member.principal = request.principal
        member.rack_id, member.rebalance_ms = subscription.rack_id, request.rebalance_ms
        member.topics, member.pattern, member.assignor = subscription.topics, None, None
        member.session.push(request.session_ms)
        if before != (member.topics, None, None):
            self._stale = True

    def _remove(self, member: ConsumerMember) -> None:
        self._forget(member)
        if not (self._is_classic_only and self._downgrade(self)):
            self._change()

    def _find_classic(self, member_id: str, instance_id: str | None, generation: int) -> tuple[ConsumerMember, Join]:
        self._check_instance(member_id, instance_id)
        member = self.members.get(member_id)
        if member is None or member.classic is None:
            raise RequestError(Code.UNKNOWN_MEMBER_ID)
        if generation != member.epoch:
            raise member.stale
        return member, member.classic

    def _must_rejoin(self, member: ConsumerMember) -> bool:
        if member.epoch < self.target_epoch or member.revoking:
            return True
        return member.waiting and not (self.target[member.id] - member.assigned) & self.owners.keys()

    def _rejoin(self, member: ConsumerMember) -> RequestError:
        if not member.revocation.armed:
            member.revocation.push(member.rebalance_ms)
        return RequestError(Code.REBALANCE_IN_PROGRESS)
