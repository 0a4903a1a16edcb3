"""Many transactions as one request to etcd, and its response as their answers. No sockets.

    transactions --batches--> request: Txn if fence [ Txn, Txn, ... ] --etcd, one revision--> answers, one for each

Rules
-----
1. Each transaction is a nested Txn with its own conditions, so a conflict of one changes nothing of the others.
2. etcd evaluates all conditions of a request before it applies a change, and refuses a request that writes a key
   twice. So a transaction joins a batch only if no earlier transaction of the batch writes one of its keys. The batch
   then has the effect of its transactions in their order.
3. All transactions of a request get one revision. A key still gets a new revision with every change.
4. etcd counts operations by depth: the widest list of a Txn and the widest list of the Txn inside it are 128 together
   at most (`--max-txn-ops`, checked in `checkTxnRequest`). So changes without conditions can be nested in groups, and a
   transaction may have tens of thousands of them. Only its conditions are limited, to `CONDITIONS_MAX`.
5. etcd refuses requests above 1.5 MiB (`--max-request-bytes`). A batch ends at `BYTES_MAX`; a larger transaction is
   sent alone.
6. A request has one more condition, the revision of the writer's fence: a key of this store instance that does not
   exist at first. etcd may execute a request long after its client gave it up. So a writer changes its fence after an
   unknown outcome, before its next request. Then the old request either took effect before, or never does.
7. etcd's quota does not count the changes of nested Txns (`costTxn`). A request that puts keys also has a put on its
   own level, for the case that its fence moved. So a full etcd refuses it, and accepts requests that only delete.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Generic, TypeVar

from aetcd import rpc

from millstream.core.errors import Code, RequestError, RevisionConflict
from millstream.stores.base import Check, Delete, Operation, Put

WIDTH_MAX = 128
"""etcd's default of `--max-txn-ops`."""
TRANSACTIONS_MAX = 64
"""Per request. Leaves the other half of `WIDTH_MAX` to each transaction."""
CONDITIONS_MAX = WIDTH_MAX - 1
"""Of a transaction that is alone in its request."""
INTERNAL = "\0"
"""The beginning of keys that are no metadata: fences."""
BYTES_MAX = 1 << 20
OVERHEAD_BYTES = 32
"""Of an operation, beside its key and value; generous."""

Owner = TypeVar("Owner")


class Transaction(Generic[Owner]):
    """One transaction, and the caller's own handle for it."""

    __slots__ = ("conditions", "owner", "size", "writes")

    def __init__(self, operations: Iterable[Operation], prefix: str, owner: Owner) -> None:
        self.owner = owner
        self.conditions: list[tuple[str, bytes, int]] = []
        """Key, etcd's key and revision, in the order of the calls: the first that fails is reported."""
        self.writes: dict[str, rpc.RequestOp] = {}
        """The last one of each key."""
        self.size = 0
        for each in operations:
            key = encode_key(prefix + each.key)
            if each.if_revision is not None:
                self.conditions.append((each.key, key, each.if_revision))
                self.size += 2 * (len(key) + OVERHEAD_BYTES)
            if isinstance(each, Put):
                self.writes[each.key] = rpc.RequestOp(request_put=rpc.PutRequest(key=key, value=each.value))
                self.size += len(key) + len(each.value) + OVERHEAD_BYTES
            elif isinstance(each, Delete):
                self.writes[each.key] = rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=key))
                self.size += len(key) + OVERHEAD_BYTES
            else:
                assert isinstance(each, Check)

    def fits(self, width: int) -> bool:
        return len(self.conditions) <= width and len(self.writes) <= _capacity(width, len(self.conditions))

    def check(self) -> None:
        """Fails a transaction that no request can hold."""
        if not self.fits(WIDTH_MAX - 1):
            raise RequestError(
                Code.INVALID_REQUEST,
                f"a metadata transaction of {len(self.writes)} changes has {len(self.conditions)} conditions; etcd "
                f"takes at most {CONDITIONS_MAX}",
            )

    def keys(self) -> Iterator[str]:
        yield from self.writes
        for key, _, _ in self.conditions:
            yield key

    def request(self, width: int) -> rpc.TxnRequest:
        return rpc.TxnRequest(
            compare=[_at(key, revision) for _, key, revision in self.conditions],
            success=_grouped(list(self.writes.values()), width, len(self.conditions)),
            failure=[
                rpc.RequestOp(request_range=rpc.RangeRequest(key=key, keys_only=True)) for _, key, _ in self.conditions
            ],
        )

    def conflict(self, response: rpc.TxnResponse) -> tuple[RevisionConflict, int]:
        """Its first condition that does not hold, and the revision of that key."""
        for (key, _, expected), each in zip(self.conditions, response.responses, strict=True):
            found = each.response_range.kvs
            revision = found[0].mod_revision if found else 0
            if revision != expected:
                return RevisionConflict(key, expected, revision), revision
        raise AssertionError("etcd refused a transaction whose conditions hold")

    def changed(self, response: rpc.TxnResponse) -> Iterator[str]:
        """The keys that it changed: not those that it deleted and that did not exist."""
        for key, each in zip(self.writes, _flat(response.responses), strict=True):
            if each.HasField("response_put") or each.response_delete_range.deleted:
                yield key


