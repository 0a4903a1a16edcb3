"""The two store protocols. Every driver implements them and passes `tests/contract/`.

Answers are promises, so that a local driver answers at once and a database driver when it can. Methods are called
from the event loop's thread only and never block it for longer than a write to the page cache takes.

`LogStore` opens logs. A log is one partition: whole record batches with dense offsets, oldest first.
`MetaStore` is a small set of versioned keys. Revisions start at 1 and grow with every transaction of the store;
0 stands for "does not exist".
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
    """May be replaced at any time; the next append goes by the new one."""
    start: int
    """The first offset that can be read."""
    high_watermark: int
    """The offset after the last one that readers may see."""
    counted: int
    """The offset after the last one that this copy vouches for: synced with `flush=always`, otherwise appended."""
    end: int
    """The offset after the last one appended: `high_watermark <= counted <= end`."""
    epochs: Epochs
    """Where each leader epoch begins."""
    unsynced_bytes: int
    """Appended and not durable yet: what backpressure is measured by."""
    damage: Damage
    """The ranges of offsets that are known to be unreadable, and why."""

    @property
    def failure(self) -> str | None:
        """Why the log is read-only, if it is."""

    def append(self, batch: memoryview, header: BatchHeader) -> Promise[Appended]:
        """Stores one checked batch, its offsets assigned by the log; settles when readers may see it.

        The bytes are patched in place (base offset, leader epoch) and are not used after the call returns.
        Batches of idempotent producers are stored once; sequence gaps and old epochs fail the promise.
        """

    def append_run(self, run: BatchRun) -> Promise[Appended]:
        """Stores several batches behind each other, all or none; answers with the first one's offset.

        As with `append`, the bytes are patched in place and are not used after the call returns.
        """

    def lead(self, epoch: int) -> None:
        """Gives a leader epoch to all batches that are appended from now on."""

    def follow(self, batch: memoryview, header: BatchHeader) -> Promise[Appended]:
        """Stores a leader's batch at its own offsets and epoch. For logs that can follow (`LogStore.can_follow`).

        Offsets may be missing before it: compaction removed them at the leader. Below the end the same batch (offset,
        epoch, CRC) is stored once, and any other fails with `Diverged`.
        """

    def read(self, offset: int, bytes_max: int) -> Promise[Slice]:
        """Whole batches from the one that holds `offset`, below `high_watermark`; at least one where there is one.

        Ends before a damaged range. Fails with `DamagedOffset` inside one.
        """

    def inspect(self, offset: int) -> Promise[DamagedRange | None]:
        """Checks the batch that holds an offset and puts damage into the registry; None where the batch is sound."""

    def find_time(self, timestamp: int) -> Promise[TimedOffset | None]:
        """The first record at or after a time, or None."""

    def find_max_time(self) -> Promise[TimedOffset | None]:
        """The record with the largest timestamp, or None."""

    def trim(self, offset: int) -> Promise[int]:
        """Drops what lies below `offset` (at most up to `high_watermark`); answers with the new start."""

    def truncate(self, offset: int) -> Promise[int]:
        """Drops what lies at or above `offset`; answers with the new end. For followers, never below acknowledged."""

    def flush(self) -> Promise[None]:
        """Settles when all that was appended before the call is durable."""

    def wake(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Calls back whenever `high_watermark` grows or the log fails; the answer takes the callback off again."""

    def size_bytes(self) -> int: ...

    def refresh(self) -> Promise[None]:
        """Settles when the offsets known here are at least as new as the call, also where other brokers append."""

    def known_producers(self) -> Promise[Producers]:
        """The idempotent producers that the log remembers."""


class LogStore(Protocol):
    location: str
    """Where the logs live, for people to read."""
    can_follow: bool
    """Whether its logs can be copies of a leader's: `follow`, and a history of epochs that outlives a restart."""
    atomic: bool
    """Whether what is appended inside `together` is stored as a whole or not at all, over several logs."""

    tells_loss: bool
    """Whether `open` can tell a log that was lost from one that is empty, of those that `create` made."""

    def together(self) -> AbstractContextManager[None]:
        """Holds appends of this turn of the loop together, where the store can; nothing is awaited inside.

        Where the store is `atomic` and one of them is refused, for whatever reason, all fail with that reason.
        """

    def room(self) -> tuple[int, int]:
        """All bytes and free bytes of that place; -1 where nobody can tell."""

    def start(self) -> Awaitable[None]:
        """Called once, before anything else; raises `StartupError` where the place cannot be used."""

    def prepare(self, topic_id: str, partitions: int) -> Promise[None]:
        """Fetches what `open` needs to answer at once, for so many partitions of a topic."""

    def create(self, topic: str, topic_id: str, partitions: range) -> Awaitable[None]:
        """Makes what new partitions need to be told from lost ones, durably. Called before the metadata say that they
        exist; may be called again for the same ones. Fails with KAFKA_STORAGE_ERROR.
        """

    def open(self, topic: str, topic_id: str, partition: int, config: LogConfig, created: bool = False) -> PartitionLog:
        """The log of a partition that was prepared; the same one each time. Where `created` is true, `create` was
        called for it: a store that `tells_loss` answers with a log that refuses everything if it is missing.
        """

    def opened_all(self) -> None:
        """Called at start when every known log is open: what else lies there is set aside."""

    def discard(self, topic: str, topic_id: str) -> Awaitable[None]:
        """Closes and removes all logs of a topic that no longer exists."""

    def housekeep(self) -> Awaitable[None]:
        """Retention, compaction, rolling by age, checkpoints. Called every so often by the broker."""

    def close(self) -> Awaitable[None]: ...


class Versioned(NamedTuple):
    value: bytes
    revision: int


class Put(NamedTuple):
    key: str
    value: bytes
    if_revision: int | None = None
    """Only if the key is at this revision; 0: only if it does not exist; None: whatever it is."""


class Delete(NamedTuple):
    key: str
    if_revision: int | None = None


class Check(NamedTuple):
    """Changes nothing; holds the transaction to a revision."""

    key: str
    if_revision: int


Operation = Put | Delete | Check


class MetaStore(Protocol):
    @property
    def failure(self) -> str | None:
        """Why nothing can be changed until a restart, if that is so."""

    def start(self) -> Awaitable[None]:
        """Called once, before anything else; raises `StartupError` where the place cannot be used."""

    def unreadable(self, error: Exception) -> StartupError:
        """What to raise where a value at start makes no sense: which file or database it is, and how to restore it."""

    def get(self, key: str) -> Promise[Versioned | None]: ...

    def list(self, prefix: str) -> Promise[Sequence[tuple[str, Versioned]]]:
        """All keys with a prefix, in order of key."""

    def transact(self, *operations: Operation) -> Promise[int]:
        """Applies all or nothing; settles with the new revision when durable, fails with `RevisionConflict`."""

    def watch(self, prefix: str, callback: Callable[[str, Versioned | None], None]) -> Callable[[], None]:
        """Calls back after each change under a prefix (None: deleted), whoever made it; the answer ends the watch.

        Changes of one key that follow each other quickly may be told as the last of them. Own changes are told before
        their promise settles.
        """

    def close(self) -> Awaitable[None]: ...
