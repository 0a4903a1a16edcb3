"""One segment: a file of whole batches, and its index.

`00000000000000000042.log` holds the batches from offset 42 on, one after the other, exactly as producers sent them
but for the patched offset. Batches grow in offset; after compaction there may be gaps between them. Only the last
segment of a log is appended to, only by the event loop's thread. Reads below `size` need no coordination: bytes once
written never change.

Crash policy: the bytes behind the last sync may be missing, torn, or there. Recovery walks them from the last
checkpoint and keeps the longest run of sound batches. What lies before the checkpoint is checked when it is read
(`checked.py`); a header that is none raises `BrokenSegment`, and costs the read that met it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

from millstream.log.checked import Checked
from millstream.log.disk import Disk
from millstream.log.index import NO_TIME, Entry, Index, pack
from millstream.log.slice import OpenFile
from millstream.log.soundness import Extent
from millstream.records.batch import HEADER_BYTES, PREFIX_BYTES, BatchHeader, CorruptBatch, is_sound, read_header
from millstream.records.run import BatchRun, split

logger = logging.getLogger(__name__)

RELATIVE_OFFSET_MAX = 0x7FFF_FFFF
_CHUNK_BYTES = 16 * 1024
_INTERVAL_BYTES = 4096
"""Between the entries of an index that is rebuilt."""
REBUILD_BYTES_MAX = 4 << 20
"""Of a segment whose index a reader rebuilds on the event loop; that of a larger one is a thread's work."""
SPARSE_BYTES = 1 << 20
"""Between two entries of an index: more, and a look-up takes long on the event loop."""


def file_name(base_offset: int) -> str:
    return f"{base_offset:020d}.log"


