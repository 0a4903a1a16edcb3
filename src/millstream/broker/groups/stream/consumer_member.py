"""One member of a consumer-protocol group: its subscription, its assignment, its revocations.

assigned     partitions that it may read now
revoking     partitions that it must revoke and has not confirmed; it still owns them
epoch        the target epoch that it has reached; stays while `revoking` is not empty
told         the partitions in the last response that listed any
classic      the last JoinGroup of a member that uses the classic protocol (`mixed.py`)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from uuid import UUID

from millstream.broker.groups.deadline import Deadline
from millstream.broker.groups.stream.assignors import Partition
from millstream.broker.groups.stream.classic_member import Join
from millstream.broker.groups.stream.pattern import Pattern
from millstream.core.clock import Clock
from millstream.core.errors import Code, RequestError
from millstream.security.principal import ANONYMOUS, Principal

JOINING = 0
LEAVING = -1
LEAVING_FOR_A_WHILE = -2
"""A static member that will return keeps its partitions until its session ends."""
MEMBER_ID_CHARS_MAX = 512


@dataclass(frozen=True, slots=True)
class Beat:
    """A ConsumerGroupHeartbeat. None means: unchanged."""

    group_id: str
    member_id: str
    epoch: int
    instance_id: str | None = None
    rack_id: str | None = None
    rebalance_ms: int | None = None
    topics: frozenset[str] | None = None
    pattern: str | None = None
    """An empty one removes the pattern."""
    assignor: str | None = None
    owned: frozenset[Partition] | None = None
    client_id: str = ""
    client_host: str = ""
    id_required: bool = False
    """The client chooses the id (version 1, KIP-1082)."""
    principal: Principal = ANONYMOUS

    @property
    def is_full(self) -> bool:
        """Has all fields, as clients send after a lost response or an error."""
        subscribed = self.topics is not None or self.pattern is not None
        return self.epoch == JOINING or (subscribed and self.owned is not None and self.rebalance_ms is not None)

    def check(self) -> None:
        if self.epoch < LEAVING_FOR_A_WHILE:
            raise _invalid(f"member epoch {self.epoch} is not valid")
        if not self.member_id and (self.epoch != JOINING or self.id_required):
            raise _invalid("the member id is missing")
        if len(self.member_id) > MEMBER_ID_CHARS_MAX:
            raise _invalid(f"a member id has {MEMBER_ID_CHARS_MAX} characters at most")
        if self.instance_id == "" or (self.instance_id is None and self.epoch == LEAVING_FOR_A_WHILE):
            raise _invalid("the instance id is missing")
        if self.epoch == JOINING:
            if self.rebalance_ms is None or self.rebalance_ms <= 0:
                raise _invalid("a joining member must name its rebalance timeout")
            if self.topics is None and self.pattern is None:
                raise _invalid("a joining member must name its topics")
            if self.owned:
                raise _invalid("a joining member must own no partitions")


@dataclass(frozen=True, slots=True)
class BeatAnswer:
    member_id: str
    epoch: int
    heartbeat_interval_ms: int
    assignment: dict[UUID, list[int]] | None = None
    """None: unchanged."""


class ConsumerMember:
    __slots__ = (
        "assigned",
        "assignor",
        "classic",
        "client_host",
        "client_id",
        "epoch",
        "id",
        "instance_id",
        "pattern",
        "previous_epoch",
        "principal",
        "rack_id",
        "rebalance_ms",
        "revocation",
        "revoking",
        "session",
        "told",
        "topics",
        "waiting",
    )

    def __init__(
        self, member_id: str, instance_id: str | None, clock: Clock, on_expiry: Callable[[ConsumerMember], None]
    ) -> None:
        self.id = member_id
        self.instance_id = instance_id
        self.client_id = ""
        self.client_host = ""
        self.principal = ANONYMOUS
        self.rack_id: str | None = None
        self.rebalance_ms = 0
        self.topics: frozenset[str] = frozenset()
        self.pattern: Pattern | None = None
        self.assignor: str | None = None
        self.epoch = self.previous_epoch = JOINING
        self.assigned: set[Partition] = set()
        self.revoking: set[Partition] = set()
        self.waiting = False
        """Other members still own partitions of its target."""
        self.told: frozenset[Partition] | None = None
        self.classic: Join | None = None
        self.session = Deadline(clock, lambda: on_expiry(self))
        self.revocation = Deadline(clock, lambda: on_expiry(self))

    @property
    def said_bytes(self) -> int:
        protocols = self.classic.protocols if self.classic is not None else ()
        return sum(map(len, self.topics)) + sum(len(name) + len(metadata) for name, metadata in protocols)

    @property
    def may_be_replaced(self) -> bool:
        """By a member with its instance id: it left for a while, or is classic and cannot say so."""
        return self.epoch == LEAVING_FOR_A_WHILE or self.classic is not None

    @property
    def stale(self) -> RequestError:
        """The error for a request with a stale epoch."""
        return RequestError(Code.STALE_MEMBER_EPOCH if self.classic is None else Code.ILLEGAL_GENERATION)

    def update(self, beat: Beat, pattern: Pattern | None) -> bool:
        """Applies a heartbeat; returns whether the group needs a new target."""
        before = (self.topics, self.pattern, self.assignor)
        self.classic = None
        self.client_id, self.client_host, self.principal = beat.client_id, beat.client_host, beat.principal
        if beat.rack_id is not None:
            self.rack_id = beat.rack_id
        if beat.rebalance_ms is not None:
            self.rebalance_ms = beat.rebalance_ms
        if beat.topics is not None:
            self.topics = beat.topics
        if beat.pattern is not None:
            self.pattern = pattern
        if beat.assignor is not None:
            self.assignor = beat.assignor
        return before != (self.topics, self.pattern, self.assignor)

    def adopt(self, other: ConsumerMember) -> None:
        """Continues as another incarnation of the same static member."""
        self.rack_id, self.rebalance_ms = other.rack_id, other.rebalance_ms
        self.topics, self.pattern, self.assignor = other.topics, other.pattern, other.assignor
        self.assigned = other.assigned

    def check_epoch(self, beat: Beat) -> None:
        """Accepts its epoch; or the previous one, if a response was lost and it owns only assigned partitions."""
        if beat.epoch == self.epoch:
            return
        missed_answer = beat.epoch == self.previous_epoch and beat.epoch < self.epoch
        if not (missed_answer and beat.owned is not None and beat.owned <= self.assigned):
            raise RequestError(
                Code.FENCED_MEMBER_EPOCH,
                f"the member is at epoch {self.epoch}, not {beat.epoch}; it must give up its partitions and join again",
            )

    def stop(self) -> None:
        self.session.stop()
        self.revocation.stop()

    def is_settled(self, target_epoch: int) -> bool:
        if self.epoch == LEAVING_FOR_A_WHILE:
            return True
        return self.epoch == target_epoch and not self.revoking and not self.waiting


def by_topic(partitions: frozenset[Partition] | set[Partition]) -> dict[UUID, list[int]]:
    grouped: dict[UUID, list[int]] = {}
    for topic, number in sorted(partitions):
        grouped.setdefault(topic, []).append(number)
    return grouped


def _invalid(detail: str) -> RequestError:
    return RequestError(Code.INVALID_REQUEST, detail)
