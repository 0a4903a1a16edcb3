"""One segment: a file of whole batches, and its index.

`00000000000000000042.log` holds the batches from offset 42 on, one after the other, exactly as producers sent them
except for the patched offset. Offsets rise; compaction may leave gaps between batches. Only the event loop's thread
appends, and only to the last segment of a log. Reads below `size` need no coordination: written bytes never change.

Crash policy: the bytes after the last sync may be missing, torn, or complete. Recovery walks them from the last
checkpoint and keeps the longest run of sound batches. Bytes before the checkpoint are checked when they are read
(`checked.py`); a broken header raises `BrokenSegment`, which fails that read only.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from millstream.core.disk import Disk, OpenFile
from millstream.log.checked import Checked
from millstream.log.index import NO_TIME, Entry, Index, pack
from millstream.log.soundness import Extent
from millstream.records.batch import HEADER_BYTES, PREFIX_BYTES, BatchHeader, CorruptBatch, is_sound, read_header
from millstream.records.run import BatchRun, split

logger = logging.getLogger(__name__)

RELATIVE_OFFSET_MAX = 0x7FFF_FFFF
_CHUNK_BYTES = 16 * 1024
_INTERVAL_BYTES = 4096
"""Between the entries of a rebuilt index."""
REBUILD_BYTES_MAX = 4 << 20
"""A reader rebuilds the index of a segment up to this size on the event loop, else in a thread."""
SPARSE_BYTES = 1 << 20
"""Between two index entries: more makes a lookup block the event loop."""


def file_name(base_offset: int) -> str:
    return f"{base_offset:020d}.log"


class Segment:
    __slots__ = (
        "_disk", "_file", "_indexed_to", "_is_indexed", "_max_timestamp", "_seen_ms", "bad", "base_offset", "checked",
        "index", "is_time_proven", "path", "size",
    )  # fmt: skip

    def __init__(self, disk: Disk, directory: str, base_offset: int, size: int) -> None:
        self._disk = disk
        self.base_offset = base_offset
        self.path = os.path.join(directory, file_name(base_offset))
        self.size = size
        self.index = Index(disk, self.path[:-4] + ".index")
        self.checked = Checked(size)
        self.bad: dict[int, int] = {}
        """The position of each known damaged range, and that of the next sound batch."""
        self._file: OpenFile | None = None
        self._indexed_to = 0
        self._is_indexed = False
        self._max_timestamp: int | None = NO_TIME if size == 0 else None
        self._seen_ms: int | None = None
        self.is_time_proven = size == 0
        """Whether `max_timestamp` rests on checked batches, not only on their headers."""

    @property
    def file(self) -> OpenFile:
        if self._file is None:
            self._file = self._disk.open(self.path)
        return self._file

    @property
    def is_open(self) -> bool:
        return self._file is not None

    def create(self) -> None:
        """Creates the file. The log's next flush syncs the directory and so makes the name durable."""
        self._file = self._disk.open(self.path, create=True)
        # A crash may have lost an earlier file of this name but not its index.
        self.index.clear()
        self._is_indexed = True

    def let_go(self) -> None:
        """Closes the descriptors until the next use. Readers that still send from the file keep it open."""
        if self._file is None:  # idle since the last time
            self.checked.reset(self.size)
        self._file = None
        self.index.close()

    def append(
        self, batch: memoryview | bytes | bytearray, header: BatchHeader, base_offset: int, interval: int
    ) -> None:
        if self._max_timestamp is None:
            self._find_max_timestamp()  # before the write: a failure after it would leave unrecorded bytes
        file = self._file
        self._disk.append(file if file is not None else self.file, batch)
        self.note(header.max_timestamp, base_offset, len(batch), interval)

    def append_run(self, run: BatchRun, base_offset: int, interval: int) -> None:
        if self._max_timestamp is None:
            self._find_max_timestamp()
        if len(run.data) < interval:
            self._disk.append(self.file, run.data)
            self.note(run.max_timestamp, base_offset, len(run.data), interval)
            return
        # Reserve index room before the write: a partly indexed run could not be undone. Load the entries before that:
        # an index that is missing, and created here, would look complete without the earlier entries.
        self.load_index()
        self.index.reserve(len(run.data) // interval + 1)
        self._disk.append(self.file, run.data)
        for batch, header in split(run.data):
            self.note(header.max_timestamp, header.base_offset, len(batch), interval)

    def note(self, timestamp: int, base_offset: int, size: int, interval: int) -> None:
        """Adds the bytes at the end of the file, one batch or several, to the index and the size."""
        newest = self._max_timestamp
        if newest is None:
            newest = self._find_max_timestamp()
        position = self.size
        if position - self._indexed_to >= interval:
            self.index.add(base_offset - self.base_offset, position, newest)
            self._indexed_to = position
        self.size = position + size
        if timestamp > newest:
            self._max_timestamp = timestamp

    @property
    def max_timestamp(self) -> int:
        """The largest timestamp; after a restart, a walk from the last index entry finds it."""
        return self._max_timestamp if self._max_timestamp is not None else self._find_max_timestamp()

    def _find_max_timestamp(self) -> int:
        self._max_timestamp = newest = self.newest_time(self.base_offset, self.size)
        return newest

    def distrust_time(self) -> None:
        """Damage may hide newer records, but none newer than the file."""
        self._max_timestamp = max(self.max_timestamp, self._modified_ms())

    def tail(self) -> tuple[int, int, int]:
        """Start and end of the stored batches after the last index entry, and their first offset."""
        stored = self.checked.stored
        relative, start, _ = self._indexed(self.index.by_position, stored - 1) if stored else (0, 0, NO_TIME)
        return start, stored, self.base_offset + relative

    def newest_ms(self, now_ms: int) -> int:
        """The time of the newest record: the largest timestamp, or the file's modification time if no record has a
        timestamp or one lies in the future.
        """
        newest = self.max_timestamp
        if self.size == 0 or NO_TIME < newest <= now_ms:
            return newest
        written = self._modified_ms()
        return written if newest <= NO_TIME else min(newest, written)

    def begun_ms(self, now_ms: int) -> int:
        """The time of the first batch. A future timestamp counts as the time when it was first seen."""
        first = self.first_timestamp
        if first <= now_ms:
            return first
        if self._seen_ms is None:
            self._seen_ms = now_ms
        return self._seen_ms

    def newest_time(self, offset: int, limit: int) -> int:
        """The largest timestamp of the batches from an offset to a position; damage never fails it."""
        newest = NO_TIME
        try:
            if offset > self.base_offset:
                found = self.locate(offset, limit)
                start = found[0] if found is not None else limit
            else:
                _, start, newest = self._indexed(self.index.by_position, limit - 1)
            for _, header in self.walk(start, limit):
                newest = max(newest, header.max_timestamp)
        except BrokenSegment:  # as `distrust_time`
            return max(newest, self._modified_ms())
        return newest

    def _modified_ms(self) -> int:
        return os.fstat(self.file.fd).st_mtime_ns // 1_000_000

    @property
    def first_timestamp(self) -> int:
        """The first batch's timestamp, or -1 in an empty segment."""
        try:
            for _, header in self.walk(0, min(self.size, HEADER_BYTES)):
                return header.max_timestamp
        except BrokenSegment:
            return self._modified_ms()
        return NO_TIME

    @property
    def is_ready(self) -> bool:
        """Whether lookups find an index, or a quick rebuild makes one; else a survey must come first."""
        if not self._is_indexed and self.size:
            self._is_indexed = self.index.load(self.size)
        return self._is_indexed or self.size <= REBUILD_BYTES_MAX

    def load_index(self) -> None:
        """Loads the index for lookups; rebuilds it if the file is missing or unusable."""
        if self._is_indexed or self.size == 0:
            return
        if self.index.load(self.size):
            self._is_indexed = True
        else:
            self.rebuild_index()

    def trust_index(self, position: int) -> None:
        """Loads the entries below a position and drops the others, at the start of recovery."""
        self._is_indexed = self.index.load(position)
        self.index.close()

    def _indexed(self, lookup: Callable[[int], Entry], value: int) -> Entry:
        """The result of an index lookup, verified against the segment."""
        self.load_index()
        entry = lookup(value)
        if not entry[1] or self._has_batch(*entry[:2]):
            return entry
        resumed = self._resumed(entry[1])
        if resumed is not None:
            return entry[0], resumed, entry[2]
        if not self._is_misplaced(entry[1]):
            raise BrokenSegment(self.path, entry[1])
        logger.warning("rebuilding an index that does not match its segment: %s", self.index.path)
        if self.size > REBUILD_BYTES_MAX:
            self._is_indexed = False
            self.index.clear()
            raise BrokenSegment(self.path, entry[1])
        self.rebuild_index()
        return lookup(value)

    def _resumed(self, position: int) -> int | None:
        """Where reading resumes after a position, if it lies in a known damaged range."""
        return next((resumed for at, resumed in self.bad.items() if at <= position < resumed), None)

    def _has_batch(self, relative: int, position: int) -> bool:
        if position + HEADER_BYTES > self.size:
            return False
        data = os.pread(self.file.fd, HEADER_BYTES, position)
        if len(data) < HEADER_BYTES:
            return False
        header = read_header(data)
        return header.magic == 2 and header.base_offset == self.base_offset + relative

    def _is_misplaced(self, position: int) -> bool:
        """Whether the index is wrong about a position, rather than the segment damaged there.

        Walks the batches between the last correct entry and the first wrong one after it: a few kilobytes.
        """
        true, false = -1, self.index.number_at(position) - 1
        while false - true > 1:
            middle = (true + false) // 2
            relative, at, _ = self.index.entry(middle)
            if self._has_batch(relative, at) or self._resumed(at) is not None:
                true = middle
            else:
                false = middle
        relative, start, _ = self.index.entry(true) if true >= 0 else (0, 0, NO_TIME)
        next_offset, position = self.base_offset + relative, self.index.entry(false)[1]
        for at, header in self.walk(start, self.size):
            if at == position:
                return header.base_offset == next_offset
            if at + header.size > position:
                return is_sound(memoryview(os.pread(self.file.fd, header.size, at)), header)
            next_offset = header.next_offset
        return True

    def extent(self, limit: int, behind: int) -> Extent:
        """The input of an examination."""
        self.load_index()
        return Extent(self.file, self.base_offset, self.index.to_bytes(), limit, behind)

    def entry_before(self, offset: int | None = None, position: int = 0) -> tuple[int, int]:
        """Offset and position of the last indexed batch at or before an offset or position that is really there."""
        return self.extent(self.size, 0).entry_before(offset, position)

    def rebuild_index(self) -> None:
        self.take_survey(self.survey(self.size))

    def survey(self, size: int) -> Survey:
        """Reads every batch header below a position. A large segment takes seconds, so use a thread."""
        entries, newest, indexed_to, behind = bytearray(), NO_TIME, 0, 0
        try:
            for position, header in self.walk(0, size):
                if position != behind:  # assume that damaged records are no newer than the batch after them
                    newest = max(newest, header.max_timestamp)
                if position - indexed_to >= _INTERVAL_BYTES:
                    entries += pack(header.base_offset - self.base_offset, position, newest)
                    indexed_to = position
                newest = max(newest, header.max_timestamp)
                behind = position + header.size
        except BrokenSegment:  # the next read there reports it; until then the rest has no index
            newest = max(newest, self._modified_ms())
        return Survey(bytes(entries), size, newest)

    def take_survey(self, found: Survey) -> None:
        """Installs the index of a survey; batches appended since then keep their entries."""
        self.index.replace(found.entries, found.size)
        self._is_indexed = True
        self.resume_index()
        if self._max_timestamp is None:
            self._max_timestamp = found.newest if found.size == self.size else None

    def is_sparse_behind(self, position: int) -> bool:
        """Whether lookups after a position must walk far."""
        at = self.index.number_at(position)
        following = self.index.entry(at)[1] if at < self.index.count else self.size
        return following - position > SPARSE_BYTES

    def cut(self, position: int) -> None:
        """Drops the batches from a position on, which the file no longer holds."""
        self.load_index()
        self.size = position
        self.checked.stored = min(self.checked.stored, position)
        self.index.cut(position)
        self.resume_index()
        self._max_timestamp = None if position else NO_TIME
        self.is_time_proven = position == 0

    def resume_index(self) -> None:
        """Resumes indexing after the last entry, before new appends."""
        self._indexed_to = self.index.entry(self.index.count - 1)[1] if self.index.count else 0

    def walk(self, position: int, limit: int, *, over_damage: bool = True) -> Iterator[tuple[int, BatchHeader]]:
        """Position and header of each batch from a batch's position on, while whole headers lie below `limit`.

        Skips known damage (with `over_damage`), and raises `BrokenSegment` at any other.
        """
        if position >= limit:
            return
        file, bad, expected = self.file, self.bad if over_damage else None, self.base_offset
        chunk, chunk_start = b"", position
        while position + HEADER_BYTES <= limit:
            if bad and position in bad:
                position = bad[position]
                continue
            at = position - chunk_start
            if at + HEADER_BYTES > len(chunk):
                chunk, chunk_start, at = os.pread(file.fd, _CHUNK_BYTES, position), position, 0
                if len(chunk) < HEADER_BYTES:
                    raise BrokenSegment(self.path, position)
            header = read_header(chunk, at)
            if header.magic != 2 or header.length < HEADER_BYTES - PREFIX_BYTES or header.base_offset < expected:
                raise BrokenSegment(self.path, position)
            yield position, header
            position += header.length + PREFIX_BYTES
            expected = header.base_offset + header.last_offset_delta + 1

    def locate(self, offset: int, limit: int) -> tuple[int, BatchHeader] | None:
        """The first batch below `limit` whose last offset is not before `offset`."""
        _, start, _ = self._indexed(self.index.by_offset, offset - self.base_offset)
        for position, header in self.walk(start, limit):
            if header.last_offset >= offset:
                return position, header
        return None

    def passed(self, offset: int, limit: int) -> tuple[int, BatchHeader] | None:
        """The last batch below `limit` that a search for `offset` meets."""
        _, start, _ = self._indexed(self.index.by_offset, offset - self.base_offset)
        last = deque(self.walk(start, limit), maxlen=1)
        return last[0] if last else None

    def walk_from_time(self, timestamp: int, limit: int) -> Iterator[tuple[int, BatchHeader]]:
        """Like `walk` without `over_damage`; skips only batches whose records are older than `timestamp`."""
        return self.walk(self._indexed(self.index.by_time, timestamp)[1], limit, over_damage=False)

    def cut_at_batch(self, start: int, bytes_max: int, limit: int) -> tuple[int, int]:
        """Where a read of at most `bytes_max` from a batch on ends, and the offset of the next read.

        A read takes at least one batch, however large, or a consumer could never get past it.
        """
        aim = start + bytes_max
        end, next_offset = start, self.base_offset
        for position, header in self.walk(max(start, self._indexed(self.index.by_position, aim)[1]), limit):
            if position > start and position + header.size > aim:
                # The last batch of the read gives the next offset; this one does only if the index led here.
                return position, next_offset if end == position else header.base_offset
            end, next_offset = position + header.size, header.next_offset
            if end > aim:
                break
        return end, next_offset


class Survey(NamedTuple):
    """The result of a walk over every batch."""

    entries: bytes
    """Index entries in the format of `index.py`."""
    size: int
    """Its end position."""
    newest: int


class BrokenSegment(CorruptBatch):
    """The bytes at a position are no batch header. Fails only the read that met them."""

    def __init__(self, path: str, position: int) -> None:
        super().__init__(f"{path} holds no batch at position {position}")
        self.path = path
        self.position = position


class Unindexed(Exception):
    """A segment has no index, and is too large to rebuild it on the event loop."""

    def __init__(self, segment: Segment) -> None:
        super().__init__(f"{segment.path} has no index")
        self.segment = segment
