"""A member of an exclusive group on a server: the consumer protocol (KIP-848) with our assignor `exclusive`.

The broker makes one member active, which owns all partitions; another takes over when that member leaves, or when its
session ends. The broker sets the session timeout, because the protocol has no field for it: so a `heartbeat` or a
`takeover` is refused.

Changes of the group arrive during polls, perhaps several in one: the worker's thread notes them, the loop reports them.
While no task receives, `_keep_up` polls now and then. If fetched records wait, it polls with their partitions paused:
it learns of changes and fetches nothing more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Any, TypeVar

from confluent_kafka import Consumer, KafkaException, Message, TopicPartition

from millstream.client.iterators import Exclusive, ExclusiveOptions
from millstream.client.records import Event, fields_of, user_record
from millstream.client.remote_member import LOST, RemoteMember
from millstream.client.remote_reading import place_of, poll, raise_for, stored
from millstream.client.remote_worker import POLL_SECONDS
from millstream.core.errors import Closed, Code, MillstreamError, NotActive, refusal

if TYPE_CHECKING:
    from millstream.client.remote import Remote

V = TypeVar("V")
Taken = tuple[int, Message]
"""With the term of its fetch."""
ANOTHER_KIND = "group id does not exist"
"""The brokers' error if the group has another kind; librdkafka keeps the text and not the code."""
KEEP_UP_SECONDS = 0.1
STALE_PAUSES = 0.01, 0.05, 0.2, 0.5, 1.0
"""Pauses before a commit is retried: a new group epoch does not imply another active member."""
HOLD_SECONDS = 1.0
"""Records that wait this long have a slow reader: later ones are dropped and fetched again."""

logger = logging.getLogger(__name__)


class RemoteExclusive(Exclusive[V], RemoteMember[Taken]):
    _owner: Remote
    _thread_name = "millstream-exclusive"

    def __init__(self, owner: Remote, options: ExclusiveOptions) -> None:
        super().__init__(owner, options)
        self._keeping_up: asyncio.Task[None] | None = None
        self._owned: set[int] = set()
        """Changed on the worker's thread, like those below."""
        self._terms = 0
        self._committed: dict[int, int] = {}
        self._is_paused = False
        self._taken_at = 0.0
        self._begin()

    def _begin(self) -> None:
        super()._begin()
        self._untold: deque[bool] = deque()
        """This member's changes to active or standby, in order."""

    @property
    def is_active(self) -> bool:
        return self._was_active

    def _look(self) -> None:
        while self._untold:
            self._note(self._untold.popleft())

    async def _start(self) -> None:
        self._owner.check_open()
        self._begin()
        await self._owner.partition_count(self._topic)
        settings = {
            "group.protocol": "consumer",
            "group.remote.assignor": "exclusive",
            "auto.offset.reset": self._reset,
        }
        settings = self._owner.consumer_settings(self._group, **settings)
        await self._subscribe(settings, [self._topic], self._assigned, self._revoked, self._revoked)
        self._taken_at = time.monotonic()
        self._keeping_up = asyncio.ensure_future(self._keep_up())

    # On the worker's thread

    def _poll(self, seconds: float) -> list[Taken]:
        assert self._consumer is not None
        if self._is_paused and (places := self._consumer.assignment()):  # without any, new partitions stay paused
            self._is_paused = False
            self._consumer.resume(places)
        messages = poll(self._consumer, seconds)
        return [(self._terms, message) for message in messages]

    def _listen(self) -> None:
        """Polls for group changes only."""
        assert self._consumer is not None
        self._consumer.pause(self._consumer.assignment())
        self._is_paused = True
        messages = poll(self._consumer, 0.0)
        self._polling.ready.extend((self._terms, message) for message in messages)  # one may have been in flight

    def _assigned(self, consumer: Consumer, places: list[TopicPartition]) -> None:
        self._has_joined = True
        if not self._owned:
            self._terms += 1
            self._untold.append(True)
        self._owned = self._owned | {place.partition for place in places}

    def _revoked(self, consumer: Consumer, places: list[TopicPartition]) -> None:
        self._own_only(self._owned - {place.partition for place in places})
        for place in places:
            self._committed.pop(place.partition, None)

    def _own_only(self, left: set[int]) -> None:
        if self._owned and not left:
            self._untold.append(False)
        self._owned = left

    def _commit_one(self, place: TopicPartition, term: int) -> None:
        """Skips offsets below the one committed in this term: a commit never moves a position back."""
        if term != self._terms or place.partition not in self._owned:
            raise NotActive(self._group, self._topic)
        if place.offset <= self._committed.get(place.partition, 0):
            return
        for pause in (*STALE_PAUSES, None):
            try:
                self._commit_places([place])
                break
            except KafkaException as error:
                code = error.args[0].code()
                if code == Code.STALE_MEMBER_EPOCH and pause is not None:
                    time.sleep(pause)  # a member joined or left; the client learns the epoch with its heartbeat
                elif code in LOST and code != Code.STALE_MEMBER_EPOCH:
                    self._own_only(set())
                    raise NotActive(self._group, self._topic) from None
                else:
                    raise
        self._committed[place.partition] = place.offset

    # On the event loop's thread

    async def _keep_up(self) -> None:
        while True:
            await asyncio.sleep(KEEP_UP_SECONDS)
            try:
                if not self._polling.ready:
                    await self._polling.fill(0.0)
                elif time.monotonic() - self._taken_at >= HOLD_SECONDS:
                    await self._worker.call(self._listen)
            except MillstreamError as error:
                logger.warning("group %s: %s", self._group, error)
            self._look()

    async def _next(self, timeout: float | None) -> Event[V] | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.is_closed:
            self._look()
            while self._polling.ready:
                term, message = self._polling.ready.popleft()
                self._taken_at = time.monotonic()
                if message.error() is not None:
                    self._raise_for(message.error())
                elif term == self._terms and self._owned:
                    return self._event(term, message)
            left = POLL_SECONDS if deadline is None else deadline - time.monotonic()
            if left <= 0:
                return None
            await self._polling.fill(left)
        return None

    def _raise_for(self, error: Any) -> None:
        if ANOTHER_KIND in error.str():
            detail = f"group {self._group} is not exclusive; choose another name, or delete it"
            raise refusal(Code.INCONSISTENT_GROUP_PROTOCOL, detail)
        raise_for(error)

    def _event(self, term: int, message: Message) -> Event[V]:
        record = user_record(*place_of(message), stored(message), self._decode)

        async def commit(event: Event[V]) -> None:
            await self._commit(event, term)

        return Event(*fields_of(record), commit)

    async def _commit(self, event: Event[V], term: int) -> None:
        if self.is_closed or self._consumer is None:
            raise Closed("this member has left its group")
        place = TopicPartition(event.topic, event.partition, event.offset + 1)
        try:
            await self._worker.call(self._commit_one, place, term)
        except NotActive:
            self._look()
            raise

    async def _shut(self, clean: bool) -> None:
        keeping_up, self._keeping_up = self._keeping_up, None
        self._look()
        self._note(False)
        if keeping_up is not None:
            keeping_up.cancel()
            await asyncio.wait([keeping_up])
        self._change.set()
        await self._polling.stop()
        try:
            await self._end(self._let_join)
        finally:
            self._owned = set()
