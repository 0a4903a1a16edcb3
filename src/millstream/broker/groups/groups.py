"""The registry of groups: finds or creates the group of a request, and keeps the state that outlives its members.

A group id names one group of one type. It may change between classic and consumer, with or without members
(`migration.py`): the new group keeps the offsets and the epoch. A share group keeps its type while its queue has state,
and a group with committed offsets cannot become a share group: neither could use the other's state. A queue that
another door created is a share group here as well.

    state                     kept                                        removed
    members                   in memory                                   with their session, or the broker
    generation / epoch        in the store, durable before it is sent     with the group
    committed offsets         in the store, mirrored in memory            deleted, with their topic, or expired
    a share group's queue     `queues`                                    with the group, by an explicit delete

Offsets expire `offsets_retention_ms` after the later of their commit and the moment the group became empty, never while
the group has members (KIP-211). A group without members and offsets is dropped after the same time, or at once to make
room; a group that never had any, within two minutes. The clients of one address create at most `groups_per_peer_max`
groups (`founders.py`); the next one replaces an unused group of that address.

If brokers share a store, each coordinates some of the groups (`cluster/`). It loads them when the cluster assigns them
and drops them when it loses them. A request for another group gets NOT_COORDINATOR.

A member belongs to the principal that joined. Its ids are no secret (DescribeGroups lists them), so a request of
another principal for it gets UNKNOWN_MEMBER_ID, except LeaveGroup: administrators remove members (KIP-345). A member id
that waits for its join (KIP-394) is listed nowhere.

Methods raise `RequestError` for errors of the whole request and return codes for its parts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar
from uuid import UUID

from millstream.broker.groups.context import GroupContext
from millstream.broker.groups.deadline import Deadline
from millstream.broker.groups.described import ClassicView, ConsumerView, Listed
from millstream.broker.groups.founders import Founders
from millstream.broker.groups.journal import Entry, Journal
from millstream.broker.groups.kinds import Group, Kinds
from millstream.broker.groups.queue.share import ShareGroup
from millstream.broker.groups.queue.share_member import ShareBeat
from millstream.broker.groups.record import (
    GROUPS_PREFIX,
    OFFSETS_PREFIX,
    GroupRecord,
    decode_group,
    group_key,
    group_of,
    offset_key,
    offset_of,
)
from millstream.broker.groups.settings import GroupSettings
from millstream.broker.groups.stream.assignors import ASSIGNORS, Assignor
from millstream.broker.groups.stream.classic import CONSUMER, ClassicGroup
from millstream.broker.groups.stream.classic_member import Converted, Join, Joined, Member, Synced
from millstream.broker.groups.stream.consumer_member import JOINING, Beat, BeatAnswer
from millstream.broker.groups.stream.migration import Migration
from millstream.broker.groups.stream.mixed import MixedGroup
from millstream.broker.groups.stream.offsets import (
    REMOVED_A_TURN,
    Committed,
    Fetched,
    GroupTopicPartition,
    Offsets,
    PartitionCommit,
    TopicCommit,
)
from millstream.broker.groups.stream.pattern import Pattern, pattern_of
from millstream.broker.groups.stream.topic_matches import TopicMatches
from millstream.broker.groups.turns import Turns
from millstream.broker.groups.view import NoQueues, QueuesView, TopicLike, TopicsView
from millstream.cluster.base import Cluster, Owns, Solo
from millstream.core.clock import Clock
from millstream.core.errors import Code, RequestError
from millstream.core.peer import peer_of
from millstream.core.promise import begin
from millstream.security.principal import ANONYMOUS, Principal
from millstream.stores.base import Delete, MetaStore

__all__ = [
    "Beat",
    "BeatAnswer",
    "Fetched",
    "GroupSettings",
    "Groups",
    "Join",
    "Joined",
    "PartitionCommit",
    "ShareBeat",
    "Synced",
    "TopicCommit",
    "TopicLike",
    "TopicsView",
]
LOOK_MS = 1_000
LOOK_UPS_A_STEP, NAMES_A_STEP = 16, 256
"""A member's topics per step (`turns.py`): with a new target, and without one."""
G = TypeVar("G", ClassicGroup, MixedGroup, ShareGroup)


