"""Writes the state of a queue in one partition to the metadata store.

Rules
-----
1. A write takes everything that changed since the last one, as it is when the write leaves. One write waits at a time,
   and later callers share it.
2. Changes that failed to be written go with the next write, and a dead record is not acted on before it is durable.
   Answers of members are different: they succeed or fail with the write that they left with, before the member is told.
   A failed write may have reached the store (PostgreSQL can lose its connection at the commit), so the next write
   deletes the dead records of refused answers: the member may still accept the record.
3. A private queue has no storage: it keeps nothing, and every write is done at once.
4. After the end (another broker has the queue, or it was deleted) every write fails: no caller may take for durable
   what was never written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from millstream.broker.groups.deadline import Deadline
from millstream.broker.groups.journal import Entry, Journal
from millstream.broker.groups.queue.block import ACCEPTED, Block
from millstream.broker.groups.queue.storage import DeadRecord, Head, QueueStorage
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
    dead_records: Sequence[DeadRecord] = ()
    """Those of them that the answer gives up."""


class WrittenState(Protocol):
    """The states of one partition, as far as a write needs them."""

    def head(self, accepted: int) -> Head:
        """`accepted` records are done with the write that the head is part of."""

    def block(self, number: int) -> Block | None: ...

    def settle(self, settlements: Sequence[Settlement], is_durable: bool) -> None:
        """Answers are durable, or were refused."""


class Write(Entry):
    """One write, with what goes by whether it succeeds."""

    __slots__ = ("changed", "dead_records", "deletes", "settlements")

    def __init__(self, writer: StateWriter) -> None:
        super().__init__(lambda: writer.operations(self))
        self.settlements: list[Settlement] = []
        self.changed: set[int] = set()
        self.deletes: dict[str, Delete] = {}
        self.dead_records: list[DeadRecord] = []


class StateWriter:
    def __init__(
        self,
        storage: QueueStorage | None,
        journal: Journal,
        clock: Clock,
        state: WrittenState,
        dead_end: Callable[[DeadRecord], DeadRecord],
    ) -> None:
        self._storage = storage
        self._journal = journal
        self._state = state
        self._with_target = dead_end
        self._saver = Deadline(clock, self.save)
        self._queued: Write | None = None
        self._kept: set[int] = set()
        """Blocks that the store has."""
        self._dead_deletes: dict[str, Delete] = {}
        self.changed: set[int] = set()
        """Blocks that differ from what the store has, or will have."""
        self.dead_records: dict[int, DeadRecord] = {}
        self.ended: RequestError | None = None
        """Why nothing is written any more."""

    @property
    def is_private(self) -> bool:
        return self._storage is None

    def restore(self, blocks: set[int], dead_records: list[DeadRecord]) -> None:
        self._kept = blocks
        self.dead_records = {dead.offset: dead for dead in dead_records}

    def durable_dead_records(self) -> list[DeadRecord]:
        return [dead for dead in self.dead_records.values() if self._storage is None or dead.after >= 0]

    def forget_dead_record(self, offset: int) -> None:
        dead = self.dead_records.pop(offset, None)
        if dead is not None:
            self._delete_dead_records([dead])

    def _delete_dead_records(self, dead_records: Sequence[DeadRecord]) -> None:
        """With the next write; a dead record that it writes for the same record comes behind."""
        if self._storage is not None:
            for key in (self._storage.dead_record_key(dead.offset) for dead in dead_records):
                self._dead_deletes[key] = Delete(key)

    def save_soon(self) -> None:
        if self._storage is not None and self.ended is None and not self._saver.armed:
            self._saver.push(SAVE_MS)

    def save(self, settlements: Sequence[Settlement] = ()) -> Promise[None]:
        """Settles when all that changed before is durable; the settlements are settled by then."""
        self._saver.stop()
        if self.ended is not None:
            return Promise.failed(RequestError(self.ended.code, self.ended.detail))
        if self._storage is None:
            self.changed.clear()
            self.dead_records.update((dead.offset, dead) for each in settlements for dead in each.dead_records)
            self._state.settle(settlements, is_durable=True)
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
        assert self._storage is not None
        if self.ended is not None:
            raise RequestError(self.ended.code, self.ended.detail)
        self._queued = None
        write.changed, self.changed = self.changed, set()
        write.deletes, self._dead_deletes = self._dead_deletes, {}
        fresh = [dead for dead in self.dead_records.values() if dead.after < 0]
        fresh += [dead for each in write.settlements for dead in each.dead_records]
        write.dead_records = [self._with_target(dead) for dead in fresh]
        accepted = 0
        for number in write.changed:
            block = self._state.block(number)
            count = 0 if block is None else block.states.count(ACCEPTED)
            accepted += count
            if block is not None and block.open > count:
                yield Put(self._storage.block_key(number), block.encode())
                self._kept.add(number)
            elif number in self._kept:
                yield Delete(self._storage.block_key(number))
                self._kept.discard(number)
        yield self._storage.head(self._state.head(accepted))
        yield from write.deletes.values()
        for dead in write.dead_records:
            yield self._storage.put_dead(dead)

    def _written(self, write: Write, done: Promise[None]) -> None:
        """Only now may a dead record be acted on: `durable_dead_records` goes by what is noted here."""
        if self._queued is write:  # refused before it left
            self._queued = None
        if done.error is None:
            answered = {dead.offset for each in write.settlements for dead in each.dead_records}
            for dead in write.dead_records:
                if dead.offset in self.dead_records or dead.offset in answered:
                    self.dead_records[dead.offset] = dead
        else:
            self._kept |= write.changed
            self.changed |= write.changed
            self._dead_deletes = {**write.deletes, **self._dead_deletes}
            for settlement in write.settlements:
                self._delete_dead_records(settlement.dead_records)
        if write.settlements:
            self._state.settle(write.settlements, done.error is None)

    def removal(self) -> list[Delete]:
        """What deletes all that is kept."""
        if self._storage is None:
            return []
        keys = [self._storage.prefix + "head", *map(self._storage.block_key, self._kept)]
        return [
            Delete(key) for key in (*keys, *map(self._storage.dead_record_key, self.dead_records), *self._dead_deletes)
        ]

    def stop(self) -> None:
        self._saver.stop()

    def end(self, reason: RequestError) -> None:
        """Nothing is written any more."""
        self.ended = reason
        self.stop()
