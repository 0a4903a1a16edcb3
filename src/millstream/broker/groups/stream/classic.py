"""A group of the classic protocol: its leader assigns, the broker gathers members and distributes assignments.

    EMPTY --join--> PREPARING --all joined, or time is up--> COMPLETING --leader's sync--> STABLE
      ^                 ^                                        |                           |
      |                 +---- a member joins, leaves, expires or changes its metadata -------+
      +---- the last member leaves (any state)                             DEAD: deleted, or the broker stops

Rules
-----
1. A generation is durable before any member sees it, so no generation is used twice, even across a restart.
2. While PREPARING every member must rejoin. Members that have not rejoined by the longest rebalance timeout are
   dropped. Static members (KIP-345) stay until their session ends: they may be restarting.
3. The coordinator removes a member after its session timeout without a heartbeat. The timer stops while a join or sync
   of the member waits for its response; a dead connection is detected after the reply.
4. A member that does not sync within the rebalance timeout of its JoinGroup response is dropped. Otherwise a client
   that sends heartbeats but never reads would hold its partitions forever.
5. A static member that returns with a new member id replaces the old id, which is fenced (KIP-345). The group does not
   rebalance if the subscription is the same.
6. The group accepts commits of the current generation, but not in COMPLETING, before its assignments are known.
   It accepts commits without a generation only while it is empty.
7. Members of doors whose protocol has no assignments (`planned`) neither sync nor have to rejoin: Flume's own consumer
   never does. If the group has one, the broker assigns, and the leader is the first of them in alphabetical order.
   Every change starts the next generation at once, with assignments for all members, and no join waits for others. A
   member that has not rejoined since is behind until it does, whichever members leave before. Its heartbeat extends its
   session and returns REBALANCE_IN_PROGRESS.
8. A planned member, behind or not, may commit partitions that are assigned to it or to no member: Flume's commit names
   neither member nor generation, so ownership is the only fence. Commits to another member's partitions are refused,
   and so are commits under a generation before its last join. A Kafka member that is behind must rejoin first
   (REBALANCE_IN_PROGRESS): ILLEGAL_GENERATION would make it give up its partitions as lost.
9. A planned member that polls (Comet's, `polling.py`) is current again with its next poll, without a join.
10. A member from a downgrade (`migration.py`) keeps its member epoch as its generation until it rejoins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from millstream.broker.groups.context import GroupContext
from millstream.broker.groups.deadline import Deadline
from millstream.broker.groups.described import ClassicView
from millstream.broker.groups.journal import Entry
from millstream.broker.groups.record import GroupRecord
from millstream.broker.groups.stream.classic_member import (
    Join,
    Joined,
    Member,
    Synced,
    check_protocol,
    choose_protocol,
    new_member_id,
)
from millstream.broker.groups.stream.offsets import TopicCommit
from millstream.broker.groups.stream.plan import owners, plan
from millstream.core.errors import Code, RequestError
from millstream.core.promise import Promise

EMPTY = "Empty"
PREPARING = "PreparingRebalance"
COMPLETING = "CompletingRebalance"
STABLE = "Stable"
DEAD = "Dead"
CONSUMER = "consumer"
"""The protocol type whose metadata the broker decodes."""


class ClassicGroup:
    type = "Classic"

    def __init__(self, group_id: str, context: GroupContext, record: GroupRecord | None = None) -> None:
        self.id = group_id
        self.state = EMPTY
        self.generation = record.epoch if record else 0
        self.protocol_type = record.protocol_type if record else ""
        self.protocol_name: str | None = None
        self.leader_id: str | None = None
        self.members: dict[str, Member] = {}
        self.emptied_ms = record.emptied_ms if record else None
        """None if it has members, or never had any."""
        self._static: dict[str, str] = {}
        self._pending: dict[str, Deadline] = {}
        self._journal = context.journal
        self._clock = context.clock
        self._topics = context.topics
        self._settings = context.settings
        self._reserving = False
        self._emptied = 0
        """How often it became empty: that discards a generation that was reserved before."""
        self._opening = Deadline(self._clock, self._complete_if_ready)
        self._rebalance = Deadline(self._clock, self._rebalance_due)

    @property
    def vacant(self) -> bool:
        return not self.members and not self._pending

    @property
    def epoch(self) -> int:
        return self.generation

    # Requests

    def join(self, request: Join) -> Promise[Joined]:
        self._check_protocols(request)
        if request.member_id in self._pending:
            self._pending.pop(request.member_id).stop()
            return self._add(request.member_id, request)
        if request.member_id:
            return self._rejoin(self._find(request.member_id, request.instance_id), request)
        if request.instance_id is not None:
            holder = self._static.get(request.instance_id)
            if holder is not None:
                return self._replace(self.members[holder], request)
            self._check_room()
            return self._add(new_member_id(request.instance_id), request)
        self._check_room()
        # Ids of planned members sort in join order, so that earlier members keep the start of their ranges.
        prefix = f"{request.client_id}-{self.generation + 1:08d}" if request.planned else request.client_id
        member_id = new_member_id(prefix)
        if not request.id_required:
            return self._add(member_id, request)
        self._pending[member_id] = Deadline(self._clock, lambda: self._drop_pending(member_id))
        self._pending[member_id].push(min(request.session_ms, self._settings.pending_ms_max))
        return Promise.of(Joined(member_id, error=Code.MEMBER_ID_REQUIRED))

    def sync(
        self,
        member_id: str,
        instance_id: str | None,
        generation: int,
        protocol: tuple[str | None, str | None],
        assignments: Mapping[str, bytes],
    ) -> Promise[Synced]:
        member = self._find_current(member_id, instance_id, generation)
        check_protocol(protocol, (self.protocol_type, self.protocol_name))
        if self._must_rejoin(member):
            raise RequestError(Code.REBALANCE_IN_PROGRESS)
        member.unsynced = False
        if self.state == STABLE:
            member.touch()
            return Promise.of(self._synced(member))
        promise = member.await_sync()
        if member.id == self.leader_id:
            self._distribute(assignments)
        return promise

    def heartbeat(self, member_id: str, instance_id: str | None, generation: int) -> None:
        member = self._find_current(member_id, instance_id, generation)
        member.touch()
        if self._must_rejoin(member):
            raise RequestError(Code.REBALANCE_IN_PROGRESS)

    def poll(self, member: Member) -> bool:
        """A planned member's poll: extends its session. Returns whether it was behind; from now on it is current."""
        was_behind = member.is_behind
        if was_behind:
            member.told, member.generation, member.is_behind = self.generation, None, False
        member.touch()
        return was_behind

    def leave(self, member_id: str, instance_id: str | None) -> None:
        if member_id in self._pending:
            self._drop_pending(member_id)
        elif not member_id and instance_id is not None and instance_id in self._static:
            self._remove(self.members[self._static[instance_id]])  # KIP-345: by an administrator
        else:
            self._remove(self._find(member_id, instance_id))

    def fence(
        self, member_id: str, instance_id: str | None, generation: int, commits: Sequence[TopicCommit] = ()
    ) -> None:
        """Raises unless this caller may commit these offsets now."""
        if generation < 0 and not self.members:
            return  # a consumer with manual assignment may still send its member or instance id
        if generation < 0 and not member_id and instance_id is None:
            raise RequestError(Code.UNKNOWN_MEMBER_ID, "the group has members; only they may commit")
        member = self._find_current(member_id, instance_id, generation)
        if member.planned:
            self._fence_by_plan(member, commits)
        member.touch()
        if self.state == COMPLETING or (member.is_behind and not member.planned):
            raise RequestError(Code.REBALANCE_IN_PROGRESS)

    def _fence_by_plan(self, member: Member, commits: Sequence[TopicCommit]) -> None:
        owner = owners(self.members.values())
        for commit in commits:
            for each in commit.partitions:
                if owner.get((str(commit.topic), each.partition), member.id) != member.id:
                    detail = f"{commit.topic}-{each.partition} belongs to another member now"
                    raise RequestError(Code.REBALANCE_IN_PROGRESS, detail)

    def fence_read(self, member_id: str | None, epoch: int) -> None:
        """Classic members may always read committed offsets."""

    def holder(self, instance_id: str) -> Member | None:
        """The member with this instance id."""
        return self.members.get(self._static.get(instance_id, ""))

    def subscribes(self, topic: str) -> bool:
        """Whether a member reads the topic; metadata that cannot be decoded counts as any."""
        wanted = [member.topics(self.protocol_name or member.names[0]) for member in self.members.values()]
        return any(topics is None or topic in topics for topics in wanted)

    def topics_changed(self) -> None:
        """Planned members do not watch metadata: the broker rebalances for them."""
        if self.state == STABLE and self._is_planned:
            planned = plan(list(self.members.values()), self._topics)
            if any(planned.get(member.id, b"") != member.assignment for member in self.members.values()):
                self._prepare()
                self._complete_if_ready()

    def close(self, error: RequestError) -> None:
        self.state = DEAD
        self._opening.stop()
        self._rebalance.stop()
        for deadline in self._pending.values():
            deadline.stop()
        self._pending.clear()
        members, self.members = self.members, {}
        self._static.clear()
        for member in members.values():
            member.session.stop()
            member.refuse(error)

    def take_over(self, members: Iterable[tuple[Join, bytes, int]]) -> None:
        """Starts with a consumer group's classic members, their assignments and epochs, and rebalances."""
        for join, assignment, epoch in members:
            member = Member(join.member_id, join, self._clock, self._remove)
            member.assignment, member.generation, member.told = assignment, epoch, epoch
            self.members[member.id] = member
            if member.instance_id is not None:
                self._static[member.instance_id] = member.id
            member.touch()
        self.state = STABLE
        self._prepare()

    def describe(self) -> ClassicView:
        name = self.protocol_name if self.state == STABLE else None
        members = [member.describe(name) for member in self.members.values()]
        return ClassicView(self.state, self.protocol_type, name or "", members)

    # Lookups

    def _find(self, member_id: str, instance_id: str | None) -> Member:
        if instance_id is not None:
            holder = self._static.get(instance_id)
            if holder is not None and holder != member_id:
                raise RequestError(Code.FENCED_INSTANCE_ID)
            if holder is None:
                raise RequestError(Code.UNKNOWN_MEMBER_ID)
        member = self.members.get(member_id)
        if member is None:
            raise RequestError(Code.UNKNOWN_MEMBER_ID)
        return member

    def _find_current(self, member_id: str, instance_id: str | None, generation: int) -> Member:
        member = self._find(member_id, instance_id)
        if generation != self.generation_of(member):
            raise RequestError(Code.ILLEGAL_GENERATION)
        return member

    def generation_of(self, member: Member) -> int:
        return self.generation if member.generation is None else member.generation

    def _must_rejoin(self, member: Member) -> bool:
        return self.state == PREPARING or member.generation is not None

    @property
    def _is_planned(self) -> bool:
        return any(member.planned for member in self.members.values())

    def _check_room(self) -> None:
        if len(self.members) + len(self._pending) >= self._settings.members_max:
            raise RequestError(Code.GROUP_MAX_SIZE_REACHED)

    def _check_protocols(self, request: Join) -> None:
        """All members must have one protocol in common; the requester's earlier protocols do not count."""
        common = {name for name, _ in request.protocols}
        for member in self.members.values():
            same_instance = request.instance_id is not None and member.instance_id == request.instance_id
            if member.id != request.member_id and not same_instance:
                common.intersection_update(member.names)
                if request.protocol_type != self.protocol_type or not common:
                    raise RequestError(Code.INCONSISTENT_GROUP_PROTOCOL)

    # Joining

    def _add(self, member_id: str, request: Join) -> Promise[Joined]:
        if not self.members:
            self.protocol_type = request.protocol_type
        member = Member(member_id, request, self._clock, self._remove)
        self.members[member_id] = member
        if member.instance_id is not None:
            self._static[member.instance_id] = member_id
        return self._await_join(member)

    def _rejoin(self, member: Member, request: Join) -> Promise[Joined]:
        same = member.protocols == request.protocols
        is_leader = member.id == self.leader_id and not member.planned
        if same and (self.state == COMPLETING or (self.state == STABLE and not is_leader)):
            member.touch()  # its response was lost; a leader that rejoins wants a rebalance
            return Promise.of(self._joined(member))
        member.update(request)
        if len(self.members) == 1:
            self.protocol_type = request.protocol_type
        return self._await_join(member)

    def _replace(self, old: Member, request: Join) -> Promise[Joined]:
        """A static member returns with a new id."""
        member = Member(new_member_id(str(request.instance_id)), request, self._clock, self._remove)
        member.assignment = old.assignment
        del self.members[old.id]
        self.members[member.id] = member
        self._static[str(request.instance_id)] = member.id
        was_leader = self.leader_id == old.id
        if was_leader:
            self.leader_id = member.id
        old.session.stop()
        old.refuse(RequestError(Code.FENCED_INSTANCE_ID))
        if self.state != STABLE or not self._wants_the_same(old, member):
            return self._await_join(member)
        member.touch()
        answer = self._joined(member)
        if was_leader:
            # It must not assign: a stable group takes no assignments. Clients before skip_assignment (KIP-814)
            # see the old id as leader.
            skip = request.may_skip_assignment
            answer = answer._replace(skip_assignment=True) if skip else answer._replace(leader=old.id, members=())
        return Promise.of(answer)

    def _wants_the_same(self, old: Member, new: Member) -> bool:
        if choose_protocol(list(self.members.values())) != self.protocol_name:
            return False
        if old.metadata(self.protocol_name) == new.metadata(self.protocol_name):
            return True
        # A restarted consumer lists no owned partitions, so only the subscribed topics count.
        topics = new.topics(self.protocol_name) if self.protocol_type == CONSUMER else None
        return topics is not None and topics == old.topics(self.protocol_name)

    def _await_join(self, member: Member) -> Promise[Joined]:
        promise = member.await_join()
        self._prepare()
        self._complete_if_ready()
        return promise

    def _drop_pending(self, member_id: str) -> None:
        self._pending.pop(member_id).stop()
        self._complete_if_ready()

    def _remove(self, member: Member) -> None:
        """It left, or its session ended."""
        self.members.pop(member.id)
        if member.instance_id is not None:
            del self._static[member.instance_id]
        member.session.stop()
        member.refuse(RequestError(Code.UNKNOWN_MEMBER_ID))
        if not self.members:
            self._become_empty()
        else:
            self._prepare()
            self._complete_if_ready()

    def _become_empty(self) -> None:
        self.state = EMPTY
        self.protocol_name = self.leader_id = None
        self._opening.stop()
        self._rebalance.stop()
        self._reserving = False
        self._emptied += 1
        self.emptied_ms = self._clock.now_ms()
        record = GroupRecord(self.type, self.generation, self.protocol_type, self.emptied_ms)
        self._journal.submit(Entry(lambda: [record.put(self.id)]))

    # Rebalancing

    def _prepare(self) -> None:
        if self.state == PREPARING:
            return
        if self.state == EMPTY and self._settings.initial_rebalance_delay_ms > 0 and not self._is_planned:
            self._opening.push(self._settings.initial_rebalance_delay_ms)
        self.state = PREPARING
        self._rebalance.push(self._longest_rebalance_ms())
        for member in list(self.members.values()):
            if member.syncing is not None:
                member.refuse(RequestError(Code.REBALANCE_IN_PROGRESS))
                member.touch()

    def _complete_if_ready(self) -> None:
        if self.state != PREPARING or self._opening.armed:
            return
        all_joined = not self._pending and all(member.joining is not None for member in self.members.values())
        if all_joined or self._is_planned:
            self._reserve_generation()

    def _rebalance_due(self) -> None:
        if self.state != PREPARING:
            self._drop([member for member in self.members.values() if member.unsynced])
            return
        for member_id in list(self._pending):
            self._pending.pop(member_id).stop()
        away = [each for each in self.members.values() if each.joining is None and not each.planned]
        self._drop([each for each in away if each.instance_id is None])
        if self.state == PREPARING:
            if any(member.joining is not None or member.planned for member in self.members.values()):
                self._reserve_generation()
            else:  # only static members, all away: await their sessions
                self._rebalance.push(self._longest_rebalance_ms())

    def _drop(self, members: list[Member]) -> None:
        for member in members:
            if self.members.get(member.id) is member:
                self._remove(member)

    def _reserve_generation(self) -> None:
        if self._reserving:
            return
        self._reserving = True
        self._rebalance.stop()
        generation = self.generation + 1
        record, emptied = GroupRecord(self.type, generation, self.protocol_type), self._emptied
        self._journal.submit(Entry(lambda: [record.put(self.id)] if self.state != DEAD else [])).then(
            lambda done: self._reserved(generation, done) if emptied == self._emptied else None
        )

    def _reserved(self, generation: int, done: Promise[None]) -> None:
        """The generation is durable. It includes members that joined during the write."""
        self._reserving = False
        if self.state != PREPARING:
            return
        joined = [member for member in self.members.values() if member.joining is not None]
        planned = [member.id for member in self.members.values() if member.planned]
        if done.error is not None or not (joined or planned):
            for member in joined:
                member.refuse(RequestError(Code.COORDINATOR_NOT_AVAILABLE, str(done.error)))
                member.touch()
            self._rebalance.push(self._longest_rebalance_ms())
            return
        self.generation = generation
        self.emptied_ms = None
        if planned:
            self.leader_id = min(planned)
        elif self.leader_id not in {member.id for member in joined}:
            self.leader_id = joined[0].id
        self.protocol_name = choose_protocol(list(self.members.values()))
        self.state = COMPLETING
        self._rebalance.push(self._longest_rebalance_ms())
        for member in self.members.values():
            member.is_behind = bool(planned)  # `_joined` resets it below
            member.generation = member.told if planned else None
            if planned:
                member.unsynced = not member.planned
        answers = []
        for member in joined:
            if member.joining is not None:
                answers.append((member.joining, self._joined(member)))
            member.joining = None
            member.unsynced = not member.planned
            member.touch()
        if planned:
            self._distribute(plan(list(self.members.values()), self._topics))
        for promise, answer in answers:
            promise.settle(answer)

    def _distribute(self, assignments: Mapping[str, bytes]) -> None:
        self.state = STABLE
        answers = []
        for member in self.members.values():
            member.assignment = assignments.get(member.id, b"")
            if member.syncing is not None:
                answers.append((member.syncing, self._synced(member)))
                member.syncing = None
                member.touch()
        for promise, answer in answers:
            promise.settle(answer)

    def _longest_rebalance_ms(self) -> int:
        return max(member.rebalance_ms for member in self.members.values())

    def _joined(self, member: Member) -> Joined:
        member.told, member.generation, member.is_behind = self.generation, None, False
        is_leader = member.id == self.leader_id
        members = self.members.values() if is_leader or member.planned else ()
        return Joined(
            member.id,
            self.generation,
            self.protocol_type,
            self.protocol_name,
            self.leader_id or "",
            tuple((each.id, each.instance_id, each.metadata(self.protocol_name)) for each in members),
        )

    def _synced(self, member: Member) -> Synced:
        return Synced(self.protocol_type, self.protocol_name or "", member.assignment)
