"""Recovery opens a log: this table lists what a crash may leave, and how recovery handles it.

| found | recovery |
|---|---|
| a checkpoint, and nothing after it | scans nothing: its time does not depend on the amount of stored data |
| bytes after the checkpoint | walks batches with checksums, writes them again in place, syncs, writes a checkpoint |
| a torn or damaged batch among them | truncates the segment there; sets the cut bytes aside unless all are zero |
| segments after a cut, or after a segment that lost its last batches | sets them aside: a hole is below them |
| a segment below the checkpoint, missing or too short | registers a hole as damage: reads inside it fail |
| the checkpoint's own segment, missing or too short | the same; lost offsets stay lost, appends get a new segment |
| segments below the checkpoint's start | removes them: their removal was under way |
| no checkpoint, or a damaged one | walks the whole log; sets a damaged checkpoint aside |
| own temporary files (`.new`, `.cleaned`) | removes them: their sources still exist |
| any other file | sets it aside |

Why recovery writes accepted bytes again: after a failed fsync, the page cache may hold pages that look written but are
not on the disk. The second write and sync make them durable before readers see them.

"Set aside" means moved into the store's `set-aside/` directory and named in the broker's log. Recovery deletes only the
files of the two rows that say "removes".
"""

from __future__ import annotations

import logging
import os
import re
from bisect import bisect_left
from collections.abc import Iterator
from typing import BinaryIO

from crc32c import crc32c

from millstream.core.disk import Disk
from millstream.log import checkpoint as checkpoints
from millstream.log.checkpoint import Checkpoint
from millstream.log.damage import Cause
from millstream.log.epochs import Epochs
from millstream.log.log import Log, Lost
from millstream.log.producers import Producers
from millstream.log.segment import BrokenSegment, Segment, file_name
from millstream.records.batch import CRC_START, HEADER_BYTES, PREFIX_BYTES, BatchHeader, is_sound, read_header

logger = logging.getLogger(__name__)

PIECE_BYTES = 1 << 20
"""A cut tail is copied in pieces, and a large batch is first checked in pieces: both may be as large as a segment."""
_SEGMENT_NAME = re.compile(r"(\d{20})\.log")
_INDEX_NAME = re.compile(r"\d{20}\.index")
_TEMPORARY_NAME = re.compile(r"checkpoint\.new|\d{20}\.log\.cleaned")


