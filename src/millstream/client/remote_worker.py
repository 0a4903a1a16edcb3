"""A thread for each of librdkafka's blocking clients, and the translation of their errors.

A client is used from its thread only. A task that waits for it on the event loop may be cancelled: the call goes on,
and the next caller gets its result (`Polling`).
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, ShareConsumer

from millstream.client.closing import close_all, look
from millstream.core.errors import Code, MillstreamError, UnknownTopic, Unreachable, Unsupported, code_of, refusal

T = TypeVar("T")
C = TypeVar("C", Consumer, ShareConsumer)
POLL_SECONDS = 0.25
"""The longest wait of one poll: closing may wait as long."""

_UNREACHABLE = frozenset(
    {
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._MSG_TIMED_OUT,
        KafkaError._RESOLVE,
        KafkaError._TIMED_OUT,
        KafkaError._TRANSPORT,
    }
)
_UNKNOWN = frozenset({KafkaError._UNKNOWN_PARTITION, KafkaError._UNKNOWN_TOPIC})


def failure(error: KafkaError | KafkaException | BaseException) -> BaseException:
    """A client's error as the embedded broker would raise it."""
    if isinstance(error, KafkaException):
        error = error.args[0]
    if not isinstance(error, KafkaError):
        return error
    number = error.code()
    if number in _UNREACHABLE:
        return Unreachable(f"no broker answered in time: {error.str()}")
    if number in _UNKNOWN:
        return UnknownTopic(Code.UNKNOWN_TOPIC_OR_PARTITION, error.str())
    if number in (KafkaError._UNSUPPORTED_FEATURE, Code.UNSUPPORTED_VERSION):
        return Unsupported(f"the broker does not have this: {error.str()}")
    code = code_of(number) if number >= Code.UNKNOWN_SERVER_ERROR else None
    return refusal(code, error.str()) if code is not None else MillstreamError(error.str())


class Worker:
    """One thread for one client."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def call(self, function: Callable[..., T], *arguments: Any, **keywords: Any) -> T:
        running = self.start(function, *arguments, **keywords)
        running.add_done_callback(look)
        return await asyncio.shield(running)

    def start(self, function: Callable[..., T], *arguments: Any, **keywords: Any) -> asyncio.Future[T]:
        def run() -> T:
            try:
                return function(*arguments, **keywords)
            except (KafkaException, BufferError) as error:
                raise failure(error) from None

        return asyncio.get_running_loop().run_in_executor(self._thread, run)

    async def end(self, *last: Callable[[], None]) -> None:
        """Runs the last calls on the thread, each despite errors of those before it; then ends the thread."""
        try:
            await close_all(self.call(each) for each in last)
        finally:
            self._thread.shutdown(wait=False)


class Polling(Generic[T]):
    """The results of a client's polls, and the one poll in flight."""

    def __init__(self, worker: Worker, poll: Callable[[float], list[T]]) -> None:
        self._worker = worker
        self._poll = poll
        self._running: asyncio.Future[list[T]] | None = None
        self._is_stopped = False
        self.ready: deque[T] = deque()

    async def fill(self, seconds: float) -> None:
        """Waits for a result, at most so long; an error of the client is raised once."""
        if self.ready or self._is_stopped:
            return
        running = self._running
        if running is None:
            running = self._running = self._worker.start(self._poll, max(min(seconds, POLL_SECONDS), 0.0))
        await asyncio.wait([running])
        if self._running is running:  # else another waiting task was faster
            self._running = None
            self.ready.extend(running.result())

    @property
    def is_on_its_way(self) -> bool:
        """Whether a poll is in flight, or has ended and its result is not collected."""
        return self._running is not None

    async def stop(self) -> None:
        """Returns when no poll is in flight; none starts after it."""
        self._is_stopped = True
        running, self._running = self._running, None
        if running is not None:
            await asyncio.wait([running])
            if not running.cancelled():
                running.exception()
        self.ready.clear()


class Polled(Generic[C, T]):
    """The consumer of an iterator, with its thread and its polls: new ones for each opening."""

    _thread_name: str

    def _begin(self) -> None:
        self._consumer: C | None = None
        self._worker = Worker(self._thread_name)
        self._polling: Polling[T] = Polling(self._worker, self._poll)

    @abstractmethod
    def _poll(self, seconds: float) -> list[T]:
        """Runs on the thread."""

    async def _end(self, *last: Callable[[], None]) -> None:
        """Runs the last calls, closes the consumer, and ends the thread."""
        await self._worker.end(*last, *([] if self._consumer is None else [self._consumer.close]))
