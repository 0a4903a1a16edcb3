"""Ends that happen once, whoever asks for them and however often; and what comes out of an `async with`.

Rules
-----
1. Whoever closes waits for the one closing that is under way. It is a task of its own: a closer that is cancelled
   leaves nothing half closed.
2. What went wrong inside an `async with` counts more than what goes wrong at its end: the first comes out, the second
   is logged and added to it as a note.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

logger = logging.getLogger(__name__)


class Once:
    """Work that is done once, for all who want it done."""

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
        """Raises what the work raised, to everybody who waits for it."""
        await asyncio.shield(self.begin())


def look(task: asyncio.Future[Any]) -> None:
    """So that the loop does not complain of an error that nobody was left to wait for."""
    if not task.cancelled():
        task.exception()


async def close_after(error: BaseException | None, close: Coroutine[Any, Any, None]) -> None:
    """The end of an `async with` that was left with this error, or with none."""
    try:
        await close
    except Exception as failure:
        if error is None:
            raise
        if failure is error:  # it was closed inside, and that is what went wrong
            return
        text = f"closing failed, too: {type(failure).__name__}: {failure}"
        logger.warning("%s", text)
        error.add_note(text)


async def close_all(closes: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Each is closed, whatever the others do; then the first error is raised."""
    results = await asyncio.gather(*closes, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
