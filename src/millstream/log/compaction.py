"""Compaction keeps only the newest record of each key (`cleanup.policy=compact`).

A thread rewrites closed segments below the last checkpoint, one by one. Offsets never change: a batch that loses
records keeps its base and last offset, and a batch that loses none keeps its bytes. Compaction removes a tombstone
(null value) once it is older than `delete.retention.ms`; until then readers see the deletion.

Crash policy: compaction writes the new content beside the segment and syncs it, removes the index durably, and renames
the new file over the old one, which is atomic. A crash leaves the old or the new content, and an index to rebuild.
Before the first rename, a pass writes a checkpoint that lists none of its segments, so that recovery does not report
the removed bytes as a hole. Readers that send from the old file keep it open until they are done.

Damage: compaction does not rewrite a damaged segment: a rewrite would drop the damaged range, and no restore could
bring it back. Records in a damaged segment replace none in older segments. Tombstones after damage stay: the damaged
range may hold the value that a tombstone deletes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from millstream.core.disk import Disk
from millstream.log.log import Log
from millstream.log.segment import BrokenSegment, Segment
from millstream.records import codec
from millstream.records.batch import BatchHeader, CorruptBatch, is_sound
from millstream.records.compression import Codec

logger = logging.getLogger(__name__)

KEYS_MAX = 5_000_000
"""Keys that one pass keeps in memory. The segments after them wait for the next pass."""
KEEP_TOMBSTONES = -(2**63)
"""A horizon that is older than every record."""


@dataclass(slots=True)
class Cleaned:
    segment: Segment
    path: str
    before_bytes: int
    after_bytes: int
    is_changed: bool
    """The size alone does not show it: a recompressed segment may keep its size."""


async def compact(log: Log, disk: Disk) -> int:
    """Runs one pass if enough of the log is dirty; returns the bytes removed."""
    segments, order = _cleanable(log), list(log.segments)
    dirty = [segment for segment in segments if segment.base_offset >= log.compacted_to]
    dirty_bytes, total = sum(segment.size for segment in dirty), sum(segment.size for segment in segments)
    if dirty_bytes == 0 or (dirty_bytes / total < log.config.min_cleanable_dirty_ratio and not _is_overdue(log, dirty)):
        return 0
    if not log.checkpoint_reaches(segments[-1]):
        # The checkpoint must come after all rewritten segments, or recovery would use stale positions.
        await log.flush()
        log.write_checkpoint()
        if not log.checkpoint_reaches(segments[-1]):
            return 0
    behind = {segment: after.base_offset for segment, after in pairwise(order)}
    loop = asyncio.get_running_loop()
    spans = [(segment, behind[segment]) for segment in dirty]
    newest, seen, broken = await loop.run_in_executor(None, _newest_offsets, spans)
    for error in broken:
        await _note(log, error)
    # Rewrite nothing after the keys that fit: a tombstone there would go, and its deleted value would stay.
    until = behind[dirty[seen - 1]]
    damaged = {error.path for error in broken}
    saved = await _clean(
        log,
        [(each, behind[each]) for each in segments if each.base_offset < until and each.path not in damaged],
        newest,
        disk,
    )
    log.compacted_to = until
    if saved:
        logger.info("%s: compaction removed %d of %d bytes", log.name, saved, total)
    return saved


async def _clean(log: Log, spans: list[tuple[Segment, int]], newest: dict[bytes, int], disk: Disk) -> int:
    """Rewrites segments, oldest first, each up to the offset after it; returns the bytes removed."""
    loop = asyncio.get_running_loop()
    horizon = log.clock.now_ms() - log.config.delete_retention_ms
    saved, is_installed = 0, False
    try:
        for segment, behind in spans:
            if log.closed or segment not in log.segments:  # deleted or trimmed during the pass
                continue
            oldest = horizon if _is_sound_below(log, segment.base_offset) else KEEP_TOMBSTONES
            try:
                cleaned = await loop.run_in_executor(None, _rewrite, segment, behind, newest, oldest, disk)
            except BrokenSegment as error:
                await _note(log, error)
                continue
            if not cleaned.is_changed or log.closed or segment not in log.segments:
                _remove(disk, cleaned.path)
                continue
            if not is_installed:
                log.rewritten.update(each.base_offset for each, _ in spans)
                log.write_checkpoint()
            _install(log, cleaned, disk)
            is_installed = True
            saved += cleaned.before_bytes - cleaned.after_bytes
    finally:
        log.rewritten.clear()
    if is_installed and not log.closed:
        log.write_checkpoint()
    return saved


async def _note(log: Log, error: BrokenSegment) -> None:
    logger.warning("%s: compaction skips a damaged segment: %s", log.name, error)
    await log.note_broken(error)


def _is_sound_below(log: Log, offset: int) -> bool:
    return not any(damaged.first < offset for damaged in log.damage.ranges)


def _is_overdue(log: Log, dirty: list[Segment]) -> bool:
    """Whether a record has waited for `max.compaction.lag.ms` (KIP-354)."""
    return 0 <= dirty[0].first_timestamp <= log.clock.now_ms() - log.config.max_compaction_lag_ms


def _cleanable(log: Log) -> list[Segment]:
    """Closed segments without known damage, oldest first, whose records are all older than
    `min.compaction.lag.ms`.
    """
    now = log.clock.now_ms()
    limit = now - log.config.min_compaction_lag_ms
    segments = []
    last = next((segment for segment in reversed(log.segments) if segment.size), None)
    for segment, after in pairwise(log.segments):
        if segment.bad or any(
            damaged.first < after.base_offset and segment.base_offset < damaged.end for damaged in log.damage.ranges
        ):
            continue
        # The last batch stays, as in an active segment: readers need it to reach the end. Uncommitted records stay,
        # because a follower may have to cut them off.
        if segment is last or after.base_offset > log.high_watermark or segment.newest_ms(now) > limit:
            break
        segments.append(segment)
    return segments


def _newest_offsets(spans: list[tuple[Segment, int]]) -> tuple[dict[bytes, int], int, list[BrokenSegment]]:
    """The newest offset of each key, the number of segments covered, and the damage in them.

    A damaged segment contributes no keys: the damage may be in an offset.
    """
    newest: dict[bytes, int] = {}
    broken: list[BrokenSegment] = []
    seen = 0
    for segment, behind in spans:
        try:
            newest |= _keys(segment, behind)
        except BrokenSegment as error:
            broken.append(error)
        seen += 1
        if len(newest) > KEYS_MAX:
            break
    return newest, seen, broken


def _keys(segment: Segment, behind: int) -> dict[bytes, int]:
    found: dict[bytes, int] = {}
    for header, batch in _batches(segment, behind):
        if header.is_control:
            continue
        with contextlib.suppress(CorruptBatch):  # the producer sent it so
            found.update((key, offset) for offset, key, _ in codec.keys(batch, check_crc=False) if key is not None)
    return found


def _batches(segment: Segment, behind: int) -> Iterator[tuple[BatchHeader, bytes]]:
    """The batches of a segment; raises `BrokenSegment` at the first damaged one."""
    file = segment.file
    end = 0
    for position, header in segment.walk(0, segment.size, over_damage=False):
        batch = os.pread(file.fd, header.size, position)
        if header.next_offset > behind or not is_sound(memoryview(batch), header):
            raise BrokenSegment(segment.path, position)
        yield header, batch
        end = position + header.size
    if end != segment.size:
        raise BrokenSegment(segment.path, end)


def _rewrite(segment: Segment, behind: int, newest: dict[bytes, int], horizon: int, disk: Disk) -> Cleaned:
    path = segment.path + ".cleaned"
    _remove(disk, path)
    target = disk.open(path, create=True)
    size, is_changed = 0, False
    try:
        for header, batch in _batches(segment, behind):
            kept = batch if header.is_control else _clean_batch(header, batch, newest, horizon)
            is_changed = is_changed or kept is not batch
            if kept:
                disk.append(target, kept)
                size += len(kept)
        disk.sync(target)
    except Exception:
        _remove(disk, path)
        raise
    return Cleaned(segment, path, segment.size, size, is_changed)


def _remove(disk: Disk, path: str) -> None:
    with contextlib.suppress(FileNotFoundError):  # the topic may be deleted
        disk.remove(path)


def _clean_batch(header: BatchHeader, batch: bytes, newest: dict[bytes, int], horizon: int) -> bytes | bytearray:
    try:
        records = codec.decode(batch, check_crc=False)
    except CorruptBatch:  # stays as it arrived
        return batch
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
    old.let_go()
    if os.path.exists(old.index.path):
        disk.remove(old.index.path)
        disk.sync_directory(log.directory)
    disk.rename(cleaned.path, old.path)
    at = log.segments.index(old)
    log.segments[at] = Segment(disk, log.directory, old.base_offset, cleaned.after_bytes)
    log.forget_cursors()
    if cleaned.after_bytes == 0 and at > 0:
        log.remove_files(log.segments.pop(at))
    disk.sync_directory(log.directory)
