"""One member of a share group: what it reads, which epoch it was told, and its seat in the group's queue."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from uuid import UUID

from millstream.broker.groups.deadline import Deadline
from millstream.broker.groups.stream.consumer_member import JOINING, LEAVING, MEMBER_ID_CHARS_MAX
from millstream.core.clock import Clock
from millstream.core.errors import Code, RequestError

TOPICS_MAX = 10_000
"""Of one member's subscription."""
Assigned = dict[UUID, int]
"""Topics with how many partitions they have: a share member gets all of them."""


@dataclass(frozen=True, slots=True)
class ShareBeat:
    """A ShareGroupHeartbeat. None means: as before."""

    group_id: str
    member_id: str
    epoch: int
    rack_id: str | None = None
    topics: frozenset[str] | None = None
    client_id: str = ""
    client_host: str = ""

    def check(self) -> None:
        if self.epoch < LEAVING:
            raise _invalid(f"there is no member epoch {self.epoch}")
        if not self.member_id:
            raise _invalid("the member id is missing")
        if len(self.member_id) > MEMBER_ID_CHARS_MAX:
            raise _invalid(f"a member id has {MEMBER_ID_CHARS_MAX} characters at most")
        if self.epoch == JOINING and not self.topics:
            raise _invalid("a member that joins must say what it subscribes to")
        if self.topics is not None and len(self.topics) > TOPICS_MAX:
            raise _invalid(f"a member subscribes to {TOPICS_MAX} topics at most")


class ShareMember:
    __slots__ = ("client_host", "client_id", "epoch", "id", "previous_epoch", "rack_id", "session", "told", "topics")

    def __init__(self, member_id: str, clock: Clock, on_expiry: Callable[[ShareMember], None]) -> None:
        self.id = member_id
        self.client_id = ""
        self.client_host = ""
        self.rack_id: str | None = None
        self.topics: frozenset[str] = frozenset()
        self.epoch = self.previous_epoch = JOINING
        self.told: Assigned | None = None
        """What the last answer that listed partitions listed."""
        self.session = Deadline(clock, lambda: on_expiry(self))

    @property
    def said_bytes(self) -> int:
        return sum(map(len, self.topics))

    def update(self, beat: ShareBeat) -> bool:
        """Takes over what is new; says whether the member reads something else now."""
        self.client_id, self.client_host = beat.client_id, beat.client_host
        if beat.rack_id is not None:
            self.rack_id = beat.rack_id
        if beat.topics is None or beat.topics == self.topics:
            return False
        self.topics = beat.topics
        return True

    def check_epoch(self, epoch: int) -> None:
        """Its own epoch; or the one before, from a member that missed our answer. It owns nothing that could clash."""
        if epoch not in (self.epoch, self.previous_epoch):
            raise RequestError(
                Code.FENCED_MEMBER_EPOCH, f"the member is at epoch {self.epoch}, not {epoch}; it must join again"
            )

    def reach(self, epoch: int) -> None:
        if self.epoch != epoch:
            self.previous_epoch, self.epoch = self.epoch, epoch


def _invalid(detail: str) -> RequestError:
    return RequestError(Code.INVALID_REQUEST, detail)
