"""The sparse index of one segment, by offset and by time.

    offset  size  field
         0     4  base offset of a batch, relative to the segment's
         4     4  position of that batch in the segment file
         8     8  largest timestamp of all batches before it in the segment

There is one entry about every `index.interval.bytes`. All three fields only grow, so one bisection finds offset N, the
earliest batch for time T, or the batch that starts below position P. The file is memory-mapped and grows by doubling;
after the last entry it is zero.

Crash policy: an index holds nothing that the segment does not. Only entries below the log's last checkpoint, which
syncs them, are trusted; recovery writes the others again while it scans the tail. An entry of zeros means "from the
beginning", which is always true. If an entry does not point at the batch it names, the reader has the whole index
rebuilt. If the segment itself is damaged there, the entries after it tell where reading resumes.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator
from mmap import mmap
from struct import Struct

from millstream.core.disk import Disk, OpenFile

_ENTRY = Struct(">IIq")
ENTRY_BYTES = _ENTRY.size
_FIRST_CAPACITY = 256
NO_TIME = -1

Entry = tuple[int, int, int]
"""Relative offset, position, and largest timestamp before it."""
_BEGINNING: Entry = (0, 0, NO_TIME)


def pack(relative: int, position: int, timestamp: int) -> bytes:
    return _ENTRY.pack(relative, position, timestamp)


def entry_at(data: bytes, at: int) -> Entry:
    relative, position, timestamp = _ENTRY.unpack_from(data, at * ENTRY_BYTES)
    return relative, position, timestamp


def entries(data: bytes) -> Iterator[Entry]:
    """The entries of an index file. No entry has position 0, so zeros end the list."""
    for relative, position, timestamp in _ENTRY.iter_unpack(data[: len(data) // ENTRY_BYTES * ENTRY_BYTES]):
        if position == 0:
            return
        yield relative, position, timestamp


class Index:
    __slots__ = ("_capacity", "_disk", "_file", "_is_dirty", "_map", "count", "path")

    def __init__(self, disk: Disk, path: str) -> None:
        """An index whose file may exist already. The first use opens or creates the file."""
        self._disk = disk
        self.path = path
        self._file: OpenFile | None = None
        self._map: mmap | None = None
        self._capacity = 0
        self._is_dirty = False
        self.count = 0

    def load(self, size_max: int) -> bool:
        """Loads the entries below a position from disk; False if there is no usable file."""
        try:
            size = os.stat(self.path).st_size
        except FileNotFoundError:
            return False
        if size % ENTRY_BYTES or size == 0:
            return False
        self._open(size // ENTRY_BYTES)
        # Positions grow and are never 0, so zeros end the entries.
        low, high = 0, self._capacity
        while low < high:
            middle = (low + high) // 2
            if 0 < self.entry(middle)[1] < size_max:
                low = middle + 1
            else:
                high = middle
        self.count = low
        return True

    def entry(self, at: int) -> Entry:
        if self._map is None:
            self._open(self.count)
        relative, position, timestamp = _ENTRY.unpack_from(self._map, at * ENTRY_BYTES)  # type: ignore[arg-type]
        return relative, position, timestamp

    def reserve(self, more: int) -> None:
        """Makes room for `more` entries, so that a full disk fails here and not between two of them."""
        if self.count + more > self._capacity:
            self._open(max(_FIRST_CAPACITY, self.count * 2, self.count + more))

    def add(self, relative: int, position: int, timestamp: int) -> None:
        self.reserve(1)
        assert self._map is not None
        _ENTRY.pack_into(self._map, self.count * ENTRY_BYTES, relative, position, timestamp)
        self.count += 1
        self._is_dirty = True

    def by_offset(self, relative: int) -> Entry:
        """The last indexed batch at or before the one that holds a relative offset."""
        return self._last_at_most(0, relative)

    def by_position(self, position: int) -> Entry:
        """The last indexed batch that starts at or before a position."""
        return self._last_at_most(1, position)

    def by_time(self, timestamp: int) -> Entry:
        """The last indexed batch before which every record is older than `timestamp`."""
        return self._last_at_most(2, timestamp - 1)

    def _last_at_most(self, field: int, value: int) -> Entry:
        low, high = 0, self.count
        while low < high:
            middle = (low + high) // 2
            if self.entry(middle)[field] <= value:
                low = middle + 1
            else:
                high = middle
        return self.entry(low - 1) if low else _BEGINNING

    def to_bytes(self) -> bytes:
        """A copy of all entries for a thread: the index may close or grow while the thread reads."""
        if self._map is None and self.count:
            self._open(self.count)
        return self._map[: self.count * ENTRY_BYTES] if self._map is not None else b""

    def number_at(self, position: int) -> int:
        """The number of entries for batches that start at or before a position."""
        return bisect_right(range(self.count), position, key=lambda at: self.entry(at)[1])

    def replace(self, data: bytes, position: int) -> None:
        """Replaces all entries below a position."""
        data += b"".join(pack(*self.entry(at)) for at in range(self.number_at(position - 1), self.count))
        self.clear()
        if data:
            count = len(data) // ENTRY_BYTES
            self.reserve(count)
            assert self._map is not None
            self._map[: len(data)] = data
            self.count = count
            self._is_dirty = True

    def cut(self, position: int) -> None:
        """Drops the entries of batches that start at or after a position."""
        while self.count and self.entry(self.count - 1)[1] >= position:
            self.count -= 1
        self.close()

    def clear(self) -> None:
        self.count = 0
        if self._map is None and os.path.exists(self.path):
            self._open(1)
        self.close()

    def sync(self) -> None:
        """Makes the entries durable, even if the file was closed since."""
        if not self._is_dirty:
            return
        if self._map is not None and self._file is not None:
            self._disk.sync_map(self._file, self._map)
        else:
            self._disk.sync(self._disk.open(self.path, create=True))
        self._is_dirty = False

    def close(self) -> None:
        """Closes the file until the next use, truncated so that no stale bytes follow its entries."""
        if self._map is not None and self._file is not None:
            self._map.close()
            if self._capacity != self.count:
                self._disk.truncate(self._file, self.count * ENTRY_BYTES)
                self._is_dirty = True
        self._map = self._file = None
        self._capacity = 0

    def _open(self, capacity: int) -> None:
        if self._map is not None:
            self._map.close()
            self._map, self._capacity = None, 0  # on a full disk mapping may fail
        if self._file is None:
            self._file = self._disk.open(self.path, create=True)
        self._map = self._disk.map(self._file, capacity * ENTRY_BYTES)
        self._capacity = capacity
