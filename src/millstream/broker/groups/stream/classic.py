"""A group of the classic protocol: its leader assigns, the broker only gathers members and hands the plan out.

    EMPTY --join--> PREPARING --all joined, or time is up--> COMPLETING --leader's sync--> STABLE
      ^                 ^                                        |                           |
      |                 +---- a member joins, leaves, expires or changes what it wants ------+
      +---- the last member goes (from anywhere)                           DEAD: deleted, or the broker stops

Rules
-----
1. A generation is durable before anybody hears of it, so none is ever given twice, a restart in between or not.
2. While PREPARING every member must join again. Who has not when the longest rebalance timeout is over is dropped;
   static members (with an instance id) stay until their session ends, for they may just be restarting.
3. A member is given up when it is silent for its session timeout. While it waits for an answer of ours (join, sync) no
   clock runs; whoever's connection died meanwhile is found out after the answer.
4. Who was told a generation and does not sync within the rebalance timeout is dropped: a client that is alive enough to
   heartbeat but never reads would hold its partitions for ever.
5. A static member that comes back with a new member id takes the old one's place. The group does not notice if it
   still wants the same; the old id is fenced.
6. Commits are taken from members of the current generation, not between its announcement and its plan (COMPLETING).
   Without a generation only while the group is empty.
7. Members of doors whose protocol has no plan (`planned`) do not sync, and need not join again: Flume's own consumer
   never does. Where one is in the group, the broker plans, and the leader is the first of them in alphabetical order.
   Every change begins the next generation at once, with a plan for all members, and no join waits for others. A member
   that has not joined since is behind until it does, whichever members leave meanwhile. Its heartbeat is taken, and
   answered with the need to join again.
8. A planned member, behind or not, may commit what the current plan leaves to it, or gives to no member: Flume's commit
   names neither member nor generation, so ownership is the only fence. Partitions that the plan gives to another member
   are refused to it, and so is everything under a generation before its last join. A Kafka member that is behind joins
   first (REBALANCE_IN_PROGRESS): ILLEGAL_GENERATION would make it give up its partitions as lost.
9. A member that came with a downgrade (`migration.py`) goes by the epoch that it had until it joins again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from millstream.broker.groups.deadline import Deadline
from millstream.broker.groups.described import ClassicView
from millstream.broker.groups.journal import Entry, Journal
from millstream.broker.groups.record import GroupRecord
from millstream.broker.groups.settings import GroupSettings
from millstream.broker.groups.stream.classic_member import Join, Joined, Member, Synced, choose_protocol, new_member_id
from millstream.broker.groups.stream.offsets import TopicCommit
from millstream.broker.groups.stream.plan import owners
from millstream.core.clock import Clock
from millstream.core.errors import Code, RequestError
from millstream.core.promise import Promise

EMPTY = "Empty"
PREPARING = "PreparingRebalance"
COMPLETING = "CompletingRebalance"
STABLE = "Stable"
DEAD = "Dead"
CONSUMER = "consumer"
"""The protocol type whose metadata the broker can read."""
Planner = Callable[[Sequence[Member]], Mapping[str, bytes]]
"""Gives each member its assignment, encoded as the consumer protocol has it."""


class ClassicGroup:
    type = "Classic"

    def __init__(
        self,
        group_id: str,
        journal: Journal,
        clock: Clock,
        settings: GroupSettings,
        record: GroupRecord | None = None,
        plan: Planner = lambda members: {},
    ) -> None:
        self.id = group_id
        self.state = EMPTY
        self.generation = record.epoch if record else 0
        self.protocol_type = record.protocol_type if record else ""
        self.protocol_name: str | None = None
        self.leader_id: str | None = None
        self.members: dict[str, Member] = {}
        self.emptied_ms = record.emptied_ms if record else None
        """None for groups that only ever stored offsets."""
        self._static: dict[str, str] = {}
        self._pending: dict[str, Deadline] = {}
        self._journal = journal
        self._clock = clock
        self._settings = settings
        self._plan = plan
        self._reserving = False
        self._emptied = 0
        """How often it became empty: a generation that was reserved before is taken back by the record of that."""
        self._opening = Deadline(clock, self._complete_if_ready)
        self._rebalance = Deadline(clock, self._rebalance_due)

    @property
    def vacant(self) -> bool:
        return not self.members and not self._pending

    @property
    def epoch(self) -> int:
        return self.generation

    # Verbs of the protocol

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
        # Ids of planned members sort in the order of their joins: those that were there keep the start of their ranges.
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
        for said, known in zip(protocol, (self.protocol_type, self.protocol_name), strict=True):
            if said is not None and said != known:
                raise RequestError(Code.INCONSISTENT_GROUP_PROTOCOL)
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

    def leave(self, member_id: str, instance_id: str | None) -> None:
        if member_id in self._pending:
            self._drop_pending(member_id)
        elif not member_id and instance_id is not None and instance_id in self._static:
            self._remove(self.members[self._static[instance_id]])  # an administrator knows the instance only
        else:
            self._remove(self._find(member_id, instance_id))

    def fence(
        self, member_id: str, instance_id: str | None, generation: int, commits: Sequence[TopicCommit] = ()
    ) -> None:
        """Raises unless this caller may commit these offsets now."""
        if generation < 0 and not self.members:
            return  # whoever assigns partitions to itself may say its member or instance id all the same
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
                    detail = f"{commit.topic}-{each.partition} is another member's by now"
                    raise RequestError(Code.REBALANCE_IN_PROGRESS, detail)

    def fence_read(self, member_id: str | None, epoch: int) -> None:
        """Classic members may always read what is committed."""

    def subscribes(self, topic: str) -> bool:
        """Whether a member reads the topic; metadata that the broker cannot read might mean any."""
        wanted = [member.topics(self.protocol_name or member.names[0]) for member in self.members.values()]
        return any(topics is None or topic in topics for topics in wanted)

    def topics_changed(self) -> None:
        """Only the broker notices for planned members that there is more, or less, to read."""
        if self.state == STABLE and self._is_planned:
            plan = self._plan(list(self.members.values()))
            if any(plan.get(member.id, b"") != member.assignment for member in self.members.values()):
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
        """Starts with the classic members of a consumer group, their assignments and their epochs; they rebalance."""
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

    # Who is who

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
        """All members must have one protocol in common; the one that asks is not held to what it said before."""
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
            member.touch()  # its answer got lost; a leader that joins a stable group wants a new plan
            return Promise.of(self._joined(member))
        member.update(request)
        if len(self.members) == 1:
            self.protocol_type = request.protocol_type
        return self._await_join(member)

    def _replace(self, old: Member, request: Join) -> Promise[Joined]:
        """A static member is back under a new id."""
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
            # It must not plan: a stable group takes no plan. Clients that know no way to be told so believe that the
            # old id still leads.
            skip = request.may_skip_assignment
            answer = answer._replace(skip_assignment=True) if skip else answer._replace(leader=old.id, members=())
        return Promise.of(answer)

    def _wants_the_same(self, old: Member, new: Member) -> bool:
        if choose_protocol(list(self.members.values())) != self.protocol_name:
            return False
        if old.metadata(self.protocol_name) == new.metadata(self.protocol_name):
            return True
        # A restarted consumer no longer lists what it owned; what it subscribes to is what counts.
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
        """It left, or its session is over."""
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
            else:  # static members only, all away: their sessions decide
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
        """The generation is durable: who waits now is in it, whether or not it did when the write began."""
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
            member.is_behind = bool(planned)  # those that joined are told below
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
            self._distribute(self._plan(list(self.members.values())))
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
