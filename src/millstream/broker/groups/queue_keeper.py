"""What of a queue's place in a partition has to be written down, and the writing of it.

Rules
-----
1. A write takes everything that changed since the last one, as it is when the write leaves: one waits at a time, and
   whoever asks meanwhile shares it.
2. What failed to be written goes with the next write. A grave that is not durable is not acted on.
3. A private queue has no shelf: it keeps nothing, and every write is done at once.
4. Once it has ended (another broker has the queue, or it was deleted) every write fails: nobody may take for durable
   what was never written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from millstream.broker.groups.deadline import Deadline
from millstream.broker.groups.journal import Entry, Journal
from millstream.broker.groups.queue_block import Block
from millstream.broker.groups.queue_shelf import Grave, Head, Shelf
from millstream.clock import Clock
from millstream.errors import RequestError
from millstream.promise import Promise
from millstream.stores.base import Delete, Put

SAVE_MS = 50
"""How long a delivery may stay unwritten, unless an answer is written before."""


class Place(Protocol):
    """What is kept."""

    def head(self) -> Head: ...

    def block(self, number: int) -> Block | None: ...


class Keeper:
    def __init__(
        self, shelf: Shelf | None, journal: Journal, clock: Clock, place: Place, dead_end: Callable[[Grave], Grave]
    ) -> None:
        self._shelf = shelf
        self._journal = journal
        self._place = place
        self._dead_end = dead_end
        self._saver = Deadline(clock, self.save)
        self._queued: Entry | None = None
        self._kept: set[int] = set()
        """Blocks that the store has."""
        self._grave_writes: dict[str, Put | Delete] = {}
        self.changed: set[int] = set()
        """Blocks that differ from what the store has, or will have."""
        self.graves: dict[int, Grave] = {}
        self.ended: RequestError | None = None
        """Why nothing is written any more."""

    @property
    def is_private(self) -> bool:
        return self._shelf is None

    def restore(self, blocks: set[int], graves: list[Grave]) -> None:
        self._kept = blocks
        self.graves = {grave.offset: grave for grave in graves}

    def durable_graves(self) -> list[Grave]:
        return [grave for grave in self.graves.values() if self._shelf is None or grave.after >= 0]

    def forget_grave(self, offset: int) -> None:
        if self.graves.pop(offset, None) is not None and self._shelf is not None:
            key = self._shelf.grave_key(offset)
            self._grave_writes[key] = Delete(key)

    def save_soon(self) -> None:
        if self._shelf is not None and self.ended is None and not self._saver.armed:
            self._saver.push(SAVE_MS)

    def save(self) -> Promise[None]:
        self._saver.stop()
        if self.ended is not None:
            return Promise.failed(RequestError(self.ended.code, self.ended.detail))
        if self._shelf is None:
            self.changed.clear()
            return Promise.of(None)
        if self._queued is None:
            entry = self._queued = Entry(self._write)
            if self._journal.submit(entry).error is not None:  # too much waits to be written
                self._queued = None
            return entry.promise
        return self._queued.promise

    def _write(self) -> Iterator[Put | Delete]:
        assert self._shelf is not None
        if self.ended is not None:
            raise RequestError(self.ended.code, self.ended.detail)
        entry, self._queued = self._queued, None
        changed, self.changed = self.changed, set()
        writes, self._grave_writes = self._grave_writes, {}
        dug = [self._dead_end(grave) for grave in self.graves.values() if grave.after < 0]
        for grave in dug:
            writes[self._shelf.grave_key(grave.offset)] = self._shelf.grave(grave)
        if entry is not None:
            entry.promise.then(lambda done: self._written(changed, writes, dug, done))
        yield self._shelf.head(self._place.head())
        for number in changed:
            block = self._place.block(number)
            if block is not None and block.open:
                yield Put(self._shelf.block_key(number), block.encode())
                self._kept.add(number)
            elif number in self._kept:
                yield Delete(self._shelf.block_key(number))
                self._kept.discard(number)
        yield from writes.values()

    def _written(
        self, changed: set[int], writes: dict[str, Put | Delete], dug: list[Grave], done: Promise[None]
    ) -> None:
        """Only now may a grave be acted on: `durable_graves` goes by what is noted here."""
        if done.error is None:
            for grave in dug:
                if grave.offset in self.graves:
                    self.graves[grave.offset] = grave
            return
        self._kept |= changed
        self.changed |= changed
        self._grave_writes = {**writes, **self._grave_writes}

    def removal(self) -> list[Delete]:
        """What deletes all that is kept."""
        if self._shelf is None:
            return []
        keys = [self._shelf.prefix + "head", *map(self._shelf.block_key, self._kept)]
        return [Delete(key) for key in (*keys, *map(self._shelf.grave_key, self.graves), *self._grave_writes)]

    def stop(self) -> None:
        self._saver.stop()

    def end(self, reason: RequestError) -> None:
        """Nothing is written any more."""
        self.ended = reason
        self.stop()
