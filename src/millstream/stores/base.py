"""The two store protocols. Every driver implements them and passes `tests/contract/`.

Methods return promises: a local driver answers at once, a database driver later. Call them only from the event
loop's thread. They never block it for longer than a write to the page cache.

`LogStore` opens logs. A log is one partition: whole record batches with dense offsets, oldest first.
`MetaStore` is a small set of versioned keys. Revisions start at 1 and grow with every transaction of the store;
0 means "does not exist".
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from millstream.core.errors import StartupError
from millstream.core.promise import Promise
from millstream.log.answers import Appended, TimedOffset
from millstream.log.config import LogConfig
from millstream.log.damage import Damage, DamagedRange
from millstream.log.epochs import Epochs
from millstream.log.producers import Producers
from millstream.log.slice import Slice
from millstream.records.batch import BatchHeader
from millstream.records.run import BatchRun


class PartitionLog(Protocol):
    config: LogConfig
    """May be replaced at any time; the next append uses the new one."""
    start: int
    """The first offset that can be read."""
    high_watermark: int
    """The offset after the last one that readers may see."""
    counted: int
    """The offset after the last one that counts as stored here: synced with `flush=always`, otherwise appended."""
    end: int
    """The offset after the last one appended: `stable <= high_watermark <= counted <= end`."""
    epochs: Epochs
    """Where each leader epoch begins."""
    unsynced_bytes: int
    """Bytes appended and not durable yet; backpressure limits them."""
    damage: Damage
    """The ranges of offsets known to be unreadable, and why."""

    @property
    def stable(self) -> int:
        """The offset below which no transaction is open, where committed reads end; else `high_watermark`."""

    @property
    def failure(self) -> str | None:
        """Why the log is read-only, if it is."""

    def append(self, batch: memoryview, header: BatchHeader) -> Promise[Appended]:
        """Stores one checked batch and assigns its offsets; settles when readers may see it.

        Patches the bytes in place (base offset, leader epoch) and does not use them after the call returns.
        Stores batches of idempotent producers once; sequence gaps and old epochs fail the promise (KIP-98).
        """

    def append_run(self, run: BatchRun) -> Promise[Appended]:
        """Stores several consecutive batches, all or none; answers with the first one's offset.

        As `append`, patches the bytes in place and does not use them after the call returns.
        """

    def lead(self, epoch: int) -> None:
        """Sets the leader epoch of all batches appended from now on."""

    def follow(self, batch: memoryview, header: BatchHeader) -> Promise[Appended]:
        """Stores a leader's batch at its own offsets and epoch. For logs that can follow (`LogStore.can_follow`).

        Offsets may be missing before it: the leader compacted them away. Below the end, the same batch (offset,
        epoch, CRC) is a duplicate, and any other fails with `Diverged`.
        """

    def read(self, offset: int, bytes_max: int, below: int | None = None) -> Promise[Slice]:
        """Whole batches from the one that holds `offset`, below `high_watermark`; at least one if there is any.

        `below` ends the read earlier, at a batch boundary: `stable` for a committed read. The read ends before a
        damaged range, and fails with `DamagedOffset` inside one.
        """

    def inspect(self, offset: int) -> Promise[DamagedRange | None]:
        """Checks the batch that holds an offset and registers damage; None if the batch is sound."""

    def find_time(self, timestamp: int) -> Promise[TimedOffset | None]:
        """The first record at or after a time, or None."""

    def find_max_time(self) -> Promise[TimedOffset | None]:
        """The record with the largest timestamp, or None."""

    def trim(self, offset: int) -> Promise[int]:
        """Deletes the records below `offset` (at most `high_watermark`); answers with the new start."""

    def truncate(self, offset: int) -> Promise[int]:
        """Deletes the records from `offset` on; answers with the new end. For followers, never below acknowledged."""

    def flush(self) -> Promise[None]:
        """Settles when all earlier appends are durable."""

    def wake(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Calls back whenever `high_watermark` or `stable` grows or the log fails; the answer removes the callback."""

    def size_bytes(self) -> int: ...

    def refresh(self) -> Promise[None]:
        """Settles when the offsets here are at least as new as the call, even if other brokers append."""

    def known_producers(self) -> Promise[Producers]:
        """The idempotent producers that the log remembers."""


