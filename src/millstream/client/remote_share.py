"""A worker of a queue on a cluster that is not Millstream's, or that uses TLS: librdkafka's share consumer.

Kafka's protocol lacks delayed releases and renewals: both are refused. The reason of a rejection is not sent.

A share consumer needs every record of a poll acknowledged before the next poll. So the next job is given when those
before it are acknowledged, at the latest when their leases end.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any, TypeVar

from confluent_kafka import AcknowledgeType, IllegalStateException, KafkaException, Message, ShareConsumer

from millstream.client.iterators import QueueOptions
from millstream.client.records import Desk, Job, user_job
from millstream.client.remote_reading import place_of, raise_for, stored
from millstream.client.remote_worker import POLL_SECONDS, Polled
from millstream.core.errors import Closed, Code, LeaseLost, Unsupported

if TYPE_CHECKING:
    from millstream.client.remote import Remote

V = TypeVar("V")
LEASE_SECONDS = 30.0
"""Kafka's default: after that, an unacknowledged job is available again."""
RecordPosition = tuple[str, int, int]
"""Topic, partition, offset."""


class SharedJobs(Desk[V], Polled[ShareConsumer, Message]):
    """Implements `remote_queue.Jobs`."""

    _thread_name = "millstream-queue"

    def __init__(self, remote: Remote, options: QueueOptions) -> None:
        self._remote = remote
        self._topics, self._group, self._prefetch, _, self._decode = options
        self._is_over = False
        self._begin()
        self._unanswered: dict[RecordPosition, Message] = {}
        self._polled_at = 0.0
        self._answered = asyncio.Event()

    async def start(self) -> None:
        settings = self._remote.settings(
            **{
                "group.id": self._group,
                "share.acknowledgement.mode": "explicit",
                "max.poll.records": self._prefetch,
            }
        )
        self._consumer = ShareConsumer(settings)
        await self._worker.call(self._consumer.subscribe, list(self._topics))

    def _poll(self, seconds: float) -> list[Message]:
        assert self._consumer is not None
        messages = list(self._consumer.poll(seconds))
        self._polled_at = time.monotonic()
        for message in messages:
            if message.error() is None:
                self._unanswered[_place(message)] = message
        return messages

    async def next(self, timeout: float | None) -> Job[V] | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._is_over:
            while self._polling.ready:
                message = self._polling.ready.popleft()
                if message.error() is None:
                    return self._job(message)
                raise_for(message.error())
            left = POLL_SECONDS if deadline is None else deadline - time.monotonic()
            if left <= 0:
                return None
            if (
                self._unanswered
                and not self._polling.is_on_its_way
                and time.monotonic() - self._polled_at < LEASE_SECONDS
            ):
                self._answered.clear()
                await _wait(self._answered, min(left, POLL_SECONDS))
                continue
            if self._unanswered and not self._polling.is_on_its_way:
                await self._worker.call(self._let_go)
            await self._polling.fill(left)
        return None

    def _let_go(self) -> None:
        """Drops jobs whose leases have ended, in the client too."""
        assert self._consumer is not None
        for place in list(self._unanswered):
            message = self._unanswered.pop(place, None)  # one by one: tasks acknowledge meanwhile
            if message is None:
                continue
            with contextlib.suppress(LeaseLost):
                self._acknowledge(message, AcknowledgeType.RELEASE)
        self._consumer.commit_sync(self._remote.timeout)

    def _job(self, message: Message) -> Job[V]:
        attempt: Any = getattr(message, "delivery_count", lambda: None)()
        return user_job(*place_of(message), stored(message), self._decode, attempt or 1, self, None)

    async def accept(self, job: Job[V]) -> None:
        await self._answer(job, AcknowledgeType.ACCEPT)

    async def release(self, job: Job[V], delay: float, reason: str) -> None:
        if delay > 0:
            raise Unsupported("Kafka's protocol cannot delay a release; use millstream.retry.backoff.ms of the group")
        await self._answer(job, AcknowledgeType.RELEASE)

    async def reject(self, job: Job[V], reason: str) -> None:
        await self._answer(job, AcknowledgeType.REJECT)

    async def renew(self, job: Job[V]) -> None:
        raise Unsupported("this client cannot renew a lease; raise share.record.lock.duration.ms of the group")

    async def _answer(self, job: Job[V], kind: AcknowledgeType) -> None:
        if self._is_over or self._consumer is None:
            raise Closed("this worker has left its queue; the job goes to another worker")
        message = self._unanswered.pop((job.topic, job.partition, job.offset), None)
        if message is None:
            raise LeaseLost(Code.INVALID_RECORD_STATE, "the job was already acknowledged, or its lease expired")
        try:
            await self._worker.call(self._send_answer, message, kind)
        finally:
            self._answered.set()

    def _send_answer(self, message: Message, kind: AcknowledgeType) -> None:
        assert self._consumer is not None
        self._acknowledge(message, kind)
        for error in self._consumer.commit_sync(self._remote.timeout).values():
            if error is not None:
                raise error

    def _acknowledge(self, message: Message, kind: AcknowledgeType) -> None:
        assert self._consumer is not None
        try:
            self._consumer.acknowledge(message, kind)
        except IllegalStateException as error:
            raise LeaseLost(Code.INVALID_RECORD_STATE, str(error)) from None

    async def shut(self) -> None:
        self._is_over = True
        self._answered.set()
        await self._polling.stop()
        await self._end(self._give_back)

    def _give_back(self) -> None:
        if self._unanswered:
            with contextlib.suppress(KafkaException):  # the server redelivers them when their leases end
                self._let_go()


def _place(message: Message) -> RecordPosition:
    return *place_of(message), message.offset() or 0


async def _wait(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(max(seconds, 0.0)):
            await event.wait()
    except TimeoutError:
        return
