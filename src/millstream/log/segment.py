"""One segment: a file of whole batches, and its index.

`00000000000000000042.log` holds the batches from offset 42 on, one after the other, exactly as producers sent them but for
the patched offset. Batches grow in offset; after compaction there may be gaps between them. Only the last segment of a log
is appended to, only by the event loop's thread. Reads below `size` need no coordination: bytes once written never change.

Crash policy: the bytes behind the last sync may be missing, torn, or there. Recovery walks them from the last checkpoint and
keeps the longest run of sound batches. Nothing before the checkpoint is looked at.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

from millstream.log.disk import Disk
from millstream.log.index import NO_TIME, Index
from millstream.log.slice import OpenFile
from millstream.records.batch import HEADER_BYTES, PREFIX_BYTES, BatchHeader, read_header

logger = logging.getLogger(__name__)

RELATIVE_OFFSET_MAX = 0x7FFF_FFFF
_CHUNK_BYTES = 16 * 1024


def file_name(base_offset: int) -> str:
    return f"{base_offset:020d}.log"


class Segment:
    __slots__ = ("_disk", "_file", "_indexed_to", "_max_timestamp", "base_offset", "index", "path", "size")

    def __init__(self, disk: Disk, directory: str, base_offset: int, size: int) -> None:
        self._disk = disk
        self.base_offset = base_offset
        self.path = os.path.join(directory, file_name(base_offset))
        self.size = size
        self.index = Index(disk, self.path[:-4] + ".index")
        self._file: OpenFile | None = None
        self._indexed_to = 0
        self._max_timestamp: int | None = NO_TIME if size == 0 else None

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

    def let_go(self) -> None:
        """Closes the descriptors until the next use. Readers that still send from the file keep their own hold."""
        self._file = None
        self.index.close()

    def append(
        self, batch: memoryview | bytes | bytearray, header: BatchHeader, base_offset: int, interval: int
    ) -> None:
        self._disk.append(self.file, batch)
        self.note(header, base_offset, len(batch), interval)

    def note(self, header: BatchHeader, base_offset: int, size: int, interval: int) -> None:
        """Takes a batch at the end of the file into the index and the books."""
        if self.size - self._indexed_to >= interval:
            self.index.add(base_offset - self.base_offset, self.size, self.max_timestamp)
            self._indexed_to = self.size
        self.size += size
        if header.max_timestamp > self.max_timestamp:
            self._max_timestamp = header.max_timestamp

    @property
    def max_timestamp(self) -> int:
        """The largest timestamp in the segment; after a restart found from the last index entry on."""
        if self._max_timestamp is None:
            self.load_index()
            newest, start = NO_TIME, 0
            if self.index.count:
                _, start, newest = self.index.entry(self.index.count - 1)
            for _, header in self.walk(start, self.size):
                newest = max(newest, header.max_timestamp)
            self._max_timestamp = newest
        return self._max_timestamp

    @property
    def first_timestamp(self) -> int:
        """When the first batch was made, or -1 in an empty segment."""
        for _, header in self.walk(0, min(self.size, HEADER_BYTES)):
            return header.max_timestamp
        return NO_TIME

    def load_index(self) -> None:
        """Has the index ready for lookups, rebuilt if the file is missing or does not fit."""
        if self.index.count or self.size == 0:
            return
        if not self.index.load(self.size):
            self.rebuild_index(4096)

    def rebuild_index(self, interval: int) -> None:
        self.index.clear()
        newest, indexed_to = NO_TIME, 0
        for position, header in self.walk(0, self.size):
            if position - indexed_to >= interval:
                self.index.add(header.base_offset - self.base_offset, position, newest)
                indexed_to = position
            newest = max(newest, header.max_timestamp)
        self._indexed_to = indexed_to
        self._max_timestamp = newest

    def resume_index(self) -> None:
        """Goes on indexing behind the last entry, when a log is appended to again."""
        self._indexed_to = self.index.entry(self.index.count - 1)[1] if self.index.count else 0

    def walk(self, position: int, limit: int) -> Iterator[tuple[int, BatchHeader]]:
        """Position and header of each batch from a batch's position on, while whole headers lie below `limit`."""
        if position >= limit:
            return
        fd = self.file.fd
        chunk, chunk_start = b"", position
        while position + HEADER_BYTES <= limit:
            at = position - chunk_start
            if at + HEADER_BYTES > len(chunk):
                chunk, chunk_start, at = os.pread(fd, _CHUNK_BYTES, position), position, 0
                if len(chunk) < HEADER_BYTES:
                    return
            header = read_header(chunk, at)
            if header.length < HEADER_BYTES - PREFIX_BYTES:
                raise BrokenSegment(self.path, position)
            yield position, header
            position += header.length + PREFIX_BYTES

    def locate(self, offset: int, limit: int) -> tuple[int, BatchHeader] | None:
        """The first batch below `limit` whose last offset is not before `offset`."""
        self.load_index()
        try:
            return self._locate_from(self.index.position_of(offset - self.base_offset), offset, limit)
        except BrokenSegment:
            logger.warning("rebuilding an index that does not fit its segment: %s", self.index.path)
            self.rebuild_index(4096)
            return self._locate_from(0, offset, limit)

    def _locate_from(self, start: int, offset: int, limit: int) -> tuple[int, BatchHeader] | None:
        for position, header in self.walk(start, limit):
            if header.magic != 2 or (position == start and start and header.base_offset > offset):
                raise BrokenSegment(self.path, position)
            if header.last_offset >= offset:
                return position, header
        return None

    def cut_at_batch(self, start: int, bytes_max: int, limit: int) -> tuple[int, int]:
        """Where to end a read of at most `bytes_max` from a batch on, and the offset to go on from.

        At least one batch is taken, however large, or a consumer could never get past it.
        """
        self.load_index()
        aim = start + bytes_max
        end, next_offset = start, self.base_offset
        for position, header in self.walk(max(start, self.index.position_below(aim)), limit):
            end, next_offset = position + header.size, header.next_offset
            if end > aim:
                return (end, next_offset) if position == start else (position, header.base_offset)
        return end, next_offset


class BrokenSegment(Exception):
    """Bytes where a batch header should be are not one."""

    def __init__(self, path: str, position: int) -> None:
        super().__init__(f"{path} holds no batch at position {position}")
