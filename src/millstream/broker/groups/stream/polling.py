"""Members that only poll: Comet's consumers have no heartbeat, no commit and no rejoin.

    subscribe    --> a member of a classic group, with its final partitions
    poll         --> commits the records of the last poll, then answers with the next ones
    unsubscribe  --> the member leaves
    silence      --> the coordinator removes the member `SESSION_MS` after its last poll

Rules
-----
1. The group is an ordinary classic group with planned members (`classic.py`, rules 7 and 8). No subscription waits for
   other members. The assignor is `roundrobin` of `plan.py`.
2. The next poll of a member that is behind returns `rebalance` and no records; the member is current from then on. A
   change that concerns only other topics of the group is not reported.
3. The records of a poll count as consumed when the member's next poll arrives. If the member dies first, its successor
   reads them again. The poll does not commit partitions that the member has lost meanwhile: their new owner reads from
   the last commit.
4. A member reads from the committed offset. It reads from the start of the log if nothing is committed, or if retention
   has deleted that offset, and from the end if the committed offset lies beyond it (the log lost its tail).
5. Polls of one member are answered one after the other. A second poll with the same member id commits the first one's
   records, whether or not their answer arrived. A client that got no answer must subscribe again, as Comet's does.
6. A member reads one topic by its id: when the topic is deleted and created again, the member is unknown.
7. One unreadable partition does not hold up the others: its error is reported when no other partition has records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from millstream.broker.groups.founders import Founders
from millstream.broker.groups.groups import Groups, Join, PartitionCommit, TopicCommit
from millstream.broker.groups.stream.classic import ClassicGroup
from millstream.broker.groups.stream.classic_member import Member, Polled
from millstream.broker.groups.stream.plan import ROUND_ROBIN, decode_assignment, encode_subscription, readers
from millstream.broker.outlet import RECORDS_MAX, Outlet, fit
from millstream.broker.topics import Topic
from millstream.core.errors import Code, RequestError
from millstream.core.logs import Damped
from millstream.records.record import Record
from millstream.security.principal import Principal

unreadable = Damped(__name__)

SESSION_MS = 10_000
MEMBERS_MAX = 20_000
"""Of all groups. A member that stops polling counts until its session ends."""
GENERATIONS_MAX = 1_000
"""Groups whose readers are remembered."""
COMMITS_MAX = 3
"""Attempts of a poll to commit while the group rebalances."""


class Subscribed(NamedTuple):
    member_id: str
    partitions: Sequence[int]
    generation: int


class Answer(NamedTuple):
    generation: int
    rebalance: bool = False
    records: Sequence[tuple[int, Sequence[Record]]] = ()
    """By partition."""


class Size(NamedTuple):
    """The limits of one answer."""

    records_max: int
    bytes_max: int
    head_bytes: int
    """Per record, besides its key and value."""


class Polling:
    """One per broker."""

    def __init__(self, groups: Groups, outlet: Outlet, session_ms: Callable[[int], int]) -> None:
        """`session_ms` clamps a session timeout to the operator's limits."""
        self._groups = groups
        self._outlet = outlet
        self._session_ms = session_ms
        self._members: dict[tuple[str, str], None] = {}
        self._founders = Founders[tuple[str, str]](
            "members that poll", 0, MEMBERS_MAX, self._exists, "unsubscribe some, or let their sessions end"
        )
        self._readers: dict[str, tuple[int, dict[str, list[str]]]] = {}
        """By group: a generation, and the members that read each topic in it."""

    async def subscribe(
        self, topic: Topic, group_id: str, principal: Principal, client_id: str, host: str
    ) -> Subscribed:
        """A new member, and its partitions."""
        self._make_room(host)
        session_ms = self._session_ms(SESSION_MS)
        joined = await self._groups.join(
            Join(
                group_id=group_id,
                member_id="",
                instance_id=None,
                client_id=client_id,
                client_host=host,
                session_ms=session_ms,
                rebalance_ms=session_ms,
                protocol_type="consumer",
                protocols=((ROUND_ROBIN, encode_subscription([topic.name])),),
                planned=True,
                principal=principal,
            )
        )
        group, member = self._groups.polling_member(group_id, joined.member_id, principal)
        self._members[group_id, member.id] = None
        self._founders.add((group_id, member.id), host)
        state = member.polled = Polled(topic.name, topic.id)
        state.readers = self._known(group, member, topic.name)
        return Subscribed(member.id, state.readers[1], group.generation)

    async def poll(self, topic: Topic, group_id: str, member_id: str, principal: Principal, size: Size) -> Answer:
        group, member, state = self._find(topic, group_id, member_id, principal)
        member.touch()
        async with state.lock:
            await self._commit_delivered(topic, group_id, member_id, principal)
            group, member, state = self._find(topic, group_id, member_id, principal)
            if self._rebalances(group, member, state):
                return Answer(group.generation, rebalance=True)
            records, delivered = await self._read(topic, group_id, state, size)
            group, member, state = self._find(topic, group_id, member_id, principal)
            if self._rebalances(group, member, state):
                return Answer(group.generation, rebalance=True)
            state.delivered = delivered
            return Answer(group.generation, records=records)

    def unsubscribe(self, topic: str, group_id: str, member_id: str, principal: Principal) -> None:
        _, member = self._groups.polling_member(group_id, member_id, principal)
        if member.polled is None or member.polled.topic != topic:
            raise RequestError(Code.UNKNOWN_MEMBER_ID)
        self._groups.leave(group_id, [(member_id, None)])

    # Members

    def _find(
        self, topic: Topic, group_id: str, member_id: str, principal: Principal
    ) -> tuple[ClassicGroup, Member, Polled]:
        group, member = self._groups.polling_member(group_id, member_id, principal)
        if member.polled is None or member.polled.topic_id != topic.id:
            raise RequestError(Code.UNKNOWN_MEMBER_ID)
        return group, member, member.polled

    def _exists(self, member: tuple[str, str]) -> bool:
        return self._groups.has_member(*member)

    def _make_room(self, host: str) -> None:
        self._founders.check(host)
        if len(self._members) >= MEMBERS_MAX:
            self._members = {member: None for member in self._members if self._exists(member)}
        if len(self._members) >= MEMBERS_MAX:
            detail = f"the broker has {MEMBERS_MAX} members that poll, the limit; let some of their sessions end"
            raise RequestError(Code.GROUP_MAX_SIZE_REACHED, detail)

    def _rebalances(self, group: ClassicGroup, member: Member, state: Polled) -> bool:
        """Whether the topic's members or this one's partitions have changed since its last poll."""
        if not group.poll(member):
            return False
        known = self._known(group, member, state.topic)
        before, state.readers = state.readers, known
        if known == before:
            return False
        state.delivered = {}
        return True

    def _known(self, group: ClassicGroup, member: Member, topic: str) -> tuple[Sequence[str], Sequence[int]]:
        generation, by_topic = self._readers.get(group.id, (-1, {}))
        if generation != group.generation or member.id not in by_topic.get(topic, ()):
            if len(self._readers) >= GENERATIONS_MAX:
                self._readers.clear()
            by_topic = readers(group.members.values())
            self._readers[group.id] = group.generation, by_topic
        return by_topic[topic], _partitions(member, topic)

    # Records

    async def _commit_delivered(self, topic: Topic, group_id: str, member_id: str, principal: Principal) -> None:
        """Commits the last poll's records, of the partitions that are still the member's."""
        for _ in range(COMMITS_MAX):
            group, member, state = self._find(topic, group_id, member_id, principal)
            mine = frozenset(_partitions(member, topic.name))
            commits = [PartitionCommit(each, offset) for each, offset in state.delivered.items() if each in mine]
            if not commits:
                break
            try:
                [codes] = await self._groups.commit(
                    group_id,
                    member_id,
                    None,
                    group.generation_of(member),
                    [TopicCommit(topic.name, commits)],
                    principal=principal,
                )
            except RequestError as error:
                if error.code not in (Code.REBALANCE_IN_PROGRESS, Code.ILLEGAL_GENERATION):
                    raise
                continue  # partitions moved while the commit waited
            refused = next((code for code in codes if code), None)
            if refused is not None:
                raise RequestError(refused)
            break
        state.delivered = {}

    async def _read(
        self, topic: Topic, group_id: str, state: Polled, size: Size
    ) -> tuple[list[tuple[int, Sequence[Record]]], dict[int, int]]:
        mine = [each for each in state.readers[1] if each < topic.partition_count]
        found: list[tuple[int, Sequence[Record]]] = []
        delivered: dict[int, int] = {}
        failure: RequestError | None = None
        if not mine:
            return found, delivered
        share, room, left = max(size.records_max // len(mine), 1), RECORDS_MAX, size.bytes_max
        first = state.first % len(mine)
        [committed] = self._groups.fetch(group_id, [(topic.id, mine)])
        positions = {number: each.offset if each is not None else 0 for number, each, _ in committed.partitions}
        for number in mine[first:] + mine[:first]:
            log = topic.partitions[number].log
            offset = min(max(positions[number], log.start), log.high_watermark)
            if offset >= log.high_watermark:
                continue
            try:
                taken = await self._outlet.take(
                    log, offset, left, head_bytes=size.head_bytes, count_max=min(share, room)
                )
            except RequestError as error:
                failure = error
                unreadable.warning("poll of %s-%d failed: %s", topic.name, number, error)
                continue
            records, next_offset, left = fit(taken, left, size.head_bytes, needs_one=not found)
            if records:
                found.append((number, records))
                room -= len(records)
            if next_offset > offset:
                delivered[number] = next_offset
            if left <= 0 or room <= 0:
                state.first = mine.index(number) + bool(records)
                break
        if failure is not None and not found:
            raise failure
        return found, delivered


def _partitions(member: Member, topic: str) -> list[int]:
    """The partitions of a topic that are assigned to a member."""
    assigned = decode_assignment(member.assignment)
    return sorted(number for name, number in assigned[0] if name == topic) if assigned is not None else []
