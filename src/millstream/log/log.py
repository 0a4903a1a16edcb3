"""One partition on disk: its segments, and how they grow.

    start         high_watermark   counted        end
      |---- readers ----|-- replicas --|-- unsynced --|

Rules
-----
1. `append` writes to the page cache and returns. With `flush=always` the promise settles, and `counted` moves, when a
   sync that began after the write has ended; appends share syncs (see `flusher.py`). Otherwise both happen at once.
   `counted` is the end of the records that this copy counts as stored.
2. Readers see nothing at or above `high_watermark`. With one copy it equals `counted`. In a replicated log the leader
   moves it (`replica.py`), never above `counted`.
3. A sync error is final: the log goes read-only, every waiting append fails, durable records stay readable. The log
   does not retry: after a failed sync the operating system may report success without having written anything.
4. A failed append (a full disk, or any other error) fails its request: the log truncates the file to its old size, or
   goes read-only.
5. Older segments are synced before the newer one, so that durable bytes have no hole below them.

Reading is in `readable.py`, copies on other brokers in `replica.py`, recovery in `recovery.py`, retention and
compaction in `retention.py` and `compaction.py`.
"""

from __future__ import annotations

import errno
import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from millstream.core.callbacks import tell
from millstream.core.clock import Clock
from millstream.core.disk import Disk, OpenFile
from millstream.core.errors import Code, LogReadOnly, RequestError
from millstream.core.logs import Damped
from millstream.core.promise import Promise
from millstream.log.answers import Appended
from millstream.log.checkpoint import Checkpoint
from millstream.log.config import LogConfig
from millstream.log.epochs import Epochs
from millstream.log.flusher import Flusher
from millstream.log.producers import Producers
from millstream.log.readable import ReadableLog
from millstream.log.segment import RELATIVE_OFFSET_MAX, BrokenSegment, Segment
from millstream.records.batch import NO_PRODUCER, BatchHeader, patch_offset
from millstream.records.run import BatchRun

logger = logging.getLogger(__name__)
refusals = Damped(__name__)

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
"""Not a disk error: an open succeeds again once a client disconnects."""
SYNC_AGAIN_SECONDS = 0.1
LAST_SYNCS_MAX = 50
"""Retries of the last sync while the log closes: the shutdown waits for them."""
CHECKPOINT_BYTES = 64 << 20
"""Bytes appended between two checkpoints: a bound on the bytes that recovery scans."""


def _nothing() -> None: ...


class Lost(NamedTuple):
    """A closed segment that recovery found missing or too short."""

    size: int
    """Its size in the checkpoint."""
    behind: int
    """The offset where reading resumes."""


