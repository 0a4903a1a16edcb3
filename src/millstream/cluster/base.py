"""The cluster as the broker and its doors see it: members, partition leaders, group coordinators.

`Solo` is a single broker over its store. `SharedCluster` (`shared.py`) is many over one database.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, Protocol
from uuid import UUID

from millstream.stores.base import Check


class Node(NamedTuple):
    node_id: int
    host: str
    port: int


class PartitionKey(NamedTuple):
    topic_id: UUID
    partition: int


class Leadership(NamedTuple):
    """Of one partition."""

    leader: int
    epoch: int
    """Leader epoch."""
    replicas: tuple[int, ...]
    in_sync: tuple[int, ...]

    @classmethod
    def alone(cls, node_id: int) -> Leadership:
        """For the only copy, or a store in which all brokers are equal."""
        return cls(node_id, 0, (node_id,), (node_id,))


Owns = Callable[[str], bool]
"""Whether a group id is in the set."""


class Cluster(Protocol):
    node_id: int
    has_leaders: bool
    """Whether only the leader of a partition serves it, by `leaderships`. If so, every move of a leader has to grow
    `Topics.changes`: doors keep partitions until then.
    """

    @property
    def secret(self) -> bytes:
        """Known to the members of the cluster only; empty for a cluster of one."""

    def others(self) -> Sequence[Node]:
        """The other live brokers, by node id."""

    def leaderships(self, topic_id: UUID) -> Sequence[Leadership]:
        """Of a topic's partitions, in their order; a shorter list repeats."""

    def serve_groups(self, adopt: Callable[[Owns], Awaitable[None]], release: Callable[[], None]) -> None:
        """Sets the callbacks: `adopt` loads and coordinates groups, `release` drops all of them."""

    async def start(self) -> None:
        """Called after topics load, before clients connect."""

    async def join(self, host: str, port: int) -> None:
        """Called when clients can connect, with the advertised address."""

    async def find_coordinator(self, group_id: str) -> Node | None:
        """The coordinator of a group; None: this broker. Raises `RequestError` while it is unknown."""

    def check(self, group_id: str) -> None:
        """Raises `RequestError` unless this broker coordinates the group."""

    def guards(self) -> Sequence[Check]:
        """The checks in every write of group state; they refuse the stale writes of a former coordinator."""

    def fenced(self) -> None:
        """A guard refused a write: the groups are lost."""

    async def leave(self) -> None: ...


class Solo:
    """Implements `Cluster` for one broker."""

    has_leaders = False

    def __init__(self, node_id: int) -> None:
        self.node_id = node_id
        self.secret = b""
        self._leaderships = (Leadership.alone(node_id),)
        self._adopt: Callable[[Owns], Awaitable[None]] | None = None

    def others(self) -> Sequence[Node]:
        return ()

    def leaderships(self, topic_id: UUID) -> Sequence[Leadership]:
        return self._leaderships

    def serve_groups(self, adopt: Callable[[Owns], Awaitable[None]], release: Callable[[], None]) -> None:
        self._adopt = adopt

    async def start(self) -> None:
        if self._adopt is not None:
            await self._adopt(lambda group_id: True)

    async def join(self, host: str, port: int) -> None:
        return None

    async def find_coordinator(self, group_id: str) -> Node | None:
        return None

    def check(self, group_id: str) -> None:
        return None

    def guards(self) -> Sequence[Check]:
        return ()

    def fenced(self) -> None:
        return None

    async def leave(self) -> None:
        return None
