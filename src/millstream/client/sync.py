"""The verbs of `millstream` without async, for scripts, notebooks and threads.

    import millstream.sync

    with millstream.sync.open("sqlite:app.db") as ms:
        ms.send("orders", b"one widget", key=b"user-1")
        for record in ms.read("orders", follow=False):
            print(record.offset, record.value)

Everything runs on an event loop in a thread of its own; a call hands its work over and waits for it. So heartbeats and
timers go on while a script computes, and several threads may use one object: `streams` gives each an iterator.
Threads do not survive a fork: a child process opens its own object, and an inherited one raises an error.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from millstream.client import api, iterators
from millstream.client.closing import close_after
from millstream.client.consuming import Consuming
from millstream.client.records import Event as AsyncEvent
from millstream.client.records import Job as AsyncJob
from millstream.client.records import Message, Record, Sent, fields_of
from millstream.client.sending import Sender as AsyncSender
from millstream.core.errors import Closed, MillstreamError, Undecodable

T = TypeVar("T")
A = TypeVar("A")
V = TypeVar("V")
AHEAD_MAX = 500
"""Records that a `read` hands to the caller's thread at a time: a thread switch costs more than a record."""
FINISH_SECONDS = 1.0
"""The grace period of pending work when all is closed."""


class Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="millstream-sync", daemon=True)
        self._handing_over = threading.Lock()
        self._is_ended = False
        self._process = os.getpid()
        self._thread.start()

    @property
    def is_inherited(self) -> bool:
        """By a forked process, which lacks the thread: no call would return."""
        return os.getpid() != self._process

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        if threading.current_thread() is self._thread:
            work.close()
            raise MillstreamError("a callback runs on the event loop and cannot wait for a call of this module")
        if self.is_inherited:
            work.close()
            raise Closed("the instance was opened before this process was forked: open a new one in this process")
        with self._handing_over:
            if self._is_ended:
                work.close()
                raise Closed("the instance is closed")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise Closed("the instance was closed during the call") from None
        except BaseException:
            # An interrupt in the caller's thread: the result is not wanted any more.
            if not future.done():
                future.cancel()
                with contextlib.suppress(concurrent.futures.CancelledError, Exception):
                    future.result(1.0)
            raise

    def post(self, work: Callable[[], None]) -> None:
        """Runs on the loop, before this thread's next call; the caller does not wait."""
        if self.is_inherited:
            return
        with self._handing_over:
            if not self._is_ended:
                self._loop.call_soon_threadsafe(work)

    def call_last(self, work: Coroutine[Any, Any, None]) -> None:
        """Closes an object; does nothing if all is closed already."""
        try:
            self.call(work)
        except Closed:
            if not self._is_ended and not self.is_inherited:
                raise

    def end(self) -> None:
        """Leaves no thread waiting: pending calls return their result, or raise `Closed`."""
        if threading.current_thread() is self._thread or self.is_inherited:
            return  # a callback, which was refused: it would wait for itself; or there is nothing to end
        with self._handing_over:
            if self._is_ended:
                return
            self._is_ended = True
        asyncio.run_coroutine_threadsafe(self._finish(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _finish(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=FINISH_SECONDS)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=FINISH_SECONDS)
        await self._loop.shutdown_asyncgens()


@dataclass(slots=True)
class Event(Record[V]):
    """See `millstream.Event`."""

    _event: AsyncEvent[V] | None = field(default=None, repr=False, compare=False)
    _loop: Loop | None = field(default=None, repr=False, compare=False)

    def commit(self) -> None:
        assert self._event is not None and self._loop is not None
        self._loop.call(self._event.commit())


@dataclass(slots=True)
class Job(Record[V]):
    """See `millstream.Job`."""

    attempt: int = 1
    _job: AsyncJob[V] | None = field(default=None, repr=False, compare=False)
    _loop: Loop | None = field(default=None, repr=False, compare=False)

    def accept(self) -> None:
        self._call(lambda job: job.accept())

    def release(self, delay: float = 0.0, reason: str = "") -> None:
        self._call(lambda job: job.release(delay, reason))

    def reject(self, reason: str = "") -> None:
        self._call(lambda job: job.reject(reason))

    def renew(self) -> None:
        self._call(lambda job: job.renew())

    def _call(self, answer: Callable[[AsyncJob[V]], Coroutine[Any, Any, None]]) -> None:
        assert self._job is not None and self._loop is not None
        self._loop.call(answer(self._job))


class Held:
    """An object of the API that a `with` opens and closes."""

    def __init__(self, loop: Loop, held: Consuming[Any] | iterators.Streams[Any]) -> None:
        self._loop = loop
        self._held = held

    def __enter__(self) -> Self:
        try:
            self._loop.call(self._held.__aenter__())
        except BaseException as error:  # also an interrupt, after which no `with` would close it
            self._loop.call_last(self._give_up(error))
            raise
        return self

    async def _give_up(self, error: BaseException) -> None:
        await close_after(error, self._held.close(clean=False))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_last(self._held.__aexit__(kind, error, trace))


class Items(Held, Generic[A, T]):
    """An iterator of the API, for a thread. Used without `with`, it closes when the loop over it ends.

    A thread that is interrupted (Ctrl-C) while it waits loses nothing: the next call gets the item taken for it, and
    the item counts as given only then.
    """

    def __init__(self, loop: Loop, items: Consuming[A], made: Callable[[A], T]) -> None:
        super().__init__(loop, items)
        self._items = items
        self._made = made
        self._is_held = False
        self._back: deque[A] = deque()
        """Taken for a thread that was interrupted. Used on the loop only."""

    def __enter__(self) -> Self:
        self._is_held = True
        return super().__enter__()

    def receive(self, timeout: float | None = None) -> T | None:
        """The next item, or None after the timeout."""
        return self._fetch(lambda: self._items.receive(timeout))

    def _fetch(self, ask: Callable[[], Coroutine[Any, Any, A | None]]) -> T | None:
        given: list[A] = []
        is_left = False

        async def take() -> None:
            item = self._back.popleft() if self._back else await ask()
            if item is not None:
                given.append(item)
            self._items.is_held_back = bool(self._back)
            if is_left:
                leave()

        def leave() -> None:
            nonlocal is_left
            is_left = True
            self._back.extendleft(given)
            self._items.is_held_back = bool(self._back)

        try:
            self._loop.call(take())
            return self._made(given[0]) if given else None
        except BaseException as error:  # if the call failed nothing is given; else it is an interrupt
            self._loop.post(leave)
            if isinstance(error, Undecodable) and isinstance(error.record, AsyncJob):
                error.record = self._made(error.record)  # type: ignore[arg-type]  # A is a job, to acknowledge
            raise

    def __iter__(self) -> Iterator[T]:
        try:
            while (item := self._following()) is not None:
                yield item
        finally:
            if not self._is_held:
                self._loop.call_last(self._items.close(clean=False))

    def _following(self) -> T | None:
        """None at the end, also if another thread has closed it."""

        try:
            return self._fetch(self._ask)
        except Closed:
            if not self._items.is_closed:
                raise
            return None

    async def _ask(self) -> A | None:
        return None if self._items.is_closed else await self._items.receive()

    def close(self) -> None:
        self._loop.call_last(self._items.close())


class Reading(Items[Record[V], Record[V]]):
    """Takes records over in chunks; after a break, the next call gets the rest of the chunk."""

    def __init__(self, loop: Loop, reading: iterators.Reading[V]) -> None:
        super().__init__(loop, reading, lambda record: record)
        self._ahead: deque[Record[V]] = deque()
        self._error: Exception | None = None
        """Raised after those records."""

    def receive(self, timeout: float | None = None) -> Record[V] | None:
        return self._taken() or super().receive(timeout)

    def _fetch(self, ask: Callable[[], Coroutine[Any, Any, Record[V] | None]]) -> Record[V] | None:
        async def take() -> None:
            if not self._ahead and self._error is None:  # else there are records taken for an interrupted thread
                first = await ask()
                if first is not None:
                    self._ahead.append(first)

        self._loop.call(take())
        return self._taken()

    def _following(self) -> Record[V] | None:
        return self._taken() or super()._following()

    def _taken(self) -> Record[V] | None:
        if self._ahead:
            return self._ahead.popleft()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return None

    async def _ask(self) -> None:
        first = await super()._ask()
        if first is None:
            return
        self._ahead.append(first)
        try:
            while len(self._ahead) < AHEAD_MAX and not self._items.is_closed:
                more = await self._items.receive(0)
                if more is None:
                    break
                self._ahead.append(more)
        except Exception as error:
            self._error = error


class Stream(Items[Record[V], Record[V]]):
    def __init__(self, loop: Loop, stream: iterators.Stream[V]) -> None:
        super().__init__(loop, stream, lambda record: record)
        self._stream = stream

    @property
    def assignment(self) -> list[tuple[str, int]]:
        return self._stream.assignment

    def commit(self) -> None:
        async def commit() -> None:
            if self._stream.is_held_back:
                raise MillstreamError("a record was in flight when this thread was interrupted: receive it first")
            await self._stream.commit()

        self._loop.call(commit())

    def stop(self) -> None:
        async def stop() -> None:
            self._stream.stop()

        self._loop.call(stop())


class Streams(Held, Generic[V]):
    """Several iterators over one group: one for each thread."""

    def __init__(self, loop: Loop, streams: iterators.Streams[V], counts: Mapping[str, int]) -> None:
        super().__init__(loop, streams)
        self._by_topic = {topic: [Stream(loop, each) for each in streams[topic]] for topic in counts}

    def __getitem__(self, topic: str) -> list[Stream[V]]:
        return self._by_topic[topic]

    def __iter__(self) -> Iterator[Stream[V]]:
        for streams in self._by_topic.values():
            yield from streams

    def __enter__(self) -> Self:
        super().__enter__()
        for stream in self:
            stream._is_held = True
        return self

    def stop(self) -> None:
        for stream in self:
            stream.stop()


class Exclusive(Items[AsyncEvent[V], Event[V]]):
    def __init__(self, loop: Loop, exclusive: iterators.Exclusive[V]) -> None:
        super().__init__(loop, exclusive, self._event)
        self._exclusive = exclusive

    def _event(self, event: AsyncEvent[V]) -> Event[V]:
        return Event(*fields_of(event), event, self._loop)

    @property
    def is_active(self) -> bool:
        return self._exclusive.is_active

    def changed(self, timeout: float | None = None) -> bool:
        return self._loop.call(self._exclusive.changed(timeout))


class Sender:
    """See `millstream.Sender`."""

    def __init__(self, loop: Loop, sender: AsyncSender) -> None:
        self._loop = loop
        self._sender = sender

    def send(self, value: Any, **options: Any) -> None:
        self._loop.call(self._sender.send(value, **options))

    def flush(self) -> None:
        self._loop.call(self._sender.flush())

    def close(self) -> None:
        self._loop.call_last(self._sender.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_last(self._sender.__aexit__(kind, error, trace))


class Millstream:
    """The result of `open` and `connect`: see `millstream.Millstream` for the verbs and their options."""

    def __init__(self, make: Callable[[], api.Millstream]) -> None:
        self._loop = Loop()

        async def made() -> api.Millstream:
            return make()

        try:
            self._ms = self._loop.call(made())
            self._loop.call(self._ms.__aenter__())
        except BaseException:
            self._loop.end()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._loop.call_last(self._ms.__aexit__(kind, error, trace))
        finally:
            self._loop.end()

    def close(self, *, clean: bool = True) -> None:
        try:
            self._loop.call_last(self._ms.close(clean=clean))
        finally:
            self._loop.end()

    def send(self, topic: str, value: Any, **options: Any) -> Sent:
        return self._loop.call(self._ms.send(topic, value, **options))

    def send_many(self, messages: Iterable[Message | tuple[Any, ...]], **options: Any) -> list[Sent]:
        return self._loop.call(self._ms.send_many(messages, **options))

    def sender(self, topic: str | None = None, **options: Any) -> Sender:
        return Sender(self._loop, self._made(lambda: self._ms.sender(topic, **options)))

    def read(self, topic: str, **options: Any) -> Reading[Any]:
        return Reading(self._loop, self._made(lambda: self._ms.read(topic, **options)))

    def stream(self, topics: str | Sequence[str], *, group: str, **options: Any) -> Stream[Any]:
        return Stream(self._loop, self._made(lambda: self._ms.stream(topics, group=group, **options)))

    def streams(self, counts: Mapping[str, int], *, group: str, **options: Any) -> Streams[Any]:
        return Streams(self._loop, self._made(lambda: self._ms.streams(counts, group=group, **options)), counts)

    def queue(self, topics: str | Sequence[str], *, group: str, **options: Any) -> Items[AsyncJob[Any], Job[Any]]:
        queue = self._made(lambda: self._ms.queue(topics, group=group, **options))
        return Items(self._loop, queue, lambda job: Job(*fields_of(job), job.attempt, job, self._loop))

    def exclusive(self, topic: str, *, group: str, **options: Any) -> Exclusive[Any]:
        return Exclusive(self._loop, self._made(lambda: self._ms.exclusive(topic, group=group, **options)))

    def topics(self) -> dict[str, int]:
        return self._loop.call(self._ms.topics())

    def create_topic(self, name: str, **options: Any) -> None:
        self._loop.call(self._ms.create_topic(name, **options))

    def delete_topic(self, name: str) -> None:
        self._loop.call(self._ms.delete_topic(name))

    def _made(self, make: Callable[[], T]) -> T:
        async def made() -> T:
            return make()

        return self._loop.call(made())


def open(store: str = "memory:", **options: Any) -> Millstream:
    """A broker in this process; see `millstream.open`."""

    def make() -> api.Millstream:
        from millstream.client.embedded import Embedded

        return Embedded(store, **options)

    return Millstream(make)


def connect(bootstrap: str = "127.0.0.1:9092", **options: Any) -> Millstream:
    """A server, or any Kafka cluster; see `millstream.connect`."""

    def make() -> api.Millstream:
        from millstream.client.remote import Remote

        return Remote(bootstrap, **options)

    return Millstream(make)
