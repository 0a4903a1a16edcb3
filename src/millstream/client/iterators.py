"""The results of the reading verbs, and their options: the same for embedded and remote brokers."""

from __future__ import annotations

import abc
import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Self, TypeVar

from millstream.client.arguments import Start
from millstream.client.closing import Closable, close_after, close_all
from millstream.client.consuming import Consuming, Decoder, Owner
from millstream.client.records import Event, Job, Record
from millstream.client.signal import Signal

V = TypeVar("V")

logger = logging.getLogger(__name__)


class ReadOptions(NamedTuple):
    topic: str
    partition: int
    offset: int | str
    time: int | None
    follow: bool
    decode: Decoder[Any] | None


class StreamOptions(NamedTuple):
    topics: tuple[str, ...]
    group: str
    start: Start
    commit_every: float
    decode: Decoder[Any] | None


class QueueOptions(NamedTuple):
    topics: tuple[str, ...]
    group: str
    prefetch: int
    settings: Mapping[str, str]
    decode: Decoder[Any] | None


class ExclusiveOptions(NamedTuple):
    topic: str
    group: str
    start: Start
    heartbeat: float | None
    takeover: float | None
    on_change: Callable[[bool], None] | None
    decode: Decoder[Any] | None


class Reading(Consuming[Record[V]]):
    """From `Millstream.read`: records of one partition in order."""

    def __init__(self, owner: Owner, options: ReadOptions) -> None:
        super().__init__(owner)
        self._topic, self._partition, self._offset, self._time, self._follow, self._decode = options
        self._limit: int | None = None
        """Without `follow`: the end at opening."""
        self.is_over = False


class Stream(Consuming[Record[V]]):
    """From `Millstream.stream`: records of the partitions that this member of the group owns.

    A record counts as processed when the caller asks for the next one, or when the `async with` ends without an error.
    Progress is committed every `commit_every` seconds, when the member is idle, when a partition goes to another
    member, and at the end. After a crash, uncommitted records are read again.
    """

    def __init__(self, owner: Owner, options: StreamOptions) -> None:
        super().__init__(owner)
        self._topics, self._group, self._reset, self._commit_every, self._decode = options
        self._is_stopped = False

    @property
    @abc.abstractmethod
    def assignment(self) -> list[tuple[str, int]]:
        """Topic and partition of each partition that this member reads now."""

    @abc.abstractmethod
    async def commit(self) -> None:
        """Commits now, including the last record given."""

    @abc.abstractmethod
    def stop(self) -> None:
        """Fetches nothing more: iteration ends after the fetched records."""


class Streams(Closable, Generic[V]):
    """From `Millstream.streams`: several iterators over one group, by topic.

    async with ms.streams({"clicks": 4}, group="counters") as streams:
        await asyncio.gather(*(count(stream) for stream in streams["clicks"]))
    """

    def __init__(self, by_topic: Mapping[str, Sequence[Stream[V]]]) -> None:
        self._by_topic = {topic: list(streams) for topic, streams in by_topic.items()}

    def __getitem__(self, topic: str) -> list[Stream[V]]:
        return self._by_topic[topic]

    def __iter__(self) -> Iterator[Stream[V]]:
        for streams in self._by_topic.values():
            yield from streams

    def __len__(self) -> int:
        return sum(map(len, self._by_topic.values()))

    def stop(self) -> None:
        """Each iterator ends after its fetched records."""
        for stream in self:
            stream.stop()

    async def __aenter__(self) -> Self:
        try:
            await asyncio.gather(*(stream.__aenter__() for stream in self))
        except BaseException as error:
            await close_after(error, self.close(clean=False))
            raise
        return self

    async def close(self, *, clean: bool = True) -> None:
        await close_all(stream.close(clean=clean) for stream in self)


class Queue(Consuming[Job[V]]):
    """From `Millstream.queue`: leased jobs. Closing releases unacknowledged ones."""

    def __init__(self, owner: Owner, options: QueueOptions) -> None:
        super().__init__(owner)
        self._topics, self._group, self._prefetch, self._settings, self._decode = options


class Exclusive(Consuming[Event[V]]):
    """From `Millstream.exclusive`: all of a topic in order, while this member is active.

    `receive(timeout)` returns None in standby and at the end of the topic: the caller regains control in both.
    """

    def __init__(self, owner: Owner, options: ExclusiveOptions) -> None:
        super().__init__(owner)
        self._topic, self._group, self._reset, _, _, self._on_change, self._decode = options
        self._was_active = False
        self._changes = 0
        self._change = Signal(owner.clock)

    @property
    @abc.abstractmethod
    def is_active(self) -> bool: ...

    async def changed(self, timeout: float | None = None) -> bool:
        """Returns the new `is_active` when it changes; or the current one after `timeout` seconds.

        Changes before the call do not count: read `is_active` for them.
        """
        await self._ensure_open()
        clock, before = self._owner.clock, self._changes
        deadline = None if timeout is None else clock.monotonic() + timeout
        while self._changes == before and not self.is_closed:
            left = None if deadline is None else max(deadline - clock.monotonic(), 0.0)
            if not await self._change.wait(left):
                break
        return self.is_active

    def _look(self) -> None:
        """Reports a change, if there is one."""
        self._note(self.is_active)

    def _note(self, is_active: bool) -> None:
        """Logs the callback's exceptions: they must not cost the group its heartbeats, or the caller its event."""
        if is_active == self._was_active:
            return
        self._was_active = is_active
        self._changes += 1
        self._change.set()
        if self._on_change is not None:
            try:
                self._on_change(is_active)
            except Exception:
                logger.exception("on_change failed")