class Segment:
    __slots__ = (
        "_disk", "_file", "_indexed_to", "_is_indexed", "_max_timestamp", "_seen_ms", "bad", "base_offset", "checked",
        "index", "path", "size",
    )  # fmt: skip

    def __init__(self, disk: Disk, directory: str, base_offset: int, size: int) -> None:
        self._disk = disk
        self.base_offset = base_offset
        self.path = os.path.join(directory, file_name(base_offset))
        self.size = size
        self.index = Index(disk, self.path[:-4] + ".index")
        self.checked = Checked(size)
        self.bad: dict[int, int] = {}
        """The position of each damaged place that is known, and where the next sound batch begins."""
        self._file: OpenFile | None = None
        self._indexed_to = 0
        self._is_indexed = False
        self._max_timestamp: int | None = NO_TIME if size == 0 else None
        self._seen_ms: int | None = None

    @property
    def file(self) -> OpenFile:
        if self._file is None:
            self._file = self._disk.open(self.path)
        return self._file

    @property
    def is_open(self) -> bool:
        return self._file is not None

    def create(self) -> None:
        """Makes the file. Its name is durable only after the directory is synced, which the log's next flush does."""
        self._file = self._disk.open(self.path, create=True)
        # A crash may have taken an earlier file of this name and left its index.
        self.index.clear()
        self._is_indexed = True

    def let_go(self) -> None:
        """Closes the descriptors until the next use. Readers that still send from the file keep their own hold."""
        if self._file is None:  # idle since the last time
            self.checked.reset(self.size)
        self._file = None
        self.index.close()

    def append(
        self, batch: memoryview | bytes | bytearray, header: BatchHeader, base_offset: int, interval: int
    ) -> None:
        if self._max_timestamp is None:
            self._find_max_timestamp()  # before the write: bytes that are written and not noted would shift all others
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
        # First the room in the index: a run of which only a part was noted could not be taken back. Before that the
        # entries: one that was missing, and is made here, would pass for one that has nothing to say of all before.
        self.load_index()
        self.index.reserve(len(run.data) // interval + 1)
        self._disk.append(self.file, run.data)
        for batch, header in split(run.data):
            self.note(header.max_timestamp, header.base_offset, len(batch), interval)

    def note(self, timestamp: int, base_offset: int, size: int, interval: int) -> None:
        """Takes what lies at the end of the file, one batch or several, into the index and the books."""
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
        """The largest timestamp in the segment; after a restart found from the last index entry on."""
        return self._max_timestamp if self._max_timestamp is not None else self._find_max_timestamp()

    def _find_max_timestamp(self) -> int:
        self._max_timestamp = newest = self.newest_time(self.base_offset, self.size)
        return newest

    def newest_ms(self, now_ms: int) -> int:
        """How old it is: by its largest timestamp, or by the file's where no record says when it was made, or one says
        a time that is still to come.
        """
        newest = self.max_timestamp
        if self.size == 0 or NO_TIME < newest <= now_ms:
            return newest
        written = self._modified_ms()
        return written if newest <= NO_TIME else min(newest, written)

    def begun_ms(self, now_ms: int) -> int:
        """When its first batch was made. One that says a time that is still to come was made when it was first seen."""
        first = self.first_timestamp
        if first <= now_ms:
            return first
        if self._seen_ms is None:
            self._seen_ms = now_ms
        return self._seen_ms

    def newest_time(self, offset: int, limit: int) -> int:
        """The largest timestamp among the batches from an offset on and below a position; never fails for damage."""
        newest = NO_TIME
        try:
            if offset > self.base_offset:
                found = self.locate(offset, limit)
                start = found[0] if found is not None else limit
            else:
                _, start, newest = self._indexed(self.index.by_position, limit - 1)
            for _, header in self.walk(start, limit):
                newest = max(newest, header.max_timestamp)
        except BrokenSegment:  # damage may hide newer records, but none that are newer than the file
            return max(newest, self._modified_ms())
        return newest

    def _modified_ms(self) -> int:
        return os.fstat(self.file.fd).st_mtime_ns // 1_000_000

    @property
    def first_timestamp(self) -> int:
        """When the first batch was made, or -1 in an empty segment."""
        try:
            for _, header in self.walk(0, min(self.size, HEADER_BYTES)):
                return header.max_timestamp
        except BrokenSegment:
            return self._modified_ms()
        return NO_TIME

    @property
    def is_ready(self) -> bool:
        """Whether look-ups find an index, or one that is rebuilt soon enough; else it is to be surveyed first."""
        if not self._is_indexed and self.size:
            self._is_indexed = self.index.load(self.size)
        return self._is_indexed or self.size <= REBUILD_BYTES_MAX

    def load_index(self) -> None:
        """Has the index ready for lookups, rebuilt if the file is missing or does not fit."""
        if self._is_indexed or self.size == 0:
            return
        if self.index.load(self.size):
            self._is_indexed = True
        else:
            self.rebuild_index()

    def trust_index(self, position: int) -> None:
        """Takes over the entries below a position, and forgets the others: what recovery begins with."""
        self._is_indexed = self.index.load(position)
        self.index.close()

    def _indexed(self, lookup: Callable[[int], Entry], value: int) -> Entry:
        """What a lookup in the index answers, once a look at the segment has shown that it is true."""
        self.load_index()
        entry = lookup(value)
        if not entry[1] or self._has_batch(*entry[:2]):
            return entry
        resumed = self._resumed(entry[1])
        if resumed is not None:
            return entry[0], resumed, entry[2]
        if not self._is_misplaced(entry[1]):
            raise BrokenSegment(self.path, entry[1])
        logger.warning("rebuilding an index that does not fit its segment: %s", self.index.path)
        if self.size > REBUILD_BYTES_MAX:
            self._is_indexed = False
            self.index.clear()
            raise BrokenSegment(self.path, entry[1])
        self.rebuild_index()
        return lookup(value)

    def _resumed(self, position: int) -> int | None:
        """Where reading goes on behind a position, if that lies in a place that is known to be damaged."""
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
        """Whether the batches show that the index is wrong about a position, and not the segment damaged there.

        Looks at what lies between the last entry that is true and the first behind it that is not: a few kilobytes.
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
        """What an examination of the segment reads."""
        self.load_index()
        return Extent(self.file, self.base_offset, self.index.to_bytes(), limit, behind)

    def entry_before(self, offset: int | None = None, position: int = 0) -> tuple[int, int]:
        """Offset and position of an indexed batch at or before an offset, or a position, that is seen to be there."""
        return self.extent(self.size, 0).entry_before(offset, position)

    def rebuild_index(self) -> None:
        self.take_survey(self.survey(self.size))

    def survey(self, size: int) -> Survey:
        """Looks at every batch below a position. A large segment takes seconds: then it is a thread's work."""
        entries, newest, indexed_to, behind = bytearray(), NO_TIME, 0, 0
        try:
            for position, header in self.walk(0, size):
                if position != behind:  # the damaged records are not newer than those behind them, as far as one knows
                    newest = max(newest, header.max_timestamp)
                if position - indexed_to >= _INTERVAL_BYTES:
                    entries += pack(header.base_offset - self.base_offset, position, newest)
                    indexed_to = position
                newest = max(newest, header.max_timestamp)
                behind = position + header.size
        except BrokenSegment:  # a reader that comes there reports it; what lies behind has no index until then
            newest = max(newest, self._modified_ms())
        return Survey(bytes(entries), size, newest)

    def take_survey(self, found: Survey) -> None:
        """Takes over the index that a survey made; what was appended meanwhile has its entries."""
        self.index.replace(found.entries, found.size)
        self._is_indexed = True
        self.resume_index()
        if self._max_timestamp is None:
            self._max_timestamp = found.newest if found.size == self.size else None

    def is_sparse_behind(self, position: int) -> bool:
        """Whether look-ups behind a position have a long way from there."""
        at = self.index.number_at(position)
        following = self.index.entry(at)[1] if at < self.index.count else self.size
        return following - position > SPARSE_BYTES

    def cut(self, position: int) -> None:
        """Forgets the batches from a position on, which the file no longer holds."""
        self.load_index()
        self.size = position
        self.checked.stored = min(self.checked.stored, position)
        self.index.cut(position)
        self.resume_index()
        self._max_timestamp = None if position else NO_TIME

    def resume_index(self) -> None:
        """Goes on indexing behind the last entry, when a log is appended to again."""
        self._indexed_to = self.index.entry(self.index.count - 1)[1] if self.index.count else 0

    def walk(self, position: int, limit: int, *, over_damage: bool = True) -> Iterator[tuple[int, BatchHeader]]:
        """Position and header of each batch from a batch's position on, while whole headers lie below `limit`.

        Passes over damage that is known, unless told not to, and raises `BrokenSegment` at damage that is not.
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

    def walk_from_time(self, timestamp: int, limit: int) -> Iterator[tuple[int, BatchHeader]]:
        """Like `walk`, from a batch on before which every record is older than `timestamp`, and not over damage."""
        return self.walk(self._indexed(self.index.by_time, timestamp)[1], limit, over_damage=False)

    def cut_at_batch(self, start: int, bytes_max: int, limit: int) -> tuple[int, int]:
        """Where to end a read of at most `bytes_max` from a batch on, and the offset to go on from.

        At least one batch is taken, however large, or a consumer could never get past it.
        """
        aim = start + bytes_max
        end, next_offset = start, self.base_offset
        for position, header in self.walk(max(start, self._indexed(self.index.by_position, aim)[1]), limit):
            if position > start and position + header.size > aim:
                # A batch that is not part of the read is not asked where the read ends, unless the index knows it.
                return position, next_offset if end == position else header.base_offset
            end, next_offset = position + header.size, header.next_offset
            if end > aim:
                break
        return end, next_offset


class Survey(NamedTuple):
    """What a look at every batch of a segment found."""

    entries: bytes
    """Of an index, as `index.py` has them."""
    size: int
    """How far it looked."""
    newest: int


class BrokenSegment(CorruptBatch):
    """Bytes where a batch header should be are not one. Costs the read that came upon them."""

    def __init__(self, path: str, position: int) -> None:
        super().__init__(f"{path} holds no batch at position {position}")
        self.path = path
        self.position = position


class Unindexed(Exception):
    """A segment has no index, and is too large to make one on the event loop."""

    def __init__(self, segment: Segment) -> None:
        super().__init__(f"{segment.path} has no index")
        self.segment = segment
