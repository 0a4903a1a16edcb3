"""A member of a consumer group on a server: librdkafka's consumer joins, commits and leaves."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from confluent_kafka import Consumer, KafkaException, TopicPartition

from millstream.client.remote_worker import Polled
from millstream.core.errors import Code

T = TypeVar("T")
Changed = Callable[[Consumer, list[TopicPartition]], None]
LOST = frozenset(
    {
        Code.FENCED_INSTANCE_ID,
        Code.FENCED_MEMBER_EPOCH,
        Code.ILLEGAL_GENERATION,
        Code.REBALANCE_IN_PROGRESS,
        Code.STALE_MEMBER_EPOCH,
        Code.UNKNOWN_MEMBER_ID,
    }
)
JOIN_SECONDS = 1.0


class RemoteMember(Polled[Consumer, T]):
    def _begin(self) -> None:
        super()._begin()
        self._has_joined, self._joined_by = False, 0.0

    async def _subscribe(
        self, settings: dict[str, Any], topics: Sequence[str], assigned: Changed, revoked: Changed, lost: Changed
    ) -> None:
        self._consumer = Consumer(settings)
        subscribe = self._consumer.subscribe
        self._joined_by = time.monotonic() + JOIN_SECONDS
        await self._worker.call(subscribe, list(topics), on_assign=assigned, on_revoke=revoked, on_lost=lost)

    # On the worker's thread

    def _commit_places(self, places: list[TopicPartition]) -> None:
        assert self._consumer is not None
        for committed in self._consumer.commit(offsets=places, asynchronous=False) or ():
            if committed.error is not None:
                raise KafkaException(committed.error)

    def _let_join(self) -> None:
        """librdkafka does not leave a group that it is joining: an early close waits a moment for it."""
        while self._consumer is not None and not self._has_joined and time.monotonic() < self._joined_by:
            self._consumer.poll(0.1)
