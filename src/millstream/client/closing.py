"""Closing that runs once for any number of callers, and the error that leaves an `async with`.

Rules
-----
1. Every caller of close waits for the same closing. The closing is a task of its own: a cancelled caller leaves
   nothing half closed.
2. An error inside an `async with` takes precedence over an error at its end: the first is raised, the second is
   logged and added to it as a note.
"""

from __future__ import annotations

import abc
import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from types import TracebackType
from typing import Any

logger = logging.getLogger(__name__)


class Once:
    """Work that runs once for all its callers."""

    __slots__ = ("_task", "_work")

    def __init__(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._work = work
        self._task: asyncio.Task[None] | None = None

    @property
    def is_begun(self) -> bool:
        return self._task is not None

    def begin(self) -> asyncio.Task[None]:
        if self._task is None:
            self._task = asyncio.ensure_future(self._work())
            self._task.add_done_callback(look)
        return self._task

    async def done(self) -> None:
        """Raises the work's error to every caller."""
        await asyncio.shield(self.begin())


class Closable(abc.ABC):
    """Closed at the end of an `async with`."""

    @abc.abstractmethod
    async def close(self, *, clean: bool = True) -> None: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await close_after(error, self.close(clean=kind is None))


def look(task: asyncio.Future[Any]) -> None:
    """Retrieves the error, so that the loop does not log it as never retrieved."""
    if not task.cancelled():
        task.exception()


async def close_after(error: BaseException | None, close: Coroutine[Any, Any, None]) -> None:
    """Closes at the end of an `async with` that raised this error, or none."""
    try:
        await close
    except Exception as failure:
        if error is None:
            raise
        if failure is error:  # a close inside the block raised it
            return
        text = f"closing failed, too: {type(failure).__name__}: {failure}"
        logger.warning("%s", text)
        error.add_note(text)


async def close_all(closes: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Closes each, despite errors of the others; then raises the first error."""
    results = await asyncio.gather(*closes, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
