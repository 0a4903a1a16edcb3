"""Who is in the cluster, who leads which partition and who coordinates which group: what the broker and its doors ask.

`Solo` is a broker alone over its store. `SharedCluster` (`shared.py`) is many over one database.
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


class Leadership(NamedTuple):
    """Of one partition."""

    leader: int
    epoch: int
    """Of the leader."""
    replicas: tuple[int, ...]
    in_sync: tuple[int, ...]

    @classmethod
    def alone(cls, node_id: int) -> Leadership:
        """A broker that has the only copy, or that the store treats like every other."""
        return cls(node_id, 0, (node_id,), (node_id,))


Owns = Callable[[str], bool]
"""Whether a group, by its id, is among those meant."""


class Cluster(Protocol):
    node_id: int

    def others(self) -> Sequence[Node]:
        """The other live brokers, by their numbers."""

    def leaderships(self, topic_id: UUID) -> Sequence[Leadership]:
        """Of a topic's partitions: the first of these for the first one, and so on, over again where they are fewer."""

    def serve_groups(self, adopt: Callable[[Owns], Awaitable[None]], release: Callable[[], None]) -> None:
        """Whom to tell that groups are to be loaded and looked after, and that all of them are lost."""

    async def start(self) -> None:
        """Called when topics are there and before clients are."""

    async def join(self, host: str, port: int) -> None:
        """Called when clients can connect, with the address that they are told."""

    async def find_coordinator(self, group_id: str) -> Node | None:
        """Who looks after a group; None: this broker does. Raises `RequestError` while nobody can tell."""

    def check(self, group_id: str) -> None:
        """Raises `RequestError` unless this broker looks after the group now."""

    def guards(self) -> Sequence[Check]:
        """What every write of groups' state is held to, so that a broker that lost them can write no more."""

    def fenced(self) -> None:
        """A guard refused a write: the groups are lost."""

    async def leave(self) -> None: ...


class Solo:
    """Implements `Cluster` for one broker."""

    def __init__(self, node_id: int) -> None:
        self.node_id = node_id
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
