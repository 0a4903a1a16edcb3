"""A log that has copies on other brokers: what a leader and its followers do beside appending.

    start         high_watermark   counted        end
      |---- readers ----|-- replicas --|-- unsynced --|

Rules
-----
1. A leader's log assigns offsets (`append`), a follower's log keeps them (`follow`). A repeated batch is stored once. A
   different batch at an existing offset is a divergence, and is refused: `truncate` comes first.
2. Replicas read to the end (`read_to_end`), readers to the high watermark. The leader raises it, and a follower takes
   it over, never above what this copy has counted.
3. A copy that ends before the leader's start holds nothing that the leader still has: `restart_at` empties it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from millstream.core.errors import Code, Diverged, RequestError
from millstream.core.promise import Promise
from millstream.log.answers import Appended
from millstream.log.log import Log
from millstream.log.segment import RELATIVE_OFFSET_MAX, BrokenSegment, Unindexed
from millstream.log.slice import Slice
from millstream.records.batch import BatchHeader


class ReplicaLog(Log):
    """Implements `stores.base.PartitionLog` on files, for a store that can follow."""

    __slots__ = ()

    # -- copying -----------------------------------------------------------------------------------------------------

    def lead(self, epoch: int) -> None:
        """Sets the leader epoch of new appends."""
        self.epochs.begin(epoch, self.end)
        self.leader_epoch = epoch

    def join_replicas(self, on_growth: Callable[[], None]) -> None:
        """Other brokers hold copies from now on: the leader decides what readers see.

        `on_growth` is called when `end` or `counted` has grown.
        """
        self.on_growth = on_growth
        if not self.is_replicated:
            self.is_replicated = True
            # What other copies hold is not known. The leader finds out (KIP-207).
            self.high_watermark = self.start
            self._read_mark = (self.segments[0].base_offset, 0) if self.segments else (0, 0)
            self.raise_high_watermark(self.start)

    def follow(self, batch: memoryview, header: BatchHeader) -> Promise[Appended]:
        if self.failure is not None or self.closed:
            return Promise.failed(self._refusal())
        base = header.base_offset
        if base < self.end:
            if not (self.start == self.end < header.next_offset and self.size_bytes() == 0):
                return self._follow_again(header)
            # The first batch after `restart_at`: the leader's log starts within it.
            start = self.start
            try:
                self._restart_at(base)
            except OSError as error:
                return Promise.failed(self.fail(error))
            self.start = start
        if header.leader_epoch < self.epochs.latest:
            detail = f"{self.name} has epoch {self.epochs.latest}; a batch of epoch {header.leader_epoch} cannot follow"
            return Promise.failed(Diverged(detail))
        if base - self.end >= RELATIVE_OFFSET_MAX:
            detail = f"{self.name} ends at {self.end} and cannot continue at {base}: copy the partition from its start"
            return Promise.failed(Diverged(detail))
        config = self.config
        try:
            segment = self._segment_for(len(batch), config, base)
            segment.append(batch, header, base, config.index_interval_bytes)
        except Exception as error:
            return Promise.failed(self._undo_write(error))
        self.epochs.begin(header.leader_epoch, base)
        self.producers.note(header, base, self.clock.now_ms())
        return self._appended(segment, header.next_offset, len(batch), 1, base)

    def _follow_again(self, header: BatchHeader) -> Promise[Appended]:
        """Answers a batch below the end: a repeat if the log holds the same batch."""
        base = header.base_offset
        if base >= self.start:
            segment = self.segments[max(self._segment_index(base), 0)]
            found = segment.locate(base, segment.size)
            if found is not None and found[1][:5] == header[:5]:  # offset, length, epoch, magic, CRC
                return self._when_counted(header.next_offset, Appended(base, self.start, True))
        return Promise.failed(
            Diverged(f"{self.name} has another batch at offset {base} than the leader (epoch {header.leader_epoch})")
        )

    def raise_high_watermark(self, offset: int) -> None:
        """Takes over a high watermark, at most up to `counted`: readers may see the records below it."""
        offset = min(offset, self.counted)
        if offset <= self.high_watermark or not self.segments:
            return
        if offset == self.end:
            self.high_watermark, self._read_mark = offset, (self.segments[-1].base_offset, self.segments[-1].size)
        else:
            segment = self.segments[max(self._segment_index(offset - 1), 0)]
            found = segment.locate(offset, segment.size)
            self.high_watermark = offset if found is None else min(offset, found[1].base_offset)
            self._read_mark = (segment.base_offset, segment.size if found is None else found[0])
        if self._wakers:
            self._wake_readers()

    def read_to_end(self, offset: int, bytes_max: int) -> Promise[Slice]:
        """For a replica: whole batches from the one that holds `offset`, committed or not."""
        if offset < self.high_watermark or not self.start <= offset < self.end:
            return self.read(offset, bytes_max)
        try:
            return Promise.of(self._slice_to_end(offset, bytes_max))
        except OSError as error:
            return Promise.failed(self._unreadable(offset, error))
        except (BrokenSegment, Unindexed) as error:
            detail = f"{self.name} cannot be copied from offset {offset}: {error}"
            return Promise.failed(RequestError(Code.KAFKA_STORAGE_ERROR, detail))

    def _slice_to_end(self, offset: int, bytes_max: int) -> Slice:
        for at in range(max(self._segment_index(offset), 0), len(self.segments)):
            segment = self.segments[at]
            if not segment.is_ready:
                raise Unindexed(segment)
            found = segment.locate(offset, segment.size)
            if found is None:
                continue
            position, limit = found[0], segment.size
            next_offset = self.segments[at + 1].base_offset if at + 1 < len(self.segments) else self.end
            if limit - position > bytes_max:
                limit, next_offset = segment.cut_at_batch(position, bytes_max, limit)
            return Slice(limit - position, next_offset, file=segment.file, position=position)
        return Slice(0, self.end)

    # -- cutting -----------------------------------------------------------------------------------------------------

    def truncate(self, offset: int) -> Promise[int]:
        if offset >= self.end:
            return Promise.of(self.end)
        if self._sync_target is not None or self._waiting:
            return Promise.failed(RequestError(Code.INVALID_REQUEST, f"{self.name} has appends in flight"))
        try:
            self._cut_tail(offset)
        except OSError as error:
            return Promise.failed(self.fail(error))
        return Promise.of(self.end)

    def _cut_tail(self, offset: int) -> None:
        keep = max(bisect_left(self.segments, offset, key=lambda segment: segment.base_offset), 1)
        gone, self.segments = self.segments[keep:], self.segments[:keep]
        active = self.segments[-1]
        found = active.locate(offset, active.size)
        position = found[0] if found is not None else active.size
        if found is not None and found[1].base_offset < offset:
            # Batches are never split: the whole batch that holds the offset goes.
            offset = found[1].base_offset
        # First the syncs and the checkpoint, then the cut: a crash in between leaves the log as it was.
        for segment in [*self._unsynced_segments, active]:
            if segment in self.segments:
                self._disk.sync(segment.file)
        self._unsynced_segments = []
        self.end = self.counted = max(offset, active.base_offset)
        if self.end <= self.high_watermark or not self.is_replicated:
            self.high_watermark = self.end
            self._read_mark = (active.base_offset, position)
        self._synced = (self.end, active.base_offset, position)
        self.epochs.cut_from(self.end)
        self.start = min(self.start, self.end)
        self.producers.forget_from(self.end)
        self.unsynced_bytes = self._unsynced_batches = 0
        self.forget_cursors()
        self.damage.forget(self.start, self.end)
        self.write_checkpoint()
        for segment in gone:
            self.remove_files(segment)
        self._disk.truncate(active.file, position)
        active.cut(position)
        self._disk.sync(active.file)
        self._disk.sync_directory(self.directory)

    def restart_at(self, offset: int) -> Promise[int]:
        """Empties the log, which then starts and ends at `offset`; answers with it."""
        if self._sync_target is not None or self._waiting:
            return Promise.failed(RequestError(Code.INVALID_REQUEST, f"{self.name} has appends in flight"))
        try:
            self._restart_at(offset)
        except OSError as error:
            return Promise.failed(self.fail(error))
        return Promise.of(offset)

    def _restart_at(self, offset: int) -> None:
        if self.segments:
            self._cut_tail(self.segments[0].base_offset)
        self.end = self.counted = offset
        if not self.segments or self.segments[0].base_offset != offset:
            self.roll()
        self._disk.sync_directory(self.directory)
        self._directory_dirty = False
        self.start = self.high_watermark = offset
        self._read_mark = (offset, 0)
        self._synced = (offset, offset, 0)
        self._unsynced_segments = []
        self.epochs.restart()
        self.producers.forget_from(0)
        self.forget_cursors()
        self.write_checkpoint()
        self.drop_segments_below(offset)
