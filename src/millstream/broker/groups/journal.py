"""All writes of all groups, in one order.

    submit --> waiting --prepare--> in flight --durable--> apply, settle
                          \\-- refused (its promise fails; nothing is written)

Rules
-----
1. One transaction is in flight at a time, so that memory and the store change in the same order, even if a driver's
   connections finish out of order.
2. Entries that wait share the next transaction: many commits share one sync.
3. `prepare` runs when the transaction starts, not on submit. It checks again the state that may have changed since then
   (a commit's generation, whether a group is empty) and refuses by raising `RequestError`.
4. An entry that depends on earlier writes in memory (`settled`) is the first of its transaction: the writes before it
   are applied by then. Otherwise an expiry could delete the write of a commit in the same transaction.
5. Every transaction carries the cluster's guards: they fence a broker that lost its groups. It then refuses the
   waiting entries (`drop_waiting`), because another broker coordinates their groups.
6. `apply` changes memory when the write is durable, before the promise settles: no client sees state that a crash could
   undo.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable

from millstream.cluster.base import Cluster
from millstream.core.errors import Code, RequestError, RevisionConflict
from millstream.core.promise import Promise
from millstream.stores.base import MetaStore, Operation

_OPERATIONS_MAX = 1_000
"""Per transaction of several entries. An entry is never split."""

_log = logging.getLogger(__name__)


class Entry:
    __slots__ = ("apply", "prepare", "promise", "settled")

    def __init__(
        self,
        prepare: Callable[[], Iterable[Operation]],
        apply: Callable[[], None] | None = None,
        *,
        settled: bool = False,
    ) -> None:
        self.prepare = prepare
        self.apply = apply
        self.settled = settled
        self.promise: Promise[None] = Promise()


class Journal:
    def __init__(self, meta: MetaStore, waiting_max: int, cluster: Cluster) -> None:
        self._meta = meta
        self._cluster = cluster
        self._waiting_max = waiting_max
        self._waiting: deque[Entry] = deque()
        self._busy = False
        self._era = 0
        """Counts losses of all groups: a write in flight at a loss no longer changes memory."""

    def submit(self, entry: Entry) -> Promise[None]:
        if len(self._waiting) >= self._waiting_max:
            entry.promise.fail(_unavailable("too many writes wait for the metadata store"))
            return entry.promise
        self._waiting.append(entry)
        self._pump()
        return entry.promise

    def _pump(self) -> None:
        while self._waiting and not self._busy:
            self._busy = True
            batch, operations = self._gather()
            durable = self._meta.transact(*operations, *self._cluster.guards()) if operations else Promise.of(0)
            era = self._era
            durable.then(lambda done, batch=batch, era=era: self._landed(batch, era, done))  # type: ignore[misc]

    def _gather(self) -> tuple[list[Entry], list[Operation]]:
        batch: list[Entry] = []
        by_key: dict[str, Operation] = {}  # etcd refuses a transaction with a key twice: the last one wins
        while self._waiting and len(by_key) < _OPERATIONS_MAX:
            if batch and self._waiting[0].settled:
                break
            entry = self._waiting.popleft()
            try:
                operations = list(entry.prepare())
            except Exception as error:  # a refusal, or a bug that must not affect other entries
                entry.promise.fail(error)
                continue
            for operation in operations:
                by_key[operation.key] = operation
            batch.append(entry)
        return batch, list(by_key.values())

    def drop_waiting(self, error: RequestError) -> None:
        """All groups are lost."""
        self._era += 1
        waiting, self._waiting = self._waiting, deque()
        for entry in waiting:
            entry.promise.fail(error)

    def _landed(self, batch: list[Entry], era: int, done: Promise[int]) -> None:
        if isinstance(done.error, RevisionConflict):
            self._cluster.fenced()
        for entry in batch:
            if done.error is not None:
                entry.promise.fail(_unavailable(f"the group's state could not be stored: {done.error}"))
                continue
            try:
                if entry.apply is not None and era == self._era:
                    entry.apply()
            except Exception as error:
                _log.exception("cannot apply a stored change of a group")
                entry.promise.fail(error)
            else:
                entry.promise.settle(None)
        self._busy = False
        self._pump()


def _unavailable(detail: str) -> RequestError:
    return RequestError(Code.COORDINATOR_NOT_AVAILABLE, detail)