class Log(ReadableLog):
    """A log on files. `replica.ReplicaLog` completes it."""

    __slots__ = (
        "_checkpoint_due",
        "_directory_dirty",
        "_disk",
        "_flush_timer",
        "_flusher",
        "_sync_target",
        "_synced",
        "_syncs_left",
        "_unsynced_batches",
        "_unsynced_segments",
        "_waiting",
        "_wakers",
        "checkpointed_to",
        "clock",
        "closed",
        "compacted_to",
        "config",
        "counted",
        "directory",
        "epochs",
        "failure",
        "is_abandoned",
        "is_replicated",
        "leader_epoch",
        "lost",
        "on_growth",
        "producers",
        "rewritten",
        "unsynced_bytes",
    )

    def __init__(
        self, name: str, directory: str, config: LogConfig, disk: Disk, clock: Clock, flusher: Flusher
    ) -> None:
        super().__init__(name)
        self.directory = directory
        self.config = config
        self._disk = disk
        self.clock = clock
        self._flusher = flusher
        self.producers = Producers()
        self.epochs = Epochs()
        self.leader_epoch = 0
        """The epoch of new appends."""
        self.counted = 0
        self.is_replicated = False
        """Whether other brokers hold copies: then only the leader raises the high watermark (`replica.py`)."""
        self.on_growth: Callable[[], None] = _nothing
        """Called when `end` or `counted` of a replicated log has grown."""
        self.failure: str | None = None
        self.closed = False
        self.is_abandoned = False
        """Whether its topic is deleted."""
        self.compacted_to = 0
        """Compaction has nothing to do below this offset; not kept over a restart."""
        self.checkpointed_to = -1
        """Base offset of the segment that the checkpoint on disk names: recovery starts there."""
        self.lost: dict[int, Lost] = {}
        """By base offset. Checkpoints still list them, so that the next start finds the hole, or the restored file."""
        self.rewritten: set[int] = set()
        """Base offsets of closed segments that compaction replaces now: checkpoints omit them."""
        self.unsynced_bytes = 0
        self._unsynced_batches = 0
        self._unsynced_segments: list[Segment] = []
        self._directory_dirty = False
        self._synced: tuple[int, int, int] = (0, 0, 0)
        """Offset, segment and position up to which all is synced: the recovery point of the next checkpoint."""
        self._sync_target: tuple[int, tuple[int, int], int, int] | None = None
        self._syncs_left: int | None = None
        self._waiting: deque[tuple[int, Promise[Appended], Appended]] = deque()
        self._wakers: dict[Callable[[], None], None] | None = None
        self._checkpoint_due = 0
        self._flush_timer = False

    # -- appending ---------------------------------------------------------------------------------------------------

    def append(self, batch: memoryview, header: BatchHeader) -> Promise[Appended]:
        if self.failure is not None or self.closed:
            return Promise.failed(self._refusal())
        if header.producer_id != NO_PRODUCER:
            try:
                repeated = self.producers.find_repeat(header)
            except RequestError as error:
                return Promise.failed(error)
            if repeated is not None:
                return self._when_counted(repeated + header.last_offset_delta + 1, Appended(repeated, self.start, True))
        base = self.end
        size = len(batch)
        patch_offset(batch, base, header.length, self.leader_epoch)
        config = self.config
        try:
            segment = self._segment_for(size, config)
            segment.append(batch, header, base, config.index_interval_bytes)
        except Exception as error:
            return Promise.failed(self._undo_write(error))
        if header.producer_id != NO_PRODUCER:
            self.producers.note(header, base, self.clock.now_ms())
        return self._appended(segment, base + header.last_offset_delta + 1, size, 1)

    def append_run(self, run: BatchRun) -> Promise[Appended]:
        if self.failure is not None or self.closed:
            return Promise.failed(self._refusal())
        base = self.end
        size = len(run.data)
        run.place(base, self.leader_epoch)
        config = self.config
        before = None
        try:
            segment = self._segment_for(size, config)
            before = segment.size
            segment.append_run(run, base, config.index_interval_bytes)
        except Exception as error:
            return Promise.failed(self._undo_write(error, before))
        return self._appended(segment, base + run.offsets, size, run.count)

    def _refusal(self) -> RequestError:
        if self.failure is not None:
            return LogReadOnly(self.name, self.failure)
        return RequestError(Code.UNKNOWN_TOPIC_OR_PARTITION, f"{self.name} is closed")

    def _appended(
        self, segment: Segment, end: int, size: int, count: int, base: int | None = None
    ) -> Promise[Appended]:
        """Updates the counters after a write to the active segment; returns the promise of the result."""
        answer = Appended(self.end if base is None else base, self.start)
        self.end = end
        self.unsynced_bytes += size
        self._unsynced_batches += count
        flush = self.config.flush
        if flush.batches == 1:
            self._flusher.request(self)
            if self.is_replicated:
                self.on_growth()
            return self._when_counted(end, answer)
        self.counted = end
        if self.is_replicated:
            self.on_growth()
        else:  # `_count`, inlined
            self.high_watermark = end
            self._read_mark = (segment.base_offset, segment.size)
        if self._wakers:
            self._wake_readers()
        if (flush.batches is not None and self._unsynced_batches >= flush.batches) or (
            flush.records is not None and end - self._synced[0] >= flush.records
        ):
            self._flusher.request(self)
        elif flush.ms is not None and not self._flush_timer:
            self._flush_timer = True
            self.clock.call_later(flush.ms / 1000, self._flush_by_time)
        return Promise.of(answer)

    def _when_counted(self, offset: int, answer: Appended) -> Promise[Appended]:
        if offset <= self.counted:
            return Promise.of(answer)
        promise: Promise[Appended] = Promise()
        self._waiting.append((offset, promise, answer))
        return promise

    def _segment_for(self, size: int, config: LogConfig, base: int | None = None) -> Segment:
        """The segment for bytes at the offset `base`, by default the end."""
        if self.segments:
            active = self.segments[-1]
            fits = active.size + size <= config.segment_bytes
            relative = (self.end if base is None else base) - active.base_offset
            if (fits and relative < RELATIVE_OFFSET_MAX) or active.size == 0:
                return active
        return self.roll()

    def roll(self) -> Segment:
        """Starts a new segment at `end`."""
        if not self.segments:
            self._disk.make_directory(self.directory)
            # A killed process may have made them without this sync.
            self._disk.sync_directory(os.path.dirname(self.directory))
            self._disk.sync_directory(os.path.dirname(os.path.dirname(self.directory)))
        elif self.checkpointed_to < 0:
            # A log of more than one segment always has a checkpoint: with it recovery tells a hole that a crash left
            # between two segments from a gap that compaction left.
            self.write_checkpoint()
        segment = Segment(self._disk, self.directory, self.end, 0)
        segment.create()
        self._directory_dirty = True
        if self.segments:
            self._unsynced_segments.append(self.segments[-1])
        self.segments.append(segment)
        if len(self.segments) == 1:
            self._read_mark = (segment.base_offset, 0)
            self._synced = (self.end, segment.base_offset, 0)
            self._checkpoint_due = CHECKPOINT_BYTES
        return segment

    def _undo_write(self, error: Exception, before: int | None = None) -> RequestError:
        """Truncates the file after a failed write, so that the next batch does not follow a partial or unindexed one.
        `before` is the segment's size before a run: a part of the run may be indexed.
        """
        if isinstance(error, OSError) and error.errno == errno.EIO:
            return self.fail(error)
        try:
            if self.segments and self.segments[-1].is_open:  # else nothing was written
                active = self.segments[-1]
                if before is not None and active.size > before:
                    active.cut(before)
                self._disk.truncate(active.file, active.size)
        except OSError:
            return self.fail(error)
        if isinstance(error, OSError):
            refusals.error("cannot append to %s: %s", self.name, error)
        elif isinstance(error, BrokenSegment):
            self.note_broken(error)
        else:
            logger.error("unexpected error while appending to %s", self.name, exc_info=error)
        return RequestError(Code.KAFKA_STORAGE_ERROR, f"cannot append to {self.name}: {error}")

    # -- flushing ----------------------------------------------------------------------------------------------------

    def flush(self) -> Promise[None]:
        if self.failure is not None:
            return Promise.failed(LogReadOnly(self.name, self.failure))
        done: Promise[None] = Promise()
        if not self.unsynced_bytes:
            done.settle(None)
            return done
        if self.closed:
            return Promise.failed(RequestError(Code.UNKNOWN_TOPIC_OR_PARTITION, f"{self.name} is closed"))
        synced: Promise[Appended] = Promise()
        synced.then(lambda promise: done.fail(promise.error) if promise.error else done.settle(None))
        # The sync settles it, even if readers see the bytes already (flush=os): so it waits with its own offset.
        self._waiting.append((self.end, synced, Appended(self.end, self.start)))
        self._flusher.request(self)
        return done

    def _flush_by_time(self) -> None:
        self._flush_timer = False
        if self.unsynced_bytes and self.failure is None and not self.closed:
            self._flusher.request(self)

    def begin_sync(self) -> Callable[[], None] | None:
        if self.failure is not None or not self.segments or not self.unsynced_bytes or self.closed:
            return None
        active = self.segments[-1]
        try:
            # Open the files now: a segment that is dropped before the thread runs must not fail the sync.
            files = [segment.file for segment in (*self._unsynced_segments, active)]
        except OSError as error:
            if error.errno in NO_DESCRIPTORS:
                self._sync_again(error)
            else:
                self.fail(error)
            return None
        self._sync_target = (
            self.end,
            (active.base_offset, active.size),
            self.unsynced_bytes,
            self._unsynced_batches,
        )
        self._unsynced_segments = []
        directory = self.directory if self._directory_dirty else None
        self._directory_dirty = False
        return lambda: self._sync(files, directory)

    def _sync(self, files: list[OpenFile], directory: str | None) -> None:
        """Runs in a thread: touches only the given files, oldest first."""
        for file in files:
            self._disk.sync(file)
        if directory is not None:
            self._disk.sync_directory(directory)

    def end_sync(self, error: OSError | None, go_on: Callable[[], None] = lambda: None) -> None:
        assert self._sync_target is not None
        end, mark, synced_bytes, synced_batches = self._sync_target
        self._sync_target = None
        if self.is_abandoned:  # the sync raced with the deletion: ignore its failure, no client waits
            return
        if error is not None:
            if error.errno in NO_DESCRIPTORS:  # only the directory failed: the open files are synced
                self._directory_dirty = True
                self._sync_again(error)
            else:
                self.fail(error)
            return
        self.unsynced_bytes -= synced_bytes
        self._unsynced_batches -= synced_batches
        self._checkpoint_due -= synced_bytes
        self._synced = (end, *mark)
        waiting = self._waiting
        ready = []
        while waiting and waiting[0][0] <= end:
            ready.append(waiting.popleft())
        go_on()
        if end > self.counted:
            self._count(end, mark)
        for _, promise, answer in ready:
            promise.settle(answer)

    def prepare_to_close(self) -> None:
        self._syncs_left = LAST_SYNCS_MAX

    def _sync_again(self, error: OSError) -> None:
        if self._syncs_left is not None:
            self._syncs_left -= 1
            if self._syncs_left < 0:
                self.fail(error)
                return
        refusals.error("cannot sync %s; retrying: %s", self.name, error)
        self.clock.call_later(SYNC_AGAIN_SECONDS, self._flush_by_time)

    def _count(self, end: int, mark: tuple[int, int]) -> None:
        self.counted = end
        if self.is_replicated:
            self.on_growth()
        else:
            self.high_watermark = end
            self._read_mark = mark
        if self._wakers:
            self._wake_readers()

    def _wake_readers(self) -> None:
        for waker in list(self._wakers or ()):
            tell(waker)

    def fail(self, error: Exception) -> RequestError:
        """Rule 3: makes the log read-only."""
        self.failure = str(error)
        refusal = LogReadOnly(self.name, self.failure)
        logger.critical("%s is read-only until the broker restarts: %s", self.name, error)
        waiting, self._waiting = self._waiting, deque()
        for _, promise, _ in waiting:
            promise.fail(refusal)
        self._wake_readers()
        return refusal

    # -- shrinking ---------------------------------------------------------------------------------------------------

    def trim(self, offset: int) -> Promise[int]:
        if offset > self.high_watermark or offset < 0:
            detail = f"{self.name} ends at {self.high_watermark}; it cannot be trimmed to {offset}"
            return Promise.failed(RequestError(Code.OFFSET_OUT_OF_RANGE, detail))
        if offset > self.start:
            before, self.start = self.start, offset
            try:
                self._checkpoint_to_drop(offset)
            except OSError as error:
                self.start = before
                detail = f"{self.name} cannot be trimmed to {offset}: {error}"
                return Promise.failed(RequestError(Code.KAFKA_STORAGE_ERROR, detail))
            self.drop_segments_below(offset)
        return Promise.of(self.start)

    def drop_segments_below(self, offset: int) -> None:
        """Removes whole segments below an offset; the last segment always stays."""
        dropped = False
        while len(self.segments) > 1 and self.segments[1].base_offset <= offset:
            segment = self.segments.pop(0)
            if segment in self._unsynced_segments:
                self._unsynced_segments.remove(segment)
            self.remove_files(segment)
            dropped = True
        if dropped:
            self.forget_cursors()
            self._directory_dirty = True
        self.damage.forget(self.start, self.end)

    def drop_from_front(self, offset: int) -> int:
        """Retention's `trim`: whole segments only; returns the bytes removed."""
        before = self.size_bytes()
        # The checkpoint comes first. It makes the remaining segment's name durable, and the name is the end of an
        # emptied log. Its start keeps removed segments from coming back. It keeps producers without batches.
        self.start = max(self.start, offset)
        self._checkpoint_to_drop(offset)
        self.drop_segments_below(offset)
        return before - self.size_bytes()

    def _checkpoint_to_drop(self, offset: int) -> None:
        """Writes the checkpoint that precedes a removal. On a full disk it first frees the reserve and the indexes of
        the doomed segments: else a full disk could never be emptied.
        """
        try:
            self.write_checkpoint()
        except OSError as error:
            doomed = [segment for segment, after in pairwise(self.segments) if after.base_offset <= offset]
            if error.errno not in NO_ROOM or not (self._remove_indexes(doomed) | self._disk.make_room()):
                raise
            self.write_checkpoint()

    def roll_to_drop(self) -> None:
        """Starts the only remaining segment; frees room on a full disk as `_checkpoint_to_drop` does."""
        try:
            self.roll()
        except OSError as error:
            if error.errno not in NO_ROOM or not (self._remove_indexes(self.segments) | self._disk.make_room()):
                raise
            self.roll()

    def _remove_indexes(self, doomed: Sequence[Segment]) -> bool:
        """Returns whether there were any. A segment that stays after all gets its index rebuilt."""
        indexed = [segment for segment in doomed if os.path.exists(segment.index.path)]
        for segment in indexed:
            segment.let_go()
            self._disk.remove(segment.index.path)
            reopened = Segment(self._disk, self.directory, segment.base_offset, segment.size)
            reopened.bad = segment.bad
            self.segments[self.segments.index(segment)] = reopened
            if segment in self._unsynced_segments:
                self._unsynced_segments[self._unsynced_segments.index(segment)] = reopened
        self.forget_cursors()
        return bool(indexed)

    def remove_files(self, segment: Segment) -> None:
        segment.let_go()
        for path in (segment.path, segment.index.path):
            try:
                self._disk.remove(path)
            except FileNotFoundError:
                continue

    # -- bookkeeping -------------------------------------------------------------------------------------------------

    def wake(self, callback: Callable[[], None]) -> Callable[[], None]:
        if self._wakers is None:
            self._wakers = {}
        wakers = self._wakers
        wakers[callback] = None
        return lambda: wakers.pop(callback, None)

    def size_bytes(self) -> int:
        return sum(segment.size for segment in self.segments)

    def refresh(self) -> Promise[None]:
        return Promise.of(None)

    def known_producers(self) -> Promise[Producers]:
        return Promise.of(self.producers)

    def keep_checkpoint(self) -> None:
        """Writes a checkpoint if one is due, or requests the sync that it needs. Runs periodically."""
        if self.failure is not None or self.closed:
            return
        if self._checkpoint_due < 0:
            self.write_checkpoint()
        elif self.unsynced_bytes > CHECKPOINT_BYTES:
            self._flusher.request(self)

    def checkpoint_reaches(self, segment: Segment) -> bool:
        return self.checkpointed_to > segment.base_offset

    def write_checkpoint(self) -> None:
        """Makes the synced end the recovery point. It never covers appends in flight."""
        if not self.segments:
            return
        offset, base, position = self._synced
        self.epochs.cut_below(self.start)
        epochs = self.epochs.to_state()  # recovery repeats epochs that begin after the offset
        checkpoint = Checkpoint(
            self.start, base, position, offset, self._producers_at(offset), self._closed_below(base), epochs
        )
        try:
            for segment in self.segments:
                segment.index.sync()
            checkpoint.write(self._disk, self.directory)
        except OSError as error:
            if error.errno == errno.EIO:
                self.fail(error)
            raise
        self.checkpointed_to = base
        self._checkpoint_due = CHECKPOINT_BYTES

    def _closed_below(self, base: int) -> list[list[int]]:
        """Base offset and size of each closed segment, missing ones included."""
        sizes = {
            segment.base_offset: segment.size
            for segment in self.segments
            if segment.base_offset < base and segment.base_offset not in self.rewritten
        }
        sizes |= {at: lost.size for at, lost in self.lost.items() if at < base and self.start < lost.behind}
        return [[at, sizes[at]] for at in sorted(sizes)]

    def _producers_at(self, offset: int) -> list[list[object]]:
        if offset == self.end:
            return self.producers.to_state()
        settled = Producers.from_state(self.producers.to_state())
        settled.forget_from(offset)
        return settled.to_state()

    def restore(self, start: int, end: int, producers: Producers) -> None:
        """Takes the result of recovery: all bytes in the segments are sound and synced."""
        self.start, self.end = start, end
        self.counted = self.high_watermark = end
        self.producers = producers
        if self.segments:
            self._read_mark = (self.segments[-1].base_offset, self.segments[-1].size)
            self.segments[-1].resume_index()
        self._synced = (end, *self._read_mark)
        self._checkpoint_due = CHECKPOINT_BYTES
        self._directory_dirty = True  # a killed process may not have synced the last segment's name

    def close(self) -> None:
        """A clean shutdown: syncs and writes a checkpoint, so that the next start scans nothing."""
        if self.closed:
            return
        if self.failure is None and self.segments:
            try:
                self._sync([segment.file for segment in [*self._unsynced_segments, self.segments[-1]]], self.directory)
                mark = (self.segments[-1].base_offset, self.segments[-1].size)
                self._count(self.end, mark)
                self._synced = (self.end, *mark)
                self.unsynced_bytes = self._unsynced_batches = 0
                self.write_checkpoint()
            except OSError as error:
                self.fail(error)
        self.closed = True
        for segment in self.segments:
            segment.let_go()

    def abandon(self) -> None:
        """The topic is deleted: fails all waiting appends, and writes nothing more."""
        self.closed = self.is_abandoned = True
        waiting, self._waiting = self._waiting, deque()
        for _, promise, _ in waiting:
            promise.fail(RequestError(Code.UNKNOWN_TOPIC_OR_PARTITION, f"{self.name} was deleted"))
        self._wake_readers()
        self.let_go_of_idle_segments()
        if self.segments:
            self.segments[-1].let_go()

    def let_go_of_idle_segments(self) -> None:
        """Closes the descriptors of all but the last segment; the next read opens them again."""
        for segment in self.segments[:-1]:
            segment.let_go()
