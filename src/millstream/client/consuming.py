"""The common part of all iterators of the API: opening, waiting, closing, and the state after a break.

    async with ms.stream("orders", group="g") as stream:      # closed at the end, whatever happens
        async for record in stream: ...
    async for record in ms.stream("orders", group="g"): ...   # closed when the loop ends, or at a break
    record = await stream.receive(timeout=1.0)                # None when the timeout is over

An iterator opens at its first use. It belongs to one task at a time: create one iterator per task (`streams`).
It fetches no more ahead than one read returns: a slow reader holds little memory.

A task that is cancelled while it waits loses nothing: the next call gets the record. If another task closes the
iterator, a waiting call returns None, the end of the loop. An iterator that fails to open is closed. If the only task
that waits for the opening is cancelled, the iterator shuts again: no orphaned member remains. The next call then waits
for that and opens it again; an opening without a waiting task does not begin.
"""

from __future__ import annotations

import abc
import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Generic, Protocol, Self, TypeVar

from millstream.client.closing import Closable, Once, look
from millstream.core.clock import Clock
from millstream.core.errors import Closed

T = TypeVar("T")
V = TypeVar("V")
Decoder = Callable[[bytes], V]

logger = logging.getLogger(__name__)


class Owner(Protocol):
    """The part of the `Millstream` object that its iterators use."""

    clock: Clock

    def opened(self, consuming: Consuming[object]) -> None: ...

    def closed(self, consuming: Consuming[object]) -> None: ...


class Consuming(Closable, Generic[T]):
    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._is_held = False
        """Inside an `async with`, which closes it: a break does not."""
        self._is_open = False
        self.is_closed = False
        self._is_clean = False
        self.is_held_back = False
        """Whether the last record has not reached the thread that asked for it (`client/sync.py`)."""
        self._opening: asyncio.Task[None] | None = None
        self._has_begun = False
        """There is something to shut, now or soon."""
        self._is_used = False
        """A task has opened it: a second task that is cancelled during the opening does not shut it."""
        self._openers = 0
        """Tasks that wait."""
        self._undoing: asyncio.Task[None] | None = None
        self._closing = Once(self._close)

    async def __aenter__(self) -> Self:
        self._is_held = True
        try:
            await self._ensure_open()
        except BaseException:
            self._begin_to_close(clean=False)  # without `__aexit__`, nothing else closes it
            raise
        return self

    async def receive(self, timeout: float | None = None) -> T | None:
        """The next item; None after `timeout` seconds, or at the end (`is_closed`, `is_over`)."""
        if not self._is_open:
            await self._ensure_open()
            if self.is_closed:  # during the opening
                return None
        self._is_used = True
        return await self._next(timeout)

    async def __aiter__(self) -> AsyncGenerator[T, None]:
        try:
            while not self.is_closed:
                item = await self.receive()
                if item is None:
                    return
                yield item
        finally:
            if not self._is_held:
                await self.close(clean=False)

    async def close(self, *, clean: bool = True) -> None:
        """Ends it. `clean`: the last record was processed."""
        self._begin_to_close(clean)
        await self._closing.done()

    def _begin_to_close(self, clean: bool) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._is_clean = clean and not self.is_held_back
            self._closing.begin()

    async def _close(self) -> None:
        try:
            if self._undoing is not None:
                await asyncio.wait([self._undoing])
            opening = self._opening
            if opening is not None:
                await asyncio.wait([opening])
            if opening is not None and self._opening is opening:  # else it did not begin
                self._is_open = False
                await self._shut(self._is_clean)
        finally:
            self._owner.closed(self)  # type: ignore[arg-type]  # any Consuming is a Consuming[object]

    async def _ensure_open(self) -> None:
        if self.is_closed:
            raise Closed("this iterator was closed; open a new one")
        if self._opening is None:
            self._has_begun = self._is_used = False
            self._opening = asyncio.ensure_future(self._open(self._undoing))
            self._opening.add_done_callback(look)
        opening = self._opening
        self._openers += 1
        try:
            await asyncio.shield(opening)
            self._is_used = True
        except asyncio.CancelledError:
            is_wanted = self._openers > 1 or self._is_used
            if not (is_wanted or self.is_closed) and self._opening is opening and self._has_begun:
                self._opening = None
                self._is_open = False
                self._undoing = asyncio.ensure_future(self._undo(opening))
            raise
        finally:
            self._openers -= 1

    async def _open(self, undoing: asyncio.Task[None] | None) -> None:
        try:
            self._owner.opened(self)  # type: ignore[arg-type]  # as above
            if undoing is not None:
                await asyncio.wait([undoing])
            if not self._openers:  # all callers were cancelled: a useless opening would delay the next one
                self._opening = None
                self._owner.closed(self)  # type: ignore[arg-type]  # as above
                return
            self._has_begun = True
            await self._start()
        except BaseException:
            if self._opening is asyncio.current_task():
                self._begin_to_close(clean=False)
            raise
        self._is_open = self._opening is asyncio.current_task() and not self.is_closed

    async def _undo(self, opening: asyncio.Task[None]) -> None:
        """Shuts an opening that no task waits for. The opening runs to its end: its threads cannot be cancelled."""
        await asyncio.wait([opening])
        try:
            await self._shut(clean=False)
        except Exception as error:
            logger.warning("cannot close an iterator whose opening was cancelled: %s", error)
        if not self.is_closed and self._opening is None:
            self._owner.closed(self)  # type: ignore[arg-type]  # as above

    @abc.abstractmethod
    async def _start(self) -> None:
        """Opens it; also again after `_shut`."""

    @abc.abstractmethod
    async def _next(self, timeout: float | None) -> T | None: ...

    @abc.abstractmethod
    async def _shut(self, clean: bool) -> None:
        """Undoes all that `_start` has completed, which may be a part. Wakes the caller of `_next`."""
