"""`MetaStore` over a database, with watches that see other brokers' changes.

Reads go to the database. Watchers get changes in order of revision: on news, and as part of every own transaction, the
store asks for all changes since the last reported revision. So each change is reported once, in order, and an own
change before its promise settles.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from millstream.core.callbacks import tell
from millstream.core.errors import Code, RequestError, StartupError
from millstream.core.logs import Damped
from millstream.core.promise import Promise, promised
from millstream.stores.base import Operation, Versioned
from millstream.stores.database import Changes, Database
from millstream.stores.group_commit import GroupCommit

logger = logging.getLogger(__name__)

Watcher = Callable[[str, Versioned | None], None]
RETRY_SECONDS = 0.5
DELETIONS_KEPT = 10_000
"""Revisions whose deletions are kept. A broker that was away for longer compares all keys."""


class TableMeta:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._commits: GroupCommit[tuple[Sequence[Operation], Promise[int]]] = GroupCommit(
            lambda group: promised(self._write(group))
        )
        self._watchers: dict[int, tuple[str, Watcher]] = {}
        self._next_watcher = 0
        self._told = 0
        """Watchers know all changes up to this revision."""
        self._known: dict[str, int] = {}
        """Keys under a watched prefix, with the last reported revision: the base of a full comparison."""
        self._heard = 0
        self._catching_up = False
        self._retry: asyncio.TimerHandle | None = None
        """Set while a retry waits, so that failed writes do not start more."""
        self._damped = Damped(__name__)
        self._writing = False

    @property
    def failure(self) -> str | None:
        return self._database.failure

    async def start(self) -> None:
        await self._database.start()
        self._told = await self._database.revision()

    def unreadable(self, error: Exception) -> StartupError:
        return StartupError(
            f"the metadata in {self._database.location} is damaged ({error!r}): restore the database from a backup"
        )

    def get(self, key: str) -> Promise[Versioned | None]:
        return promised(self._database.get(key))

    def list(self, prefix: str) -> Promise[Sequence[tuple[str, Versioned]]]:
        return promised(self._list(prefix))

    async def _list(self, prefix: str) -> Sequence[tuple[str, Versioned]]:
        """Notes the keys, so that a watcher hears of their deletion after any absence."""
        found = await self._database.list_keys(prefix)
        watched = tuple(self._prefixes())
        for key, value in found:
            if key.startswith(watched):
                self._known.setdefault(key, value.revision)
        return found

    # -- changing ----------------------------------------------------------------------------------------------------

    def transact(self, *operations: Operation) -> Promise[int]:
        promise: Promise[int] = Promise()
        size = sum(len(getattr(each, "value", b"")) + 100 for each in operations)
        self._commits.put([(operations, promise)], size)
        return promise

    async def _write(self, group: Sequence[tuple[Sequence[Operation], Promise[int]]]) -> None:
        self._writing = True
        try:
            await self._write_group(group)
        finally:
            self._writing = False
            self.news(0)

    async def _write_group(self, group: Sequence[tuple[Sequence[Operation], Promise[int]]]) -> None:
        watchers = self._next_watcher
        try:
            answers, changes = await self._database.transact(
                [operations for operations, _ in group], self._told, self._prefixes()
            )
            while watchers != self._next_watcher:  # the answer lacks prefixes of new watchers
                watchers = self._next_watcher
                changes = await self._database.changes(self._told, self._prefixes())
            await self._tell(changes)
        except RequestError as error:
            for _, promise in group:
                promise.fail(error)
            return
        except Exception as error:
            logger.exception("unexpected error in a metadata transaction")
            for _, promise in group:
                detail = f"the transaction failed: {type(error).__name__}"
                promise.fail(RequestError(Code.KAFKA_STORAGE_ERROR, detail))
            return
        for (_, promise), answer in zip(group, answers, strict=True):
            if isinstance(answer, int):
                promise.settle(answer)
            else:
                promise.fail(answer)

    # -- watching ----------------------------------------------------------------------------------------------------

    def watch(self, prefix: str, callback: Watcher) -> Callable[[], None]:
        number = self._next_watcher
        self._next_watcher += 1
        self._watchers[number] = (prefix, callback)
        promised(self._remember(prefix)).then(lambda _: None)
        return lambda: self._watchers.pop(number, None) and None

    async def _remember(self, prefix: str) -> None:
        for key, value in await self._database.list_keys(prefix):
            self._known.setdefault(key, value.revision)

    def _prefixes(self) -> Sequence[str]:
        return sorted({prefix for prefix, _ in self._watchers.values()})

    def news(self, revision: int) -> None:
        """The metadata is at a new revision. If the change is our own, the transaction's answer reports it."""
        if revision > self._heard and self._retry is not None:  # the database is back
            self._retry.cancel()
            self._retry = None
        self._heard = max(self._heard, revision)
        is_busy = self._catching_up or self._writing or self._retry is not None
        if self._heard > self._told and self._watchers and not is_busy:
            self._catching_up = True
            promised(self._catch_up()).then(self._caught_up)

    async def catch_up(self) -> None:
        """Asks for news that may be missing."""
        self.news(await self._database.revision())

    async def _catch_up(self) -> None:
        while self._heard > self._told:
            watchers = self._next_watcher
            changes = await self._database.changes(self._told, self._prefixes())
            if watchers == self._next_watcher:
                await self._tell(changes)

    def _caught_up(self, done: Promise[None]) -> None:
        self._catching_up = False
        if done.error is not None:
            self._damped.warning("cannot read changes of the metadata; retrying in %g s: %s", RETRY_SECONDS, done.error)
            self._retry = asyncio.get_running_loop().call_later(RETRY_SECONDS, self._look_again)
        else:
            self.news(0)  # more may have arrived since the last read, a turn of the loop ago

    def _look_again(self) -> None:
        self._retry = None
        self.news(0)

    async def _tell(self, changes: Changes) -> None:
        if not changes.complete:
            await self._compare()
            return
        told = self._told
        self._told = max(told, changes.revision)
        for key, value, revision in changes.items:
            if revision > told:
                self._tell_one(key, value)

    def _tell_one(self, key: str, value: Versioned | None) -> None:
        if value is None:
            self._known.pop(key, None)
        else:
            self._known[key] = value.revision
        for prefix, callback in list(self._watchers.values()):
            if key.startswith(prefix):
                tell(callback, key, value)

    async def _compare(self) -> None:
        """The deletions are forgotten: compares all reported keys with all stored keys."""
        revision = await self._database.revision()
        prefixes = tuple(self._prefixes())  # later watchers list keys newer than the revision
        found: dict[str, Versioned] = {}
        for prefix in prefixes:
            found.update(await self._database.list_keys(prefix))
        self._told = max(self._told, revision)
        # A key with a later revision was reported during the lists, which may be older.
        gone = [key for key, known in self._known.items() if key not in found and known <= revision]
        for key in gone:
            if key.startswith(prefixes):
                self._tell_one(key, None)
        for key, value in sorted(found.items(), key=lambda item: item[1].revision):
            if self._known.get(key, 0) < value.revision:
                self._tell_one(key, value)

    def lost(self) -> None:
        """Asks for missing news until the database answers. With logs in the same database, their store does it."""
        promised(self.catch_up()).then(self._asked)

    def _asked(self, done: Promise[None]) -> None:
        if done.error is not None and self._watchers:
            asyncio.get_running_loop().call_later(RETRY_SECONDS, self.lost)

    async def housekeep(self) -> None:
        try:
            await self._database.forget_deleted(DELETIONS_KEPT)
        except RequestError as error:
            self._damped.warning("metadata housekeeping failed; retrying in the next round: %s", error)

    async def drained(self) -> None:
        await self._commits.drained()

    async def close(self) -> None:
        self._watchers.clear()
        await self.drained()
        await self._database.close()
