"""A member of an exclusive group on a server: the newer consumer protocol with Millstream's assignor `exclusive`.

The broker makes one member the active one, which has all partitions; it takes over when that member leaves, or when its
session ends. So `heartbeat` and `takeover` are the broker's business here (its session timeout, 45 s by default).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from confluent_kafka import Consumer, KafkaException, Message, TopicPartition

from millstream.client.api import Start
from millstream.client.consuming import Decoder
from millstream.client.iterators import Exclusive
from millstream.client.records import Event
from millstream.client.remote_reading import closing, poll, raise_for, user_record
from millstream.client.remote_stream import LOST
from millstream.client.remote_worker import POLL_SECONDS, Polling, Worker
from millstream.errors import Closed, NotActive, RequestError

if TYPE_CHECKING:
    from millstream.client.remote import Remote

V = TypeVar("V")
Taken = tuple[int, Message]
"""With the term in which it was taken."""


class RemoteExclusive(Exclusive[V]):
    def __init__(
        self,
        owner: Remote,
        topic: str,
        group: str,
        start: Start,
        on_change: Callable[[bool], None] | None,
        decode: Decoder[V] | None,
    ) -> None:
        super().__init__(owner)
        self._remote = owner
        self._topic = topic
        self._group = group
        self._reset = start
        self._on_change = on_change
        self._decode = decode
        self._consumer: Consumer | None = None
        self._worker = Worker("millstream-exclusive")
        self._polling: Polling[Taken] = Polling(self._worker, self._poll)
        self._owned: set[int] = set()
        self._terms = 0
        self._was_active = False

    @property
    def is_active(self) -> bool:
        return bool(self._owned)

    async def _start(self) -> None:
        self._remote.check_open()
        await self._remote.partition_count(self._topic)
        settings = {
            "group.protocol": "consumer",
            "group.remote.assignor": "exclusive",
            "auto.offset.reset": self._reset,
        }
        self._consumer = Consumer(self._remote.consumer_settings(self._group, **settings))
        await self._worker.call(
            self._consumer.subscribe,
            [self._topic],
            on_assign=self._assigned,
            on_revoke=self._revoked,
            on_lost=self._revoked,
        )

    # On the worker's thread

    def _poll(self, seconds: float) -> list[Taken]:
        messages = poll(self._consumer, seconds)
        return [(self._terms, message) for message in messages]

    def _assigned(self, consumer: Consumer, places: list[TopicPartition]) -> None:
        if not self._owned:
            self._terms += 1
        self._owned = self._owned | {place.partition for place in places}

    def _revoked(self, consumer: Consumer, places: list[TopicPartition]) -> None:
        self._owned = self._owned - {place.partition for place in places}

    # On the loop's

    async def _next(self, timeout: float | None) -> Event[V] | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.is_closed:
            self._look()
            while self._polling.ready:
                term, message = self._polling.ready.popleft()
                if message.error() is not None:
                    raise_for(message.error())
                elif term == self._terms and self.is_active:
                    return self._event(term, message)
            left = POLL_SECONDS if deadline is None else deadline - time.monotonic()
            if left <= 0:
                return None
            await self._polling.fill(left)
        return None

    def _event(self, term: int, message: Message) -> Event[V]:
        record = user_record(message, self._decode)

        async def commit(event: Event[V]) -> None:
            await self._commit(event, term)

        return Event(
            record.topic,
            record.partition,
            record.offset,
            record.timestamp,
            record.key,
            record.value,
            record.headers,
            commit,
        )

    async def _commit(self, event: Event[V], term: int) -> None:
        if self.is_closed or self._consumer is None:
            raise Closed("this member has left its group")
        if term != self._terms or not self.is_active:
            raise NotActive(self._group, self._topic)
        place = TopicPartition(event.topic, event.partition, event.offset + 1)
        try:
            await self._worker.call(self._commit_one, place)
        except RequestError as error:
            if error.code not in LOST:
                raise
            self._owned = set()
            self._look()
            raise NotActive(self._group, self._topic) from None

    def _commit_one(self, place: TopicPartition) -> None:
        assert self._consumer is not None
        for committed in self._consumer.commit(offsets=[place], asynchronous=False) or ():
            if committed.error is not None:
                raise KafkaException(committed.error)

    def _look(self) -> None:
        if self.is_active != self._was_active:
            self._was_active = self.is_active
            self._tell(self._on_change)

    async def changed(self, timeout: float | None = None) -> bool:
        await self._ensure_open()
        deadline = None if timeout is None else time.monotonic() + timeout
        before = self._was_active
        while not self.is_closed:
            self._look()
            left = POLL_SECONDS if deadline is None else deadline - time.monotonic()
            if self.is_active != before or left <= 0 or self._polling.ready:
                break
            await self._polling.fill(left)
        self._look()
        return self.is_active

    async def _shut(self, clean: bool) -> None:
        await self._polling.stop()
        try:
            await self._worker.end(*closing(self._consumer))
        finally:
            self._owned = set()
