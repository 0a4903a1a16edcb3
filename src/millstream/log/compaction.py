"""Compaction: of each key, only the newest record stays (`cleanup.policy=compact`).

Works on closed segments below the last checkpoint, one by one, in a thread. Offsets never change: a batch from which
records go keeps its base and last offset, a batch from which none go keeps its bytes. A tombstone (null value) goes
itself once it is older than `delete.retention.ms`; until then readers can learn of the deletion from it.

Crash policy: the new content is written beside the segment and synced; then the index is removed, durably, and the file
renamed over the old one, which is atomic. A crash leaves the old content or the new, and an index to rebuild.
Readers that were sending from the old file keep it open until they are done.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass

from millstream.log.disk import Disk
from millstream.log.log import Log
from millstream.log.segment import Segment
from millstream.records import codec
from millstream.records.batch import BatchHeader
from millstream.records.compression import Codec

logger = logging.getLogger(__name__)

KEYS_MAX = 5_000_000
"""How many different keys one pass keeps in memory; what lies behind them waits for the next pass."""


@dataclass(slots=True)
class Cleaned:
    segment: Segment
    path: str
    before_bytes: int
    after_bytes: int
    is_changed: bool
    """By size alone nobody can tell: what is compressed anew may come out as long as it was."""


async def compact(log: Log, disk: Disk) -> int:
    """One pass, if enough of the log is dirty; answers with how many bytes went."""
    segments, order = _cleanable(log), list(log.segments)
    dirty = [segment for segment in segments if segment.base_offset >= log.compacted_to]
    dirty_bytes, total = sum(segment.size for segment in dirty), sum(segment.size for segment in segments)
    if dirty_bytes == 0 or (dirty_bytes / total < log.config.min_cleanable_dirty_ratio and not _is_overdue(log, dirty)):
        return 0
    if not log.checkpoint_reaches(segments[-1]):
        # The checkpoint must lie behind whatever is rewritten, or recovery would look at positions that moved.
        await log.flush()
        log.write_checkpoint()
        if not log.checkpoint_reaches(segments[-1]):
            return 0
    horizon = log.clock.now_ms() - log.config.delete_retention_ms
    loop = asyncio.get_running_loop()
    newest, seen = await loop.run_in_executor(None, _newest_offsets, dirty)
    # Behind the keys that fit nothing is rewritten: a tombstone there would go, and what it deletes would stay.
    until = order[order.index(dirty[seen - 1]) + 1].base_offset
    segments = [segment for segment in segments if segment.base_offset < until]
    saved = 0
    for segment in segments:
        if log.closed or segment not in log.segments:  # discarded or trimmed away in the meantime
            continue
        cleaned = await loop.run_in_executor(None, _rewrite, segment, newest, horizon, disk)
        if log.closed or segment not in log.segments:
            with contextlib.suppress(FileNotFoundError):  # the whole topic may be gone
                disk.remove(cleaned.path)
            continue
        _install(log, cleaned, disk)
        saved += cleaned.before_bytes - cleaned.after_bytes
    log.compacted_to = until
    if saved:
        logger.info("%s: compaction removed %d of %d bytes", log.name, saved, total)
    return saved


def _is_overdue(log: Log, dirty: list[Segment]) -> bool:
    """Whether a record has waited for `max.compaction.lag.ms` (KIP-354)."""
    return 0 <= dirty[0].first_timestamp <= log.clock.now_ms() - log.config.max_compaction_lag_ms


def _cleanable(log: Log) -> list[Segment]:
    """Closed segments, from the oldest on, whose records are all older than `min.compaction.lag.ms`."""
    now = log.clock.now_ms()
    limit = now - log.config.min_compaction_lag_ms
    segments = []
    last = next((segment for segment in reversed(log.segments) if segment.size), None)
    for segment in log.segments[:-1]:
        # The last batch stays, as it does in an active segment: readers on their way to the end need one to get there.
        if segment is last or segment.newest_ms(now) > limit:
            break
        segments.append(segment)
    return segments


def _newest_offsets(segments: list[Segment]) -> tuple[dict[bytes, int], int]:
    """Of each key, and of how many of the segments that is all."""
    newest: dict[bytes, int] = {}
    seen = 0
    for segment in segments:
        for header, batch in _batches(segment):
            if header.is_control:
                continue
            newest.update((key, offset) for offset, key, _ in codec.keys(batch) if key is not None)
        seen += 1
        if len(newest) > KEYS_MAX:
            break
    return newest, seen


def _batches(segment: Segment) -> Iterator[tuple[BatchHeader, bytes]]:
    file = segment.file
    for position, header in segment.walk(0, segment.size):
        yield header, os.pread(file.fd, header.size, position)


def _rewrite(segment: Segment, newest: dict[bytes, int], horizon: int, disk: Disk) -> Cleaned:
    path = segment.path + ".cleaned"
    if os.path.exists(path):
        disk.remove(path)
    target = disk.open(path, create=True)
    size, is_changed = 0, False
    for header, batch in _batches(segment):
        kept = batch if header.is_control else _clean_batch(header, batch, newest, horizon)
        is_changed = is_changed or kept is not batch
        if kept:
            disk.append(target, kept)
            size += len(kept)
    disk.sync(target)
    return Cleaned(segment, path, segment.size, size, is_changed)


def _clean_batch(header: BatchHeader, batch: bytes, newest: dict[bytes, int], horizon: int) -> bytes | bytearray:
    records = codec.decode(batch)
    kept = [
        record
        for record in records
        if record.key is not None
        and record.offset >= newest.get(record.key, record.offset)
        and (record.value is not None or record.timestamp >= horizon)
    ]
    if len(kept) == len(records):
        return batch
    if not kept:
        return b""
    return codec.encode(
        kept,
        codec=Codec(header.codec),
        producer_id=header.producer_id,
        producer_epoch=header.producer_epoch,
        base_sequence=header.base_sequence,
        base_offset=header.base_offset,
        attributes=header.attributes,
        last_offset_delta=header.last_offset_delta,
    )


def _install(log: Log, cleaned: Cleaned, disk: Disk) -> None:
    old = cleaned.segment
    if not cleaned.is_changed:
        disk.remove(cleaned.path)
        return
    old.let_go()
    if os.path.exists(old.index.path):
        disk.remove(old.index.path)
        disk.sync_directory(log.directory)
    disk.rename(cleaned.path, old.path)
    at = log.segments.index(old)
    if cleaned.after_bytes == 0 and at > 0:
        log.remove_files(old)
        del log.segments[at]
    else:
        log.segments[at] = Segment(disk, log.directory, old.base_offset, cleaned.after_bytes)
    log.forget_cursors()
    disk.sync_directory(log.directory)
