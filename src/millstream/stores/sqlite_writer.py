"""The connection that writes to an SQLite file: transactions of the one thread that has it.

It caches logs and producers between transactions, and drops the cache when another connection has written or a
transaction has failed.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from millstream.core.errors import Code, RequestError, RevisionConflict
from millstream.log.producers import Producers
from millstream.records.batch import NO_PRODUCER, BatchHeader, patch_offset
from millstream.stores import queries
from millstream.stores.base import Check, Operation, Put, Versioned
from millstream.stores.database import Append, Changes, Landed, LogState, Stored, check_bundles
from millstream.stores.sqlite_file import PAGE_BYTES

STEP_ROWS = 500
"""Limit of batches that one transaction deletes."""
CHAPTER_ROWS = 1024
"""Batches per chapter, over all logs. A few pages of the index hold them. Each log should have several in a chapter,
since a row in `chapters` costs as much as the index by log would.
"""
TRANSACTION_BYTES = 32 << 10
"""Bytes that a transaction writes beside its rows."""
OFFSET_MAX = (1 << 63) - 1
_SQL = queries.named("sqlite_queries.sql")


class SqliteWriter:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection
        self._data_version = -1
        self._states: dict[int, LogState | None] = {}
        self._producers: dict[int, Producers] = {}
        self._chapters: dict[int, int | None] = {}
        """The last per log."""
        self._last_arrival: int | None = None
        self.written = 0
        """Bytes written to the WAL, roughly: a page for a row without neighbours in its transaction."""
        self._neighbours = self._neighbour_bytes = 0
        """Rows of a transaction on neighbouring pages, and their bytes."""

    @contextmanager
    def transaction(self) -> Iterator[None]:
        self.connection.execute("BEGIN IMMEDIATE")
        changes = self.connection.total_changes
        self._neighbours = self._neighbour_bytes = 0
        try:
            (data_version,) = self.connection.execute("PRAGMA data_version").fetchone()
            if data_version != self._data_version:  # another connection has written
                self._forget()
                self._data_version = data_version
            yield
            self.connection.execute("COMMIT")
        except BaseException:
            self._forget()
            self._data_version = -1
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")
            raise
        finally:
            if changes := self.connection.total_changes - changes:
                self.written += TRANSACTION_BYTES + self._neighbour_bytes + (changes - self._neighbours) * PAGE_BYTES

    def _forget(self) -> None:
        self._states.clear()
        self._producers.clear()
        self._chapters.clear()
        self._last_arrival = None

    def _state(self, log_id: int) -> LogState | None:
        if log_id not in self._states:
            row = self.connection.execute(_SQL["log"], (log_id,)).fetchone()
            self._states[log_id] = None if row is None else LogState(*row)
        return self._states[log_id]

    def _update(self, state: LogState) -> LogState:
        changed = state._replace(version=state.version + 1)
        self._store([changed])
        return changed

    def _store(self, states: Sequence[LogState]) -> None:
        rows = [(version, start, end, size, log_id) for log_id, version, start, end, size in states]
        self.connection.executemany(_SQL["update_log"], rows)
        for state in states:
            self._states[state.id] = state

    def append(self, appends: Sequence[Append], now_ms: int) -> Landed:
        outcomes: list[Stored | RequestError] = []
        rows: list[tuple[int, int, int, int, int, int, int, bytearray]] = []
        begun: list[tuple[int, int, int]] = []
        arrival = self._arrival()
        grown: dict[int, tuple[int, int]] = {}
        """The new end and size of each log."""
        producers: dict[tuple[int, int], None] = {}
        for log_id, batches, headers, epoch, _ in appends:
            state = self._states.get(log_id) or self._state(log_id)
            if state is None:
                outcomes.append(RequestError(Code.UNKNOWN_TOPIC_OR_PARTITION, "the topic was deleted"))
                continue
            if headers[0].producer_id != NO_PRODUCER:
                try:
                    repeated = self._find_repeat(log_id, headers[0])
                except RequestError as error:
                    outcomes.append(error)
                    continue
                if repeated is not None:
                    outcomes.append(Stored(repeated, True))
                    continue
            end, size = grown.get(log_id) or (state.end, state.size_bytes)
            outcomes.append(Stored(end, False))
            for batch, header in zip(batches, headers, strict=True):
                patch_offset(batch, end, header.length, epoch)
                last = end + header.last_offset_delta
                arrival += 1
                chapter = arrival // CHAPTER_ROWS + 1
                if chapter != self._chapters.get(log_id) and chapter != self._last_chapter(log_id):
                    begun.append((log_id, end, chapter))
                    self._chapters[log_id] = chapter
                rows.append((arrival, chapter, log_id, last, end, header.max_timestamp, len(batch), batch))
                if header.producer_id != NO_PRODUCER:
                    self._producers[log_id].note(header, end, now_ms)
                    producers[log_id, header.producer_id] = None
                end, size = last + 1, size + len(batch)
            grown[log_id] = end, size
        check_bundles(appends, outcomes)
        if not grown:
            return outcomes, []
        self.connection.executemany(_SQL["insert_batch"], rows)
        if begun:
            self.connection.executemany(_SQL["begin_chapter"], begun)
        self._last_arrival = arrival
        for log_id, producer_id in producers:
            known = self._producers[log_id].by_id[producer_id]
            self.connection.execute(
                _SQL["put_producer"], (log_id, producer_id, known.epoch, known.seen_ms, json.dumps(known.batches))
            )
        changed = []
        for log_id, (end, size) in grown.items():
            before = self._require(log_id)
            changed.append(LogState(log_id, before.version + 1, before.start, end, size))
        self._store(changed)
        self._neighbours = len(rows) + len(changed)
        self._neighbour_bytes = sum([row[6] for row in rows])
        return outcomes, changed

    def touch(self) -> None:
        """Makes a dummy change."""
        self.connection.execute(_SQL["touch"])

    def _arrival(self) -> int:
        if self._last_arrival is None:
            (self._last_arrival,) = self.connection.execute(_SQL["last_arrival"]).fetchone()
        return self._last_arrival

    def _last_chapter(self, log_id: int) -> int | None:
        if log_id not in self._chapters:
            row = self.connection.execute(_SQL["last_chapter"], (log_id,)).fetchone()
            self._chapters[log_id] = None if row is None else row[0]
        return self._chapters[log_id]

    def _find_repeat(self, log_id: int, header: BatchHeader) -> int | None:
        if log_id not in self._producers:
            self._producers[log_id] = load_producers(self.connection, log_id)
        return self._producers[log_id].find_repeat(header)

    def trim(self, log_id: int, offset: int) -> LogState:
        state = self._require(log_id)
        if offset <= state.start:
            return state
        return self._update(state._replace(start=min(offset, state.end)))

    def remove_below_start(self, log_id: int) -> bool:
        return self.remove(log_id, self._require(log_id).start)

    def remove(self, log_id: int, offset: int) -> bool:
        """Deletes some batches below an offset; whether more may remain."""
        below = {"log": log_id, "offset": offset, "count": STEP_ROWS}
        rows = self.connection.execute(_SQL["rows_below"], below).fetchall()
        if not rows:
            return False
        last_offset = rows[-1][0]
        self.connection.execute(_SQL["delete_up_to"], {"log": log_id, "offset": last_offset})
        self._end_chapters(log_id, last_offset)
        state = self._state(log_id)
        if state is not None:
            self._update(state._replace(size_bytes=state.size_bytes - sum(size for _, size in rows)))
        return len(rows) == STEP_ROWS

    def truncate(self, log_id: int, offset: int) -> LogState:
        state = self._require(log_id)
        if offset >= state.end:
            return state
        tail = {"log": log_id, "offset": offset}
        otherwise = {"otherwise": max(offset, state.start)}
        end, size = self.connection.execute(_SQL["tail"], tail | otherwise).fetchone()
        self.connection.execute(_SQL["delete_tail"], tail)
        self._end_chapters(log_id, OFFSET_MAX)
        producers = load_producers(self.connection, log_id)
        producers.forget_from(end)
        self.connection.execute(_SQL["delete_producers"], (log_id,))
        self.connection.executemany(
            _SQL["put_producer"],
            [(log_id, known, each.epoch, each.seen_ms, json.dumps(each.batches))
             for known, each in producers.by_id.items()],
        )  # fmt: skip
        self._producers.pop(log_id, None)
        start = min(state.start, end)
        return self._update(state._replace(start=start, end=end, size_bytes=state.size_bytes - size))

    def _end_chapters(self, log_id: int, last_offset: int) -> None:
        """Deletes chapters that begin up to there without a batch of the log."""
        self.connection.execute(_SQL["end_chapters"], (log_id, last_offset))
        self._chapters.pop(log_id, None)

    def _require(self, log_id: int) -> LogState:
        state = self._state(log_id)
        if state is None:
            raise RequestError(Code.UNKNOWN_TOPIC_OR_PARTITION, "the topic was deleted")
        return state

    def close_log(self, log_id: int) -> None:
        """Refuses further appends; the batches are deleted in steps later."""
        self.connection.execute(_SQL["close_log"], (log_id,))
        self.connection.execute(_SQL["delete_producers"], (log_id,))
        self._states.pop(log_id, None)
        self._producers.pop(log_id, None)

    def delete_log(self, log_id: int) -> None:
        self.connection.execute(_SQL["delete_log"], (log_id,))

    def forget_producers(self, before_ms: int, per_log_max: int) -> None:
        self.connection.execute(_SQL["forget_idle_producers"], (before_ms,))
        for log_id, surplus in self.connection.execute(_SQL["crowded_logs"], (per_log_max, per_log_max)).fetchall():
            self.connection.execute(_SQL["forget_oldest_producers"], (log_id, surplus))
        self._producers.clear()

    def transact(self, transactions: Sequence[Sequence[Operation]]) -> list[int | RevisionConflict]:
        (revision, _) = self.connection.execute(_SQL["revision"]).fetchone()
        before = revision
        answers: list[int | RevisionConflict] = []
        for operations in transactions:
            conflict = self._conflict(operations)
            if conflict is not None:
                answers.append(conflict)
                continue
            revision += 1
            answers.append(revision)
            for operation in operations:
                if isinstance(operation, Put):
                    self.connection.execute(_SQL["put"], (operation.key, operation.value, revision))
                elif not isinstance(operation, Check):
                    self.connection.execute(_SQL["delete"], (revision, operation.key))
        if revision != before:
            self.connection.execute(_SQL["set_revision"], (revision,))
        return answers

    def _conflict(self, operations: Sequence[Operation]) -> RevisionConflict | None:
        for operation in operations:
            if operation.if_revision is not None:
                row = self.connection.execute(_SQL["get"], (operation.key,)).fetchone()
                found = 0 if row is None else row[1]
                if found != operation.if_revision:
                    return RevisionConflict(operation.key, operation.if_revision, found)
        return None


def load_producers(connection: sqlite3.Connection, log_id: int) -> Producers:
    rows = connection.execute(_SQL["producers"], (log_id,))
    return Producers.from_state([[known, epoch, seen, json.loads(batches)] for known, epoch, seen, batches in rows])


def changes(connection: sqlite3.Connection, since: int, prefixes: Sequence[str]) -> Changes:
    revision, floor = connection.execute(_SQL["revision"]).fetchone()
    if not prefixes or since >= revision:
        return Changes(revision, True, [])
    wanted = tuple(prefixes)
    rows = connection.execute(_SQL["changes"], (since,))
    items = [
        (key, None if value is None else Versioned(value, at), at) for key, value, at in rows if key.startswith(wanted)
    ]
    return Changes(revision, since >= floor, items)
