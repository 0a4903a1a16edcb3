"""A session: one client's way into the broker, and the place where its rights are checked.

A session knows who asks: the principal, the client id, the address and the door. It has one verb per thing that can be
asked. A verb checks the right to do it, then asks the broker; the broker itself checks no rights.

Rules
-----
1. A resource that the principal may not use is refused before the broker looks it up, so an error does not tell whether
   a named topic or group exists. An unknown topic id is reported as unknown: ids cannot be guessed.
2. Members of groups, share sessions and fetch sessions belong to the principal that created them.
3. Answers of the authorizer may be cached until its `changes` differ, and only for the same principal and host.
4. A topic, partition, inlet or queue that a verb returned stands for the right that was checked. Doors that keep one
   drop it when `changes` differs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING
from uuid import UUID

from millstream.broker.fetch import Fetch, Wanted
from millstream.broker.groups.described import ClassicView, ConsumerView, Listed
from millstream.broker.groups.groups import Beat, BeatAnswer, Fetched, Join, Joined, ShareBeat, Synced, TopicCommit
from millstream.broker.groups.queue.partition import QueuePartition
from millstream.broker.groups.queue.queue import Queue
from millstream.broker.groups.queue.share import ShareGroup
from millstream.broker.inlet import Inlet
from millstream.broker.outlet import Taken
from millstream.broker.partition import Partition
from millstream.broker.topics import Topic
from millstream.cluster.coordinator import coordinate
from millstream.core.errors import Code, RequestError
from millstream.core.promise import Promise
from millstream.records.record import Record
from millstream.security.principal import ANONYMOUS, Principal
from millstream.security.rights import CLUSTER_NAME, Kind, Operation

if TYPE_CHECKING:
    from millstream.broker.broker import Broker

__all__ = ["Inlet", "Partition", "Queue", "QueuePartition", "Session", "Topic"]


class Session:
    __slots__ = ("_authorizer", "_topics", "broker", "client_id", "door", "host", "principal")

    def __init__(
        self, broker: Broker, door: str, host: str, *, principal: Principal = ANONYMOUS, client_id: str = ""
    ) -> None:
        self.broker = broker
        self.door = door
        self.host = host
        self.principal = principal
        self.client_id = client_id
        self._authorizer = broker.authorizer
        self._topics = broker.topics

    # Rights

    def allows(self, operation: Operation, kind: Kind, name: str) -> bool:
        return self._authorizer.allows(self.principal, self.host, operation, kind, name)

    def check(self, operation: Operation, kind: Kind, name: str) -> None:
        if not (self._authorizer.is_open or self.allows(operation, kind, name)):
            detail = f"{self.principal} may not {operation.name.lower().replace('_', ' ')} {kind.name.lower()} {name}"
            raise RequestError(kind.refusal, detail)

    def _group(self, operation: Operation, group_id: str) -> None:
        self.check(operation, Kind.GROUP, group_id)

    @property
    def changes(self) -> int:
        """Grows with every change of topics or rights."""
        return self._topics.changes + self._authorizer.changes

    @property
    def scope(self) -> Hashable:
        """Equal for sessions with equal rights."""
        return self._authorizer.scope(self.principal, self.host)

    # Topics and records

    def topic(self, key: str | UUID, operation: Operation) -> Topic:
        """The topic with this name or id."""
        if isinstance(key, str):
            self.check(operation, Kind.TOPIC, key)
        topic = self.broker.topics.find(key)
        if topic is None:
            code = Code.UNKNOWN_TOPIC_OR_PARTITION if isinstance(key, str) else Code.UNKNOWN_TOPIC_ID
            raise RequestError(code, f"there is no topic {key}")
        if not isinstance(key, str):
            self.check(operation, Kind.TOPIC, topic.name)
        return topic

    def partition(self, key: str | UUID, index: int, operation: Operation) -> Partition:
        topic = self.topic(key, operation)
        if not 0 <= index < len(topic.partitions):
            raise RequestError(Code.UNKNOWN_TOPIC_OR_PARTITION, f"there is no partition {index} of topic {topic.name}")
        return topic.partitions[index]

    def fetch(self, wanted: list[Wanted], bytes_min: int, bytes_max: int, committed: bool = False) -> Fetch:
        denied: frozenset[str | UUID] = frozenset()
        if not self._authorizer.is_open:
            denied = frozenset(key for key in {one.topic for one in wanted} if not self._may_read(key))
        return Fetch(self.broker.topics, wanted, bytes_min, bytes_max, denied, committed)

    def _may_read(self, key: str | UUID) -> bool:
        if isinstance(key, str):
            return self.allows(Operation.READ, Kind.TOPIC, key)
        topic = self.broker.topics.by_id(key)
        return topic is None or self.allows(Operation.READ, Kind.TOPIC, topic.name)

    # Members of groups

    async def join(self, request: Join) -> Joined:
        self._group(Operation.READ, request.group_id)
        return await self.broker.groups.join(
            request._replace(principal=self.principal, client_id=self.client_id, client_host=self.host)
        )

    async def sync(
        self,
        group_id: str,
        member_id: str,
        instance_id: str | None,
        generation: int,
        protocol: tuple[str | None, str | None],
        assignments: Mapping[str, bytes],
    ) -> Synced:
        self._group(Operation.READ, group_id)
        return await self.broker.groups.sync(
            group_id, member_id, instance_id, generation, protocol, assignments, self.principal
        )

    def heartbeat(self, group_id: str, member_id: str, instance_id: str | None, generation: int) -> None:
        self._group(Operation.READ, group_id)
        self.broker.groups.heartbeat(group_id, member_id, instance_id, generation, self.principal)

    def leave(self, group_id: str, members: Iterable[tuple[str, str | None]]) -> list[Code]:
        self._group(Operation.READ, group_id)
        return self.broker.groups.leave(group_id, members)

    async def consumer_heartbeat(self, beat: Beat) -> BeatAnswer:
        self._group(Operation.READ, beat.group_id)
        beat = replace(beat, principal=self.principal, client_id=self.client_id, client_host=self.host)
        return await self.broker.groups.consumer_heartbeat(beat)

    async def share_heartbeat(self, beat: ShareBeat) -> BeatAnswer:
        self._group(Operation.READ, beat.group_id)
        beat = replace(beat, principal=self.principal, client_id=self.client_id, client_host=self.host)
        return await self.broker.groups.share_heartbeat(beat)

    def share_group(self, group_id: str, member_id: str) -> ShareGroup:
        """The group of a member's share session."""
        self._group(Operation.READ, group_id)
        return self.broker.groups.share_for(group_id, member_id, self.principal)

    # Offsets

    async def commit(
        self,
        group_id: str,
        member_id: str,
        instance_id: str | None,
        epoch: int,
        commits: Sequence[TopicCommit],
        *,
        may_be_missing: bool = False,
    ) -> list[list[Code]]:
        self._group(Operation.READ, group_id)
        return await self.broker.groups.commit(
            group_id,
            member_id,
            instance_id,
            epoch,
            commits,
            self.host,
            may_be_missing=may_be_missing,
            principal=self.principal,
        )

    def committed(
        self,
        group_id: str,
        topics: Sequence[tuple[str | UUID, Sequence[int]]] | None,
        member_id: str | None = None,
        epoch: int = -1,
    ) -> list[Fetched]:
        self._group(Operation.DESCRIBE, group_id)
        return self.broker.groups.fetch(group_id, topics, member_id, epoch)

    async def delete_offsets(self, group_id: str, topics: Sequence[tuple[str, Sequence[int]]]) -> list[list[Code]]:
        self._group(Operation.DELETE, group_id)
        return await self.broker.groups.delete_offsets(group_id, topics)

    # Groups as a whole

    def describe_classic(self, group_id: str) -> ClassicView:
        self._group(Operation.DESCRIBE, group_id)
        return self.broker.groups.describe(group_id)

    def describe_consumer(self, group_id: str) -> ConsumerView:
        self._group(Operation.DESCRIBE, group_id)
        return self.broker.groups.consumer_describe(group_id)

    def describe_share(self, group_id: str) -> ShareGroup:
        self._group(Operation.DESCRIBE, group_id)
        return self.broker.groups.share(group_id)

    def list_groups(self, states: Iterable[str] = (), types: Iterable[str] = ()) -> list[Listed]:
        listed = self.broker.groups.list(states, types)
        return [each for each in listed if self.allows(Operation.DESCRIBE, Kind.GROUP, each.group_id)]

    async def delete_group(self, group_id: str) -> None:
        self._group(Operation.DELETE, group_id)
        await self.broker.groups.delete(group_id)

    # Single records

    def find(self, name: str, operation: Operation) -> Topic | None:
        """The topic with this name, if there is one."""
        self.check(operation, Kind.TOPIC, name)
        return self._topics.get(name)

    async def ensure_topic(
        self, name: str, operation: Operation, partition_count: int, overrides: Mapping[str, str]
    ) -> Topic:
        """The topic, created if it is missing and auto-creation is on."""
        topic = self.find(name, operation)
        if topic is None:
            self._check_creation(name)
            topic = await self._topics.ensure(name, partition_count, overrides)
        return topic

    async def create_topic(self, name: str, partition_count: int, overrides: Mapping[str, str]) -> Topic:
        self._check_creation(name)
        return await self._topics.create(name, partition_count, overrides)

    def _check_creation(self, name: str) -> None:
        if not self.allows(Operation.CREATE, Kind.CLUSTER, CLUSTER_NAME):
            self.check(Operation.CREATE, Kind.TOPIC, name)

    async def delete_topic(self, name: str) -> None:
        self.check(Operation.DELETE, Kind.TOPIC, name)
        await self.broker.delete_topic(name)

    def topic_names(self) -> list[str]:
        is_open = self._authorizer.is_open
        return [each for each in self._topics.names() if is_open or self.allows(Operation.DESCRIBE, Kind.TOPIC, each)]

    def watch_topics(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Calls back after a topic was created, deleted or grown; the result stops it."""
        return self._topics.watch(callback)

    def has(self, topic: Topic) -> bool:
        """Whether the topic still exists."""
        return self._topics.by_id(topic.id) is topic

    def inlet(self, partition: Partition) -> Inlet:
        """Takes records into a partition that the session may write."""
        return self.broker.inlet(partition)

    def read(
        self, partition: Partition, offset: int, bytes_max: int, *, head_bytes: int = 0, count_max: int | None = None
    ) -> Awaitable[Taken]:
        """Records of a partition that the session may read; see `Outlet.take`."""
        return self.broker.outlet.take(partition.log, offset, bytes_max, head_bytes=head_bytes, count_max=count_max)

    async def coordinate(self, group_id: str, operation: Operation = Operation.READ) -> None:
        """Raises `RequestError` unless this broker coordinates the group, or fanout id, from now on."""
        self._group(operation, group_id)
        await coordinate(self.broker.cluster, group_id)

    # Queues

    def open_queue(
        self, group_id: str, *, durable: bool, settings: Mapping[str, str] | None, door_defaults: Mapping[str, str]
    ) -> Queue:
        """Finds or creates a group with the `queue` discipline. A private one (not `durable`) needs no right."""
        if durable:
            self._group(Operation.READ, group_id)
        return self.broker.queues.open(
            group_id, durable=durable, settings=settings, door_defaults=door_defaults, client_host=self.host
        )

    def check_lease(self, queue: Queue, topic: Topic) -> None:
        """Raises unless the session may lease and acknowledge records of this topic in this group."""
        if self._authorizer.is_open:
            return
        self.check(Operation.READ, Kind.TOPIC, topic.name)
        if queue.is_durable:
            self._group(Operation.READ, queue.id)

    # Cursors

    def cursor_position(self, fanout_id: str, topic: Topic) -> int:
        self._group(Operation.DESCRIBE, fanout_id)
        return self.broker.cursors.position(fanout_id, topic)

    def read_cursor(
        self, fanout_id: str, topic: Topic, bytes_max: int, count_max: int | None = None
    ) -> Promise[list[Record]]:
        """The next records of a topic that the session may read; see `Cursors.read`."""
        self._group(Operation.READ, fanout_id)
        return self.broker.cursors.read(fanout_id, topic, bytes_max, count_max, self.host)