class ReplicatedLog(PartitionLog, Protocol):
    """A log of a store that `can_follow`, with copies on other brokers."""

    name: str
    is_replicated: bool

    def join_replicas(self, on_growth: Callable[[], None]) -> None:
        """Other brokers hold copies from now on: only the leader raises the high watermark. It starts at `start`.

        `on_growth` is called when `end` or `counted` has grown.
        """

    def raise_high_watermark(self, offset: int) -> None:
        """Takes over a high watermark, at most up to `counted`."""

    def read_to_end(self, offset: int, bytes_max: int) -> Promise[Slice]:
        """For a replica: whole batches from the one that holds `offset`, committed or not."""

    def restart_at(self, offset: int) -> Promise[int]:
        """Empties the log, which then starts and ends at `offset`; answers with it."""


class LogStore(Protocol):
    location: str
    """Where the logs live, in readable form."""
    can_follow: bool
    """Whether its logs can copy a leader's: they have `follow` and an epoch history that survives a restart."""
    atomic: bool
    """Whether appends to several logs inside `together` are stored all or none."""

    tells_loss: bool
    """Whether `open` can tell a lost log from an empty one, among logs that `create` made."""

    def together(self) -> AbstractContextManager[None]:
        """Bundles the appends of this turn of the loop, if the store can; await nothing inside.

        In an `atomic` store, a refused append fails all appends of the bundle with the same reason.
        """

    def room(self) -> tuple[int, int]:
        """Total and free bytes of the location; -1 if unknown."""

    def start(self) -> Awaitable[None]:
        """Called once, before anything else; raises `StartupError` if the location is unusable."""

    def match(self, meta: MetaStore) -> Awaitable[None]:
        """Called once, when both stores have started; raises `StartupError` if the metadata are of other logs."""

    def prepare(self, topic_id: str, partitions: int) -> Promise[None]:
        """Fetches the state that `open` needs for the first `partitions` of a topic."""

    def create(self, topic: str, topic_id: str, partitions: range) -> Awaitable[None]:
        """Durably creates the marks that tell new partitions from lost ones. Called before the metadata lists the
        partitions. Idempotent. Fails with KAFKA_STORAGE_ERROR.
        """

    def open(self, topic: str, topic_id: str, partition: int, config: LogConfig, created: bool = False) -> PartitionLog:
        """The log of a prepared partition; the same object each time. `created` says that `create` was called for
        it: a store that `tells_loss` then answers for a missing log with one that refuses everything.
        """

    def opened_all(self) -> None:
        """Called at start when every known log is open: sets unknown logs aside."""

    def discard(self, topic: str, topic_id: str) -> Awaitable[None]:
        """Closes and removes all logs of a topic that no longer exists."""

    def housekeep(self) -> Awaitable[None]:
        """Retention, compaction, rolling by age, checkpoints. The broker calls it periodically."""

    def close(self) -> Awaitable[None]: ...


class Versioned(NamedTuple):
    value: bytes
    revision: int


class Put(NamedTuple):
    key: str
    value: bytes
    if_revision: int | None = None
    """Compare-and-set: the key must be at this revision; 0: must not exist; None: always."""


class Delete(NamedTuple):
    key: str
    if_revision: int | None = None


class Check(NamedTuple):
    """Changes nothing; requires a revision of the key."""

    key: str
    if_revision: int


Operation = Put | Delete | Check


class MetaStore(Protocol):
    @property
    def failure(self) -> str | None:
        """Why the store is read-only until a restart, if it is."""

    def start(self) -> Awaitable[None]:
        """Called once, before anything else; raises `StartupError` if the location is unusable."""

    def unreadable(self, error: Exception) -> StartupError:
        """The error for a value that cannot be decoded at start: names the file or database and how to restore it."""

    def get(self, key: str) -> Promise[Versioned | None]: ...

    def list(self, prefix: str) -> Promise[Sequence[tuple[str, Versioned]]]:
        """All keys with a prefix, sorted."""

    def transact(self, *operations: Operation) -> Promise[int]:
        """Applies all or none; settles with the new revision when durable, fails with `RevisionConflict`."""

    def watch(self, prefix: str, callback: Callable[[str, Versioned | None], None]) -> Callable[[], None]:
        """Calls back after each change under a prefix (None: deleted), by any broker; the answer ends the watch.

        Quick changes of one key may be reported as the last of them only. A change made here is reported before its
        promise settles.
        """

    def housekeep(self) -> Awaitable[None]:
        """Forgets what no broker needs. The broker calls it periodically."""

    def close(self) -> Awaitable[None]: ...
