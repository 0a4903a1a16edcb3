"""One member of a share group (KIP-932): its subscription, its epoch and its session."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from uuid import UUID

from millstream.broker.groups.deadline import Deadline
from millstream.broker.groups.stream.consumer_member import JOINING, LEAVING, MEMBER_ID_CHARS_MAX
from millstream.core.clock import Clock
from millstream.core.errors import Code, RequestError
from millstream.security.principal import ANONYMOUS, Principal

TOPICS_MAX = 10_000
"""In one member's subscription."""
Assigned = dict[UUID, int]
"""Topics with their partition counts: a share member gets all partitions."""


@dataclass(frozen=True, slots=True)
class ShareBeat:
    """A ShareGroupHeartbeat. None means unchanged."""

    group_id: str
    member_id: str
    epoch: int
    rack_id: str | None = None
    topics: frozenset[str] | None = None
    client_id: str = ""
    client_host: str = ""
    principal: Principal = ANONYMOUS

    def check(self) -> None:
        if self.epoch < LEAVING:
            raise _invalid(f"member epoch {self.epoch} is not valid")
        if not self.member_id:
            raise _invalid("the member id is missing")
        if len(self.member_id) > MEMBER_ID_CHARS_MAX:
            raise _invalid(f"a member id has {MEMBER_ID_CHARS_MAX} characters at most")
        if self.epoch == JOINING and not self.topics:
            raise _invalid("a joining member must name its topics")
        if self.topics is not None and len(self.topics) > TOPICS_MAX:
            raise _invalid(f"a member subscribes to {TOPICS_MAX} topics at most")


class ShareMember:
    __slots__ = (
        "client_host", "client_id", "epoch", "id", "previous_epoch", "principal", "rack_id", "session", "told",
        "topics",
    )  # fmt: skip

    def __init__(self, member_id: str, clock: Clock, on_expiry: Callable[[ShareMember], None]) -> None:
        self.id = member_id
        self.client_id = ""
        self.client_host = ""
        self.principal = ANONYMOUS
        self.rack_id: str | None = None
        self.topics: frozenset[str] = frozenset()
        self.epoch = self.previous_epoch = JOINING
        self.told: Assigned | None = None
        """The last assignment that a response contained."""
        self.session = Deadline(clock, lambda: on_expiry(self))

    @property
    def said_bytes(self) -> int:
        return sum(map(len, self.topics))

    def update(self, beat: ShareBeat) -> bool:
        """Applies a heartbeat; returns whether the subscription changed."""
        self.client_id, self.client_host, self.principal = beat.client_id, beat.client_host, beat.principal
        if beat.rack_id is not None:
            self.rack_id = beat.rack_id
        if beat.topics is None or beat.topics == self.topics:
            return False
        self.topics = beat.topics
        return True

    def check_epoch(self, epoch: int) -> None:
        """Accepts the previous epoch too: the member may have missed a response, and owns no partition exclusively."""
        if epoch not in (self.epoch, self.previous_epoch):
            raise RequestError(
                Code.FENCED_MEMBER_EPOCH, f"the member is at epoch {self.epoch}, not {epoch}; it must join again"
            )

    def reach(self, epoch: int) -> None:
        if self.epoch != epoch:
            self.previous_epoch, self.epoch = self.epoch, epoch


def _invalid(detail: str) -> RequestError:
    return RequestError(Code.INVALID_REQUEST, detail)
