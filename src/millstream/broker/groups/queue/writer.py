"""Writes the state of a queue in one partition to the metadata store.

Rules
-----
1. A write contains all changes since the last write, in their state when the write starts. One write waits at a time,
   and later callers share it.
2. The next write repeats failed changes. A dead record has no effect before it is durable. An acknowledgement is not
   repeated: it succeeds or fails with its own write, before the member gets the result. A failed write may have reached
   the store (PostgreSQL can lose its connection at the commit). So the next write deletes the dead records of refused
   acknowledgements: the member may still accept the record.
3. A private queue has no storage: it stores nothing, and every write completes at once.
4. After the end (another broker owns the queue, or it was deleted) every write fails. A caller must never take a lost
   write for durable.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
"""Longest delay before a delivery is written. The write of an acknowledgement includes it."""


class Settlement(NamedTuple):
    """An acknowledgement of consecutive records of one block, until its write completes."""

    member: Member
    number: int
    """Block number."""
    start: int
    stop: int
    dead_records: Sequence[DeadRecord] = ()
    """The records that it makes dead."""


class WrittenState(Protocol):
    """The part of a partition's states that a write needs."""

    def head(self, accepted: int) -> Head:
        """The same write makes `accepted` records done."""

    def block(self, number: int) -> Block | None: ...

    def settle(self, settlements: Sequence[Settlement], is_durable: bool) -> None:
        """The settlements are durable, or were refused."""


class Write(Entry):
    """One write, and the changes that depend on its success."""

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
    ) -> None:
        self._storage = storage
        self._journal = journal
        self._state = state
        self._saver = Deadline(clock, self.save)
        self._queued: Write | None = None
        self._kept: set[int] = set()
        """Blocks in the store."""
        self._dead_deletes: dict[str, Delete] = {}
        self.changed: set[int] = set()
        """Blocks that differ from the store and from a running write."""
        self.dead_records: dict[int, DeadRecord] = {}
        self._unsaved: dict[int, DeadRecord] = {}
        """Dead records that are not durable yet."""
        self.ended: RequestError | None = None
        """Why every write fails."""

    @property
    def is_private(self) -> bool:
        return self._storage is None

    def restore(self, blocks: set[int], dead_records: list[DeadRecord]) -> None:
        self._kept = blocks
        self.dead_records = {dead.offset: dead for dead in dead_records}

    def add_dead_record(self, dead: DeadRecord) -> None:
        self.dead_records[dead.offset] = dead
        if self._storage is not None:
            self._unsaved[dead.offset] = dead

    def save_dead_records(self) -> Promise[None]:
        return self.save() if self._unsaved else Promise.of(None)

    def remove_dead_record(self, offset: int) -> None:
        dead = self.dead_records.pop(offset, None)
        if dead is not None:
            self._delete_dead_records([dead])

    def _delete_dead_records(self, dead_records: Sequence[DeadRecord]) -> None:
        """The next write deletes them before it writes a new dead record of the same offset."""
        if self._storage is not None:
            for key in (self._storage.dead_record_key(dead.offset) for dead in dead_records):
                self._dead_deletes[key] = Delete(key)

    def save_soon(self) -> None:
        if self._storage is not None and self.ended is None and not self._saver.armed:
            self._saver.push(SAVE_MS)

    def save(self, settlements: Sequence[Settlement] = ()) -> Promise[None]:
        """Settles when all earlier changes are durable, after the settlements are settled."""
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
        write.promise.then(lambda done: self._written(write, done))  # runs before the callers' callbacks
        return self._journal.submit(write)

    def operations(self, write: Write) -> Iterator[Put | Delete]:
        """The operations of a write that starts now."""
        assert self._storage is not None
        if self.ended is not None:
            raise RequestError(self.ended.code, self.ended.detail)
        self._queued = None
        write.changed, self.changed = self.changed, set()
        write.deletes, self._dead_deletes = self._dead_deletes, {}
        write.dead_records = [*self._unsaved.values()]
        write.dead_records += [dead for each in write.settlements for dead in each.dead_records]
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
        if self._queued is write:  # refused before it started
            self._queued = None
        if done.error is None:
            for dead in write.dead_records:
                self.dead_records[dead.offset] = dead
                self._unsaved.pop(dead.offset, None)
        else:
            self._kept |= write.changed
            self.changed |= write.changed
            self._dead_deletes = {**write.deletes, **self._dead_deletes}
            for settlement in write.settlements:
                self._delete_dead_records(settlement.dead_records)
        if write.settlements:
            self._state.settle(write.settlements, done.error is None)

    def removal(self) -> list[Delete]:
        """The operations that delete all stored state."""
        if self._storage is None:
            return []
        keys = [self._storage.prefix + "head", *map(self._storage.block_key, self._kept)]
        return [
            Delete(key) for key in (*keys, *map(self._storage.dead_record_key, self.dead_records), *self._dead_deletes)
        ]

    def stop(self) -> None:
        self._saver.stop()

    def end(self, reason: RequestError) -> None:
        """Every later write fails."""
        self.ended = reason
        self.stop()