class Groups:
    def __init__(
        self,
        meta: MetaStore,
        clock: Clock,
        topics: TopicsView,
        settings: GroupSettings | None = None,
        assignors: Mapping[str, Assignor] = ASSIGNORS,
        queues: QueuesView | None = None,
        cluster: Cluster | None = None,
    ) -> None:
        self._meta = meta
        self._cluster = cluster or Solo(0)
        self._cluster.serve_groups(self.adopt, self.release)
        self._clock = clock
        self._topics = topics
        self._settings = settings or GroupSettings()
        self._queues = queues or NoQueues()
        self._journal = Journal(meta, self._settings.writes_waiting_max, self._cluster)
        self._turns = Turns()
        self._matches = TopicMatches(topics, self._turns)
        context = GroupContext(self._journal, clock, topics, self._matches, self._settings, assignors, self._queues)
        self._kinds = Kinds(context, self._downgrade)
        self._migration = Migration(self._kinds, self._settings)
        self._offsets = Offsets(self._journal, clock, topics, self._settings.metadata_bytes_max)
        self._groups: dict[str, Group] = {}
        self._look_again_ms: dict[str, int] = {}
        """When `_make_room` may search the groups of an address again (empty: all groups), after it found none."""
        self._founders = Founders[str](
            "groups",
            self._settings.groups_per_peer_max,
            self._settings.groups_max,
            lambda group_id: group_id in self._groups,
        )
        self._is_closed = False
        self._has_new_topics = False
        self._is_following = False
        """Whether `_follow_topics` is running."""
        self._sweeper = Deadline(clock, self._sweep)
        self._unused_sweeper = Deadline(clock, self._drop_never_used)
        self._unwatch = topics.watch(self._topics_changed)

    async def start(self) -> None:
        """Loads this broker's groups. Load topics first: a broker alone drops offsets of missing topics."""
        await self._cluster.start()
        if isinstance(self._cluster, Solo):
            self._offsets.remove(self._offsets.orphans)
        self._sweeper.push(self._settings.offsets_check_ms)
        self._unused_sweeper.push(self._settings.unused_check_ms)

    async def adopt(self, owns: Owns) -> None:
        """Loads the stored state of some groups."""
        if not isinstance(self._cluster, Solo):  # a broker alone has opened all queues
            await self._queues.adopt(owns)
        for key, stored in await self._meta.list(GROUPS_PREFIX):
            group_id = group_of(key)
            if owns(group_id):
                self._groups[group_id] = self._kinds.restore(group_id, decode_group(stored.value))
        for key, stored in await self._meta.list(OFFSETS_PREFIX):
            if owns(offset_of(key)[0]):
                group_id = self._offsets.load(key, stored.value)
                if group_id not in self._groups:
                    self._groups[group_id] = self._kinds.classic(group_id, None)

    def release(self) -> None:
        """Other brokers coordinate the groups now: drops all state."""
        error = RequestError(Code.NOT_COORDINATOR, "another broker coordinates the group")
        groups, self._groups = self._groups, {}
        self._journal.drop_waiting(error)
        self._queues.release()
        self._offsets.clear()
        for group in groups.values():
            group.close(error)

    def close(self) -> None:
        """Fails waiting requests; clients find a new coordinator."""
        self._is_closed = True
        self._unwatch()
        self._sweeper.stop()
        self._unused_sweeper.stop()
        for group in self._groups.values():
            group.close(RequestError(Code.NOT_COORDINATOR, "the broker is stopping"))

    # Classic members

    async def join(self, request: Join) -> Joined:
        self._check_id(request.group_id)
        self._check_join(request)
        while True:
            self._check_owner(request.group_id, request.principal, request.member_id, request.instance_id)
            try:
                return await self._to_join(request).join(request)
            except Converted as converted:
                request = request._replace(member_id=converted.member_id)

    def _to_join(self, request: Join) -> ClassicGroup | MixedGroup:
        group = self._find(request.group_id)
        if isinstance(group, MixedGroup) and group.members:
            return group
        if isinstance(group, ShareGroup) and not group.vacant:
            raise RequestError(Code.INCONSISTENT_GROUP_PROTOCOL, f"{request.group_id} is a share group")
        if isinstance(group, ClassicGroup):
            return group
        if request.member_id:
            raise RequestError(Code.UNKNOWN_MEMBER_ID)
        return self._make(self._kinds.classic, request.group_id, request.client_host)

    async def sync(
        self,
        group_id: str,
        member_id: str,
        instance_id: str | None,
        generation: int,
        protocol: tuple[str | None, str | None],
        assignments: Mapping[str, bytes],
        principal: Principal = ANONYMOUS,
    ) -> Synced:
        self._check_owner(group_id, principal, member_id, instance_id)
        return await self._classic(group_id).sync(member_id, instance_id, generation, protocol, assignments)

    def heartbeat(
        self,
        group_id: str,
        member_id: str,
        instance_id: str | None,
        generation: int,
        principal: Principal = ANONYMOUS,
    ) -> None:
        self._check_owner(group_id, principal, member_id, instance_id)
        self._classic(group_id).heartbeat(member_id, instance_id, generation)

    def polling_member(self, group_id: str, member_id: str, principal: Principal) -> tuple[ClassicGroup, Member]:
        """A member that polls, and its group; raises UNKNOWN_MEMBER_ID."""
        self._check_owner(group_id, principal, member_id)
        group = self._classic(group_id)
        member = group.members.get(member_id) if isinstance(group, ClassicGroup) else None
        if not isinstance(group, ClassicGroup) or member is None or not member.planned:
            raise RequestError(Code.UNKNOWN_MEMBER_ID)
        return group, member

    def has_member(self, group_id: str, member_id: str) -> bool:
        group = self._groups.get(group_id)
        return group is not None and member_id in group.members

    def leave(self, group_id: str, members: Iterable[tuple[str, str | None]]) -> list[Code]:
        self._check_id(group_id)
        return [self._leave(self._groups.get(group_id), *member) for member in members]

    # Members of the consumer protocol

    async def consumer_heartbeat(self, beat: Beat) -> BeatAnswer:
        self._check_id(beat.group_id)
        beat.check()
        self._check_said(sum(map(len, beat.topics or ())), beat.member_id)
        # Match first: during the await a group may be dropped, converted or lost to another broker.
        pattern = await self._matched(beat)
        self._check_owner(beat.group_id, beat.principal, beat.member_id, beat.instance_id)
        group = self._find(beat.group_id)
        if isinstance(group, ShareGroup) and not group.vacant:
            raise RequestError(Code.GROUP_ID_NOT_FOUND, f"{beat.group_id} is a share group")
        if not isinstance(group, MixedGroup):
            if beat.epoch != JOINING:
                # Kafka returns GROUP_ID_NOT_FOUND, which is fatal to clients; this error makes them rejoin.
                raise RequestError(Code.UNKNOWN_MEMBER_ID)
            if isinstance(group, ClassicGroup) and group.members:
                group = self._groups[beat.group_id] = self._migration.upgrade(group, beat)
            else:
                group = self._make(self._kinds.consumer, beat.group_id, beat.client_host)
        return await group.beat(beat, pattern)

    async def _matched(self, beat: Beat) -> Pattern | None:
        """The pattern of a heartbeat, matched with all topics; raises if it is invalid."""
        if not beat.pattern or beat.epoch < JOINING:
            return None
        pattern = pattern_of(beat.pattern, self._settings.pattern_chars_max)
        await self._matches.prepare(pattern)
        self._cluster.check(beat.group_id)
        return pattern

    def _downgrade(self, group: MixedGroup) -> bool:
        classic = self._migration.downgrade(group) if self._groups.get(group.id) is group else None
        if classic is not None:
            self._groups[group.id] = classic
        return classic is not None

    # Members of share groups

    async def share_heartbeat(self, beat: ShareBeat) -> BeatAnswer:
        self._check_id(beat.group_id)
        beat.check()
        self._check_said(sum(map(len, beat.topics or ())), beat.member_id)
        self._check_owner(beat.group_id, beat.principal, beat.member_id)
        group = self._find(beat.group_id)
        if not isinstance(group, ShareGroup):
            if self.is_stream(beat.group_id):
                detail = f"group {beat.group_id} is not a queue (share group); choose another name, or delete it"
                raise RequestError(Code.GROUP_ID_NOT_FOUND, detail)
            if beat.epoch != JOINING:
                raise RequestError(Code.UNKNOWN_MEMBER_ID)
            group = self._make(self._kinds.share, beat.group_id, beat.client_host)
        return await group.beat(beat)

    def share_for(self, group_id: str, member_id: str, principal: Principal) -> ShareGroup:
        """The group of a member's share session."""
        self._check_owner(group_id, principal, member_id)
        return self.share(group_id)

    def share(self, group_id: str) -> ShareGroup:
        self._check_id(group_id)
        group = self._find(group_id)
        if isinstance(group, ShareGroup):
            return group
        reason = (
            "does not exist" if group is None else "is not a queue (share group); choose another name, or delete it"
        )
        raise RequestError(Code.GROUP_ID_NOT_FOUND, f"group {group_id} {reason}")

    # Offsets

    async def commit(
        self,
        group_id: str,
        member_id: str,
        instance_id: str | None,
        epoch: int,
        commits: Sequence[TopicCommit],
        client_host: str = "",
        *,
        may_be_missing: bool = False,
        principal: Principal = ANONYMOUS,
    ) -> list[list[Code]]:
        """`may_be_missing`: also keeps offsets of topics that do not exist, until the topic is created."""
        self._check_id(group_id, may_be_empty=True)

        def fence() -> None:
            self._check_owner(group_id, principal, member_id, instance_id)
            group = self._find(group_id)
            if group is None:
                if epoch >= 0:
                    raise RequestError(Code.ILLEGAL_GENERATION, f"there is no group {group_id}")
                group = self._make(self._kinds.classic, group_id, client_host)
            if isinstance(group, ClassicGroup):
                group.fence(member_id, instance_id, epoch, commits)
            else:
                group.fence(member_id, instance_id, epoch)

        codes = await self._offsets.commit(group_id, fence, commits, may_be_missing=may_be_missing)
        self._cluster.check(group_id)
        if group_id not in self._groups:  # deleted while this was in flight
            self._groups[group_id] = self._kinds.classic(group_id, None)
        return codes

    def fetch(
        self,
        group_id: str,
        topics: Sequence[tuple[str | UUID, Sequence[int]]] | None,
        member_id: str | None = None,
        epoch: int = -1,
    ) -> list[Fetched]:
        """Committed offsets of some partitions, or of all (`topics` is None)."""
        self._cluster.check(group_id)
        group = self._find(group_id)
        if group is not None:
            group.fence_read(member_id, epoch)
        return self._offsets.fetch(group_id, topics)

    async def delete_offsets(self, group_id: str, topics: Sequence[tuple[str, Sequence[int]]]) -> list[list[Code]]:
        self._cluster.check(group_id)
        codes: list[list[Code]] = []

        def choose() -> Iterator[GroupTopicPartition]:
            group = self._find(group_id)
            if group is None or isinstance(group, ShareGroup):
                raise RequestError(Code.GROUP_ID_NOT_FOUND)
            if group.members and group.protocol_type != CONSUMER:
                raise RequestError(Code.NON_EMPTY_GROUP)
            for name, partitions in topics:
                code = self._check_unused(group, name)
                codes.append([code] * len(partitions))
                if code == Code.NONE:
                    committed = self._offsets.of(group_id).get(name, {})
                    yield from ((group_id, name, partition) for partition in partitions if partition in committed)

        await self._offsets.remove(choose)
        return codes

    def committed(self) -> Iterator[tuple[str, str, int, int]]:
        """Group, topic, partition and offset of all commits: for lag and retention."""
        for (group_id, topic, partition), committed in self._offsets:
            yield group_id, topic, partition, committed.offset

    # Groups as a whole

    def describe(self, group_id: str) -> ClassicView:
        return self._of(ClassicGroup, group_id).describe()

    def consumer_describe(self, group_id: str) -> ConsumerView:
        return self._of(MixedGroup, group_id).describe()

    def _of(self, kind: type[G], group_id: str) -> G:
        self._cluster.check(group_id)
        group = self._groups.get(group_id)
        if isinstance(group, kind):
            return group
        reason = "does not exist" if group is None else f"is not a {kind.type.lower()} group"
        raise RequestError(Code.GROUP_ID_NOT_FOUND, f"group {group_id} {reason}")

    def topic_name(self, topic_id: UUID) -> str | None:
        topic = self._topics.by_id(topic_id)
        return None if topic is None else topic.name

    def list(self, states: Iterable[str] = (), types: Iterable[str] = ()) -> list[Listed]:
        """Groups in these states and of these types; empty means all."""
        wanted_states = {state.lower() for state in states}
        wanted_types = {kind.lower() for kind in types}
        for group_id in self._queues.names():
            self._find(group_id)
        listed = [
            Listed(each.id, each.protocol_type, each.state, each.type, len(each.members))
            for each in self._groups.values()
        ]
        return [
            each
            for each in listed
            if (not wanted_states or each.state.lower() in wanted_states)
            and (not wanted_types or each.type.lower() in wanted_types)
        ]

    async def delete(self, group_id: str) -> None:
        self._cluster.check(group_id)
        places: list[GroupTopicPartition] = []
        found = self._find(group_id)
        if isinstance(found, ShareGroup) and not found.vacant and not found.members:
            await self._queues.delete(group_id)

        def check() -> None:
            group = self._groups.get(group_id)
            if group is None:
                raise RequestError(Code.GROUP_ID_NOT_FOUND)
            if group.members:
                raise RequestError(Code.NON_EMPTY_GROUP)

        def is_due(*_: object) -> bool:
            check()
            return True

        def prepare() -> list[Delete]:
            check()
            places.extend(place for place, _ in self._offsets.places(group_id))
            return [Delete(group_key(group_id)), *(Delete(offset_key(*place)) for place in places)]

        def apply() -> None:
            for place in places:
                self._offsets.forget(place)
            group = self._groups.get(group_id)
            if group is not None and not group.members:  # a member that joined during the write keeps the group
                self._forget(group)

        if sum(map(len, self._offsets.of(group_id).values())) > REMOVED_A_TURN:
            await self._offsets.remove_due([group_id], is_due)
        await self._journal.submit(Entry(prepare, apply, settled=True))

    # Find and create

    def _check_id(self, group_id: str, *, may_be_empty: bool = False) -> None:
        """Old clients may commit offsets to the empty id, as in Kafka."""
        if not group_id and not may_be_empty:
            raise RequestError(Code.INVALID_GROUP_ID)
        if len(group_id.encode()) > self._settings.group_id_bytes_max:
            raise RequestError(
                Code.INVALID_GROUP_ID, f"a group id has {self._settings.group_id_bytes_max} bytes at most"
            )
        self._cluster.check(group_id)

    def _check_join(self, request: Join) -> None:
        settings = self._settings
        if not settings.session_timeout_min_ms <= request.session_ms <= settings.session_timeout_max_ms:
            raise RequestError(Code.INVALID_SESSION_TIMEOUT)
        if not request.protocol_type or not request.protocols:
            raise RequestError(Code.INCONSISTENT_GROUP_PROTOCOL, "the member names no protocol")
        self._check_said(sum(len(name) + len(metadata) for name, metadata in request.protocols), request.member_id)

    def _check_said(self, size: int, member_id: str) -> None:
        """The broker keeps a member's metadata as long as the member, so the total has a bound."""
        settings = self._settings
        if size > settings.protocols_bytes_max:
            raise RequestError(Code.INVALID_REQUEST, "the member's metadata is too large")
        if size <= settings.small_protocols_bytes:
            return
        others = (
            member.said_bytes
            for group in self._groups.values()
            for member in group.members.values()
            if member.id != member_id
        )
        if size + sum(others) > settings.all_protocols_bytes_max:
            detail = f"the metadata of all groups' members exceeds {settings.all_protocols_bytes_max} bytes"
            raise RequestError(Code.GROUP_MAX_SIZE_REACHED, detail)

    def _check_owner(self, group_id: str, principal: Principal, member_id: str, instance_id: str | None = None) -> None:
        """Raises if the request names a member of another principal."""
        group = self._groups.get(group_id)
        if group is None:
            return
        named = (group.members.get(member_id), group.holder(instance_id) if instance_id is not None else None)
        if any(member is not None and member.principal != principal for member in named):
            raise RequestError(Code.UNKNOWN_MEMBER_ID)

    def _classic(self, group_id: str) -> ClassicGroup | MixedGroup:
        """The group of a member of the classic protocol."""
        self._check_id(group_id)
        group = self._groups.get(group_id)
        if group is None or isinstance(group, ShareGroup):
            raise RequestError(Code.UNKNOWN_MEMBER_ID)
        return group

    def _find(self, group_id: str) -> Group | None:
        """The group of this id. A queue that has no group yet gets one."""
        group, queue = self._groups.get(group_id), self._queues.get(group_id)
        if queue is not None and queue.is_durable and not isinstance(group, ShareGroup):
            group = self._groups[group_id] = self._kinds.share(group_id, None)
        return group

    def is_stream(self, group_id: str) -> bool:
        """Whether the id belongs to a group that commits offsets."""
        group = self._groups.get(group_id)
        if group is None or isinstance(group, ShareGroup):
            return False
        return not group.vacant or bool(self._offsets.of(group_id))

    def _make(self, kind: Callable[[str, GroupRecord | None], G], group_id: str, client_host: str) -> G:
        group = kind(group_id, self._inherit(group_id, client_host))
        self._groups[group_id] = group
        return group

    def _inherit(self, group_id: str, client_host: str) -> GroupRecord | None:
        """Makes room for a group. An empty group of another type passes on its epoch."""
        group = self._groups.get(group_id)
        if group is not None:
            group.close(RequestError(Code.UNKNOWN_MEMBER_ID))
            protocol_type = "" if isinstance(group, ShareGroup) else group.protocol_type
            return GroupRecord(group.type, group.epoch, protocol_type, group.emptied_ms)
        if not self._founders.have_room(client_host):
            self._make_room(client_host)
        self._founders.check(client_host)
        if len(self._groups) >= self._settings.groups_max:
            self._make_room()
        if len(self._groups) >= self._settings.groups_max:
            text = f"the broker has {self._settings.groups_max} groups, the limit; delete some, or raise groups_max"
            raise RequestError(Code.POLICY_VIOLATION, text)
        self._founders.add(group_id, client_host)
        return None

    def _leave(self, group: Group | None, member_id: str, instance_id: str | None) -> Code:
        try:
            if isinstance(group, ClassicGroup):
                group.leave(member_id, instance_id)
            elif group is not None:
                group.remove(member_id, instance_id)
            else:
                return Code.UNKNOWN_MEMBER_ID
        except RequestError as error:
            return error.code
        return Code.NONE

    # Topic changes and expiry

    def _check_unused(self, group: Group, topic: str) -> Code:
        if self._topics.get(topic) is None:
            return Code.UNKNOWN_TOPIC_OR_PARTITION
        return Code.GROUP_SUBSCRIBED_TO_TOPIC if group.subscribes(topic) else Code.NONE

    def _topics_changed(self) -> None:
        if self._offsets.lost_a_topic():
            begin(self._offsets.remove_left_behind())
        self._matches.topics_changed()
        self._has_new_topics = True
        if not self._is_following:
            begin(self._follow_topics())

    async def _follow_topics(self) -> None:
        """Notifies every group: at once, or in several turns if it is much work."""
        self._is_following = True
        try:
            while self._has_new_topics and not self._is_closed:
                self._has_new_topics = False
                await self._matches.catch_up()
                await self._tell_groups()
        finally:
            self._is_following = False

    async def _tell_groups(self) -> None:
        """A group computes its target once its epoch is durable. At the end of a turn, waits for that."""
        topics = sum(1 for _ in self._topics.names())
        for group in list(self._groups.values()):
            if self._groups.get(group.id) is not group or not group.members:
                continue
            change = group.topics_changed()
            names = len(group.members) * topics
            if self._turns.spend(1 + names // (NAMES_A_STEP if change is None else LOOK_UPS_A_STEP)):
                if change is not None:
                    with contextlib.suppress(RequestError):  # the next heartbeats retry
                        await change
                await self._turns.next()

    def _sweep(self) -> None:
        self._sweeper.push(self._settings.offsets_check_ms)
        begin(self._expire())

    async def _expire(self) -> None:
        limit_ms = self._clock.now_ms() - self._settings.offsets_retention_ms

        def is_due(group_id: str, _: str, committed: Committed) -> bool:
            group = self._groups.get(group_id)
            if group is None or group.members or (group.emptied_ms or 0) > limit_ms:
                return False
            return committed.committed_ms <= limit_ms

        await self._offsets.remove_due(self._groups, is_due)
        self._drop_unused()

    def _make_room(self, client_host: str = "") -> None:
        """Drops unused groups, however recent: all, or those of an address that reached its limit. After an
        unsuccessful search, waits `LOOK_MS` before the next.
        """
        now_ms, peer = self._clock.now_ms(), peer_of(client_host)
        if now_ms < self._look_again_ms.get(peer, 0):
            return
        made = self._founders.made_by(client_host) if client_host else self._groups
        unused = list(self._unused(made))
        self._drop(unused)
        self._look_again_ms = {each: at_ms for each, at_ms in self._look_again_ms.items() if at_ms > now_ms}
        if not unused:
            self._look_again_ms[peer] = now_ms + LOOK_MS

    def _drop_unused(self) -> None:
        limit_ms = self._clock.now_ms() - self._settings.offsets_retention_ms
        self._drop([each for each in self._unused(self._groups) if (each.emptied_ms or 0) <= limit_ms])

    def _drop_never_used(self) -> None:
        self._unused_sweeper.push(self._settings.unused_check_ms)
        self._drop([each for each in self._unused(self._groups) if each.emptied_ms is None and not each.epoch])

    def _unused(self, group_ids: Iterable[str]) -> Iterator[Group]:
        groups = (self._groups[each] for each in group_ids if each in self._groups)
        return (group for group in groups if group.vacant and not self._offsets.of(group.id))

    def _drop(self, groups: Sequence[Group]) -> None:
        dropped = [group.id for group in groups]
        for group_id in dropped:
            self._forget(self._groups[group_id])
        if dropped:
            self._journal.submit(
                Entry(lambda: [Delete(group_key(each)) for each in dropped if each not in self._groups])
            )

    def _forget(self, group: Group) -> None:
        group.close(RequestError(Code.GROUP_ID_NOT_FOUND))
        del self._groups[group.id]
