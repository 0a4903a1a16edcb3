"""The protocols through which groups see topics and queues; the broker's registries satisfy them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Protocol
from uuid import UUID

from millstream.core.errors import Code, RequestError

if TYPE_CHECKING:
    from millstream.broker.groups.queue.queue import Queue


class TopicLike(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def id(self) -> UUID: ...

    @property
    def partition_count(self) -> int: ...


class TopicsView(Protocol):
    def get(self, name: str) -> TopicLike | None: ...

    def by_id(self, topic_id: UUID) -> TopicLike | None: ...

    def names(self) -> Iterable[str]: ...

    def watch(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Calls back after a topic was created, deleted or grown; the result stops it."""


class QueuesView(Protocol):
    def open(self, group_id: str) -> Queue: ...

    def get(self, group_id: str) -> Queue | None: ...

    def names(self) -> Iterable[str]: ...

    def overrides(self, group_id: str) -> Mapping[str, str]: ...

    async def delete(self, group_id: str) -> None: ...

    async def adopt(self, owns: Callable[[str], bool]) -> None: ...

    def release(self) -> None: ...


class NoQueues:
    """For a broker without queues: it has no share groups and cannot create any."""

    def open(self, group_id: str) -> Queue:
        raise RequestError(Code.POLICY_VIOLATION, "this broker has no queues")

    def get(self, group_id: str) -> Queue | None:
        return None

    def names(self) -> Iterable[str]:
        return ()

    def overrides(self, group_id: str) -> Mapping[str, str]:
        return {}

    async def delete(self, group_id: str) -> None:
        return

    async def adopt(self, owns: Callable[[str], bool]) -> None:
        return

    def release(self) -> None:
        return
