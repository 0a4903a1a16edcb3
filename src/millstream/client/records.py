"""The types that the Python API takes and returns."""

from __future__ import annotations

import abc
import reprlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Generic, NamedTuple, TypeVar

from millstream.client.arguments import checked_delay, checked_reason
from millstream.client.consuming import Decoder
from millstream.core.errors import MillstreamError, Undecodable
from millstream.records.record import Headers
from millstream.records.record import Record as StoredRecord

V = TypeVar("V")
R = TypeVar("R", bound="Record[Any]")


class Message(NamedTuple):
    """A record to send, for `send_many`. A tuple of its first two or three fields works as well."""

    topic: str
    value: object
    """Bytes, or the encoder's input. None deletes the key in a compacted topic."""
    key: bytes | None = None
    headers: Headers = ()
    partition: int | None = None
    """None: the partitioner chooses."""
    timestamp: int | None = None
    """Milliseconds since 1970. None: now."""

    @classmethod
    def of(cls, each: Any) -> Message:
        if isinstance(each, Message):
            return each
        if not isinstance(each, tuple | list) or not 2 <= len(each) <= len(cls._fields):
            rule = "a message is a topic, a value and perhaps a key, as ('orders', b'a', b'key')"
            raise MillstreamError(f"{rule}, not {reprlib.repr(each)}")
        return cls(*each)


class Sent(NamedTuple):
    """The position of a sent record."""

    topic: str
    partition: int
    offset: int


@dataclass(slots=True)
class Record(Generic[V]):
    """One record. `value` is bytes, or the decoder's result; None if the record has no value."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    """Milliseconds since 1970."""
    key: bytes | None
    value: V
    headers: Headers = ()

    @property
    def time(self) -> datetime:
        """The timestamp as a `datetime`; the nearest, in year 1 or 9999, if it is out of range."""
        try:
            return datetime.fromtimestamp(self.timestamp / 1000, UTC)
        except (OverflowError, ValueError, OSError):
            return (datetime.max if self.timestamp > 0 else datetime.min).replace(tzinfo=UTC)

    def header(self, name: str) -> bytes | None:
        """The last header of that name."""
        return next((value for each, value in reversed(self.headers) if each == name), None)


@dataclass(slots=True)
class Event(Record[V]):
    """A record of an exclusive group. A commit marks it and all earlier records of its partition as done."""

    _commit: Callable[[Event[V]], Awaitable[None]] | None = field(default=None, repr=False, compare=False)

    async def commit(self) -> None:
        """Returns when durable. Raises `NotActive` if this member is not, or no longer, active."""
        assert self._commit is not None, "only a member of an exclusive group makes events"
        await self._commit(self)


@dataclass(slots=True)
class Job(Record[V]):
    """A record of a queue, leased to this worker until its acknowledgement or the end of the lease.

    An acknowledgement returns when it is durable, and raises `LeaseLost` if it is late. If the store fails, it raises
    another `RequestError`; the lease is unchanged, and the call may be repeated.
    """

    attempt: int = 1
    """The number of this delivery, from 1."""
    _desk: Desk[V] | None = field(default=None, repr=False, compare=False)
    _lease: Any = field(default=None, repr=False, compare=False)
    """The desk's key: a recreated topic has the same name and the same offsets."""

    async def accept(self) -> None:
        """Marks it as done."""
        await self._answer_to().accept(self)

    async def release(self, delay: float = 0.0, reason: str = "") -> None:
        """Makes it available to any worker after `delay` seconds; after too many deliveries it is dead."""
        await self._answer_to().release(self, checked_delay(delay), checked_reason(reason))

    async def reject(self, reason: str = "") -> None:
        """Sends it to the dead-letter topic, with the reason: no retry can help."""
        await self._answer_to().reject(self, checked_reason(reason))

    async def renew(self) -> None:
        """Starts the lease again, for longer work."""
        await self._answer_to().renew(self)

    def _answer_to(self) -> Desk[V]:
        assert self._desk is not None, "only a queue makes jobs"
        return self._desk


class Desk(abc.ABC, Generic[V]):
    """Takes a job's acknowledgements."""

    @abc.abstractmethod
    async def accept(self, job: Job[V]) -> None: ...

    @abc.abstractmethod
    async def release(self, job: Job[V], delay: float, reason: str) -> None: ...

    @abc.abstractmethod
    async def reject(self, job: Job[V], reason: str) -> None: ...

    @abc.abstractmethod
    async def renew(self, job: Job[V]) -> None: ...


def user_record(topic: str, partition: int, stored: StoredRecord, decode: Decoder[V] | None) -> Record[V]:
    offset, timestamp, key, value, headers = stored
    record: Record[Any] = Record(topic, partition, offset, timestamp, key, value, headers)
    return record if decode is None else decoded(record, decode)


def user_job(
    topic: str, partition: int, stored: StoredRecord, decode: Decoder[V] | None, attempt: int, desk: Desk[V], lease: Any
) -> Job[V]:
    offset, timestamp, key, value, headers = stored
    job: Job[Any] = Job(topic, partition, offset, timestamp, key, value, headers, attempt, desk, lease)
    return job if decode is None else decoded(job, decode)


def decoded(record: R, decode: Decoder[Any]) -> R:
    """The record, with its value decoded. An error shows the record as it was."""
    value = record.value
    if value is not None:
        try:
            record.value = decode(value)
        except Exception as error:
            text = f"the decoder refused a value of {len(value)} bytes: {type(error).__name__}: {error}"
            raise Undecodable(record, text) from error
    return record


def fields_of(record: Record[V]) -> tuple[str, int, int, int, bytes | None, V, Headers]:
    return (
        record.topic,
        record.partition,
        record.offset,
        record.timestamp,
        record.key,
        record.value,
        record.headers,
    )
