"""What the Python API hands out and takes in."""

from __future__ import annotations

import abc
import reprlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Generic, NamedTuple, TypeVar

from millstream.client.arguments import checked_delay, checked_reason
from millstream.core.errors import MillstreamError
from millstream.records.record import Headers

V = TypeVar("V")


class Message(NamedTuple):
    """A record on its way in, for `send_many`. A tuple of its first two or three fields does as well."""

    topic: str
    value: object
    """Bytes, or whatever the encoder takes. None deletes the key in a compacted topic."""
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
    """Where a record went."""

    topic: str
    partition: int
    offset: int


@dataclass(slots=True)
class Record(Generic[V]):
    """One record. `value` is bytes, or what the decoder made of them; None where the record has no value."""

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
        """The timestamp as a `datetime`. One that no `datetime` can hold gives the nearest: of year 1, or of 9999."""
        try:
            return datetime.fromtimestamp(self.timestamp / 1000, UTC)
        except (OverflowError, ValueError, OSError):
            return (datetime.max if self.timestamp > 0 else datetime.min).replace(tzinfo=UTC)

    def header(self, name: str) -> bytes | None:
        """The last header of that name."""
        return next((value for each, value in reversed(self.headers) if each == name), None)


@dataclass(slots=True)
class Event(Record[V]):
    """A record of an exclusive group. Committing it says that it and all before it in its partition are done."""

    _commit: Callable[[Event[V]], Awaitable[None]] | None = field(default=None, repr=False, compare=False)

    async def commit(self) -> None:
        """Returns when durable. Raises `NotActive` if this member is not the active one (any more)."""
        assert self._commit is not None, "only a member of an exclusive group makes events"
        await self._commit(self)


@dataclass(slots=True)
class Job(Record[V]):
    """A record of a queue, leased to this worker until it is answered or its lease ends.

    An answer returns when it is durable, and raises `LeaseLost` if it came too late. One that cannot be stored raises
    another `RequestError`; the lease is as it was, and the answer may be repeated.
    """

    attempt: int = 1
    """Which delivery this is, from 1."""
    _desk: Desk[V] | None = field(default=None, repr=False, compare=False)
    _lease: Any = field(default=None, repr=False, compare=False)
    """What the desk knows it by: a topic that was made anew has the same name, and the same offsets."""

    async def accept(self) -> None:
        """It is done."""
        await self._answer_to().accept(self)

    async def release(self, delay: float = 0.0, reason: str = "") -> None:
        """It may be given to any worker again, after `delay` seconds; after too many deliveries it is dead."""
        await self._answer_to().release(self, checked_delay(delay), checked_reason(reason))

    async def reject(self, reason: str = "") -> None:
        """Nobody can do it: it goes to the dead-letter topic, with the reason."""
        await self._answer_to().reject(self, checked_reason(reason))

    async def renew(self) -> None:
        """It takes longer: the lease begins anew."""
        await self._answer_to().renew(self)

    def _answer_to(self) -> Desk[V]:
        assert self._desk is not None, "only a queue makes jobs"
        return self._desk


class Desk(abc.ABC, Generic[V]):
    """Where a job's answers go."""

    @abc.abstractmethod
    async def accept(self, job: Job[V]) -> None: ...

    @abc.abstractmethod
    async def release(self, job: Job[V], delay: float, reason: str) -> None: ...

    @abc.abstractmethod
    async def reject(self, job: Job[V], reason: str) -> None: ...

    @abc.abstractmethod
    async def renew(self, job: Job[V]) -> None: ...
