"""Reading a partition of a server, without a group."""

from __future__ import annotations

import time as clock
from typing import TYPE_CHECKING, Any, TypeVar, cast

from confluent_kafka import (
    OFFSET_BEGINNING,
    OFFSET_END,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)

from millstream.client.iterators import Reading, ReadOptions
from millstream.client.records import Record, user_record
from millstream.client.remote_worker import POLL_SECONDS, Polled, failure
from millstream.core.errors import Code, OutOfRange, UnknownTopic, Unreachable, code_of
from millstream.records.record import Record as StoredRecord

if TYPE_CHECKING:
    from millstream.client.remote import Remote

V = TypeVar("V")
MESSAGES_MAX = 500
"""Messages taken from the client per poll."""
RETRY_SECONDS = 0.1
_OUT_OF_RANGE = frozenset({KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE})


class RemoteReading(Reading[V], Polled[Consumer, Message]):
    _owner: Remote
    _thread_name = "millstream-read"

    def __init__(self, owner: Remote, options: ReadOptions) -> None:
        super().__init__(owner, options)
        self._begin()
        self._next_offset = 0

    async def _start(self) -> None:
        self._owner.check_open()
        self._begin()
        settings = self._owner.consumer_settings(
            self._owner.name(), **{"auto.offset.reset": "error", "enable.partition.eof": True}
        )
        self._consumer = Consumer(settings)
        await self._worker.call(self._seek)

    def _seek(self) -> None:
        """On the worker's thread. Retriable errors restart the search: the topic may have been deleted meanwhile."""
        assert self._consumer is not None
        deadline = clock.monotonic() + self._owner.timeout
        while True:
            try:
                high, offset = self._find(deadline)
                break
            except KafkaException as error:
                if self.is_closed or not _may_pass(error) or clock.monotonic() + RETRY_SECONDS > deadline:
                    if error.args[0].code() in _LOST_TRACK:
                        raise Unreachable(f"no broker answered in time: {error.args[0].str()}") from None
                    raise
            clock.sleep(RETRY_SECONDS)
        self._limit = None if self._follow else high
        self._next_offset = offset
        self._consumer.assign([TopicPartition(self._topic, self._partition, offset)])

    def _find(self, deadline: float) -> tuple[int, int]:
        """The partition's end, and the start offset."""
        assert self._consumer is not None
        found = self._consumer.list_topics(self._topic, _left(deadline)).topics[self._topic]
        if found.error is not None and found.error.code() != Code.UNKNOWN_TOPIC_OR_PARTITION:
            raise KafkaException(found.error)
        if found.error is not None or self._partition not in found.partitions:
            detail = f"there is no partition {self._partition} of a topic {self._topic}"
            raise UnknownTopic(Code.UNKNOWN_TOPIC_OR_PARTITION, detail)
        low, high = self._at_time(OFFSET_BEGINNING, deadline), self._at_time(OFFSET_END, deadline)
        if self._time is not None:
            timed = self._at_time(self._time, deadline)
            return high, timed if timed >= 0 else high  # a new record may have an offset above `high`
        offset = {"start": low, "end": high}[self._offset] if isinstance(self._offset, str) else self._offset
        if not low <= offset <= high:
            detail = f"{self._topic}-{self._partition} holds offsets {low} to {high}, not {offset}"
            raise OutOfRange(Code.OFFSET_OUT_OF_RANGE, detail)
        return high, offset

    def _at_time(self, time: int, deadline: float) -> int:
        """The offset of the first record at or after a time, negative if there is none; or the start, or the end.

        librdkafka's own call for start and end silently takes one for the other if a broker refuses one of its two
        requests. This call raises the error.
        """
        assert self._consumer is not None
        place = TopicPartition(self._topic, self._partition, time)
        [found] = self._consumer.offsets_for_times([place], _left(deadline))
        if found.error is not None:
            raise KafkaException(found.error)
        return int(found.offset)

    def _poll(self, seconds: float) -> list[Message]:
        return poll(self._consumer, seconds)

    async def _next(self, timeout: float | None) -> Record[V] | None:
        deadline = None if timeout is None else clock.monotonic() + timeout
        while not self.is_closed:
            if self._limit is not None and self._next_offset >= self._limit:
                self.is_over = True
                return None
            left = POLL_SECONDS if deadline is None else deadline - clock.monotonic()
            await self._polling.fill(left)
            while self._polling.ready:
                message = self._polling.ready.popleft()
                error = message.error()
                if error is None:
                    self._next_offset = (message.offset() or 0) + 1
                    return user_record(*place_of(message), stored(message), self._decode)
                if error.code() == KafkaError._PARTITION_EOF:
                    self._next_offset = max(self._next_offset, message.offset() or 0)
                elif error.code() in _OUT_OF_RANGE:
                    raise OutOfRange(Code.OFFSET_OUT_OF_RANGE, error.str())
                else:
                    raise_for(error)
            if deadline is not None and clock.monotonic() >= deadline:
                return None
        return None

    async def _shut(self, clean: bool) -> None:
        await self._polling.stop()
        await self._end()


def _left(deadline: float) -> float:
    return max(deadline - clock.monotonic(), RETRY_SECONDS)


def _may_pass(error: KafkaException) -> bool:
    """Whether a retry may help: the error is retriable, or the client has just lost the broker."""
    number = error.args[0].code()
    code = code_of(number)
    return number in PASSING or number in _LOST_TRACK or (code is not None and code.retriable)


def poll(consumer: Consumer | None, seconds: float) -> list[Message]:
    """Waits for the first message, and takes the others that are there. On the worker's thread."""
    assert consumer is not None
    first = consumer.poll(seconds)
    return [] if first is None else [first, *consumer.consume(MESSAGES_MAX, 0)]


def raise_for(error: Any) -> None:
    """Raises an error among the messages, except those that librdkafka retries by itself."""
    if error.fatal() or not (error.retriable() or error.code() in PASSING):
        raise failure(error)


PASSING = frozenset({KafkaError._ALL_BROKERS_DOWN, KafkaError._TRANSPORT, KafkaError._TIMED_OUT, KafkaError._RESOLVE})

_LOST_TRACK = frozenset({KafkaError._UNKNOWN_PARTITION, KafkaError._DESTROY_BROKER})
"""librdkafka's errors when a partition's leader has just gone; they do not mean that there is no partition."""


def place_of(message: Message) -> tuple[str, int]:
    return message.topic() or "", message.partition() or 0


def stored(message: Message) -> StoredRecord:
    key, value, headers = cast(tuple[Any, Any, Any], (message.key(), message.value(), tuple(message.headers() or ())))
    return StoredRecord(message.offset() or 0, message.timestamp()[1], key, value, headers)
