"""The interface of a database that holds logs and metadata: the seam between our rules and SQL.

`TableLogStore` and `TableMeta` hold the rules for every database; an engine (`sqlite.py`, `postgres.py`) implements
this protocol. A row is a batch. Several processes may open one database. Each engine guarantees:

1. `append` assigns offsets and checks idempotent producers (KIP-98) inside the transaction that stores the batches.
   So offsets are dense, and a retry through another process is recognised.
2. An answer is durable, and visible to every later call of any process.
3. `listen` reports changes of other processes within a bounded time, never before they can be read.
4. A failure is a `RequestError`. If `append` or `transact` fails, the outcome may be unknown: nothing was
   acknowledged, and the retry of an idempotent producer gets the right answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from millstream.core.errors import MillstreamError, RequestError, RevisionConflict
from millstream.core.promise import Promise
from millstream.log.producers import Producers
from millstream.records.batch import BatchHeader
from millstream.stores.base import Operation, Versioned


class LogState(NamedTuple):
    """A log at one of its versions. A larger version is newer."""

    id: int
    version: int
    start: int
    end: int
    size_bytes: int


class Append(NamedTuple):
    """Consecutive batches of one log, stored together. Only a single batch may have a producer id."""

    log_id: int
    batches: list[bytearray]
    headers: list[BatchHeader]
    epoch: int
    """The leader epoch of the log."""
    bundle: int = 0
    """Appends with one non-zero number are stored all or none."""


class Stored(NamedTuple):
    base_offset: int
    duplicate: bool


Landed = tuple[list[Stored | RequestError], list[LogState]]
"""An answer for each append, and the states of the logs that changed."""


class Torn(MillstreamError):
    """An append of a bundle was refused: nothing of the whole transaction was stored."""

    def __init__(self, bundles: dict[int, RequestError]) -> None:
        super().__init__("an append of the transaction was refused, so none was stored")
        self.bundles = bundles
        """Why, by bundle."""


def check_bundles(appends: Sequence[Append], outcomes: Sequence[Stored | RequestError]) -> None:
    """Engines call it before COMMIT."""
    if not any(each.bundle for each in appends):
        return
    torn = {
        each.bundle: outcome
        for each, outcome in zip(appends, outcomes, strict=True)
        if each.bundle and isinstance(outcome, RequestError)
    }
    if torn:
        raise Torn(torn)


class Row(NamedTuple):
    """One batch, without its bytes."""

    base_offset: int
    last_offset: int
    max_timestamp: int
    size: int


class Changes(NamedTuple):
    """Changes of the metadata, in order of revision."""

    revision: int
    """All changes up to here."""
    complete: bool
    """False: deletions after `since` are partly forgotten."""
    items: list[tuple[str, Versioned | None, int]]
    """Key, current value, and the revision of the change."""


class Database(Protocol):
    location: str
    failure: str | None
    """Why the database is read-only until a restart, if it is."""

    async def start(self) -> None:
        """Connects and brings the schema up to date; raises `StartupError`. A second call does nothing."""

    async def close(self) -> None: ...

    def listen(
        self, logs: Callable[[Sequence[LogState]], None], meta: Callable[[int], None], lost: Callable[[], None]
    ) -> None:
        """Sets the callbacks: new log states, a new metadata revision, and that some news may be missing."""

    def room(self) -> tuple[int, int]: ...

    # -- logs

    async def open_logs(self, topic_id: str, partitions: int) -> list[LogState]:
        """The first `partitions` of a topic; creates missing ones."""

    async def states(self, log_ids: Sequence[int]) -> list[LogState]: ...

    def append(self, appends: Sequence[Append], now_ms: int) -> Promise[Landed]:
        """One transaction. Fails as a whole with `Torn` or a database error."""

    async def read(self, log_id: int, offset: int, below: int, bytes_max: int) -> tuple[bytes, int]:
        """Whole batches from the one that reaches `offset`, all under `below`, at least one if there is any; and the
        next offset.
        """

    async def rows(self, log_id: int, offset: int, count_max: int) -> list[Row]:
        """The first batches that reach an offset."""

    async def first_at(self, log_id: int, timestamp: int, offset: int, below: int) -> bytes | None:
        """The first batch that reaches `offset` and a time, under `below`, or None."""

    async def newest_time(self, log_id: int, offset: int, below: int) -> int:
        """The largest timestamp of batches between `offset` and `below`; -1 without any."""

    async def trim(self, log_id: int, offset: int) -> LogState:
        """Moves the start, and deletes the batches below it in bounded steps."""

    async def truncate(self, log_id: int, offset: int) -> LogState: ...

    async def producers(self, log_id: int) -> Producers: ...

    async def forget_producers(self, before_ms: int, per_log_max: int) -> None: ...

    async def discard(self, topic_id: str) -> None:
        """Deletes all logs of a topic, in bounded steps."""

    async def topic_ids(self) -> set[str]:
        """The topics of all logs."""

    # -- metadata

    async def revision(self) -> int: ...

    async def get(self, key: str) -> Versioned | None: ...

    async def list_keys(self, prefix: str) -> list[tuple[str, Versioned]]: ...

    async def transact(
        self, transactions: Sequence[Sequence[Operation]], since: int, prefixes: Sequence[str]
    ) -> tuple[list[int | RevisionConflict], Changes]:
        """Applies them in order, each all or none; then answers as `changes` does."""

    async def changes(self, since: int, prefixes: Sequence[str]) -> Changes:
        """The changes under some prefixes after a revision."""

    async def forget_deleted(self, keep: int) -> None:
        """Forgets deleted keys, except of the last `keep` revisions."""
