"""The membership of a share group (KIP-932). The group's queue holds the records and leases.

    join --epoch reserved, durable--> in the group --silence for the session timeout, or leave--> gone
                                          |
                                          +-- fetches: a seat in the queue, which holds the leases

Rules
-----
1. Every member gets every partition of its topics. The queue shares work record by record, so an assignment of some
   partitions gains nothing. It would cost much: a slow member would block the partitions that only it reads, and every
   join or leave would move partitions.
2. The epoch (`epoch_group.py`) grows when a member joins, leaves or changes its subscription, and when a subscribed
   topic appears, is deleted or grows.
3. A seat starts and ends with a share session: the client closes it, or its connection ends. A member that misses its
   session timeout loses its seat. A member that leaves keeps it until its session ends, because clients send their last
   acknowledgements at that time, on another connection. The end of a seat releases its leases at once.
4. A seat may start before its member joins. After a broker restart members open new sessions long before their next
   heartbeat.
5. The group lasts as long as its queue has state, until it is deleted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from millstream.broker.groups.context import GroupContext
from millstream.broker.groups.described import ShareMemberView, ShareView
from millstream.broker.groups.epoch_group import EpochGroup
from millstream.broker.groups.queue.settings import group_value
from millstream.broker.groups.queue.share_lines import Lines
from millstream.broker.groups.queue.share_member import Assigned, ShareBeat, ShareMember
from millstream.broker.groups.record import GroupRecord
from millstream.broker.groups.stream.consumer_member import JOINING, BeatAnswer
from millstream.core.errors import Code, RequestError
from millstream.core.promise import Promise
from millstream.stores.base import Put

if TYPE_CHECKING:
    from millstream.broker.groups.queue.queue import Queue
    from millstream.broker.groups.queue.verbs import Member


class ShareGroup(EpochGroup):
    type = "Share"
    protocol_type = "share"
    assignor = "simple"
    """Kafka's name for its only share assignor."""

    def __init__(self, group_id: str, context: GroupContext, record: GroupRecord | None = None) -> None:
        super().__init__(group_id, context, record)
        self.durable_epoch = self.epoch
        """The latest epoch that members may see."""
        self.members: dict[str, ShareMember] = {}
        self.lines = Lines()
        """Parked fetches."""
        self._seats: dict[tuple[str, str], Member] = {}
        """By member id and relaying broker; empty if there is no relay."""
        self._read: Assigned = {}
        """All partitions that members read, as of the last epoch."""
        self._queues = context.queues

    @property
    def vacant(self) -> bool:
        return not self.members and self._queues.get(self.id) is None

    @property
    def state(self) -> str:
        return "Stable" if self.members else "Empty"

    # Verbs of the protocol

    async def beat(self, beat: ShareBeat) -> BeatAnswer:
        if beat.epoch < JOINING:
            self._remove(self._known(beat))
            return BeatAnswer(beat.member_id, beat.epoch, self._heartbeat_ms())
        member = self._join(beat) if beat.epoch == JOINING else self._known(beat)
        member.session.push(self._session_ms())
        if member.update(beat):
            self._stale = True
        if self._stale:
            member.session.stop()  # a slow disk is not a silent member
            try:
                await self._advance()
            finally:
                if self.members.get(member.id) is member:
                    member.session.push(self._session_ms())
            if self.members.get(member.id) is not member:
                raise RequestError(Code.UNKNOWN_MEMBER_ID)
        member.reach(self.durable_epoch)
        return self._answer(member, beat)

    def remove(self, member_id: str, instance_id: str | None) -> None:
        """An administrator removes a member."""
        member = self.members.get(member_id)
        if member is None:
            raise RequestError(Code.UNKNOWN_MEMBER_ID)
        self._expire(member)

    def fence(self, member_id: str, instance_id: str | None, epoch: int) -> None:
        raise RequestError(Code.GROUP_ID_NOT_FOUND, f"{self.id} is a share group: it has no offsets to commit")

    def fence_read(self, member_id: str | None, epoch: int) -> None:
        raise RequestError(Code.GROUP_ID_NOT_FOUND, f"{self.id} is a share group: it has no committed offsets")

    def holder(self, instance_id: str) -> None:
        """Share groups have no instance ids."""

    def subscribes(self, topic: str) -> bool:
        return any(topic in member.topics for member in self.members.values())

    def topics_changed(self) -> Promise[None] | None:
        """The write of the next epoch, if one is needed."""
        if self.members and self._wanted() != self._read:
            return self._change()
        return None

    def close(self, error: RequestError) -> None:
        self._closed = error
        members, self.members = self.members, {}
        for member in members.values():
            member.session.stop()
        for member_id, via in list(self._seats):
            self.leave_seat(member_id, via=via)

    def describe(self) -> ShareView:
        members = [
            ShareMemberView(
                member.id,
                member.rack_id,
                member.client_id,
                member.client_host,
                member.epoch,
                sorted(member.topics),
                self._assigned(member),
            )
            for member in self.members.values()
        ]
        return ShareView(self.state, self.epoch, self.durable_epoch, self.assignor, members)

    # Seats

    def queue(self) -> Queue:
        return self._queues.open(self.id)

    def take_seat(self, member_id: str, via: str = "") -> Member:
        """Opens a new seat. It ends the member's earlier seat and releases its leases."""
        self.leave_seat(member_id, via=via)
        seat = self._seats[member_id, via] = self.queue().join(member_id)
        return seat

    def has_seat(self, member_id: str, seat: Member, via: str = "") -> bool:
        return self._seats.get((member_id, via)) is seat

    def leave_seat(self, member_id: str, seat: Member | None = None, via: str = "") -> None:
        """Does nothing if the seat has ended, or (`seat`) if a newer seat replaced it."""
        held = self._seats.get((member_id, via))
        if held is None or (seat is not None and held is not seat):
            return
        del self._seats[member_id, via]
        queue = self._queues.get(self.id)
        if queue is not None:
            queue.leave(held)

    # Members

    def _join(self, beat: ShareBeat) -> ShareMember:
        known = self.members.get(beat.member_id)
        if known is not None:
            known.told = None
            return known
        if len(self.members) >= self._settings.members_max:
            raise RequestError(Code.GROUP_MAX_SIZE_REACHED)
        self.queue()  # raises if it may not exist
        member = self.members[beat.member_id] = ShareMember(beat.member_id, self._clock, self._expire)
        self.emptied_ms = None
        self._stale = True
        return member

    def _known(self, beat: ShareBeat) -> ShareMember:
        member = self.members.get(beat.member_id)
        if member is None:
            raise RequestError(Code.UNKNOWN_MEMBER_ID)
        if beat.epoch > JOINING:
            member.check_epoch(beat.epoch)
        return member

    def _expire(self, member: ShareMember) -> None:
        """The session timeout is over."""
        self._remove(member)
        for member_id, via in list(self._seats):
            if member_id == member.id:
                self.leave_seat(member_id, via=via)

    def _remove(self, member: ShareMember) -> None:
        member.session.stop()
        del self.members[member.id]
        if not self.members:
            self.emptied_ms = self._clock.now_ms()
        self._change()

    def _answer(self, member: ShareMember, beat: ShareBeat) -> BeatAnswer:
        assigned, assignment = self._assigned(member), None
        if beat.topics is not None or assigned != member.told:
            assignment = {topic: list(range(count)) for topic, count in assigned.items()}
            member.told = assigned
        return BeatAnswer(member.id, member.epoch, self._heartbeat_ms(), assignment)

    def _assigned(self, member: ShareMember) -> Assigned:
        found = (self._topics.get(name) for name in sorted(member.topics))
        return {topic.id: topic.partition_count for topic in found if topic is not None}

    def _wanted(self) -> Assigned:
        names = frozenset[str]().union(*(member.topics for member in self.members.values()))
        found = map(self._topics.get, names)
        return {topic.id: topic.partition_count for topic in found if topic is not None}

    def _session_ms(self) -> int:
        return int(group_value(self._queues.overrides(self.id), "share.session.timeout.ms"))

    def _heartbeat_ms(self) -> int:
        return int(group_value(self._queues.overrides(self.id), "share.heartbeat.interval.ms"))

    # Epochs

    def _reserve(self) -> Iterable[Put]:
        self._read = self._wanted()
        return super()._reserve()

    def _reserved(self) -> None:
        self.durable_epoch = self.epoch
