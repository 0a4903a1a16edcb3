"""One member of a classic group: its JoinGroup, its waiting requests and its session."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple
from uuid import UUID, uuid4

from millstream.broker.groups.deadline import Deadline
from millstream.broker.groups.described import ClassicMemberView
from millstream.broker.groups.stream.subscription import subscribed_topics
from millstream.core.clock import Clock
from millstream.core.errors import Code, RequestError
from millstream.core.promise import Promise
from millstream.security.principal import ANONYMOUS, Principal

Protocols = tuple[tuple[str, bytes], ...]
"""Name and metadata, in the member's order of preference."""


class Join(NamedTuple):
    group_id: str
    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    session_ms: int
    rebalance_ms: int
    protocol_type: str
    protocols: Protocols
    id_required: bool = False
    """The client knows MEMBER_ID_REQUIRED (version 4, KIP-394): it gets an id first, so lost joins leave no member."""
    may_skip_assignment: bool = False
    """The client has `skip_assignment` (version 9)."""
    planned: bool = False
    """Its protocol has no SyncGroup: the broker assigns, and sends the member the list of members."""
    principal: Principal = ANONYMOUS


class Joined(NamedTuple):
    member_id: str
    generation: int = -1
    protocol_type: str | None = None
    protocol_name: str | None = None
    leader: str = ""
    members: tuple[tuple[str, str | None, bytes], ...] = ()
    """Id, instance id and metadata of all; only for the leader and planned members."""
    skip_assignment: bool = False
    error: Code = Code.NONE


class Synced(NamedTuple):
    protocol_type: str
    protocol_name: str
    assignment: bytes


def check_protocol(said: tuple[str | None, str | None], known: tuple[str | None, str | None]) -> None:
    """Raises if a SyncGroup names another protocol type or protocol than the group's (KIP-559)."""
    if any(one is not None and one != other for one, other in zip(said, known, strict=True)):
        raise RequestError(Code.INCONSISTENT_GROUP_PROTOCOL)


class Converted(RequestError):
    """The group changed its protocol (KIP-848) while a member waited. A join continues in the group's successor."""

    def __init__(self, member_id: str) -> None:
        super().__init__(Code.REBALANCE_IN_PROGRESS, "the group was converted to another protocol")
        self.member_id = member_id


class Polled:
    """What a member that polls (`polling.py`) was given last."""

    __slots__ = ("delivered", "first", "lock", "readers", "topic", "topic_id")

    def __init__(self, topic: str, topic_id: UUID) -> None:
        self.topic = topic
        self.topic_id = topic_id
        self.delivered: dict[int, int] = {}
        """Partitions of the last poll's records, and the offset after them."""
        self.readers: tuple[Sequence[str], Sequence[int]] = (), ()
        """The topic's members and this member's partitions, as this member knows them."""
        self.first = 0
        """Where the next poll begins among the partitions, so that none waits for ever."""
        self.lock = asyncio.Lock()


class Member:
    __slots__ = (
        "assignment",
        "client_host",
        "client_id",
        "generation",
        "id",
        "instance_id",
        "is_behind",
        "joining",
        "planned",
        "polled",
        "principal",
        "protocols",
        "rebalance_ms",
        "session",
        "session_ms",
        "syncing",
        "told",
        "unsynced",
    )

    def __init__(self, member_id: str, join: Join, clock: Clock, on_expiry: Callable[[Member], None]) -> None:
        self.id = member_id
        self.instance_id = join.instance_id
        self.principal = join.principal
        self.assignment = b""
        """The last one. A rebalance does not clear it: a cooperative member keeps reading (KIP-429)."""
        self.generation: int | None = None
        """Its own generation until it rejoins: after a downgrade its member epoch; if it is behind, the generation of
        its last join. None: the group's generation.
        """
        self.is_behind = False
        """The broker assigned a generation since its last join."""
        self.joining: Promise[Joined] | None = None
        self.syncing: Promise[Synced] | None = None
        self.told = -1
        """The generation of its last JoinGroup response."""
        self.unsynced = False
        """It has a generation and has not sent its SyncGroup yet."""
        self.polled: Polled | None = None
        """Set for a member that polls."""
        self.session = Deadline(clock, lambda: on_expiry(self))
        self.update(join)

    def update(self, join: Join) -> None:
        self.client_id = join.client_id
        self.client_host = join.client_host
        self.session_ms = join.session_ms
        self.rebalance_ms = join.rebalance_ms
        self.protocols = join.protocols
        self.planned = join.planned

    @property
    def said_bytes(self) -> int:
        return sum(len(name) + len(metadata) for name, metadata in self.protocols)

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.protocols]

    def metadata(self, protocol_name: str | None) -> bytes:
        return next((metadata for name, metadata in self.protocols if name == protocol_name), b"")

    def topics(self, protocol_name: str | None) -> frozenset[str] | None:
        return subscribed_topics(self.metadata(protocol_name))

    def describe(self, protocol_name: str | None) -> ClassicMemberView:
        """Without a protocol, no assignment is shown."""
        return ClassicMemberView(
            self.id,
            self.instance_id,
            self.client_id,
            self.client_host,
            self.metadata(protocol_name),
            self.assignment if protocol_name is not None else b"",
        )

    def touch(self) -> None:
        """Extends the session. The timer does not run while the member waits for a response."""
        if self.joining is None and self.syncing is None:
            self.session.push(self.session_ms)

    def await_join(self) -> Promise[Joined]:
        self.refuse(RequestError(Code.REBALANCE_IN_PROGRESS, "the member joined again over another connection"))
        self.session.stop()
        self.joining = Promise()
        return self.joining

    def await_sync(self) -> Promise[Synced]:
        self.refuse(RequestError(Code.REBALANCE_IN_PROGRESS, "the member repeated the request over another connection"))
        self.session.stop()
        self.syncing = Promise()
        return self.syncing

    def refuse(self, error: RequestError) -> None:
        """Fails its waiting requests."""
        joining, self.joining = self.joining, None
        syncing, self.syncing = self.syncing, None
        if joining is not None:
            joining.fail(error)
        if syncing is not None:
            syncing.fail(error)


def new_member_id(prefix: str) -> str:
    """Keeps only the start of the prefix: a client id may use all 32,767 bytes of a protocol string."""
    return f"{prefix[:200]}-{uuid4()}"


def choose_protocol(members: Sequence[Member]) -> str:
    """Each member votes for its first protocol that all members support. `join` ensures that there is one."""
    common = set(members[0].names).intersection(*(member.names for member in members))
    votes = Counter(next(name for name in member.names if name in common) for member in members)
    return max(votes, key=lambda name: votes[name])
