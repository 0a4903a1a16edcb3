"""What of a queue's place in a partition has to be written down, and the writing of it.

Rules
-----
1. A write takes everything that changed since the last one, as it is when the write leaves: one waits at a time, and
   whoever asks meanwhile shares it.
2. What failed to be written goes with the next write. A grave that is not durable is not acted on. Answers of members
   do not: they are settled one way or the other with the write they left with, before a member is told. A write that
   failed may have reached the store (PostgreSQL can lose its connection at the commit), so the next one deletes the
   graves of refused answers: the member may accept the record yet.
3. A private queue has no shelf: it keeps nothing, and every write is done at once.
4. Once it has ended (another broker has the queue, or it was deleted) every write fails: nobody may take for durable
   what was never written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from millstream.broker.groups.deadline import Deadline
from millstream.broker.groups.journal import Entry, Journal
from millstream.broker.groups.queue.block import ACCEPTED, Block
from millstream.broker.groups.queue.storage import Grave, Head, Shelf
from millstream.broker.groups.queue.verbs import Member
from millstream.core.clock import Clock
from millstream.core.errors import RequestError
from millstream.core.promise import Promise
from millstream.stores.base import Delete, Put

SAVE_MS = 50
"""How long a delivery may stay unwritten, unless an answer is written before."""


class Settlement(NamedTuple):
    """A member's answer for neighbouring records of one block, on its way to the store."""

    member: Member
    number: int
    """Of the block."""
    start: int
    stop: int
    graves: Sequence[Grave] = ()
    """Those of them that the answer gives up."""


class Place(Protocol):
    """What is kept."""

    def head(self, accepted: int) -> Head:
        """`accepted` records are done with the write that the head is part of."""

    def block(self, number: int) -> Block | None: ...

    def settle(self, settlements: Sequence[Settlement], is_durable: bool) -> None:
        """Answers are durable, or were refused."""


class Write(Entry):
    """One write, with what goes by whether it succeeds."""

    __slots__ = ("changed", "deletes", "graves", "settlements")

    def __init__(self, keeper: Keeper) -> None:
        super().__init__(lambda: keeper.operations(self))
        self.settlements: list[Settlement] = []
        self.changed: set[int] = set()
        self.deletes: dict[str, Delete] = {}
        self.graves: list[Grave] = []


class Keeper:
    def __init__(
        self, shelf: Shelf | None, journal: Journal, clock: Clock, place: Place, dead_end: Callable[[Grave], Grave]
    ) -> None:
        self._shelf = shelf
        self._journal = journal
        self._place = place
        self._dead_end = dead_end
        self._saver = Deadline(clock, self.save)
        self._queued: Write | None = None
        self._kept: set[int] = set()
        """Blocks that the store has."""
        self._grave_deletes: dict[str, Delete] = {}
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
        grave = self.graves.pop(offset, None)
        if grave is not None:
            self._delete_graves([grave])

    def _delete_graves(self, graves: Sequence[Grave]) -> None:
        """With the next write; a grave that it writes for the same record comes behind."""
        if self._shelf is not None:
            for key in (self._shelf.grave_key(grave.offset) for grave in graves):
                self._grave_deletes[key] = Delete(key)

    def save_soon(self) -> None:
        if self._shelf is not None and self.ended is None and not self._saver.armed:
            self._saver.push(SAVE_MS)

    def save(self, settlements: Sequence[Settlement] = ()) -> Promise[None]:
        """Settles when all that changed before is durable; the settlements are settled by then."""
        self._saver.stop()
        if self.ended is not None:
            return Promise.failed(RequestError(self.ended.code, self.ended.detail))
        if self._shelf is None:
            self.changed.clear()
            self.graves.update((grave.offset, grave) for each in settlements for grave in each.graves)
            self._place.settle(settlements, is_durable=True)
            return Promise.of(None)
        write = self._queued
        if write is not None:
            write.settlements += settlements
            return write.promise
        write = self._queued = Write(self)
        write.settlements += settlements
        write.promise.then(lambda done: self._written(write, done))  # before those who ask for it: first in line
        return self._journal.submit(write)

    def operations(self, write: Write) -> Iterator[Put | Delete]:
        """What a write that leaves now has to say."""
        assert self._shelf is not None
        if self.ended is not None:
            raise RequestError(self.ended.code, self.ended.detail)
        self._queued = None
        write.changed, self.changed = self.changed, set()
        write.deletes, self._grave_deletes = self._grave_deletes, {}
        fresh = [grave for grave in self.graves.values() if grave.after < 0]
        fresh += [grave for each in write.settlements for grave in each.graves]
        write.graves = [self._dead_end(grave) for grave in fresh]
        accepted = 0
        for number in write.changed:
            block = self._place.block(number)
            count = 0 if block is None else block.states.count(ACCEPTED)
            accepted += count
            if block is not None and block.open > count:
                yield Put(self._shelf.block_key(number), block.encode())
                self._kept.add(number)
            elif number in self._kept:
                yield Delete(self._shelf.block_key(number))
                self._kept.discard(number)
        yield self._shelf.head(self._place.head(accepted))
        yield from write.deletes.values()
        for grave in write.graves:
            yield self._shelf.grave(grave)

    def _written(self, write: Write, done: Promise[None]) -> None:
        """Only now may a grave be acted on: `durable_graves` goes by what is noted here."""
        if self._queued is write:  # refused before it left
            self._queued = None
        if done.error is None:
            answered = {grave.offset for each in write.settlements for grave in each.graves}
            for grave in write.graves:
                if grave.offset in self.graves or grave.offset in answered:
                    self.graves[grave.offset] = grave
        else:
            self._kept |= write.changed
            self.changed |= write.changed
            self._grave_deletes = {**write.deletes, **self._grave_deletes}
            for settlement in write.settlements:
                self._delete_graves(settlement.graves)
        if write.settlements:
            self._place.settle(write.settlements, done.error is None)

    def removal(self) -> list[Delete]:
        """What deletes all that is kept."""
        if self._shelf is None:
            return []
        keys = [self._shelf.prefix + "head", *map(self._shelf.block_key, self._kept)]
        return [Delete(key) for key in (*keys, *map(self._shelf.grave_key, self.graves), *self._grave_deletes)]

    def stop(self) -> None:
        self._saver.stop()

    def end(self, reason: RequestError) -> None:
        """Nothing is written any more."""
        self.ended = reason
        self.stop()
