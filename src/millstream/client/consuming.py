"""What all iterators of the API have in common: opening, waiting, closing, and what a break leaves behind.

    async with ms.stream("orders", group="g") as stream:      # closed at the end, whatever happens
        async for record in stream: ...
    async for record in ms.stream("orders", group="g"): ...   # closed when the loop ends, or when it is left
    record = await stream.receive(timeout=1.0)                # None when nothing came: control is back

An iterator opens when it is first used. It belongs to one task at a time; what several tasks shall share is made
several times (`streams`). Nothing is fetched ahead of what a single read brings: a slow reader holds little.

A task that is cancelled while it waits loses nothing: what was on its way is given to whoever asks next. Who waits
while somebody else closes it is told that nothing more comes: None, the end of the loop. One that could not be opened
is closed. If the only one who waits for the opening is cancelled, what was opened is shut: no member is left behind
that nobody asks. Whoever asks after that opens it anew, when that is done; an opening that nobody waits for by then
does not begin.
"""

from __future__ import annotations

import abc
import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

from millstream.client.closing import Once, close_after, look
from millstream.core.clock import Clock
from millstream.core.errors import Closed, Undecodable

T = TypeVar("T")
V = TypeVar("V")
Decoder = Callable[[bytes], V]

logger = logging.getLogger(__name__)


class Owner(Protocol):
    """What iterators need of the `Millstream` that made them."""

    clock: Clock

    def opened(self, consuming: Consuming[object]) -> None: ...

    def closed(self, consuming: Consuming[object]) -> None: ...


class Consuming(abc.ABC, Generic[T]):
    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._is_held = False
        """By an `async with`, which closes it: leaving a loop does not."""
        self._is_open = False
        self.is_closed = False
        self._is_clean = False
        self.is_held_back = False
        """Whether the last record given has not reached the thread that asked for it (`client/sync.py`)."""
        self._opening: asyncio.Task[None] | None = None
        self._has_begun = False
        """It has something to shut, by now or soon."""
        self._is_used = False
        """Somebody has got it open: one who waited for that too, and is cancelled, does not shut it."""
        self._openers = 0
        """Who wait for it."""
        self._undoing: asyncio.Task[None] | None = None
        self._closing = Once(self._close)

    async def __aenter__(self) -> Self:
        self._is_held = True
        try:
            await self._ensure_open()
        except BaseException:
            self._begin_to_close(clean=False)  # whoever is cancelled here has no `async with` that would do it
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await close_after(error, self.close(clean=kind is None))

    async def receive(self, timeout: float | None = None) -> T | None:
        """The next one; None if `timeout` seconds bring none, or if there will be no more (`is_closed`, `is_over`)."""
        if not self._is_open:
            await self._ensure_open()
            if self.is_closed:  # meanwhile
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
        """Ends it. `clean`: the record that was given last was processed."""
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
            if opening is not None and self._opening is opening:  # else it has not begun
                self._is_open = False
                await self._shut(self._is_clean)
        finally:
            self._owner.closed(self)  # type: ignore[arg-type]  # any Consuming is one of object

    async def _ensure_open(self) -> None:
        if self.is_closed:
            raise Closed("this iterator was closed; ask for a new one")
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
            if not self._openers:  # all who asked have gone: else each of them would cost whoever comes next an opening
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
        """Of an opening that nobody waits for any more. It is not torn in the middle: threads would go on with it."""
        await asyncio.wait([opening])
        try:
            await self._shut(clean=False)
        except Exception as error:
            logger.warning("what was opened and not wanted could not be shut: %s", error)
        if not self.is_closed and self._opening is None:
            self._owner.closed(self)  # type: ignore[arg-type]  # as above

    @abc.abstractmethod
    async def _start(self) -> None:
        """Opens it; once more, perhaps, after it was shut."""

    @abc.abstractmethod
    async def _next(self, timeout: float | None) -> T | None: ...

    @abc.abstractmethod
    async def _shut(self, clean: bool) -> None:
        """Of whatever `_start` got done, all or a part. Whoever waits in `_next` wakes up."""


def decoded(decode: Decoder[V] | None, value: bytes | None, record: Callable[[], object]) -> V | None:
    """A value as its reader wants it. `record` is what an error shows."""
    if decode is None or value is None:
        return value  # type: ignore[return-value]  # without a decoder V is bytes
    try:
        return decode(value)
    except Exception as error:
        text = f"the decoder refused a value of {len(value)} bytes: {type(error).__name__}: {error}"
        raise Undecodable(record(), text) from error
