"""`etcd://…`: metadata in etcd, for any number of brokers.

    transact --queue--> one request at a time, many transactions in it --stored, reported--> answered, in order
    watch    <-- one watch over the prefix, for all watchers

The revision of a key is etcd's `mod_revision`. Reads are linearizable. `etcd_transactions.py` has the rules of
requests, `etcd_watch.py` those of watches, `etcd_connection.py` those of members that fail, and `etcd_compaction.py`
those of old revisions.

A transaction that was sent and not answered has an unknown outcome. It fails with a retriable error, as with any
database: the caller reads again, or repeats it with the same conditions. It never takes effect after a later
transaction of this store: rule 6 of requests.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Sequence

from aetcd import rpc

from millstream.core.clock import Clock
from millstream.core.errors import Code, RequestError, StartupError
from millstream.core.logs import Damped
from millstream.core.promise import Promise, promised
from millstream.stores.base import Operation, Versioned
from millstream.stores.etcd_compaction import Compaction
from millstream.stores.etcd_connection import Compacted, EtcdConnection, Unreachable
from millstream.stores.etcd_transactions import (
    INTERNAL,
    Transaction,
    batches,
    decode_key,
    encode_key,
    range_end,
    request,
)
from millstream.stores.etcd_url import understand
from millstream.stores.etcd_watch import EtcdWatch, Watcher
from millstream.stores.group_commit import GroupCommit

logger = logging.getLogger(__name__)

FENCE_ATTEMPTS = 3

Queued = Transaction[Promise[int]]


class EtcdMeta:
    """Implements `stores.base.MetaStore`."""

    def __init__(self, url: str, clock: Clock) -> None:
        found = understand(url)
        self.location = found.location
        self._prefix = found.prefix
        self._compacts = found.compacts
        self._connection = EtcdConnection(found)
        self._watch = EtcdWatch(self._connection, found.prefix, clock)
        self._commits: GroupCommit[Queued] = GroupCommit(lambda group: promised(self._write(group)))
        self._fence = encode_key(f"{found.prefix}{INTERNAL}fences/{uuid.uuid4().hex}")
        self._fence_revision = 0
        self._in_doubt = False
        """Whether the outcome of an earlier request is unknown, and the fence is not changed since."""
        self._compaction = Compaction(clock)
        self._is_compacting = False
        self._damped = Damped(__name__)

    @property
    def failure(self) -> str | None:
        return self._connection.failure

    async def start(self) -> None:
        await self._connection.open()
        try:
            await self._watch.start()
        except RequestError as error:
            raise StartupError(f"{self.location} cannot be used: {error.detail}") from None

    def unreadable(self, error: Exception) -> StartupError:
        return StartupError(
            f"the metadata in {self.location} is damaged ({error!r}): restore etcd from a snapshot (etcdctl snapshot "
            "restore)"
        )

    # -- reading -----------------------------------------------------------------------------------------------------

    def get(self, key: str) -> Promise[Versioned | None]:
        return promised(self._get(key))

    async def _get(self, key: str) -> Versioned | None:
        response = await self._connection.call("Range", rpc.RangeRequest(key=encode_key(self._prefix + key)))
        if not response.kvs:
            return None
        found = Versioned(response.kvs[0].value, response.kvs[0].mod_revision)
        self._watch.note([(key, found)])
        return found

    def list(self, prefix: str) -> Promise[Sequence[tuple[str, Versioned]]]:
        return promised(self._list(prefix))

    async def _list(self, prefix: str) -> Sequence[tuple[str, Versioned]]:
        start = encode_key(self._prefix + prefix)
        while True:
            try:
                pages, _ = await self._connection.pages(start, range_end(start))
                break
            except Compacted:
                continue  # between two pages: begins again at a newer revision
        skip = len(encode_key(self._prefix))
        pairs = [(decode_key(kv.key[skip:]), Versioned(kv.value, kv.mod_revision)) for kv in pages]
        found = [pair for pair in pairs if not pair[0].startswith(INTERNAL)]
        self._watch.note(found)
        return found

    # -- changing ----------------------------------------------------------------------------------------------------

    def transact(self, *operations: Operation) -> Promise[int]:
        promise: Promise[int] = Promise()
        transaction = Transaction(operations, self._prefix, promise)
        self._commits.put([transaction], transaction.size)
        return promise

    async def _write(self, group: Sequence[Queued]) -> None:
        gone: RequestError | None = None
        for batch in batches(group):
            try:
                if gone is not None:
                    raise gone
                answers = await self._commit(batch)
            except RequestError as error:
                if isinstance(error, Unreachable):
                    gone = error  # the others would wait for it as long
                answers = [error] * len(batch)
            except Exception as error:
                logger.exception("unexpected error in a metadata transaction")
                detail = f"the transaction failed: {type(error).__name__}"
                answers = [RequestError(Code.KAFKA_STORAGE_ERROR, detail)] * len(batch)
            for each, answer in zip(batch, answers, strict=True):
                if isinstance(answer, int):
                    each.owner.settle(answer)
                else:
                    each.owner.fail(answer)

    async def _commit(self, batch: Sequence[Queued]) -> Sequence[int | Exception]:
        """Stores a batch; the revision or the conflict of each. Waits until their changes are reported, and those of
        other brokers that they conflict with.
        """
        batch[0].check()  # a transaction that does not fit is alone
        member = await self._connection.member()
        response = await self._send(batch)
        revision = int(response.header.revision)
        answers: list[int | Exception] = []
        to_report = 0
        for each, operation in zip(batch, response.responses, strict=True):
            own = operation.response_txn
            if not own.succeeded:
                conflict, found = each.conflict(own)
                answers.append(conflict)
                if self._watch.watches(conflict.key):
                    to_report = max(to_report, found)
                continue
            answers.append(revision)
            if to_report < revision and any(map(self._watch.watches, each.writes)):  # else `changed` is not worth it
                to_report = revision if any(map(self._watch.watches, each.changed(own))) else to_report
        try:
            await self._watch.reached(to_report)
        except TimeoutError:
            self._connection.drop(member)
            raise Unreachable(self.location) from None
        return answers

    async def _send(self, batch: Sequence[Queued]) -> rpc.TxnResponse:
        for _ in range(FENCE_ATTEMPTS):
            if self._in_doubt:
                put = await self._connection.call("Put", rpc.PutRequest(key=self._fence))
                self._fence_revision, self._in_doubt = put.header.revision, False
            self._in_doubt = True
            try:
                response = await self._connection.call("Txn", request(batch, self._fence, self._fence_revision))
            except RequestError as error:
                self._in_doubt = isinstance(error, Unreachable)  # else etcd refused it
                raise
            # If the fence moved, an earlier change of it took effect late, and this request changed nothing.
            self._in_doubt = not response.succeeded
            if response.succeeded:
                if self._compaction.wrote(sum(each.size for each in batch)) and self._compacts:
                    promised(self.housekeep()).then(lambda _: None)
                return response
        raise RequestError(Code.KAFKA_STORAGE_ERROR, f"{self.location} executes old requests; try again")

    # -- watching ----------------------------------------------------------------------------------------------------

    def watch(self, prefix: str, callback: Watcher) -> Callable[[], None]:
        return self._watch.add(prefix, callback)

    # -- housekeeping ------------------------------------------------------------------------------------------------

    async def housekeep(self) -> None:
        if not self._compacts or self._is_compacting:
            return
        self._is_compacting = True
        try:
            below = self._compaction.choose(await self._connection.revision())
            if below is not None:
                await self._connection.call("Compact", rpc.CompactionRequest(revision=below))
        except Compacted:
            pass  # by another broker, or by etcd itself
        except RequestError as error:
            self._damped.warning("cannot compact the metadata; the next round tries again: %s", error)
        finally:
            self._is_compacting = False

    async def drained(self) -> None:
        await self._commits.drained()

    async def close(self) -> None:
        await self.drained()
        await self._watch.close()
        await self._connection.close()
