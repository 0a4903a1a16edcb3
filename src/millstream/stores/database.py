"""What a database must be able to do to hold logs and metadata: the seam between our rules and SQL.

`TableLogStore` and `TableMeta` are the rules, the same over every database; an engine (`sqlite.py`, `postgres.py`) is
this protocol. A row is a batch. Whoever opened the database, several processes at once, each engine promises:

1. `append` assigns offsets and judges idempotent producers inside the transaction that stores the batches, so that
   offsets are dense and a repeat is found whichever process stored the first.
2. What a method answers is durable, and visible to every later call of any process.
3. Changes by others arrive through `listen`, late by a bounded time, never before they can be read.
4. A failure is a `RequestError`. After one of `append` or `transact` the outcome may be unknown: nothing was
   acknowledged, and an idempotent producer that asks again gets the right answer.
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
    """A log as one of its versions left it. Of two states the one with the larger version is the newer."""

    id: int
    version: int
    start: int
    end: int
    size_bytes: int


class Append(NamedTuple):
    """Batches of one log that are stored together, behind each other. Only a single one may have a producer id."""

    log_id: int
    batches: list[bytearray]
    headers: list[BatchHeader]
    bundle: int = 0
    """Appends with the same number, but 0, are stored all or none."""


class Stored(NamedTuple):
    base_offset: int
    duplicate: bool


Landed = tuple[list[Stored | RequestError], list[LogState]]
"""An answer for each append, and the states of the logs that changed."""


class Torn(MillstreamError):
    """One of several appends that belong together was refused: nothing of the whole transaction was stored."""

    def __init__(self, bundles: dict[int, RequestError]) -> None:
        super().__init__("appends that belong together cannot be stored together")
        self.bundles = bundles
        """Which, and why."""


def check_bundles(appends: Sequence[Append], outcomes: Sequence[Stored | RequestError]) -> None:
    """For engines, before they commit."""
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
    """What changed in the metadata, in order of revision."""

    revision: int
    """All up to here are among them."""
    complete: bool
    """False: it was too long ago to tell what was deleted since."""
    items: list[tuple[str, Versioned | None, int]]
    """Key, what it is now, and at which revision that happened."""


class Database(Protocol):
    location: str
    failure: str | None
    """Why nothing can be written until a restart, if that is so."""

    async def start(self) -> None:
        """Connects and brings the schema up to date; raises `StartupError`. A second call does nothing."""

    async def close(self) -> None: ...

    def listen(
        self, logs: Callable[[Sequence[LogState]], None], meta: Callable[[int], None], lost: Callable[[], None]
    ) -> None:
        """Whom to tell of changes: states of logs, the revision of the metadata, that some news may be missing."""

    def room(self) -> tuple[int, int]: ...

    # -- logs

    async def open_logs(self, topic_id: str, partitions: int) -> list[LogState]:
        """The first so many partitions of a topic, made where they are missing."""

    async def states(self, log_ids: Sequence[int]) -> list[LogState]: ...

    def append(self, appends: Sequence[Append], now_ms: int) -> Promise[Landed]:
        """One transaction. Fails as a whole with `Torn`, and with what a database fails with."""

    async def read(self, log_id: int, offset: int, below: int, bytes_max: int) -> tuple[bytes, int]:
        """Whole batches from the one that reaches `offset`, all under `below`, at least one if there is one; and the
        offset behind them.
        """

    async def rows(self, log_id: int, offset: int, count_max: int) -> list[Row]:
        """The first batches that reach an offset."""

    async def first_at(self, log_id: int, timestamp: int, offset: int, below: int) -> bytes | None:
        """The first batch that reaches `offset` and a time, under `below`, or none."""

    async def newest_time(self, log_id: int, offset: int, below: int) -> int:
        """The largest timestamp of the batches between `offset` and `below`; -1 without any."""

    async def trim(self, log_id: int, offset: int) -> LogState:
        """Moves the start, and removes the batches below it in steps of a bounded size."""

    async def truncate(self, log_id: int, offset: int) -> LogState: ...

    async def producers(self, log_id: int) -> Producers: ...

    async def forget_producers(self, before_ms: int, per_log_max: int) -> None: ...

    async def discard(self, topic_id: str) -> None:
        """Removes all logs of a topic, in steps of a bounded size."""

    async def topic_ids(self) -> set[str]:
        """Of all logs that there are."""

    # -- metadata

    async def revision(self) -> int: ...

    async def get(self, key: str) -> Versioned | None: ...

    async def list_keys(self, prefix: str) -> list[tuple[str, Versioned]]: ...

    async def transact(
        self, transactions: Sequence[Sequence[Operation]], since: int, prefixes: Sequence[str]
    ) -> tuple[list[int | RevisionConflict], Changes]:
        """One after the other, each all or nothing; then the changes as `changes` tells them."""

    async def changes(self, since: int, prefixes: Sequence[str]) -> Changes:
        """What is under some prefixes and newer than a revision."""

    async def forget_deleted(self, keep: int) -> None:
        """Forgets which keys were deleted, but for the last so many revisions."""
