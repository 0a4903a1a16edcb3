"""Versioned keys in memory: the metadata of `memory:`, and `file:`'s cache over SQLite."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from millstream.core.callbacks import tell
from millstream.core.errors import RevisionConflict, StartupError
from millstream.core.promise import Promise
from millstream.stores.base import Check, Operation, Put, Versioned


class Keys:
    """The durable keys, with watchers. `plan` checks a transaction, `apply` executes it."""

    def __init__(self) -> None:
        self.values: dict[str, Versioned] = {}
        self.revision = 0
        self.failure: str | None = None
        self._watchers: dict[int, tuple[str, Callable[[str, Versioned | None], None]]] = {}
        self._next_watcher = 0

    def plan(
        self, operations: Sequence[Operation], revision: int, pending: dict[str, Versioned | None]
    ) -> dict[str, Versioned | None]:
        """The changes of a transaction on top of `pending` ones; raises `RevisionConflict`."""
        changes: dict[str, Versioned | None] = {}
        for operation in operations:
            key = operation.key
            current = pending[key] if key in pending else self.values.get(key)
            if operation.if_revision is not None:
                found = current.revision if current is not None else 0
                if found != operation.if_revision:
                    raise RevisionConflict(key, operation.if_revision, found)
            if isinstance(operation, Check):
                continue
            changes[key] = Versioned(operation.value, revision) if isinstance(operation, Put) else None
        return changes

    def apply(self, changes: dict[str, Versioned | None], revision: int) -> None:
        self.revision = revision
        for key, versioned in changes.items():
            if versioned is None:
                self.values.pop(key, None)
            else:
                self.values[key] = versioned
        for prefix, callback in list(self._watchers.values()):
            for key, versioned in changes.items():
                if key.startswith(prefix):
                    tell(callback, key, versioned)

    async def start(self) -> None:
        return None

    async def housekeep(self) -> None:
        return None

    def unreadable(self, error: Exception) -> StartupError:
        return StartupError(f"the metadata in memory cannot be read: {error!r}")

    def get(self, key: str) -> Promise[Versioned | None]:
        return Promise.of(self.values.get(key))

    def list(self, prefix: str) -> Promise[Sequence[tuple[str, Versioned]]]:
        return Promise.of(sorted(item for item in self.values.items() if item[0].startswith(prefix)))

    def watch(self, prefix: str, callback: Callable[[str, Versioned | None], None]) -> Callable[[], None]:
        number = self._next_watcher
        self._next_watcher += 1
        self._watchers[number] = (prefix, callback)
        return lambda: self._watchers.pop(number, None) and None


class MemoryMeta(Keys):
    """Implements `stores.base.MetaStore` for `memory:`."""

    def transact(self, *operations: Operation) -> Promise[int]:
        try:
            changes = self.plan(operations, self.revision + 1, {})
        except RevisionConflict as conflict:
            return Promise.failed(conflict)
        self.apply(changes, self.revision + 1)
        return Promise.of(self.revision)

    async def close(self) -> None:
        return None