class Recovery:
    """Opens one log. `scanned_bytes` and `cut_bytes` count its work."""

    def __init__(self, log: Log, disk: Disk, set_aside: str) -> None:
        self._log = log
        self._disk = disk
        self._set_aside = set_aside
        self._scanned: list[Segment] = []
        self._is_end_lost = False
        self.scanned_bytes = 0
        self.cut_bytes = 0

    def run(self) -> None:
        log = self._log
        if not os.path.isdir(log.directory):
            return
        known = self._read_checkpoint()
        point = known or Checkpoint()
        bases = self._list_segments()
        self._drop_below(point.start, bases)
        producers = Producers.from_state(point.producers)
        if point.epochs:
            log.epochs = Epochs(point.epochs)
            log.epochs.cut_from(max(point.next_offset, 1))
        if known is None:
            end = self._take_tail(bases, None, 0, producers)
        else:
            for base in bases[: bisect_left(bases, point.segment)]:
                log.segments.append(self._segment(base))
            end = self._take_tail(bases[len(log.segments) :], known, known.next_offset, producers)
            self._find_holes(known, end)
        begin = min([segment.base_offset for segment in log.segments[:1]] + list(log.lost), default=end)
        has_begun = self._begin_behind_hole(end)
        log.restore(min(max(point.start, begin), end), end, producers)
        log.checkpointed_to = point.segment if known is not None else -1
        if log.segments and (self.scanned_bytes or known is None or has_begun or log.start < point.start):
            self._settle()

    def _segment(self, base: int) -> Segment:
        size = os.stat(os.path.join(self._log.directory, file_name(base))).st_size
        return Segment(self._disk, self._log.directory, base, size)

    def _take_tail(self, bases: list[int], known: Checkpoint | None, next_offset: int, producers: Producers) -> int:
        """Adds the checkpoint's segment and those after it; returns the end of the log."""
        log = self._log
        is_torn = known is not None and not (bases and bases[0] == known.segment)
        for at, base in enumerate(bases):
            segment = self._segment(base)
            if known is not None and base == known.segment:
                position = known.position
                if position > segment.size:
                    is_torn = True
                    log.segments.append(segment)
                    continue
            else:
                if log.segments and base < next_offset:
                    self._put_aside(segment.path, "it overlaps the segment before it")
                    continue
                if log.segments and base > next_offset and known is not None and not is_torn:
                    # After a checkpoint nothing is compacted, so these offsets are lost; without one, that is unknown.
                    self._put_behind_aside(bases[at:])
                    break
                position, next_offset, is_torn = 0, base, False
            log.segments.append(segment)
            is_sound, next_offset = self._walk(segment, position, next_offset, producers)
            if not is_sound:
                self._put_behind_aside(bases[at + 1 :])
                break
        return max(next_offset, log.segments[-1].base_offset) if log.segments else next_offset

    # -- holes -------------------------------------------------------------------------------------------------------

    def _find_holes(self, point: Checkpoint, end: int) -> None:
        """Compares the segments with the checkpoint."""
        log = self._log
        found = {segment.base_offset: segment for segment in log.segments}
        expected = {closed[0]: closed[1] for closed in point.closed or ()}
        # A segment that the checkpoint saw empty may have batches now, if segments follow.
        expected[point.segment] = point.position if point.segment in found else max(point.position, 1)
        bounds = sorted({*found, *expected, end})
        for base, size in expected.items():
            segment = found.get(base)
            if size <= (segment.size if segment is not None else 0) or base >= end:
                continue
            behind = bounds[bounds.index(base) + 1]
            self._is_end_lost = self._is_end_lost or behind == end
            first = max(base if segment is None else self._cut_short(segment), point.start)
            if first >= behind:  # trimmed
                continue
            log.lost[base] = Lost(size, behind)
            path = os.path.join(log.directory, file_name(base))
            cause = Cause.MISSING if segment is None else Cause.TRUNCATED
            log.damage.add(first, behind, cause, path if segment is None else f"{path}, which had {size} bytes")

    def _cut_short(self, segment: Segment) -> int:
        """Cuts a segment that lost its end to its whole batches; returns the offset after them."""
        position, next_offset = 0, segment.base_offset
        try:
            for at, header in segment.walk(0, segment.size):
                if at + header.size > segment.size:
                    break
                position, next_offset = at + header.size, header.next_offset
        except BrokenSegment:  # the batches after the damage are lost with the rest
            logger.warning("%s is truncated, and damaged before that position", segment.path)
        segment.cut(position)  # in memory only: the file stays as it is
        return next_offset

    def _begin_behind_hole(self, end: int) -> bool:
        """Starts a segment for appends if offsets up to the end are lost: they are not assigned again, and a segment
        that was cut short may end with a partial batch.
        """
        log = self._log
        if not self._is_end_lost or (log.segments and log.segments[-1].base_offset == end):
            return False
        segment = Segment(self._disk, log.directory, end, 0)
        segment.create()
        log.segments.append(segment)
        return True

    # -- the tail ----------------------------------------------------------------------------------------------------

    def _drop_below(self, start: int, bases: list[int]) -> None:
        while len(bases) > 1 and bases[1] <= start:
            self._log.remove_files(Segment(self._disk, self._log.directory, bases.pop(0), 0))

    def _put_behind_aside(self, bases: list[int]) -> None:
        for base in bases:
            self._put_aside(os.path.join(self._log.directory, file_name(base)), "offsets below it are missing")

    def _walk(self, segment: Segment, position: int, next_offset: int, producers: Producers) -> tuple[bool, int]:
        """Accepts the sound batches from a position on and cuts the rest; whether nothing was cut, and the end."""
        size, segment.size = segment.size, position
        segment.trust_index(position)
        if position == size:
            return True, next_offset
        segment.resume_index()
        now = self._log.clock.now_ms()
        with open(segment.path, "rb") as file:
            while segment.size < size:
                file.seek(segment.size)
                batch = memoryview(file.read(HEADER_BYTES))
                if len(batch) < HEADER_BYTES:
                    break
                header = read_header(batch)
                if header.magic != 2 or header.base_offset < next_offset or header.length < HEADER_BYTES - PREFIX_BYTES:
                    break
                if segment.size + header.size > size:
                    break
                if header.size > PIECE_BYTES and not _has_crc(file, segment.size, header):
                    break
                file.seek(segment.size)
                batch = memoryview(file.read(header.size))
                if not is_sound(batch, header):
                    break
                self._disk.rewrite(segment.path, segment.size, batch)
                segment.note(
                    header.max_timestamp, header.base_offset, header.size, self._log.config.index_interval_bytes
                )
                producers.note(header, header.base_offset, now)
                if header.leader_epoch > self._log.epochs.latest:
                    self._log.epochs.begin(header.leader_epoch, header.base_offset)
                next_offset = header.next_offset
        self._scanned.append(segment)
        self.scanned_bytes += size - position
        if segment.size == size:
            return True, next_offset
        self._cut(segment, size)
        return False, next_offset

    def _cut(self, segment: Segment, size: int) -> None:
        cut = size - segment.size
        self.cut_bytes += cut
        if any(piece.strip(b"\0") for piece in _pieces(segment.path, segment.size)):
            name = self._free_name(f"{os.path.basename(segment.path)}.from-{segment.size}")
            self._disk.replace(name, _pieces(segment.path, segment.size))
            logger.warning(
                "%s: cut a torn tail of %d bytes after the last valid batch; kept in %s", segment.path, cut, name
            )
        self._disk.truncate(segment.file, segment.size)

    def _settle(self) -> None:
        """Syncs the accepted bytes and writes a checkpoint, so that the next start need not scan them."""
        for segment in self._scanned:
            self._disk.sync(segment.file)
        self._disk.sync_directory(self._log.directory)
        self._log.write_checkpoint()

    def _read_checkpoint(self) -> Checkpoint | None:
        try:
            return Checkpoint.read(self._log.directory)
        except (ValueError, TypeError) as error:
            self._put_aside(os.path.join(self._log.directory, checkpoints.FILE_NAME), str(error))
            return None

    def _list_segments(self) -> list[int]:
        bases = []
        for name in sorted(os.listdir(self._log.directory)):
            path = os.path.join(self._log.directory, name)
            match = _SEGMENT_NAME.fullmatch(name)
            if match:
                bases.append(int(match[1]))
            elif _TEMPORARY_NAME.fullmatch(name):
                self._disk.remove(path)
            elif name != checkpoints.FILE_NAME and not _INDEX_NAME.fullmatch(name):
                self._put_aside(path, "it is not a file of this log")
        return bases

    def _put_aside(self, path: str, why: str) -> None:
        target = self._free_name(os.path.basename(path))
        self._disk.rename(path, target)
        self._disk.sync_directory(os.path.dirname(path))
        logger.warning("set %s aside as %s: %s", path, target, why)

    def _free_name(self, name: str) -> str:
        self._disk.make_directory(self._set_aside)
        # A file name holds 255 bytes: the ends of both names tell enough.
        stem = os.path.join(self._set_aside, f"{self._log.name[-120:]}.{name[-120:]}")
        candidate, number = stem, 1
        while os.path.exists(candidate):
            number += 1
            candidate = f"{stem}.{number}"
        return candidate


def _has_crc(file: BinaryIO, position: int, header: BatchHeader) -> bool:
    """Reads in pieces: a header of torn bytes may claim a batch as large as the segment."""
    file.seek(position + CRC_START)
    left, crc = header.size - CRC_START, 0
    while piece := file.read(min(left, PIECE_BYTES)):
        left, crc = left - len(piece), crc32c(piece, crc)
    return crc == header.crc


def _pieces(path: str, position: int) -> Iterator[bytes]:
    """The bytes of a file from a position on."""
    with open(path, "rb") as file:
        file.seek(position)
        while piece := file.read(PIECE_BYTES):
            yield piece
