"""A group of the consumer protocol (KIP-848): the broker assigns, members converge one by one.

    a change --epoch reserved, durable--> a target for that epoch --heartbeats--> every member at that epoch

    a member:   has its target     --> RECONCILED
                has more           --> told to revoke the surplus, keeps its epoch; confirms by listing what it owns
                has less           --> takes free partitions, moves to the target's epoch; gets the rest in later beats

Rules
-----
1. The group epoch (`epoch_group.py`) grows when a member joins, leaves or changes its subscription, and when its topics
   appear, go or grow. It is durable before its target is computed.
2. A partition has at most one owner. It is owned until its owner confirms the revocation, leaves, or is fenced:
   `owners` is the truth, targets are intentions.
3. A member confirms by an explicit list in a heartbeat after the response that told it to revoke. An earlier list
   proves nothing: the member might still take partitions from an earlier response.
4. A member is fenced after the session timeout without a heartbeat, or if it does not revoke within its rebalance
   timeout.
5. A member that joins (epoch 0) owns nothing, whatever the broker believed.
6. A commit must carry the member's current epoch.
7. A closed group accepts no member.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Set
from uuid import UUID, uuid4

from millstream.broker.groups.context import GroupContext
from millstream.broker.groups.described import ConsumerMemberView, ConsumerView
from millstream.broker.groups.epoch_group import EpochGroup
from millstream.broker.groups.record import GroupRecord
from millstream.broker.groups.stream.assignors import DEFAULT_ASSIGNOR, EXCLUSIVE, Partition, Target, Wants
from millstream.broker.groups.stream.consumer_member import (
    JOINING,
    LEAVING_FOR_A_WHILE,
    Beat,
    BeatAnswer,
    ConsumerMember,
    by_topic,
)
from millstream.broker.groups.stream.pattern import Pattern
from millstream.broker.groups.view import TopicLike
from millstream.core.errors import Code, RequestError
from millstream.core.promise import Promise

PATTERNS_MAX = 50
"""Distinct topic patterns in one group: each is matched with every new topic."""
Subscribed = tuple[frozenset[str], Pattern | None]


class ConsumerGroup(EpochGroup):
    type = "Consumer"
    protocol_type = "consumer"

    def __init__(self, group_id: str, context: GroupContext, record: GroupRecord | None = None) -> None:
        super().__init__(group_id, context, record)
        self.members: dict[str, ConsumerMember] = {}
        self.target: Target = {}
        self.target_epoch = self.epoch
        self.owners: dict[Partition, str] = {}
        self._static: dict[str, str] = {}
        self._read: dict[UUID, int] = {}
        """The topics of the target, and their numbers of partitions."""
        self._matches = context.matches
        self._assignors = context.assignors

    @property
    def vacant(self) -> bool:
        return not self.members

    @property
    def state(self) -> str:
        if not self.members:
            return "Empty"
        if self._stale or self.epoch > self.target_epoch:
            return "Assigning"
        settled = all(member.is_settled(self.target_epoch) for member in self.members.values())
        return "Stable" if settled else "Reconciling"

    # Requests

    async def beat(self, beat: Beat, pattern: Pattern | None) -> BeatAnswer:
        """`pattern` is the beat's, matched with all topics."""
        self._check_open()
        self.check(beat)
        if beat.epoch < JOINING:
            return self._leave(beat)
        if pattern is not None:
            self._check_patterns(beat, pattern)
        member = self._join(beat) if beat.epoch == JOINING else self._known(beat)
        member.session.push(self._settings.consumer_session_ms(self.id))
        if member.update(beat, pattern):
            self._stale = True
        self._confirm(member, beat)
        if self._stale:
            await self._advance_for(member, self._settings.consumer_session_ms(self.id))
            if self.members.get(member.id) is not member:
                raise RequestError(Code.UNKNOWN_MEMBER_ID)
        self._reconcile(member)
        return self._answer(member, beat)

    def check(self, beat: Beat) -> None:
        """Raises for an unknown assignor."""
        if beat.assignor is not None and beat.assignor not in self._assignors:
            known = ", ".join(sorted(self._assignors))
            raise RequestError(Code.UNSUPPORTED_ASSIGNOR, f"the broker's assignors are {known}, not {beat.assignor}")

    def _check_open(self) -> None:
        if self._closed is not None:
            raise RequestError(self._closed.code, self._closed.detail)

    def _check_patterns(self, beat: Beat, pattern: Pattern) -> None:
        others = {member.pattern for member in self.members.values() if member.id != beat.member_id and member.pattern}
        if pattern not in others and len(others) >= PATTERNS_MAX:
            raise RequestError(
                Code.INVALID_REGULAR_EXPRESSION,
                f"the members of group {self.id} have {PATTERNS_MAX} different topic patterns already",
            )

    def remove(self, member_id: str, instance_id: str | None) -> None:
        """Handles LeaveGroup: from a classic member, or from an administrator (KIP-345)."""
        found = member_id or self._static.get(instance_id or "", "")
        self._check_instance(found, instance_id)
        if found not in self.members:
            raise RequestError(Code.UNKNOWN_MEMBER_ID)
        self._remove(self.members[found])

    def fence(self, member_id: str, instance_id: str | None, epoch: int) -> None:
        """Raises unless this caller may commit offsets now."""
        if epoch < 0 and not self.members:
            return  # a consumer with manual assignment may still send its member or instance id
        if epoch < 0 and not member_id and instance_id is None:
            raise RequestError(Code.UNKNOWN_MEMBER_ID, "the group has members; only they may commit")
        self._check_instance(member_id, instance_id)
        self.fence_read(member_id, epoch)

    def fence_read(self, member_id: str | None, epoch: int) -> None:
        """Raises if a member is not at this epoch. Requests without a member id may always read."""
        if not member_id and epoch < 0:
            return
        member = self.members.get(member_id or "")
        if member is None:
            raise RequestError(Code.UNKNOWN_MEMBER_ID)
        if member.epoch != epoch:
            raise member.stale

    def holder(self, instance_id: str) -> ConsumerMember | None:
        """The member with this instance id."""
        return self.members.get(self._static.get(instance_id, ""))

    def subscribes(self, topic: str) -> bool:
        return any(
            topic in member.topics or (member.pattern is not None and topic in self._matches.names(member.pattern))
            for member in self.members.values()
        )

    def topics_changed(self) -> Promise[None] | None:
        """The write of the next epoch, if a new target is needed."""
        if self.members and _counts(self._named(self._subscriptions().values())) != self._read:
            return self._change()
        return None

    def close(self, error: RequestError) -> None:
        self._closed = error
        members, self.members = self.members, {}
        for member in members.values():
            member.stop()

    def describe(self) -> ConsumerView:
        members = [
            ConsumerMemberView(
                member.id,
                member.instance_id,
                member.rack_id,
                member.client_id,
                member.client_host,
                member.epoch,
                sorted(member.topics),
                member.pattern.text if member.pattern else None,
                frozenset(member.assigned),
                frozenset(self.target.get(member.id, ())),
                member.classic is not None,
            )
            for member in self.members.values()
        ]
        return ConsumerView(self.state, self.epoch, self.target_epoch, self._assignor_name(), members)

    # Members

    def _join(self, beat: Beat) -> ConsumerMember:
        member_id = beat.member_id or str(uuid4())
        holder = self.holder(beat.instance_id or "")
        if holder is not None and holder.id != member_id:
            if not holder.may_be_replaced:
                raise RequestError(Code.UNRELEASED_INSTANCE_ID)
            return self._replace(holder, member_id)
        known = self.members.get(member_id)
        if known is not None and known.instance_id == beat.instance_id:
            self._release(known, known.assigned | known.revoking)
            known.epoch = known.previous_epoch = JOINING
            return known
        if known is not None:
            self._forget(known)
        return self._admit(member_id, beat.instance_id)

    def _admit(self, member_id: str, instance_id: str | None) -> ConsumerMember:
        if len(self.members) >= self._settings.members_max:
            raise RequestError(Code.GROUP_MAX_SIZE_REACHED)
        self._stale = True
        return self._new_member(member_id, instance_id)

    def _new_member(self, member_id: str, instance_id: str | None) -> ConsumerMember:
        member = ConsumerMember(member_id, instance_id, self._clock, self._remove)
        self.members[member_id] = member
        if instance_id is not None:
            self._static[instance_id] = member_id
        self.emptied_ms = None
        return member

    def _replace(self, old: ConsumerMember, member_id: str) -> ConsumerMember:
        """A static member returns with a new id and continues as the old one, without a rebalance."""
        old.stop()
        self._release(old, old.revoking)
        del self.members[old.id]
        member = self._new_member(member_id, old.instance_id)
        member.adopt(old)
        self.target[member_id] = self.target.pop(old.id, set())
        for partition in member.assigned:
            self.owners[partition] = member_id
        self._release(member, member.assigned - self.target[member_id])
        return member

    def _known(self, beat: Beat) -> ConsumerMember:
        self._check_instance(beat.member_id, beat.instance_id)
        member = self.members.get(beat.member_id)
        if member is None:
            raise RequestError(Code.UNKNOWN_MEMBER_ID)
        if beat.epoch > JOINING:
            member.check_epoch(beat)
        return member

    def _check_instance(self, member_id: str, instance_id: str | None) -> None:
        """Raises if another member holds the instance id."""
        if instance_id is not None and self._static.get(instance_id, member_id) != member_id:
            raise RequestError(Code.FENCED_INSTANCE_ID)

    def _leave(self, beat: Beat) -> BeatAnswer:
        member = self._known(beat)
        if beat.epoch == LEAVING_FOR_A_WHILE and member.instance_id is not None:
            self._release(member, member.revoking)
            member.epoch = LEAVING_FOR_A_WHILE
            member.waiting = False
            member.session.push(self._settings.consumer_session_ms(self.id))
        else:
            self._remove(member)
        return BeatAnswer(member.id, beat.epoch, self._settings.consumer_heartbeat_ms(self.id))

    def _remove(self, member: ConsumerMember) -> None:
        """It left, or its session or its revocation timed out."""
        self._forget(member)
        self._change()

    def _forget(self, member: ConsumerMember) -> None:
        member.stop()
        del self.members[member.id]
        if member.instance_id is not None and self._static.get(member.instance_id) == member.id:
            del self._static[member.instance_id]
        self._release(member, member.assigned | member.revoking)
        self.target.pop(member.id, None)
        if not self.members:
            self.emptied_ms = self._clock.now_ms()

    # Epochs and targets

    async def _advance_for(self, member: ConsumerMember, session_ms: int) -> None:
        """Its session does not run while the member waits for the write, as in a classic group: a slow disk is not a
        silent member.
        """
        member.session.stop()
        try:
            await self._advance()
        finally:
            if self.members.get(member.id) is member and self._closed is None:
                member.session.push(session_ms)

    def _reserved(self) -> None:
        if self._closed is not None:
            return
        subscriptions = self._subscriptions()
        topics = self._named(subscriptions.values())
        self._read = _counts(topics)
        wanted = {
            subscribed: frozenset([topics[name].id for name in names if name in topics])
            for subscribed, names in subscriptions.items()
        }
        members = {
            member.id: Wants(
                wanted[member.topics, member.pattern],
                self.target.get(member.id, set()),
                member.instance_id or member.id,
            )
            for member in self.members.values()
        }
        self.target = self._assignors[self._assignor_name()](members, self._read)
        self.target_epoch = self.epoch
        for member in self.members.values():
            if member.epoch == LEAVING_FOR_A_WHILE:  # it is not reading: no member waits for it
                self._release(member, member.assigned - self.target[member.id])

    def _subscriptions(self) -> dict[Subscribed, Set[str]]:
        """The topic names of each distinct subscription."""
        different = dict.fromkeys((member.topics, member.pattern) for member in self.members.values())
        return {
            (topics, pattern): topics if pattern is None else topics | self._matches.names(pattern)
            for topics, pattern in different
        }

    def _named(self, names: Iterable[Set[str]]) -> dict[str, TopicLike]:
        """Existing topics, by name."""
        found = map(self._topics.get, set[str]().union(*names))
        return {topic.name: topic for topic in found if topic is not None}

    def _assignor_name(self) -> str:
        votes = Counter(member.assignor for member in self.members.values() if member.assignor is not None)
        return max(sorted(votes), key=lambda name: votes[name]) if votes else DEFAULT_ASSIGNOR

    # Convergence

    def _confirm(self, member: ConsumerMember, beat: Beat) -> None:
        if member.revoking and beat.owned is not None and not beat.owned & member.revoking:
            self._release(member, member.revoking)

    def _reconcile(self, member: ConsumerMember) -> None:
        if member.revoking:
            return
        target = self.target.get(member.id, set())
        surplus = member.assigned - target
        if surplus:
            member.assigned -= surplus
            member.revoking = surplus
            member.revocation.push(member.rebalance_ms)
            return
        for partition in target - member.assigned:
            if partition not in self.owners:
                self.owners[partition] = member.id
                member.assigned.add(partition)
        member.waiting = len(member.assigned) < len(target)
        if member.epoch != self.target_epoch:
            member.previous_epoch, member.epoch = member.epoch, self.target_epoch

    def _release(self, member: ConsumerMember, partitions: set[Partition]) -> None:
        for partition in partitions:
            if self.owners.get(partition) == member.id:
                del self.owners[partition]
        member.assigned = member.assigned - partitions
        member.revoking = member.revoking - partitions
        if not member.revoking:
            member.revocation.stop()

    def _answer(self, member: ConsumerMember, beat: Beat) -> BeatAnswer:
        assigned = frozenset(member.assigned)
        assignment = None
        if beat.is_full or assigned != member.told:
            assignment = by_topic(assigned)
            member.told = assigned
        interval_ms = self._settings.consumer_heartbeat_ms(self.id)
        if member.waiting or (member.assignor == EXCLUSIVE and not member.assigned):  # for a quick takeover
            interval_ms = min(interval_ms, self._settings.consumer_waiting_interval_ms)
        return BeatAnswer(member.id, member.epoch, interval_ms, assignment)


def _counts(topics: Mapping[str, TopicLike]) -> dict[UUID, int]:
    return {topic.id: topic.partition_count for topic in topics.values()}
