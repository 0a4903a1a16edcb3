"""What the Python API hands out and takes in."""

from __future__ import annotations

import abc
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Generic, NamedTuple, TypeVar

from millstream.errors import MillstreamError
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
        return datetime.fromtimestamp(self.timestamp / 1000, UTC)

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

    An answer returns when it is durable, and raises `LeaseLost` if it came too late.
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
        await self._answer_to().release(self, _delay(delay), _reason(reason))

    async def reject(self, reason: str = "") -> None:
        """Nobody can do it: it goes to the dead-letter topic, with the reason."""
        await self._answer_to().reject(self, _reason(reason))

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


# What is taken is checked where it is taken: later it would stand among others, and cost them too

TIMESTAMP_MAX = 1 << 62
DELAY_SECONDS_MAX = 100 * 366 * 24 * 3600


def checked(
    timestamp: Any, key: Any, value: Any, headers: Any
) -> tuple[int | None, bytes | None, bytes | None, Headers]:
    """A record's parts as they can be stored; raises `MillstreamError` for one that cannot."""
    if key is not None and type(key) is not bytes:
        key = _bytes(key, "a key is bytes or None")
    if value is not None and type(value) is not bytes:
        value = _bytes(value, "a value is bytes or None", ": give an encoder for it (encode=...)")
    if timestamp is not None and (not isinstance(timestamp, int) or not 0 <= timestamp < TIMESTAMP_MAX):
        raise MillstreamError(f"a timestamp is milliseconds since 1970, as an int, not {timestamp!r}")
    return timestamp, key, value, _headers(headers) if headers else ()


def check_partition(partition: Any) -> None:
    if not isinstance(partition, int) or isinstance(partition, bool):
        raise MillstreamError(f"a partition is an int, not {partition!r}")


def _delay(delay: Any) -> float:
    if not isinstance(delay, int | float) or not 0 <= delay <= DELAY_SECONDS_MAX:
        raise MillstreamError(f"a delay is a number of seconds, from 0 to a hundred years, not {delay!r}")
    return delay


def _reason(reason: Any) -> str:
    """As it can be stored: what UTF-8 cannot say, as in names of files, is said with escapes."""
    if not isinstance(reason, str):
        raise MillstreamError(f"a reason is text, not {type(reason).__name__}: give str(...) of it")
    return reason if reason.isascii() else reason.encode(errors="backslashreplace").decode()


def _headers(headers: Any) -> Headers:
    try:
        pairs = [(name, value) for name, value in headers]
    except (TypeError, ValueError):
        raise MillstreamError("headers are pairs of a name and a value, as (('trace', b'1'),)") from None
    for at, (name, value) in enumerate(pairs):
        if not isinstance(name, str):
            raise MillstreamError(f"a header's name is a str, not {type(name).__name__}")
        if not name.isascii():
            try:
                name.encode()
            except UnicodeEncodeError:
                raise MillstreamError(f"a header's name is text that UTF-8 can say, not {name!r}") from None
        if value is not None and type(value) is not bytes:
            pairs[at] = name, _bytes(value, "a header's value is bytes or None")
    return tuple(pairs)


def _bytes(data: Any, rule: str, advice: str = "") -> bytes:
    if isinstance(data, bytes | bytearray | memoryview):
        return bytes(data)
    raise MillstreamError(f"{rule}, not {type(data).__name__}{advice}")
