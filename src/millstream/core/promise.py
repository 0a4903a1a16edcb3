"""A result that may be there already.

The hot path appends to a store and usually has the result at once (`flush=os`) or after a shared sync. A `Promise` is
that result: settled exactly once, with a value or an error. Callbacks run synchronously in the call that settles it, in
the order they were added, so that responses keep the order of the log and cost no event-loop turn. A failed callback is
logged, and the others still run. A promise belongs to one thread: another thread settles it through the loop
(`call_soon_threadsafe`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Promise(Generic[T]):
    __slots__ = ("_callbacks", "_value", "done", "error")

    def __init__(self) -> None:
        self.done = False
        self.error: BaseException | None = None
        self._value: T | None = None
        self._callbacks: list[Callable[[Promise[T]], None]] | None = None

    @classmethod
    def of(cls, value: T) -> Promise[T]:
        promise = cls.__new__(cls)
        promise.done = True
        promise.error = None
        promise._value = value
        promise._callbacks = None
        return promise

    @classmethod
    def failed(cls, error: BaseException) -> Promise[T]:
        promise = cls()
        promise.done = True
        promise.error = error
        return promise

    def value(self) -> T:
        """The value of a settled promise; raises its error if it failed."""
        if not self.done:
            raise RuntimeError("the promise is not settled yet")
        if self.error is not None:
            raise self.error
        return self._value  # type: ignore[return-value]  # T may itself be Optional

    def settle(self, value: T) -> None:
        if self.done:
            raise RuntimeError("the promise is settled already")
        self._value = value
        self._finish()

    def fail(self, error: BaseException) -> None:
        if self.done:
            raise RuntimeError("the promise is settled already")
        self.error = error
        self._finish()

    def follow(self, other: Promise[T]) -> None:
        """Settles as `other` did. For use as a callback of `other`."""
        if other.error is not None:
            self.fail(other.error)
        else:
            self.settle(other.value())

    def then(self, callback: Callable[[Promise[T]], None]) -> None:
        """Calls back with this promise when it is settled, or now if it is."""
        if self.done:
            callback(self)
        elif self._callbacks is None:
            self._callbacks = [callback]
        else:
            self._callbacks.append(callback)

    def _finish(self) -> None:
        self.done = True
        callbacks, self._callbacks = self._callbacks, None
        if callbacks is not None:
            for callback in callbacks:
                try:  # callbacks.tell, inlined: every produced batch runs this
                    callback(self)
                except Exception:
                    logger.exception("promise callback failed")

    def __await__(self) -> Generator[object, None, T]:
        if not self.done:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.then(lambda _: None if future.done() else future.set_result(None))
            yield from future
        return self.value()


_running: set[asyncio.Future[Any]] = set()
"""Strong references: the loop keeps only weak ones to its tasks."""


def promised(work: Coroutine[Any, Any, T]) -> Promise[T]:
    """Runs a coroutine as a task on the loop, which database drivers need; the promise settles as the task ends."""
    return _settled_by(asyncio.ensure_future(work), Promise())


def begin(work: Coroutine[Any, Any, T]) -> Promise[T]:
    """Runs a coroutine at once, up to its first wait. Often there is none, and the promise is settled on return.

    A task would begin in the next turn of the event loop, and cost several times as much. Only the rest runs as a task.
    """
    steps = work.__await__()
    promise: Promise[T] = Promise()
    try:
        waiting_for = next(steps)
    except StopIteration as end:
        promise.settle(end.value)
        return promise
    except Exception as error:
        return Promise.failed(error)
    return _settled_by(asyncio.ensure_future(_Begun(steps, waiting_for)), promise)


def _settled_by(task: asyncio.Future[T], promise: Promise[T]) -> Promise[T]:
    def finish(task: asyncio.Future[T]) -> None:
        _running.discard(task)
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None:
            promise.fail(error)
        else:
            promise.settle(task.result())

    _running.add(task)
    task.add_done_callback(finish)
    return promise


class _Begun(Generic[T]):
    """The rest of a coroutine that waits for something."""

    __slots__ = ("_steps", "_waiting_for")

    def __init__(self, steps: Generator[Any, Any, T], waiting_for: object) -> None:
        self._steps = steps
        self._waiting_for = waiting_for

    def __await__(self) -> Generator[Any, Any, T]:
        waiting_for = self._waiting_for
        while True:
            thrown: BaseException | None = None
            answer = None
            try:
                answer = yield waiting_for
            except BaseException as error:
                thrown = error
            try:
                waiting_for = self._steps.send(answer) if thrown is None else self._steps.throw(thrown)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
