"""The journal of groups: how many writes share a transaction."""

from __future__ import annotations

from millstream.broker.groups.journal import Entry, Journal
from millstream.cluster.base import Solo
from millstream.core.promise import Promise
from millstream.stores.base import Operation, Put
from millstream.stores.keys import MemoryMeta


class HeldMeta(MemoryMeta):
    """Answers a transaction when the test does."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[tuple[int, Promise[int]]] = []

    def transact(self, *operations: Operation) -> Promise[int]:
        self.held.append((len(operations), Promise()))
        return self.held[-1][1]


def write(key: str, size: int) -> Entry:
    return Entry(lambda: [Put(key, bytes(size))])


def test_a_transaction_ends_at_a_size_that_every_store_takes() -> None:
    meta = HeldMeta()
    journal = Journal(meta, 100, Solo(1))
    answers = [journal.submit(write(f"k/{at}", 200_000)) for at in range(7)]
    for count in (1, 3, 3):
        operations, promise = meta.held.pop()
        assert operations == count and not meta.held
        promise.settle(1)
    assert all(answer.done and answer.error is None for answer in answers)


def test_an_entry_is_never_split() -> None:
    meta = HeldMeta()
    journal = Journal(meta, 100, Solo(1))
    journal.submit(Entry(lambda: [Put(f"k/{at}", bytes(1_000)) for at in range(3_000)]))
    assert [count for count, _ in meta.held] == [3_000]
