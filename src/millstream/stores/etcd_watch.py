"""The changes of all keys of a prefix, as one watch of etcd reports them.

    following --connection lost--> waiting --RETRY_SECONDS--> following, from the revision after `told`
        \\--revision compacted--> comparing --> following, from the revision after the comparison

Rules
-----
1. Watchers get each change once, in order of revision. After a lost connection etcd sends the changes again that came
   after the last reported revision, `told`. All changes of one revision arrive in one response.
2. If etcd has compacted that revision, the changes are lost. Then the keys are listed and compared with those that
   watchers know: they get the last change of each key.
3. Watchers know a key from a report, from `get` or from `list`. A key that was read is known at `told` at most, so that
   a comparison reports a change which was read and not reported yet.
4. `reached` waits for a revision. A transaction is answered after it, so that its changes are reported before.

`told` never follows progress notifications: before 3.4.25 and 3.5.8, etcd may send them ahead of events (etcd issue
15220).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any

import grpc
from aetcd import rpc

from millstream.core.callbacks import tell
from millstream.core.clock import Clock, sleep
from millstream.core.errors import Code, RequestError
from millstream.core.logs import Damped
from millstream.stores.base import Versioned
from millstream.stores.etcd_connection import REQUEST_SECONDS, RETRY_SECONDS, EtcdConnection, Stream, Unreachable
from millstream.stores.etcd_transactions import INTERNAL, decode_key, encode_key, range_end

logger = logging.getLogger(__name__)

Watcher = Callable[[str, Versioned | None], None]


class EtcdWatch:
    def __init__(self, connection: EtcdConnection, prefix: str, clock: Clock) -> None:
        self._connection = connection
        self._prefix = encode_key(prefix)
        self._clock = clock
        self._watchers: dict[int, tuple[str, Watcher]] = {}
        self._next_watcher = 0
        self._told = 0
        """Watchers know all changes up to this revision."""
        self._prefixes: tuple[str, ...] = ()
        self._known: dict[str, int] = {}
        """Keys under a watched prefix, with the revision that watchers know: the base of a comparison."""
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._task: asyncio.Task[None] | None = None
        self._is_lost = False
        self._damped = Damped(__name__)

    async def start(self) -> None:
        self._told = await self._connection.revision()
        self._task = asyncio.ensure_future(self._run())

    async def close(self) -> None:
        self._watchers.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def add(self, prefix: str, callback: Watcher) -> Callable[[], None]:
        number = self._next_watcher
        self._next_watcher += 1
        self._watchers[number] = (prefix, callback)
        self._prefixes = (*self._prefixes, prefix)
        return lambda: self._remove(number)

    def _remove(self, number: int) -> None:
        self._watchers.pop(number, None)
        self._prefixes = tuple(prefix for prefix, _ in self._watchers.values())

    def note(self, found: Iterable[tuple[str, Versioned]]) -> None:
        """Rule 3: these keys were read."""
        for key, value in found:
            if self.watches(key):
                self._known.setdefault(key, min(value.revision, self._told))

    def watches(self, key: str) -> bool:
        return key.startswith(self._prefixes)

    async def reached(self, revision: int) -> None:
        """Returns when all changes up to a revision are reported; raises `TimeoutError`."""
        if self._told >= revision:
            return
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((revision, waiting))
        async with asyncio.timeout(REQUEST_SECONDS):
            await waiting

    # -- following ---------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            try:
                await self._follow()
                continue
            except RequestError as error:
                if not self._is_lost:
                    self._damped.warning("watch lost at revision %d; retrying: %s", self._told, error)
            except Exception:
                logger.exception("unexpected error in the watch of the metadata")
            self._is_lost = True
            await sleep(self._clock, RETRY_SECONDS)

    async def _follow(self) -> None:
        """One watch. Returns after a compaction of its revision, when the keys are compared."""
        member = await self._connection.member()
        stream = member.watch()
        try:
            response = await self._create(stream)
            while response is not grpc.aio.EOF and not response.canceled:
                self._report(response.events)
                response = await stream.read()
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError, TimeoutError) as error:
            self._connection.drop(member)
            raise Unreachable(self._connection.location) from error
        except asyncio.CancelledError:
            if self._task is not None and self._task.cancelling():
                raise
            raise Unreachable(self._connection.location) from None  # the connection dropped the member
        finally:
            member.end(stream)
        if response is not grpc.aio.EOF and response.compact_revision:
            logger.info("revision %d of the metadata is compacted; comparing all keys", self._told)
            await self._compare()
            return
        self._connection.drop(member)
        reason = "the stream ended" if response is grpc.aio.EOF else response.cancel_reason
        raise RequestError(Code.KAFKA_STORAGE_ERROR, f"{self._connection.location} ended the watch: {reason}")

    async def _create(self, stream: Stream) -> Any:
        """Starts a watch after the last reported revision; etcd's first response."""
        create = rpc.WatchCreateRequest(
            key=self._prefix, range_end=range_end(self._prefix), start_revision=self._told + 1
        )
        async with asyncio.timeout(REQUEST_SECONDS):
            await stream.write(rpc.WatchRequest(create_request=create))
            response = await stream.read()
        if self._is_lost and response is not grpc.aio.EOF and not response.canceled:
            self._is_lost = False
            logger.info("watching %s again, from revision %d", self._connection.location, self._told + 1)
        return response

    def _report(self, events: Iterable[rpc.Event]) -> None:
        told = revision = self._told
        for event in events:
            revision = event.kv.mod_revision
            if revision > told:
                key = decode_key(event.kv.key[len(self._prefix) :])
                is_deleted = event.type == rpc.Event.DELETE
                self._tell(key, None if is_deleted else Versioned(event.kv.value, revision), revision)
        self._move(max(told, revision))

    def _tell(self, key: str, value: Versioned | None, revision: int) -> None:
        if key.startswith(INTERNAL):
            return
        watchers = [callback for prefix, callback in self._watchers.values() if key.startswith(prefix)]
        if watchers:
            if value is None:
                self._known.pop(key, None)
            else:
                self._known[key] = revision
        for callback in watchers:
            tell(callback, key, value)

    def _move(self, revision: int) -> None:
        self._told = revision
        waiting, self._waiting = self._waiting, []
        for wanted, future in waiting:
            if wanted > revision:
                self._waiting.append((wanted, future))
            elif not future.done():  # else the wait was given up
                future.set_result(None)

    # -- comparing ---------------------------------------------------------------------------------------------------

    async def _compare(self) -> None:
        """Rule 2. A watcher that is added meanwhile lists its keys itself, or is included by another round."""
        watchers = -1
        while watchers != self._next_watcher:
            watchers = self._next_watcher
            prefixes = self._prefixes
            found, revision = await self._list(prefixes)
        for key in [key for key in self._known if key not in found]:
            if key.startswith(prefixes):
                self._tell(key, None, revision)
        for key, value in sorted(found.items(), key=lambda item: item[1].revision):
            if self._known.get(key) != value.revision:
                self._tell(key, value, value.revision)
        self._move(revision)

    async def _list(self, prefixes: Iterable[str]) -> tuple[dict[str, Versioned], int]:
        """All keys under some prefixes at one revision."""
        found: dict[str, Versioned] = {}
        revision = await self._connection.revision()
        for prefix in prefixes:
            start = self._prefix + encode_key(prefix)
            pages, _ = await self._connection.pages(start, range_end(start), revision)
            for kv in pages:
                found[decode_key(kv.key[len(self._prefix) :])] = Versioned(kv.value, kv.mod_revision)
        return found, revision
