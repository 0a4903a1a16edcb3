"""The states of all partitions, as this broker knows them: a mirror of the keys `partitions/TOPIC_ID/INDEX`.

The watch of the metadata store keeps the mirror up to date. A write of this broker enters it with its answer. The
mirror may be behind, never wrong: every change is a compare-and-set on the revision that it was made from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple
from uuid import UUID

from millstream.cluster import partition_state
from millstream.cluster.base import PartitionKey
from millstream.cluster.partition_state import PartitionState
from millstream.core.errors import RevisionConflict
from millstream.core.promise import Promise
from millstream.stores.base import Check, Delete, MetaStore, Put, Versioned

PREFIX = "partitions/"


class Known(NamedTuple):
    state: PartitionState
    revision: int


Watcher = Callable[[PartitionKey, Known | None], None]


class Partitions:
    def __init__(self, meta: MetaStore) -> None:
        self._meta = meta
        self._known: dict[PartitionKey, Known] = {}
        self._gone: dict[PartitionKey, int] = {}
        """The last revision of deleted keys, while a late read may still bring them."""
        self._watchers: list[Watcher] = []
        self._unwatch: Callable[[], None] | None = None

    async def start(self) -> None:
        self._unwatch = self._meta.watch(PREFIX, self._heard)
        for key, stored in await self._meta.list(PREFIX):
            self._heard(key, stored)

    def close(self) -> None:
        if self._unwatch is not None:
            self._unwatch()

    def watch(self, callback: Watcher) -> None:
        self._watchers.append(callback)

    def get(self, key: PartitionKey) -> Known | None:
        return self._known.get(key)

    def __iter__(self) -> Iterator[tuple[PartitionKey, Known]]:
        return iter(list(self._known.items()))

    def __len__(self) -> int:
        return len(self._known)

    def _heard(self, key: str, stored: Versioned | None) -> None:
        place = _parse(key)
        if stored is not None:
            self._take(place, Known(PartitionState.decode(stored.value), stored.revision))
            return
        known = self._known.pop(place, None)
        if known is not None:
            self._gone[place] = known.revision
            self._tell(place, None)

    def _take(self, key: PartitionKey, news: Known) -> None:
        known = self._known.get(key)
        behind = known.revision if known is not None else self._gone.get(key, 0)
        if news.revision > behind:
            self._known[key] = news
            self._tell(key, news)

    def _tell(self, key: PartitionKey, known: Known | None) -> None:
        for watcher in self._watchers:
            watcher(key, known)

    def change(self, key: PartitionKey, before: Known, after: PartitionState, *checks: Check) -> Promise[Known]:
        """Writes a state if the stored one is still `before`; fails with `RevisionConflict`, or without an outcome."""
        written: Promise[Known] = Promise()

        def landed(done: Promise[int]) -> None:
            if done.error is not None:
                written.fail(done.error)
                return
            known = Known(after, done.value())
            self._take(key, known)
            written.settle(known)

        self._meta.transact(Put(stored_key(key), after.encode(), before.revision), *checks).then(landed)
        return written

    async def reread(self, key: PartitionKey) -> None:
        """Takes the stored state, ahead of the watch."""
        self._heard(stored_key(key), await self._meta.get(stored_key(key)))

    async def settle(self, key: PartitionKey, before: Known) -> Known | None:
        """Makes sure that no earlier write without an answer takes effect any more: the key gets a new revision."""
        while True:
            found = await self._meta.get(stored_key(key))
            if found is None:
                self._heard(stored_key(key), None)
                return None
            if found.revision > before.revision:
                self._heard(stored_key(key), found)
                return self._known.get(key)
            try:
                return await self.change(key, before, before.state)
            except RevisionConflict:
                continue

    async def forget(self, node_id: int, *, is_empty: bool) -> None:
        """Takes a replica out of every ISR and ELR: its disk may have lost records, or is a new one. Before the broker
        registers.
        """
        for key, _ in self:
            await self.reread(key)
            while (known := self.get(key)) is not None:
                after = partition_state.forget(known.state, node_id, is_empty=is_empty)
                if after == known.state:
                    break
                try:
                    await self.change(key, known, after)
                except RevisionConflict:
                    await self.reread(key)

    @staticmethod
    def creations(topic_id: UUID, first: int, states: list[PartitionState]) -> list[Put]:
        """The operations that create partitions, for the transaction that creates their topic."""
        return [
            Put(stored_key(PartitionKey(topic_id, first + at)), state.encode(), if_revision=0)
            for at, state in enumerate(states)
        ]

    @staticmethod
    def deletions(topic_id: UUID, count: int) -> list[Delete]:
        return [Delete(stored_key(PartitionKey(topic_id, index))) for index in range(count)]


def stored_key(key: PartitionKey) -> str:
    return f"{PREFIX}{key.topic_id.hex}/{key.partition}"


def _parse(key: str) -> PartitionKey:
    topic_id, _, partition = key.removeprefix(PREFIX).partition("/")
    return PartitionKey(UUID(hex=topic_id), int(partition))