def batches(transactions: Iterable[Transaction[Owner]]) -> Iterator[list[Transaction[Owner]]]:
    """Divides transactions into requests, in their order."""
    batch: list[Transaction[Owner]] = []
    written: set[str] = set()
    size = 0
    for each in transactions:
        fits = each.fits(WIDTH_MAX - TRANSACTIONS_MAX)
        if batch and (
            not fits
            or len(batch) == TRANSACTIONS_MAX
            or size + each.size > BYTES_MAX
            or not written.isdisjoint(each.keys())
        ):
            yield batch
            batch, size = [], 0
            written.clear()
        batch.append(each)
        written.update(each.writes)
        size += each.size
        if not fits:
            yield batch
            batch, size = [], 0
            written.clear()
    if batch:
        yield batch


def request(batch: Sequence[Transaction[Owner]], fence: bytes, revision: int) -> rpc.TxnRequest:
    """The response has `succeeded` if the fence is at that revision, and then a nested response per transaction."""
    width = WIDTH_MAX - len(batch)
    puts = any(each.HasField("request_put") for transaction in batch for each in transaction.writes.values())
    return rpc.TxnRequest(
        compare=[_at(fence, revision)],
        success=[rpc.RequestOp(request_txn=each.request(width)) for each in batch],
        failure=[rpc.RequestOp(request_put=rpc.PutRequest(key=fence))] if puts else [],
    )


def _at(key: bytes, revision: int) -> rpc.Compare:
    return rpc.Compare(target=rpc.Compare.MOD, result=rpc.Compare.EQUAL, key=key, mod_revision=revision)


def encode_key(key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape")


def decode_key(key: bytes) -> str:
    """Another program's key may not be UTF-8."""
    return key.decode("utf-8", "surrogateescape")


def range_end(prefix: bytes) -> bytes:
    """The end of the range of all keys with a prefix. A prefix here is never empty, and UTF-8 has no byte 255."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


@cache
def _capacity(width: int, conditions: int = 0) -> int:
    """How many changes a Txn with some conditions can hold within a width, nested in groups."""
    groups = max(conditions, width // 2)
    nested = groups * _capacity(width - groups) if 0 < groups < width else 0
    return max(width, nested)


def _grouped(operations: Sequence[rpc.RequestOp], width: int, conditions: int = 0) -> Sequence[rpc.RequestOp]:
    """A tree of unconditional Txns that holds the operations in their order."""
    if len(operations) <= width:
        return operations
    groups = max(conditions, width // 2)
    each = -(-len(operations) // groups)
    return [
        rpc.RequestOp(request_txn=rpc.TxnRequest(success=_grouped(operations[first : first + each], width - groups)))
        for first in range(0, len(operations), each)
    ]


def _flat(tree: Iterable[rpc.ResponseOp]) -> Iterator[rpc.ResponseOp]:
    for each in tree:
        if each.HasField("response_txn"):
            yield from _flat(each.response_txn.responses)
        else:
            yield each
