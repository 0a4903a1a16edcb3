"""A member of a stream group on a server: Kafka's consumer group, which commits its progress.

Rebalances happen inside a poll, and a poll happens only when the caller has consumed all fetched records. By then all
given records are processed, and are committed before a partition is revoked.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, TypeVar

from confluent_kafka import Consumer, KafkaException, Message
from confluent_kafka import TopicPartition as PartitionOffset

from millstream.client.iterators import Stream, StreamOptions
from millstream.client.records import Record, user_record
from millstream.client.remote_member import LOST, RemoteMember
from millstream.client.remote_reading import place_of, poll, raise_for, stored
from millstream.client.remote_worker import POLL_SECONDS
from millstream.core.errors import NotMember, RequestError

if TYPE_CHECKING:
    from millstream.client.remote import Remote
    from millstream.wire.kafka.requests import TopicPartition

V = TypeVar("V")
logger = logging.getLogger(__name__)


class RemoteStream(Stream[V], RemoteMember[Message]):
    _owner: Remote
    _thread_name = "millstream-stream"

    def __init__(self, owner: Remote, options: StreamOptions) -> None:
        super().__init__(owner, options)
        self._begin()
        self._owned: set[TopicPartition] = set()
        """Changed on the worker's thread only, like those below."""
        self._processed: dict[TopicPartition, int] = {}
        self._committed: dict[TopicPartition, int] = {}
        self._committed_at = time.monotonic()
        self._last: Message | None = None

    @property
    def assignment(self) -> list[TopicPartition]:
        return sorted(self._owned)

    def stop(self) -> None:
        self._is_stopped = True

    async def _start(self) -> None:
        self._owner.check_open()
        self._begin()
        for topic in self._topics:
            await self._owner.partition_count(topic)  # creates it, so that no member waits for old metadata to expire
        settings = self._owner.consumer_settings(self._group, **{"auto.offset.reset": self._reset, **self._settings()})
        await self._subscribe(settings, self._topics, self._assigned, self._revoked, self._lost)

    def _settings(self) -> dict[str, object]:
        return {}

    # On the worker's thread

    def _poll(self, seconds: float) -> list[Message]:
        self._commit_now_and_then()
        messages = poll(self._consumer, seconds)
        if not messages:
            self._commit_now_and_then(idle=True)
        return messages

    def _assigned(self, consumer: Consumer, places: list[PartitionOffset]) -> None:
        self._has_joined = True
        self._owned |= {(place.topic, place.partition) for place in places}

    def _revoked(self, consumer: Consumer, places: list[PartitionOffset]) -> None:
        gone = {(place.topic, place.partition) for place in places}
        try:
            self._commit({place: offset for place, offset in self._progress().items() if place in gone})
        except KafkaException as error:
            logger.warning("group %s: cannot commit progress: %s", self._group, error)
        self._forget(gone)

    def _lost(self, consumer: Consumer, places: list[PartitionOffset]) -> None:
        self._forget({(place.topic, place.partition) for place in places})

    def _forget(self, gone: set[TopicPartition]) -> None:
        self._owned -= gone
        for place in gone:
            self._processed.pop(place, None)
            self._committed.pop(place, None)

    def _progress(self) -> dict[TopicPartition, int]:
        processed = dict(self._processed)
        return {
            place: offset
            for place, offset in processed.items()
            if place in self._owned and self._committed.get(place) != offset
        }

    def _commit_progress(self) -> None:
        self._commit(self._progress())

    def _commit_now_and_then(self, *, idle: bool = False) -> None:
        if idle or time.monotonic() - self._committed_at >= self._commit_every:
            self._committed_at = time.monotonic()
            try:
                self._commit(self._progress())
            except KafkaException as error:
                logger.warning("group %s: commit failed; the next commit repeats its offsets: %s", self._group, error)

    def _commit(self, progress: dict[TopicPartition, int]) -> None:
        if progress:
            self._commit_places([PartitionOffset(*place, offset) for place, offset in progress.items()])
            self._committed.update(progress)

    # On the event loop's thread

    async def _next(self, timeout: float | None) -> Record[V] | None:
        self._process_last()
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.is_closed:
            while self._polling.ready:
                message = self._polling.ready.popleft()
                if message.error() is not None:
                    raise_for(message.error())
                elif place_of(message) in self._owned:
                    self._last = message
                    return user_record(*place_of(message), stored(message), self._decode)
            if self._is_stopped:
                await self.close()
                return None
            left = POLL_SECONDS if deadline is None else deadline - time.monotonic()
            if left <= 0:
                return None
            await self._polling.fill(left)
        return None

    def _process_last(self) -> None:
        if self._last is not None:
            self._processed[place_of(self._last)] = (self._last.offset() or 0) + 1
            self._last = None

    async def commit(self) -> None:
        self._process_last()
        await self._commit_all()

    async def _commit_all(self) -> None:
        try:
            await self._worker.call(self._commit_progress)  # computed then: a poll may give up partitions
        except RequestError as error:
            if error.code in LOST:
                raise NotMember(f"this member of {self._group} lost its partitions: {error.detail}") from None
            raise

    async def _shut(self, clean: bool) -> None:
        if clean:
            self._process_last()
        await self._polling.stop()
        try:
            if self._consumer is not None:
                await self._commit_all()
        except NotMember as error:
            logger.warning("%s", error)
        finally:
            await self._end(self._let_join)
