"""What groups need to know about topics, and nothing more: the broker's topic registry satisfies it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol
from uuid import UUID


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
        """Calls back after a topic was created, deleted or grown; the answer ends the watch."""
