"""An answer that may already be there.

The hot path asks a store to append and usually has the answer at once (`flush=os`) or after a shared sync. A
`Promise` is that answer: settled exactly once, with a value or an error. Callbacks run synchronously in the call
that settles it, in the order they were added, so that answers keep the order of the log and no event-loop turn is
spent in between. It belongs to one thread: whoever settles it from another thread goes through the loop first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

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
        """The value, once done; raises the error if that is how it ended."""
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

    def then(self, callback: Callable[[Promise[T]], None]) -> None:
        """Calls back with this promise when it is settled: now, if it is."""
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
                callback(self)

    def __await__(self) -> Generator[object, None, T]:
        if not self.done:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.then(lambda _: None if future.done() else future.set_result(None))
            yield from future
        return self.value()


_running: set[asyncio.Task[Any]] = set()
"""The loop itself keeps no task from being collected."""


def promised(work: Coroutine[Any, Any, T]) -> Promise[T]:
    """Runs work on the loop; the promise settles as it ends."""
    promise: Promise[T] = Promise()

    def done(task: asyncio.Task[T]) -> None:
        _running.discard(task)
        if task.cancelled():
            promise.fail(asyncio.CancelledError())
        elif (error := task.exception()) is not None:
            promise.fail(error)
        else:
            promise.settle(task.result())

    task = asyncio.get_running_loop().create_task(work)
    _running.add(task)
    task.add_done_callback(done)
    return promise
