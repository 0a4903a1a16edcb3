"""A session: one client's way into the broker, and the place where its rights are checked.

A session knows who asks: the principal, the client id, the address and the door. It has one verb per thing that can be
asked. A verb checks the right to do it, then asks the broker; the broker itself checks no rights. Verbs that Kafka's
administrators use are grouped by noun: `admin` (topics and the cluster), `configs` (settings), `peers` (other brokers).
Operations and resources are those of Kafka's own APIs.

Rules
-----
1. A resource that the principal may not use is refused before the broker looks it up, so an error does not tell whether
   a named topic or group exists. An unknown topic id is reported as unknown: ids cannot be guessed.
2. Members of groups, share sessions and fetch sessions belong to the principal that created them.
3. Answers of the authorizer may be cached until its `changes` differ, and only for the same principal and host.
4. A topic, partition, inlet or queue that a verb returned stands for the right that was checked. Doors that keep one
   drop it when `changes` differs.
5. `partition` and `fetch` refuse a partition that another broker leads, if the cluster has leaders. Rule 4 covers a
   leadership too: a move of a leader grows `changes`.
6. There are no quotas yet. Sizes are known only after these verbs: bytes in where a door counts `metrics.records_in`,
   bytes out where it encodes its answer. A charge belongs there, as a verb `charge(operation, size) -> delay` here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol
from uuid import UUID

from millstream.broker.admin import Admin
from millstream.broker.configs import Configs
from millstream.broker.door_register import Registered
from millstream.broker.fetch import NOTHING_REFUSED, Fetch, Wanted
from millstream.broker.groups.described import ClassicView, ConsumerView, Listed, ShareView
from millstream.broker.groups.exclusive import ExclusiveMember, ExclusiveSettings
from millstream.broker.groups.groups import Beat, BeatAnswer, Fetched, Join, Joined, ShareBeat, Synced, TopicCommit
from millstream.broker.groups.queue import share_fetch
from millstream.broker.groups.queue.partition import QueuePartition
from millstream.broker.groups.queue.queue import Queue
from millstream.broker.groups.queue.settings import lease_ms
from millstream.broker.groups.queue.share import ShareGroup
from millstream.broker.groups.queue.share_fetch import ShareFetch, TopicIdPartition, TopicsById
from millstream.broker.groups.queue.verbs import Answer, Member
from millstream.broker.groups.stream import polling
from millstream.broker.groups.stream.offsets import NO_TOPIC
from millstream.broker.health import Health
from millstream.broker.inlet import Inlet
from millstream.broker.outlet import Taken
from millstream.broker.partition import Partition
from millstream.broker.peers import Peers
from millstream.broker.topics import Topic
from millstream.cluster.base import Leadership, Node
from millstream.cluster.coordinator import coordinate
from millstream.core.errors import Code, RequestError
from millstream.core.promise import Promise
from millstream.records.record import Record
from millstream.security.principal import ANONYMOUS, Principal
from millstream.security.rights import CLUSTER_NAME, OPERATIONS, Kind, Operation

if TYPE_CHECKING:
    from millstream.broker.broker import Broker

__all__ = ["Inlet", "Partition", "Queue", "QueuePartition", "Session", "Sessions", "ShareGroup", "Topic"]

_ALL = {kind: sum(1 << each for each in operations) for kind, operations in OPERATIONS.items()}


class Counted(Protocol):
    changes: int


class Session:
    __slots__ = (
        "_authorizer", "_broker", "_leaders", "_topics", "client_id", "clock", "config", "door", "host", "metrics",
        "principal",
    )  # fmt: skip

    def __init__(
        self, broker: Broker, door: str, host: str, *, principal: Principal = ANONYMOUS, client_id: str = ""
    ) -> None:
        self._broker = broker
        self.door = door
        self.host = host
        self.principal = principal
        self.client_id = client_id
        self._authorizer = broker.authorizer
        self._topics = broker.topics
        self._leaders = broker.cluster if broker.cluster.has_leaders else None
        """None: all brokers of the cluster serve all partitions."""
        self.clock = broker.clock
        self.config = broker.config
        self.metrics = broker.metrics

    # Rights

    def allows(self, operation: Operation, kind: Kind, name: str) -> bool:
        return self._authorizer.allows(self.principal, self.host, operation, kind, name)

    def check(self, operation: Operation, kind: Kind, name: str) -> None:
        if not (self._authorizer.is_open or self.allows(operation, kind, name)):
            detail = f"{self.principal} may not {operation.name.lower().replace('_', ' ')} {kind.name.lower()} {name}"
            raise RequestError(kind.refusal, detail)

    def cluster_code(self, operation: Operation) -> Code:
        """NONE, or the refusal."""
        kind = Kind.CLUSTER
        return Code.NONE if self.allows(operation, kind, CLUSTER_NAME) else kind.refusal

    def operations(self, kind: Kind, name: str = CLUSTER_NAME) -> int:
        """What the principal may do with a resource: a bit for each operation (KIP-430)."""
        if self._authorizer.is_open:
            return _ALL[kind]
        return sum(1 << each for each in OPERATIONS[kind] if self.allows(each, kind, name))

    def _group(self, operation: Operation, group_id: str) -> None:
        self.check(operation, Kind.GROUP, group_id)

    @property
    def changes(self) -> int:
        """Grows with every change of topics or rights."""
        return self._topics.changes + self._authorizer.changes

    @property
    def counts(self) -> tuple[Counted, Counted]:
        """Their sum is `changes`: for code that compares it thousands of times a second."""
        return self._topics, self._authorizer

    @property
    def scope(self) -> Hashable:
        """Equal for sessions with equal rights."""
        return self._authorizer.scope(self.principal, self.host)

    def _denies(self, operation: Operation, topic: str | UUID) -> bool:
        """Whether the principal may not do this to a topic; an unknown id is not denied."""
        if self._authorizer.is_open:
            return False
        if isinstance(topic, UUID):
            found = self._broker.topics.by_id(topic)
            return found is not None and not self.allows(operation, Kind.TOPIC, found.name)
        return not self.allows(operation, Kind.TOPIC, topic)

    def _check_described(self, topics: Iterable[str]) -> None:
        """Members and subscriptions name topics: all of them must be known to the principal, as in Kafka."""
        if not self._authorizer.is_open:
            for name in topics:
                self.check(Operation.DESCRIBE, Kind.TOPIC, name)

    # Topics and records

    def topic(self, key: str | UUID, operation: Operation) -> Topic:
        """The topic with this name or id."""
        if isinstance(key, str):
            self.check(operation, Kind.TOPIC, key)
        topic = self._broker.topics.find(key)
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
        if self._leaders is not None and (leader := self._led_elsewhere(topic.id, index)) is not None:
            raise RequestError(Code.NOT_LEADER_OR_FOLLOWER, f"broker {leader} leads {topic.name}-{index}")
        return topic.partitions[index]

    def _led_elsewhere(self, topic_id: UUID, index: int) -> int | None:
        """The other broker that leads a partition."""
        leaderships = self.leaderships(topic_id)
        leader = leaderships[index % len(leaderships)].leader
        return None if leader == self.node_id else leader

    def topics(self) -> list[Topic]:
        """The topics that the principal may describe."""
        topics = list(self._broker.topics)
        if self._authorizer.is_open:
            return topics
        return [topic for topic in topics if self.allows(Operation.DESCRIBE, Kind.TOPIC, topic.name)]

    def missing_topics(self, names: Iterable[str]) -> list[str]:
        """The names among these that `ensure_topic` would create."""
        topics = self._broker.topics
        if not topics.auto_create:
            return []
        return [name for name in names if topics.get(name) is None and not self._denies(Operation.DESCRIBE, name)]

    def find(self, name: str, operation: Operation) -> Topic | None:
        """The topic with this name, if there is one."""
        if not self._authorizer.is_open:
            self.check(operation, Kind.TOPIC, name)
        return self._topics.get(name)

    async def ensure_topic(
        self,
        name: str,
        operation: Operation,
        partition_count: int | None = None,
        overrides: Mapping[str, str] | None = None,
    ) -> Topic:
        """The topic, created if it is missing and auto-creation is on."""
        topic = self.find(name, operation)
        if topic is None:
            self.admin.check_create(name)
            topic = await self._topics.ensure(name, partition_count, overrides)
        return topic

    async def follow(self, name: str, operation: Operation) -> Topic | None:
        """As `find`, from the store: another broker may have just created or grown the topic."""
        self.check(operation, Kind.TOPIC, name)
        return await self._topics.follow(name)

    async def refresh_topics(self) -> None:
        """Loads all topics as they are in the store now."""
        await self._topics.refresh()

    def watch_topics(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Calls back after a topic was created, deleted or grown; the result stops it."""
        return self._topics.watch(callback)

    def has(self, topic: Topic) -> bool:
        """Whether the topic still exists."""
        return self._topics.by_id(topic.id) is topic

    def fetch(self, wanted: list[Wanted], bytes_min: int, bytes_max: int, committed: bool = False) -> Fetch:
        refused = NOTHING_REFUSED
        if self._leaders is not None or not self._authorizer.is_open:
            refused = self._refused(wanted)
        return Fetch(self._topics, wanted, bytes_min, bytes_max, refused, committed)

    def _refused(self, wanted: Iterable[Wanted]) -> dict[Wanted, Code]:
        """What a fetch may not read here, and why."""
        denied = {key for key in {one.topic for one in wanted} if self._denies(Operation.READ, key)}
        refused = {one: Kind.TOPIC.refusal for one in wanted if one.topic in denied} if denied else {}
        for one in wanted if self._leaders is not None else ():
            topic = self._topics.find(one.topic)
            if one not in refused and topic is not None and self._led_elsewhere(topic.id, one.partition) is not None:
                refused[one] = Code.NOT_LEADER_OR_FOLLOWER
        return refused

    async def producer_id(self) -> int:
        """A new id for an idempotent producer (KIP-679: the right to write to any topic is enough)."""
        if not self._authorizer.allows_any(self.principal, self.host, Operation.WRITE, Kind.TOPIC):
            self.check(Operation.IDEMPOTENT_WRITE, Kind.CLUSTER, CLUSTER_NAME)
        return await self._broker.producer_ids.take()

    # Members of groups

    async def join(self, request: Join) -> Joined:
        self._group(Operation.READ, request.group_id)
        return await self._broker.groups.join(
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
        return await self._broker.groups.sync(
            group_id, member_id, instance_id, generation, protocol, assignments, self.principal
        )

    def heartbeat(self, group_id: str, member_id: str, instance_id: str | None, generation: int) -> None:
        self._group(Operation.READ, group_id)
        self._broker.groups.heartbeat(group_id, member_id, instance_id, generation, self.principal)

    def leave(self, group_id: str, members: Iterable[tuple[str, str | None]]) -> list[Code]:
        self._group(Operation.READ, group_id)
        return self._broker.groups.leave(group_id, members)

    async def consumer_heartbeat(self, beat: Beat) -> BeatAnswer:
        self._group(Operation.READ, beat.group_id)
        self._check_described(beat.topics or ())
        beat = replace(beat, principal=self.principal, client_id=self.client_id, client_host=self.host)
        return await self._broker.groups.consumer_heartbeat(beat)

    async def share_heartbeat(self, beat: ShareBeat) -> BeatAnswer:
        self._group(Operation.READ, beat.group_id)
        self._check_described(beat.topics or ())
        beat = replace(beat, principal=self.principal, client_id=self.client_id, client_host=self.host)
        return await self._broker.groups.share_heartbeat(beat)

    # Records of share groups

    def share_group(self, group_id: str, member_id: str) -> ShareGroup:
        """The group of a member's new share session."""
        self._group(Operation.READ, group_id)
        return self._broker.groups.share_for(group_id, member_id, self.principal)

    def check_share(self, group_id: str) -> None:
        """For every request of a share session: raises if the group is read elsewhere by now, or may not be read."""
        self._group(Operation.READ, group_id)
        try:
            self._broker.cluster.check(group_id)
        except RequestError as error:  # share consumers know this code, and start over
            raise RequestError(Code.SHARE_SESSION_NOT_FOUND, f"{error.detail}; open another session") from error

    def share_fetch(
        self,
        group: ShareGroup,
        queue: Queue,
        seat: Member,
        places: Sequence[TopicIdPartition],
        records_max: int,
        bytes_max: int,
    ) -> ShareFetch:
        return ShareFetch(queue, seat, group.lines, self._readable(), places, records_max, bytes_max)

    def acknowledge(
        self, queue: Queue, seat: Member, answers: Mapping[TopicIdPartition, Sequence[Answer]]
    ) -> dict[TopicIdPartition, Promise[None]]:
        return share_fetch.acknowledge(queue, seat, self._readable(), answers)

    def lease_ms(self, queue: Queue, topics: Iterable[UUID]) -> int:
        """The shortest lease of these topics."""
        found = (self._broker.topics.by_id(each) for each in topics)
        return lease_ms(queue.overrides, (topic.settings for topic in found if topic is not None))

    def _readable(self) -> TopicsById:
        return self._broker.topics if self._authorizer.is_open else _Readable(self)

    # Members that poll

    async def subscribe(self, name: str, group_id: str) -> polling.Subscribed:
        """A new member of a group, which reads a topic by `poll`."""
        topic = self.topic(name, Operation.READ)
        await self.coordinate(group_id)
        return await self._broker.polling.subscribe(topic, group_id, self.principal, self.client_id, self.host)

    async def poll(self, name: str, group_id: str, member_id: str, size: polling.Size) -> polling.Answer:
        """Commits what the member's last poll returned, and reads on."""
        topic = self.topic(name, Operation.READ)
        await self.coordinate(group_id)
        return await self._broker.polling.poll(topic, group_id, member_id, self.principal, size)

    async def unsubscribe(self, name: str, group_id: str, member_id: str) -> None:
        self.check(Operation.READ, Kind.TOPIC, name)
        await self.coordinate(group_id)
        self._broker.polling.unsubscribe(name, group_id, member_id, self.principal)

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

        def store(commits: Sequence[TopicCommit]) -> Awaitable[list[list[Code]]]:
            return self._broker.groups.commit(
                group_id,
                member_id,
                instance_id,
                epoch,
                commits,
                self.host,
                may_be_missing=may_be_missing,
                principal=self.principal,
            )

        if self._authorizer.is_open:
            return await store(commits)
        allowed = [each for each in commits if not self._denies(Operation.READ, each.topic)]
        codes: list[list[Code]] = []
        if allowed or not commits:
            codes = await store(allowed)
        known = dict(zip(map(id, allowed), codes, strict=True))
        refusal = Kind.TOPIC.refusal
        return [known.get(id(each)) or [refusal] * len(each.partitions) for each in commits]

    def committed(
        self,
        group_id: str,
        topics: Sequence[tuple[str | UUID, Sequence[int]]] | None,
        member_id: str | None = None,
        epoch: int = -1,
    ) -> list[Fetched]:
        self._group(Operation.DESCRIBE, group_id)
        fetched = self._broker.groups.fetch(group_id, topics, member_id, epoch)
        if self._authorizer.is_open:
            return fetched
        denied = [self._denies(Operation.DESCRIBE, each.topic) for each in fetched]
        if topics is None:
            return [each for each, is_denied in zip(fetched, denied, strict=True) if not is_denied]
        return [
            each._replace(partitions=[(index, None, Kind.TOPIC.refusal) for index, *_ in each.partitions])
            if is_denied
            else each
            for each, is_denied in zip(fetched, denied, strict=True)
        ]

    async def delete_offsets(self, group_id: str, topics: Sequence[tuple[str, Sequence[int]]]) -> list[list[Code]]:
        self._group(Operation.DELETE, group_id)
        denied = [self._denies(Operation.READ, name) for name, _ in topics]
        allowed = [each for each, is_denied in zip(topics, denied, strict=True) if not is_denied]
        codes = iter(await self._broker.groups.delete_offsets(group_id, allowed))
        refusal = Kind.TOPIC.refusal
        return [
            [refusal] * len(partitions) if is_denied else next(codes)
            for (_, partitions), is_denied in zip(topics, denied, strict=True)
        ]

    # Groups as a whole

    def describe_classic(self, group_id: str) -> ClassicView:
        self._group(Operation.DESCRIBE, group_id)
        return self._broker.groups.describe(group_id)

    def describe_consumer(self, group_id: str) -> ConsumerView:
        self._group(Operation.DESCRIBE, group_id)
        view = self._broker.groups.consumer_describe(group_id)
        self._check_assigned(topic_id for each in view.members for topic_id, _ in each.assigned | each.target)
        return view

    def describe_share(self, group_id: str) -> ShareView:
        self._group(Operation.DESCRIBE, group_id)
        view = self._broker.groups.share(group_id).describe()
        self._check_assigned(topic_id for each in view.members for topic_id in each.assigned)
        return view

    def _check_assigned(self, topics: Iterable[UUID]) -> None:
        if not self._authorizer.is_open:
            self._check_described(name for each in set(topics) if (name := self.topic_name(each)) is not None)

    def topic_name(self, topic_id: UUID) -> str | None:
        """Of a topic that a member is assigned."""
        return self._broker.groups.topic_name(topic_id)

    def list_groups(self, states: Iterable[str] = (), types: Iterable[str] = ()) -> list[Listed]:
        listed = self._broker.groups.list(states, types)
        return [each for each in listed if self.allows(Operation.DESCRIBE, Kind.GROUP, each.group_id)]

    async def delete_group(self, group_id: str) -> None:
        self._group(Operation.DELETE, group_id)
        await self._broker.groups.delete(group_id)

    def share_progress(self, group_id: str) -> Queue | None:
        """The queue of a share group; None: the group has read nothing."""
        self._group(Operation.DESCRIBE, group_id)
        try:
            self._broker.groups.share(group_id)
        except RequestError as error:
            if error.code != Code.GROUP_ID_NOT_FOUND:
                raise
        return self._broker.queues.get(group_id)

    def idle_share(self, group_id: str, operation: Operation) -> ShareGroup:
        """A share group without members: its progress may be changed."""
        self._group(operation, group_id)
        group = self._broker.groups.share(group_id)
        if group.members:
            raise RequestError(Code.NON_EMPTY_GROUP)
        return group

    async def forget_share(self, group_id: str, topic: str) -> None:
        """Deletes a share group's progress through a topic."""
        self._group(Operation.DELETE, group_id)
        await self._broker.queues.forget(group_id, self.topic(topic, Operation.READ).name)

    # Single records

    def inlet(self, partition: Partition) -> Inlet:
        """Takes records into a partition that the session may write."""
        return self._broker.inlet(partition)

    def read(
        self, partition: Partition, offset: int, bytes_max: int, *, head_bytes: int = 0, count_max: int | None = None
    ) -> Awaitable[Taken]:
        """Records of a partition that the session may read; see `Outlet.take`."""
        return self._broker.outlet.take(partition.log, offset, bytes_max, head_bytes=head_bytes, count_max=count_max)

    @property
    def atomic(self) -> bool:
        """Whether appends made `together` are atomic across partitions."""
        return self._broker.atomic

    def together(self) -> AbstractContextManager[None]:
        """Bundles the appends of this turn of the event loop, if the store can; await nothing inside."""
        return self._broker.together()

    async def coordinate(self, group_id: str, operation: Operation = Operation.READ) -> None:
        """Raises `RequestError` unless this broker coordinates the group, or fanout id, from now on."""
        self._group(operation, group_id)
        await coordinate(self._broker.cluster, group_id)

    # Queues

    def open_queue(
        self, group_id: str, *, durable: bool, settings: Mapping[str, str] | None, door_defaults: Mapping[str, str]
    ) -> Queue:
        """Finds or creates a group with the `queue` discipline. A private one (not `durable`) needs no right."""
        if durable:
            self._group(Operation.READ, group_id)
        return self._broker.queues.open(
            group_id, durable=durable, settings=settings, door_defaults=door_defaults, client_host=self.host
        )

    def has_queue(self, queue: Queue) -> bool:
        """Whether this broker still coordinates the queue."""
        return self._broker.queues.get(queue.id) is queue

    def check_lease(self, queue: Queue, topic: Topic) -> None:
        """Raises unless the session may lease and acknowledge records of this topic in this group."""
        if self._authorizer.is_open:
            return
        self.check(Operation.READ, Kind.TOPIC, topic.name)
        if queue.is_durable:
            self._group(Operation.READ, queue.id)

    # Exclusive groups and cursors

    def exclusive(self, group_id: str, topic: Topic, settings: ExclusiveSettings) -> ExclusiveMember:
        """A new member of an exclusive group, not yet open."""
        self._group(Operation.READ, group_id)
        self.check(Operation.READ, Kind.TOPIC, topic.name)
        return self._broker.exclusive(group_id, topic, settings)

    def cursor_position(self, fanout_id: str, topic: Topic) -> int:
        self._group(Operation.DESCRIBE, fanout_id)
        return self._broker.cursors.position(fanout_id, topic)

    def read_cursor(
        self, fanout_id: str, topic: Topic, bytes_max: int, count_max: int | None = None
    ) -> Promise[list[Record]]:
        """The next records of a topic that the session may read; see `Cursors.read`."""
        self._group(Operation.READ, fanout_id)
        return self._broker.cursors.read(fanout_id, topic, bytes_max, count_max, self.host)

    # The cluster

    @property
    def node_id(self) -> int:
        return self._broker.node_id

    @property
    def cluster_id(self) -> str:
        return self._broker.cluster_id

    def advertised(self, local_host: str, local_port: int) -> tuple[str, int]:
        """This broker's address for clients; the arguments are the one that this client used."""
        return self._broker.advertised(local_host, local_port)

    def nodes(self, local_host: str, local_port: int) -> list[Node]:
        """All live brokers by node id."""
        return self._broker.nodes(local_host, local_port)

    def registered(self, door: str) -> dict[int, Registered]:
        """The live brokers that have opened a door, by node id."""
        live = {node.node_id for node in self.nodes("", 0)}
        return {node_id: each for node_id, each in self._broker.door_register.of(door).items() if node_id in live}

    def leaderships(self, topic_id: UUID = NO_TOPIC) -> Sequence[Leadership]:
        """Of a topic's partitions, in their order; a shorter list repeats."""
        return self._broker.cluster.leaderships(topic_id)

    async def find_coordinator(self, kind: Kind, key: str) -> Node | None:
        """Of a group, a transactional id, or (CLUSTER) a share partition; None: this broker."""
        if kind == Kind.CLUSTER:
            self.check(Operation.CLUSTER_ACTION, kind, CLUSTER_NAME)
        else:
            self.check(Operation.DESCRIBE, kind, key)
        return await self.peers.coordinator(key) if kind == Kind.GROUP else None

    # Administration, by noun

    @property
    def admin(self) -> Admin:
        return Admin(self)

    @property
    def configs(self) -> Configs:
        return Configs(self)

    @property
    def health(self) -> Health:
        return Health(self)

    @property
    def peers(self) -> Peers:
        return Peers(self)


class Sessions:
    """Opens the sessions of clients: all that a door has of the broker."""

    __slots__ = ("_broker", "clock", "config", "metrics")

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.clock = broker.clock
        self.config = broker.config
        self.metrics = broker.metrics

    def open(self, door: str, host: str, client_id: str = "") -> Session:
        return Session(self._broker, door, host, client_id=client_id)

    async def register(self, door: str, broker_id: str, address: str) -> None:
        """Tells the other brokers this broker's id and address for a door's clients (`door_register.py`)."""
        await self._broker.door_register.register(door, broker_id, address)


class _Readable:
    """The topics of share fetches and acknowledgements."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def by_id(self, topic_id: UUID) -> Topic | None:
        return self._session.topic(topic_id, Operation.READ)
